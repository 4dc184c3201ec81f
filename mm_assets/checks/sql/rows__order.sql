-- Samples are in the order of the partition's shards and, within a shard, in that of their first members.
with
-- The first member of a sample that its rows name is its own: an interleaved sample names its JSON first.
own as (
    select
        r.sample_id,
        min(r.ordinal) as row_number,
        arg_min(m.shard, r.ordinal) as shard,
        arg_min(m.sample_key, r.ordinal) as sample_key
    from rows_with_locators as r
    join index_members as m
        on m.shard = r.path and m.member = r.member and m.byte_offset is not distinct from r.byte_offset
    where r.ordinal < (select ordinal from first_listed)
    group by r.sample_id
),

placed as (
    select
        o.*,
        s.place,
        f.first_member,
        lag(o.sample_id) over after_others as previous_sample_id,
        lag(s.place) over after_others as previous_place,
        lag(f.first_member) over after_others as previous_member
    from own as o
    join shards as s using (shard)
    join (
        select shard, sample_key, min(ordinal) as first_member
        from index_members
        group by shard, sample_key
    ) as f using (shard, sample_key)
    window after_others as (order by o.row_number)
)

select row_number, sample_id, shard, first_member, previous_sample_id, previous_member
from placed
where previous_place > place or (previous_place = place and previous_member >= first_member)
order by row_number
