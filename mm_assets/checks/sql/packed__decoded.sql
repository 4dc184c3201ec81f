-- Where a field re-encodes, a subset of its items decodes to what its row's own bytes give.
select sample_id, modality, part, position, detail
from decoded_mismatches
order by sample_id, modality, part, position
