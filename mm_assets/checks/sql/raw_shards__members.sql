-- The member index lists what a fresh walk over the shards' headers finds, entry by entry.
-- Holds if equal: raw_shards, shard_members.
select
    shard,
    ordinal,
    i.member as indexed_member,
    s.member as found_member,
    i.byte_offset as indexed_offset,
    s.byte_offset as found_offset,
    i.byte_size as indexed_size,
    s.byte_size as found_size,
    i.member_type as indexed_type,
    s.member_type as found_type,
    i.skip_reason as indexed_skip_reason,
    s.skip_reason as found_skip_reason,
    i.sample_key as indexed_key,
    s.sample_key as found_key,
    i.role as indexed_role,
    s.role as found_role,
    i.extension as indexed_extension,
    s.extension as found_extension
from raw_shards as i
full join shard_members as s using (shard, ordinal)
where
    i.member is distinct from s.member
    or i.byte_offset is distinct from s.byte_offset
    or i.byte_size is distinct from s.byte_size
    or i.member_type is distinct from s.member_type
    or i.skip_reason is distinct from s.skip_reason
    or i.sample_key is distinct from s.sample_key
    or i.role is distinct from s.role
    or i.extension is distinct from s.extension
order by shard, ordinal
