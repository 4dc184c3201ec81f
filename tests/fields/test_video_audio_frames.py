"""SyncedVideoAudioField: which frames and samples of a clip belong to an item, by index and by time."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.display.content import Content
from mm_assets.errors import CorruptError, EncodeError
from mm_assets.fields import SyncedVideoAudioField, VideoAudio, VideoFile

from .clips import clip_file, number_of, picture, ramp
from .conftest import wav_file
from .video_audio import FRAMES, KEEP, LONG, SOUND, STORE, coded, floats, through_jpeg


@pytest.mark.parametrize("field", [KEEP, STORE, SyncedVideoAudioField(encoding="frames", size=(24, 24))])
@given(st.lists(st.integers(0, 30), max_size=6))
@settings(deadline=None, max_examples=12)
def test_chosen_frames_are_those_of_the_whole(field, indices):
    """Frames in any order, with repetitions, are the pixels that decoding everything gives."""
    payload = field.encode(LONG)
    chosen = field.decode_frames(*payload, indices)
    np.testing.assert_array_equal(chosen, field.decode(*payload).frames[indices])
    assert [number_of(one) for one in chosen] == indices


def test_a_frame_is_read_without_its_neighbours():
    """With all other frames' bytes destroyed, a stored frame still decodes."""
    metadata, data = STORE.encode(VideoAudio(frames=FRAMES, frame_rate=25))
    offsets = np.frombuffer(data, "<u8", 4)
    broken = bytearray(data)
    broken[offsets[0] : offsets[1]] = bytes(int(offsets[1] - offsets[0]))
    broken[offsets[2] : offsets[3]] = bytes(int(offsets[3] - offsets[2]))
    np.testing.assert_array_equal(STORE.decode_frames(metadata, broken, [1])[0], through_jpeg(FRAMES)[1])
    with pytest.raises(CorruptError):
        STORE.decode_frames(metadata, broken, [0])


@pytest.mark.parametrize("indices", [[3], [-1], [[0]], [0.5]])
def test_frames_that_are_not_there_are_refused(indices):
    """A frame number outside the clip, or no number, is an IndexError."""
    payload = STORE.encode(VideoAudio(frames=FRAMES, frame_rate=25))
    with pytest.raises(IndexError):
        STORE.decode_frames(*payload, indices)


def test_few_frames_of_a_file_do_not_decode_the_rest():
    """A frame late in a kept file is had after its keyframe only: damage before it goes unseen."""
    data = clip_file(num_frames=60, gop=10, codec="mjpeg", container="mov", size=(64, 64))
    payload = KEEP.encode(data)
    start = data.index(b"\xff\xd8\xff", data.index(b"\xff\xd8\xff") + 100)
    broken = bytearray(payload.data)
    broken[start : start + 60] = bytes(60)
    assert number_of(KEEP.decode_frames(payload.metadata, broken, [55])[0]) == 55 % 31


def test_variable_rate_becomes_constant_by_presentation_time():
    """Each frame of the constant rate shows what the file shows at its time, kept and stored alike."""
    times = [Fraction(n, 1000) for n in (0, 40, 80, 300, 310, 500, 900)]
    data = clip_file(container="mov", times=times)
    for encoding in ("keep", "frames"):
        clip = coded(SyncedVideoAudioField(encoding=encoding, frame_rate=20), data)
        shown = [
            max(k for k, time in enumerate(times) if time <= Fraction(i, 20)) for i in range(clip.timing.num_frames)
        ]
        assert [number_of(one) for one in clip.frames] == shown
        assert shown[:8] == [0, 1, 2, 2, 2, 2, 3, 4]
        np.testing.assert_array_equal(clip.frame_times, np.arange(len(shown)) / 20)


@pytest.mark.parametrize("container", ["matroska", "mov"])
@pytest.mark.parametrize("rate", [Fraction(24000, 1001), Fraction(30000, 1001), 25, 60])
def test_constant_rate_survives_rounded_times(container, rate):
    """A file whose times are rounded to milliseconds has each of its frames once, at its exact rate."""
    clip = coded(KEEP, clip_file(container=container, rate=rate, num_frames=70, gop=30))
    assert clip.frame_rate == rate
    assert [number_of(one) for one in clip.frames] == [number % 31 for number in range(70)]


