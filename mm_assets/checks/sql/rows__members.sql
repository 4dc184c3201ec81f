-- Every member of the index is either referenced by a row or named in the rejects, once, and nothing else is.
select
    shard,
    member,
    count(*) filter (where place = 'index') as in_index,
    count(distinct coalesce(byte_offset, -1)) filter (where place = 'rows') as referenced,
    count(*) filter (where place = 'rejects') as rejected,
    -- An interleaved sample may name a member of a sample whose id was taken.
    count(*) filter (where place = 'rejects' and reason = 'duplicate_sample_id') as duplicates
from (
    select shard, member, byte_offset, null as reason, 'index' as place from raw_shards
    union all
    select shard, null, null, null, 'index' from shards where shard not in (select shard from raw_shards)
    union all
    select path, member, byte_offset, null, 'rows' from rows_with_locators
    union all
    select shard, member, null, reason, 'rejects' from rejects where member is not null or reason = 'empty_shard'
)
where place = 'index' or shard in (select shard from shards)
group by shard, member
having
    in_index = 0
    or in_index > referenced + rejected
    or in_index < greatest(rejected, referenced + rejected - duplicates)
order by shard, member
