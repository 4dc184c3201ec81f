-- Where the plan lists the rows of a sample, the list names every content row as it is, in order, and where it is packed.
-- Holds without rows in: expected_listings.
with
content as (
    select
        sample_id,
        row_number() over (partition by sample_id order by ordinal) - 1 as place,
        position,
        modality,
        content_type
    from filtered_rows
    where position >= 0
)

select
    sample_id,
    place,
    c.position as row_position,
    l.position as listed_position,
    c.modality as row_modality,
    l.modality as listed_modality,
    c.content_type as row_content_type,
    l.content_type as listed_content_type,
    l.packed_in
from content as c
full join packed_listing as l using (sample_id, place)
left join packed_presence as p on p.sample_id = l.sample_id and p.modality = l.packed_in
where
    exists (from expected_listings)
    and (
        c.position is distinct from l.position
        or c.modality is distinct from l.modality
        or c.content_type is distinct from l.content_type
        or p.modality is null
    )
order by sample_id, place
