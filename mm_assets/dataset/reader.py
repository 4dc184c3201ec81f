"""Samples by index, as values: the payloads of packed files, decoded by their fields.

One request to each file for everything that a call asks for. An absent value is None; every error names the file, the
sample and the modality. Which files, samples and fields there are is the caller's matter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.codecs import DatasetFields
from mm_assets.dataset.decoding import (
    Arrays,
    Batch,
    DecodePool,
    batch_layout,
    batch_target,
    count_threads,
    decode_batches,
    decode_values,
    locate,
)
from mm_assets.dataset.files import NUM_REQUESTS, Reader
from mm_assets.dataset.open_files import Ids, OpenFiles
from mm_assets.dataset.prefetch import Prefetch
from mm_assets.errors import FormatError
from mm_assets.fields import ArraySpec
from mm_assets.fields.base import Out
from mm_assets.formats import Column, Payload
from mm_assets.formats.raw import RawBatch

__all__ = ["SampleReader"]

T = TypeVar("T")

_SCAN_ROWS = 256  # samples of a view that are scanned together


class SampleReader:
    """What a `Dataset` reads with; safe for several threads.

    Args:
        shards: the files and the selection of samples.
        fields: which field decodes which modality.

    Attributes:
        path: of the dataset, for messages.
    """

    def __init__(self, shards: OpenFiles, fields: DatasetFields) -> None:
        self.path = shards.name
        self._shards = shards
        self._fields = fields
        self._pool = DecodePool()
        self._requests = DecodePool()  # threads that wait for remote files

    def read_sample(self, i: int, modalities: Sequence[str] | None = None) -> dict[str, Any]:
        """One sample: value by modality name, None where absent.

        Args:
            i: index; negative counts from the end.
            modalities: names to read; all by default. Nothing else is touched.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            SchemaMismatchError: a modality is of a type that is not known here.
        """
        names = self._fields.choose(modalities)
        reader, local = self._shards.place(i)
        payloads = reader.read_sample(local, names)
        return {
            name: None if payload is None else self._decode(reader, local, name, payload)
            for name, payload in payloads.items()
        }

    def _decode(self, reader: Reader, i: int, name: str, payload: Payload) -> Any:
        try:
            return self._fields.field(name).decode(payload.metadata, payload.data)
        except FormatError as error:
            raise locate(error, name, (reader.path, i)) from error

    def read_raw(self, i: int, name: str) -> memoryview | None:
        """The data bytes of one value, not decoded, a view into a mapped file; None where absent.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
        """
        self._fields.check_name(name)
        reader, local = self._shards.place(i)
        return reader.read_raw(local, name)

    # --- reading many -------------------------------------------------------------------------------------------------

    def read_samples(
        self, ids: Ids, modalities: Sequence[str] | None = None, *, threads: int | None = 0
    ) -> list[dict[str, Any]]:
        """Many samples, each as `read_sample` gives it, in the order asked; one request to each file.

        Args:
            ids: indices; repeats are fine, negative ones count from the end.
            modalities: names to read; all by default.
            threads: as for `read_batch`.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            SchemaMismatchError: a modality is of a type that is not known here.
            ValueError: no number of threads.
        """
        names = self._decodable(modalities)
        workers = count_threads(threads)
        positions = self._shards.positions(ids)
        rows = self._read_rows(positions, names)
        columns = [self._decode_rows(positions, name, rows[name], workers) for name in names]
        if not columns:
            return [{} for _ in range(len(positions))]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def read_raw_batch(self, ids: Ids, name: str) -> list[memoryview | None]:
        """The data bytes of many values, as `read_raw`, in the order asked; one request to each file.

        Args:
            ids: indices; repeats are fine, negative ones count from the end.
            name: the modality, also one of a type that is not known here.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
        """
        return self.read_raw_batches(ids, [name])[name]

    def read_raw_batches(self, ids: Ids, modalities: Sequence[str] | None = None) -> dict[str, list[memoryview | None]]:
        """The data bytes of several modalities of many samples, rows in the order asked; one request to each file.

        Args:
            ids: indices; repeats are fine, negative ones count from the end.
            modalities: names to read, also of types that are not known here; all by default.

        Returns:
            Modality name to n views, None where absent. Views of mapped files stay valid after `close`.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
        """
        names = self._fields.choose(modalities)
        sole = self._shards.sole()
        if sole is not None:
            return sole.read_raw_batch(ids, names)  # the same indices, checked there
        positions = self._shards.positions(ids)
        joined = self._shards.joined(len(positions))
        if joined is not None and (batch := joined.read(positions, names)) is not None:
            return batch
        return self._read_raw_at(positions, names)

    def _read_raw_at(self, positions: npt.NDArray[np.int64], names: tuple[str, ...]) -> RawBatch:
        """The same file by file, of positions."""
        found: dict[str, list[memoryview | None]] = {name: [None] * len(positions) for name in names}
        for where, columns in self._read_files(positions, lambda reader, local: reader.read_raw_batch(local, names)):
            rows = where.tolist()
            for name, views in columns.items():
                column = found[name]
                for row, view in zip(rows, views, strict=True):
                    column[row] = view
        return found

    def stream_raw(self, batches: Iterable[Ids], modalities: Sequence[str] | None = None) -> Iterator[RawBatch]:
        """The data bytes of one batch after the other, each as `read_raw_batches` gives it, the next one on its way.

        Before a batch is handed out, the one behind it is read: of local files this asks for the pages that are not in
        memory, and waits for none of the data; of remote ones a thread makes the requests meanwhile. So the storage has
        something to do while a batch is used. `batches` is asked for one batch more than was handed out, before the
        first one too; its arrays may be used again as soon as it is asked for the next.

        Args:
            batches: indices of the samples of each batch, as for `read_raw_batches`; may have no end.
            modalities: names to read, also of types that are not known here; all by default. Nothing else is touched.

        Raises:
            KeyError: no such modality; at once. What follows comes behind the batches before it, and ends the stream.
            IndexError: no such sample.
            FormatError: a file is damaged there.
        """
        names = self._fields.choose(modalities)
        if self._shards.files.any_remote:
            return Prefetch(self._raw_tasks(batches, names), threads=1, depth=2, on_end=lambda: None)
        return self._stream_local(batches, names)

    def _stream_local(self, batches: Iterable[Ids], names: tuple[str, ...]) -> Iterator[RawBatch]:
        given = iter(batches)
        waiting: RawBatch | None = None
        while True:
            found: RawBatch | None = None
            failed: Exception | None = None
            try:
                found = self.read_raw_batches(next(given), names)
            except StopIteration:
                pass
            # Whatever it is, the batch before it is good and comes first. Not caught around the `yield`: what is thrown
            # in there is the consumer's.
            except Exception as error:  # noqa: BLE001
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

    def _raw_tasks(self, batches: Iterable[Ids], names: tuple[str, ...]) -> Iterator[Callable[[], RawBatch]]:
        """The reading of each batch; what is wrong with `batches` comes in its turn, too."""
        try:
            for ids in batches:
                # A copy: the reading happens later.
                yield partial(self._read_raw_at, self._shards.positions(ids), names)
        # Raised here it would be by whoever asks for tasks ahead: before batches that are on their way.
        except Exception as error:  # noqa: BLE001
            yield partial(_raise, error)

    def scan_raw(self, modalities: Sequence[str] | None = None) -> Iterator[dict[str, list[memoryview | None]]]:
        """The data bytes of all samples in order, some hundred samples at a time, as `read_raw_batches` gives them.

        Args:
            modalities: names to read, also of types that are not known here; all by default. Nothing else is touched.

        Raises:
            KeyError: no such modality.
            FormatError: a file is damaged.
        """
        names = self._fields.choose(modalities)
        if self._shards.selection is None:
            for reader in self._shards:
                yield from reader.scan_raw(names)
            return
        for start in range(0, self._shards.num_samples, _SCAN_ROWS):
            stop = min(start + _SCAN_ROWS, self._shards.num_samples)
            yield self.read_raw_batches(np.arange(start, stop), names)

    def read_modality(self, name: str, ids: Ids, *, threads: int | None = 0) -> list[Any]:
        """One modality of many samples, in the order asked, None where absent; no other modality is touched.

        Args:
            name: the modality.
            ids: indices; repeats are fine, negative ones count from the end.
            threads: as for `read_batch`.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            SchemaMismatchError: the modality is of a type that is not known here.
            ValueError: no number of threads.
        """
        names = self._decodable((name,))
        workers = count_threads(threads)
        positions = self._shards.positions(ids)
        return self._decode_rows(positions, name, self._read_rows(positions, names)[name], workers)

    def read_batch(
        self,
        ids: Ids,
        modalities: Sequence[str] | None = None,
        *,
        out: Mapping[str, Out] | None = None,
        threads: int | None = 0,
        verify: bool | None = None,
    ) -> dict[str, Batch]:
        """Some modalities of many samples, rows aligned in all of them.

        Args:
            ids: indices; repeats are fine, negative ones count from the end.
            modalities: names to read; all by default.
            out: arrays to decode into, by modality, such as `empty_batch` makes; of a modality with several arrays a
                mapping. The rows of `ids` are written to the first rows, all of their elements, and any further row
                is left as it is; the batch holds views of them. Modalities that are not in it get new arrays. After
                an error the content is undefined.
            threads: how many threads decode, for fields whose codec lets them (`Field.decodes_in_parallel`); 0 decodes
                in the calling thread, None takes one for each core. The result is the same. The threads are kept for
                the next call, until `close`.
            verify: check the payloads' checksums, where the files have them; by default as the dataset was opened.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            FormatError: the file is damaged there.
            SchemaMismatchError: a modality is of a type that is not known here.
            ValueError: `out` does not fit, or no number of threads.
        """
        names = self._decodable(modalities)
        workers = count_threads(threads)
        positions = self._shards.positions(ids)
        targets = self._targets(names, out or {}, len(positions))
        return self._decode_batches(positions, self._read_rows(positions, names, verify), targets, workers)

    def batch_layout(
        self, n: int, modalities: Sequence[str] | None = None
    ) -> dict[str, ArraySpec | dict[str, ArraySpec]]:
        """Shape (n, …) and dtype of the arrays of a batch, by modality; without those whose values come as a list.

        Args:
            n: rows.
            modalities: names; all by default.

        Raises:
            KeyError: no such modality.
            SchemaMismatchError: a modality is of a type that is not known here.
            CorruptError: the file's schema has values of an impossible size.
            ValueError: a negative `n`.
        """
        if operator.index(n) < 0:
            raise ValueError(f"n: found {n}, expected a number of rows from 0")
        layouts = {
            name: batch_layout(self._fields.field(name), name, self.path, n) for name in self._fields.choose(modalities)
        }
        return {name: layout for name, layout in layouts.items() if layout is not None}

    def empty_batch(self, n: int, modalities: Sequence[str] | None = None) -> dict[str, Arrays]:
        """Zeroed arrays for the `out` of `read_batch`, to be used again and again; else as `batch_layout`."""
        return {
            name: (
                np.zeros(layout.shape, layout.dtype)
                if isinstance(layout, ArraySpec)
                else {key: np.zeros(one.shape, one.dtype) for key, one in layout.items()}
            )
            for name, layout in self.batch_layout(n, modalities).items()
        }

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _decodable(self, modalities: Sequence[str] | None) -> tuple[str, ...]:
        """The names that are meant, refused before anything is read if one cannot be decoded here."""
        names = self._fields.choose(modalities)
        for name in names:
            self._fields.field(name)
        return names

    def _targets(self, names: Sequence[str], out: Mapping[str, Out], count: int) -> dict[str, Arrays | None]:
        """What a batch of modalities is decoded into."""
        for name in out:
            if name not in names:
                raise ValueError(f"out has {name!r}, which is not read: {', '.join(names)}")
        return {
            name: batch_target(batch_layout(self._fields.field(name), name, self.path, count), out.get(name), name)
            for name in names
        }

    def _read_rows(
        self, positions: npt.NDArray[np.int64], names: Sequence[str], verify: bool | None = None
    ) -> dict[str, Column]:
        """The payloads of some modalities; one request to each file for all of them."""

        def read(reader: Reader, local: npt.NDArray[np.int64]) -> dict[str, Column]:
            return reader.read_columns(local, names, verify=verify)

        count = len(positions)
        rows = {}
        for where, columns in self._read_files(positions, read):
            if len(where) == count and len(self._shards) == 1:  # one file, and the rows are in its order
                return {name: Column(column.records, list(column.datas)) for name, column in columns.items()}
            for name, column in columns.items():
                if name not in rows:
                    rows[name] = Column(np.zeros((count, column.records.shape[1]), np.uint8), [None] * count)
                records, datas = rows[name]
                records[where] = column.records
                for row, data in zip(where.tolist(), column.datas, strict=True):
                    datas[row] = data
        return rows or {name: Column(np.zeros((0, self._fields.record_size(name)), np.uint8), []) for name in names}

    def _read_files(
        self, positions: npt.NDArray[np.int64], read: Callable[[Reader, npt.NDArray[np.int64]], T]
    ) -> Iterator[tuple[npt.NDArray[np.int64], T]]:
        """What `read` gives of each file that has some of the samples, with their rows; remote files are asked at once.

        Args:
            positions: of the samples.
            read: gets a file and the samples' indices in it.
        """
        parts = self._shards.parts(positions)
        if not self._shards.files.any_remote:
            for number, where, local in parts:
                yield where, read(self._shards[number], local)
            return
        asked = [(where, partial(self._read_file, number, local, read)) for number, where, local in parts]
        if len(asked) == 1:
            yield asked[0][0], asked[0][1]()
            return
        futures = self._requests.start(NUM_REQUESTS, [task for _, task in asked])
        try:
            for (where, _), future in zip(asked, futures, strict=True):
                yield where, future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # after an error nothing runs on

    def _read_file(
        self, number: int, local: npt.NDArray[np.int64], read: Callable[[Reader, npt.NDArray[np.int64]], T]
    ) -> T:
        return read(self._shards[number], local)

    def _decode_rows(self, positions: npt.NDArray[np.int64], name: str, rows: Column, threads: int) -> list[Any]:
        """Each payload of one modality as `read_sample` would give it."""
        return decode_values(
            self._fields.field(name),
            name,
            rows,
            pool=self._pool,
            threads=threads,
            place=lambda row: self._place(positions, row),
        )

    def _decode_batches(
        self,
        positions: npt.NDArray[np.int64],
        rows: Mapping[str, Column],
        targets: Mapping[str, Arrays | None],
        threads: int,
    ) -> dict[str, Batch]:
        return decode_batches(
            {name: self._fields.field(name) for name in rows},
            rows,
            targets,
            pool=self._pool,
            threads=threads,
            place=lambda row: self._place(positions, row),
        )

    def _place(self, positions: npt.NDArray[np.int64], row: int) -> tuple[str, int]:
        reader, i = self._shards.locate(int(positions[row]))
        return reader.path, i


def _raise(error: Exception) -> NoReturn:
    raise error
