-- Every undecodable item is a media row that was dropped or kept as `on_undecodable` says, and no other row was dropped for that reason.
-- Holds without rows in: undecodable, dropped.
with
items as (
    select u.*, m.modality as row_modality, m.source_ref as row_source_ref, p.policy
    from undecodable as u
    cross join on_undecodable as p
    left join (select sample_id, position, modality, source_ref from materialized_rows) as m
        using (sample_id, position, modality)
),

media as (
    select * from items where reason = 'undecodable'
),

losses as (
    select sample_id, position, modality, filter from dropped
)

select 'is not a media row' as problem, sample_id, position, modality, action, detail
from items
where row_modality is null or source_ref is distinct from row_source_ref
    or (reason = 'undecodable' and modality in ('text', 'metadata'))
union all
select 'has no detail or field, or another reason', sample_id, position, modality, action, detail
from items
where reason not in ('undecodable', 'refused', 'omitted') or detail = '' or field = ''
union all
select 'is listed more than once', sample_id, position, modality, min(action), min(detail)
from items
group by sample_id, position, modality, reason, case when reason <> 'undecodable' then field end
having count(*) > 1
union all
select 'is not treated by the policy', sample_id, position, modality, action, detail
from items
where action <> (case when reason = 'undecodable' then policy else 'keep' end)
    or action not in ('drop_row', 'drop_sample', 'keep')
union all
select 'should have been dropped', i.sample_id, i.position, i.modality, i.action, i.detail
from media as i
anti join (select sample_id, position, modality from losses where filter = 'decodable')
    using (sample_id, position, modality)
where i.action = 'drop_row'
union all
select 'should have been dropped with its sample', m.sample_id, m.position, m.modality, 'drop_sample', null
from materialized_rows as m
semi join (select sample_id from media where action = 'drop_sample') using (sample_id)
anti join losses using (sample_id, position, modality)
union all
select 'was dropped without an undecodable item', l.sample_id, l.position, l.modality, p.policy, null
from losses as l
cross join on_undecodable as p
left join (select distinct sample_id, position, modality, action from media) as i
    on i.sample_id = l.sample_id
    and (i.action = 'drop_sample' or (i.action = 'drop_row' and i.position = l.position and i.modality = l.modality))
where l.filter = 'decodable' and i.sample_id is null
order by sample_id, position, modality, problem
