"""Samples by index: as values, the payloads of packed files decoded by their fields, or as stored bytes.

One request to each file for everything that a call reads. An absent value is None; every error names the file, the
sample and the modality. The only module that uses the formats' fast path.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.codecs import DatasetFields, NamedPart
from mm_assets.dataset.decoding import Arrays, Batch, batch_layout, batch_target, decode_batches, decode_values, locate
from mm_assets.dataset.files import Reader
from mm_assets.dataset.open_files import OpenFiles
from mm_assets.dataset.parts import read_part_rows
from mm_assets.dataset.prefetch import Prefetch
from mm_assets.dataset.workers import WorkerPool, count_threads
from mm_assets.errors import FormatError, LimitError
from mm_assets.fields import ArraySpec, Field
from mm_assets.fields.base import Buffer, Out, own_arrays
from mm_assets.fields.measures import clock_ends
from mm_assets.fields.parts import take
from mm_assets.formats import Column, Payload
from mm_assets.formats.batch import Indices, spans
from mm_assets.formats.fast_path import MultiFile, RawBatch, read_raw, scan_raw
from mm_assets.formats.stored import StoredPayload

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RawBatch", "RawReader", "SampleReader"]

_SCAN_ROWS = 256  # samples of a view that are scanned together

T = TypeVar("T")


class SampleReader:
    """The reader of a `Dataset` for values; safe for several threads. Arguments and errors as the dataset's."""

    def __init__(self, files: OpenFiles, fields: DatasetFields) -> None:
        self._files = files
        self._fields = fields
        self._pool = WorkerPool()

    def read_sample(
        self, i: int, modalities: Sequence[str] | None = None, *, window: tuple[float, float] | None = None
    ) -> dict[str, Any]:
        """As `Dataset.read_sample`."""
        names, parts = self._fields.split(modalities)
        if window is not None:
            if parts:
                detail = f"the part {parts[0].name!r}: windows are read of whole modalities"
                raise ValueError(f"found a window, and {detail}")
            start, seconds = checked_windows(window, 1)[0].tolist()
            return self.read_parts(names, i, partial(_decode_window, start_seconds=start, seconds=seconds))
        reader, local = self._files.place(i)
        payloads = reader.read_sample(local, names, verify=self._files.files.verify)
        sample = {
            name: None if payload is None else self._decode(reader, local, name, payload)
            for name, payload in payloads.items()
        }
        if not parts:
            return sample
        batch = self._read_with_parts(self._files.positions([i]), (), parts)
        sample.update((name, _values_of(column)[0]) for name, column in batch.items())
        return {name: sample[name] for name in modalities or ()}

    def read_parts(
        self, names: Sequence[str], i: int, decode: Callable[[Field, Buffer, Buffer], Any]
    ) -> dict[str, Any]:
        """Decodes a part of each of some values by a function of field, record and data; None where one is absent."""
        fields = {name: self._fields.field(name) for name in names}
        positions = self._files.positions([i])
        values: dict[str, Any] = {}
        for name, (records, (data,)) in self._read_rows(positions, names, in_parts=_in_parts(fields)).items():
            try:
                value = None if data is None else decode(fields[name], memoryview(records[0]), data)
            except (FormatError, LimitError) as error:
                raise locate(error, name, self._place(positions, 0, name)) from error
            values[name] = None if value is None else fields[name].writable(value)
        return values

    def durations(self, indices: Indices, modalities: Sequence[str] | None = None) -> npt.NDArray[np.float64]:
        """As `Dataset.durations`."""
        names = self._fields.choose(modalities)
        known = {name: self._fields.known[name] for name in names if name in self._fields.known}
        positions = self._files.positions(indices)
        media, others = np.full((2, len(positions)), np.nan)
        for where, columns in self._files.read_each(positions, partial(_read_records, names=tuple(known))):
            for name, (present, records) in columns.items():
                typed = np.ascontiguousarray(records).view(known[name].metadata_type).reshape(-1)
                ends, is_media = clock_ends(typed)
                ends[~present] = np.nan
                if is_media:
                    media[where] = np.fmin(media[where], ends)
                else:
                    others[where] = np.fmax(others[where], ends)
        return np.where(np.isnan(media), others, media)

    def _decode(self, reader: Reader, i: int, name: str, payload: Payload) -> Any:
        try:
            field = self._fields.field(name)
            return field.writable(field.decode(payload.metadata, payload.data))
        except (FormatError, LimitError) as error:
            raise locate(error, name, (reader.part_of(name).path, i)) from error

    def read_samples(self, indices: Indices) -> list[dict[str, Any]]:
        """Many samples, each as `read_sample` decodes it, in the order of `indices`; one request to each file."""
        names = self._decodable(None)
        positions = self._files.positions(indices)
        rows = self._read_rows(positions, names)
        columns = [self._own_rows(positions, name, rows[name], 0) for name in names]
        if not columns:
            return [{} for _ in range(len(positions))]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def read_modality(self, name: str, indices: Indices, *, threads: int | None = 0) -> list[Any]:
        """As `Dataset.read_modality`."""
        workers = count_threads(threads)
        names, parts = self._fields.split((name,))
        positions = self._files.positions(indices)
        if parts:
            return _values_of(self._read_with_parts(positions, (), parts, threads=workers)[name])
        self._fields.field(name)
        return self._own_rows(positions, name, self._read_rows(positions, names)[name], workers)

    def read_batch(
        self,
        indices: Indices,
        modalities: Sequence[str] | None = None,
        *,
        out: Mapping[str, Out] | None = None,
        threads: int | None = 0,
        verify: bool | None = None,
        windows: npt.ArrayLike | None = None,
        on_read: Callable[[], object] | None = None,
        keys: npt.NDArray[np.uint64] | None = None,
    ) -> dict[str, Batch]:
        """As `Dataset.read_batch`."""
        names, parts = self._fields.split(modalities)
        workers = count_threads(threads)
        positions = self._files.positions(indices)
        if parts and windows is not None:
            raise ValueError(f"found windows, and the part {parts[0].name!r}: windows are read of whole modalities")
        if parts:
            batch = self._read_with_parts(
                positions, names, parts, out=out or {}, threads=workers, verify=verify, on_read=on_read, keys=keys
            )
            return {name: batch[name] for name in modalities or ()}
        fields = {name: self._fields.field(name) for name in names}
        times = None if windows is None else checked_windows(windows, len(positions))
        if times is not None:
            seconds = times[:, 1]
            same = float(seconds[0]) if len(seconds) and (seconds == seconds[0]).all() else None
            fields = {name: _for_windows(field, same) for name, field in fields.items()}
        targets = self._targets(fields, out or {}, len(positions))
        rows = self._read_rows(positions, names, verify, in_parts=() if times is None else _in_parts(fields))
        if on_read is not None:
            on_read()
        return self._decode_batches(positions, rows, targets, workers, fields, times, keys)

    def _read_with_parts(
        self,
        positions: npt.NDArray[np.int64],
        names: Sequence[str],
        parts: Sequence[NamedPart],
        *,
        out: Mapping[str, Out] | None = None,
        threads: int = 0,
        verify: bool | None = None,
        on_read: Callable[[], object] | None = None,
        keys: npt.NDArray[np.uint64] | None = None,
    ) -> dict[str, Batch]:
        """As `read_batch`, of modalities and parts of modalities; parts in one payload are decoded together."""
        count, out = len(positions), out or {}
        groups: dict[tuple[Any, ...], list[NamedPart]] = {}
        for part in parts:
            groups.setdefault((part.payload, part.is_array), []).append(part)
        fields = {name: self._fields.field(name) for name in names}
        targets = self._targets(fields, {name: one for name, one in out.items() if name in names}, count)
        modalities = dict.fromkeys(names)
        for first, *others in groups.values():
            fields[first.name] = first.field
            targets[first.name] = self._part_targets([first, *others], out, count) if first.is_array else None
            if not first.stored:
                modalities[first.modality] = None
        self._check_out(out, [*names, *(part.name for part in parts)])
        whole = self._read_rows(positions, tuple(modalities), verify)
        rows = {name: whole[name] for name in names}
        for first, *_ in groups.values():
            rows[first.name] = self._read_part_rows(positions, first, verify) if first.stored else whole[first.modality]
        if on_read is not None:
            on_read()
        modality_of = {part.name: part.modality for part in parts}

        def place(row: int, name: str) -> tuple[str, int]:
            return self._place(positions, row, modality_of.get(name, name))

        # An attribute that the arrays of a batch do not have is taken of values that are decoded alone.
        alone = {group[0].name for group in groups.values() if group[0].field.value_layout and not group[0].is_array}
        together = {name: field for name, field in fields.items() if name not in alone}
        found = decode_batches(together, rows, targets, pool=self._pool, threads=threads, place=place, keys=keys)
        for (_, is_array), (first, *others) in groups.items():
            if is_array:
                values, present = found[first.name]
                for part in (first, *others):
                    found[part.name] = Batch(values[part.path[0]] if part.path else values, present)
                continue
            if first.name in alone:
                field, column = first.field, rows[first.name]
                decoded = decode_values(field, first.name, column, pool=self._pool, threads=threads, place=place)
            else:
                decoded = found[first.name].values
            for part in (first, *others):
                found[part.name] = self._take(part, decoded)
        return found

    def read_batch_each(
        self,
        indices: Mapping[str, Indices],
        *,
        out: Mapping[str, Out],
        threads: int | None = 0,
        verify: bool | None = None,
        on_read: Callable[[], object] | None = None,
        keys: Mapping[str, npt.NDArray[np.uint64]] | None = None,
    ) -> dict[str, Batch]:
        """As `read_batch`, with samples of its own for each modality."""
        workers = count_threads(threads)
        fields = {name: self._fields.field(name) for name in self._fields.choose(tuple(indices))}
        positions = {name: self._files.positions(indices[name]) for name in fields}
        targets: dict[str, Arrays | None] = {}
        self._check_out(out, fields)
        for name, field in fields.items():
            own = {name: out[name]} if name in out else {}
            targets |= self._targets({name: field}, own, len(positions[name]))
        rows = self._read_rows_each(positions, verify)
        if on_read is not None:
            on_read()
        return decode_batches(
            fields,
            rows,
            targets,
            pool=self._pool,
            threads=workers,
            place=lambda row, name: self._place(positions[name], row, name),
            keys=keys,
        )

    def _take(self, part: NamedPart, decoded: list[Any]) -> Batch:
        """A part of each value."""
        try:
            values = [own_arrays(take(value, part.path)) for value in decoded]
        except LookupError as error:
            raise KeyError(f"{self._files.name}: {part.name!r}: {error.args[0]}") from error
        return Batch(values, np.fromiter((value is not None for value in values), np.bool_, len(values)))

    def _part_targets(self, parts: Sequence[NamedPart], out: Mapping[str, Out], count: int) -> Arrays | None:
        """The arrays that parts in one payload are decoded into: those of `out`, and new ones."""
        name, field = parts[0].name, parts[0].field
        layout = batch_layout(field.value_layout, name, self._files.name, count)
        if not isinstance(layout, dict):
            return batch_target(layout, next((out[part.name] for part in parts if part.name in out), None), name)
        targets: dict[str, npt.NDArray[Any]] = {}
        for part in parts:
            if part.name in out:
                chosen = layout[str(part.path[0])] if part.path else layout
                target = batch_target(chosen, out[part.name], part.name)
                if isinstance(target, dict):
                    targets.update(target)
                elif target is not None:
                    targets[str(part.path[0])] = target
        return {key: targets[key] if key in targets else np.empty(*one) for key, one in layout.items()}

    def _read_part_rows(self, positions: npt.NDArray[np.int64], part: NamedPart, verify: bool | None) -> Column:
        """The payloads of a part."""
        column = Column(
            np.zeros((len(positions), part.field.metadata_type.itemsize), np.uint8), [None] * len(positions)
        )
        read = partial(read_part_rows, part=part, verify=verify)
        for where, payloads in self._files.read_each(positions, read):
            for row, payload in zip(where.tolist(), payloads, strict=True):
                if payload is not None:
                    column.records[row] = np.frombuffer(payload.metadata, np.uint8)
                    column.datas[row] = memoryview(payload.data)
        return column

    def batch_layout(
        self, n: int, modalities: Sequence[str] | None = None
    ) -> dict[str, ArraySpec | dict[str, ArraySpec]]:
        """As `Dataset.batch_layout`."""
        if operator.index(n) < 0:
            raise ValueError(f"n: found {n}, expected a number of rows from 0")
        layouts: dict[str, ArraySpec | dict[str, ArraySpec]] = {}
        for name in self._fields.names if modalities is None else modalities:
            part = self._fields.part(name)
            layout = batch_layout(part.layout, name, self._files.name, n)
            if layout is not None:
                layouts[name] = layout
        return layouts

    def to_arrow(
        self,
        indices: Indices,
        modalities: Sequence[str] | None = None,
        *,
        raw: Sequence[str] = (),
        threads: int | None = 0,
    ) -> pa.Table:
        """As `Dataset.to_arrow`."""
        from mm_assets.dataset.arrow import BLOCK_ROWS, make_table

        names, as_stored = self._fields.choose(modalities), self._fields.choose(raw)
        fields = {name: None if name in as_stored else self._fields.field(name) for name in names}
        workers = count_threads(threads)
        positions = self._files.positions(indices)
        blocks = (positions[start:stop] for start, stop in spans(len(positions), BLOCK_ROWS))
        return make_table(
            fields,
            blocks,
            read=self._read_rows,
            decode=lambda block, name, rows: self._decode_rows(block, name, rows, workers),
            decode_batches=lambda block, rows: self._decode_batches(
                block,
                rows,
                self._targets({name: self._fields.field(name) for name in rows}, {}, len(block)),
                workers,
                {name: self._fields.field(name) for name in rows},
            ),
        )

    def close(self) -> None:
        """Join the decoding threads; fine twice."""
        self._pool.close()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _decodable(self, modalities: Sequence[str] | None) -> tuple[str, ...]:
        """The names to read, refused before anything is read if one cannot be decoded here."""
        names = self._fields.choose(modalities)
        for name in names:
            self._fields.field(name)
        return names

    def _targets(self, fields: Mapping[str, Field], out: Mapping[str, Out], count: int) -> dict[str, Arrays | None]:
        """The arrays that a batch of modalities is decoded into."""
        self._check_out(out, fields)
        return {
            name: batch_target(batch_layout(field.value_layout, name, self._files.name, count), out.get(name), name)
            for name, field in fields.items()
        }

    def _check_out(self, out: Mapping[str, Out], names: Collection[str]) -> None:
        for name in out:
            if name not in names:
                raise ValueError(f"out has {name!r}, which is not read: {', '.join(names)}")

    def _read_rows(
        self,
        positions: npt.NDArray[np.int64],
        names: Sequence[str],
        verify: bool | None = None,
        in_parts: Sequence[str] = (),
    ) -> dict[str, Column]:
        """The payloads of some modalities; one request to each file for all of them."""

        def read(reader: Reader, local: npt.NDArray[np.int64]) -> dict[str, Column]:
            return reader.read_columns(local, names, verify=checked, in_parts=in_parts)

        checked = self._files.files.verify if verify is None else verify
        count = len(positions)
        rows = {}
        for where, columns in self._files.read_each(positions, read):
            if len(where) == count and len(self._files) == 1:  # one file, and the rows are in its order
                return {name: Column(column.records, list(column.datas)) for name, column in columns.items()}
            for name, column in columns.items():
                if name not in rows:
                    rows[name] = Column(np.zeros((count, column.records.shape[1]), np.uint8), [None] * count)
                _put(column, rows[name], where)
        return rows or {name: Column(np.zeros((0, self._fields.record_size(name)), np.uint8), []) for name in names}

    def _read_rows_each(self, positions: Mapping[str, npt.NDArray[np.int64]], verify: bool | None) -> dict[str, Column]:
        """As `_read_rows`, with positions of its own for each modality."""
        # The rows of all modalities, one modality after the other.
        starts = np.cumsum([0, *map(len, positions.values())])

        def read(reader: Reader, local: npt.NDArray[np.int64], where: npt.NDArray[np.int64]) -> dict[str, Column]:
            bounds = pairwise(np.searchsorted(where, starts).tolist())
            here = {name: local[a:b] for name, (a, b) in zip(positions, bounds, strict=True) if a < b}
            return reader.read_columns_each(here, verify=checked)

        checked = self._files.files.verify if verify is None else verify
        rows = {
            name: Column(np.zeros((len(own), self._fields.record_size(name)), np.uint8), [None] * len(own))
            for name, own in positions.items()
        }
        first = dict(zip(positions, starts.tolist(), strict=False))
        for where, columns in self._files.read_each_rows(np.concatenate([starts[:0], *positions.values()]), read):
            for name, column in columns.items():
                begin = int(np.searchsorted(where, first[name]))
                _put(column, rows[name], where[begin : begin + len(column.datas)] - first[name])
        return rows

    def _own_rows(self, positions: npt.NDArray[np.int64], name: str, rows: Column, threads: int) -> list[Any]:
        """As `_decode_rows`, with arrays that may be written to."""
        return list(map(self._fields.field(name).writable, self._decode_rows(positions, name, rows, threads)))

    def _decode_rows(self, positions: npt.NDArray[np.int64], name: str, rows: Column, threads: int) -> list[Any]:
        """Each payload of one modality decoded; arrays may be read-only views of it."""
        return decode_values(
            self._fields.field(name),
            name,
            rows,
            pool=self._pool,
            threads=threads,
            place=lambda row, name: self._place(positions, row, name),
        )

    def _decode_batches(
        self,
        positions: npt.NDArray[np.int64],
        rows: Mapping[str, Column],
        targets: Mapping[str, Arrays | None],
        threads: int,
        fields: Mapping[str, Field],
        windows: npt.NDArray[np.float64] | None = None,
        keys: npt.NDArray[np.uint64] | None = None,
    ) -> dict[str, Batch]:
        return decode_batches(
            fields,
            rows,
            targets,
            pool=self._pool,
            threads=threads,
            place=lambda row, name: self._place(positions, row, name),
            windows=windows,
            keys=keys,
        )

    def _place(self, positions: npt.NDArray[np.int64], row: int, name: str) -> tuple[str, int]:
        reader, i = self._files.locate(int(positions[row]))
        return reader.part_of(name).path, i


