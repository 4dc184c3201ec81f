"""Blocks of remote files on local disk: bounded, kept from run to run, shared by threads and processes.

A block is known by its file's URL, server, fingerprint and time of change, so that a changed object never gives old
bytes, and carries a checksum: one that is damaged is fetched again. What a run has stored stays until the run ends, and
only what earlier runs have stored makes room: an epoch visits everything once, so that letting the oldest go would mean
to let go just what comes next. The storing is the `diskcache` package's.
"""

from __future__ import annotations

import hashlib
import io
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mm_assets.errors import ConfigError, MissingExtraError, SourceError
from mm_assets.formats import crc32c
from mm_assets.storage.files import SourceFile
from mm_assets.storage.forking import renew_in_children
from mm_assets.storage.listing import UNMARKED
from mm_assets.storage.ranges import MAX_REQUEST, RangeSource, merge_ranges, slice_ranges
from mm_assets.storage.urls import reason

if TYPE_CHECKING:
    import diskcache

__all__ = ["BLOCK", "BlockCache", "CachedFile"]

BLOCK = 64 << 10  # a sample of 55 KB that is read at random costs two of them, while nothing is kept yet

# SQLite's journal beside the database grows to 1000 pages until it is emptied, and is not in the library's account.
_JOURNAL = 4 << 20
_MIN_SIZE = 4 * _JOURNAL
_GROUP = 16  # blocks of one transaction: what a process that is killed leaves behind, unaccounted for, is 1 MiB
_TIMEOUT = 5.0  # seconds to wait for other processes that store; a block that is not stored is only fetched again
_RECHECK = 60.0  # seconds of storing until the storage is asked again whether a file is still the one that was opened

# SQLite must not be used in a forked child of a process that had the database open: it takes the parent's locks for
# its own, then waits for ever or damages the file. So each folder belongs to the process that opened it first.
_OWNERS: dict[str, int] = {}
_INHERITED: list[object] = []  # the parents' connections: kept, as closing them would be using them

# Held by who writes to a database, and by a fork: the child drops the connections of the parent's other threads, which
# would roll back what they were about to store.
_WRITING = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_WRITING.acquire, after_in_parent=_WRITING.release, after_in_child=_WRITING.release)


