"""Files of rows, read in parts: Parquet tables and lines of JSON. A row is a mapping; none of its values is trusted.

`mm_assets.view.backends.source_rows` makes the rows of all other files and of containers.
"""

from __future__ import annotations

import io
import json
import threading
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from mm_assets.errors import ShardError, SourceError, first_line
from mm_assets.rows.source_ref import SourceRef
from mm_assets.sources.parquet import PARQUET_ERRORS
from mm_assets.storage.files import SourceFile

__all__ = ["JsonLines", "ParquetRows", "RowFile"]

BATCH_ROWS = 64  # of a table that are decoded at a time
BATCH_BYTES = 16 << 20  # in a batch, by the mean size of a row group's rows
ID_ROWS = 1 << 14  # whose ids are read at a time
CACHED_BYTES = 32 << 20  # of decoded rows
MAX_LINE_BYTES = 16 << 20
MAX_PARSED_BYTES = 4 << 20  # of a line: empty lists take a hundred times as much memory when they are parsed
MAX_WHOLE = 64 << 20  # bytes of a content that is not one range of a file: it is held in memory to be shown
_READ_BYTES = 1 << 20


class RowFile(ABC):
    """A file of rows.

    Attributes:
        file: the file.
        columns: the columns, if they are known.
        folders: folders, each with a final slash, of files that the rows may name.
        is_source: whether the pipeline makes the rows from a file that is not packed. The rows of a sample may be far
            from each other.
        is_stream: whether `stream_content` returns the contents that rows name in the file itself.
    """

    file: SourceFile
    columns: Sequence[str] = ()
    folders: Sequence[str] = ()
    is_source: ClassVar[bool] = False
    is_stream = False

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all rows are known."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The number of rows that are known so far."""

    @abstractmethod
    def ids(self, start: int, stop: int) -> Sequence[object]:
        """Returns the `sample_id` of known rows; None for rows without it."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        """Returns known rows."""

    def reach(self) -> None:  # noqa: B027  # optional: a Parquet table knows all of its rows at once
        """Reads some more rows."""

    def stream_content(self, member: str) -> bytes:
        """Returns the content of a member of a stream."""
        raise SourceError(self.file.url, "holds no members", member=member)

    def rejects(self, sample_id: str) -> Sequence[tuple[SourceRef, str]]:
        """Returns the members of a sample that became no row, each with the reason."""
        return ()

    def note(self) -> str:
        """Returns what users should know about the file."""
        return ""

    def end_reading(self) -> None:  # noqa: B027  # optional: only tables that read in a thread override it
        """Ends the thread that reads, if there is one."""

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


class ParquetRows(RowFile):
    """A Parquet table.

    Args:
        file: the table.

    Raises:
        ShardError: the file is not Parquet.
    """

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        try:
            self._table = _open_table(file)
            sizes = [self._table.metadata.row_group(n).num_rows for n in range(self._table.num_row_groups)]
        except SourceError:
            raise
        except PARQUET_ERRORS as error:
            raise ShardError(file.url, f"its footer cannot be read: {first_line(error)}", byte_offset=0) from error
        self.columns = tuple(self._table.schema_arrow.names)
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + max(size, 0))
        self._lock = threading.Lock()  # one read at a time: a reader of Parquet has one position
        self._batches: OrderedDict[tuple[int, int], list[dict[str, Any]]] = OrderedDict()
        self._sizes: dict[tuple[int, int], int] = {}
        self._ids: tuple[int, int, Iterator[Any]] | None = None  # of a group, the next row, and batches from there on
        self._batch_rows = [self._rows_of_batch(group) for group in range(self._table.num_row_groups)]

    def _rows_of_batch(self, group: int) -> int:
        """Returns how many rows of a group are decoded at a time."""
        metadata = self._table.metadata.row_group(group)
        mean = max(metadata.total_byte_size, 1) / max(metadata.num_rows, 1)
        return min(max(int(BATCH_BYTES / mean), 1), BATCH_ROWS)

    @property
    def is_complete(self) -> bool:
        """True: the footer has the number of rows."""
        return True

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self._starts[-1]

    def ids(self, start: int, stop: int) -> Sequence[object]:
        """Returns the values of `sample_id`."""
        if "sample_id" not in self.columns:
            return [None] * (stop - start)
        ids: list[object] = []
        with self._lock:
            for group, first, last in self._parts(start, stop):
                ids += self._ids_of(group, first, last)
        return ids

    def _ids_of(self, group: int, first: int, last: int) -> list[object]:
        """Returns the ids of some rows of a group, decoded from where the last call ended, or from its start."""
        cursor, self._ids = self._ids, None
        if cursor is not None and cursor[0] == group and cursor[1] == first:
            at, batches = first, cursor[2]
        else:
            at = 0
            batches = self._table.iter_batches(ID_ROWS, row_groups=[group], columns=["sample_id"], use_threads=False)
        ids: list[object] = []
        try:
            while at < last:
                batch = next(batches, None)
                if batch is None:
                    detail = f"row group {group} has fewer rows than its footer says"
                    raise SourceError(self.file.url, detail)
                low, high = max(first - at, 0), min(last - at, batch.num_rows)
                if low < high:
                    ids += _values(batch.column(0).slice(low, high - low))
                at += batch.num_rows
        except SourceError:
            raise
        except PARQUET_ERRORS as error:
            raise SourceError(self.file.url, f"row group {group} cannot be read: {first_line(error)}") from error
        if at == last:  # a scan continues here
            self._ids = group, at, batches
        return ids

    def rows(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        """Returns rows; the rows around them are decoded with them and cached."""
        rows: list[Mapping[str, Any]] = []
        with self._lock:
            for group, first, last in self._parts(start, stop):
                size = self._batch_rows[group]
                for batch in range(first // size, (last - 1) // size + 1):
                    at = batch * size
                    rows += self._batch(group, batch)[max(first - at, 0) : last - at]
        return rows

    def _parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns the row groups that have some of the rows, each with its first such row and the end."""
        parts = []
        for group, (first, last) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            low, high = max(start, first), min(stop, last)
            if low < high:
                parts.append((group, low - first, high - first))
        return parts

    def _batch(self, group: int, requested: int) -> list[dict[str, Any]]:
        cached = self._batches.get((group, requested))
        if cached is not None:
            self._batches.move_to_end((group, requested))
            return cached
        try:
            # A row group is decoded from its start: the batches before are cached too, if they fit.
            batches = self._table.iter_batches(self._batch_rows[group], row_groups=[group], use_threads=False)
            for number, batch in enumerate(batches):
                if number == requested or (group, number) not in self._batches:
                    self._cache((group, number), _dicts(batch), batch.nbytes)
                if number == requested:
                    return self._batches[group, number]
        except SourceError:
            raise
        except PARQUET_ERRORS as error:
            raise SourceError(self.file.url, f"row group {group} cannot be read: {first_line(error)}") from error
        raise SourceError(self.file.url, f"row group {group} has fewer rows than its footer says")

    def _cache(self, key: tuple[int, int], rows: list[dict[str, Any]], size: int) -> None:
        self._batches[key], self._sizes[key] = rows, size
        self._batches.move_to_end(key)
        while sum(self._sizes.values()) > CACHED_BYTES and len(self._batches) > 1:
            oldest, _ = self._batches.popitem(last=False)
            del self._sizes[oldest]


