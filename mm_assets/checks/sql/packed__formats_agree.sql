-- MULT and MSTR hold the same samples in the same order with the same payload bytes, if both have been made.
-- Holds if equal: mult_payloads, mstr_payloads.
select
    ordinal,
    modality,
    t.sample_id as mult_sample_id,
    s.sample_id as mstr_sample_id,
    t.size as mult_size,
    s.size as mstr_size,
    t.crc32c as mult_crc32c,
    s.crc32c as mstr_crc32c
from mult_payloads as t
full join mstr_payloads as s using (ordinal, modality)
where
    (select count(*) from packed_formats) = 2
    and (
        t.sample_id is distinct from s.sample_id
        or t.size is distinct from s.size
        or t.crc32c is distinct from s.crc32c
    )
order by ordinal, modality
