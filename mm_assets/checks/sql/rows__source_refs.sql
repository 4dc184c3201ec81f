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
            when p.problem is not null then p.problem
            when s.size is not null and p.member is null then 'a shard without a member'
            when s.size is not null and p.byte_offset + p.byte_size > s.size then 'a range past the end of the shard'
            when s.size is not null and m.member is null then 'a member that the shard does not have'
            when p.byte_size <> m.byte_size then 'a size that is not the member''s'
            when r.modality not in ('text', 'metadata') and p.path is null and r.materialize_error is null
                then 'a media row without a source and without an error'
        end as problem
    from rows as r
    left join rows_source_refs as p using (ordinal)
    left join shards as s on s.shard = p.path
    left join raw_shards as m
        on m.shard = p.path and m.member = p.member and m.byte_offset is not distinct from p.byte_offset
)
where problem is not null
order by ordinal
