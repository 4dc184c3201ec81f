"""What readers read from: ranges of bytes of one file, mapped or remote, and tables of fixed rows over them.

A source only moves bytes; the caller of `view` has checked the range against `size`. A mapped file is viewed whole at
no cost; other sources read tables beyond `WHOLE_LIMIT` by rows, and fetch what several tables need together.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mm_assets.errors import TruncatedError
from mm_assets.formats.page_cache import CAN_ADVISE, PageCache

READ_ONLY = os.O_RDONLY | getattr(os, "O_BINARY", 0)  # Windows translates line ends without O_BINARY
_HAS_MADVISE, _HAS_PREAD = hasattr(mmap, "MADV_DONTNEED"), hasattr(os, "pread")  # Windows has neither

WHOLE_LIMIT = 8 << 20  # bytes of a region of tables, or of a small stream, that are fetched at once and cached


class ByteSource(Protocol):
    """A file that can be read by ranges."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes from `offset` on; the caller has checked that they exist."""

    def view_many(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each (offset, size); a remote source joins near ranges into few requests."""

    def close(self) -> None:
        """Closes the file; views that were returned stay valid."""


@runtime_checkable
class CachingSource(Protocol):
    """A source that caches the surroundings of small ranges, for tables that are read repeatedly."""

    def look_up(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each (offset, size), as `view_many`."""


class LocalFile:
    """A local file, read by its descriptor, which is closed once nothing refers to it.

    So what reads here works after its reader was closed, and never reads the file that gets the descriptor next.

    Args:
        path: the file; may be empty.

    Attributes:
        name: the path.
        size: bytes of the file when it was opened.
        fd: the descriptor.

    Raises:
        OSError: there is no such file, or it may not be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = str(os.fspath(path))
        self._path = os.fspath(path)
        self.fd = os.open(self._path, READ_ONLY)
        weakref.finalize(self, os.close, self.fd)
        status = os.fstat(self.fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._path)
        self.size = status.st_size
        self._lock = threading.Lock()  # for systems that cannot read at a position

    def view(self, offset: int, size: int) -> memoryview:
        """A copy of one range, by a read that pages nothing else in.

        Raises:
            TruncatedError: the file was truncated since it was opened.
        """
        data = self._read(offset, size)
        while len(data) < size:  # Linux reads up to 2 GiB at a time
            more = self._read(offset + len(data), size - len(data))
            if not more:
                detail = "it was truncated after it was opened"
                raise TruncatedError(self.name, detail, found=offset + len(data), expected=offset + size)
            data += more
        return memoryview(data)

    def _read(self, offset: int, size: int) -> bytes:
        if _HAS_PREAD:
            return os.pread(self.fd, size, offset)
        with self._lock:
            os.lseek(self.fd, offset, os.SEEK_SET)
            return os.read(self.fd, size)

    def view_many(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Copies of several ranges; errors as `view`."""
        return [self.view(offset, size) for offset, size in ranges]

    def close(self) -> None:
        """Does nothing: the descriptor is closed with the last reference."""

    def __reduce__(self) -> tuple[object, ...]:
        return LocalFile, (self._path,)


class MappedFile:
    """A local file, mapped. Views are slices of the mapping: no copy.

    The kernel is advised to expect random reads, and reads nothing around a page that is touched. So callers that read
    payloads have them fetched first (by `pages` or `view_many`), and tables announce how they will be read (`expect`,
    `page_in`). Pages that are in memory are only probed.

    The file must not be truncated while it is mapped: the operating system answers a read past its new end with SIGBUS.

    Args:
        path: the file; an empty one is fine.

    Attributes:
        pages: probes and requests for its pages.

    Raises:
        OSError: there is no such file, or it may not be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.name = str(self.path)
        self._open()

    def _open(self) -> None:
        self._file: LocalFile | None = LocalFile(self.path)
        fd, self.size = self._file.fd, self._file.size
        # An empty file cannot be mapped.
        self._map = mmap.mmap(fd, self.size, access=mmap.ACCESS_READ) if self.size else None
        if CAN_ADVISE and self._map is not None:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            self._map.madvise(mmap.MADV_RANDOM)
        self.pages = PageCache(fd)
        self._view = memoryview(self._map if self._map is not None else b"")

    def reopened(self) -> bool:
        """Maps the file again if its size has changed, as after a stream was added; returns whether it had."""
        try:
            if os.stat(self.path).st_size == self.size:
                return False
        except FileNotFoundError:
            return False
        self.close()
        self._open()
        return True

    @property
    def whole(self) -> memoryview:
        """The whole mapping, to slice ranges from."""
        return self._view

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of one range; `ValueError` if the source is closed."""
        try:
            return self._view[offset : offset + size]
        except ValueError:
            raise ValueError(f"{self.name} is closed") from None

    def view_many(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each (offset, size), fetched together where they are not in memory."""
        view = self._view
        try:
            views = [view[offset : offset + size] for offset, size in ranges]
        except ValueError:
            raise ValueError(f"{self.name} is closed") from None
        self.pages.fetch_ranges(ranges)
        return views

    def slices(self, starts: npt.NDArray[np.uint64], ends: npt.NDArray[np.uint64]) -> list[memoryview]:
        """As `view_many`, of ranges [start, end) in arrays."""
        view = self._view
        try:
            views = [view[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        except ValueError:
            raise ValueError(f"{self.name} is closed") from None
        if len(views) == 1:
            self.pages.fetch_one(int(starts[0]), int(ends[0]))
        elif not self.pages.may_skip(len(views)):
            self.pages.fetch(starts, ends)
        return views

    def gather(self, starts: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.uint8]:
        """A copy of `size` bytes, 1 or more, from each start: (n, size) uint8; `ValueError` if the source is closed."""
        try:
            view = self._view[:]  # an array over `_view` itself would keep `close` from releasing it
        except ValueError:
            raise ValueError(f"{self.name} is closed") from None
        if not len(starts):
            return np.empty((0, size), np.uint8)
        # An element at every byte of the file: one index copies those at the starts.
        every = np.ndarray((self.size - size + 1,), f"V{size}", view, strides=(1,))
        return every[starts].view(np.uint8).reshape(len(starts), size)

    @property
    def file(self) -> LocalFile:
        """Reads the file without its mapping, also after this is closed; `ValueError` if it is closed already."""
        if self._file is None:
            raise ValueError(f"{self.name} is closed")
        return self._file

    def read(self, offset: int, size: int) -> memoryview:
        """A copy of one range; errors as `LocalFile.view`."""
        return self.file.view(offset, size)

    def expect(self, offset: int, size: int) -> None:
        """Advises the kernel that a range is read in order or repeatedly: it may read ahead and around."""
        if CAN_ADVISE and size and self._map is not None and not self._map.closed:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_NORMAL, start, offset + size - start)

    def page_in(self, offset: int, size: int) -> bool:
        """Pages in a small range whole; returns False and does nothing where it is too large for that."""
        if size > WHOLE_LIMIT:
            return False
        self.expect(offset, size)
        self.pages.fetch_all(offset, offset + size)
        return True

    def drop(self, offset: int, size: int) -> None:
        """Releases the pages of a range from this process' resident memory; they are read again when touched."""
        if _HAS_MADVISE and self._map is not None and not self._map.closed:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            # The pages come back from the file: the mapping is shared and read-only.
            self._map.madvise(mmap.MADV_DONTNEED, start, min(offset + size, self.size) - start)

    def close(self) -> None:
        """Closes the file. The mapping itself lives as long as views that were returned; closing twice is fine."""
        self.pages.forget()
        self._file = None
        self._view.release()
        if self._map is not None:
            with contextlib.suppress(BufferError):  # views live; the last one unmaps
                self._map.close()

    def __reduce__(self) -> tuple[object, ...]:
        return MappedFile, (self.path,)


class Region:
    """A range of a source with one table or several, fetched once where it is small enough; checked by the caller."""

    def __init__(self, source: ByteSource, ptr: int, size: int) -> None:
        self.source = source
        self.ptr = ptr
        self.size = size
        self.in_reach = isinstance(source, MappedFile) or size <= WHOLE_LIMIT
        self._view: memoryview | None = None

    def view(self) -> memoryview:
        """All its bytes, cached."""
        view = self._view
        if view is None:
            view = self._view = self.source.view(self.ptr, self.size)
        return view

    def forget(self) -> None:
        """Drops what is cached."""
        self._view = None

    @staticmethod
    def fetch(regions: Iterable[Region]) -> None:
        """Fetches those that are small enough and not cached yet with one request to the source."""
        wanted = {id(region): region for region in regions if region.in_reach and region._view is None}.values()
        if wanted:
            source = next(iter(wanted)).source
            if isinstance(source, MappedFile):
                for region in wanted:
                    region.view()
                return
            views = source.view_many([(region.ptr, region.size) for region in wanted])
            for region, view in zip(wanted, views, strict=True):
                region._view = view


class Table:
    """`count` rows of one dtype in a source, looked up singly, by batch or whole.

    Args:
        source: where the table is; the caller has checked that it lies within.
        ptr: absolute position of the first row.
        count: rows.
        dtype: one row; packed.
        region: what is fetched for it, with other tables; by default the table alone.
    """

    def __init__(
        self, source: ByteSource, ptr: int, count: int, dtype: npt.DTypeLike, region: Region | None = None
    ) -> None:
        self.source = source
        self.ptr = ptr
        self.count = count
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        self.region = region or Region(source, ptr, self.nbytes)
        self.in_reach = self.region.in_reach  # whether the whole table may be viewed to read one row
        self._is_paged_in = False  # small, and paged in whole
        self._view: memoryview | None = None
        self._cells: memoryview | None = None
        self._array: npt.NDArray[Any] | None = None
        self._words: npt.NDArray[np.uint64] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table."""
        return self.count * self.itemsize

    def view(self) -> memoryview:
        """The bytes of the whole table, cached."""
        view = self._view
        if view is None:
            if self.in_reach:
                start = self.ptr - self.region.ptr
                view = self.region.view()[start : start + self.nbytes]
            else:
                view = self.source.view(self.ptr, self.nbytes)
            self._view = view
        return view

    def array(self) -> npt.NDArray[Any]:
        """The whole table, (count,) of `dtype`, read-only; no copy of a mapping."""
        array = self._array
        if array is None:
            array = self._array = np.frombuffer(self.view(), self.dtype)
        return array

    def words(self) -> npt.NDArray[np.uint64]:
        """The whole table as `array` gives it, rows that are multiples of 8 bytes as numbers: (count, words)."""
        words = self._words
        if words is None:
            words = self._words = self.array().view(np.uint64).reshape(self.count, self.itemsize // 8)
        return words

    def column(self) -> npt.NDArray[Any]:
        """The whole table as `array` gives it, about to be read from end to end."""
        if isinstance(self.source, MappedFile):
            self.source.expect(self.ptr, self.nbytes)
        return self.array()

    def fetch(self, indices: npt.NDArray[np.int64]) -> None:
        """Pages in rows `indices`, if the table is of a mapped file."""
        source = self.source
        if self._is_paged_in or not isinstance(source, MappedFile):
            return
        if source.page_in(self.ptr, self.nbytes):
            self._is_paged_in = True
        else:
            starts = indices.astype(np.uint64) * np.uint64(self.itemsize) + np.uint64(self.ptr)
            source.pages.fetch(starts, starts + np.uint64(self.itemsize))

    def span(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows [start, stop), (stop - start,) of `dtype`; nothing is cached unless the table is in reach."""
        if self.in_reach:
            return self.column()[start:stop]
        view = self.source.view_many([(self.ptr + start * self.itemsize, (stop - start) * self.itemsize)])[0]
        return np.frombuffer(view, self.dtype)

    def row(self, i: int) -> memoryview:
        """The bytes of row `i`, which the caller has checked."""
        start = i * self.itemsize
        if self.in_reach:
            return self.view()[start : start + self.itemsize]
        return self.source.view(self.ptr + start, self.itemsize)

    def cell(self, i: int) -> int:
        """Row `i` of a table of unsigned integers; the fast way to one number."""
        cells = self._cells
        if cells is None:
            if not self.in_reach:
                return int.from_bytes(self.row(i), "little")
            cells = self._cells = self.view().cast("Q" if self.itemsize == 8 else "I")
        value: int = cells[i]
        return value

    def forget(self) -> None:
        """Drops what is cached, so that the source can be closed."""
        self.region.forget()
        self._view = self._cells = None
        self._array = self._words = None


def gather(tables: Iterable[Table], indices: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """Rows `indices` of every table, each (n,) of its dtype.

    Regions in reach that are not cached yet share one request to the source, and so do the rows of tables out of reach.
    """
    tables = list(tables)
    for table in tables:
        table.fetch(indices)
    Region.fetch(table.region for table in tables)
    far = [table for table in tables if not table.in_reach]
    ranges = [(table.ptr + i * table.itemsize, table.itemsize) for table in far for i in indices.tolist()]
    views: list[memoryview] = []
    if ranges:
        source = far[0].source
        views = source.look_up(ranges) if isinstance(source, CachingSource) else source.view_many(ranges)
    result = []
    for table in tables:
        if table.in_reach:
            result.append(table.array()[indices])
        else:
            mine, views = views[: len(indices)], views[len(indices) :]
            result.append(np.frombuffer(b"".join(mine), table.dtype))
    return result


def view_block(source: ByteSource, offset: int, size: int) -> memoryview:
    """The bytes of one range, all of which the caller will read."""
    if isinstance(source, MappedFile) and size > mmap.PAGESIZE:  # else the first touch reads all of it
        source.pages.fetch_one(offset, offset + size)
    return source.view(offset, size)


def drop_pages(source: ByteSource, offset: int, size: int) -> None:
    """Releases the pages of a range of a mapped source that is no longer needed; of any other does nothing."""
    if isinstance(source, MappedFile):
        source.drop(offset, size)
