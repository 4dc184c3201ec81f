-- Every member of the index is referenced by a row or named in the rejects, and nothing else is.
with
found as (
    select shard, member, count(*) as num_members
    from raw_shards
    group by shard, member
),

referenced as (
    select path as shard, member, count(distinct coalesce(byte_offset, -1)) as num_referenced
    from rows_source_refs
    where path in (select shard from shards)
    group by path, member
),

rejected as (
    select shard, member, count(*) as num_rejected
    from rejects
    where member is not null and shard in (select shard from shards)
    group by shard, member
)

select
    shard,
    member,
    coalesce(num_members, 0) as in_index,
    coalesce(num_referenced, 0) as referenced,
    coalesce(num_rejected, 0) as rejected
from found
full join referenced using (shard, member)
full join rejected using (shard, member)
where
    coalesce(num_members, 0) = 0
    or coalesce(num_members, 0) > coalesce(num_referenced, 0) + coalesce(num_rejected, 0)
order by shard, member
