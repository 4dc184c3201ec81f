-- Every sample has exactly one metadata row, at position -1, and no other row is there.
select
    sample_id,
    count(*) as num_rows,
    count(*) filter (where modality = 'metadata') as num_metadata_rows,
    count(*) filter (where position = -1) as num_at_minus_one
from own_rows
group by sample_id
having
    count(*) filter (where modality = 'metadata') <> 1
    or count(*) filter (where position = -1) <> 1
    or count(*) filter (where modality = 'metadata' and position = -1) <> 1
order by sample_id
