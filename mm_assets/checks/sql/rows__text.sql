-- Only text rows have text and only metadata rows have sample JSON; a text row has its text or an error.
select
    sample_id,
    position,
    modality,
    text_content_digest is not null as has_text,
    metadata_json_digest is not null as has_metadata,
    materialize_error
from rows_with_texts
where
    (text_content_digest is not null and modality <> 'text')
    or (metadata_json_digest is not null and modality <> 'metadata')
    or (modality = 'text' and text_content_digest is null and materialize_error is null)
    or (materialize_error is not null and modality = 'metadata')
order by ordinal
