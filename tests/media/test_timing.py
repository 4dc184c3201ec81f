import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.media.timing import (
    FrameIndex,
    Timing,
    as_frame_rate,
    frame_boundaries,
    nominal_rate,
    offset_in_samples,
    uniform_indices,
)

RATES = st.fractions(min_value=Fraction(1, 1000), max_value=1000, max_denominator=1001)
NTSC = [Fraction(24000, 1001), Fraction(25), Fraction(30000, 1001), Fraction(30), Fraction(60)]


def timing(rate, sample_rate=48_000, num_frames=100, num_audio_samples=10**9, offset=0):
    return Timing(
        num_frames=num_frames,
        frame_rate=rate,
        sample_rate=sample_rate,
        num_audio_samples=num_audio_samples,
        audio_offset_samples=offset,
    )


@given(RATES, st.integers(1, 768_000), st.lists(st.integers(0, 2**33), min_size=1, max_size=20))
@settings(deadline=None, max_examples=200)
def test_boundaries_are_exact(rate, sample_rate, frames):
    """A boundary is floor(i * sr * den / num) of unbounded integers, for clips of any length."""
    found = frame_boundaries(frames, rate, sample_rate)
    assert found.tolist() == [i * sample_rate * rate.denominator // rate.numerator for i in frames]


def test_boundaries_that_do_not_fit_are_refused():
    """Nothing wraps silently: the last frame that fits is exact, the next is an error."""
    last = (2**63 - 1) // 768_000 // 1000
    assert frame_boundaries([last], Fraction(1, 1000), 768_000).tolist() == [last * 768_000_000]
    with pytest.raises(OverflowError):
        frame_boundaries([last + 1], Fraction(1, 1000), 768_000)
    for frames, rate, sample_rate in (([-1], Fraction(25), 8000), ([0], Fraction(2**31), 1), ([0], Fraction(25), -1)):
        with pytest.raises(ValueError, match="found"):
            frame_boundaries(frames, rate, sample_rate)
    assert frame_boundaries([], Fraction(25), 8000).tolist() == []


@pytest.mark.parametrize("rate", NTSC)
@pytest.mark.parametrize("sample_rate", [16_000, 44_100, 48_000])
def test_an_hour_does_not_drift(rate, sample_rate):
    """Every boundary of an hour lies less than one sample before the exact time of its frame."""
    num_frames = math.ceil(3600 * rate)
    segments = timing(rate, sample_rate, num_frames).audio_segments(np.arange(num_frames))
    num, den = rate.as_integer_ratio()
    late = np.arange(num_frames) * (sample_rate * den) - segments[:, 0] * num  # exact: below 2**63
    assert late.min() >= 0
    assert late.max() < num
    assert (segments[1:, 0] == segments[:-1, 1]).all()


@given(st.sampled_from(NTSC), st.integers(-5000, 5000), st.integers(0, 3000))
@settings(deadline=None)
def test_segments_are_clipped_and_contiguous(rate, offset, num_audio_samples):
    """Segments lie within the sound, are never negative, and each begins where the one before ends."""
    segments = timing(rate, 16_000, 20, num_audio_samples, offset).audio_segments(np.arange(20))
    assert segments.min() >= 0
    assert segments.max() <= num_audio_samples
    assert (segments[:, 1] >= segments[:, 0]).all()
    assert (segments[1:, 0] == segments[:-1, 1]).all()


def test_clips_without_a_part_have_no_segments():
    """Without sound segments are empty; without video there is no frame to ask for."""
    assert timing(Fraction(25), 0, 3, 0).audio_segments([0, 2]).tolist() == [[0, 0], [0, 0]]
    blind = timing(None, 8000, 0, 4000)
    assert blind.audio_segments([]).shape == (0, 2)
    assert blind.frame_times([]).shape == (0,)
    assert blind.duration_seconds == 0.5
    with pytest.raises(IndexError):
        blind.audio_segments([0])
    with pytest.raises(ValueError, match="video"):
        blind.frame_index_at(0.0)


@given(RATES, st.integers(0, 99))
@settings(deadline=None, max_examples=200)
def test_a_frame_is_found_at_its_own_time(rate, index):
    """The float of a frame's time finds that frame, and a time just before it the one before."""
    clip = timing(rate)
    start = float(clip.frame_times([index])[0])
    assert start == float(index / rate)
    assert clip.frame_index_at(start) == index
    if index:
        assert clip.frame_index_at(math.nextafter(start, 0)) == index - 1


@given(st.integers(0, 10_000), st.integers(1, 300))
@settings(deadline=None)
def test_frames_are_spread_evenly(num_frames, target):
    """From the first to the last, increasing, each within half a frame of its exact place."""
    chosen = uniform_indices(num_frames, target)
    assert len(chosen) == min(num_frames, target)
    assert (np.diff(chosen) > 0).all()
    if target < num_frames:
        assert chosen[0] == 0
        if target > 1:
            assert chosen[-1] == num_frames - 1
            exact = [Fraction(k * (num_frames - 1), target - 1) for k in range(target)]
            assert max(abs(found - place) for found, place in zip(chosen.tolist(), exact, strict=True)) <= Fraction(
                1, 2
            )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (29.97, Fraction(30000, 1001)),
        (23.976, Fraction(24000, 1001)),
        (23.98, Fraction(24000, 1001)),
        (59.94, Fraction(60000, 1001)),
        (119.88, Fraction(120000, 1001)),
        (30.0, Fraction(30)),
        (24.0, Fraction(24)),
        (12.5, Fraction(25, 2)),
        (0.1, Fraction(1, 10)),
        (25, Fraction(25)),
        ((30000, 1001), Fraction(30000, 1001)),
        (Fraction(2997, 100), Fraction(2997, 100)),
    ],
)
def test_rates_are_ratios(value, expected):
    """Floats near the broadcast rates are those; fractions, integers and pairs are taken exactly."""
    assert as_frame_rate(value) == expected


