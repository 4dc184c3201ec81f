"""Tables in Parquet: row groups and batches of a given size in bytes, and rows grouped by sample.

Sizes are bytes of the actual values, media included, never a count of rows: one row may hold a gigabyte. Media is
stored without codec and dictionary; text and identities are compressed. The same rows and options give the same file.
Columns that may not be null are `required` in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mm_assets.errors import EncodeError, LazyModule, SchemaMismatchError, SourceError, first_line
from mm_assets.storage.store import Store

if TYPE_CHECKING:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
else:
    pc = LazyModule("pyarrow.compute")
    pq = LazyModule("pyarrow.parquet")

__all__ = ["ParquetSink", "open_table", "read_batches", "row_bytes", "sample_groups"]

ROW_GROUP_BYTES = 32 << 20  # written and read as one: small enough to hold, large enough to scan
MAX_ROW_GROUP_ROWS = 1 << 20  # rows of text are small, but a reader needs to skip within a table
MAX_BATCH_ROWS = 1 << 16  # bounds the memory of repeated values that take a few bytes in the file
MAX_VALUE = (1 << 31) - (1 << 16)  # a Parquet page states its size in an int32, and a value is within one page
READ_BUFFER = 1 << 20  # bytes of a local column chunk that are read at a time; a chunk of media is a whole row group
_ONE_READ = 1 << 20  # bytes of a remote table that is read whole
_PAGE_BYTES = 1 << 20
_BATCH_VALUES = 1024  # values between two checks of the page size, unless a chunk of the column ends before
_UNIQUE = frozenset({"text_content", "metadata_json", "source_ref", "member", "detail"})  # values rarely repeat
_UNIQUE |= {"source.offset", "source.size", "source.checksum", "source_member.member"}


def row_bytes(batch: pa.RecordBatch | pa.Table) -> npt.NDArray[np.int64]:
    """Bytes of the values of each row, (num_rows,) int64.

    Text and binary count by their length, fixed-width values by their width, lists by their items; null counts as 0.
    """
    sizes = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        at = 0
        for chunk in chunks:
            sizes[at : at + len(chunk)] += _value_bytes(chunk)
            at += len(chunk)
    return sizes


def _value_bytes(values: Any) -> Any:
    """Bytes of each value of an array, as an array or as one number for all."""
    kind = values.type
    if pa.types.is_null(kind):
        return 0
    if _is_variable(kind):
        return pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        items = values.flatten()  # nulls skipped: as many items as the lengths say
        totals = np.zeros(len(items) + 1, np.int64)
        np.cumsum(np.broadcast_to(_value_bytes(items), len(items)), out=totals[1:])
        ends = np.cumsum(lengths)
        return totals[ends] - totals[ends - lengths]
    if pa.types.is_struct(kind):
        return sum(map(_value_bytes, values.flatten()))
    try:
        return max(kind.bit_width // 8, 1)
    except ValueError:
        return -(-values.nbytes // max(len(values), 1))  # another nested type: its mean


def _is_variable(kind: Any) -> bool:
    t = pa.types
    return bool(t.is_binary(kind) or t.is_large_binary(kind) or t.is_string(kind) or t.is_large_string(kind))


def _is_media(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _leaves(path: str, kind: Any) -> Iterator[str]:
    """Yields the columns of a field inside the file: those of a list's items or of a struct's fields, or itself."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    else:
        yield path


