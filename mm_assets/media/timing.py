"""Presentation times of frames, and the audio samples that belong to a frame: the only module with this arithmetic.

Frame rates are ratios of integers, and so is every result before its last step: the boundary after an hour is as exact
as the first, and nothing overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX_FRAME_RATE",
    "MAX_RATE_TERM",
    "FrameIndex",
    "Timing",
    "as_frame_rate",
    "frame_boundaries",
    "nominal_rate",
    "offset_in_samples",
    "rounding_tolerance",
    "uniform_indices",
]

MAX_FRAME_RATE = 1000  # frames per second, the tick of Matroska; the least rate is its inverse
_MAX_TERM = 2**31 - 1  # of a ratio: the product of two terms fits 64 bits
MAX_RATE_TERM = 2**20  # of a stored rate: its product with a frame number, below 2**32, is exact in a float64
_NTSC = tuple(Fraction(n * 1000, 1001) for n in (15, 24, 30, 48, 60, 120, 240))
_STANDARD = (*map(Fraction, (10, 12, 15, 20, 24, 25, 30, 48, 50, 60, 100, 120, 240)), *_NTSC)
_NTSC_TOLERANCE = Fraction(5, 1000)  # 23.98 and 29.97 are this near to 24000/1001 and 30000/1001


def as_frame_rate(value: Fraction | float | tuple[int, int]) -> Fraction:
    """Frames per second as a ratio.

    A float within 0.005 of 1000/1001 times 15, 24, 30, 48, 60, 120 or 240 is that ratio, so that 29.97 is 30000/1001;
    any other float is the nearest ratio with a denominator up to 1001. Fractions, integers and pairs are exact.

    Raises:
        ValueError: not a number, or outside 1/1000 to 1000, or a ratio with a term above 2**20.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, Fraction | int | float | tuple)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise ValueError(f"found {value!r}, expected a frame rate")
    if isinstance(value, float):
        exact = Fraction(value)
        near = [rate for rate in _NTSC if abs(exact - rate) <= _NTSC_TOLERANCE]
        rate = near[0] if near and exact.denominator != 1 else exact.limit_denominator(1001)
    elif isinstance(value, tuple):
        if len(value) != 2 or not all(type(term) is int for term in value) or value[1] == 0:
            raise ValueError(f"found {value!r}, expected numerator and denominator")
        rate = Fraction(*value)
    else:
        rate = Fraction(value)
    if not _is_rate(rate):
        raise ValueError(f"found {rate} frames per second, expected 1/{MAX_FRAME_RATE} to {MAX_FRAME_RATE}")
    return rate


def offset_in_samples(seconds: Fraction | float, sample_rate: int) -> int:
    """Seconds as whole samples, a half rounded to even, so that an offset and its negative are opposite."""
    return round(Fraction(seconds) * sample_rate)


