-- A few ranges spread over a local shard, read again, hold the bytes that their rows hold.
-- Holds without rows in: own_rows_reread.
select sample_id, position, modality, source_ref, crc32c, shard_crc32c
from own_rows_reread
join own_rows using (ordinal)
where crc32c <> shard_crc32c
order by ordinal
