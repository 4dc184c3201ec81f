-- Every content row of the filtered rows is packed as one item, and every sample's JSON once.
with
rows_of as (
    select
        sample_id,
        count(*) filter (where position >= 0) as num_content_rows,
        count(*) filter (where metadata_json_digest is not null) as num_metadata
    from filtered_rows
    left join filtered_rows_texts using (ordinal)
    group by sample_id
),

items_of as (
    select
        sample_id,
        count(*) filter (where kind = 'content') as num_content_items,
        count(*) filter (where kind = 'metadata') as num_metadata_items
    from packed_items
    group by sample_id
)

select
    sample_id,
    coalesce(num_content_rows, 0) as content_rows,
    coalesce(num_content_items, 0) as content_items,
    coalesce(num_metadata, 0) as metadata_rows,
    coalesce(num_metadata_items, 0) as metadata_items
from rows_of
full join items_of using (sample_id)
where
    coalesce(num_content_rows, 0) <> coalesce(num_content_items, 0)
    or (
        coalesce(num_metadata, 0) <> coalesce(num_metadata_items, 0)
        and (select count(*) from expected_modalities where kind = 'metadata') > 0
    )
order by sample_id
