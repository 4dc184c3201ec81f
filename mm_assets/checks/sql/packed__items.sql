-- Each packed item is where its row belongs and, where its field stores bytes unchanged, has the row's size and CRC-32C.
select
    sample_id,
    modality,
    part,
    position,
    e.size as expected_size,
    p.size as packed_size,
    e.crc32c as expected_crc32c,
    p.crc32c as packed_crc32c,
    case
        when p.size is null then 'the row is not packed'
        when e.size is null then 'the item has no row'
        else 'the bytes differ'
    end as problem
from expected_items as e
full join packed_items as p using (sample_id, modality, part, position)
where
    p.size is null
    or e.size is null
    or (e.exact and (e.size <> p.size or e.crc32c <> p.crc32c))
order by sample_id, modality, part, position
