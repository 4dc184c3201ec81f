"""Perceptual hash of an image: 64 bits that stay nearly the same when it is re-encoded or resized.

The bits say which of the lowest frequencies of a small copy of the image are above their median (docs/spec/filters.md).
All arithmetic after decoding is exact, so for given pixels the hash is the same on every machine.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt

from mm_assets.filters.sharpness import decode_luma

__all__ = ["HASH_BITS", "MIN_DETAIL", "MIN_SIDE", "hash_of_luma", "perceptual_hash"]

HASH_BITS = 64
MIN_SIDE = 64  # pixels of the shorter side after decoding at a reduced scale: two for each cell of the small copy
_CELLS = 32  # per side of the small copy
_LEVELS = 16  # units per grey level in it
_SCALE = 4096  # of the rounded cosines: with 12 bits of cells, sums stay far below 2**53
MIN_DETAIL = 32  # frequencies of the 64 that must be pronounced for an image to have a hash
_PRONOUNCED = 2.0  # grey levels, above the noise of re-encoding

_DIAGONALS = 11  # v + u from 0 to 10: the 64 lowest frequencies without the mean
_FREQUENCIES = sorted(
    ((v, u) for v in range(_DIAGONALS) for u in range(_DIAGONALS) if v + u > 0),
    key=lambda at: (at[0] + at[1], max(at), at),
)[:HASH_BITS]
_ROWS, _COLUMNS = (np.array(axis) for axis in zip(*_FREQUENCIES, strict=True))


def perceptual_hash(data: memoryview) -> int | None:
    """The hash of one encoded image, an integer of 64 bits; None for an image without enough detail.

    Raises:
        MediaError: as of `decode_luma`.
    """
    return hash_of_luma(decode_luma(data, min_side=MIN_SIDE))


def hash_of_luma(luma: npt.NDArray[np.uint8]) -> int | None:
    """The hash of luma, (height, width) uint8; see `perceptual_hash`."""
    waves = _cosines()
    # Integers below 2**53 are exact in float64, so the order of summation does not matter.
    spectrum = (waves @ _small_copy(luma) @ waves.T)[_ROWS, _COLUMNS]
    unit = _SCALE * _SCALE * _LEVELS * (_CELLS / 2)  # of one grey level in the orthonormal transform
    if np.count_nonzero(np.abs(spectrum) >= _PRONOUNCED * unit) < MIN_DETAIL:
        return None
    return int.from_bytes(np.packbits(spectrum > np.median(spectrum)).tobytes(), "big")


@cache
def _cosines() -> npt.NDArray[np.float64]:
    """(frequencies, `_CELLS`): the rows of the cosine transform (DCT-II) as integers."""
    frequencies = np.arange(max(_ROWS.max(), _COLUMNS.max()) + 1)
    angles = math.pi / (2 * _CELLS) * np.outer(frequencies, 2 * np.arange(_CELLS) + 1)
    return np.asarray(np.rint(_SCALE * np.cos(angles)), dtype=np.float64)


def _small_copy(luma: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """(`_CELLS`, `_CELLS`): the rounded mean of each cell, in `_LEVELS` units per grey level."""
    values: npt.NDArray[np.integer] = luma
    parts = 1
    # The longer side first: the intermediate result is then small, however long and thin the image is.
    for axis in sorted((0, 1), key=lambda a: -luma.shape[a]):
        summed, length = _cell_sums(values.swapaxes(0, axis))
        values = summed.swapaxes(0, axis)
        parts *= length
    return ((values * _LEVELS + parts // 2) // parts).astype(np.float64)


def _cell_sums(values: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int64], int]:
    """Sums over the cells of the first axis, (`_CELLS`, n) int64, and the number of parts in each sum.

    A cell's edge may divide a value: each value counts as `_CELLS` parts, which are shared between two cells.
    """
    if len(values) < _CELLS:
        values = np.repeat(values, -(-_CELLS // len(values)), axis=0)
    first, cut = np.divmod(np.arange(_CELLS) * len(values), _CELLS)
    ends = [*first[1:].tolist(), len(values)]
    # One sum per cell: `reduceat` would convert the whole image to eight bytes per pixel first.
    cells = [values[a:b].sum(axis=0, dtype=np.int64) for a, b in zip(first.tolist(), ends, strict=True)]
    sums = np.stack(cells) * _CELLS
    shares = cut[:, None] * values[first]  # the part before the edge of the value that it divides
    sums -= shares
    sums[:-1] += shares[1:]
    return sums, len(values)