@pytest.mark.parametrize("value", [0, -1, 1001, 0.0001, float("nan"), float("inf"), True, "25", None, (1, 0), (1.5, 1)])
def test_impossible_rates_are_refused(value):
    """What is not a frame rate, or above a thousand per second, is a ValueError."""
    with pytest.raises(ValueError, match="found"):
        as_frame_rate(value)


def test_offsets_are_rounded_to_the_nearest_sample():
    """A half goes to the even sample, and an offset and its negative are opposite."""
    assert [offset_in_samples(Fraction(n, 2), 1) for n in range(-5, 6)] == [-2, -2, -2, -1, 0, 0, 0, 1, 2, 2, 2]
    assert offset_in_samples(0.5, 44_100) == 22_050
    assert offset_in_samples(-0.0101, 44_100) == -445


@pytest.mark.parametrize("rate", [*NTSC, Fraction(24), Fraction(50), Fraction(15)])
@pytest.mark.parametrize("tick", [Fraction(1, 1000), Fraction(1, 90_000), Fraction(1, 12_800)])
def test_rounded_times_keep_their_rate(rate, tick):
    """Times rounded to ticks are found to be constant, even where the container tells another rate."""
    pts = np.array([round(n / rate / tick) for n in range(200)])
    assert nominal_rate(pts, tick, [rate]) == (rate, True)
    assert nominal_rate(pts, tick, [Fraction(77, 3)]) == (rate, True)


def test_variable_times_are_not_constant():
    """A gap of a frame makes the rate variable; then it is the container's, or else the mean."""
    pts = np.array([0, 1, 2, 4, 5]) * 40
    assert nominal_rate(pts, Fraction(1, 1000), [Fraction(25)]) == (25, False)
    assert nominal_rate(pts, Fraction(1, 1000), []) == (20, False)
    assert nominal_rate(np.array([7]), Fraction(1, 1000), []) == (25, True)
    assert nominal_rate(np.array([0, 10**9]), Fraction(1, 1000), []) == (Fraction(1, 1000), False)


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    st.sampled_from([*NTSC, Fraction(7, 3)]),
    st.fractions(0, 2, max_denominator=1000),
)
@settings(deadline=None)
def test_what_is_shown_is_the_last_that_has_come(gaps, rate, start):
    """At each time of a constant rate the last frame whose time has come is shown, but for half a tick of rounding."""
    pts = np.cumsum(gaps) - 5000
    index = FrameIndex(
        pts=pts,
        keyframe_pts=pts[:1],
        time_base=Fraction(1, 90_000),
        rate=Fraction(25),
        is_constant=False,
        duration=Fraction(int(pts[-1] - pts[0]) + 1, 90_000),
    )
    frames = np.arange(40)
    shown = index.shown_at(frames, rate, start)
    for i, k in zip(frames.tolist(), shown.tolist(), strict=True):
        now = pts[0] + (start + i / rate) * 90_000 + Fraction(1, 2)
        assert k == max(n for n in range(len(pts)) if pts[n] <= now)
