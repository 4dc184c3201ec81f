-- The video and the audio of a clip have the same duration, to one video frame.
select sample_id, modality, video_seconds, audio_seconds, frame_seconds
from packed_clips
where abs(video_seconds - audio_seconds) > frame_seconds + 1e-9  -- a difference of exactly one frame is allowed
order by sample_id, modality
