-- No item is given up with an error that its local shard or file does not give when it is read again.
-- Holds without rows in: readable_items.
select sample_id, position, modality, source_ref, materialize_error
from readable_items
order by sample_id, position, modality