class BlockCache:
    """A folder with blocks of remote files.

    It pickles, and a copy in a process that was started anew uses the same folder. In a forked child of a process that
    has opened the folder nothing is kept, and every read goes to the storage. The folder must be the user's own: who
    may write to it decides what is read.

    Args:
        folder: made where it is not there.
        size: bytes that it may take, all files together, at least 16 MiB.
        since: what was stored from then on, in seconds since 1970, stays; by default from now on.

    Raises:
        ConfigError: `size` is too small.
        MissingExtraError: `diskcache` is not installed.
        SourceError: the folder cannot be used, is damaged, or is held by others for a minute.
    """

    def __init__(self, folder: str, size: int, *, since: float | None = None) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < _MIN_SIZE:
            raise ConfigError("arguments", "cache_size", f"found {size!r}, expected bytes, at least {_MIN_SIZE}")
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self.size = size
        self._place = os.path.realpath(self.folder)
        self._since = time.time() if since is None else since
        self._is_full = False  # of what this run has stored
        self._cache: diskcache.Cache | None = None
        renew_in_children(self)
        self._opened()

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.folder, self.size, self._since)

    def renew_locks(self) -> None:
        """In a forked child: see `forking`."""
        if self._cache is not None:
            _INHERITED.append(self._cache)
            self._cache = None

    @property
    def is_usable(self) -> bool:
        """False in a forked child of a process that has opened the folder: nothing is found there, or stored."""
        return _OWNERS.setdefault(self._place, os.getpid()) == os.getpid()

    def _opened(self) -> diskcache.Cache | None:
        if self._cache is None and self.is_usable:
            with _WRITING, self._told():
                if self._cache is None:
                    os.makedirs(self.folder, mode=0o700, exist_ok=True)
                    self._cache = _open_cache(self.folder)
        return self._cache

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the folder as ours."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _is_busy(error):
                raise SourceError(self.folder, f"the cache is busy, other processes hold it: {error}") from error
            detail = f"the cache cannot be read, it may be damaged: {error}; remove the folder or take another"
            raise SourceError(self.folder, detail) from error
        except OSError as error:
            raise SourceError(self.folder, f"cannot be used as a cache: {reason(error)}") from error

    def over(self, source: SourceFile) -> RangeSource:
        """A file, read through the cache; a local one as it is.

        Raises:
            SourceError: the storage does not tell when the file changes.
        """
        return source if source.is_local else CachedFile(source, self)

    def get(self, mark: bytes, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Those of a file's blocks that are here, one after the other: number and content.

        Raises:
            SourceError: the folder is damaged.
        """
        cache = self._opened()
        if cache is None:
            return
        for number in numbers:
            content = self._get(cache, _key(mark, number))
            if content is not None:
                yield number, content

    def _get(self, cache: diskcache.Cache, key: bytes) -> bytes | None:
        with self._told(), _unless_busy():
            content, tag = cache.get(key, tag=True)
            if isinstance(content, bytes) and _read_tag(tag)[0] == crc32c(key, content):
                return content
            if key in cache:
                with _WRITING:
                    cache.delete(key)  # damaged, or its file is gone
        return None

    def put(self, mark: bytes, blocks: Mapping[int, memoryview]) -> None:
        """Stores blocks of a file, by number, as far as there is room.

        Raises:
            SourceError: the folder is damaged, or cannot be written.
        """
        cache = self._opened()
        if cache is None:
            return
        numbers = list(blocks)
        for start in range(0, len(numbers), _GROUP):
            group = {_key(mark, number): bytes(blocks[number]) for number in numbers[start : start + _GROUP]}
            with _WRITING, self._told(), _unless_busy():
                # What came along with a merged request may be here: as it is, it goes in its turn.
                group = {key: content for key, content in group.items() if key not in cache}
                if self._is_full or not self._make_room(cache, sum(map(len, group.values()))):
                    return
                with cache.transact():
                    for key, content in group.items():
                        tag = f"{crc32c(key, content)} {time.time()}"
                        cache.set(key, io.BytesIO(content), read=True, tag=tag)  # bytes it would write by lines

    def drop(self, mark: bytes, numbers: Iterable[int]) -> None:
        """Deletes blocks of a file; those that are not here are fine.

        Raises:
            SourceError: the folder is damaged.
        """
        cache = self._opened()
        if cache is None:
            return
        for number in numbers:
            with _WRITING, self._told(), _unless_busy():
                cache.delete(_key(mark, number))

    def _make_room(self, cache: diskcache.Cache, size: int) -> bool:
        """Deletes what earlier runs have stored, the oldest first, until `size` bytes fit; whether they do."""
        limit = self.size - _JOURNAL - size
        if cache.volume() <= limit:
            return True
        for key in cache:  # in the order of storing
            if _read_tag(cache.get(key, tag=True)[1])[1] >= self._since:
                continue
            cache.delete(key)
            if cache.volume() <= limit:
                return True
        self._is_full = True
        return False

    def close(self) -> None:
        """Closes this thread's connection; others end with their threads. Fine twice, and used again it opens one."""
        if self._cache is not None:
            self._cache.close()


def _is_busy(error: sqlite3.DatabaseError) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


@contextmanager
def _unless_busy() -> Iterator[None]:
    """Ends quietly when others hold the database for too long: what is not found or stored is only fetched again."""
    from diskcache import Timeout

    try:
        yield
    except Timeout:
        return
    except sqlite3.OperationalError as error:
        if not _is_busy(error):
            raise


def _reopen(folder: str, size: int, since: float) -> BlockCache:
    return BlockCache(folder, size, since=since)


def _open_cache(folder: str) -> diskcache.Cache:
    try:
        import diskcache
    except ImportError as error:
        raise MissingExtraError("cache_dir", "cache") from error

    class Disk(diskcache.Disk):  # type: ignore[misc]  # the package has no types
        """Values as plain bytes in files: what is read is never unpickled."""

        def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
            # Of another mode nothing was stored here; the wrong type is noticed as damage.
            return super().fetch(mode, filename, value, read) if mode == diskcache.core.MODE_BINARY else b""

        def get(self, key: Any, raw: bool) -> Any:
            return key

        def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
            # One level of folders: with two, the folders of many small files would take more than a twentieth.
            name = os.urandom(16).hex()
            name = os.path.join(name[:2], f"{name[2:]}.val")
            return name, os.path.join(self._directory, name)

    # It never lets go of anything by itself: `BlockCache` does.
    return diskcache.Cache(
        folder, timeout=_TIMEOUT, disk=Disk, eviction_policy="none", cull_limit=0, disk_min_file_size=0
    )


def _key(mark: bytes, number: int) -> bytes:
    return mark + number.to_bytes(8, "little")


def _read_tag(tag: object) -> tuple[int, float]:
    """Checksum, and when the block was stored; -1 and 0 for what is no tag of ours."""
    try:
        checksum, stored = str(tag).split(" ")
        return int(checksum), float(stored)
    except ValueError:
        return -1, 0.0


class CachedFile:
    """A remote file, read through a cache by blocks.

    Args:
        source: the file; closed with this.
        cache: where its blocks are kept.

    Raises:
        SourceError: the storage does not tell when the file changes.
    """

    def __init__(self, source: SourceFile, cache: BlockCache) -> None:
        if source.fingerprint.endswith(UNMARKED):
            source.close()
            detail = "cannot be cached: its storage tells neither an ETag nor when the file was changed"
            raise SourceError(source.url, detail)
        self.url = source.url
        self.size = source.size
        self._source = source
        self._cache = cache
        self._mark = hashlib.blake2b(source.identity.encode(), digest_size=16).digest()
        self._checked = time.monotonic()  # the storage has just described it
        self._unchecked: set[int] = set()  # blocks that were stored since
        self._has_changed = False

    def read_ranges(self, ranges: Sequence[tuple[int, int]], *, max_gap: int | None = None) -> list[memoryview]:
        """The bytes of each (offset, size), in the order asked for.

        Blocks that are not kept come with one call, in requests of up to 16 MiB; what lies between two that are nearer
        than `max_gap` comes with them, and is kept too.

        Raises:
            SourceError: a range leaves the file or could not be read, the file has changed since it was opened, or the
                cache cannot be used.
        """
        if not self._cache.is_usable:
            return self._source.read_ranges(ranges, max_gap=max_gap)
        for offset, size in ranges:
            self._source.check(offset, size)
        spans = merge_ranges([self._whole_blocks(offset, size) for offset, size in ranges], 0)
        buffers = [memoryview(bytearray(end - start)) for start, end in spans]
        wanted: dict[int, memoryview] = {}
        for (start, end), buffer in zip(spans, buffers, strict=True):
            for at in range(start, end, BLOCK):
                wanted[at // BLOCK] = buffer[at - start : at - start + BLOCK]
        missing = dict(wanted)
        for number, content in self._cache.get(self._mark, list(wanted)):
            if len(content) == len(wanted[number]):
                wanted[number][:] = content
                del missing[number]
        if missing:
            self._fetch(missing, (max_gap or 0) // BLOCK)
        return slice_ranges(ranges, spans, buffers)

    def _whole_blocks(self, offset: int, size: int) -> tuple[int, int]:
        """The range of the blocks that a range (offset, size) lies in; an empty one as it is."""
        if not size:
            return offset, 0
        start = offset // BLOCK * BLOCK
        return start, min(-(-(offset + size) // BLOCK) * BLOCK, self.size) - start

    def _fetch(self, missing: Mapping[int, memoryview], max_gap: int) -> None:
        """Fills blocks from the storage, and has them kept."""
        runs = _runs(sorted(missing), max_gap)
        ranges = [self._whole_blocks(first * BLOCK, (last - first) * BLOCK) for first, last in runs]
        fetched: dict[int, memoryview] = {}
        for (first, _), view in zip(runs, self._source.read_ranges(ranges, max_gap=0), strict=True):
            for k in range(-(-len(view) // BLOCK)):
                fetched[first + k] = view[k * BLOCK : (k + 1) * BLOCK]
        self._check_unchanged()
        for number, target in missing.items():
            target[:] = fetched[number]
        self._unchecked.update(fetched)
        self._cache.put(self._mark, fetched)

    def _check_unchanged(self) -> None:
        """Refuses to go on with a file that was replaced while it is read: its blocks would pass for the old one's.

        The storage is asked once a minute, after a request. Blocks that were stored since it was last asked go.
        """
        if not self._has_changed:
            now = time.monotonic()
            if now - self._checked < _RECHECK:
                return
            stored = set(self._unchecked)
            self._has_changed = self._source.has_changed()
            if not self._has_changed:
                self._unchecked -= stored
                self._checked = now
                return
        self._cache.drop(self._mark, list(self._unchecked))
        raise SourceError(self.url, "has changed while it was read: open it again")

    def close(self) -> None:
        """Closes the file; what was kept of it stays."""
        self._source.close()


def _runs(numbers: Sequence[int], max_gap: int) -> list[tuple[int, int]]:
    """Runs [first, last) of ascending block numbers, across gaps of up to `max_gap` blocks, of one request each."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number - runs[-1][1] <= max_gap and (number + 1 - runs[-1][0]) * BLOCK <= MAX_REQUEST:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
