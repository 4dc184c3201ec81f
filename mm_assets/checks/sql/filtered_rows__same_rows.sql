-- The kept rows are the materialized rows without the dropped ones, unchanged and in order; positions are the same or count from 0 again.
with
-- Which row became which, by their numbers alone: everything else is looked up and not carried through sorts.
pairs as (
    select place, b.ordinal as ordinal_before, k.ordinal as ordinal_kept
    from (
        select m.ordinal, row_number() over (order by m.ordinal) - 1 as place
        from (select ordinal, sample_id, position, modality from materialized_rows) as m
        anti join dropped using (sample_id, position, modality)
    ) as b
    full join (select ordinal, ordinal as place from filtered_rows) as k using (place)
),

before as (
    select
        * exclude (source_ref, materialize_error),
        md5_number(source_ref) as source_ref_digest,
        md5_number(materialize_error) as error_digest
    from materialized_rows_with_texts_user_content
),

kept as (
    select
        * exclude (source_ref, materialize_error),
        md5_number(source_ref) as source_ref_digest,
        md5_number(materialize_error) as error_digest
    from filtered_rows_with_texts_user_content
),

-- Where positions are no longer those of before, they may count the sample's rows from 0.
renumbered as (
    select coalesce(bool_and(position = counted), false) as holds
    from (
        select
            k.position,
            case
                when b.modality = 'metadata' then -1
                else dense_rank() over (partition by b.sample_id, b.modality = 'metadata' order by b.position) - 1
            end as counted
        from pairs as p
        join (select ordinal, sample_id, position, modality from materialized_rows) as b on b.ordinal = p.ordinal_before
        join (select ordinal, position from filtered_rows) as k on k.ordinal = p.ordinal_kept
    )
),

compared as (
    select
        p.place,
        b.sample_id as expected_sample_id,
        k.sample_id,
        b.modality as expected_modality,
        k.modality,
        b.position as expected_position,
        k.position,
        k.source_ref_digest is distinct from b.source_ref_digest as source_ref_differs,
        k.text_content_digest is distinct from b.text_content_digest as text_differs,
        k.metadata_json_digest is distinct from b.metadata_json_digest as metadata_differs,
        k.user_digest is distinct from b.user_digest as user_columns_differ,
        k.content_type is distinct from coalesce(case when mode = 'write' then k.shown_type end, b.content_type)
        as type_differs,
        k.error_digest is distinct from b.error_digest
        and (mode = 'read' or b.error_digest is not null or b.modality in ('text', 'metadata')) as error_differs,
        mode = 'read'
        and (k.content_size is distinct from b.content_size or k.crc32c is distinct from b.crc32c) as content_differs
    from pairs as p
    left join before as b on b.ordinal = p.ordinal_before
    left join kept as k on k.ordinal = p.ordinal_kept
    cross join materialize_mode
)

select *
from compared
where
    sample_id is distinct from expected_sample_id
    or modality is distinct from expected_modality
    or (position is distinct from expected_position and not (select holds from renumbered))
    or source_ref_differs
    or text_differs
    or metadata_differs
    or user_columns_differ
    or type_differs
    or error_differs
    or content_differs
order by place
