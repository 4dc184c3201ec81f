-- Materializing changes content alone: the rows are those of the row table, in their order.
with
before as (
    select *
    from rows
    left join rows_texts using (ordinal)
),

after as (
    select *
    from materialized_rows
    left join materialized_rows_texts using (ordinal)
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
    a.text_content_digest is distinct from b.text_content_digest as text_differs,
    a.metadata_json_digest is distinct from b.metadata_json_digest as metadata_differs
from before as b
full join after as a using (ordinal)
where
    a.sample_id is distinct from b.sample_id
    or a.position is distinct from b.position
    or a.modality is distinct from b.modality
    or a.source_ref is distinct from b.source_ref
    or a.text_content_digest is distinct from b.text_content_digest
    or a.metadata_json_digest is distinct from b.metadata_json_digest
order by ordinal
