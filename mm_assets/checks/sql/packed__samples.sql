-- The packed samples are those of the filtered rows, in their order.
-- Holds if equal: expected_samples, packed_samples.
select ordinal, e.sample_id as expected_sample_id, p.sample_id as packed_sample_id
from expected_samples as e
full join packed_samples as p using (ordinal)
where e.sample_id is distinct from p.sample_id
order by ordinal
