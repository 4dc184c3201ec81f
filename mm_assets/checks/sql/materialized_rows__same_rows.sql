-- Materializing changes content, its type and its error alone: the rows are those of the row table, in their order.
select
    ordinal as row_number,
    b.sample_id as row_sample_id,
    b.position as row_position,
    b.modality as row_modality,
    a.sample_id,
    a.position,
    a.modality,
    a.source_ref is distinct from b.source_ref as source_ref_differs,
    a.text_content_digest is distinct from b.text_content_digest as text_differs,
    a.metadata_json_digest is distinct from b.metadata_json_digest as metadata_differs,
    a.user_digest is distinct from b.user_digest as user_columns_differ,
    b.content_type as row_content_type,
    a.content_type,
    a.shown_type,
    b.materialize_error as row_error,
    a.materialize_error
from rows_with_texts_user as b
full join materialized_rows_with_texts_user_content as a using (ordinal)
cross join materialize_mode
where
    a.sample_id is distinct from b.sample_id
    or a.position is distinct from b.position
    or a.modality is distinct from b.modality
    or a.source_ref is distinct from b.source_ref
    or a.text_content_digest is distinct from b.text_content_digest
    or a.metadata_json_digest is distinct from b.metadata_json_digest
    or a.user_digest is distinct from b.user_digest
    or a.content_type is distinct from coalesce(a.shown_type, b.content_type)
    or (
        a.materialize_error is distinct from b.materialize_error
        and (mode = 'write' or b.materialize_error is not null or b.modality in ('text', 'metadata'))
    )
order by ordinal
