"""Windows of samples: the part of each sample's time that a loader reads in an epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ConfigError
from mm_assets.loading.order import hash_float
from mm_assets.loading.rules import check_integer

__all__ = ["Window"]

_START = int.from_bytes(b"window", "little")  # so that no transform's generator has the same key


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window of each sample: clips, audio, series, timed text and MIDI are read from the same seconds of its clock.

    It is the `window` of a `MultimodalLoader`. Batches then have ``window``, (n, 2) float64, start and duration of each
    in seconds. The start is drawn for each sample and epoch, uniformly from where the whole window fits in the sample's
    duration (see `Dataset.durations`). In a sample that is shorter it is 0, and what is missing at the end is absent.

    Attributes:
        seconds: duration, finite and above 0.
        frames: frames of a clip to decode, from 1, at equal steps of time from the start; None for the number that its
            field says (`target_frames`), or all.

    Raises:
        ConfigError: a number is not in its range.
    """

    seconds: float
    frames: int | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not is_number or not math.isfinite(self.seconds) or self.seconds <= 0:
            raise ConfigError("arguments", "window.seconds", f"found {self.seconds!r}, expected seconds above 0")
        if self.frames is not None:
            check_integer("window.frames", self.frames, 1)

    def draw(
        self, durations: npt.NDArray[np.float64], indices: npt.NDArray[np.int64], *, seed: int, epoch: int
    ) -> npt.NDArray[np.float64]:
        """Returns (n, 2) float64, start and duration of the window of each sample; it depends on nothing else.

        Args:
            durations: (n,) seconds of the samples, NaN where one has no duration.
            indices: (n,) int64, the samples.
            seed: of the loader.
            epoch: number of the epoch.
        """
        room = np.maximum(np.nan_to_num(durations) - self.seconds, 0.0)
        shares = [hash_float(seed, epoch, index, _START) for index in indices.tolist()]
        return np.stack([room * np.array(shares), np.full(len(indices), float(self.seconds))], axis=1)
