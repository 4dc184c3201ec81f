-- Each entry of a sample's lists is one row at its position with its text or image, or a reject, and no other row is there.
-- Holds without rows in: interleaved_json.
with
-- The samples that have lists, with the member of their JSON.
samples as (
    select j.ordinal, r.sample_id, j.frame_name, j.num_bad_texts, j.num_bad_lists, m.shard, m.sample_key, m.folder, m.member
    from interleaved_json as j
    join rows_with_texts_locators as r using (ordinal)
    join index_members as m on m.shard = r.path and m.member = r.member
),

-- A name is a member's, or that of one in the folder of the JSON.
named as (
    select e.*, coalesce(n.ordinal, b.ordinal) as named
    from json_entries as e
    join samples as s using (ordinal)
    left join index_members as n on n.shard = s.shard and n.name = e.token
    left join index_members as b on b.shard = s.shard and s.folder <> '' and b.name = s.folder || e.token
    where e.modality = 'image'
),

framed as (
    select s.ordinal, coalesce(n.ordinal, b.ordinal) as framed, t.tiff
    from samples as s
    left join index_members as n on n.shard = s.shard and n.name = s.frame_name
    left join index_members as b on b.shard = s.shard and s.folder <> '' and b.name = s.folder || s.frame_name
    left join (
        select shard, sample_key, case when count(*) = 1 then min(ordinal) end as tiff
        from index_members
        where role = '' and extension in ('tif', 'tiff')
        group by shard, sample_key
    ) as t on t.shard = s.shard and t.sample_key = s.sample_key
),

-- Tokens that name no member are frames: of the member that the JSON names, else of the sample's one TIFF.
used as (
    select
        n.*,
        s.shard,
        f.framed,
        f.framed is null and not bool_or(n.named is not null) over (partition by n.ordinal) as by_position,
        case
            when m.modality in ('image', 'binary') then n.named
            when n.named is not null or n.is_reference then null
            else coalesce(f.framed, case when not bool_or(n.named is not null) over (partition by n.ordinal) then f.tiff end)
        end as used
    from named as n
    join samples as s using (ordinal)
    join framed as f using (ordinal)
    left join index_members as m on m.shard = s.shard and m.ordinal = n.named
),

counted as (
    select
        u.*,
        m.member as used_member,
        m.content_type as used_type,
        m.extension in ('tif', 'tiff') as is_tiff,
        case
            when u.by_position then u.number
            else row_number() over (partition by u.ordinal, u.used order by u.position) - 1
        end as frame,
        count(u.named) over (partition by u.ordinal, u.used) as uses
    from used as u
    left join index_members as m on m.shard = u.shard and m.ordinal = u.used
),

expected as (
    select
        ordinal,
        'image' as modality,
        position,
        null as text_digest,
        case
            when named is null and not is_tiff and frame > 0 then null
            else used_member
        end as member,
        case
            when is_tiff and (named is null or used is not distinct from framed or uses > 1) then frame
        end as frame_index,
        case when named is null then url end as url,
        case
            when used is not null and not (named is null and not is_tiff and frame > 0) then used_type
            when named is null then url_type
        end as content_type
    from counted
    union all
    select e.ordinal, 'text', e.position, e.text_digest, s.member, null, null, 'text/plain'
    from json_entries as e
    join samples as s using (ordinal)
    where e.modality = 'text' and e.text_digest is not null
),

found as (
    select
        s.ordinal,
        r.modality,
        r.position,
        r.text_content_digest as text_digest,
        r.path,
        r.member,
        r.frame_index,
        r.content_type,
        r.materialize_error,
        r.ordinal as row_number,
        lag(r.modality) over (partition by s.ordinal, r.position order by r.ordinal) as modality_before
    from rows_with_texts_locators as r
    join samples as s using (sample_id)
    where r.position >= 0
),

compared as (
    select
        s.sample_id,
        position,
        modality,
        case
            when f.row_number is null then 'the entry has no row'
            when e.position is null then 'the row has no entry'
            when f.modality = 'text' and f.modality_before is not null then 'the text is after the image'
            when f.text_digest is distinct from e.text_digest then 'the text is another'
            when f.member is distinct from e.member then 'the member is another'
            when f.frame_index is distinct from e.frame_index then 'the frame is another'
            when e.url is not null and f.path is distinct from e.url then 'the reference is another'
            when e.url is null and f.path is distinct from (case when e.member is not null then s.shard end)
                then 'the shard is another'
            when f.content_type is distinct from e.content_type then 'the content type is another'
            when (f.materialize_error is null) <> (e.url is not null or e.member is not null)
                then 'an error without a reason, or none'
        end as problem
    from expected as e
    full join found as f using (ordinal, modality, position)
    join samples as s using (ordinal)
    union all
    select s.sample_id, null, null, 'entries that no row can hold are not as many rejects'
    from samples as s
    left join (
        select
            shard,
            sample_id,
            count(*) filter (where reason = 'text_not_a_string') as num_texts,
            count(*) filter (where reason = 'not_a_list') as num_lists
        from rejects
        where member is null and stage = 'rows'
        group by shard, sample_id
    ) as r using (shard, sample_id)
    where s.num_bad_texts <> coalesce(r.num_texts, 0) or s.num_bad_lists <> coalesce(r.num_lists, 0)
)

select *
from compared
where problem is not null
order by sample_id, position, modality, problem
