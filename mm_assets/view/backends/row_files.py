"""Files of rows, read in parts: Parquet tables and lines of JSON. A row is a mapping; nothing of it is trusted."""

from __future__ import annotations

import io
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mm_assets.errors import ShardError, SourceError, first_line
from mm_assets.sources.parquet import PARQUET_ERRORS
from mm_assets.storage.files import SourceFile

__all__ = ["JsonLines", "ParquetRows", "RowFile"]

BATCH_ROWS = 64  # of a table that are decoded at a time
ID_ROWS = 1 << 14  # of which the ids are read at a time
CACHED_BYTES = 32 << 20  # of decoded rows
MAX_LINE = 16 << 20  # bytes of a line of JSON
_READ = 1 << 20


class RowFile(Protocol):
    """A file of rows.

    Attributes:
        file: the file.
    """

    file: SourceFile

    @property
    def columns(self) -> Sequence[str]:
        """The columns, as far as they are known."""

    @property
    def num_rows(self) -> int:
        """Rows that are known so far."""

    @property
    def is_complete(self) -> bool:
        """Whether all rows are known."""

    def reach(self) -> None:
        """Reads on by some rows."""

    def ids(self, start: int, stop: int) -> Sequence[object]:
        """The values of `sample_id` of known rows; None of those without."""

    def rows(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        """Known rows."""


class ParquetRows:
    """A Parquet table.

    Args:
        file: the table.

    Raises:
        ShardError: it is not a Parquet file.
    """

    is_complete = True

    def __init__(self, file: SourceFile) -> None:
        import pyarrow.parquet as pq

        self.file = file
        try:
            self._table = pq.ParquetFile(file.open(), buffer_size=_READ, pre_buffer=False)
            sizes = [self._table.metadata.row_group(n).num_rows for n in range(self._table.num_row_groups)]
        except SourceError:
            raise
        except PARQUET_ERRORS as error:
            raise ShardError(file.url, f"its footer cannot be read: {first_line(error)}", byte_offset=0) from error
        self.columns: Sequence[str] = tuple(self._table.schema_arrow.names)
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + max(size, 0))
        self._lock = threading.Lock()  # one read at a time: a reader of Parquet has one position
        self._batches: OrderedDict[tuple[int, int], list[dict[str, Any]]] = OrderedDict()
        self._sizes: dict[tuple[int, int], int] = {}

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self._starts[-1]

    def reach(self) -> None:
        """Nothing: all rows are known."""

    def ids(self, start: int, stop: int) -> Sequence[object]:
        """The values of `sample_id`."""
        if "sample_id" not in self.columns:
            return [None] * (stop - start)
        found: list[object] = []
        with self._lock:
            for group, first, last in self._parts(start, stop):
                column = self._read(group, ["sample_id"]).column(0)
                found += column.slice(first, last - first).to_pylist()
        return found

    def _read(self, group: int, columns: Sequence[str]) -> Any:
        try:
            return self._table.read_row_group(group, columns=list(columns), use_threads=False)
        except SourceError:
            raise
        except PARQUET_ERRORS as error:
            raise SourceError(self.file.url, f"row group {group} cannot be read: {first_line(error)}") from error

    def rows(self, start: int, stop: int) -> Sequence[Mapping[str, Any]]:
        """Rows; those around them are decoded with them, and cached."""
        found: list[Mapping[str, Any]] = []
        with self._lock:
            for group, first, last in self._parts(start, stop):
                for batch in range(first // BATCH_ROWS, (last - 1) // BATCH_ROWS + 1):
                    at = batch * BATCH_ROWS
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
            batches = self._table.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], use_threads=False)
            for number, batch in enumerate(batches):
                if number == wanted or (group, number) not in self._batches:
                    self._cache((group, number), batch.to_pylist(), batch.nbytes)
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


class JsonLines:
    """A file with an object of JSON in each line, found line by line.

    Args:
        file: the list.
    """

    columns: Sequence[str] = ()

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
            self._at += size
            at = 0
            while (end := data.find(b"\n", at)) >= 0:
                self._add(start, data, at, end)
                at = end + 1
            self._held = data[at:]
            if self._at >= self.file.size:
                self._add(start, data, at, len(data))
                self._held = b""
            elif len(self._held) > MAX_LINE:
                raise SourceError(
                    self.file.url,
                    f"a line has more than {MAX_LINE:,} bytes: it is not a list of JSON",
                    byte_offset=start,
                )

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
    try:
        value = json.load(io.TextIOWrapper(io.BytesIO(line), encoding=json.detect_encoding(line)))
    except (ValueError, RecursionError) as error:
        return {"line": line[:2000].decode("utf-8", "replace"), "error": f"is not JSON: {first_line(error)}"}
    return value if isinstance(value, dict) else {"line": value}
