"""Stored bytes of samples by index: batches, streams of batches, and scans; nothing is decoded.

The only module that uses the formats' fast path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.codecs import DatasetFields
from mm_assets.dataset.files import Reader
from mm_assets.dataset.open_files import OpenFiles
from mm_assets.dataset.prefetch import Prefetch
from mm_assets.formats.batch import Indices
from mm_assets.formats.fast_path import MultiFile, RawBatch, read_raw, scan_raw

__all__ = ["RawBatch", "RawReader"]

_SCAN_ROWS = 256  # samples of a view that are scanned together

# Files are read as one after an eighth of their samples was read: before each of them begins to cache bounds of its
# own, which would take twice the memory.
_READS_PER_MULTI_FILE = 8


class RawReader:
    """The reader of a `Dataset` for stored bytes; safe for several threads. Arguments and errors as the dataset's."""

    def __init__(self, files: OpenFiles, fields: DatasetFields) -> None:
        self._files = files
        self._fields = fields
        self._num_read = 0  # samples, until the files are read as one

    def read(self, indices: Indices, modalities: Sequence[str] | None = None) -> RawBatch:
        """As `Dataset.read_raw`."""
        names = self._fields.choose(modalities)
        if len(indices) == 1:  # a batch's calls into NumPy would take several times as long
            self._num_read += 1
            reader, local = self._files.place(indices[0])
            return {
                name: [payload and memoryview(payload.data)]
                for name, payload in reader.read_sample(local, names).items()
            }
        sole = self._files.sole()
        if sole is not None:
            return read_raw(sole, indices, names)  # the same indices, checked there
        positions = self._files.positions(indices)
        multi_file = self._files.multi_file or self._make_multi_file(len(positions))
        if multi_file is not None and (batch := multi_file.read(positions, names)) is not None:
            return batch
        return self._read_each(positions, names)

    def _make_multi_file(self, count: int) -> MultiFile | None:
        """All files as one, once enough samples were read; `count` are about to be read."""
        files = self._files
        # A view of few samples must not open files that have none of them.
        if not files.may_be_multi_file or 2 * files.num_samples < files.num_stored:
            return None
        self._num_read += count
        if _READS_PER_MULTI_FILE * self._num_read < files.num_stored:
            return None
        return files.make_multi_file(MultiFile.of)

    def _read_each(self, positions: npt.NDArray[np.int64], names: tuple[str, ...]) -> RawBatch:
        """The same file by file, of positions."""
        found: RawBatch = {name: [None] * len(positions) for name in names}
        for where, columns in self._files.read_each(positions, partial(_read_file, names=names)):
            rows = where.tolist()
            for name, views in columns.items():
                column = found[name]
                for row, view in zip(rows, views, strict=True):
                    column[row] = view
        return found

    def stream(self, batches: Iterable[Indices], modalities: Sequence[str] | None = None) -> Iterator[RawBatch]:
        """As `Dataset.stream_raw`."""
        names = self._fields.choose(modalities)
        if self._files.files.any_remote:
            return Prefetch(self._tasks(batches, names), threads=1, depth=2, on_end=lambda: None)
        return self._stream_local(batches, names)

    def _stream_local(self, batches: Iterable[Indices], names: tuple[str, ...]) -> Iterator[RawBatch]:
        given = iter(batches)
        waiting: RawBatch | None = None
        while True:
            found: RawBatch | None = None
            failed: Exception | None = None
            try:
                found = self.read(next(given), names)
            except StopIteration:
                pass
            # The batch before it is good and comes first. Not caught around the `yield`: an exception thrown in there
            # is the consumer's.
            except Exception as error:  # noqa: BLE001  # of any kind: raised after the batch before it
                failed = error
            if waiting is not None:
                yield waiting
            if failed is not None:
                try:
                    raise failed
                finally:
                    del failed  # which has this frame
            if found is None:
                return
            waiting = found

    def _tasks(self, batches: Iterable[Indices], names: tuple[str, ...]) -> Iterator[Callable[[], RawBatch]]:
        """The reading of each batch; an error of `batches` is raised in its turn."""
        try:
            for indices in batches:
                # A copy: the reading happens later.
                yield partial(self._read_each, self._files.positions(indices), names)
        # Raised here it would be raised while tasks are begun ahead: before batches that are being read.
        except Exception as error:  # noqa: BLE001  # of any kind: raised by its own batch
            yield partial(_raise, error)

    def scan(self, modalities: Sequence[str] | None = None) -> Iterator[RawBatch]:
        """As `Dataset.scan_raw`."""
        names = self._fields.choose(modalities)
        if self._files.selection is None:
            for reader in self._files:
                yield from scan_raw(reader, names)
            return
        for start in range(0, self._files.num_samples, _SCAN_ROWS):
            yield self.read(np.arange(start, min(start + _SCAN_ROWS, self._files.num_samples)), names)


def _read_file(reader: Reader, indices: npt.NDArray[np.int64], *, names: tuple[str, ...]) -> RawBatch:
    return read_raw(reader, indices, names)


def _raise(error: Exception) -> NoReturn:
    raise error
