-- Each sample's JSON, and the text of each text member, is what the member has in its local shard when read again.
select
    r.ordinal as row_number,
    r.sample_id,
    r.position,
    r.modality,
    m.member,
    m.text_digest is null as is_no_text
from rows_with_texts_locators as r
join index_members as m
    on m.shard = r.path and m.member = r.member and m.byte_offset is not distinct from r.byte_offset
where
    m.is_read
    and not m.is_pdf
    and r.ordinal < (select ordinal from first_listed)
    and (
        (r.modality = 'metadata' and r.metadata_json_digest is distinct from m.text_digest)
        or (r.modality = 'text' and not m.is_metadata and r.text_content_digest is distinct from m.text_digest)
    )
order by row_number
