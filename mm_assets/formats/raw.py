"""Raw reads of many samples: views into the mapping, and for a sample nothing else.

Positions of a whole batch are looked up and checked in NumPy, and what is not in memory is asked for before it is
touched. Of a remote file the same calls give the bytes of one request.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import CorruptError
from mm_assets.formats.batch import Bounds, Places, blocks
from mm_assets.formats.byte_source import MappedFile
from mm_assets.formats.records import Payload

SCAN_ROWS = 1 << 12  # samples of a scan looked up together
SCAN_VIEWS = 384  # views of a scan handed out together: a few of them stay in the processor's cache

# Positions that are kept, checked, for files that are read at random: bytes of one modality of a file, of one of all
# files of a dataset, and of all of a process together.
MAX_POSITIONS = 4 << 20
MAX_JOINED_POSITIONS = 16 << 20
MAX_ALL_POSITIONS = 64 << 20
_INT64 = np.dtype(np.int64)
_UINT64 = np.dtype(np.uint64)
_CELL = np.dtype("V16")  # two numbers of 8 bytes
_EARNED = 4  # they are kept once a quarter of the samples was looked up

Ids = Sequence[int] | npt.NDArray[np.integer]
RawBatch = dict[str, list[memoryview | None]]


class Positions:
    """Where all data of a modality is, checked; of one mapped file, or of several with a start of the own file each.

    Start and end are one cell of 16 bytes: a batch's are had by one index of NumPy's, out of half as many cache lines.

    Args:
        bounds: of one modality of all samples, file by file.
        num_samples: of all files.
    """

    __slots__ = ("_cells", "_places", "_present")

    def __init__(self, bounds: Iterable[Bounds], num_samples: int) -> None:
        places = np.empty((num_samples, 2), np.uint64)
        present: npt.NDArray[np.bool_] | None = None
        first = 0
        for one in bounds:
            last = first + len(one.starts[0])
            places[first:last, 0], places[first:last, 1] = one.starts[0], one.ends[0]
            if (here := one.present[0]) is not None:
                if present is None:
                    present = np.ones(num_samples, np.bool_)
                present[first:last] = here
            first = last
        self._cells, self._places = places.view(_CELL).ravel(), places.ravel()
        self._present = present

    @staticmethod
    def nbytes(num_samples: int) -> int:
        """What is kept for that many samples, at most."""
        return (_CELL.itemsize + 1) * num_samples

    def start(self, i: int) -> int:
        """Where the data of sample `i` begins; `IndexError` where there is no such sample."""
        return int(self._places[2 * i])

    def cut(self, view: memoryview, ids: npt.NDArray[np.integer]) -> list[memoryview | None]:
        """The data of a batch as slices of the mapping; `IndexError` where there is no such sample."""
        places = iter(self._cells[ids].view(_UINT64).tolist())
        if self._present is None:
            # The inner loop, as of `Bounds.cut`.
            return [view[a:b] for a, b in zip(places, places, strict=True)]
        here = self._present[ids].tolist()
        return [view[a:b] if is_here else None for a, b, is_here in zip(places, places, here, strict=True)]

    def cut_of(self, views: Sequence[memoryview], ids: npt.NDArray[np.integer]) -> list[memoryview | None]:
        """As `cut`, of a mapping for each sample of the batch."""
        places = iter(self._cells[ids].view(_UINT64).tolist())
        if self._present is None:
            return [view[a:b] for view, a, b in zip(views, places, places, strict=True)]
        here = self._present[ids].tolist()
        rows = zip(views, places, places, here, strict=True)
        return [view[a:b] if is_here else None for view, a, b, is_here in rows]

    def bounds(
        self, ids: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_] | None]:
        """Starts, ends and presence of a batch, as a modality of `Bounds`."""
        places = self._cells[ids].view(_UINT64)
        return places[::2], places[1::2], None if self._present is None else self._present[ids]


class _Last(NamedTuple):
    """What was read last, where all of its positions are kept.

    `looked_at` are those of the columns that are looked at for whether they are in memory; others were brought there
    whole.
    """

    names: tuple[str, ...]
    source: MappedFile
    columns: list[tuple[str, Positions]]
    looked_at: list[Positions]

    def may_skip(self, ids: npt.NDArray[np.integer]) -> bool:
        """Whether a batch need not be fetched; one of a few is looked at, at one position."""
        looked_at = self.looked_at
        if not looked_at:
            return True
        count = len(ids) * len(looked_at)
        if self.source.may_skip(count):
            return True
        if not count:
            return False
        pick = self.source.pick()
        column = looked_at[pick % len(looked_at)]
        return self.source.is_still_there(count, column.start(int(ids[pick // len(looked_at) % len(ids)])))


class _Budget:
    """Bytes that all readers of a process may keep together."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()

    def take(self, owner: object, size: int) -> Callable[[], object] | None:
        """Lets `owner` keep that many bytes more, until it goes or calls what is returned; None: there is no room."""
        if not self._lock.acquire(blocking=False):
            return None  # somebody else takes, or, in a forked child, took: it is tried again or done without
        try:
            if size > self._left:
                return None
            self._left -= size
        finally:
            self._lock.release()
        return weakref.finalize(owner, self._give_back, size)

    def _give_back(self, size: int) -> None:
        self._left += size


