"""Small charts of a column's numbers, as pictures of some hundred bytes: an event log holds one of each partition."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mm_assets.summaries import bytes_said, counted

__all__ = ["Chart", "Numbers", "drawn_bars", "size_chart"]

MAX_VALUES = 4096  # that a chart is drawn from; of more, it is every second, fourth, … one
BARS, BAR_WIDTH, HEIGHT = 32, 5, 40  # pixels
COLOUR = (79, 67, 221)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A histogram.

    Attributes:
        name: what is counted: a column for instance.
        said: number and range of the values, in words.
        picture: PNG with transparent ground.
    """

    name: str
    said: str
    picture: bytes


class Numbers:
    """The numbers of a column: their count, their range, and a sample of at most `MAX_VALUES` for a chart."""

    def __init__(self) -> None:
        self.count = 0
        self._lowest: int | float = math.inf
        self._highest: int | float = -math.inf
        self._values: list[npt.NDArray[Any]] = []
        self._num_values = 0
        self._step = 1

    def add(self, column: pa.Array) -> None:
        """Adds the values of an integer or floating-point column except nulls, NaN and infinities."""
        values = column.drop_null().to_numpy(zero_copy_only=False)
        if values.dtype.kind == "f":
            values = values[np.isfinite(values)].astype(np.float64)
        if not len(values):
            return
        # As Python's numbers: integers above 2**53 are not doubles, and the difference of two int64 is not an int64.
        self._lowest = min(self._lowest, values.min().item())
        self._highest = max(self._highest, values.max().item())
        first = -self.count % self._step
        self.count += len(values)
        self._values.append(values[first :: self._step])
        self._num_values += len(self._values[-1])
        while self._num_values > MAX_VALUES:
            self._values = [np.concatenate(self._values)[::2]]
            self._num_values = len(self._values[0])
            self._step *= 2

    def chart(self, name: str) -> Chart | None:
        """Returns the histogram, or None if all values are equal."""
        if not self.count or self._lowest == self._highest:
            return None
        values = np.concatenate(self._values)
        counts = np.bincount(_bars_of(values, self._lowest, self._highest), minlength=BARS)
        with np.errstate(over="ignore"):  # the mean of the two middle ones of the largest doubles
            median = float(np.median(values))
        middle = f"median {'' if self._step == 1 else 'about '}{_format_number(median)}"
        ends = f"{_format_number(self._lowest)} to {_format_number(self._highest)}"
        said = f"{counted(self.count, 'value')}, {ends}, {middle}"
        return Chart(name=name, said=said, picture=drawn_bars(counts.tolist()))


def _bars_of(values: npt.NDArray[Any], lowest: float, highest: float) -> npt.NDArray[np.intp]:
    """Returns the number of the bar of each value, all bars being of equal width between two different numbers."""
    if isinstance(lowest, int):
        # Modulo 2**64 the distance from the lowest value is exact for signed and unsigned integers.
        distance = (values.astype(np.uint64) - np.array([lowest % 2**64], np.uint64)).astype(np.float64)
        ratios = distance / (highest - lowest)
    else:
        scale = 1.0 if math.isfinite(highest - lowest) else 0.5
        ratios = (values * scale - lowest * scale) / (highest * scale - lowest * scale)
    return np.minimum((ratios * BARS).astype(np.intp), BARS - 1)


def size_chart(sizes: Mapping[int, int]) -> Chart:
    """The histogram of sizes of media, a bar per power of two.

    Args:
        sizes: number of bits of a size to the number of items with it.
    """
    low, high = min(sizes), max(sizes)
    ends = f"{bytes_said(2 ** (low - 1) if low else 0)} to {bytes_said(2**high)}"
    said = f"{counted(sum(sizes.values()), 'item')}, {ends}, a bar per power of two"
    return Chart(name="content_size", said=said, picture=drawn_bars([sizes.get(n, 0) for n in range(low, high + 1)]))


def drawn_bars(counts: Sequence[float], *, is_centred: bool = False) -> bytes:
    """A PNG with a bar per number; that of a number above 0 is at least one pixel high.

    Args:
        counts: the numbers, none below 0.
        is_centred: bars extend to both sides of the middle, as those of a waveform.
    """
    from PIL import Image

    width = max(BARS * BAR_WIDTH // max(len(counts), 1), 2)
    most = max(counts, default=0) or 1
    pixels = np.zeros((HEIGHT, width * len(counts)), np.uint8)
    for number, count in enumerate(counts):
        high = max(round(HEIGHT * count / most), 1) if count else 0
        top = (HEIGHT - high) // 2 if is_centred else HEIGHT - high
        pixels[top : top + high, number * width : (number + 1) * width - 1] = 1
    image = Image.fromarray(pixels, "P")
    image.putpalette([*(255, 255, 255), *COLOUR])
    target = io.BytesIO()
    image.save(target, "PNG", bits=1, transparency=0, optimize=True)
    return target.getvalue()


def _format_number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1e15:
        return f"{value:.6g}"
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"
