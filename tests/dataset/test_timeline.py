"""Look-up by time across a sample's modalities, and notes on audio."""

import io
import json
import tarfile
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.dataset.timeline import FrameAt, align_onsets, at_time, note_audio_slices, resample_to, steps
from mm_assets.fields import (
    MIDI,
    Audio,
    MIDIField,
    NoteTable,
    SyncedVideoAudioField,
    TimeSeries,
    TimeSeriesField,
    VideoAudio,
)
from mm_assets.media.subtitles import TimedSegment

STATE = TimeSeries(np.array([0.0, 0.5, 1.0]), np.array([[0.0, 10.0], [1.0, 20.0], [2.0, 40.0]]))
DONE = TimeSeries(np.array([0.0, 1.0]), np.array([[False], [True]]))


def notes(onsets, durations):
    count = len(onsets)
    zeros = np.zeros(count, np.uint8)
    return NoteTable(
        np.array(onsets, np.float64), np.array(durations, np.float64), *[zeros] * 4, np.zeros(count, np.uint16)
    )


@pytest.fixture(scope="module")
def clip():
    """Eight frames at 30000/1001 a second, their brightness their number times 20, with sound."""
    frames = np.broadcast_to(np.arange(8, dtype=np.uint8)[:, None, None, None] * 20, (8, 16, 16, 3))
    field = SyncedVideoAudioField(encoding="frames")
    value = VideoAudio(
        frames=np.ascontiguousarray(frames),
        frame_rate=Fraction(30_000, 1001),
        audio=Audio(np.zeros((4000, 1), np.float32), 16_000),
    )
    return field.decode(*field.encode(value))


def test_series_text_and_notes_at_a_time():
    """Each modality gives what it holds at the time; what has no time axis is given whole, an absent one as None."""
    words = [TimedSegment(0.0, 0.5, "one"), TimedSegment(0.5, 0.5, "cue"), TimedSegment(0.5, 1.0, "two")]
    music = MIDI(b"", notes([0.0, 0.25, 0.5], [0.5, 0.5, 0.5]), 1.0)
    sample = {"state": STATE, "words": words, "music": music, "task": "pick", "depth": None, "done": DONE}
    found = at_time(sample, 0.5)
    assert list(found) == list(sample)
    assert found["state"].tolist() == [1.0, 20.0]
    assert [segment.text for segment in found["words"]] == ["cue", "two"]
    assert found["music"].onset_seconds.tolist() == [0.25, 0.5]
    assert (found["task"], found["depth"]) == ("pick", None)
    assert found["done"].tolist() == [False]
    between = at_time(sample, 0.75, method="interpolate")
    assert between["state"].tolist() == [1.5, 30.0]
    assert between["done"].tolist() == [True]


def test_a_frame_is_shown_until_the_next_begins(clip):
    """The frame at a time is the last that has begun, also just before the next one's own time."""
    times = clip.frame_times
    for k in range(8):
        later = times[k] + 0.03
        for time in (times[k], later):
            found = at_time({"video": clip}, time)["video"]
            assert isinstance(found, FrameAt)
            assert (found.number, found.seconds) == (k, times[k])
            assert abs(int(found.pixels[0, 0, 0]) - 20 * k) < 5
            assert found.number == clip.timing.frame_index_at(time)


def test_times_outside_a_clip(clip):
    """Before the first frame and from the end on there is no frame: an error, the nearest one, or None."""
    end = float(clip.timing.video_seconds)
    for time in (-0.001, end):
        with pytest.raises(ValueError, match=r"modality 'video'.*expected"):
            at_time({"video": clip}, time)
        assert at_time({"video": clip}, time, outside="nan") == {"video": None}
    shown = steps({"video": clip}, [-1.0, end + 1], outside="clip")
    assert [step["video"].number for step in shown] == [0, 7]


def test_a_clip_without_video_shows_nothing():
    """Sound alone has no frame at any time."""
    field = SyncedVideoAudioField(encoding="frames")
    value = VideoAudio(audio=Audio(np.zeros((4000, 1), np.float32), 16_000))
    assert at_time({"video": field.decode(*field.encode(value))}, 0.1) == {"video": None}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "spline"}, "method"),
        ({"outside": "wrap"}, "outside"),
        ({"method": "interpolate", "seconds": 2.0}, "modality 'state'"),
        ({"max_gap_seconds": 0.1, "seconds": 0.2}, "modality 'state'"),
        ({"seconds": np.nan}, "finite"),
    ],
)
def test_wrong_look_ups_are_refused(options, words):
    """A wrong option or a time that is too far is a ValueError that names the modality, raised by the call itself."""
    options = {"seconds": 0.2} | options
    with pytest.raises(ValueError, match=words):
        steps({"state": STATE}, [options.pop("seconds")], **options)


def test_resampling_gives_a_series_on_the_other_clock():
    """A series at another one's timestamps has those, the straight line's values, and its own column names."""
    named = TimeSeries(STATE.timestamps, STATE.values, (("x", 0, 1),))
    times = [0.25, 0.5, 0.75]
    found = resample_to(named, times)
    assert found == TimeSeries(np.array(times), np.array([[0.5, 15.0], [1.0, 20.0], [1.5, 30.0]]), named.columns)
    assert resample_to(named, times, method="nearest").values[:, 0].tolist() == [0.0, 1.0, 1.0]
    for times, options in (([0.0, 2.0], {}), ([1.0, 0.0], {}), ([[0.0]], {}), ([0.0], {"method": "cubic"})):
        with pytest.raises(ValueError, match="expected"):
            resample_to(named, times, **options)


