-- The kept rows are the materialized ones without the dropped, unchanged and in order; positions stay or count from 0 again.
with
remaining as (
    select
        row_number() over (order by m.ordinal) as place,
        m.sample_id,
        m.position,
        m.modality,
        m.source_ref,
        md5(m.text_content) as text,
        md5(m.metadata_json) as json,
        case
            when m.modality = 'metadata' then -1
            else dense_rank() over (partition by m.sample_id, m.modality = 'metadata' order by m.position) - 1
        end as renumbered
    from materialized_rows as m
    anti join dropped using (sample_id, position, modality)
),

kept as (
    select
        row_number() over (order by ordinal) as place,
        sample_id,
        position,
        modality,
        source_ref,
        md5(text_content) as text,
        md5(metadata_json) as json
    from filtered_rows
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
        k.text is distinct from r.text as text_differs,
        k.json is distinct from r.json as metadata_differs
    from remaining as r
    full join kept as k using (place)
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
order by place
