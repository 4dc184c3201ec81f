-- The video and the audio of a clip have the same duration, to one video frame or less than 50 ms.
select sample_id, modality, video_seconds, audio_seconds, frame_seconds
from packed_clips
where abs(video_seconds - audio_seconds) > frame_seconds + 1e-9  -- a difference of exactly one frame is allowed
    -- Encoders fill up the last packet of audio, of 23 ms in AAC at 44.1 kHz.
    and abs(video_seconds - audio_seconds) >= 0.05 - 1e-9
order by sample_id, modality
