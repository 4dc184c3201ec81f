"""What readers pass from step to step: a file's head, the places of a batch's payloads, and runs of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
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

    def run(self, start: int, stop: int) -> Places:
        """Rows [start, stop) of the batch."""
        return Places(
            present=self.present[start:stop],
            ptrs=self.ptrs[start:stop],
            sizes=self.sizes[start:stop],
            crcs=self.crcs[start:stop],
            records=None if self.records is None else self.records[start:stop],
        )


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
        datas: n data buffers; None where absent.
    """

    records: npt.NDArray[np.uint8]
    datas: list[memoryview | None]

    def run(self, start: int, stop: int) -> Column:
        """Rows [start, stop)."""
        return Column(self.records[start:stop], self.datas[start:stop])


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


def blocks(sizes: npt.NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """Runs [start, stop) whose sizes together are at most `BLOCK_BYTES`, or a single larger one."""
    ends = np.cumsum(sizes, dtype=np.uint64)
    start, count = 0, len(sizes)
    while start < count:
        done = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, np.uint64(done + BLOCK_BYTES), side="right"))
        stop = max(stop, start + 1)
        yield start, stop
        start = stop
