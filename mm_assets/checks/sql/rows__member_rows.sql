-- The rows of a sample without lists are its members, in the shard's order, once and as their names say; of a PDF its pages.
with
interleaved as (
    select r.sample_id
    from rows as r
    join sample_json as j using (ordinal)
    where j.is_interleaved
),

counted as (
    select
        r.*,
        m.modality as expected_modality,
        m.content_type as expected_type,
        m.is_metadata,
        m.is_pdf,
        -- A PDF takes a position for each page, which a text may share with the page's image.
        coalesce(
            sum(case when m.is_pdf and r.modality = 'text' then 0 else 1 end) over (
                members range between unbounded preceding and current row exclude group
            ),
            0
        )
        + case when m.is_pdf then coalesce(r.frame_index, 0) else 0 end as expected_position,
        -- Rows up to the last that names the same member, less those before the first that does.
        count(*) over members - rank() over members + 1 as rows_of_member
    from rows_with_locators as r
    left join index_members as m
        on m.shard = r.path and m.member = r.member and m.byte_offset is not distinct from r.byte_offset
    where
        r.position >= 0
        and r.ordinal < (select ordinal from first_listed)
        and r.sample_id not in (select sample_id from interleaved)
    window members as (partition by r.sample_id order by m.shard, m.ordinal)
)

select
    ordinal as row_number,
    sample_id,
    position,
    expected_position,
    modality,
    expected_modality,
    content_type,
    expected_type,
    rows_of_member
from counted
where
    position is distinct from expected_position
    or (
        not coalesce(is_pdf, false)
        and (
            rows_of_member > 1
            or modality is distinct from expected_modality
            or content_type is distinct from expected_type
            or frame_index is not null
        )
    )
    or is_metadata
    or materialize_error is not null
order by row_number