def frame_boundaries(indices: npt.ArrayLike, rate: Fraction, sample_rate: int) -> npt.NDArray[np.int64]:
    """Sample at which each frame begins: floor(i * sample_rate / rate), exact, without an offset.

    Args:
        indices: frame numbers of any shape.
        rate: frames per second.
        sample_rate: Hz.

    Raises:
        OverflowError: a result does not fit 64 bits.
        ValueError: a negative index, or a rate whose terms are 2**31 or more.
    """
    frames = np.asarray(indices, dtype=np.int64)
    num, den = rate.as_integer_ratio()
    if num > _MAX_TERM or den > _MAX_TERM or not 0 <= sample_rate <= _MAX_TERM:
        raise ValueError(f"found rates {rate} and {sample_rate}, expected terms below 2**31")
    if frames.size == 0:
        return frames
    if int(frames.min()) < 0:
        raise ValueError(f"found frame {int(frames.min())}, expected 0 or more")
    if int(frames.max()) * sample_rate * den // num >= 2**63:
        raise OverflowError(f"frame {int(frames.max())} begins at a sample beyond 64 bits")
    # floor(i*p/num) with p = whole*num + part and i = rounds*num + rest: each product is at most the result or num**2
    whole, part = divmod(sample_rate * den, num)
    rounds, rest = np.divmod(frames, num)
    return np.asarray(frames * whole + rounds * part + rest * part // num, dtype=np.int64)


def uniform_indices(num_frames: int, target: int) -> npt.NDArray[np.int64]:
    """(min(num_frames, target),) int64: frames spread evenly from the first to the last.

    Entry k is k * (num_frames - 1) / (target - 1), a half rounded up; a single entry is the first frame. All frames if
    there are no more than `target`.
    """
    if num_frames <= target:
        return np.arange(num_frames, dtype=np.int64)
    if target == 1:
        return np.zeros(1, dtype=np.int64)
    steps = np.arange(target, dtype=np.int64)
    return (2 * steps * (num_frames - 1) + (target - 1)) // (2 * (target - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Frames and audio of one clip on one timeline, which begins with frame 0.

    Attributes:
        num_frames: 0 where there is no video.
        frame_rate: frames per second; None without video.
        sample_rate: Hz; 0 where there is no audio.
        num_audio_samples: per channel.
        audio_offset_samples: how much later than frame 0 the audio starts; negative if it starts earlier.
        truncated: whether the clip was truncated when it was encoded.
    """

    num_frames: int
    frame_rate: Fraction | None
    sample_rate: int
    num_audio_samples: int
    audio_offset_samples: int
    truncated: bool = False

    @property
    def video_seconds(self) -> float:
        """Length of the video."""
        return float(self.num_frames / self.frame_rate) if self.frame_rate else 0.0

    @property
    def audio_seconds(self) -> float:
        """Length of the audio."""
        return self.num_audio_samples / self.sample_rate if self.sample_rate else 0.0

    @property
    def duration_seconds(self) -> float:
        """The longer of the two."""
        return max(self.video_seconds, self.audio_seconds)

    def audio_segments(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Half-open ranges of audio samples that belong to frames.

        Args:
            indices: (K,) frames.

        Returns:
            (K, 2) int64: `frame_boundaries` of i and i + 1 less the offset, clipped to 0..num_audio_samples; zeros
            without audio.

        Raises:
            IndexError: a frame that the clip does not have.
        """
        frames = self.check_frames(indices)
        if self.frame_rate is None or self.sample_rate == 0:
            return np.zeros((len(frames), 2), dtype=np.int64)
        both = np.stack([frames, frames + 1], axis=1)
        exact = frame_boundaries(both, self.frame_rate, self.sample_rate) - np.int64(self.audio_offset_samples)
        return np.asarray(np.clip(exact, 0, self.num_audio_samples), dtype=np.int64)

    def frame_times(self, indices: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """(K,) float64 seconds at which frames begin, each rounded once.

        Raises:
            IndexError: a frame that the clip does not have.
        """
        frames = self.check_frames(indices)
        if self.frame_rate is None:
            return np.zeros(0, dtype=np.float64)
        num, den = self.frame_rate.as_integer_ratio()
        return (frames * den) / np.float64(num)

    def frame_index_at(self, seconds: float) -> int:
        """The frame shown at a time; on a boundary the frame that begins then.

        Raises:
            ValueError: no frame is shown at that time.
        """
        if self.frame_rate is None or not math.isfinite(seconds):
            raise ValueError(f"found {seconds!r} seconds, expected a time of a clip with video")
        index = math.floor(Fraction(seconds) * self.frame_rate)
        num, den = self.frame_rate.as_integer_ratio()
        if (index + 1) * den / num <= seconds:  # the float of a boundary may be less than the boundary
            index += 1
        if not 0 <= index < self.num_frames:
            raise ValueError(f"found {seconds} seconds, expected 0 to {self.video_seconds} (excluded)")
        return index

    def check_frames(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Frame numbers as (K,) int64.

        Raises:
            IndexError: a frame that the clip does not have.
        """
        frames = np.asarray(indices)
        if frames.size == 0:
            return np.zeros(0, dtype=np.int64)
        if frames.ndim != 1 or frames.dtype.kind not in "iu":
            raise IndexError(f"found {frames.dtype} of shape {frames.shape}, expected a list of frame numbers")
        if int(frames.min()) < 0 or int(frames.max()) >= self.num_frames:
            raise IndexError(f"found frames {frames.min()} to {frames.max()}, expected 0 to {self.num_frames - 1}")
        return frames.astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameIndex:
    """The presentation times of a file's frames.

    Attributes:
        pts: (n,) int64 ticks, increasing; n at least 1.
        keyframe_pts: (k,) int64 ticks, increasing: where decoding can begin.
        time_base: seconds per tick.
        rate: nominal frames per second.
        is_constant: whether all times follow from that rate, except for rounding to ticks.
        duration: seconds from the first frame's start to the last one's end.
    """

    pts: npt.NDArray[np.int64]
    keyframe_pts: npt.NDArray[np.int64]
    time_base: Fraction
    rate: Fraction
    is_constant: bool
    duration: Fraction

    @property
    def start(self) -> Fraction:
        """Presentation time of the first frame, in seconds."""
        return int(self.pts[0]) * self.time_base

    def num_frames(self, rate: Fraction, start: Fraction = Fraction(0)) -> int:
        """Frames of a constant rate from `start` seconds into the video to its end, rounded."""
        return max(math.floor((self.duration - start) * rate + Fraction(1, 2)), 0)

    def shown_at(self, indices: npt.NDArray[np.int64], rate: Fraction, start: Fraction) -> npt.NDArray[np.int64]:
        """Position in `pts` of what is shown when each frame of a constant rate begins.

        That is the last frame whose presentation time is not later; half a tick of rounding, and at most half a
        millisecond, is tolerated.

        Args:
            indices: (K,) frames of the constant rate.
            rate: frames per second.
            start: seconds from the first frame of the file to frame 0 of the constant rate.
        """
        if self.is_constant and rate == self.rate and start == 0:
            return np.minimum(indices, len(self.pts) - 1)
        tolerance = rounding_tolerance(self.time_base)
        # In ticks, over one denominator, so that every product is an integer.
        at_first, period = (start + tolerance) / self.time_base, 1 / (rate * self.time_base)
        scale = math.lcm(at_first.denominator, period.denominator)
        begin, step = int(at_first * scale), int(period * scale)
        first, last = int(self.pts[0]), int(self.pts[-1])  # later times than the last may not fit 64 bits
        latest = (min(first + (begin + index * step) // scale, last) for index in map(int, indices))
        found = np.searchsorted(self.pts, np.fromiter(latest, np.int64, len(indices)), side="right") - 1
        return np.clip(found, 0, len(self.pts) - 1)


def rounding_tolerance(time_base: Fraction) -> Fraction:
    """Seconds by which a frame's time may be late because it is rounded: half a tick, at most half a millisecond."""
    return min(time_base / 2, Fraction(1, 2000))


def nominal_rate(pts: npt.NDArray[np.int64], time_base: Fraction, hints: Sequence[Fraction]) -> tuple[Fraction, bool]:
    """The frame rate of presentation times, and whether they follow it to within a tick.

    Candidates are the container's rates (`hints`), the exact spacing, and the standard rates. If none of them matches,
    the rate is variable, and its value the first hint in range, or the mean.

    Args:
        pts: (n,) int64 ticks, increasing.
        time_base: seconds per tick.
        hints: rates in order of trust.
    """
    trusted = [rate for rate in map(Fraction, hints) if _is_rate(rate)]
    others: list[Fraction] = []
    span = int(pts[-1]) - int(pts[0])
    if span > 0:
        mean = (len(pts) - 1) / (span * time_base)
        near = sorted(_STANDARD, key=lambda rate: abs(rate - mean))
        others = [mean, *near] if int(np.ptp(np.diff(pts))) == 0 else [*near, mean]
    ticks = (pts - pts[0]).astype(np.float64)
    steps = np.arange(len(pts), dtype=np.float64)
    for rate in (*trusted, *filter(_is_rate, others)):
        period = float(1 / (rate * time_base))
        # If a tick is a whole frame, as in AVI, a time that is one tick off is a missing frame and not a rounded time.
        if np.abs(ticks - steps * period).max() <= min(1.0, 0.499 * period):
            return rate, True
    if trusted:
        return trusted[0], False
    if span > 0:
        return min(max(mean, Fraction(1, MAX_FRAME_RATE)), Fraction(MAX_FRAME_RATE)).limit_denominator(1001), False
    return Fraction(25), True  # a single frame without any rate


def _is_rate(rate: Fraction) -> bool:
    return Fraction(1, MAX_FRAME_RATE) <= rate <= MAX_FRAME_RATE and max(rate.as_integer_ratio()) <= MAX_RATE_TERM