# --- notes and audio --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 4000), max_size=20), st.sampled_from([8000, 16_000, 22_050, 44_100, 48_000, 96_000]))
@settings(deadline=None, max_examples=100)
def test_onsets_are_within_half_a_sample(onsets, rate):
    """An aligned onset is never more than half a sample from its true place, an hour in as at the start."""
    found = align_onsets(notes(onsets, [0] * len(onsets)), rate, 2**40)
    for onset, index in zip(onsets, found.tolist(), strict=True):
        exact = Fraction(onset) * rate
        assert abs(index - exact) <= Fraction(1, 2) + Fraction(1, 2**20)  # the product's own rounding


def test_halves_go_to_the_later_sample():
    """The nearest sample of x is floor(x + 1/2), also for the largest number below one half."""
    below = float(np.nextafter(0.5, 0))
    assert align_onsets(notes([0.5, 1.5, below, 2.0], [0] * 4), 1, 9).tolist() == [1, 2, 0, 2]


def test_notes_past_the_audio():
    """A note that starts at the audio's end or later is an error, or -1; its slice is empty."""
    table = notes([0.0, 0.9, 1.0, 3.0], [0.5, 0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="2 notes past the audio"):
        align_onsets(table, 10, 10)
    assert align_onsets(table, 10, 10, outside="mark").tolist() == [0, 9, -1, -1]
    assert note_audio_slices(table, 10, 10).tolist() == [[0, 5], [9, 10], [10, 10], [10, 10]]
    for rate, count, outside in ((0, 10, "error"), (10, -1, "error"), (10, 10, "nan")):
        with pytest.raises(ValueError, match="expected"):
            align_onsets(table, rate, count, outside=outside)


# --- real data --------------------------------------------------------------------------------------------------------


def members_of(shard):
    """Bytes of every member of a shard by name."""
    with tarfile.open(shard) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened if member.isfile()}


@pytest.fixture(scope="module")
def episodes(shared_data):
    return members_of(shared_data / "robotics" / "robotics-episodes-00000.tar")


def test_a_whole_episode(episodes):
    """Robot episodes: each step's own time gives its exact rows and its own frame, half-way is the mean of two rows."""
    keys = sorted(name.removesuffix(".timestamp.npy") for name in episodes if name.endswith(".timestamp.npy"))
    assert len(keys) == 2
    for key in keys:
        modality = json.loads(episodes[f"{key}.json"])["modality"]
        sample = {}
        for role in ("state", "action", "reward", "done"):
            field = TimeSeriesField(columns=modality.get(role, {}))
            contents = {"timestamps": episodes[f"{key}.timestamp.npy"], "values": episodes[f"{key}.{role}.npy"]}
            sample[role] = field.decode(*field.encode(field.assemble(contents)))
        sources = {role: np.load(io.BytesIO(episodes[f"{key}.{role}.npy"])) for role in sample}
        times = np.load(io.BytesIO(episodes[f"{key}.timestamp.npy"]))
        assert sample["state"].column("left_arm").shape == (len(times), 7)
        for method in ("nearest", "interpolate"):
            for k, step in enumerate(steps(sample, times, method=method)):
                for role, source in sources.items():
                    np.testing.assert_array_equal(step[role], np.atleast_1d(source[k]))
        middles = (times[:-1] + times[1:]) / 2
        found = sample["state"].interpolate(middles)
        rows = sources["state"].astype(np.float64)
        np.testing.assert_allclose(found, (rows[:-1] + rows[1:]) / 2, rtol=1e-5, atol=1e-7)


def test_the_frames_of_an_episode(episodes):
    """The clock of a robot's states shows frame k of its video at step k."""
    key = next(name.removesuffix(".ego_view.mp4") for name in sorted(episodes) if name.endswith(".ego_view.mp4"))
    times = np.load(io.BytesIO(episodes[f"{key}.timestamp.npy"]))[:40]
    field = SyncedVideoAudioField(encoding="frames", max_frames=60, size=(32, 32))
    clip = field.decode(*field.encode(episodes[f"{key}.ego_view.mp4"]))
    assert [step["camera"].number for step in steps({"camera": clip}, times)] == list(range(40))


def test_notes_on_the_audio_rendered_from_them(shared_data):
    """Audio rendered from MIDI is silent up to the first aligned onset and sounds soon after it."""
    import soundfile

    members = members_of(shared_data / "music" / "music-00000.tar")
    samples, rate = soundfile.read(io.BytesIO(members["slakh_Track00001.wav"]), dtype="float32")
    table = MIDIField().decode(*MIDIField().encode(members["slakh_Track00001.mid"])).notes
    found = align_onsets(table, rate, len(samples), outside="mark")
    first = int(np.argmax(np.abs(samples) > 0.005))
    assert 0 <= first - found[0] < rate * 0.15  # the sampler's attack
    inside = found >= 0
    assert inside.sum() == 5
    np.testing.assert_array_equal(inside, table.onset_seconds * rate < len(samples) - 0.5)
