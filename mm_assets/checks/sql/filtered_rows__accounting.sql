-- Every materialized row is kept or dropped: the counts of each sample and modality add up, and nothing is dropped twice.
select
    sample_id,
    modality,
    count(*) filter (where place = 'before') as materialized,
    count(*) filter (where place = 'after') as kept,
    count(*) filter (where place = 'dropped') as dropped,
    count(distinct position) filter (where place = 'dropped') as dropped_once
from (
    select sample_id, modality, position, 'before' as place from materialized_rows
    union all
    select sample_id, modality, position, 'after' as place from filtered_rows
    union all
    select sample_id, modality, position, 'dropped' as place from dropped
)
group by sample_id, modality
having materialized <> kept + dropped or dropped <> dropped_once
order by sample_id, modality
