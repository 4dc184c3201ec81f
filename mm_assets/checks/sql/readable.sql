-- No item has an error that reading its local shard or file again does not give.
-- Holds without rows in: readable_items.
select sample_id, position, modality, source_ref, materialize_error
from readable_items
order by sample_id, position, modality
