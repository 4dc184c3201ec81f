-- Every source_ref is well formed: text for path and member, a range that is whole and inside its shard, a frame from 0.
select sample_id, position, modality, source_ref, problem
from (
    select
        r.ordinal,
        r.sample_id,
        r.position,
        r.modality,
        r.source_ref,
        case
            when r.problem is not null then r.problem
            when s.size is not null and r.member is null then 'a shard without a member'
            when s.size is not null and r.byte_offset + r.byte_size > s.size then 'a range past the end of the shard'
            when s.size is not null and m.member is null then 'a member that the shard does not have'
            when r.byte_size <> m.byte_size then 'a size that is not the member''s'
            when r.modality not in ('text', 'metadata') and r.path is null and r.materialize_error is null
                then 'a media row without a source and without an error'
        end as problem
    from rows_with_locators as r
    left join shards as s on s.shard = r.path
    left join raw_shards as m
        on m.shard = r.path and m.member = r.member and m.byte_offset is not distinct from r.byte_offset
)
where problem is not null
order by ordinal
