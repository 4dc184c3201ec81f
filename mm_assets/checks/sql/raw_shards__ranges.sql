-- Every member's byte range lies inside its shard; shards are in order, and so are the members of each, numbered from 0 without gaps.
select shard, ordinal, member, byte_offset, byte_size, shard_size, expected_ordinal, previous_shard
from (
    select
        i.*,
        s.size as shard_size,
        s.place as shard_place,
        row_number() over (partition by i.shard order by i.row_number) - 1 as expected_ordinal,
        lag(i.shard) over (order by i.row_number) as previous_shard,
        lag(s.place) over (order by i.row_number) as previous_place
    from (select *, row_number() over () as row_number from raw_shards) as i
    left join shards as s using (shard)
)
where
    shard_size is null
    or byte_size < 0
    or byte_offset < 0
    or byte_offset + byte_size > shard_size
    or ordinal <> expected_ordinal
    or previous_place > shard_place
order by shard, ordinal
