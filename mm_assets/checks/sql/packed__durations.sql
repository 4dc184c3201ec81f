-- The picture and the sound of a clip last equally long, to one frame of the picture.
select sample_id, modality, video_seconds, audio_seconds, frame_seconds
from packed_clips
where abs(video_seconds - audio_seconds) > frame_seconds + 1e-9  -- what is a frame exactly is not more than one
order by sample_id, modality
