"""Many packed files as one row of samples: which file holds a sample, and which files are open.

Readers are opened at first use, and a bounded number stay open. One that is put aside is let go, not closed: another
thread may be reading from it, and its mapping goes with its last user.
"""

from __future__ import annotations

import operator
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import overload

import numpy as np
import numpy.typing as npt

from mm_assets.formats import MstrReader, MultReader

__all__ = ["Reader", "ShardedIds", "Shards"]

MAX_OPEN = 64  # readers; a process may usually have 1024 files open, and a loader has several processes

Reader = MultReader | MstrReader


class Shards:
    """The files of one dataset, in order.

    Args:
        name: of the dataset, for messages.
        sizes: samples in each file.
        opener: opens the file of that number.
    """

    def __init__(self, name: str, sizes: Sequence[int], opener: Callable[[int], Reader]) -> None:
        self.name = name
        self.sizes = tuple(sizes)
        self.starts = tuple(accumulate(self.sizes, initial=0))[:-1]
        self.num_samples = sum(self.sizes)
        self._opener = opener
        self._open: OrderedDict[int, Reader] = OrderedDict()
        self._lock = threading.RLock()  # opening a file may look at the first one
        self._closed = False

    def __len__(self) -> int:
        """Files."""
        return len(self.sizes)

    def __iter__(self) -> Iterator[Reader]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Reader:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.name} is closed")
            reader = self._open.get(number)
            if reader is None:
                reader = self._opener(number)
                self._open[number] = reader
                # The first file stays: it holds the fields that every other is compared with.
                while len(self._open) > MAX_OPEN:
                    del self._open[next(key for key in self._open if key)]
            else:
                self._open.move_to_end(number)
            return reader

    def place(self, i: int) -> tuple[Reader, int]:
        """The file that holds sample `i`, and its index there; negative `i` counts from the end.

        Raises:
            IndexError: no such sample.
        """
        index = operator.index(i)
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"{self.name}: sample {index} of {self.num_samples}")
        index %= self.num_samples
        number = bisect_right(self.starts, index) - 1  # of the files that start here, the last: empty ones come before
        return self[number], index - self.starts[number]

    def split(
        self, ids: Sequence[int] | npt.NDArray[np.integer]
    ) -> Iterator[tuple[Reader, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """The samples file by file: reader, rows of `ids` that are in it, their indices there.

        Raises:
            IndexError: no such sample.
            TypeError: not integers in one dimension.
        """
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(
                f"{self.name}: sample indices: {array.dtype} of {array.ndim} dimensions, expected integers of one"
            )
        wrong = np.flatnonzero((array >= self.num_samples) | (array < -self.num_samples))
        if len(wrong):
            raise IndexError(f"{self.name}: sample {array[wrong[0]]} of {self.num_samples}")
        indices = array.astype(np.int64)
        indices[indices < 0] += self.num_samples
        numbers = np.searchsorted(np.array(self.starts, dtype=np.int64), indices, side="right") - 1
        for number in np.unique(numbers).tolist():
            where = np.flatnonzero(numbers == number)
            yield self[number], where, indices[where] - self.starts[number]

    def close(self) -> None:
        """Close every open file; fine twice."""
        with self._lock:
            self._closed = True
            for reader in self._open.values():
                reader.close()
            self._open.clear()


class ShardedIds(Sequence[str]):
    """The ids of all samples, in order; files are opened as their ids are asked for."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __len__(self) -> int:
        return self._shards.num_samples

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        reader, local = self._shards.place(index)
        return reader.sample_ids[local]

    def __iter__(self) -> Iterator[str]:
        return (sample_id for reader in self._shards for sample_id in reader.sample_ids)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and self.find(value) is not None

    def find(self, sample_id: str) -> int | None:
        """The index of the first sample of that id, or None; looks through the files in order."""
        for number, start in enumerate(self._shards.starts):
            local = self._shards[number].sample_ids.find(sample_id)
            if local is not None:
                return start + local
        return None
