-- A sample has the id that its JSON or its member key gives, and its metadata row holds its JSON, if it has any.
with
sources as (
    select
        ordinal, sample_id, modality, content_type, path, member, metadata_json_digest is not null as has_json
    from rows_with_texts_locators as r
    where r.ordinal < (select ordinal from first_listed)
),

-- Tokens of an interleaved sample may name members of other keys.
of_members as (
    select r.*, j.is_interleaved, j.json_id, m.shard, m.sample_key, m.is_metadata, m.content_type as member_type
    from sources as r
    left join sample_json as j using (ordinal)
    left join index_members as m on m.shard = r.path and m.member = r.member
),

ids as (
    select
        shard,
        sample_key,
        any_value(json_id) as json_id,
        coalesce(any_value(l.label) || '/', '') || sample_key as default_id
    from of_members
    left join shard_labels as l using (shard)
    where shard is not null
    group by shard, sample_key
),

interleaved as (
    select sample_id
    from of_members
    where is_interleaved
)

select ordinal as row_number, sample_id, modality, expected_id, has_json, member
from (
    select r.*, coalesce(i.json_id, i.default_id) as expected_id
    from of_members as r
    left join ids as i using (shard, sample_key)
) as r
where
    (
        sample_id is distinct from expected_id
        and (modality = 'metadata' or sample_id not in (select sample_id from interleaved))
        and (shard is not null or sample_id not in (select sample_id from of_members where modality <> 'metadata'))
    )
    or (modality = 'metadata' and has_json <> (member is not null))
    or (modality = 'metadata' and content_type is distinct from (case when has_json then member_type end))
    or (modality = 'metadata' and not is_metadata)
order by row_number
