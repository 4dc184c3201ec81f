"""Files of rows, read in parts: Parquet tables and lines of JSON. A row is a mapping; nothing of it is trusted.

The rows of all other files, and of containers, are made by `mm_assets.view.backends.source_rows`.
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
BATCH_BYTES = 16 << 20  # of them, by the mean size of a row group's rows
ID_ROWS = 1 << 14  # of which the ids are read at a time
CACHED_BYTES = 32 << 20  # of decoded rows
MAX_LINE = 16 << 20  # bytes of a line of JSON
MAX_PARSED = 4 << 20  # of which so many are parsed: of empty lists they take a hundred times as much memory
_READ = 1 << 20


class RowFile(ABC):
    """A file of rows.

    Attributes:
        file: the file.
        columns: the columns, as far as they are known.
        folders: folders, each with a final slash, of files that the rows may name.
        unpacked: whether it has all rows of a file that is not packed; those of a sample may be far from each other.
        is_stream: whether the contents that rows name in the file itself come from `passed`.
    """

    file: SourceFile
    columns: Sequence[str] = ()
    folders: Sequence[str] = ()
    unpacked: ClassVar[bool] = False
    is_stream = False

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all rows are known."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows that are known so far."""

    @abstractmethod
    def ids(self, start: int, stop: int) -> Sequence[object]:
        """The values of `sample_id` of known rows; None of those without."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        """Known rows."""

    def reach(self) -> None:  # noqa: B027  # optional: most tables know all of their rows at once
        """Reads on by some rows."""

    def passed(self, member: str) -> bytes:
        """The content of a member of a stream."""
        raise SourceError(self.file.url, "holds no members", member=member)

    def rejects(self, sample_id: str) -> Sequence[tuple[SourceRef, str]]:
        """Members of a sample that became no row, and why."""
        return ()

    def note(self) -> str:
        """What users should know of the file."""
        return ""

    def end_reading(self) -> None:  # noqa: B027  # optional: only tables that read in a thread override it
        """Ends threads that read on."""

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


class ParquetRows(RowFile):
    """A Parquet table.

    Args:
        file: the table.

    Raises:
        ShardError: it is not a Parquet file.
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
        """Rows of a group that are decoded at a time."""
        described = self._table.metadata.row_group(group)
        mean = max(described.total_byte_size, 1) / max(described.num_rows, 1)
        return min(max(int(BATCH_BYTES / mean), 1), BATCH_ROWS)

    @property
    def is_complete(self) -> bool:
        """True: the footer has their number."""
        return True

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self._starts[-1]

    def ids(self, start: int, stop: int) -> Sequence[object]:
        """The values of `sample_id`."""
        if "sample_id" not in self.columns:
            return [None] * (stop - start)
        found: list[object] = []
        with self._lock:
            for group, first, last in self._parts(start, stop):
                found += self._ids_of(group, first, last)
        return found

    def _ids_of(self, group: int, first: int, last: int) -> list[object]:
        """The ids of some rows of a group, decoded from where the last call ended, or from the group's start."""
        known, self._ids = self._ids, None
        if known is not None and known[0] == group and known[1] == first:
            at, batches = first, known[2]
        else:
            at = 0
            batches = self._table.iter_batches(ID_ROWS, row_groups=[group], columns=["sample_id"], use_threads=False)
        found: list[object] = []
        try:
            while at < last:
                batch = next(batches, None)
                if batch is None:
                    detail = f"row group {group} has fewer rows than its footer says"
                    raise SourceError(self.file.url, detail)
                low, high = max(first - at, 0), min(last - at, batch.num_rows)
                if low < high:
                    found += _values(batch.column(0).slice(low, high - low))
                at += batch.num_rows
        except SourceError:
            raise
        except PARQUET_ERRORS as error:
            raise SourceError(self.file.url, f"row group {group} cannot be read: {first_line(error)}") from error
        if at == last:  # a scan continues here
            self._ids = group, at, batches
        return found

    def rows(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        """Rows; those around them are decoded with them, and cached."""
        found: list[Mapping[str, Any]] = []
        with self._lock:
            for group, first, last in self._parts(start, stop):
                size = self._batch_rows[group]
                for batch in range(first // size, (last - 1) // size + 1):
                    at = batch * size
                    found += self._batch(group, batch)[max(first - at, 0) : last - at]
        return found

    def _parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Row groups that have some of the rows, and which of theirs these are."""
        parts = []
        for group, (first, last) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            low, high = max(start, first), min(stop, last)
            if low < high:
                parts.append((group, low - first, high - first))
        return parts

    def _batch(self, group: int, wanted: int) -> list[dict[str, Any]]:
        found = self._batches.get((group, wanted))
        if found is not None:
            self._batches.move_to_end((group, wanted))
            return found
        try:
            # A row group is decoded from its start: the batches before are cached too, as far as they fit.
            batches = self._table.iter_batches(self._batch_rows[group], row_groups=[group], use_threads=False)
            for number, batch in enumerate(batches):
                if number == wanted or (group, number) not in self._batches:
                    self._cache((group, number), _dicts(batch), batch.nbytes)
                if number == wanted:
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
    """A Parquet file; columns whose values repeat have each of them in memory once, however often it repeats.

    A file of some kilobytes may repeat a value of many megabytes in each of a million rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file.open(), buffer_size=_READ, pre_buffer=False)
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
        file.open(), metadata=table.metadata, buffer_size=_READ, pre_buffer=False, read_dictionary=repeated
    )


