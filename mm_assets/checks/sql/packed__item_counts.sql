-- Every content row of the filtered rows is packed as one item, and every sample's JSON once.
select
    sample_id,
    count_if(is_row and is_content) as content_rows,
    count_if(not is_row and is_content) as content_items,
    count_if(is_row and is_metadata) as metadata_rows,
    count_if(not is_row and is_metadata) as metadata_items
from (
    select
        sample_id,
        true as is_row,
        position >= 0 as is_content,
        metadata_json_digest is not null as is_metadata
    from filtered_rows_with_texts
    union all
    select sample_id, false as is_row, kind = 'content' as is_content, kind = 'metadata' as is_metadata
    from packed_items
)
group by sample_id
having
    content_rows <> content_items
    or (metadata_rows <> metadata_items and exists (from expected_metadata))
order by sample_id
