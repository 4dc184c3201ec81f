"""Byte ranges: merged before they are read, sliced from the blocks that were read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["MAX_GAP", "MAX_REQUEST", "RangeSource", "merge_ranges", "slice_ranges"]

MAX_GAP = 64 << 10  # bytes between ranges that are fetched as one, which costs less than another request
MAX_REQUEST = 16 << 20  # bytes of one merged request, which are in memory at once


def merge_ranges(ranges: Iterable[tuple[int, int]], max_gap: int) -> list[tuple[int, int]]:
    """Sorted, disjoint (start, end) that cover ranges (offset, size).

    Ranges with gaps of up to `max_gap` bytes are merged, up to `MAX_REQUEST`; overlapping ones always. Empty ones are
    omitted: HTTP cannot express them, and servers answer with the whole file.
    """
    merged: list[tuple[int, int]] = []
    for offset, size in sorted({one for one in ranges if one[1]}):
        end = offset + size
        if merged:
            last_start, last_end = merged[-1]
            near = offset - last_end <= max_gap and max(end, last_end) - last_start <= MAX_REQUEST
            if near or offset < last_end:  # overlapping ranges are merged at any size, to read no byte twice
                merged[-1] = (last_start, max(last_end, end))
                continue
        merged.append((offset, end))
    return merged


def slice_ranges(
    ranges: Sequence[tuple[int, int]], merged: Sequence[tuple[int, int]], blocks: Sequence[memoryview]
) -> list[memoryview]:
    """The bytes of each (offset, size) as views of blocks, which are the contents of the merged ranges."""
    starts = [start for start, _ in merged]
    views = []
    for offset, size in ranges:
        if not size:
            views.append(memoryview(b""))
            continue
        k = bisect_right(starts, offset) - 1
        at = offset - starts[k]
        views.append(blocks[k][at : at + size])
    return views


class RangeSource(Protocol):
    """A file that is read by ranges: a `SourceFile`, or one read through a cache."""

    @property
    def url(self) -> str:
        """Path or URL, for messages."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def read_ranges(self, ranges: Sequence[tuple[int, int]], *, max_gap: int | None = None) -> list[memoryview]:
        """As `SourceFile.read_ranges`."""

    def close(self) -> None:
        """Closes the file."""
