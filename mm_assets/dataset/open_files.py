"""Many packed files as one row of samples: which file holds a sample, and which files are open.

Readers are opened at first use, and a bounded number stay open; remote files are bounded also by the memory of their
tables. An evicted reader is dropped, not closed: another thread may be reading from it, and its mapping is released
with its last user. Several `OpenFiles` may share their open files, which are closed with the last of them. Each may
have its own selection of the samples: an index counts through the selection, a position through all samples of the
files.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.files import MAX_OPEN, NUM_REQUESTS, PackedFiles, Reader
from mm_assets.dataset.id_index import IdLookup
from mm_assets.dataset.workers import WorkerPool, end
from mm_assets.errors import CredentialsError, FormatError, SchemaMismatchError, SourceError
from mm_assets.formats import FileDamage, SampleIds, VerifyReport
from mm_assets.formats.batch import Indices, check_index, check_indices
from mm_assets.formats.sample_ids import SortedIndex
from mm_assets.storage.forking import renew_in_children

if TYPE_CHECKING:
    from mm_assets.formats.fast_path import MultiFile

__all__ = ["DatasetIds", "OpenFiles"]

T = TypeVar("T")

_BLOCK = 1 << 14  # ids that are read together while iterating

# Files are read as one after an eighth of their samples was read: before each of them begins to cache bounds of its
# own, which would take twice the memory.
_READS_PER_MULTI_FILE = 8

# Bytes of cached tables of remote files: 16 or more per sample and modality. Of a local file they are its pages.
MAX_TABLES = 512 << 20


class _SharedFiles:
    """The readers that are open, the most recently used last, for all `OpenFiles` that share them."""

    def __init__(self, files: PackedFiles) -> None:
        self.files = files
        self.lock = threading.RLock()  # opening a file may use the first one
        renew_in_children(self)
        self.readers: OrderedDict[int, Reader] = OrderedDict()
        # Each reader of a file with streams has several files open.
        self.max_open = max(1, MAX_OPEN // (1 + len(files.entries[0].streams))) if files.entries else MAX_OPEN
        self.opening: dict[int, Future[Reader]] = {}  # by threads of this process
        self.tables = 0  # bytes, of the remote ones among the readers
        for number, reader in files.take_opened().items():
            self._add(number, reader)
        self.multi_file: MultiFile | None = None
        # All files are local and few enough to stay open, and reading them as one was not tried yet.
        self.may_be_multi_file = not files.any_remote and 0 < len(files.entries) <= self.max_open
        self.users: weakref.WeakSet[OpenFiles] = weakref.WeakSet()  # weak: one that is dropped unclosed holds no file
        starts = accumulate((file.num_samples for file in files.entries), initial=0)
        self.starts = tuple(starts)[:-1]
        self.lookup = IdLookup()
        self.requests = WorkerPool()  # threads that wait for remote files
        self.indexes: dict[object, Any] = {}  # with a method `close`

    def renew_locks(self) -> None:
        """In a forked child: see `forking`."""
        self.lock = threading.RLock()
        self.opening = {}

    def get(self, number: int) -> Reader:
        with self.lock:
            reader = self.readers.get(number)
            if reader is not None:
                self.readers.move_to_end(number)
                return reader
            opening = self.opening.get(number)
            if opening is None:
                mine = self.opening[number] = Future[Reader]()
        if opening is not None:
            return opening.result()
        # Not under the lock: others go on reading, and open further files meanwhile.
        try:
            reader = self._open(number)
        except BaseException as error:
            self._opened(number, None)
            mine.set_exception(error)
            raise
        self._opened(number, reader)
        mine.set_result(reader)
        return reader

    def _open(self, number: int) -> Reader:
        reader = self.files.open(number)
        if number:
            try:
                self.files.check_alike(self.get(0), reader)
            except BaseException:
                reader.close()
                raise
        return reader

    def _opened(self, number: int, reader: Reader | None) -> None:
        """Take note of a file that was opened, or that could not be."""
        with self.lock:
            self.opening.pop(number, None)
            if reader is not None and self.users:  # closed meanwhile, it is only its reader's, and goes with it
                self._add(number, reader)

    def _add(self, number: int, reader: Reader) -> None:
        """Add a reader, and drop the least recently used ones if there are too many."""
        self.readers[number] = reader
        self.tables += self._table_bytes(number, reader)
        # The first file stays: it holds the fields that every other is compared with.
        while len(self.readers) > self.max_open or (self.tables > MAX_TABLES and len(self.readers) > 2):
            oldest = next(key for key in self.readers if key)
            self.tables -= self._table_bytes(oldest, self.readers.pop(oldest))

    def _table_bytes(self, number: int, reader: Reader) -> int:
        """The most memory that a reader takes for what grows with its samples; 0 for a local file."""
        if not self.files.is_remote(number):
            return 0
        return len(reader) * sum(16 + spec.metadata_size for spec in reader.modalities)


class OpenFiles:
    """The files of one dataset, in order, and which of their samples it has.

    Args:
        files: the files.
        selection: positions of the selected samples, in their order; (n,) int64, checked by the caller. None: all.
        shared: the open files of others on the same files.

    Attributes:
        files: the files.
        name: of the dataset, for messages.
        selection: the selection, read-only.
        starts: position of the first sample of each file.
        num_samples: selected samples.
        num_read: samples whose stored bytes were read; counted by the reader.
    """

    def __init__(
        self,
        files: PackedFiles,
        selection: npt.NDArray[np.int64] | None = None,
        *,
        shared: _SharedFiles | None = None,
    ) -> None:
        self._shared = shared = shared or _SharedFiles(files)
        self._closed = False
        self.files = files
        self.name = files.name
        self.starts = shared.starts
        self.num_stored = sum(file.num_samples for file in self.files.entries)
        self._starts = np.array(self.starts, dtype=np.int64)
        if selection is not None:
            selection = selection.view()
            selection.flags.writeable = False
        self.selection = selection
        self.num_samples = self.num_stored if selection is None else len(selection)
        self.num_read = 0
        self._rows: SortedIndex[np.int64] | None = None
        self._is_sole = len(self.files) == 1 and selection is None
        self._sole: Reader | None = None
        with shared.lock:
            shared.users.add(self)

    def __reduce__(self) -> tuple[object, ...]:
        return OpenFiles, (self.files, self.selection)

    def share(self, selection: npt.NDArray[np.int64] | None = None) -> OpenFiles:
        """Another one on the same open files, closed separately; None selects the same samples.

        Raises:
            ValueError: this one is closed.
        """
        with self._shared.lock:
            self._check_open()
            selection = self.selection if selection is None else selection
            return OpenFiles(self.files, selection, shared=self._shared)

    def __len__(self) -> int:
        """Files."""
        return len(self.files)

    def __iter__(self) -> Iterator[Reader]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Reader:
        self._check_open()
        return self._shared.get(number)

    def sole(self) -> Reader | None:
        """The only file of a dataset without a selection, else None; `ValueError` if the dataset is closed."""
        sole = self._sole
        if sole is None and self._is_sole:
            sole = self[0]
            with self._shared.lock:  # not closed meanwhile
                self._check_open()
                self._sole = sole
        return sole

    @property
    def multi_file(self) -> MultiFile | None:
        """All files for raw reads by one look-up, once a view made that; `ValueError` if the dataset is closed."""
        self._check_open()
        return self._shared.multi_file

    def make_multi_file(self, make: Callable[[Iterator[Reader]], MultiFile | None]) -> MultiFile | None:
        """Read all files as one from now on, if `make`, which is called once, finds that they can be.

        Not before enough samples were read, and not for a view of few samples, which must not open files that have none
        of them.

        Raises:
            ValueError: the dataset is closed.
        """
        shared = self._shared
        is_large = 2 * self.num_samples >= self.num_stored
        if not shared.may_be_multi_file or not is_large or _READS_PER_MULTI_FILE * self.num_read < self.num_stored:
            return None
        shared.may_be_multi_file = False
        try:
            made = make(iter(self))
        except (FormatError, SchemaMismatchError, SourceError, OSError):
            return None  # a read of that file will raise the error
        with shared.lock:  # not closed meanwhile
            self._check_open()
            shared.multi_file = made
        return made

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.name} is closed")

    def place(self, i: SupportsIndex) -> tuple[Reader, int]:
        """The file of a sample's index, and its index there; negative counts from the end; `IndexError` outside."""
        index = check_index(i, self.num_samples, self.name)
        return self.locate(index if self.selection is None else int(self.selection[index]))

    def locate(self, position: int) -> tuple[Reader, int]:
        """The file that holds the sample of a position, which the caller has checked, and its index there."""
        number = bisect_right(self.starts, position) - 1  # of the files that start here, the last: empty come before
        return self[number], position - self.starts[number]

    def positions(self, indices: Indices) -> npt.NDArray[np.int64]:
        """The positions of samples: (n,) int64, an array of their own.

        Args:
            indices: repeats are fine, negative ones count from the end.

        Raises:
            IndexError: no such sample.
            TypeError: not integers in one dimension.
        """
        rows = check_indices(indices, self.num_samples, self.name)
        return np.array(rows) if self.selection is None else self.selection[rows]

    def _parts(
        self, positions: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """The samples file by file: the file's number, rows of `positions` that are in it, their indices there."""
        if not len(positions):
            return
        if len(self.starts) == 1:
            yield 0, np.arange(len(positions)), positions
            return
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        # One sort, not one comparison a file: a selection of all samples may lie in thousands of files.
        order = np.argsort(numbers, kind="stable")
        bounds = np.flatnonzero(np.diff(numbers[order], prepend=-1, append=len(self.starts))).tolist()
        for start, stop in pairwise(bounds):
            where = order[start:stop]
            number = int(numbers[where[0]])
            yield number, where, positions[where] - self.starts[number]

    def read_each(
        self, positions: npt.NDArray[np.int64], read: Callable[[Reader, npt.NDArray[np.int64]], T]
    ) -> Iterator[tuple[npt.NDArray[np.int64], T]]:
        """The result of `read` for each file that has some of the samples, and their rows; remote ones concurrently."""
        return self.read_each_rows(positions, lambda reader, local, _: read(reader, local))

    def read_each_rows(
        self,
        positions: npt.NDArray[np.int64],
        read: Callable[[Reader, npt.NDArray[np.int64], npt.NDArray[np.int64]], T],
    ) -> Iterator[tuple[npt.NDArray[np.int64], T]]:
        """As `read_each`; `read` also gets the rows of the file's samples, ascending."""
        parts = self._parts(positions)
        if not self.files.any_remote:
            for number, where, local in parts:
                yield where, read(self[number], local, where)
            return

        def read_file(number: int, local: npt.NDArray[np.int64], where: npt.NDArray[np.int64]) -> T:
            return read(self[number], local, where)

        tasks = [(where, partial(read_file, number, local, where)) for number, where, local in parts]
        if len(tasks) == 1:
            yield tasks[0][0], tasks[0][1]()
            return
        futures = self._shared.requests.start(NUM_REQUESTS, [task for _, task in tasks])
        try:
            for (where, _), future in zip(tasks, futures, strict=True):
                yield where, future.result()
        finally:
            end(futures)  # after an error no task continues

    def pieces(self) -> Iterator[tuple[Reader, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """All samples file by file: reader, their indices here, their indices in it."""
        if self.selection is not None:
            for number, rows, local in self._parts(self.selection):
                yield self[number], rows, local
            return
        for number, start in enumerate(self.starts):
            reader = self[number]
            yield reader, np.arange(start, start + len(reader)), np.arange(len(reader))

    def find(self, sample_id: str) -> int | None:
        """The index of the first sample of an id, or None."""
        found = self._find_positions(sample_id)
        if self.selection is None or not found:
            return found[0] if found else None
        lookup = self._rows = self._rows or SortedIndex(self.selection)  # made by two threads, it would be the same
        return min((row for position in found for row in lookup.find(position)), default=None)

    def _find_positions(self, sample_id: str) -> list[int]:
        """The positions of all samples of an id, ascending: ids are unique within a file, maybe not in all files."""
        if len(self) == 1:
            found = self[0].sample_ids.find(sample_id)  # which has a look-up of its own
            return [] if found is None else [found]
        self._check_open()
        # Outside the lock of the open files: building the look-up takes seconds, and other threads read meanwhile.
        candidates = self._shared.lookup.candidates(sample_id, self.num_stored, lambda: (r.sample_ids for r in self))
        found_at = []
        for position in candidates:
            reader, local = self.locate(position)
            if reader.sample_ids[local] == sample_id:
                found_at.append(position)
        return found_at

    def verify(self) -> VerifyReport:
        """Read everything and report what is damaged; also files against their manifest."""
        files = self.files
        if files.manifest is None and len(files) == 1:
            if not files.is_remote(0):
                return self[0].verify()
            with files.open(0, cached=False) as reader:  # the other reads a copy, if there is a cache
                return reader.verify()
        damage: list[FileDamage] = []
        num_payloads = 0
        first: Reader | None = None
        for number, (file, start) in enumerate(zip(files.entries, self.starts, strict=True)):
            try:
                # Not the reader that others read from: this one may be closed again.
                with files.open(number, cached=False) as reader:
                    first = first or reader
                    files.check_alike(first, reader)
                    report = reader.verify()
            except CredentialsError:  # of the reader's, and not the file's
                raise
            except (FormatError, SchemaMismatchError, SourceError, OSError) as error:
                damage.append(FileDamage(message=str(error)))
                continue
            num_payloads += report.num_payloads
            for one in report.damage:
                sample = None if one.sample is None else start + one.sample
                streams = {stream.name: stream.location for stream in file.streams}
                message = one.message
                if not message.startswith(tuple(streams.values())):  # which name the file already
                    message = f"{streams.get(one.modality or '', file.location)}: {message}"
                damage.append(replace(one, sample=sample, message=message))
            digests = [(file.location, file.sha256), *((stream.location, stream.sha256) for stream in file.streams)]
            for location, sha256 in digests:
                if sha256 is not None and (found := files.digest(location)) != sha256:
                    message = f"{location}: SHA-256 is not the manifest's (found {found}, expected {sha256})"
                    damage.append(FileDamage(message=message))
        return VerifyReport(
            path=self.name, num_samples=self.num_samples, num_payloads=num_payloads, damage=tuple(damage)
        )

    def index(self, key: object, open_index: Callable[[], T | None]) -> T | None:
        """An index that stays open with the files; opened by the first call that finds one."""
        shared = self._shared
        with shared.lock:
            self._check_open()
            if key in shared.indexes:
                return cast(T, shared.indexes[key])
        opened = open_index()  # not under the lock: others read meanwhile
        if opened is None:
            return None
        with shared.lock:  # of two that were opened at once the second is dropped
            return cast(T, shared.indexes.setdefault(key, opened))

    def close(self) -> None:
        """Stop reading, and close every open file that is not shared; fine twice."""
        shared = self._shared
        with shared.lock:
            self._closed = True
            self._sole = None
            shared.users.discard(self)
            if shared.users:
                return
            for reader in shared.readers.values():
                reader.close()
            shared.readers.clear()
            shared.multi_file = None
            shared.lookup.forget()
            for index in shared.indexes.values():
                index.close()
            shared.indexes.clear()
        shared.requests.close()  # not under the lock, which its threads take


class DatasetIds(SampleIds):
    """The ids of all samples, in order; files are opened as their ids are asked for."""

    def __init__(self, files: OpenFiles) -> None:
        super().__init__(files.name, files.num_samples)
        self._files = files

    def _get(self, i: int) -> str:
        reader, local = self._files.place(i)
        return reader.sample_ids._get(local)

    def _get_many(self, indices: range) -> list[str]:
        return self.take(self._files.positions(indices))

    def take(self, positions: npt.NDArray[np.int64]) -> list[str]:
        """The ids of samples by their positions, one request to each file."""
        found = [""] * len(positions)
        for where, ids in self._files.read_each(positions, _read_ids):
            for row, sample_id in zip(where.tolist(), ids, strict=True):
                found[row] = sample_id
        return found

    def containing(self, text: str, start: int, stop: int) -> list[int]:
        """As `SampleIds.containing`; the ids of a view are compared one by one."""
        files = self._files
        if files.selection is not None:
            return super().containing(text, start, stop)
        found: list[int] = []
        while start < stop:
            reader, local = files.locate(start)
            end = min(local + stop - start, len(reader))
            found += (start - local + row for row in reader.sample_ids.containing(text, local, end))
            start += end - local
            if reader.mapped is not None:  # a search of thousands of files would leave some pages of each resident
                reader.mapped.drop(0, reader.mapped.size)
        return found

    def __iter__(self) -> Iterator[str]:
        selection = self._files.selection
        if selection is None:
            return (sample_id for reader in self._files for sample_id in reader.sample_ids)
        blocks = (selection[start : start + _BLOCK] for start in range(0, len(selection), _BLOCK))
        return (sample_id for block in blocks for sample_id in self.take(block))

    def find(self, sample_id: str) -> int | None:
        """The index of the first sample of that id, or None."""
        return self._files.find(sample_id)


def _read_ids(reader: Reader, indices: npt.NDArray[np.int64]) -> list[str]:
    sample_ids = reader.sample_ids
    return [sample_ids[i] for i in indices.tolist()]
