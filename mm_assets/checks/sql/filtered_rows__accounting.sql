-- Every materialized row is kept or dropped: the counts of each sample and modality add up, and nothing is dropped twice.
with
before as (
    select sample_id, modality, count(*) as num_before
    from materialized_rows
    group by sample_id, modality
),

kept as (
    select sample_id, modality, count(*) as num_kept
    from filtered_rows
    group by sample_id, modality
),

gone as (
    select sample_id, modality, count(*) as num_dropped, count(distinct position) as num_dropped_once
    from dropped
    group by sample_id, modality
)

select
    sample_id,
    modality,
    coalesce(num_before, 0) as materialized,
    coalesce(num_kept, 0) as kept,
    coalesce(num_dropped, 0) as dropped,
    coalesce(num_dropped_once, 0) as dropped_once
from before
full join kept using (sample_id, modality)
full join gone using (sample_id, modality)
where
    coalesce(num_before, 0) <> coalesce(num_kept, 0) + coalesce(num_dropped, 0)
    or coalesce(num_dropped, 0) <> coalesce(num_dropped_once, 0)
order by sample_id, modality
