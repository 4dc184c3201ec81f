-- Every member of the index is referenced by a row or named in the rejects, and nothing else is.
select
    shard,
    member,
    count(*) filter (where place = 'index') as in_index,
    count(distinct coalesce(byte_offset, -1)) filter (where place = 'rows') as referenced,
    count(*) filter (where place = 'rejects') as rejected
from (
    select shard, member, byte_offset, 'index' as place from raw_shards
    union all
    select path as shard, member, byte_offset, 'rows' as place from rows_source_refs
    union all
    select shard, member, null as byte_offset, 'rejects' as place from rejects where member is not null
)
where place = 'index' or shard in (select shard from shards)
group by shard, member
having in_index = 0 or in_index > referenced + rejected
order by shard, member
