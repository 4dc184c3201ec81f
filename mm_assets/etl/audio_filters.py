"""Filters of audio rows: duration.

The duration is the number of audio samples (per channel) divided by the rate, as the header gives them; nothing is
decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

from mm_assets.etl.filter_base import Block, MeasuredRowFilter, Rows
from mm_assets.etl.parameters import bounds, check_flag, check_number, some_limit
from mm_assets.media import probe_audio

__all__ = ["AudioDurationFilter", "duration_seconds"]


def _duration(data: memoryview) -> float:
    return probe_audio(data).duration_seconds


def duration_seconds(block: Block, rows: Rows) -> list[float | None]:
    """The duration of each row's audio in seconds; None where there is none or its header cannot be read."""
    return block.measure("audio duration", rows, _duration, threaded=True)


class AudioDurationFilter(MeasuredRowFilter):
    """Keeps audio whose duration lies in a closed interval; None is no limit, one is needed.

    Args:
        min_seconds: shortest duration kept.
        max_seconds: longest duration kept.
        drop_invalid_rows: drop audio that is not there or whose header cannot be read.
    """

    modality = "audio"

    def __init__(
        self, *, min_seconds: float | None = None, max_seconds: float | None = None, drop_invalid_rows: bool = True
    ) -> None:
        super().__init__(drop_invalid_rows=check_flag("drop_invalid_rows", drop_invalid_rows))
        some_limit(min_seconds, max_seconds, parameters=("min_seconds", "max_seconds"))
        low = None if min_seconds is None else check_number("min_seconds", min_seconds)
        high = None if max_seconds is None else check_number("max_seconds", max_seconds)
        self.min_seconds, self.max_seconds = bounds("_seconds", low, high)

    def measure(self, block: Block, rows: Rows) -> Sequence[float | None]:
        """Durations."""
        return duration_seconds(block, rows)

    def verdict(self, value: float) -> tuple[str, float] | None:
        """``below_min`` or ``above_max`` with the duration in seconds."""
        if self.min_seconds is not None and value < self.min_seconds:
            return "below_min", value
        if self.max_seconds is not None and value > self.max_seconds:
            return "above_max", value
        return None
