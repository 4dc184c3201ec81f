-- Materializing changes content alone: the rows are those of the row table, in their order.
with
before as (
    select ordinal, sample_id, position, modality, source_ref, md5(text_content) as text, md5(metadata_json) as json
    from rows
),

after as (
    select ordinal, sample_id, position, modality, source_ref, md5(text_content) as text, md5(metadata_json) as json
    from materialized_rows
)

select
    ordinal as row_number,
    b.sample_id as row_sample_id,
    b.position as row_position,
    b.modality as row_modality,
    a.sample_id,
    a.position,
    a.modality,
    a.source_ref is distinct from b.source_ref as source_ref_differs,
    a.text is distinct from b.text as text_differs,
    a.json is distinct from b.json as metadata_differs
from before as b
full join after as a using (ordinal)
where
    a.sample_id is distinct from b.sample_id
    or a.position is distinct from b.position
    or a.modality is distinct from b.modality
    or a.source_ref is distinct from b.source_ref
    or a.text is distinct from b.text
    or a.json is distinct from b.json
order by ordinal
