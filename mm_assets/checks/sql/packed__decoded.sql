-- Payloads are what their fields make of the rows, or decode to that; of judged media the first and last decode.
select sample_id, modality, part, position, detail
from decoded_mismatches
order by sample_id, modality, part, position
