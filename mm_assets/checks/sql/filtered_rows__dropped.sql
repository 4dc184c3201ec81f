-- Every dropped row is one of the materialized rows, dropped by a declared filter, for a reason and a value that the filter can give.
-- Holds without rows in: dropped.
with
-- Samples that were dropped as a whole since an item could not be read.
given_up as (
    select sample_id
    from dropped
    where filter = 'materialize' and modality = 'metadata'
),

-- Whether declared filters alone dropped what an empty sample had.
emptied as (
    select sample_id, bool_and(filter not in ('materialize', 'packable', 'decodable', 'misaligned')) as by_filters
    from dropped
    where filter <> 'empty_sample'
    group by sample_id
),

failed as (
    select sample_id
    from materialized_rows
    where materialize_error is not null
),

judged as (
    select
        d.*,
        case
            when m.sample_id is null then 'no such row'
            when d.filter = '' or d.reason = '' then 'no filter or no reason'
            when k.filter is null and exists (from known_filters) then 'no such filter'
            when k.is_open then null
            when d.filter = 'materialize' and (
                d.reason <> 'materialize_error'
                or (
                    mode = 'read'
                    and m.materialize_error is null
                    and not (
                        d.sample_id in (select sample_id from given_up) and d.sample_id in (select sample_id from failed)
                    )
                )
            ) then 'its content was read'
            when d.filter = 'packable' and not regexp_full_match(
                d.reason, 'not_materialized|no_content|not_selected|sample_too_large|(unpackable|incomplete)_.+'
            ) then 'no such reason'
            when d.filter = 'packable' and d.reason = 'not_materialized' and mode = 'read' and m.materialize_error is null
                then 'its content was read'
            when d.filter = 'decodable' and d.reason <> 'undecodable' then 'no such reason'
            when d.filter = 'misaligned' and d.reason not in ('boxes', 'timestamps', 'durations', 'spans')
                then 'no such reason'
            when d.filter = 'empty_sample' and d.modality <> 'metadata' then 'its sample had content'
            when d.filter = 'empty_sample'
                and d.reason <> case when e.by_filters then 'all_filtered' else 'no_content_rows' end
                then 'another reason emptied its sample'
            when d.filter in ('materialize', 'packable', 'decodable', 'misaligned', 'empty_sample')
                and d.value is not null and exists (from known_filters) and d.reason <> 'sample_too_large' then 'no value decided'
            when d.filter in ('materialize', 'packable', 'decodable', 'misaligned', 'empty_sample') then null
            when exists (from known_filters) and not exists (
                from drop_reasons as r
                where
                    r.filter = d.filter
                    and r.reason = d.reason
                    and coalesce(case r.keeps when 'at_least' then d.value < r.bound when 'at_most' then d.value > r.bound end, r.keeps is null)
            ) then 'no such reason, or a value that is kept'
        end as problem
    from dropped as d
    left join materialized_rows as m using (sample_id, position, modality)
    left join known_filters as k using (filter)
    left join emptied as e on e.sample_id = d.sample_id
    cross join materialize_mode
)

select sample_id, position, modality, filter, reason, value, problem
from judged
where problem is not null
order by sample_id, position, modality
