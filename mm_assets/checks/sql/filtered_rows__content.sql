-- Every media row that was kept has its bytes, as many as its source_ref says, or an error and not both; other rows have no bytes.
select sample_id, position, modality, content_size, source_size, materialize_error, source_ref
from filtered_rows_with_content
where
    (content_size is not null and modality in ('text', 'metadata'))
    or (content_size is not null and materialize_error is not null)
    or content_size <> source_size
    or (content_size is null and materialize_error is null and modality not in ('text', 'metadata'))
order by ordinal