def _pages(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Splits a column of text or bytes after the value with which a page reaches `_PAGE_BYTES`."""
    pieces: list[Any] = []
    used = 0  # bytes of the page that the next value belongs to
    for chunk in column.chunks:
        # As the writer counts: a value has 4 bytes for its length.
        ends = np.cumsum(_value_bytes(chunk) + 4 * chunk.is_valid().to_numpy(zero_copy_only=False))
        start = taken = 0
        while start < len(chunk):
            stop = min(int(np.searchsorted(ends, taken + _PAGE_BYTES - used)) + 1, len(chunk))
            pieces.append(chunk.slice(start, stop - start))
            used += int(ends[stop - 1]) - taken
            used = 0 if used >= _PAGE_BYTES else used
            taken, start = int(ends[stop - 1]), stop
    return pa.chunked_array(pieces, column.type)


class ParquetSink:
    """Writes the batches of one table to a local file.

    Binary columns are media: uncompressed, without dictionary and statistics. A row group closes as soon as its values
    reach `row_group_bytes`, wherever the batches begin and end; one row never spans two. Leaving the `with` block by an
    exception removes the file.

    Args:
        path: the file; an existing one is replaced.
        schema: names, types and nullability of all batches.
        file: the same file if it is open already; it belongs to the caller.
        compression: codec of all columns that hold no media: zstd, snappy, lz4, gzip or none.
        row_group_bytes: bytes of values of one row group.

    Raises:
        EncodeError: `row_group_bytes` is not positive.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        *,
        file: RawIOBase | None = None,
        compression: str = "zstd",
        row_group_bytes: int = ROW_GROUP_BYTES,
    ) -> None:
        if row_group_bytes < 1:
            raise EncodeError(f"{path}: row_group_bytes is {row_group_bytes}, expected at least 1")
        self._path = path
        self._schema = schema
        self._row_group_bytes = row_group_bytes
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._held_rows = 0
        self._num_rows = 0
        leaves = {path: _is_media(field.type) for field in schema for path in _leaves(field.name, field.type)}
        plain = [path for path, is_media in leaves.items() if not is_media]
        self._required = [i for i, f in enumerate(schema) if not f.nullable]
        self._media = [i for i, f in enumerate(schema) if _is_media(f.type)]
        self._paged = {f.name for f in schema if _is_media(f.type) or (f.name in _UNIQUE and _is_variable(f.type))}
        self._writer = pq.ParquetWriter(
            path if file is None else file,
            schema,
            compression={path: "NONE" if is_media else compression.upper() for path, is_media in leaves.items()},
            use_dictionary=[path for path in plain if path not in _UNIQUE] or False,
            write_statistics=plain or False,
            write_batch_size=_BATCH_VALUES,
            use_compliant_nested_type=True,
        )

    def __enter__(self) -> ParquetSink:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()
        if kind is not None:
            self._path.unlink(missing_ok=True)

    def write(self, batch: pa.RecordBatch) -> None:
        """Adds rows; they are in the file after the `with` block.

        Raises:
            SchemaMismatchError: the batch has other columns, or a null where none may be.
            EncodeError: a value is larger than a Parquet page may be.
        """
        self._check(batch)
        if not batch.num_rows:
            return
        ends = np.cumsum(row_bytes(batch))
        start = taken = 0
        while start < batch.num_rows:
            # The row that reaches the limit is the row group's last.
            left = self._row_group_bytes - self._held_bytes
            stop = int(np.searchsorted(ends, taken + left)) + 1
            stop = min(stop, batch.num_rows, start + MAX_ROW_GROUP_ROWS - self._held_rows)
            self._held.append(batch.slice(start, stop - start))
            self._held_bytes += int(ends[stop - 1]) - taken
            self._held_rows += stop - start
            taken, start = int(ends[stop - 1]), stop
            if self._held_bytes >= self._row_group_bytes or self._held_rows >= MAX_ROW_GROUP_ROWS:
                self._flush()

    def _check(self, batch: pa.RecordBatch) -> None:
        if not batch.schema.equals(self._schema):
            found = ", ".join(f"{f.name} {f.type}{'' if f.nullable else '!'}" for f in batch.schema)
            expected = ", ".join(f"{f.name} {f.type}{'' if f.nullable else '!'}" for f in self._schema)
            raise SchemaMismatchError(f"{self._path.name}: a batch has columns {found}, expected {expected}")
        for index in self._required:
            if batch.column(index).null_count:
                row = int(np.flatnonzero(batch.column(index).is_null().to_numpy(zero_copy_only=False))[0])
                raise SchemaMismatchError(
                    f"{self._path.name}: column {self._schema[index].name!r} is null in row {self._num_rows + row}, "
                    "expected a value in every row"
                )
        for index in self._media:
            largest = pc.max(pc.binary_length(batch.column(index))).as_py() or 0
            if largest > MAX_VALUE:
                raise EncodeError(
                    f"{self._path.name}: a value of column {self._schema[index].name!r} has {largest} bytes, "
                    f"a Parquet page holds at most {MAX_VALUE}"
                )
        self._num_rows += batch.num_rows

    def _flush(self) -> None:
        if not self._held_rows:
            return
        rows = pa.Table.from_batches(self._held, self._schema)
        # Where pages end must not depend on how the rows came in batches, after each of which the writer checks the
        # page size. So columns come in one piece, which copies them; media come in pieces of a page, without a copy.
        paged = {name: _pages(rows.column(name)) for name in self._paged if self._media}
        others = rows.select([name for name in rows.column_names if name not in paged]).combine_chunks()
        columns = [paged[name] if name in paged else others.column(name) for name in rows.column_names]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=rows.schema), row_group_size=self._held_rows)
        self._held, self._held_bytes, self._held_rows = [], 0, 0