BUDGET = _Budget(MAX_ALL_POSITIONS)


class RawReads(ABC):
    """The raw reads of a packed file; what they rest on is `PackedReader`'s."""

    names: tuple[str, ...]
    _path: str
    _mapped: MappedFile | None
    _num_samples: int
    _verify: bool
    _has_tail: bool

    def __init__(self) -> None:
        self._positions: dict[int, Positions | None] = {}  # by modality; None: not kept
        self._looked_up: dict[int, int] = {}  # samples, by modality, until they are kept
        self._last: _Last | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Samples of the file."""

    @abstractmethod
    def _number(self, name: str) -> int:
        """The number of a modality; `KeyError` where there is none of that name."""

    @abstractmethod
    def _indices(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Indices as given, checked and counted from the start: (n,)."""

    @abstractmethod
    def _checks(self, verify: bool | None) -> bool:
        """Whether checksums are checked, by what the caller said: only where the file has them."""

    @abstractmethod
    def _locate(self, ids: npt.NDArray[np.int64], numbers: Sequence[int]) -> dict[int, Places]:
        """Where the payloads of samples `ids` are, by modality, checked; `CorruptError` where one is out of place."""

    @abstractmethod
    def _fetch(
        self, indices: npt.NDArray[np.int64], places: Mapping[int, Places], verify: bool
    ) -> dict[str, list[Payload | None]]:
        """The payloads at these places, by name."""

    @abstractmethod
    def _raw_bounds(self, ids: npt.NDArray[np.int64], numbers: Sequence[int]) -> Bounds:
        """Where the data of one or more samples of a mapped file is; checks what `_locate` does, and raises alike."""

    @abstractmethod
    def _fetch_data(self, source: MappedFile, numbers: Sequence[int], bounds: Bounds) -> None:
        """Has the data of a batch brought into memory where it is not."""

    @property
    def mapped(self) -> MappedFile | None:
        """The mapping of a local file."""
        return self._mapped

    @property
    def only_cuts(self) -> bool:
        """Whether raw reads only cut views: of a local file with a tail, which was not opened to verify."""
        return self._mapped is not None and self._has_tail and not self._verify

    def is_warm(self, name: str) -> bool:
        """Whether the data of a modality is small, and was brought into memory whole; `KeyError`: no such modality."""
        self._number(name)
        return False

    def all_bounds(self, name: str) -> Bounds | None:
        """Where the data of all samples is, of one modality; None where reading takes more than to cut it out.

        That is unless `only_cuts`, and where the file is damaged there.

        Raises:
            KeyError: no such modality.
        """
        number = self._number(name)
        if not self.only_cuts:
            return None
        try:
            return self._raw_bounds(np.arange(self._num_samples), [number])
        except CorruptError:
            return None  # which is the error of whoever asks for that sample

    def read_raw_batch(
        self, ids: Ids, names: Sequence[str] | None = None, *, verify: bool | None = None
    ) -> dict[str, list[memoryview | None]]:
        """The data of many samples without their records, by modality, each list in the order asked.

        Of a mapped file these are views into the mapping, and nothing else is made for a sample. Pages that are not in
        memory are asked for together; a remote file gets one request.

        Args:
            ids: indices of the samples, repeats allowed; negative count from the end.
            names: modalities to read; all by default. Nothing else is touched.
            verify: check every payload's checksum; by default as the reader was opened.

        Returns:
            By name, one read-only view a sample; None where absent.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            CorruptError: a payload is out of place or, with `verify`, damaged; nothing is returned then.
            ValueError: the reader is closed.
        """
        # The short way of loaders, where any call for a batch would be seen: the same modalities again, all of their
        # positions kept, and nothing to probe.
        last = self._last
        if (
            last is not None
            and last.names is names
            and not verify
            and type(ids) is np.ndarray
            and ids.dtype == _INT64
            and ids.ndim == 1
        ):
            try:
                if last.may_skip(ids):
                    view = last.source.whole
                    return {name: column.cut(view, ids) for name, column in last.columns}
            except IndexError:
                pass  # said below, with the file
            except ValueError:
                raise self._closed() from None
        numbers = self._numbers_of(names)
        indices = self._indices(ids)
        source = self._mapped
        if source is not None:
            source.view(0, 0)  # which says that it is closed, also where nothing is read
        if source is None or not len(indices) or not numbers or self._checks(verify):
            return _without_records(self._fetch(indices, self._locate(indices, numbers), self._checks(verify)))
        kept = self._kept(numbers, len(indices))
        if kept is None:
            bounds = self._raw_bounds(indices, numbers)
        else:
            bounds = Bounds(*zip(*(one.bounds(indices) for one in kept), strict=True))
        if not source.may_skip(len(indices) * len(numbers)):
            self._fetch_data(source, numbers, bounds)
        if kept is not None and type(names) is tuple and not self._verify:  # one that nobody changes
            columns = [(self.names[number], one) for number, one in zip(numbers, kept, strict=True)]
            looked_at = [one for name, one in columns if not self.is_warm(name)]
            self._last = _Last(names, source, columns, looked_at)
        return self._cut(source, numbers, bounds)

    def scan_raw(
        self,
        names: Sequence[str] | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
        verify: bool | None = None,
    ) -> Iterator[dict[str, list[memoryview | None]]]:
        """The data of samples [start, stop) in order, in blocks as `read_raw_batch` gives them.

        A block has up to 4096 samples (384 payloads of a mapped file) and, unless it is a single one, up to 16 MiB. Of
        a mapped file what follows is brought into memory while a block is used; unlike `scan`, it leaves pages there.

        Args:
            names: modalities to read; all by default. Nothing else is touched.
            start: index of the first sample.
            stop: index behind the last; by default all.
            verify: check every payload's checksum; by default as the reader was opened.

        Raises:
            IndexError: the range is not one of samples.
            KeyError: no such modality.
            CorruptError: a payload is out of place or, with `verify`, damaged.
            ValueError: the reader is closed.
        """
        numbers = self._numbers_of(names)
        last = self._num_samples if stop is None else stop
        if not 0 <= start <= last <= self._num_samples:
            raise IndexError(f"{self._path}: samples [{start}, {last}) of {self._num_samples}")
        check = self._checks(verify)
        if self._mapped is None or check or not numbers:
            return self._scan_checked(numbers, start, last, check)
        return self._scan_mapped(self._mapped, numbers, start, last)

    def _kept(self, numbers: Sequence[int], count: int) -> list[Positions] | None:
        """The positions of these modalities, of which `count` samples are looked up; None where some are not kept.

        A batch's calls into NumPy take longer than its look-ups, once the data has pushed them out of the processor's
        cache: two for each modality are several times as quick as all those that checking takes.
        """
        kept = []
        for number in numbers:
            positions = self._positions.get(number) or self._keep(number, count)
            if positions is None:
                return None
            kept.append(positions)
        return kept

    def _keep(self, number: int, count: int) -> Positions | None:
        """The positions of a modality, which are kept from now on if they have been looked up enough."""
        if number in self._positions or not self._has_tail:
            return None
        self._looked_up[number] = looked_up = self._looked_up.get(number, 0) + count
        if _EARNED * looked_up < self._num_samples:
            return None
        self._positions[number] = found = self._all_positions(number)
        return found

    def _all_positions(self, number: int) -> Positions | None:
        size = Positions.nbytes(self._num_samples)
        give_back = BUDGET.take(self, size) if size <= MAX_POSITIONS else None
        if give_back is None:
            return None
        bounds = self.all_bounds(self.names[number])
        if bounds is None:
            give_back()
            return None
        return Positions([bounds], self._num_samples)

    def _numbers_of(self, names: Sequence[str] | None) -> list[int]:
        return [self._number(name) for name in (self.names if names is None else names)]

    def _closed(self) -> ValueError:
        """For a view that another thread has just released."""
        return ValueError(f"{self._path} is closed")

    def _cut(self, source: MappedFile, numbers: Sequence[int], bounds: Bounds) -> RawBatch:
        view = source.whole
        try:
            return {self.names[number]: bounds.cut(view, m) for m, number in enumerate(numbers)}
        except ValueError:
            raise self._closed() from None

    def _scan_checked(self, numbers: Sequence[int], first: int, last: int, check: bool) -> Iterator[RawBatch]:
        for start in range(first, last, SCAN_ROWS):
            indices = np.arange(start, min(start + SCAN_ROWS, last))
            places = self._locate(indices, numbers)
            sizes = np.zeros(len(indices), np.uint64)
            for found in places.values():
                sizes += found.sizes
            for begin, end in blocks(sizes):
                run = {number: found.run(begin, end) for number, found in places.items()}
                yield _without_records(self._fetch(indices[begin:end], run, check))

    def _scan_mapped(self, source: MappedFile, numbers: Sequence[int], first: int, last: int) -> Iterator[RawBatch]:
        before: Bounds | None = None
        for run in self._fetched_runs(source, numbers, first, last):
            if before is not None:
                yield from self._cut_blocks(source, numbers, before)
            before = run
        if before is not None:
            yield from self._cut_blocks(source, numbers, before)

    def _fetched_runs(self, source: MappedFile, numbers: Sequence[int], first: int, last: int) -> Iterator[Bounds]:
        for start in range(first, last, SCAN_ROWS):
            bounds = self._raw_bounds(np.arange(start, min(start + SCAN_ROWS, last)), numbers)
            for begin, end in blocks((np.asarray(bounds.ends) - np.asarray(bounds.starts)).sum(axis=0)):
                run = bounds.run(begin, end)
                self._fetch_data(source, numbers, run)
                yield run

    def _cut_blocks(self, source: MappedFile, numbers: Sequence[int], bounds: Bounds) -> Iterator[RawBatch]:
        rows = max(1, SCAN_VIEWS // len(numbers))
        for start in range(0, len(bounds.starts[0]), rows):
            yield self._cut(source, numbers, bounds.run(start, start + rows))


def _without_records(found: Mapping[str, list[Payload | None]]) -> RawBatch:
    return {
        name: [None if payload is None else memoryview(payload.data) for payload in payloads]
        for name, payloads in found.items()
    }