def _open_table(file: SourceFile) -> Any:
    """Opens a Parquet file so that a value that repeats in a column is in memory once.

    A file of some kilobytes may repeat a value of many megabytes in each of a million rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file.open(), buffer_size=_READ_BYTES, pre_buffer=False)
    schema = table.schema_arrow
    flat = table.num_row_groups > 0 and len(table.schema) == len(schema)  # leaves are columns then
    repeated = [
        name
        for number, name in enumerate(schema.names if flat else ())
        if pa.types.is_string(kind := schema.field(number).type) or pa.types.is_binary(kind)
        if _repeats(table.metadata.row_group(0).column(number))
    ]
    if not repeated:
        return table
    return pq.ParquetFile(
        file.open(), metadata=table.metadata, buffer_size=_READ_BYTES, pre_buffer=False, read_dictionary=repeated
    )


def _repeats(chunk: Any) -> bool:
    """Whether each value of a column is stored once, by the encodings in the footer."""
    return any("DICTIONARY" in encoding for encoding in chunk.encodings)


def _dicts(batch: Any) -> list[dict[str, Any]]:
    """Returns the rows of a batch."""
    columns = [_values(column) for column in batch.columns]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: Any) -> list[Any]:
    """Returns the values of a column; a value that repeats is the same object."""
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        return list(column.to_pylist())
    value_of: dict[int | None, Any] = {None: None}
    for index in column.indices.unique().to_pylist():
        if index is not None:
            value_of[index] = column.dictionary[index].as_py()
    return [value_of[index] for index in column.indices.to_pylist()]


class JsonLines(RowFile):
    """A file with a JSON object in each line.

    Args:
        file: the list.
    """

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._starts = array("q")  # of lines that are not blank
        self._stops = array("q")
        self._at = 0
        self._rest = b""  # a line whose end has not been read
        self._lock = threading.Lock()

    @property
    def num_rows(self) -> int:
        """The number of lines that have been read."""
        return len(self._stops)

    @property
    def is_complete(self) -> bool:
        """Whether the whole file has been read."""
        return self._at >= self.file.size and not self._rest

    def reach(self) -> None:
        """Finds the lines of the next MiB."""
        with self._lock:
            size = min(_READ_BYTES, self.file.size - self._at)
            data = self._rest + self.file.read(self._at, size)
            start = self._at - len(self._rest)
            is_last = self._at + size >= self.file.size
            at = 0
            while (end := data.find(b"\n", at)) >= 0:
                self._add(start, data, at, end)
                at = end + 1
            if is_last:
                self._add(start, data, at, len(data))
            elif len(data) - at > MAX_LINE_BYTES:
                detail = f"a line has more than {MAX_LINE_BYTES:,} bytes: it is not a list of JSON"
                raise SourceError(self.file.url, detail, byte_offset=start)
            self._rest = b"" if is_last else data[at:]
            self._at += size  # last: at the end of the file, other threads take it that all lines are known

    def _add(self, start: int, data: bytes, at: int, end: int) -> None:
        if data[at:end].strip():
            self._starts.append(start + at)
            self._stops.append(start + end)

    def ids(self, start: int, stop: int) -> Sequence[object]:
        """Returns the values of `sample_id`."""
        return [row.get("sample_id") for row in self.rows(start, stop)]

    def rows(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        """Returns the objects of lines; of a line without an object, its text and the reason."""
        ranges = [(self._starts[row], self._stops[row] - self._starts[row]) for row in range(start, stop)]
        return [_object(bytes(line)) for line in self.file.read_ranges(ranges)]


def _object(line: bytes) -> Mapping[str, Any]:
    if len(line) > MAX_PARSED_BYTES:
        error = f"has {len(line):,} bytes; lines of up to {MAX_PARSED_BYTES:,} are parsed to be shown"
        return {"line": line[:2000].decode("utf-8", "replace"), "error": error}
    try:
        value = json.load(io.TextIOWrapper(io.BytesIO(line), encoding=json.detect_encoding(line)))
    except (ValueError, RecursionError) as error:
        return {"line": line[:2000].decode("utf-8", "replace"), "error": f"is not JSON: {first_line(error)}"}
    return value if isinstance(value, dict) else {"line": value}
