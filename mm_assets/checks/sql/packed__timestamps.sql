-- The timestamps of a series increase from step to step.
select sample_id, modality, step, previous_seconds, seconds
from packed_steps
where not (seconds > previous_seconds or (may_be_equal and seconds = previous_seconds))
order by sample_id, modality, step
