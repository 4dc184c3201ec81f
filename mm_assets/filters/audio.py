"""Filters of audio rows: duration and silence.

The duration is the number of audio samples (per channel) divided by the rate, as the header gives them; nothing is
decoded. Silence is measured on decoded samples, a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from mm_assets.filters.base import Block, MeasuredRowFilter, Rows, Threshold, outside, thresholds_of
from mm_assets.filters.parameters import check_choice, check_limits, check_number, some_limit, wrong
from mm_assets.media.silence import LEVELS, Silence, measure_silence
from mm_assets.media.sounds import probe_audio

__all__ = [
    "DEFAULT_THRESHOLD",
    "DEFAULT_WINDOW",
    "AudioDurationFilter",
    "AudioSilenceFilter",
    "SilenceMeter",
    "duration_seconds",
]

DEFAULT_THRESHOLD = -60.0  # dBFS; at -50 the voices of quiet recordings count as silence
DEFAULT_WINDOW = 0.025  # seconds; long enough for a level at the pitch of a low voice, shorter than pauses
_LOWEST_THRESHOLD = -200.0  # dBFS, below the last bit of 32
_SHORTEST_WINDOW = 0.001  # seconds


def _duration(data: memoryview) -> float:
    return probe_audio(data).duration_seconds


def duration_seconds(block: Block, rows: Rows) -> list[float | None]:
    """The duration of each row's audio in seconds; None where there is none or its header cannot be read."""
    return block.measure("audio duration", rows, _duration, threaded=True)


class AudioDurationFilter(MeasuredRowFilter):
    """Keeps audio whose duration lies in a closed interval; None sets no limit, one is needed.

    Args:
        min_seconds: shortest duration kept.
        max_seconds: longest duration kept.
        drop_invalid_rows: drop audio that is not there or whose header cannot be read.
    """

    modality = "audio"

    def __init__(
        self, *, min_seconds: float | None = None, max_seconds: float | None = None, drop_invalid_rows: bool = True
    ) -> None:
        super().__init__(drop_invalid_rows=drop_invalid_rows)
        some_limit(min_seconds=min_seconds, max_seconds=max_seconds)
        self.limits = check_limits("_seconds", min_seconds, max_seconds)

    def measure(self, block: Block, rows: Rows) -> Sequence[float | None]:
        """Durations."""
        return duration_seconds(block, rows)

    def verdict(self, value: float) -> tuple[str, float] | None:
        """``below_min`` or ``above_max`` with the duration in seconds."""
        return outside(("", value, self.limits))

    def thresholds(self) -> Iterator[Threshold]:
        """Of ``audio_duration_seconds``."""
        return thresholds_of("audio_duration_seconds", self.limits, setting="_seconds")


class SilenceMeter:
    """Checked parameters of a measure of silence, which the filter and the annotator share.

    Args:
        threshold_dbfs: level below which a window is silent, from -200 to 0.
        level: "rms" or "peak".
        window_seconds: length of a window, at least 0.001.
    """

    def __init__(self, *, threshold_dbfs: float, level: str, window_seconds: float) -> None:
        self.threshold_dbfs = check_number("threshold_dbfs", threshold_dbfs, least=_LOWEST_THRESHOLD)
        if self.threshold_dbfs > 0:
            raise wrong("threshold_dbfs", f"is {threshold_dbfs!r}, expected at most 0, the level of full scale")
        self.level = check_choice("level", level, LEVELS)
        self.window_seconds = check_number("window_seconds", window_seconds, least=_SHORTEST_WINDOW)

    def measure(self, name: str) -> str:
        """What `Threshold.measure` calls one of its numbers: with other parameters it is another measure."""
        return f"{name}, {self.level} below {self.threshold_dbfs:g} dBFS in {self.window_seconds:g} s"

    def __call__(self, block: Block, rows: Rows) -> list[Silence | None]:
        """The silence in each row's audio; None where there is none or it cannot be decoded."""
        threshold, level, window = self.threshold_dbfs, self.level, self.window_seconds
        measure: Callable[[memoryview], Silence] = partial(
            measure_silence, threshold_dbfs=threshold, level=level, window_seconds=window
        )
        return block.measure(("silence", threshold, level, window), rows, measure, threaded=True)


class AudioSilenceFilter(MeasuredRowFilter):
    """Keeps audio of which no more than a share is silence, and that does not begin or end with too much of it.

    Args:
        max_silence: largest silent share of the audio kept, 0 to 1; None sets no limit.
        max_leading_seconds: longest silence kept at the start; None sets no limit.
        max_trailing_seconds: longest silence kept at the end; None sets no limit.
        threshold_dbfs: level below which a window is silent.
        level: "rms", the root of the mean square over the window, or "peak", the largest magnitude in it.
        window_seconds: length of a window.
        drop_invalid_rows: drop audio that is not there or cannot be decoded.
    """

    modality = "audio"

    def __init__(
        self,
        *,
        max_silence: float | None = 0.8,
        max_leading_seconds: float | None = None,
        max_trailing_seconds: float | None = None,
        threshold_dbfs: float = DEFAULT_THRESHOLD,
        level: str = "rms",
        window_seconds: float = DEFAULT_WINDOW,
        drop_invalid_rows: bool = True,
    ) -> None:
        super().__init__(drop_invalid_rows=drop_invalid_rows)
        some_limit(
            max_silence=max_silence, max_leading_seconds=max_leading_seconds, max_trailing_seconds=max_trailing_seconds
        )
        self.silence = check_limits("_silence", None, max_silence)
        if max_silence is not None and max_silence > 1:
            raise wrong("max_silence", f"is {max_silence!r}, expected a share from 0 to 1")
        self.leading = check_limits("_leading_seconds", None, max_leading_seconds)
        self.trailing = check_limits("_trailing_seconds", None, max_trailing_seconds)
        self.meter = SilenceMeter(threshold_dbfs=threshold_dbfs, level=level, window_seconds=window_seconds)

    def measure(self, block: Block, rows: Rows) -> Sequence[Silence | None]:
        """The silence in each audio row."""
        return self.meter(block, rows)

    def verdict(self, value: Silence) -> tuple[str, float] | None:
        """``silence_above_max`` with the share, or ``leading_above_max`` or ``trailing_above_max`` with the seconds."""
        return outside(
            ("silence_", value.share, self.silence),
            ("leading_", value.leading_seconds, self.leading),
            ("trailing_", value.trailing_seconds, self.trailing),
        )

    def thresholds(self) -> Iterator[Threshold]:
        """Of ``audio_silence`` and of the seconds at both ends, measured with its parameters."""
        measure = self.meter.measure
        yield from thresholds_of(measure("audio_silence"), self.silence, setting="_silence", reason="silence_")
        for end, limits in (("leading", self.leading), ("trailing", self.trailing)):
            name = measure(f"audio_{end}_silence_seconds")
            yield from thresholds_of(name, limits, setting=f"_{end}_seconds", reason=f"{end}_")