def _repeats(chunk: Any) -> bool:
    """Whether a column's values are stored once each, by the encodings that the footer states."""
    return any("DICTIONARY" in encoding for encoding in chunk.encodings)


def _dicts(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch."""
    columns = [_values(column) for column in batch.columns]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: Any) -> list[Any]:
    """A column's values, a repeated one as the same object."""
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        return list(column.to_pylist())
    known: dict[int, Any] = {}
    found = []
    for index in column.indices.to_pylist():
        if index is not None and index not in known:
            known[index] = column.dictionary[index].as_py()
        found.append(None if index is None else known[index])
    return found


class JsonLines(RowFile):
    """A file with an object of JSON in each line, found line by line.

    Args:
        file: the list.
    """

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._starts = array("q")  # of lines that are not blank
        self._stops = array("q")
        self._at = 0
        self._held = b""  # of a line whose end has not been read
        self._lock = threading.Lock()

    @property
    def num_rows(self) -> int:
        """Lines that have been found."""
        return len(self._stops)

    @property
    def is_complete(self) -> bool:
        """Whether the end of the file was reached."""
        return self._at >= self.file.size and not self._held

    def reach(self) -> None:
        """Finds the lines of the next mebibyte."""
        with self._lock:
            size = min(_READ, self.file.size - self._at)
            data = self._held + self.file.read(self._at, size)
            start = self._at - len(self._held)
            is_last = self._at + size >= self.file.size
            at = 0
            while (end := data.find(b"\n", at)) >= 0:
                self._add(start, data, at, end)
                at = end + 1
            if is_last:
                self._add(start, data, at, len(data))
            elif len(data) - at > MAX_LINE:
                detail = f"a line has more than {MAX_LINE:,} bytes: it is not a list of JSON"
                raise SourceError(self.file.url, detail, byte_offset=start)
            self._held = b"" if is_last else data[at:]
            self._at += size  # last: with it other threads may take all lines to be known

    def _add(self, start: int, data: bytes, at: int, end: int) -> None:
        if data[at:end].strip():
            self._starts.append(start + at)
            self._stops.append(start + end)

    def ids(self, start: int, stop: int) -> Sequence[object]:
        """The values of `sample_id`."""
        return [row.get("sample_id") for row in self.rows(start, stop)]

    def rows(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        """The objects of lines; one that is not an object says so under a key of its own."""
        ranges = [(self._starts[row], self._stops[row] - self._starts[row]) for row in range(start, stop)]
        return [_object(bytes(line)) for line in self.file.read_ranges(ranges)]


def _object(line: bytes) -> Mapping[str, Any]:
    if len(line) > MAX_PARSED:
        error = f"has {len(line):,} bytes, of which at most {MAX_PARSED:,} are parsed to be shown"
        return {"line": line[:2000].decode("utf-8", "replace"), "error": error}
    try:
        value = json.load(io.TextIOWrapper(io.BytesIO(line), encoding=json.detect_encoding(line)))
    except (ValueError, RecursionError) as error:
        return {"line": line[:2000].decode("utf-8", "replace"), "error": f"is not JSON: {first_line(error)}"}
    return value if isinstance(value, dict) else {"line": value}