def test_arrays_are_brought_to_the_fields_rate():
    """Half the rate leaves every other frame, twice the rate shows each twice."""
    frames = np.stack([picture(number) for number in range(6)])
    for rate, expected in ((5, [0, 2, 4]), (20, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])):
        clip = coded(SyncedVideoAudioField(frame_rate=rate), VideoAudio(frames=frames, frame_rate=10))
        assert [number_of(one) for one in clip.frames] == expected
        assert clip.duration_seconds == 0.6


def test_a_frame_left_out_of_an_avi_is_shown_by_the_one_before():
    """An AVI's tick is a frame: a missing one is not a rounding error, and what follows keeps its time."""
    times = [Fraction(number, 25) for number in (0, *range(2, 20))]
    clip = coded(KEEP, clip_file(container="avi", codec="mpeg4", times=times))
    assert [number_of(one) for one in clip.frames] == [0, 0, *range(1, 19)]
    assert clip.duration_seconds == 20 / 25


def test_frames_are_spread_and_padded():
    """target_frames gives frames from the first to the last, and zero rows with a mask where there are too few."""
    field = SyncedVideoAudioField(target_frames=4)
    clip = coded(field, LONG)
    assert clip.frame_indices.tolist() == [0, 10, 20, 30]
    assert [number_of(one) for one in clip.frames] == [0, 10, 20, 30]
    assert clip.frame_mask.all()
    short = coded(field, VideoAudio(frames=FRAMES, frame_rate=10, audio=SOUND))
    assert short.frame_indices.tolist() == [0, 1, 2, -1]
    assert short.frame_mask.tolist() == [True, True, True, False]
    assert short.frame_times.tolist() == [0.0, 0.1, 0.2, 0.0]
    assert short.audio_segments.tolist() == [[0, 300], [300, 300], [300, 300], [0, 0]]
    assert not short.frames[3].any()


