"""Raw reads of many samples: views into the mapping, and for a sample nothing else.

Positions of a whole batch are looked up and checked in NumPy, and what is not in memory is asked for before it is
touched. Of a remote file the same calls give the bytes of one request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mm_assets.formats.batch import Bounds, Places, blocks
from mm_assets.formats.layout import Payload
from mm_assets.formats.source import MappedFile

SCAN_ROWS = 1 << 12  # samples of a scan looked up together
SCAN_VIEWS = 384  # views of a scan handed out together: a few of them stay in the processor's cache

Ids = Sequence[int] | npt.NDArray[np.integer]
RawBatch = dict[str, list[memoryview | None]]


class RawReads(ABC):
    """The raw reads of a packed file; what they rest on is `PackedReader`'s."""

    names: tuple[str, ...]
    _path: str
    _mapped: MappedFile | None
    _num_samples: int
    _verify: bool

    @abstractmethod
    def _number(self, name: str) -> int:
        """The number of a modality; `KeyError` where there is none of that name."""

    @abstractmethod
    def _indices(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Indices as given, checked and counted from the start: (n,)."""

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
        numbers = self._numbers_of(names)
        indices = self._indices(ids)
        check = self._verify if verify is None else verify
        if self._mapped is None or check or not len(indices) or not numbers:
            return _without_records(self._fetch(indices, self._locate(indices, numbers), check))
        bounds = self._raw_bounds(indices, numbers)
        self._fetch_data(self._mapped, numbers, bounds)
        return self._cut(self._mapped, numbers, bounds)

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
        check = self._verify if verify is None else verify
        if self._mapped is None or check or not numbers:
            return self._scan_checked(numbers, start, last, check)
        return self._scan_mapped(self._mapped, numbers, start, last)

    def _numbers_of(self, names: Sequence[str] | None) -> list[int]:
        return [self._number(name) for name in (self.names if names is None else names)]

    def _cut(self, source: MappedFile, numbers: Sequence[int], bounds: Bounds) -> RawBatch:
        view = source.whole
        try:
            return {self.names[number]: bounds.cut(view, m) for m, number in enumerate(numbers)}
        except ValueError:  # a view that another thread has just released
            raise ValueError(f"{self._path} is closed") from None

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
