"""Raw reads of many samples: the data of payloads as views into the mapping, without any other work per sample.

Only `dataset.reader` imports this module. The bounds of a batch are found and checked in NumPy, and cached once a file
is read often enough. One look-up covers all files of a dataset. A few positions are probed for residency, and pages
that are not in memory are requested from the kernel before they are touched. For a remote file the same calls make one
request.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from mm_assets.errors import CorruptError
from mm_assets.formats.batch import Bounds, Indices, blocks, check_indices, spans
from mm_assets.formats.byte_source import MappedFile
from mm_assets.formats.joined import JoinedReader
from mm_assets.formats.page_cache import PAGE, Residency, merge_touching
from mm_assets.formats.reader import PackedReader

SCAN_ROWS = 1 << 12  # samples of a scan looked up together
SCAN_VIEWS = 384  # views of a scan yielded together: a few of them stay in the processor's cache

# Bytes of cached bounds: of one modality of a file, of one of all files of a dataset, of all of a process together.
MAX_FILE_BOUNDS = 4 << 20
MAX_DATASET_BOUNDS = 16 << 20
MAX_PROCESS_BOUNDS = 64 << 20
_READS_PER_CACHE = 4  # bounds are cached once a quarter of the samples was looked up
_INT64 = np.dtype(np.int64)
_UINT64 = np.dtype(np.uint64)
_CELL = np.dtype("V16")  # two numbers of 8 bytes
_FILE = np.int64(1 << 40)  # added to page numbers for each file, so that runs of different files never touch

RawBatch = dict[str, list[memoryview | None]]


# --- one file ---------------------------------------------------------------------------------------------------------


def read_raw(file: PackedReader | JoinedReader, indices: Indices, names: Sequence[str]) -> RawBatch:
    """The data of many samples of a file without their records, by modality, each list in the order of `indices`.

    Of a mapped file these are views into the mapping. Pages that are not in memory are requested together; a remote
    file gets one request.

    Args:
        file: its reader.
        indices: of the samples, repeats allowed; negative count from the end.
        names: modalities to read. Nothing else is touched.

    Returns:
        By name, one read-only view a sample; None where absent.

    Raises:
        IndexError: no such sample.
        KeyError: no such modality.
        CorruptError: a payload is out of place or, where the reader verifies, damaged; nothing is returned then.
        ValueError: the reader is closed.
    """
    cache: RawCache | None = file.raw_cache
    if cache is None and isinstance(file, JoinedReader):  # which never has one: no other file pays for this test
        return file.read_each(names, lambda part, own: read_raw(part, indices, own))
    # A `JoinedReader` has no cache and returned above. To tell mypy so by `isinstance` would cost each batch time.
    reader: PackedReader = file  # type: ignore[assignment]
    if cache is None:
        cache = reader.raw_cache = RawCache()
    # The shortcut of loaders, where any call for a batch would be measurable: the same modalities again, all of their
    # bounds cached, and nothing to probe.
    recent = cache.recent
    if type(indices) is not np.ndarray:
        indices = np.asarray(indices)
    if recent is not None and recent.names is names and indices.dtype == _INT64 and indices.ndim == 1:
        try:
            if recent.may_skip(indices):
                view = recent.source.whole
                return {name: bounds.slices(view, indices) for name, bounds in recent.columns}
        except IndexError:
            pass  # raised below, with the file
        except ValueError:
            raise _closed(reader) from None
    numbers = [reader.number_of(name) for name in names]
    checked = check_indices(indices, len(reader), reader.path)
    source = reader.mapped
    if source is not None:
        source.view(0, 0)  # raises where it is closed, also where nothing is read
    if source is None or reader.verifies or not len(checked) or not numbers:
        return {name: column.datas for name, column in reader.read_columns(checked, names).items()}
    cached = cache.bounds(reader, names, len(checked))
    if cached is None:
        bounds = reader.data_bounds(checked, numbers)
    else:
        bounds = Bounds(*zip(*(one.take(checked) for one in cached), strict=True))
    if not source.pages.may_skip(len(checked) * len(numbers)):
        reader.fetch_data(numbers, bounds)
    if cached is not None and type(names) is tuple:  # one that does not change
        columns = list(zip(names, cached, strict=True))
        probed = [one for number, one in zip(numbers, cached, strict=True) if not reader.is_paged_in(number)]
        cache.recent = _Recent(names, source, columns, probed)
    return _slices(reader, source, names, bounds)


def scan_raw(reader: PackedReader | JoinedReader, names: Sequence[str]) -> Iterator[RawBatch]:
    """The data of all samples of a file in order, in blocks as `read_raw` gives them.

    A block has up to 384 payloads of a mapped file and, unless it is a single one, up to 16 MiB. What follows is paged
    in while a block is used; unlike `PackedReader.scan`, pages stay in this process' memory.

    Args:
        reader: of the file.
        names: modalities to read. Nothing else is touched.

    Raises:
        KeyError: no such modality.
        CorruptError: a payload is out of place or, where the reader verifies, damaged.
        ValueError: the reader is closed.
    """
    split = reader.split(names) if isinstance(reader, JoinedReader) else [(reader, names)]
    parts = []
    for part, own in split:
        numbers = [part.number_of(name) for name in own]
        if part.mapped is None or part.verifies or not numbers:
            return _scan_payloads(reader, names)
        parts.append(_Part(part, part.mapped, own, numbers))
    return _scan_mapped(parts, names)


class _Part(NamedTuple):
    """A file to scan, and the modalities to read of it."""

    reader: PackedReader
    source: MappedFile
    names: Sequence[str]
    numbers: Sequence[int]


def _scan_payloads(reader: PackedReader | JoinedReader, names: Sequence[str]) -> Iterator[RawBatch]:
    for chunk in reader.scan(names):
        yield {
            name: [None if payload is None else memoryview(payload.data) for payload in payloads]
            for name, payloads in chunk.payloads.items()
        }


def _scan_mapped(parts: Sequence[_Part], names: Sequence[str]) -> Iterator[RawBatch]:
    rows = max(1, SCAN_VIEWS // len(names))
    (reader, source, own, _), *others = parts
    for ((first, *rest), count), _ in pairwise(chain(_fetched_runs(parts), [((), 0)])):  # one run ahead of what is used
        for start, stop in spans(count, rows):
            block = _slices(reader, source, own, first.run(start, stop))
            if others:
                columns = [
                    _slices(part.reader, part.source, part.names, bounds.run(start, stop))
                    for part, bounds in zip(others, rest, strict=True)
                ]
                block = _merged([block, *columns], names)
            yield block


def _fetched_runs(parts: Sequence[_Part]) -> Iterator[tuple[Sequence[Bounds], int]]:
    """Bounds of consecutive samples in each file, up to 16 MiB, which are being paged in, and how many samples."""
    for start, stop in spans(len(parts[0].reader), SCAN_ROWS):
        indices = np.arange(start, stop)
        bounds = [part.reader.data_bounds(indices, part.numbers) for part in parts]
        sizes = sum((np.asarray(one.ends) - np.asarray(one.starts)).sum(axis=0) for one in bounds)
        for begin, end in blocks(sizes):
            runs = [one.run(begin, end) for one in bounds]
            for part, run in zip(parts, runs, strict=True):
                part.reader.fetch_data(part.numbers, run)
            yield runs, end - begin


def _slices(reader: PackedReader, source: MappedFile, names: Sequence[str], bounds: Bounds) -> RawBatch:
    view = source.whole
    try:
        return {name: bounds.slices(view, m) for m, name in enumerate(names)}
    except ValueError:
        raise _closed(reader) from None


def _merged(batches: Iterable[RawBatch], names: Sequence[str]) -> RawBatch:
    """Returns the columns of several batches as one, in the order of `names`."""
    columns = dict(chain.from_iterable(batch.items() for batch in batches))
    return {name: columns[name] for name in names}


def _closed(reader: PackedReader) -> ValueError:
    """For a view that another thread has just released."""
    return ValueError(f"{reader.path} is closed")


class _Recent(NamedTuple):
    """The modalities that were read last, where the bounds of all of them are cached.

    `probed` has the bounds of those that are probed for residency; the others were paged in whole.
    """

    names: tuple[str, ...]
    source: MappedFile
    columns: list[tuple[str, CachedBounds]]
    probed: list[CachedBounds]

    def may_skip(self, indices: npt.NDArray[np.integer]) -> bool:
        """Whether a batch need not be fetched; one of a few batches is probed, at one position."""
        probed = self.probed
        if not probed:
            return True
        count, pages = len(indices) * len(probed), self.source.pages
        if pages.may_skip(count):
            return True
        if not count:
            return False
        pick = pages.pick()
        column = probed[pick % len(probed)]
        return pages.is_still_resident(count, column.start(int(indices[pick // len(probed) % len(indices)])))


class RawCache:
    """What is cached for raw reads of one file; its reader holds it, so it is released with the reader."""

    def __init__(self) -> None:
        self.recent: _Recent | None = None
        self._columns = _Columns(MAX_FILE_BOUNDS)
        self._num_read: dict[str, int] = {}  # samples, by modality, until its bounds are cached

    def bounds(self, reader: PackedReader, names: Sequence[str], count: int) -> list[CachedBounds] | None:
        """The bounds of these modalities, of which `count` samples are looked up; None where some are not cached.

        A batch's calls into NumPy take longer than its look-ups, once the data has pushed them out of the processor's
        cache: two for each modality are several times as quick as all those that checking takes.
        """
        found = []
        for name in names:
            bounds = self._columns.get(name) or self._cache(reader, name, count)
            if bounds is None:
                return None
            found.append(bounds)
        return found

    def _cache(self, reader: PackedReader, name: str, count: int) -> CachedBounds | None:
        """The bounds of a modality, cached from now on if enough of them have been looked up."""
        if name in self._columns or not reader.has_checksums:
            return None
        self._num_read[name] = num_read = self._num_read.get(name, 0) + count
        return self._columns.make(name, [reader]) if _READS_PER_CACHE * num_read >= len(reader) else None


# --- several files ----------------------------------------------------------------------------------------------------


class MultiFile:
    """Raw batches out of all mapped files of a dataset, by one look-up for all of them; safe for several threads.

    A shuffled batch has one or two samples from each of many files. Read file by file, each file would take as long as
    the whole batch takes from one. The bounds of all samples are cached, up to 17 bytes per sample and modality.

    Args:
        readers: of the files, in order, one or more; they stay open as long as this is used.
        sources: their mappings.
    """

    @classmethod
    def of(cls, readers: Iterable[PackedReader | JoinedReader]) -> Self | None:
        """Files as one; None unless all are local, with a tail, and not opened to verify: their reads only slice."""
        files, sources = [], []
        for reader in readers:
            mapped = []
            for part in reader.parts:
                if part.mapped is None or part.verifies or not part.has_checksums:
                    return None
                mapped.append(part.mapped)
            files.append(reader.parts)
            sources.append(mapped)
        packed, *streams = (
            cls(*group) for group in zip(zip(*files, strict=True), zip(*sources, strict=True), strict=True)
        )
        packed._streams = {stream._readers[0].names[0]: stream for stream in streams}
        return packed

    def __init__(self, readers: Sequence[PackedReader], sources: Sequence[MappedFile]) -> None:
        self._readers = readers
        self._sources = sources
        self._streams: Mapping[str, Self] = {}  # by modality, the streams of these files
        self._views = [source.whole for source in sources]
        self._ends = np.cumsum([len(reader) for reader in readers], dtype=np.int64)
        self._columns = _Columns(MAX_DATASET_BOUNDS)
        self._residency = Residency()

    def read(self, positions: npt.NDArray[np.int64], names: Sequence[str]) -> RawBatch | None:
        """The data of many samples, as `read_raw`.

        None where that has to be read file by file: beyond the memory budget, where a file is damaged or closed, or
        while another thread makes the bounds.

        Args:
            positions: through all files, within them.
            names: modalities that the files have.
        """
        if self._streams and not self._streams.keys().isdisjoint(names):
            return self._read_joined(positions, names)
        return self._read(positions, names)

    def _read_joined(self, positions: npt.NDArray[np.int64], names: Sequence[str]) -> RawBatch | None:
        """Reads packed files and streams, each by its own look-up."""
        own = [name for name in names if name not in self._streams]
        batches = [self._read(positions, own)] if own else []
        batches += [self._streams[name].read(positions, (name,)) for name in names if name in self._streams]
        found = [batch for batch in batches if batch is not None]
        return _merged(found, names) if len(found) == len(batches) else None

    def _read(self, positions: npt.NDArray[np.int64], names: Sequence[str]) -> RawBatch | None:
        columns = []
        for name in names:
            column = self._columns.get(name) or self._columns.make(name, self._readers)
            if column is None:
                return None
            columns.append((name, column))
        files = np.searchsorted(self._ends, positions, side="right")  # files that end before: also empty ones
        if len(positions) and not self._residency.may_skip(len(positions) * len(columns)):
            self._fetch(files, positions, [column for _, column in columns])
        views = list(map(self._views.__getitem__, files.tolist()))
        try:
            return {name: column.slices_of(views, positions) for name, column in columns}
        except ValueError:
            return None  # a file was closed, or mapped again

    def _fetch(
        self, files: npt.NDArray[np.intp], positions: npt.NDArray[np.int64], columns: Sequence[CachedBounds]
    ) -> None:
        """Has a batch paged in if one of a few positions that are probed is not resident."""
        probed = ((column, k) for column in columns for k in self._residency.probes(len(positions)))
        if not self._residency.note(
            self._sources[files[k]].pages.is_resident(column.start(int(positions[k]))) for column, k in probed
        ):
            self._request(files, positions, columns)

    def _request(
        self, files: npt.NDArray[np.intp], positions: npt.NDArray[np.int64], columns: Sequence[CachedBounds]
    ) -> None:
        """Requests the pages of a batch, in all files at once, once for those that touch."""
        bounds = [column.take(positions) for column in columns]
        firsts = np.concatenate([starts // np.uint64(PAGE) for starts, _, _ in bounds]).astype(np.int64)
        lasts = np.concatenate([(ends + np.uint64(PAGE - 1)) // np.uint64(PAGE) for _, ends, _ in bounds])
        shift = np.tile(files.astype(np.int64) * _FILE, len(bounds))
        first, last = merge_touching(firsts + shift, lasts.astype(np.int64) + shift)
        numbers = first // _FILE
        first, last = (first - numbers * _FILE) * PAGE, (last - numbers * _FILE) * PAGE
        for number, start, end in zip(numbers.tolist(), first.tolist(), last.tolist(), strict=True):
            self._sources[number].pages.request(start, end)


# --- cached bounds ----------------------------------------------------------------------------------------------------


class _Columns(dict[str, "CachedBounds | None"]):
    """Cached bounds by modality, each made by one thread while others read without it; None: not cacheable."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit  # bytes of one modality
        self._lock = threading.Lock()  # held while bounds are made

    def make(self, name: str, readers: Sequence[PackedReader]) -> CachedBounds | None:
        """The bounds of a modality in all files, cached from now on if the budget allows it and nothing is damaged."""
        if name in self or not self._lock.acquire(blocking=False):
            return self.get(name)  # in a forked child the lock may stay locked: then it reads without the cache
        try:
            count = sum(map(len, readers))
            size = CachedBounds.nbytes(count)
            if name not in self and size > self._limit:
                self[name] = None
            elif name not in self and (release := BUDGET.take(self, size)) is not None:
                bounds = (reader.data_bounds(np.arange(len(reader)), [reader.number_of(name)]) for reader in readers)
                try:
                    self[name] = CachedBounds(bounds, count)
                except CorruptError:  # which is the error of a read of that sample
                    release()
                    self[name] = None
            return self.get(name)  # or none: the budget may allow it later
        finally:
            self._lock.release()


