-- Notes, timed texts and series lie within the sound or clip of their sample, to 50 ms or one frame.
with
media as (
    select sample_id, max(seconds) as medium_seconds, max(tolerance_seconds) as tolerance_seconds
    from packed_media
    group by sample_id
)

select sample_id, modality, kind, item, start_seconds, end_seconds, medium_seconds
from packed_spans
join media using (sample_id)
where start_seconds < -tolerance_seconds - 1e-9 or end_seconds > medium_seconds + tolerance_seconds + 1e-9
order by sample_id, modality, item
