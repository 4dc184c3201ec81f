-- Where a field re-encodes, a subset of its items decodes to what its row's bytes give; of judged media the first and last decode.
select sample_id, modality, part, position, detail
from decoded_mismatches
order by sample_id, modality, part, position
