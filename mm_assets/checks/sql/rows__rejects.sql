-- Each reject of a member is of its sample, with the stage that found it and, for what is not part of a sample, its reason.
-- Holds without rows in: rejects.
with
named as (
    select
        r.*,
        i.skip_reason,
        i.sample_key,
        coalesce(l.label || '/', '') || i.sample_key as default_id
    from (select *, row_number() over () as row_number from rejects) as r
    join (
        select shard, member, any_value(skip_reason) as skip_reason, any_value(sample_key) as sample_key
        from raw_shards
        group by shard, member
    ) as i using (shard, member)
    left join shard_labels as l using (shard)
),

known as (
    select distinct r.sample_id, m.shard, m.sample_key
    from rows as r
    join rows_source_refs as s using (ordinal)
    join index_members as m on m.shard = s.path and m.member = s.member
)

select n.row_number, n.shard, n.member, n.sample_id, n.stage, n.reason, n.skip_reason
from named as n
where
    n.detail = ''
    or (
        n.skip_reason is not null
        and (n.stage <> 'index' or n.reason <> split_part(n.skip_reason, ': ', 1) or n.sample_id is not null)
    )
    or (n.skip_reason is null and n.stage <> 'rows')
    or (
        n.skip_reason is null
        and n.sample_id is null
        and n.reason <> 'repeated_member'
        and (
            n.reason <> 'unreferenced_member'
            or (n.shard, n.sample_key) in (select (shard, sample_key) from index_members where is_metadata)
        )
    )
    or (n.reason = 'repeated_member' and n.sample_id is not null)
    or (n.reason = 'duplicate_sample_id' and n.sample_id not in (select sample_id from rows))
    or (
        n.reason <> 'duplicate_sample_id'
        and n.sample_id <> n.default_id
        and (n.sample_id, n.shard, n.sample_key) not in (select (sample_id, shard, sample_key) from known)
    )
order by n.row_number
