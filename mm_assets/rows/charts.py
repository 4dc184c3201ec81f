"""Small charts of a column's numbers, as pictures of some hundred bytes: an event log holds one of each partition."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mm_assets.summaries import bytes_said, counted

__all__ = ["Chart", "Numbers", "drawn_bars", "size_chart"]

MAX_VALUES = 4096  # of a column that are held; of more, every second, fourth, … one
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
    """The numbers of a column: their count, range, and so many of them as a chart needs."""

    def __init__(self) -> None:
        self.count = 0
        self.least, self.most = math.inf, -math.inf
        self._values: list[npt.NDArray[np.float64]] = []
        self._num_held = 0
        self._step = 1

    def add(self, column: pa.Array) -> None:
        """Adds the values of a column, nulls and what is not a number aside."""
        values = pc.cast(column.drop_null(), pa.float64()).to_numpy(zero_copy_only=False)
        values = values[np.isfinite(values)]
        if not len(values):
            return
        self.least, self.most = min(self.least, float(values.min())), max(self.most, float(values.max()))
        first = -self.count % self._step
        self.count += len(values)
        self._values.append(values[first :: self._step])
        self._num_held += len(self._values[-1])
        while self._num_held > MAX_VALUES:
            self._values = [np.concatenate(self._values)[::2]]
            self._num_held = len(self._values[0])
            self._step *= 2

    def chart(self, name: str) -> Chart | None:
        """The histogram, or None where the values do not differ."""
        if not self.count or self.least == self.most:
            return None
        held = np.concatenate(self._values)
        counts, _ = np.histogram(held, bins=BARS, range=(self.least, self.most))
        middle = f"median {'' if self._step == 1 else 'about '}{_said(float(np.median(held)))}"
        said = f"{counted(self.count, 'value')}, {_said(self.least)} to {_said(self.most)}, {middle}"
        return Chart(name=name, said=said, picture=drawn_bars(counts.tolist()))


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


def _said(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"
