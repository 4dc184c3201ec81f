-- The rows of a PDF are its pages, each once, with the words that its text layer has when it is read again.
-- Holds without rows in: pdf_pages.
with
interleaved as (
    select r.sample_id
    from rows as r
    join sample_json as j using (ordinal)
    where j.is_interleaved
),

-- The lists of an interleaved sample may name a PDF as a whole.
found as (
    select
        r.ordinal as row_number,
        r.sample_id,
        r.modality,
        r.content_type,
        r.frame_index,
        r.text_content_digest as text_digest,
        m.shard,
        m.ordinal
    from rows_with_texts_locators as r
    join index_members as m
        on m.shard = r.path and m.member = r.member and m.byte_offset is not distinct from r.byte_offset
    where m.is_pdf and m.is_read and r.position >= 0 and r.sample_id not in (select sample_id from interleaved)
),

-- Another rule says which members have rows.
of_found as (
    select *
    from pdf_pages
    where modality is not null and (shard, ordinal) in (select (shard, ordinal) from found)
)

select
    f.row_number,
    f.sample_id,
    coalesce(f.modality, e.modality) as modality,
    coalesce(f.frame_index, e.frame_index) as page,
    case
        when f.row_number is null then 'the row is missing'
        when e.ordinal is null then 'the PDF gives no such row'
        when f.text_digest is distinct from e.text_digest then 'the text is another'
        else 'the content type is another'
    end as problem
from of_found as e
full join found as f
    on
        f.shard = e.shard
        and f.ordinal = e.ordinal
        and f.modality = e.modality
        and f.frame_index is not distinct from e.frame_index
where
    f.row_number is null
    or e.ordinal is null
    or f.text_digest is distinct from e.text_digest
    or f.content_type is distinct from e.content_type
order by row_number, page, modality
