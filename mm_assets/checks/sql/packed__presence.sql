-- A packed modality is present exactly where a row for it exists.
with
expected as (
    select distinct sample_id, modality
    from expected_items
)

select sample_id, modality, e.sample_id is not null as has_row, p.sample_id is not null as is_present
from expected as e
full join packed_presence as p using (sample_id, modality)
where e.sample_id is null or p.sample_id is null
order by sample_id, modality