@given(
    st.sampled_from([Fraction(24000, 1001), Fraction(25), Fraction(30000, 1001), Fraction(60)]),
    st.sampled_from([8000, 16_000, 44_100]),
    st.integers(-3000, 3000),
    st.sampled_from(["keep", "frames"]),
)
@settings(deadline=None, max_examples=25)
def test_segments_follow_the_integer_rule(rate, sample_rate, offset, encoding):
    """Each frame's samples are those that the rule gives, clipped to the sound, whatever rates and offset."""
    samples = ramp(2500)
    field = SyncedVideoAudioField(encoding=encoding)
    value = VideoAudio(
        frames=np.stack([picture(number, (2, 2)) for number in range(9)]),
        frame_rate=rate,
        audio=(samples, sample_rate),
        audio_offset_seconds=Fraction(offset, sample_rate),
    )
    clip = coded(field, value)
    assert clip.timing.audio_offset_samples == offset
    for i in range(9):
        bounds = [int(k * sample_rate / rate // 1) - offset for k in (i, i + 1)]
        start, stop = (min(max(bound, 0), 2500) for bound in bounds)
        assert clip.audio_segments[i].tolist() == [start, stop]
        np.testing.assert_array_equal(clip.audio_of_frame(i), floats(samples[start:stop]))


@pytest.mark.parametrize("container", ["mov", "matroska"])
@pytest.mark.parametrize("encoding", ["keep", "frames"])
def test_the_files_own_offset_is_honoured(container, encoding):
    """Sound that starts 100 ms after the pictures belongs to later frames, as does the offset that the caller adds."""
    data = clip_file(container=container, samples=ramp(3200, 2), audio_start=Fraction(1, 10), num_frames=8)
    field = SyncedVideoAudioField(encoding=encoding)
    clip = coded(field, data)
    assert clip.timing.audio_offset_samples == 1600
    assert clip.audio_segments[:4].tolist() == [[0, 0], [0, 0], [0, 320], [320, 960]]
    later = coded(field, VideoFile(video=data, audio_offset_seconds=0.02))
    assert later.timing.audio_offset_samples == 1920


@pytest.mark.parametrize("delay", [Fraction(3, 20), Fraction(0), Fraction(-2, 25)])
@pytest.mark.parametrize("encoding", ["keep", "frames"])
def test_a_click_belongs_to_its_frame(encoding, delay):
    """A click at frame 5 is among its samples, whether a file says how much later its audio starts or the caller does.

    The caller's number is the start time that a container has for the same audio.
    """
    field = SyncedVideoAudioField(encoding=encoding)
    at = round((Fraction(5, 25) - delay) * 16_000) + 7
    samples = np.zeros((8000, 1), np.int16)
    samples[at] = 30_000
    frames = np.stack([picture(number) for number in range(10)])
    pictures = clip_file(container="mov", num_frames=10)
    values = [
        VideoAudio(frames=frames, frame_rate=25, audio=(samples, 16_000), audio_offset_seconds=delay),
        VideoFile(video=pictures, audio=wav_file(samples, 16_000), audio_offset_seconds=delay),
    ]
    early, late = max(-delay, 0), max(delay, 0)
    for container in ("mov", "matroska"):
        file = clip_file(container=container, samples=samples, audio_start=late, video_start=early)
        values += [file, VideoFile(video=file, start_seconds=Fraction(2, 25))]
    for value in values:
        clip = coded(field, value)
        frame = 3 if isinstance(value, VideoFile) and value.start_seconds else 5
        assert np.flatnonzero(clip.audio_of_frame(frame)[:, 0] > 0.5).tolist() == [7]
        if frame == 5:
            assert clip.timing.audio_offset_samples == delay * 16_000
            metadata, data = field.encode(value)
            assert field.shown(metadata, Content.of(data)).audio_offset_seconds == float(delay)


@pytest.mark.parametrize("encoding", ["keep", "frames"])
def test_a_segment_has_the_frames_and_samples_of_its_time(encoding):
    """Start and duration choose the same frames and samples as slicing the whole does."""
    samples = ramp(16_000, 2)
    data = clip_file(container="mov", num_frames=25, samples=samples)
    clip = coded(
        SyncedVideoAudioField(encoding=encoding), VideoFile(video=data, start_seconds=0.2, duration_seconds=0.4)
    )
    assert [number_of(one) for one in clip.frames] == list(range(5, 15))
    np.testing.assert_array_equal(clip.audio.samples, floats(samples[3200:9600]))
    assert clip.audio_segments[0].tolist() == [0, 640]
    assert not clip.timing.truncated


@pytest.mark.parametrize("limits", [{"max_frames": 10}, {"max_duration": 0.42}])
def test_limits_truncate_and_flag_the_clip(limits):
    """A clip over a limit ends there, sound too, and is marked; one within is not."""
    data = clip_file(container="mov", num_frames=25, samples=ramp(16_000))
    for encoding in ("keep", "frames"):
        field = SyncedVideoAudioField(encoding=encoding, **limits)
        clip = coded(field, data)
        assert clip.timing.truncated
        assert (clip.timing.num_frames, clip.timing.num_audio_samples) == (10, 6400)
        assert not coded(field, clip_file(num_frames=10)).timing.truncated
    cut = coded(SyncedVideoAudioField(max_duration=0.01), VideoAudio(audio=SOUND))
    assert cut.timing.truncated
    assert cut.timing.num_audio_samples == 80


def test_a_clip_finds_frames_by_time():
    """frame_index_at finds the frame that is shown, at its own start too, and refuses times outside."""
    clip = coded(KEEP, LONG)
    assert [clip.timing.frame_index_at(seconds) for seconds in clip.frame_times] == list(range(31))
    assert clip.timing.frame_index_at(0.05) == 1
    for seconds in (-0.01, 31 * 1001 / 30000, float("nan")):
        with pytest.raises(ValueError, match="found"):
            clip.timing.frame_index_at(seconds)


def test_a_frame_is_not_repeated_without_end():
    """A file of few frames that claims days is refused, so that it does not become gigabytes of pictures."""
    times = [Fraction(0), Fraction(1, 25), Fraction(80_000)]
    for function in (KEEP.check, KEEP.encode, STORE.encode):
        with pytest.raises(EncodeError, match="such a file"):
            function(clip_file(container="matroska", times=times))
