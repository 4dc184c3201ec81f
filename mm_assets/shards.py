"""Many packed files as one row of samples: which file holds a sample, and which files are open.

Readers are opened at first use, and a bounded number stay open. One that is put aside is let go, not closed: another
thread may be reading from it, and its mapping goes with its last user. Several `Shards` may share their open files;
the files are closed when the last of them is.
"""

from __future__ import annotations

import operator
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload

import numpy as np
import numpy.typing as npt

from mm_assets.errors import FormatError, SchemaMismatchError, SourceError
from mm_assets.formats import Damage, VerifyReport
from mm_assets.packed_files import MAX_OPEN, PackedFiles, Reader

__all__ = ["ShardedIds", "Shards"]


class _OpenFiles:
    """The readers that are open, the most recently used last, for everybody who shares them."""

    def __init__(self, files: PackedFiles) -> None:
        self.files = files
        self.lock = threading.RLock()  # opening a file may look at the first one
        self.readers: OrderedDict[int, Reader] = OrderedDict(files.take_opened())
        self.users: weakref.WeakSet[Shards] = weakref.WeakSet()  # weak: one that is dropped unclosed holds no file

    def get(self, number: int) -> Reader:
        with self.lock:
            reader = self.readers.get(number)
            if reader is not None:
                self.readers.move_to_end(number)
                return reader
            reader = self.files.open(number)
            if number:
                try:
                    self.files.check_alike(self.get(0), reader)
                except BaseException:
                    reader.close()
                    raise
            self.readers[number] = reader
            # The first file stays: it holds the fields that every other is compared with.
            while len(self.readers) > MAX_OPEN:
                del self.readers[next(key for key in self.readers if key)]
            return reader


class Shards:
    """The files of one dataset, in order.

    Args:
        files: which they are.

    Attributes:
        files: the same.
        starts: index of the first sample of each file.
        num_samples: samples in all.
    """

    def __init__(self, files: PackedFiles) -> None:
        self._join(_OpenFiles(files))

    def _join(self, open_files: _OpenFiles) -> None:
        self._files = open_files
        self._closed = False
        self.files = open_files.files
        sizes = [file.num_samples for file in self.files.entries]
        self.starts = tuple(accumulate(sizes, initial=0))[:-1]
        self.num_samples = sum(sizes)
        self._starts = np.array(self.starts, dtype=np.int64)
        with open_files.lock:
            open_files.users.add(self)

    @property
    def name(self) -> str:
        """The dataset's, for messages."""
        return self.files.name

    def share(self) -> Shards:
        """Another one on the same open files, closed on its own.

        Raises:
            ValueError: this one is closed.
        """
        with self._files.lock:
            self._check_open()
            other = Shards.__new__(Shards)
            other._join(self._files)
        return other

    def __len__(self) -> int:
        """Files."""
        return len(self.files)

    def __iter__(self) -> Iterator[Reader]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Reader:
        with self._files.lock:
            self._check_open()
            return self._files.get(number)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.name} is closed")

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

    def indices(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Indices as given, checked and counted from the start: (n,) int64.

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
        return indices

    def split(
        self, indices: npt.NDArray[np.int64]
    ) -> Iterator[tuple[Reader, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """The samples file by file: reader, rows of `indices` that are in it, their indices there.

        Args:
            indices: as `indices` gives them.
        """
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(numbers).tolist():
            where = np.flatnonzero(numbers == number)
            yield self[number], where, indices[where] - self.starts[number]

    def verify(self) -> VerifyReport:
        """Read everything and report what is damaged; also files against their manifest."""
        files = self.files
        if files.manifest is None and len(files) == 1:
            return self[0].verify()
        damage: list[Damage] = []
        num_payloads = 0
        first: Reader | None = None
        for number, (file, start) in enumerate(zip(files.entries, self.starts, strict=True)):
            try:
                # Not the reader that others read from: this one may be closed again.
                with files.open(number) as reader:
                    first = first or reader
                    files.check_alike(first, reader)
                    report = reader.verify()
            except (FormatError, SchemaMismatchError, SourceError, OSError) as error:
                damage.append(Damage(sample=None, sample_id=None, modality=None, message=str(error)))
                continue
            num_payloads += report.num_payloads
            for one in report.damage:
                sample = None if one.sample is None else start + one.sample
                message = f"{file.location}: {one.message}"
                damage.append(Damage(sample=sample, sample_id=one.sample_id, modality=one.modality, message=message))
            if file.sha256 is not None and (found := files.digest(number)) != file.sha256:
                message = f"{file.location}: SHA-256 is not the manifest's (found {found}, expected {file.sha256})"
                damage.append(Damage(sample=None, sample_id=None, modality=None, message=message))
        return VerifyReport(
            path=self.name, num_samples=self.num_samples, num_payloads=num_payloads, damage=tuple(damage)
        )

    def close(self) -> None:
        """Stop reading, and close every open file that nobody else shares; fine twice."""
        with self._files.lock:
            self._closed = True
            self._files.users.discard(self)
            if not self._files.users:
                for reader in self._files.readers.values():
                    reader.close()
                self._files.readers.clear()


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
