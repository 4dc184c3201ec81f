-- Every media row has its bytes, as many as its source_ref says, or an error (neither yet with `materialize: write`), no other row has.
select c.sample_id, c.position, c.modality, c.content_size, c.source_size, r.materialize_error, r.source_ref
from materialized_rows_content as c
left join materialized_rows as r using (ordinal)
where
    (c.content_size is not null and c.modality in ('text', 'metadata'))
    or (c.content_size is not null and c.has_error)
    or c.content_size <> c.source_size
    or (
        c.content_size is null
        and not c.has_error
        and c.modality not in ('text', 'metadata')
        and (select mode from materialize_mode) = 'read'
    )
    or (c.content_size is not null and (select mode from materialize_mode) = 'write')
order by c.ordinal
