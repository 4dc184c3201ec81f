"""What readers pass from step to step: a file's head, the places of a batch's payloads, and runs of bounded size."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from mm_assets.formats.records import Descriptor, Payload, Trailer

Indices: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
"""Indices of samples; repeats are fine, negative ones count from the end."""

BLOCK_ROWS = 1 << 14  # samples processed together by whole-file operations
BLOCK_BYTES = 16 << 20  # payload bytes held by whole-file operations; one payload may be larger


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fixed part at the start of a file; `trailer` says where the tail is, or is None in a file without one."""

    num_samples: int
    descriptors: tuple[Descriptor, ...]
    trailer: Trailer | None


class Places(NamedTuple):
    """Where the payloads of a batch are; every present one lies within the file.

    Attributes:
        present: (n,) bool.
        ptrs: (n,) uint64, absolute; of MSTR the data, of MULT the record and the data after it. 0 where absent.
        sizes: (n,) uint64, bytes at `ptrs`; 0 where absent.
        crcs: (n,) uint32, CRC-32C of record and data; 0 where absent.
        records: (n, metadata_size) uint8, MSTR's records; None where they are at `ptrs`.
    """

    present: npt.NDArray[np.bool_]
    ptrs: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    crcs: npt.NDArray[np.uint32]
    records: npt.NDArray[np.uint8] | None = None

    def rows(self) -> slice | npt.NDArray[np.intp]:
        """Rows of the batch that are present, to index with: a slice, which copies nothing, if all are."""
        return slice(None) if b"\x00" not in self.present.tobytes() else np.flatnonzero(self.present)

    def run(self, start: int, stop: int) -> Places:
        """Rows [start, stop) of the batch."""
        return self.take(slice(start, stop))

    def take(self, rows: slice | npt.NDArray[np.int64]) -> Places:
        """Some rows of the batch."""
        records = None if self.records is None else self.records[rows]
        return Places(self.present[rows], self.ptrs[rows], self.sizes[rows], self.crcs[rows], records)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive samples of a scan.

    Attributes:
        indices: (n,) int64, ascending without gaps.
        payloads: by modality name, n each; None where absent.
    """

    indices: npt.NDArray[np.int64]
    payloads: Mapping[str, list[Payload | None]]


class Column(NamedTuple):
    """The payloads of one modality of many samples, records and data apart.

    Attributes:
        records: (n, metadata_size) uint8, the metadata records; zero where absent.
        datas: n data buffers; None where absent. Of modalities that are read in parts large ones are `StoredPayload`.
    """

    records: npt.NDArray[np.uint8]
    datas: list[Any]

    def run(self, start: int, stop: int) -> Column:
        """Rows [start, stop)."""
        return Column(self.records[start:stop], self.datas[start:stop])

    def payloads(self) -> list[Payload | None]:
        """The payloads one by one, None where absent."""
        if not self.datas:
            return []
        records, size = self.records.data.toreadonly().cast("B"), self.records.shape[1]
        return [
            None if data is None else Payload(records[k * size : (k + 1) * size], data)
            for k, data in enumerate(self.datas)
        ]


class Bounds(NamedTuple):
    """Where the data of a batch is in a mapped file, checked. A tuple, because one is made for every batch.

    Attributes:
        starts: by modality (n,) uint64, absolute position of the data after the record; 0 where absent.
        ends: by modality (n,) uint64, the position after it, not below `starts`; 0 where absent.
        present: by modality (n,) bool, or None where all are.
    """

    starts: npt.NDArray[np.uint64] | Sequence[npt.NDArray[np.uint64]]
    ends: npt.NDArray[np.uint64] | Sequence[npt.NDArray[np.uint64]]
    present: npt.NDArray[np.bool_] | Sequence[npt.NDArray[np.bool_] | None]

    def run(self, start: int, stop: int) -> Bounds:
        """Rows [start, stop) of the batch."""
        return Bounds(
            [one[start:stop] for one in self.starts],
            [one[start:stop] for one in self.ends],
            [None if one is None else one[start:stop] for one in self.present],
        )

    def slices(self, view: memoryview, m: int) -> list[memoryview | None]:
        """The data of one modality as slices of the mapping; None where absent."""
        starts, ends, present = self.starts[m].tolist(), self.ends[m].tolist(), self.present[m]
        if present is None:
            # The inner loop of raw reading: quicker than any chain of `map` and `slice`.
            return [view[a:b] for a, b in zip(starts, ends, strict=True)]
        rows = zip(starts, ends, present.tolist(), strict=True)
        return [view[a:b] if here else None for a, b, here in rows]


def any_of(mask: npt.NDArray[np.bool_]) -> bool:
    """Whether any is true; for the few rows of a batch several times as quick as NumPy's reductions."""
    return b"\x01" in mask.tobytes()


def check_index(i: SupportsIndex, count: int, name: str) -> int:
    """The index of one of `count` samples, counted from the start; `IndexError` outside, with the name of the file."""
    index = operator.index(i)
    if not -count <= index < count:
        raise IndexError(f"{name}: index {index} is out of range for {count} samples")
    return index % count


def check_indices(indices: Indices, count: int, name: str) -> npt.NDArray[np.int64]:
    """Indices as given, checked and counted from the start: (n,) int64; the caller's own array where it is so already.

    Args:
        indices: repeats are fine, negative ones count from the end.
        count: samples that there are.
        name: the file or dataset, for messages.

    Raises:
        IndexError: no such sample.
        TypeError: not integers in one dimension.
    """
    # NumPy would read a range number by number.
    array = np.arange(indices.start, indices.stop, indices.step) if isinstance(indices, range) else np.asarray(indices)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        found = f"{array.dtype} of {array.ndim} dimensions"
        raise TypeError(f"{name}: sample indices: {found}, expected integers of one")
    # The shortcut for what loaders pass: a negative number is a huge one without its sign.
    if array.dtype == np.int64 and not any_of(array.view(np.uint64) >= np.uint64(count)):
        return array
    # Compared before the cast: a large uint64 must not wrap.
    wrong = np.flatnonzero((array >= count) | (array < -count))
    if len(wrong):
        raise IndexError(f"{name}: index {array[wrong[0]]} is out of range for {count} samples")
    checked = array.astype(np.int64)
    checked[checked < 0] += count
    return checked


def spans(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Runs [start, stop) of `size` rows, of which the last may be shorter."""
    return ((start, min(start + size, count)) for start in range(0, count, size))


def blocks(sizes: npt.NDArray[np.uint64], block_bytes: int | None = None) -> Iterator[tuple[int, int]]:
    """Runs [start, stop) whose sizes together are at most `block_bytes`, by default `BLOCK_BYTES`, or one larger."""
    most = np.uint64(BLOCK_BYTES if block_bytes is None else block_bytes)
    ends = np.cumsum(sizes, dtype=np.uint64)
    start, count = 0, len(sizes)
    while start < count:
        done = ends[start - 1] if start else np.uint64(0)
        stop = int(np.searchsorted(ends, done + most, side="right"))
        stop = max(stop, start + 1)
        yield start, stop
        start = stop