def _put(column: Column, target: Column, rows: npt.NDArray[np.int64]) -> None:
    """Writes a column to rows of another one."""
    target.records[rows] = column.records
    for row, data in zip(rows.tolist(), column.datas, strict=True):
        target.datas[row] = data


class RawReader:
    """The reader of a `Dataset` for stored bytes; safe for several threads. Arguments and errors as the dataset's."""

    def __init__(self, files: OpenFiles, fields: DatasetFields) -> None:
        self._files = files
        self._fields = fields

    def read(self, indices: Indices, modalities: Sequence[str] | None = None) -> RawBatch:
        """As `Dataset.read_raw`, data alone."""
        names = self._fields.choose(modalities)
        sole = self._files.sole()
        if len(indices) == 1:  # a batch's calls into NumPy would take several times as long
            self._files.num_read += 1
            reader, local = (sole, indices[0]) if sole is not None else self._files.place(indices[0])
            payloads = reader.read_sample(local, names)
            return {name: [payload and memoryview(payload.data)] for name, payload in payloads.items()}
        if sole is not None:
            return read_raw(sole, indices, names)  # the same indices, checked there
        positions = self._files.positions(indices)
        self._files.num_read += len(positions)
        multi_file = self._files.multi_file or self._files.make_multi_file(MultiFile.of)
        if multi_file is not None and (batch := multi_file.read(positions, names)) is not None:
            return batch
        return self._read_each(positions, names, partial(_read_file, names=names))

    def read_payloads(
        self, indices: Indices, modalities: Sequence[str] | None, *, records: bool, verify: bool
    ) -> dict[str, list[Any]]:
        """As `Dataset.read_raw`, with records or checksums."""
        names = self._fields.choose(modalities)
        read = partial(_read_payloads, names=names, records=records, verify=verify)
        sole = self._files.sole()
        if sole is not None:
            return read(sole, indices)  # the same indices, checked there
        return self._read_each(self._files.positions(indices), names, read)

    def stored(
        self, indices: Indices, modalities: Sequence[str] | None = None
    ) -> dict[str, list[StoredPayload | None]]:
        """As `Dataset.stored`."""
        names = self._fields.choose(modalities)
        return self._read_each(self._files.positions(indices), names, partial(_locate_in_file, names=names))

    def _read_each(
        self,
        positions: npt.NDArray[np.int64],
        names: Sequence[str],
        read: Callable[[Reader, npt.NDArray[np.int64]], Mapping[str, list[T | None]]],
    ) -> dict[str, list[T | None]]:
        """What a function reads, by modality, file by file; in the order of the positions."""
        found: dict[str, list[T | None]] = {name: [None] * len(positions) for name in names}
        for where, columns in self._files.read_each(positions, read):
            rows = where.tolist()
            for name, values in columns.items():
                column = found[name]
                for row, value in zip(rows, values, strict=True):
                    column[row] = value
        return found

    def stream(
        self, batches: Iterable[Indices] | None = None, modalities: Sequence[str] | None = None
    ) -> Iterator[RawBatch]:
        """As `Dataset.stream_raw`."""
        names = self._fields.choose(modalities)
        if batches is None and self._files.selection is None:
            return (block for reader in self._files for block in scan_raw(reader, names))
        if batches is None:
            batches = (np.arange(start, stop) for start, stop in spans(self._files.num_samples, _SCAN_ROWS))
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
            # The batch before this one is good and is yielded first; then the error is raised below, whatever it is: a
            # fault of the file, of the indices or of the caller's iterator. The `yield` is outside: what a consumer
            # throws in there is not an error of the next batch.
            except Exception as error:  # noqa: BLE001  # raised again below, unchanged
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
        read = partial(_read_file, names=names)
        try:
            for indices in batches:
                # A copy: the reading happens later.
                yield partial(self._read_each, self._files.positions(indices), names, read)
        # Any error of the caller's iterator becomes a task that raises it. Tasks are begun ahead: raised here, it would
        # overtake the batches that are still being read.
        except Exception as error:  # noqa: BLE001  # raised again by its task, unchanged
            yield partial(_raise, error)


