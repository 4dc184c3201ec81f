-- A few samples, read, annotated and filtered again, give the same rows, columns of annotators and drops.
-- Holds without rows in: filter_mismatches.
select sample_id, position, modality, problem, recorded, expected
from filter_mismatches
order by sample_id, position, modality, problem
