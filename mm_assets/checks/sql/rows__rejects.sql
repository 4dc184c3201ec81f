-- Each reject belongs to its sample, and has the stage that found it and the reason that its member gives when it is read again.
-- Holds without rows in: rejects.
with
interleaved as (
    select r.sample_id
    from rows as r
    join sample_json as j using (ordinal)
    where j.is_interleaved
),

-- The entries of each name: those that are no part of a sample, and those that an earlier member has the name of.
entries as (
    select
        i.shard,
        i.member,
        any_value(i.sample_key) as sample_key,
        list(split_part(i.skip_reason, ': ', 1)) filter (where i.skip_reason is not null) as skipped,
        count(*) filter (where i.skip_reason is null) - count(m.ordinal) as num_repeated,
        any_value(m.modality) as modality,
        coalesce(bool_or(m.is_metadata), false) as is_metadata,
        coalesce(bool_or(m.is_pdf), false) as is_pdf,
        any_value(m.text_fault) as text_fault
    from raw_shards as i
    left join index_members as m using (shard, ordinal)
    group by i.shard, i.member
),

named as (
    select
        r.*,
        e.* exclude (shard, member),
        coalesce(l.label || '/', '') || e.sample_key as default_id,
        r.reason in ('bad_json', 'json_not_an_object', 'too_many_items') as is_of_json,
        r.reason in ('not_utf8', 'too_large', 'bad_compression') as is_of_text,
        e.is_pdf and r.reason in ('bad_pdf', 'encrypted_pdf', 'pdf_too_large', 'too_large') as is_of_pdf,
        count(*) filter (where r.stage = 'index') over entry as num_of_index,
        count(*) filter (where r.reason = 'repeated_member') over entry as num_of_repeated,
        count(*) filter (where r.reason = 'duplicate_sample_id') over (partition by r.shard, e.sample_key) as num_of_sample
    from (select *, row_number() over () as row_number from rejects) as r
    join entries as e using (shard, member)
    left join shard_labels as l using (shard)
    window entry as (partition by r.shard, r.member)
),

known as (
    select distinct r.sample_id, m.shard, m.sample_key
    from rows_with_locators as r
    join index_members as m on m.shard = r.path and m.member = r.member
),

-- Members that a sample has itself, and does not only name in its lists.
owned as (
    select distinct r.path as shard, r.member
    from rows_with_locators as r
    where r.member is not null and (r.modality = 'metadata' or r.sample_id not in (select sample_id from interleaved))
),

sizes as (
    select shard, sample_key, count(*) as num_members
    from index_members
    group by shard, sample_key
),

judged as (
    select
        n.*,
        case
            when n.detail = '' then 'no detail'
            when n.stage not in ('index', 'rows') then 'an unknown stage'
            when n.stage = 'index' and (n.sample_id is not null or not coalesce(list_contains(n.skipped, n.reason), false))
                then 'not the reason of the index'
            when n.stage = 'index' and n.num_of_index <> len(n.skipped) then 'not as many as the index has'
            when n.stage = 'index' then null
            when n.reason = 'repeated_member' and (n.sample_id is not null or n.num_of_repeated <> n.num_repeated)
                then 'no earlier member has this name'
            when n.reason = 'repeated_member' then null
            when n.reason = 'duplicate_sample_id' and n.sample_id not in (select sample_id from rows)
                then 'no other sample has this id'
            when n.reason = 'duplicate_sample_id' and (n.shard, n.member) in (select (shard, member) from owned)
                then 'a row has this member'
            when n.reason = 'duplicate_sample_id' and n.num_of_sample <> z.num_members then 'not the whole sample'
            when n.reason = 'duplicate_sample_id' then null
            when n.reason = 'unreferenced_member' and n.sample_id is null and (
                n.modality not in ('image', 'binary')
                or (n.shard, n.sample_key) in (select (shard, sample_key) from index_members where is_metadata)
            ) then 'the sample is missing'
            when n.reason = 'unreferenced_member' and n.sample_id not in (select sample_id from interleaved)
                then 'its sample has no lists'
            when n.reason <> 'unreferenced_member' and n.sample_id is null then 'the sample is missing'
            when n.reason <> 'unreferenced_member' and not (n.is_of_json or n.is_of_text or n.is_of_pdf) then 'an unknown reason'
            when
                not n.is_of_pdf
                and (
                    (n.is_of_json and not n.is_metadata)
                    or (n.is_of_text and not n.is_metadata and n.modality <> 'text')
                )
                then 'its member is not read as such'
            when (n.is_of_json or n.is_of_text or n.is_of_pdf) and n.text_fault <> n.reason then 'its member gives another reason'
            when
                n.sample_id <> n.default_id
                and (n.sample_id, n.shard, n.sample_key) not in (select (sample_id, shard, sample_key) from known)
                then 'the sample is another'
        end as problem
    from named as n
    left join sizes as z using (shard, sample_key)
)

select row_number, shard, member, sample_id, stage, reason, skipped, text_fault, problem
from judged
where problem is not null
union all
select row_number, shard, null, sample_id, stage, reason, null, null, 'no such reject without a member'
from (select *, row_number() over () as row_number from rejects)
where
    member is null
    and shard in (select shard from shards)
    and not coalesce(
        (stage = 'index' and reason = 'empty_shard' and sample_id is null and detail <> '')
        or (
            stage = 'rows'
            and reason in ('text_not_a_string', 'not_a_list')
            and detail <> ''
            and sample_id in (select sample_id from interleaved)
        ),
        false
    )
order by row_number