class CachedBounds:
    """Where all data of a modality is, checked; of one mapped file, or of several with positions in each file.

    Start and end are one cell of 16 bytes: one NumPy index finds those of a batch, from half as many cache lines.
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
        """The memory that so many samples take, at most."""
        return (_CELL.itemsize + 1) * num_samples

    def start(self, i: int) -> int:
        """Where the data of sample `i` begins; `IndexError` where there is no such sample."""
        return int(self._places[2 * i])

    def slices(self, view: memoryview, indices: npt.NDArray[np.integer]) -> list[memoryview | None]:
        """The data of a batch as slices of the mapping; `IndexError` where there is no such sample."""
        places = iter(self._cells[indices].view(_UINT64).tolist())
        if self._present is None:
            # The inner loop, as of `Bounds.slices`.
            return [view[a:b] for a, b in zip(places, places, strict=True)]
        here = self._present[indices].tolist()
        return [view[a:b] if is_here else None for a, b, is_here in zip(places, places, here, strict=True)]

    def slices_of(self, views: Sequence[memoryview], indices: npt.NDArray[np.integer]) -> list[memoryview | None]:
        """As `slices`, of a mapping for each sample of the batch."""
        places = iter(self._cells[indices].view(_UINT64).tolist())
        if self._present is None:
            return [view[a:b] for view, a, b in zip(views, places, places, strict=True)]
        here = self._present[indices].tolist()
        rows = zip(views, places, places, here, strict=True)
        return [view[a:b] if is_here else None for view, a, b, is_here in rows]

    def take(
        self, indices: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_] | None]:
        """Starts, ends and presence of a batch, as a modality of `Bounds`."""
        places = self._cells[indices].view(_UINT64)
        return places[::2], places[1::2], None if self._present is None else self._present[indices]


class _Budget:
    """Bytes that the caches of a process may take together."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._lock = threading.Lock()

    def take(self, owner: object, size: int) -> Callable[[], object] | None:
        """Reserves that many bytes until `owner` is collected or calls what is returned; None if fewer are left."""
        if not self._lock.acquire(blocking=False):
            return None  # another thread takes, or, in a forked child, took: the next read tries again
        try:
            if size > self._left:
                return None
            self._left -= size
        finally:
            self._lock.release()
        return weakref.finalize(owner, self._release, size)

    def _release(self, size: int) -> None:
        self._left += size


BUDGET = _Budget(MAX_PROCESS_BOUNDS)
