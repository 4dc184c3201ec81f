-- The rows and rejects of lists of files are those that the lists give when they are read again.
-- Holds without rows in: listed_rows, listed_digests, listed_rejects, rejects.
with
found_rejects as (
    select *
    from rejects
    where shard not in (select shard from shards)
)

select
    ordinal as row_number,
    r.sample_id,
    r.position,
    r.modality,
    null as detail,
    case
        when e.ordinal is null then 'the lists give no such row'
        when f.ordinal is null then 'the row is missing'
        else 'the row is another'
    end as problem
from listed_rows as e
full join listed_digests as f using (ordinal)
left join rows as r using (ordinal)
where e.row_digest is distinct from f.row_digest
union all
select null, sample_id, null, null, detail, 'the lists give no such reject'
from (select * from found_rejects except all select * from listed_rejects)
union all
select null, sample_id, null, null, detail, 'the reject is missing'
from (select * from listed_rejects except all select * from found_rejects)
order by row_number, sample_id, detail, problem
