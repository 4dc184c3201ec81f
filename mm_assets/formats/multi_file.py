"""Raw reads over all mapped files of a dataset, by one look-up for all of them.

A shuffled batch has one or two samples of each of many files. Asked file by file, every file takes as long as the whole
batch would take of one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mm_assets.formats.batch import Bounds
from mm_assets.formats.byte_source import MappedFile
from mm_assets.formats.page_cache import PAGE, Looks, touching
from mm_assets.formats.raw import BUDGET, MAX_JOINED_POSITIONS, Positions, RawBatch, RawReads

_FILE = np.int64(1 << 40)  # added to page numbers for each file, so that runs of different files never touch


class _NotKeptError(Exception):
    """A file's positions cannot be kept: it is damaged there."""


class JoinedReads:
    """Raw batches of files that are read as one row of samples; safe for several threads.

    Positions of all samples are kept, up to 17 bytes a sample and modality, within what all readers of a process may
    keep.

    Args:
        readers: of the files, in order, one or more; they stay open as long as this is used.
        sources: their mappings.
    """

    def __init__(self, readers: Sequence[RawReads], sources: Sequence[MappedFile]) -> None:
        self._readers = readers
        self._sources = sources
        self._views = [source.whole for source in sources]
        self._ends = np.cumsum([len(reader) for reader in readers], dtype=np.int64)
        self._columns: dict[str, Positions | None] = {}  # None: not kept
        self._lock = threading.Lock()  # of whoever makes a column
        self._looks = Looks()

    def read(self, positions: npt.NDArray[np.int64], names: Sequence[str]) -> RawBatch | None:
        """The data of many samples, as `RawReads.read_raw_batch`.

        None where that has to be asked file by file: for want of room, where a file is damaged or closed, or while
        another thread looks positions up.

        Args:
            positions: through all files, within them.
            names: modalities that the files have.
        """
        columns = []
        for name in names:
            column = self._columns.get(name) or self._keep(name)
            if column is None:
                return None
            columns.append((name, column))
        files = np.searchsorted(self._ends, positions, side="right")  # files that end before: also empty ones
        if len(positions) and not self._looks.may_skip(len(positions) * len(columns)):
            self._fetch(files, positions, [column for _, column in columns])
        views = list(map(self._views.__getitem__, files.tolist()))
        try:
            return {name: column.cut_of(views, positions) for name, column in columns}
        except ValueError:
            return None  # a file was closed, or mapped anew

    def _keep(self, name: str) -> Positions | None:
        """The positions of a modality, which are kept from now on if there is room and nothing is damaged."""
        if name in self._columns or not self._lock.acquire(blocking=False):
            return self._columns.get(name)  # in a forked child the lock may stay another's: then it is done without
        try:
            if name not in self._columns:
                size = Positions.nbytes(int(self._ends[-1]))
                give_back = BUDGET.take(self, size) if size <= MAX_JOINED_POSITIONS else None
                if give_back is None:
                    return None  # there may be room later
                try:
                    self._columns[name] = Positions(self._bounds(name), int(self._ends[-1]))
                except _NotKeptError:
                    give_back()
                    self._columns[name] = None
            return self._columns[name]
        finally:
            self._lock.release()

    def _bounds(self, name: str) -> Iterator[Bounds]:
        for reader in self._readers:
            bounds = reader.all_bounds(name)
            if bounds is None:
                raise _NotKeptError
            yield bounds

    def _fetch(
        self, files: npt.NDArray[np.intp], positions: npt.NDArray[np.int64], columns: Sequence[Positions]
    ) -> None:
        """Has a batch brought into memory if one of a few places that are probed is not there."""
        looks, sources = self._looks, self._sources
        for column in columns:
            for k in looks.probes(len(positions)):
                if not sources[files[k]].is_present(column.start(int(positions[k]))):
                    looks.missed()
                    self._ask(files, positions, columns)
                    return
        looks.found()

    def _ask(self, files: npt.NDArray[np.intp], positions: npt.NDArray[np.int64], columns: Sequence[Positions]) -> None:
        """Asks for the pages of a batch, in all files at once, once for those that touch."""
        bounds = [column.bounds(positions) for column in columns]
        firsts = np.concatenate([starts // np.uint64(PAGE) for starts, _, _ in bounds]).astype(np.int64)
        lasts = np.concatenate([(ends + np.uint64(PAGE - 1)) // np.uint64(PAGE) for _, ends, _ in bounds])
        shift = np.tile(files.astype(np.int64) * _FILE, len(bounds))
        first, last = touching(firsts + shift, lasts.astype(np.int64) + shift)
        numbers = first // _FILE
        first, last = (first - numbers * _FILE) * PAGE, (last - numbers * _FILE) * PAGE
        for number, start, end in zip(numbers.tolist(), first.tolist(), last.tolist(), strict=True):
            self._sources[number].ask(start, end)
