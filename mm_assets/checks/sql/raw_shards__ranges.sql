-- Every member's byte range lies inside its shard, and the members of a shard are in order, numbered from 0 without gaps.
select
    i.shard,
    i.ordinal,
    i.member,
    i.byte_offset,
    i.byte_size,
    s.size as shard_size,
    i.place as expected_ordinal
from (
    select *, row_number() over (partition by shard order by row_number) - 1 as place
    from (select *, row_number() over () as row_number from raw_shards)
) as i
left join shards as s using (shard)
where
    s.size is null
    or i.byte_size < 0
    or i.byte_offset < 0
    or i.byte_offset + i.byte_size > s.size
    or i.ordinal <> i.place
order by i.shard, i.ordinal
