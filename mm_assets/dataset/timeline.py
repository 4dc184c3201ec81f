"""One clock for a sample: what each modality holds at a time, and which audio samples belong to a note.

Times are float64 seconds from the sample's start, the same for all of its modalities. Nothing here decodes: it works on
decoded values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.fields import MIDI, Clip, NoteTable, TimeSeries
from mm_assets.media.subtitles import TimedSegment

__all__ = ["FrameAt", "align_onsets", "at_time", "note_audio_slices", "resample_to", "steps"]

_METHODS = ("nearest", "interpolate")
_OUTSIDE = ("error", "clip", "nan")


class FrameAt(NamedTuple):
    """The frame of a clip that is shown at a time.

    Attributes:
        number: of the frame in the clip, from 0.
        seconds: its own time, at or before the time asked for.
        pixels: (H, W, 3) uint8 RGB, a view.
    """

    number: int
    seconds: float
    pixels: npt.NDArray[np.uint8]


def at_time(
    sample: Mapping[str, Any],
    seconds: float,
    *,
    method: str = "nearest",
    outside: str = "error",
    max_gap_seconds: float | None = None,
) -> dict[str, Any]:
    """What a sample's modalities hold at one time.

    Args:
        sample: decoded values by modality; None for an absent one.
        seconds: the time.
        method: of time series: ``nearest`` step, or ``interpolate`` between steps. Series of bool, between whose values
            there is nothing, are always looked up by nearest step.
        outside: for a time that an interpolated series or a clip's frames do not cover: ``error`` raises, ``clip``
            takes the nearest step or frame, ``nan`` gives NaN, and None for a frame.
        max_gap_seconds: how far a nearest step may be from the time, and interpolated steps from each other, at most.

    Returns:
        By modality: of a `TimeSeries` (D,) values; of a `Clip` `FrameAt`, the last decoded frame that has begun, or
        None without video; of timed text the list of segments that cover the time; of `MIDI` the notes that
        sound. All other values have no time axis, or no meaning at a moment (sound), and are given as they are.

    Raises:
        ValueError: a wrong option, or a time that is outside with ``error``.
    """
    return next(steps(sample, np.array([seconds]), method=method, outside=outside, max_gap_seconds=max_gap_seconds))


def steps(
    sample: Mapping[str, Any],
    timestamps: npt.ArrayLike,
    *,
    method: str = "nearest",
    outside: str = "error",
    max_gap_seconds: float | None = None,
) -> Iterator[dict[str, Any]]:
    """What a sample's modalities hold at each of many times: the steps of an episode.

    Series are looked up for all times at once; each step is then a dictionary of views. Options, values and errors are
    those of `at_time`; all errors are raised by the call, none by the iteration.

    Args:
        sample: decoded values by modality.
        timestamps: (K,) seconds, in any order.
        method: of time series.
        outside: for times outside.
        max_gap_seconds: limit of distances.
    """
    if method not in _METHODS:
        raise ValueError(f"method is {method!r}, expected one of {', '.join(_METHODS)}")
    if outside not in _OUTSIDE:
        raise ValueError(f"outside is {outside!r}, expected one of {', '.join(_OUTSIDE)}")
    times = np.asarray(timestamps, dtype=np.float64)
    if times.ndim != 1 or not np.isfinite(times).all():
        raise ValueError(f"timestamps are of shape {times.shape} or not finite, expected (K,) finite seconds")
    columns = {}
    for name, value in sample.items():
        try:
            columns[name] = _column(value, times, method, outside, max_gap_seconds)
        except ValueError as error:
            raise ValueError(f"modality {name!r}: {error}") from error
    return ({name: column(k) for name, column in columns.items()} for k in range(len(times)))


def _column(
    value: Any, times: npt.NDArray[np.float64], method: str, outside: str, max_gap: float | None
) -> Callable[[int], Any]:
    """What a value holds at each time, by the number of the time."""
    if isinstance(value, TimeSeries):
        if method == "interpolate" and value.values.dtype.kind != "b":
            return value.interpolate(times, outside=outside, max_gap_seconds=max_gap).__getitem__
        return value.nearest(times, max_distance_seconds=max_gap)[1].__getitem__
    if isinstance(value, Clip):
        return partial(_frame, value, _rows_shown(value, times, outside).tolist())
    if isinstance(value, MIDI):
        onsets, ends = value.notes.onset_seconds, value.notes.end_seconds
        return [value.notes.select((onsets <= time) & (time < ends)) for time in times].__getitem__
    if isinstance(value, list) and value and all(isinstance(segment, TimedSegment) for segment in value):
        return [[segment for segment in value if _covers(segment, time)] for time in times.tolist()].__getitem__
    return lambda _: value


def _frame(clip: Clip, rows: list[int], k: int) -> FrameAt | None:
    """The frame in a row of the clip; -1 stands for none."""
    row = rows[k]
    if row < 0 or clip.frames is None:
        return None
    return FrameAt(int(clip.frame_indices[row]), float(clip.frame_times[row]), clip.frames[row])


def _covers(segment: TimedSegment, seconds: float) -> bool:
    """Half open; a text without duration covers its own moment."""
    start, end = segment.start_seconds, segment.end_seconds
    return start <= seconds < end or start == seconds == end


def _rows_shown(clip: Clip, times: npt.NDArray[np.float64], outside: str) -> npt.NDArray[np.int64]:
    """The row of `clip.frames` that is shown at each time, -1 for none.

    A frame is shown from its own time up to the next one's: the nearest frame would be one that is yet to come.
    """
    rows = np.flatnonzero(clip.frame_mask)
    if clip.frames is None or not len(rows):
        return np.full(len(times), -1, dtype=np.int64)
    found = np.searchsorted(clip.frame_times[rows], times, side="right") - 1
    start, seconds = clip.window or (0.0, clip.timing.video_seconds)
    end = float(min(seconds, clip.timing.video_seconds - start))
    is_outside = (found < 0) | (times >= end)
    if is_outside.any() and outside == "error":
        first = float(clip.frame_times[rows[0]])
        raise ValueError(f"found time {float(times[is_outside][0])} s, expected {first} to {end} s (excluded)")
    shown = rows[np.maximum(found, 0)]
    return np.asarray(np.where(is_outside, -1, shown) if outside == "nan" else shown, dtype=np.int64)


def resample_to(
    series: TimeSeries,
    timestamps: npt.ArrayLike,
    *,
    method: str = "interpolate",
    outside: str = "error",
    max_gap_seconds: float | None = None,
) -> TimeSeries:
    """A series at other times, such as those of another sensor.

    Args:
        series: what to look up.
        timestamps: (K,) seconds, not decreasing.
        method: ``interpolate``, or ``nearest`` step.
        outside: as in `TimeSeries.interpolate`.
        max_gap_seconds: how far a nearest step may be from the time, and interpolated steps from each other, at most.

    Raises:
        ValueError: a wrong option or time, or a time that is outside with ``error``.
    """
    if method not in _METHODS:
        raise ValueError(f"method is {method!r}, expected one of {', '.join(_METHODS)}")
    times = np.array(timestamps, dtype=np.float64)
    if times.ndim != 1:
        raise ValueError(f"timestamps are of shape {times.shape}, expected (K,)")
    if method == "nearest":
        values = series.nearest(times, max_distance_seconds=max_gap_seconds)[1]
    else:
        values = series.interpolate(times, outside=outside, max_gap_seconds=max_gap_seconds)
    return TimeSeries(times, values, series.columns)


# --- notes and audio --------------------------------------------------------------------------------------------------


def align_onsets(
    notes: NoteTable, sample_rate: int, num_audio_frames: int, *, outside: str = "error"
) -> npt.NDArray[np.int64]:
    """The audio sample at which each note starts.

    With x = onset_seconds · sample_rate in float64, it is the integer nearest to x, of two as near the later:
    floor(x + 1/2). So an onset is never more than half a sample from its place, at any distance from the start.

    Args:
        notes: their onsets count from the first audio sample.
        sample_rate: Hz.
        num_audio_frames: samples per channel that there are.
        outside: for notes that start at the audio's end or later: ``error`` raises, ``mark`` gives -1.

    Returns:
        (N,) int64, in 0..num_audio_frames - 1 (or -1), in order of the notes.

    Raises:
        ValueError: a wrong option, or notes outside the audio with ``error``.
    """
    if outside not in ("error", "mark"):
        raise ValueError(f"outside is {outside!r}, expected error or mark")
    _check_audio(sample_rate, num_audio_frames)
    found = _nearest_sample(notes.onset_seconds, sample_rate)
    is_outside = found >= num_audio_frames
    if is_outside.any() and outside == "error":
        onset = float(notes.onset_seconds[is_outside][0])
        expected = f"onsets within {num_audio_frames} samples at {sample_rate} Hz"
        raise ValueError(
            f"found {int(is_outside.sum())} notes past the audio, the first at {onset} s, expected {expected}"
        )
    return np.where(is_outside, -1, found)


def note_audio_slices(notes: NoteTable, sample_rate: int, num_audio_frames: int) -> npt.NDArray[np.int64]:
    """The audio samples of each note, from its onset up to, not with, its end.

    Both ends are rounded as in `align_onsets` and clipped to the audio: a note that lies past it has an empty slice at
    its end.

    Args:
        notes: their onsets count from the first audio sample.
        sample_rate: Hz.
        num_audio_frames: samples per channel that there are.

    Returns:
        (N, 2) int64, start and stop, 0 <= start <= stop <= num_audio_frames.

    Raises:
        ValueError: a sample rate below 1 or a negative number of samples.
    """
    _check_audio(sample_rate, num_audio_frames)
    starts = _nearest_sample(notes.onset_seconds, sample_rate)
    stops = _nearest_sample(notes.end_seconds, sample_rate)
    return np.minimum(np.stack([starts, stops], axis=1), num_audio_frames)


def _nearest_sample(seconds: npt.NDArray[np.float64], sample_rate: int) -> npt.NDArray[np.int64]:
    exact = seconds * sample_rate
    whole = np.floor(exact)
    # Not floor(exact + 0.5): that sum is rounded itself, and is 1 for the largest number below one half.
    return np.asarray(whole + (exact - whole >= 0.5), dtype=np.int64)


def _check_audio(sample_rate: int, num_audio_frames: int) -> None:
    if sample_rate < 1 or num_audio_frames < 0:
        found = f"{num_audio_frames} samples at {sample_rate} Hz"
        raise ValueError(f"found {found}, expected a rate from 1 Hz and a number of samples from 0")
