-- Frames of TIFFs, and some pages of PDFs and other items, have the bytes that their local shard gives when they are read again.
-- Holds without rows in: own_rows_reread.
select sample_id, position, modality, source_ref, crc32c, shard_crc32c
from own_rows_reread
join own_rows using (ordinal)
where crc32c is distinct from shard_crc32c
order by ordinal
