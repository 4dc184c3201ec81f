-- The packed file is intact: every checksum, count and pointer in it holds.
select sample_id, modality, message
from packed_damage
order by sample_id, modality, message
