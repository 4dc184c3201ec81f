"""Windows of clips: the frames and the audio that the whole clip shows and sounds between two times."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import FormatError, LimitError
from mm_assets.fields import AudioField, SyncedVideoAudioField, TimedTextField, VideoAudio, VideoFile
from mm_assets.media.frames import seek_frames

from .clips import clip_file, ramp
from .conftest import sound_file

NTSC = Fraction(30_000, 1001)
SOUND = ramp(64_000)  # 4 s at 16 kHz
UNEVEN = [Fraction(k, 25) + Fraction((7 * k) % 11, 1000) for k in range(100)]
CLIPS = {
    "mp4": {"gop": 12, "b_frames": 2},
    "mp4, fragments": {"options": {"movflags": "frag_keyframe+empty_moov"}, "gop": 12},
    "mp4, uneven times": {"times": UNEVEN, "gop": 12, "b_frames": 1},
    "mp4, starts late": {"video_start": Fraction(12, 25), "audio_start": Fraction(73, 100)},
    "mov": {"container": "mov", "gop": 30},
    "mkv": {"container": "matroska", "rate": NTSC, "num_frames": 120, "gop": 30},
    "mkv, starts late": {"container": "matroska", "rate": NTSC, "num_frames": 120, "video_start": Fraction(7, 1000)},
    "webm": {"container": "webm", "codec": "libvpx", "audio_codec": "libopus", "sample_rate": 48_000, "num_frames": 40},
    "avi": {"container": "avi", "codec": "mpeg4"},
    "ts": {"container": "mpegts", "audio_codec": "mp2", "sample_rate": 32_000},
}
WHOLE = SyncedVideoAudioField()


def payload_of(name):
    options = {"num_frames": 100, "samples": SOUND, "size": (16, 32), **CLIPS[name]}
    if options.get("container", "mp4") == "mp4":
        options.setdefault("audio_codec", "alac")
    return WHOLE.encode(VideoFile(video=clip_file(**options)))


def slice_of(samples, start, stop):
    """Samples [start, stop), zeros before the first."""
    found = samples[max(start, 0) : max(stop, 0)]
    return np.concatenate([np.zeros((min(stop, 0) - min(start, 0), samples.shape[1]), np.float32), found])


def check_window(payload, clip, field, start, seconds):
    """Compare a window with the same part of the whole clip."""
    found = field.decode_window(*payload, start, seconds)
    rate, count = clip.frame_rate, clip.timing.num_frames
    if field.target_frames is None:
        stop = math.ceil(Fraction(start + seconds) * rate - Fraction(1, 10**6))
        numbers = list(range(min(math.floor(Fraction(start) * rate + Fraction(1, 10**6)), count), min(stop, count)))
    else:
        times = [Fraction(start) + k * Fraction(seconds) / field.target_frames for k in range(field.target_frames)]
        numbers = [math.floor(time * rate + Fraction(1, 10**6)) for time in times]
        numbers = [number for number in numbers if number < count]
    assert found.frame_indices[found.frame_mask].tolist() == numbers
    np.testing.assert_array_equal(found.frames[found.frame_mask], clip.frames[numbers])
    assert not found.frames[~found.frame_mask].any()
    np.testing.assert_allclose(found.frame_times[found.frame_mask], clip.frame_times[numbers] - start, atol=1e-12)
    hz = clip.audio.sample_rate
    first = round(Fraction(start) * hz) - clip.timing.audio_offset_samples
    assert found.audio_start == first
    expected = slice_of(clip.audio.samples, first, first + round(Fraction(seconds) * hz))
    np.testing.assert_allclose(found.audio.samples, expected, rtol=0, atol=1e-6, strict=True)
    for number, (begin, end) in zip(numbers, found.audio_segments, strict=False):
        own = clip.audio_of_frame(number)
        if clip.timing.audio_segments([number])[0, 0] - first >= 0 and end < len(found.audio.samples):
            np.testing.assert_allclose(found.audio.samples[begin:end], own, rtol=0, atol=1e-6)
            np.testing.assert_allclose(found.audio_of_frame(number), own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("encoding", ["keep", "frames"])
@pytest.mark.parametrize("name", CLIPS)
def test_a_window_is_the_part_of_the_whole(name, encoding):
    """Its frames and samples are those that the whole clip has there, for every container and any window."""
    payload = payload_of(name)
    if encoding == "frames":
        clip = WHOLE.decode(*payload)
        value = VideoAudio(frames=clip.frames, frame_rate=clip.frame_rate, audio=clip.audio, audio_offset_seconds=0.25)
        payload = SyncedVideoAudioField(encoding="frames").encode(value)
    clip = WHOLE.decode(*payload)
    windows = [(0.0, 0.5), (1.0, 0.0001), (1.3, 2.0), (3.5, 2.0), (9.0, 1.0)]

    @settings(max_examples=4, derandomize=True, database=None)
    @given(st.floats(0, 4), st.floats(0.01, 2), st.sampled_from([None, 5]))
    def check(start, seconds, count):
        check_window(payload, clip, SyncedVideoAudioField(target_frames=count), start, seconds)

    check()
    for window in windows:
        check_window(payload, clip, WHOLE, *window)


@pytest.mark.parametrize("name", ["mp4", "mp4, fragments", "mp4, starts late", "mov", "mkv", "webm"])
def test_frames_are_found_by_seeking(name):
    """In the middle of these files frames are found without an index of all packets."""
    payload = payload_of(name)
    clip = WHOLE.decode(*payload)
    numbers = [len(clip.frames) // 2, len(clip.frames) // 2 + 3]
    found = seek_frames(payload.data, numbers, clip.frame_rate, Fraction(0))
    assert found is not None
    np.testing.assert_array_equal(np.stack(found), clip.frames[numbers])


def test_batches_of_windows_have_one_shape():
    """Frames and samples that a window has not are zero, with False in their masks."""
    field = SyncedVideoAudioField(size=(8, 16), audio_sample_rate=8000, audio_channels=1)
    field = SyncedVideoAudioField(**{**field.config, **field.window_settings(1.0, 8), "frame_rate": None})
    metadata, data = payload_of("mp4, starts late")  # its audio begins 0.25 s after its frames
    records = np.frombuffer(metadata * 4, np.uint8).reshape(4, -1)
    windows = np.array([[0.0, 1.0], [1.5, 1.0], [3.5, 1.0], [0.0, 1.0]])
    found, present = field.decode_windows(records, [data, data, data, None], windows)
    assert present.tolist() == [True, True, True, False]
    assert found["video"].shape == (4, 8, 8, 16, 3)
    assert found["audio"].shape == (4, 8000)
    assert found["video_mask"].sum(axis=1).tolist() == [8, 8, 4, 0]
    mask = found["audio_mask"]
    assert mask.sum(axis=1).tolist() == [6000, 8000, 6000, 0]
    assert not mask[0, :2000].any()
    assert not found["audio"][~mask].any()
    one = field.decode_window(metadata, data, 1.5, 1.0)
    np.testing.assert_array_equal(found["video"][1], one.frames)
    np.testing.assert_array_equal(found["audio"][1], one.audio.samples[:, 0])
    np.testing.assert_array_equal(found["audio_segments"][1], one.audio_segments)


@pytest.mark.parametrize("encoding", ["keep", "frames"])
def test_the_audio_of_frames(encoding):
    """Audio of a frame ends with it, or where the next chosen frame begins, and that of the last one with the clip."""
    file = VideoFile(video=clip_file(num_frames=100, samples=SOUND, audio_codec="alac"))
    field = SyncedVideoAudioField(encoding=encoding, audio_encoding="float32")
    payload = field.encode(file)
    clip = field.decode(*payload)
    frames = [3, 40, 41]
    own = field.decode_audio(*payload, frames)
    assert all(np.array_equal(audio.samples, clip.audio_of_frame(k)) for audio, k in zip(own, frames, strict=True))
    until_next = field.decode_audio(*payload, frames, "next_frame")
    starts = [clip.timing.audio_segments([k])[0, 0] for k in frames]
    for audio, start, stop in zip(until_next, starts, [*starts[1:], len(SOUND)], strict=True):
        np.testing.assert_array_equal(audio.samples, clip.audio.samples[start:stop])
    half = SyncedVideoAudioField(encoding=encoding, decode_rate=8000).decode_audio(*payload, frames)
    assert [(len(audio.samples), audio.sample_rate) for audio in half] == [(320, 8000)] * 3
    with pytest.raises(IndexError):
        field.decode_audio(*payload, [100])
    with pytest.raises(ValueError, match="increasing"):
        field.decode_audio(*payload, [4, 3], "next_frame")
    with pytest.raises(ValueError, match="audio_until"):
        field.decode_audio(*payload, [4], "end")
    silent = field.encode(VideoFile(video=clip_file()))
    assert field.decode_audio(*silent, [0]) is None
    assert field.decode_audio(*payload, []) == []


def test_fields_without_frames_or_audio_say_so():
    """Frames of audio, and audio of texts, are a `TypeError`."""
    audio = AudioField().encode(sound_file(SOUND[:100], 16_000, "WAV"))
    with pytest.raises(TypeError, match="no frames"):
        AudioField().decode_audio(*audio, [0])
    with pytest.raises(TypeError, match="no frames"):
        AudioField().decode_frames(*audio, [0])
    with pytest.raises(TypeError, match="no audio"):
        TimedTextField().decode_audio(*TimedTextField().encode([]))


@pytest.mark.parametrize("content", ["wav", "flac", "mp3"])
def test_audio_in_a_file_of_its_own(content):
    """A window has the audio that belongs to it, also where all of the file must be decoded for that."""
    sound = sound_file(SOUND, 16_000, content.upper())
    payload = WHOLE.encode(VideoFile(video=clip_file(num_frames=100), audio=sound))
    for window in ((0.0, 0.1), (1.0, 1.5), (3.9, 1.0)):
        check_window(payload, WHOLE.decode(*payload), WHOLE, *window)


def test_a_part_of_a_file_has_its_windows():
    """A clip that begins within its file, and ends before it, has windows from its own start."""
    data = clip_file(num_frames=100, samples=SOUND, audio_codec="alac", gop=10)
    payload = WHOLE.encode(VideoFile(video=data, start_seconds=1.0, duration_seconds=2.0))
    clip = WHOLE.decode(*payload)
    for window in ((0.0, 0.5), (1.2, 0.5), (1.8, 1.0)):
        check_window(payload, clip, WHOLE, *window)


def test_windows_are_bounded():
    """A window that takes more than `max_decoded_bytes` is refused before it is decoded."""
    payload = payload_of("mp4")
    field = SyncedVideoAudioField(max_decoded_bytes=40 * 16 * 32 * 3)
    assert len(field.decode_window(*payload, 0.0, 0.4).frames) == 10
    with pytest.raises(LimitError, match="max_decoded_bytes"):
        field.decode_window(*payload, 0.0, 3.0)


def test_damage_in_a_window_is_found_or_decodes():
    """Changed bytes give a `FormatError`, or frames of the clip's size."""
    metadata, data = payload_of("mp4")
    rng = np.random.default_rng(0)
    for _ in range(10):
        changed = bytearray(data)
        for place in rng.integers(0, len(changed), 20).tolist():
            changed[place] ^= 0xFF
        try:
            found = WHOLE.decode_window(metadata, bytes(changed), 1.0, 0.5)
        except FormatError:
            continue
        assert found.frames.shape[1:] == (16, 32, 3)
