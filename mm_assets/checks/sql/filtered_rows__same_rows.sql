-- The kept rows are the materialized ones without the dropped, unchanged and in order; positions stay or count from 0 again.
with
remaining as (
    select
        row_number() over (order by m.ordinal) as place,
        m.sample_id,
        m.position,
        m.modality,
        m.source_ref,
        t.text_content_digest,
        t.metadata_json_digest,
        c.content_size,
        c.crc32c,
        case
            when m.modality = 'metadata' then -1
            else dense_rank() over (partition by m.sample_id, m.modality = 'metadata' order by m.position) - 1
        end as renumbered
    from materialized_rows as m
    anti join dropped using (sample_id, position, modality)
    left join materialized_texts as t using (ordinal)
    left join materialized_content as c using (ordinal)
),

kept as (
    select
        row_number() over (order by f.ordinal) as place,
        f.sample_id,
        f.position,
        f.modality,
        f.source_ref,
        t.text_content_digest,
        t.metadata_json_digest,
        c.content_size,
        c.crc32c
    from filtered_rows as f
    left join filtered_texts as t using (ordinal)
    left join filtered_content as c using (ordinal)
),

compared as (
    select
        place,
        r.sample_id as expected_sample_id,
        k.sample_id,
        r.modality as expected_modality,
        k.modality,
        r.position as expected_position,
        k.position,
        r.renumbered,
        k.source_ref is distinct from r.source_ref as source_ref_differs,
        k.text_content_digest is distinct from r.text_content_digest as text_differs,
        k.metadata_json_digest is distinct from r.metadata_json_digest as metadata_differs,
        mode = 'read'
        and (k.content_size is distinct from r.content_size or k.crc32c is distinct from r.crc32c) as content_differs
    from remaining as r
    full join kept as k using (place)
    cross join materialize_mode
)

select * exclude (all_renumbered)
from (select *, coalesce(bool_and(position = renumbered) over (), false) as all_renumbered from compared)
where
    sample_id is distinct from expected_sample_id
    or modality is distinct from expected_modality
    or (position is distinct from expected_position and not all_renumbered)
    or source_ref_differs
    or text_differs
    or metadata_differs
    or content_differs
order by place
