-- User columns hold what the sample's JSON says: on the metadata row, or item by item.
-- Holds without rows in: user_columns.
with
items as (
    select m.sample_id, e.modality, e.position, e.user_digest
    from json_entries as e
    join rows as m using (ordinal)
    where e.user_digest is not null
),

expected as (
    select
        r.ordinal,
        r.sample_id,
        r.position,
        r.modality,
        r.user_digest,
        coalesce(j.user_digest, i.user_digest) as expected_digest
    from rows_with_user as r
    left join sample_json as j using (ordinal)
    left join items as i using (sample_id, modality, position)
    where r.ordinal < (select ordinal from first_listed)
)

select ordinal as row_number, sample_id, position, modality
from expected
cross join (select count(*) as number from user_columns)
where number > 0 and user_digest is distinct from expected_digest
order by row_number
