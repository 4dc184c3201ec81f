-- Each sample's JSON, and the text of each text member, is what the member has in its local shard when read again.
select
    r.ordinal as row_number,
    r.sample_id,
    r.position,
    r.modality,
    m.member,
    m.text_digest is null as is_no_text
from rows as r
join rows_texts as t using (ordinal)
join rows_source_refs as s using (ordinal)
join index_members as m
    on m.shard = s.path and m.member = s.member and m.byte_offset is not distinct from s.byte_offset
where
    m.is_read
    and not m.is_pdf
    and r.ordinal < (select ordinal from first_listed)
    and (
        (r.modality = 'metadata' and t.metadata_json_digest is distinct from m.text_digest)
        or (r.modality = 'text' and not m.is_metadata and t.text_content_digest is distinct from m.text_digest)
    )
order by row_number
