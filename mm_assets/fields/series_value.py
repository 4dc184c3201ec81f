"""A decoded time series and its look-up by time; nothing here knows payloads.

All look-ups take one time or many, and search by bisection. Times are float64 seconds throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mm_assets.summaries import ArrayValue

__all__ = ["Columns", "TimeSeries"]

Columns: TypeAlias = tuple[tuple[str, int, int], ...]
"""(name, start, end) of named columns, half open."""

_OUTSIDE = ("error", "clip", "nan")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TimeSeries(ArrayValue):
    """Rows of numbers over time.

    Attributes:
        timestamps: (T,) float64 seconds, finite, not decreasing.
        values: (T, D), bool, integers or floats.
        columns: (name, start, end) of named columns, half open; may be empty.

    Raises:
        ValueError: arrays of another kind or extent, or timestamps that decrease.
    """

    timestamps: npt.NDArray[np.float64]
    values: npt.NDArray[Any]
    columns: Columns = ()

    def __post_init__(self) -> None:
        times, values = self.timestamps, self.values
        if not isinstance(times, np.ndarray) or times.ndim != 1 or times.dtype != np.float64:
            raise ValueError(f"found timestamps {_words(times)}, expected (T,) float64")
        if not isinstance(values, np.ndarray) or values.ndim != 2 or values.dtype.kind not in "biuf":
            raise ValueError(f"found values {_words(values)}, expected (T, D) numbers")
        if len(times) != len(values):
            raise ValueError(f"found {len(times)} timestamps for {len(values)} rows, expected one each")
        if not np.isfinite(times).all():
            raise ValueError("found a timestamp that is infinite or NaN, expected seconds")
        is_late = times[1:] < times[:-1]
        if is_late.any():
            step = int(np.argmax(is_late)) + 1
            found = f"timestamp {float(times[step])} after {float(times[step - 1])} at step {step}"
            raise ValueError(f"found {found}, expected timestamps that increase")
        for name, start, end in self.columns:
            if not 0 <= start < end <= values.shape[1]:
                raise ValueError(
                    f"found columns {start} to {end} ({name!r}) of {values.shape[1]}, expected columns of it"
                )

    def __len__(self) -> int:
        return len(self.timestamps)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TimeSeries):
            return NotImplemented
        if self.columns != other.columns or self.values.dtype != other.values.dtype:
            return False
        is_float = self.values.dtype.kind == "f"
        return np.array_equal(self.timestamps, other.timestamps) and np.array_equal(
            self.values, other.values, equal_nan=is_float
        )

    @property
    def duration_seconds(self) -> float:
        """From the first step to the last; 0 where there are less than two."""
        return float(self.timestamps[-1] - self.timestamps[0]) if len(self) else 0.0

    def column(self, name: str) -> npt.NDArray[Any]:
        """The named columns, a (T, end - start) view.

        Raises:
            KeyError: no columns have that name.
        """
        for known, start, end in self.columns:
            if known == name:
                return self.values[:, start:end]
        raise KeyError(name)

    def between(self, start_seconds: float, end_seconds: float) -> TimeSeries:
        """The steps from `start_seconds` up to, not with, `end_seconds`: views, no copy."""
        first, last = np.searchsorted(self.timestamps, [start_seconds, end_seconds], side="left")
        chosen = slice(int(first), max(int(first), int(last)))
        return TimeSeries(self.timestamps[chosen], self.values[chosen], self.columns)

    def nearest(
        self, seconds: npt.ArrayLike, *, max_distance_seconds: float | None = None
    ) -> tuple[Any, npt.NDArray[Any]]:
        """The step nearest to each time; of two as near the earlier, of equal timestamps the last.

        Args:
            seconds: one time, or (K,) times.
            max_distance_seconds: how far the step may be from the time at most; None for any distance.

        Returns:
            Its index and (D,) values; for (K,) times (K,) int64 and (K, D).

        Raises:
            ValueError: a time that is not finite, a series without steps, or a step that is too far.
        """
        times = self._times(seconds)
        after = np.searchsorted(self.timestamps, times, side="right")
        before = np.maximum(after - 1, 0)
        after = np.minimum(after, len(self) - 1)
        is_later = np.abs(self.timestamps[after] - times) < np.abs(times - self.timestamps[before])
        index = np.where(is_later, after, before)
        index = np.searchsorted(self.timestamps, self.timestamps[index], side="right") - 1
        if max_distance_seconds is not None:
            self._refuse(times, np.abs(self.timestamps[index] - times) > max_distance_seconds, max_distance_seconds)
        chosen = int(index[0]) if np.ndim(seconds) == 0 else index
        return chosen, self.values[chosen]

    def interpolate(
        self, seconds: npt.ArrayLike, *, outside: str = "error", max_gap_seconds: float | None = None
    ) -> npt.NDArray[Any]:
        """Values between steps on a straight line; at a step's own time exactly its values.

        Each is computed in float64 and rounded once to the result's dtype: float32 for floats of 16 and 32 bits, else
        float64. Angles and quaternions do not lie on straight lines: look those up with `nearest`.

        Args:
            seconds: one time, or (K,) times.
            outside: for a time before the first step, after the last, or inside too wide a gap: ``error`` raises,
                ``clip`` gives the nearest step's values, ``nan`` gives NaN.
            max_gap_seconds: how far the steps on both sides of a time may be apart at most; None for any distance.

        Returns:
            (D,), for (K,) times (K, D).

        Raises:
            ValueError: a time that is not finite, a series without steps or of bool, an unknown `outside`, or a time
                outside with ``error``.
        """
        if outside not in _OUTSIDE:
            raise ValueError(f"outside is {outside!r}, expected one of {', '.join(_OUTSIDE)}")
        if self.values.dtype.kind == "b":
            raise ValueError("values are bool, expected numbers: true and false have nothing between them")
        times = self._times(seconds)
        before = np.searchsorted(self.timestamps, times, side="right") - 1
        after = np.minimum(before + 1, len(self) - 1)
        is_hit = self.timestamps[np.maximum(before, 0)] == times
        is_outside = ~is_hit & ((before < 0) | (before == len(self) - 1))
        before = np.maximum(before, 0)
        gaps = self.timestamps[after] - self.timestamps[before]
        if max_gap_seconds is not None:
            is_outside |= ~is_hit & (gaps > max_gap_seconds)
        if outside == "error":
            self._refuse(times, is_outside, max_gap_seconds)
        inside = ~is_hit & ~is_outside
        low = self.values[before].astype(np.float64)
        high = self.values[after[inside]].astype(np.float64)
        weights = ((times[inside] - self.timestamps[before[inside]]) / gaps[inside])[:, np.newaxis]
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinite values are values here
            low[inside] += weights * (high - low[inside])
        if outside == "clip" and is_outside.any():
            low[is_outside] = self.nearest(times[is_outside])[1]
        elif is_outside.any():
            low[is_outside] = np.nan
        is_short = self.values.dtype.kind == "f" and self.values.dtype.itemsize <= 4
        result = low.astype(np.float32 if is_short else np.float64)
        return result[0] if np.ndim(seconds) == 0 else result

    def _times(self, seconds: npt.ArrayLike) -> npt.NDArray[np.float64]:
        times = np.atleast_1d(np.asarray(seconds, dtype=np.float64))
        if times.ndim != 1 or not np.isfinite(times).all():
            raise ValueError(f"found times {_words(times)}, expected one finite number of seconds, or (K,) of them")
        if not len(self):
            raise ValueError("series has no steps, expected at least one")
        return times

    def _refuse(self, times: npt.NDArray[np.float64], is_outside: npt.NDArray[np.bool_], limit: float | None) -> None:
        if is_outside.any():
            first, last = float(self.timestamps[0]), float(self.timestamps[-1])
            within = "" if limit is None else f", and steps within {limit} s"
            raise ValueError(f"found time {float(times[is_outside][0])} s, expected {first} to {last} s{within}")


def _words(value: object) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