def open_table(store: Store, name: str, *, size: int | None = None) -> pq.ParquetFile:
    """Opens a table of a store; close it with ``close(force=True)``.

    Args:
        store: the store.
        name: the file, relative to the store's root.
        size: its bytes, if they are known: a small remote file is then read whole, in one request instead of three.

    Raises:
        SourceError: it is not there, cannot be read, or is not a Parquet file.
    """
    try:
        if store.is_local:
            # By its path, so that Python is not involved in reading, and a piece of a column chunk at a time.
            return pq.ParquetFile(store.local_path(name), buffer_size=READ_BUFFER, pre_buffer=False)
        if size is not None and size <= _ONE_READ:
            return pq.ParquetFile(pa.BufferReader(store.read_bytes(name)))
        return pq.ParquetFile(store.open(name), pre_buffer=True)  # whole row groups: each piece would be a request
    except pa.ArrowException as error:
        raise SourceError(store.url_of(name), f"is not a Parquet file: {error}") from error
    except OSError as error:
        raise SourceError(store.url_of(name), f"cannot be opened: {error.strerror or error}") from error


def read_batches(
    parquet_file: pq.ParquetFile,
    *,
    batch_bytes: int,
    columns: Sequence[str] | None = None,
    name: str = "the table",
) -> Iterator[pa.RecordBatch]:
    """The rows of a file in order, in batches of about `batch_bytes` of values.

    One row group is read at a time, and of a large one only as many rows as its mean row size allows; at most a row
    group is held. A row larger than `batch_bytes` is a batch of its own.

    Args:
        parquet_file: an open file.
        batch_bytes: bytes of values of one batch.
        columns: names to read; None reads all.
        name: what messages call the file.

    Raises:
        SourceError: the file is damaged or cannot be read.
        SchemaMismatchError: a column is not in the file.
        EncodeError: `batch_bytes` is not positive.
    """
    if batch_bytes < 1:
        raise EncodeError(f"batch_bytes is {batch_bytes}, expected at least 1")
    missing = [c for c in columns or () if c not in parquet_file.schema_arrow.names]
    if missing:
        raise SchemaMismatchError(f"{name}: no column {missing[0]!r}, there are {parquet_file.schema_arrow.names}")
    for group in range(parquet_file.num_row_groups):
        described = parquet_file.metadata.row_group(group)
        # Uncompressed bytes as stated in the file; a wrong figure costs memory or speed, not correctness.
        mean = max(_stated_bytes(described, columns) // max(described.num_rows, 1), 1)
        rows = min(max(batch_bytes // mean, 1), MAX_BATCH_ROWS)
        try:
            for batch in parquet_file.iter_batches(
                batch_size=rows, row_groups=[group], columns=columns and list(columns), use_threads=False
            ):
                yield from _cut(batch, batch_bytes)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(name, f"row group {group} cannot be read: {first_line(error)}") from error


def _stated_bytes(group: pq.RowGroupMetaData, columns: Sequence[str] | None) -> int:
    """The uncompressed bytes of some columns of a row group, as stated."""
    if columns is None:
        return int(group.total_byte_size)
    paths = tuple(f"{name}." for name in columns)
    chunks = map(group.column, range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if f"{chunk.path_in_schema}.".startswith(paths))


def _cut(batch: pa.RecordBatch, batch_bytes: int) -> Iterator[pa.RecordBatch]:
    """Slices of at most `batch_bytes`, or of one row."""
    ends = np.cumsum(row_bytes(batch))
    start = taken = 0
    while start < batch.num_rows:
        stop = max(int(np.searchsorted(ends, taken + batch_bytes, side="right")), start + 1)
        yield batch.slice(start, stop - start)
        taken, start = int(ends[stop - 1]), stop


def sample_groups(batches: Iterable[pa.RecordBatch], *, batch_bytes: int = 16 << 20) -> Iterator[pa.Table]:
    """Regroups rows so that no table splits a sample.

    Rows of one sample must follow each other, as in every row table. No value is copied.

    Args:
        batches: rows with a column `sample_id`, all of one schema.
        batch_bytes: a table takes whole samples up to so many bytes of values, and at least one sample.

    Raises:
        SchemaMismatchError: there is no column `sample_id`.
    """
    group = _Rows(batch_bytes)  # whole samples
    sample = _Rows(batch_bytes)  # the last one, which the next batch may continue
    last_id = None
    for batch in batches:
        if "sample_id" not in batch.schema.names:
            raise SchemaMismatchError(f"rows have no column 'sample_id', there are {batch.schema.names}")
        if not batch.num_rows:
            continue
        starts, before = _samples(batch)
        last = len(starts) - 2  # the last sample of the batch
        first = 0
        if batch.column("sample_id")[0].as_py() == last_id:
            sample.add(batch, 0, int(starts[1]), int(before[1]))
            first = 1
        if first <= last:
            if not group.fits(sample.num_bytes):
                yield group.take()
            group.move(sample)
        while first < last:
            fitting = int(np.searchsorted(before, before[first] + batch_bytes - group.num_bytes, side="right")) - 1
            stop = min(fitting, last) if group.num_bytes else max(min(fitting, last), first + 1)
            if stop <= first:
                yield group.take()
                continue
            group.add(batch, int(starts[first]), int(starts[stop]), int(before[stop] - before[first]))
            first = stop
        if first == last:
            sample.add(batch, int(starts[last]), batch.num_rows, int(before[-1] - before[last]))
        last_id = batch.column("sample_id")[batch.num_rows - 1].as_py()
    if not group.fits(sample.num_bytes):
        yield group.take()
    group.move(sample)
    if group.num_bytes:
        yield group.take()


class _Rows:
    """Consecutive rows of several batches, of about `limit` bytes, or of one sample."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slices: list[tuple[pa.RecordBatch, int, int]] = []
        self.num_bytes = 0

    def fits(self, num_bytes: int) -> bool:
        """Whether there is room for so many bytes more: there is without any rows."""
        return not self.num_bytes or self.num_bytes + num_bytes <= self._limit

    def add(self, batch: pa.RecordBatch, start: int, stop: int, num_bytes: int) -> None:
        """Adds the rows from `start` to `stop`; in one slice with those before them."""
        if self._slices and self._slices[-1][0] is batch:
            start = self._slices.pop()[1]
        self._slices.append((batch, start, stop))
        self.num_bytes += num_bytes

    def move(self, other: _Rows) -> None:
        """Takes over the rows of another."""
        for batch, start, stop in other._slices:
            self.add(batch, start, stop, 0)
        self.num_bytes += other.num_bytes
        other._slices, other.num_bytes = [], 0

    def take(self) -> pa.Table:
        """The rows as a table without copies; none are left."""
        slices, self._slices, self.num_bytes = self._slices, [], 0
        return pa.Table.from_batches([batch.slice(start, stop - start) for batch, start, stop in slices])


def _samples(batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First row of each sample and the number of rows; bytes of values before each of these rows."""
    ids = batch.column("sample_id")
    changes = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(ids)]])
    return starts, np.concatenate([[0], np.cumsum(row_bytes(batch))])[starts]