def _values_of(batch: Batch) -> list[Any]:
    """The values of a batch one by one, None where absent; numbers as Python's."""
    values = [
        {key: array[row] for key, array in batch.values.items()}
        if isinstance(batch.values, dict)
        else batch.values[row]
        for row in range(len(batch.present))
    ]
    return [
        None if not here else value.item() if isinstance(value, np.generic) else value
        for value, here in zip(values, batch.present.tolist(), strict=True)
    ]


def checked_windows(windows: npt.ArrayLike, count: int) -> npt.NDArray[np.float64]:
    """Windows as (n, 2) float64; one of them, as a pair, is that of each sample.

    Raises:
        ValueError: they are of another shape, a start is negative, a duration is not positive, or a number not finite.
    """
    found = np.asarray(windows, dtype=np.float64)
    found = np.broadcast_to(found, (count, 2)) if found.shape == (2,) else found
    if found.shape != (count, 2):
        raise ValueError(f"found windows of shape {found.shape}, expected ({count}, 2): start and duration in seconds")
    if not np.isfinite(found).all() or (found[:, 0] < 0).any() or (found[:, 1] <= 0).any():
        raise ValueError("found a window with a negative start or without a duration, expected finite seconds")
    return found


def _for_windows(field: Field, seconds: float | None) -> Field:
    """The field with the settings by which windows of one duration, if there is one, have one shape."""
    settings = field.window_settings(seconds, None)
    return dataclasses.replace(field, **settings) if settings else field


