-- The rows of a sample are contiguous: the metadata row first, then the content by position.
select sample_id, position, modality, ordinal as row_number, previous_sample_id, previous_position
from (
    select
        *,
        lag(sample_id) over (order by ordinal) as previous_sample_id,
        lag(position) over (order by ordinal) as previous_position,
        row_number() over (partition by sample_id order by ordinal) as place
    from rows
)
where
    (place > 1 and (previous_sample_id <> sample_id or previous_position > position))
    or (place = 1 and modality <> 'metadata')
order by ordinal
