-- The structs `source` and `source_member` say what source_ref says, and `source` has type and checksum of the bytes there.
with
described as (
    select
        *,
        -- A text is part of the bytes there, or decoded from them.
        uri is not null and is_stored and modality <> 'text' as has_content
    from own_rows_with_content_locators_sources
),

compared as (
    select
        *,
        case
            when uri is distinct from case
                when member is null or byte_offset is not null then path
                when ends_with(path, '/') and not starts_with(path, 'http') then path || member -- of a folder's file
            end then 'another uri'
            when file_offset is distinct from byte_offset then 'another offset'
            when file_size is distinct from case when uri is not null then byte_size end then 'another size'
            when has_inline then 'bytes in inline, expected in binary_content'
            when container is distinct from case when member is not null then path end then 'another container'
            when file_member is distinct from member then 'another member'
            when file_frame is distinct from frame_index then 'another frame'
            when file_type is distinct from case when has_content then content_type end then 'another content type'
            when has_content and file_size <> content_size then 'a size that is not that of binary_content'
            when checksum is distinct from case when has_content then format('CRC32C:{:08x}', crc32c) end
                then 'a checksum that is not that of binary_content'
        end as fault
    from described
)

select
    sample_id,
    position,
    modality,
    source_ref,
    uri,
    file_offset as "offset",
    file_size as size,
    file_type as content_type,
    checksum,
    content_size,
    fault
from compared
where fault is not null
order by ordinal