def _in_parts(fields: Mapping[str, Field]) -> tuple[str, ...]:
    return tuple(name for name, field in fields.items() if field.READS_PARTS)


def _decode_window(field: Field, metadata: Buffer, data: Buffer, *, start_seconds: float, seconds: float) -> Any:
    return field.decode_window(metadata, data, start_seconds, seconds)


def _read_records(
    reader: Reader, indices: npt.NDArray[np.int64], *, names: tuple[str, ...]
) -> dict[str, tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]]:
    return reader.read_records(indices, names)


def _read_file(reader: Reader, indices: npt.NDArray[np.int64], *, names: tuple[str, ...]) -> RawBatch:
    return read_raw(reader, indices, names)


def _read_payloads(
    reader: Reader, indices: Indices, *, names: tuple[str, ...], records: bool, verify: bool
) -> dict[str, list[Any]]:
    columns = reader.read_columns(indices, names, verify=verify or None)  # None: as the file was opened
    return {name: column.payloads() if records else column.datas for name, column in columns.items()}


def _locate_in_file(
    reader: Reader, indices: npt.NDArray[np.int64], *, names: tuple[str, ...]
) -> dict[str, list[StoredPayload | None]]:
    return reader.stored(indices, names)


def _raise(error: Exception) -> NoReturn:
    raise error
