-- User columns hold what the sample's JSON says: on the metadata row, or item by item.
-- Holds without rows in: rows_user.
with
items as (
    select m.sample_id, e.modality, e.position, e.user_digest
    from json_entries as e
    join rows as m using (ordinal)
    where e.user_digest is not null
),

expected as (
    select r.ordinal, r.sample_id, r.position, r.modality, coalesce(j.user_digest, i.user_digest) as user_digest
    from rows as r
    left join sample_json as j using (ordinal)
    left join items as i using (sample_id, modality, position)
    where r.ordinal < (select ordinal from first_listed)
)

select ordinal as row_number, e.sample_id, e.position, e.modality
from expected as e
join rows_user as f using (ordinal)
where f.user_digest is distinct from e.user_digest
order by row_number
