-- Every media row that was kept has its bytes, as many as its source_ref says, or an error and not both; other rows have no bytes.
select c.sample_id, c.position, c.modality, c.content_size, c.source_size, r.materialize_error, r.source_ref
from filtered_rows_content as c
left join filtered_rows as r using (ordinal)
where
    (c.content_size is not null and c.modality in ('text', 'metadata'))
    or (c.content_size is not null and c.has_error)
    or c.content_size <> c.source_size
    or (c.content_size is null and not c.has_error and c.modality not in ('text', 'metadata'))
order by c.ordinal
