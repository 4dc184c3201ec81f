"""Remote files for the readers of packed formats: ranges, through a bounded cache of blocks in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Protocol

from mm_assets.errors import TruncatedError as TruncatedFileError
from mm_assets.storage.files import ShortFileError, SourceFile
from mm_assets.storage.forking import renew_in_children
from mm_assets.storage.ranges import MAX_GAP, RangeSource
from mm_assets.storage.urls import Options

__all__ = ["RangeCache", "RemoteFile"]


class RangeCache(Protocol):
    """A cache for the bytes of remote files, such as `mm_assets.storage.disk_cache.BlockCache`."""

    def over(self, source: SourceFile) -> RangeSource:
        """The file, read through the cache."""


class _Blocks:
    """The most recently used blocks of all remote files of this process, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.renew_locks()
        renew_in_children(self)

    def renew_locks(self) -> None:
        """Drop what the parent of a forked child has cached: see `forking`."""
        self._lock = threading.Lock()  # requests run outside it
        self._cached: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        self._size = 0

    def get(self, file: int, numbers: Sequence[int]) -> dict[int, memoryview]:
        """Those of a file's blocks that are cached, by number."""
        with self._lock:
            found = {number: self._cached[file, number] for number in numbers if (file, number) in self._cached}
            for number in found:
                self._cached.move_to_end((file, number))
        return found

    def put(self, file: int, blocks: Mapping[int, memoryview]) -> None:
        """Cache blocks of a file, and evict the least recently used ones."""
        with self._lock:
            for number, block in blocks.items():
                self._drop((file, number))
                self._cached[file, number] = block
                self._size += len(block)
            while self._size > self._limit:
                self._drop(next(iter(self._cached)))

    def forget(self, file: int) -> None:
        """Drop all blocks of a file."""
        with self._lock:
            for key in [key for key in self._cached if key[0] == file]:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        block = self._cached.pop(key, None)
        if block is not None:
            self._size -= len(block)


_BLOCKS = _Blocks(64 << 20)  # for any number of open files

_FILE_NUMBERS = count()


class RemoteFile:
    """A remote file for the packed formats' readers: views of ranges, small ones through a bounded block cache.

    Args:
        url: fsspec URL.
        storage_options: arguments for the file system.
        cache: a cache on disk, if there is one.

    Raises:
        SourceError: the file is not there or may not be read, or cannot be cached.
    """

    MAX_GAP = 256 << 10  # payloads this near are one request: a batch waits for all of them anyway
    BLOCK = 256 << 10  # small look-ups (ids, index entries) share requests of this size
    MAX_BLOCKS = 32  # of one look-up; a more scattered one would evict the blocks of others

    def __init__(self, url: str, storage_options: Options | None = None, cache: RangeCache | None = None) -> None:
        source = SourceFile(url, storage_options)
        self._location = source.location
        self._source: RangeSource = source if cache is None else cache.over(source)
        self._options = dict(storage_options or {})
        self._cache = cache
        self._number = next(_FILE_NUMBERS)

    @property
    def name(self) -> str:
        """The file's URL."""
        return self._source.url

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._source.size

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of one range."""
        if size > self.BLOCK // 4:
            return self._read([(offset, size)], self.MAX_GAP)[0]
        return self.look_up([(offset, size)])[0]

    def view_many(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each (offset, size), in one coalesced request."""
        return self._read(ranges, self.MAX_GAP)

    def look_up(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each (offset, size), by the blocks around them: one request, or none if cached."""
        spans = [(start // self.BLOCK, max(start, start + size - 1) // self.BLOCK) for start, size in ranges]
        numbers = sorted({number for first, last in spans for number in range(first, last + 1)})
        if len(numbers) > self.MAX_BLOCKS:
            # Too scattered for the next look-up to find anything cached: read only the requested bytes.
            return self._read(ranges, MAX_GAP)
        blocks = self._fetched(numbers)
        views = []
        for (start, size), (first, last) in zip(ranges, spans, strict=True):
            at = start - first * self.BLOCK
            block = blocks[first]
            if last > first:
                block = memoryview(b"".join(blocks[number] for number in range(first, last + 1)))
            views.append(block[at : at + size])
        return views

    def _fetched(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        """Blocks by number; one request for those that are not cached."""
        found = _BLOCKS.get(self._number, numbers)
        missing = [number for number in numbers if number not in found]
        if not missing:
            return found
        ranges = [(number * self.BLOCK, min(self.BLOCK, self.size - number * self.BLOCK)) for number in missing]
        # Copied: neighbours share one buffer, and a cached one would hold all of it in memory.
        new = {number: memoryview(bytes(view)) for number, view in zip(missing, self._read(ranges, 0), strict=True)}
        _BLOCKS.put(self._number, new)
        return found | new

    def _read(self, ranges: Sequence[tuple[int, int]], max_gap: int) -> list[memoryview]:
        try:
            return self._source.read_ranges(ranges, max_gap=max_gap)
        except ShortFileError as error:  # any other error is not damage
            raise TruncatedFileError(self.name, error.detail) from error

    def close(self) -> None:
        """Close the file, and drop its blocks."""
        _BLOCKS.forget(self._number)
        self._source.close()

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteFile, (self._location, self._options, self._cache)
