-- The packed samples are those of the filtered rows, in their order.
with
expected as (
    select row_number() over (order by min(ordinal)) - 1 as ordinal, sample_id
    from filtered_rows
    group by sample_id
)

select ordinal, e.sample_id as expected_sample_id, p.sample_id as packed_sample_id
from expected as e
full join packed_samples as p using (ordinal)
where e.sample_id is distinct from p.sample_id
order by ordinal
