"""The column `binary_content` under construction: byte ranges are read straight into the buffer that Arrow will own.

Pieces come in row order. Ranges are noted when they come and read together, sorted, in parallel where that is faster;
a range that cannot be read is an error of its row only, but that of an archive member is raised: see `ShardReadError`.
So are refused credentials, which are about no row: with new ones it can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mm_assets.errors import CredentialsError, ShardReadError, SourceError
from mm_assets.media.content_types import OWN_ZIPS, Buffer, sniff_content_type
from mm_assets.storage.files import SourceFile

__all__ = ["ContentColumn"]

REMOTE_REQUESTS = 16  # files of an object store that are requested at a time
MIN_PARALLEL = 1 << 20  # bytes below which a second thread costs more than it saves
_SNIFFED = 512  # bytes that determine a content type


class _Range(NamedTuple):
    """A range to read and where it goes."""

    row: int
    source: SourceFile
    offset: int
    size: int
    position: int
    member: str | None  # of an archive


def _split(group: list[_Range], threads: int) -> list[list[_Range]]:
    """The ranges of one file, in as many parts of about equal size as are worth a thread."""
    total = sum(wanted.size for wanted in group)
    parts = min(threads, len(group), total // MIN_PARALLEL)
    if parts < 2:
        return [group]
    tasks: list[list[_Range]] = [[] for _ in range(parts)]
    done = 0
    for wanted in group:
        tasks[min(done * parts // total, parts - 1)].append(wanted)
        done += wanted.size
    return [task for task in tasks if task]


def _read(ranges: Sequence[_Range], target: memoryview) -> dict[int, SourceError]:
    """Reads ranges of one file; if that fails, each on its own to find the one that fails."""
    try:
        ranges[0].source.read_into([(r.offset, r.size) for r in ranges], target, [r.position for r in ranges])
    except SourceError as error:
        if len(ranges) == 1:
            member = ranges[0].member
            if member is not None:
                # The range lies in the shard, so the storage failed: an error on the row would be published for good.
                raise ShardReadError(error.path, error.detail, member=member, byte_offset=error.byte_offset) from error
            return {ranges[0].row: error}
        errors: dict[int, SourceError] = {}
        for wanted in ranges:
            errors.update(_read([wanted], target))
        return errors
    return {}


class ContentColumn:
    """Fills the content of consecutive rows of a batch.

    Args:
        batch: the rows.
        pool: reads ranges.
        threads: parallel reads of local files.
        limit: bytes of content of one piece of the batch; a larger item is a piece of its own.
        ahead: about how many bytes are to come.
        tell: the text of a row's error.
    """

    def __init__(
        self,
        batch: pa.RecordBatch,
        pool: ThreadPoolExecutor,
        *,
        threads: int,
        limit: int,
        ahead: int,
        tell: Callable[[int, Exception], str],
    ) -> None:
        self._batch = batch
        self._pool = pool
        self._threads = threads
        self._limit = limit
        self._tell = tell
        self.num_filled = 0
        self.num_failed = 0
        self.bytes_read = 0
        self._start = 0
        self._reset(ahead)

    def _reset(self, ahead: int) -> None:
        self._ahead = ahead
        self._buffer: Any = None
        self._view = memoryview(b"")
        self._used = 0
        self._sizes: dict[int, int] = {}  # of rows with content, in order
        self._fresh: set[int] = set()  # rows that had none before
        self._errors: dict[int, str] = {}
        self._pending: list[_Range] = []

    def fits(self, size: int) -> bool:
        """Whether another `size` bytes fit in the present piece."""
        return self._buffer is None or self._used + size <= self._buffer.size

    def _allocate(self, size: int) -> int:
        if self._buffer is None:
            self._buffer = pa.allocate_buffer(max(size, min(self._ahead, self._limit)))
            self._view = memoryview(self._buffer).cast("B")
        position = self._used
        self._used += size
        return position

    def keep(self, row: int, content: Buffer) -> None:
        """Takes over content that the row already has."""
        position = self._allocate(len(content))
        self._view[position : position + len(content)] = content
        self._sizes[row] = len(content)

    def put(self, row: int, content: Buffer) -> None:
        """Gives a row its content; bytes that fill a piece of their own are not copied."""
        self._fresh.add(row)
        if self._buffer is None and isinstance(content, bytes) and len(content) >= self._limit:
            self._buffer = pa.py_buffer(content)
            self._view = memoryview(self._buffer).cast("B")
            self._used = self._sizes[row] = len(content)
            return
        self.keep(row, content)

    def reserve(self, row: int, source: SourceFile, offset: int, size: int, *, member: str | None = None) -> None:
        """Gives a row a range that lies inside the file and is read later, with others; `member` is of an archive."""
        self._pending.append(_Range(row, source, offset, size, self._allocate(size), member))
        self._sizes[row] = size
        self._fresh.add(row)

    def fail(self, row: int, error: Exception) -> None:
        """Gives a row an error; a `CredentialsError` is raised."""
        if isinstance(error, CredentialsError):
            raise error
        self._errors[row] = self._tell(row, error)

    def fill(self) -> None:
        """Reads the ranges that are waiting.

        Raises:
            ShardReadError: the storage failed at a member of an archive.
            CredentialsError: the storage refused the credentials.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        errors = self._read(pending)
        for wanted in pending:
            self.bytes_read += wanted.size
            if wanted.row in errors:
                # Its place stays empty, under a null: the rows after it have their positions already.
                self._view[wanted.position : wanted.position + wanted.size] = bytes(wanted.size)
                self._fresh.discard(wanted.row)
                self.fail(wanted.row, errors[wanted.row])

    def _read(self, ranges: Sequence[_Range]) -> dict[int, SourceError]:
        """Reads every range to its position, files side by side; returns the errors by row."""
        tasks: list[list[_Range]] = []
        for _, in_file in groupby(sorted(ranges, key=lambda r: (id(r.source), r.offset)), key=lambda r: id(r.source)):
            group = list(in_file)
            tasks += _split(group, self._threads) if group[0].source.is_local else [group]
        if len(tasks) == 1:
            return _read(tasks[0], self._view)
        errors: dict[int, SourceError] = {}
        for found in self._pool.map(_read, tasks, repeat(self._view)):
            errors.update(found)
        return errors

    def take(self, stop: int, ahead: int = 0) -> pa.RecordBatch:
        """The rows up to `stop`, with their content, errors and content types.

        Args:
            stop: first row of the batch that is left for the next piece.
            ahead: about how many bytes are to follow.
        """
        self.fill()
        start, count = self._start, stop - self._start
        part = self._batch.slice(start, count)
        if self._sizes or self._errors:
            columns = dict(zip(part.schema.names, part.columns, strict=True))
            columns["content_type"] = self._content_types(part.column("content_type"))
            columns["binary_content"] = self._content(count)
            if self._errors:
                errors = part.column("materialize_error").to_pylist()
                for row, error in self._errors.items():
                    errors[row - start] = error
                columns["materialize_error"] = pa.array(errors, pa.string())
            part = pa.RecordBatch.from_arrays(list(columns.values()), schema=part.schema)
        self.num_filled += len(self._fresh)
        self.num_failed += len(self._errors)
        self._start = stop
        self._reset(ahead)
        return part

    def _content(self, count: int) -> Any:
        sizes: npt.NDArray[np.int64] = np.zeros(count, np.int64)
        valid: npt.NDArray[np.bool_] = np.zeros(count, np.bool_)
        for row, size in self._sizes.items():
            sizes[row - self._start] = size
            valid[row - self._start] = row not in self._errors
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        values = pa.py_buffer(b"") if self._buffer is None else self._buffer.slice(0, self._used)
        bitmap = pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
        buffers = [bitmap, pa.py_buffer(offsets.tobytes()), values]
        return pa.Array.from_buffers(pa.large_binary(), count, buffers, int(count - valid.sum()))

    def _content_types(self, declared: Any) -> Any:
        """The types that the bytes determine, else those before."""
        if not self._fresh:
            return declared
        types = declared.to_pylist()
        changed = False
        position = 0
        for row, size in self._sizes.items():
            if row in self._fresh:
                found = sniff_content_type(self._view[position : position + min(size, _SNIFFED)])
                known = types[row - self._start]
                if found is not None and found != known and not (found == "application/zip" and known in OWN_ZIPS):
                    types[row - self._start] = found
                    changed = True
            position += size
        return pa.array(types, pa.string()) if changed else declared
