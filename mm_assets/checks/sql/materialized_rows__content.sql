-- Every media row has its bytes, as many as its source_ref says, or an error (neither yet with `materialize: write`); no other row has any.
select sample_id, position, modality, content_size, source_size, materialize_error, source_ref
from materialized_rows_with_content
cross join materialize_mode
where
    (content_size is not null and (modality in ('text', 'metadata') or materialize_error is not null or mode = 'write'))
    or content_size <> source_size
    or (content_size is null and materialize_error is null and modality not in ('text', 'metadata') and mode = 'read')
order by ordinal
