"""Blocks of remote files, cached on local disk: bounded, persistent, shared by threads and processes.

The cache is a set of plain segment files. Each is a table of entries and one slot per entry, so that the size of the
folder is bounded. A block belongs to one segment and may be in any of its slots. Its key depends on the file's URL,
server, fingerprint and modification time, so that a changed object is never served stale.

Nothing is locked, and no state outlives a call: after a crash, a full disk, damage or two writers of one slot the entry
has a wrong checksum, and the block is fetched again. Only blocks of earlier runs are evicted: an epoch visits each
block once, so that the least recently used one would be the next one needed.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from crc32c import crc32c

from mm_assets.errors import ConfigError, SourceError
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import UNMARKED
from mm_assets.storage.ranges import RangeSource, merge_ranges, slice_ranges
from mm_assets.storage.urls import reason

__all__ = ["BLOCK", "BlockCache", "CachedFile"]

BLOCK = 64 << 10  # a random read of a 55 KB sample fetches two blocks of a cold cache

_SLOTS = 255  # of a segment: with their table they fill 16 MiB, the smallest cache
_ENTRY = np.dtype([("key", "<u8"), ("checksum", "<u4"), ("size", "<u4"), ("stored", "<f8")])  # `stored` 0: a free slot
_TABLE_SIZE = _SLOTS * _ENTRY.itemsize
_SEGMENT_SIZE = 16 << 20
_SEGMENT_NAME = re.compile(r"segment-(\d{1,9})")
_LATEST = 2.0**33  # the year 2242: a later time, or NaN, is damage
_RECHECK = 60.0  # seconds between requests whether the file has changed


class BlockCache:
    """A folder with blocks of remote files.

    Safe to share between threads and with forked children; a pickled copy uses the same folder. A folder that is full
    or not writable causes a warning, and reads continue. Only the user may write to the folder: its content is trusted.

    Args:
        folder: created if it does not exist.
        size: bytes of all its files together, at least 16 MiB; rounded down to segments of 16 MiB.
        since: time from which on stored blocks are not evicted, in seconds since 1970; by default now.

    Raises:
        ConfigError: `size` is too small.
        SourceError: the folder cannot be created or listed.
    """

    def __init__(self, folder: str, size: int, *, since: float | None = None) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < _SEGMENT_SIZE:
            raise ConfigError("arguments", "cache_size", f"found {size!r}, expected bytes, at least {_SEGMENT_SIZE}")
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self.size = size
        self._num_segments = size // _SEGMENT_SIZE
        self._since = time.time() if since is None else since
        self._has_warned = False
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            names = os.listdir(self.folder)
        except OSError as error:
            raise SourceError(self.folder, f"cannot be used as a cache: {reason(error)}") from error
        for name in names:
            segment = _SEGMENT_NAME.fullmatch(name)
            if segment and int(segment[1]) >= self._num_segments:  # of a larger cache
                try:
                    os.unlink(os.path.join(self.folder, name))
                except OSError as error:
                    self._warn(error)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(BlockCache, since=self._since), (self.folder, self.size)

    def over(self, source: SourceFile) -> RangeSource:
        """A file, read through the cache; a local file unchanged.

        Raises:
            SourceError: the storage reports neither an ETag nor a modification time.
        """
        return source if source.is_local else CachedFile(source, self)

    def get(self, file_key: bytes, numbers: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Number and content of those of a file's blocks that are cached, in order."""
        for number in numbers:
            content = None
            try:
                with self._segment(file_key, number, "rb") as segment:
                    for slot in segment.slots():
                        content = segment.read_block(slot)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._warn(error)
            if content is not None:
                yield number, content

    def put(self, file_key: bytes, blocks: Mapping[int, memoryview]) -> None:
        """Store blocks of a file, by number, as far as there are slots; cached blocks do not change."""
        for number, block in blocks.items():
            try:
                with self._segment(file_key, number, "rb+") as segment:
                    slots = segment.slots()
                    if not slots:
                        slots = segment.free_slots(self._since)
                    elif segment.read_block(slots[0]) is not None:
                        continue
                    if slots:
                        segment.write_block(slots[0], block)
            except OSError as error:
                self._warn(error)
                return

    def drop(self, file_key: bytes, numbers: Iterable[int]) -> None:
        """Delete those of a file's blocks that are cached."""
        for number in numbers:
            try:
                with self._segment(file_key, number, "rb+") as segment:
                    for slot in segment.slots():
                        segment.write_entry(slot, bytes(_ENTRY.itemsize))
            except OSError as error:
                self._warn(error)

    def _segment(self, file_key: bytes, number: int, mode: str) -> _Segment:
        name = file_key + number.to_bytes(8, "little")
        key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        segment = _jump_hash(key, self._num_segments)
        return _Segment(os.path.join(self.folder, f"segment-{segment}"), mode, name, key)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            detail = f"{self.folder}: the cache cannot be used: {reason(error)}; blocks are read from the storage"
            warnings.warn(detail, RuntimeWarning, stacklevel=3)


def _jump_hash(key: int, num_buckets: int) -> int:
    """The bucket of a 64-bit key; a change of `num_buckets` moves few keys (Lamping and Veach, arXiv 1406.2294)."""
    bucket, following = 0, 0
    while following < num_buckets:
        bucket = following
        key = key * 2862933555777941757 + 1 & 2**64 - 1
        following = int((bucket + 1) * 2**31 / ((key >> 33) + 1))
    return bucket


class _Segment(io.FileIO):
    """One file of the cache, opened for one operation on one block; created by the first write.

    `name` identifies the block and is part of its checksum; `key` is its hash.
    """

    def __init__(self, path: str, mode: str, name: bytes, key: int) -> None:
        super().__init__(path, mode, opener=_create if mode == "rb+" else None)
        self._name = name
        self._key = key
        self._entries = np.zeros(_SLOTS, _ENTRY)

    def slots(self) -> list[int]:
        """Read the table: the slot where the block may be, or several if processes stored it at the same time."""
        self._entries = np.frombuffer(self.read(_TABLE_SIZE).ljust(_TABLE_SIZE, b"\0"), _ENTRY)  # a new file is empty
        return np.flatnonzero(self._entries["key"] == self._key).tolist()

    def free_slots(self, since: float) -> list[int]:
        """A free slot, or that of the oldest block; none if all were stored since then."""
        stored = np.where(self._entries["stored"] < _LATEST, self._entries["stored"], 0.0)
        slot = int(stored.argmin())
        return [slot] if stored[slot] < since else []

    def read_block(self, slot: int) -> bytes | None:
        """The block in a slot; None if the checksum is wrong."""
        self.seek(_TABLE_SIZE + slot * BLOCK)
        content = self.read(min(int(self._entries["size"][slot]), BLOCK))
        return content if self._checksum(content) == self._entries["checksum"][slot] else None

    def write_block(self, slot: int, block: memoryview) -> None:
        """Fill a slot; a crash before the end leaves a wrong checksum."""
        self.seek(_TABLE_SIZE + slot * BLOCK)
        self.write(block)
        entry = np.array((self._key, self._checksum(block), len(block), time.time()), _ENTRY)
        self.write_entry(slot, entry.tobytes())

    def _checksum(self, block: bytes | memoryview) -> int:
        """Of the block's name and content, so that no other block is taken for this one."""
        return crc32c(block, crc32c(self._name), True)  # True: without the interpreter's lock

    def write_entry(self, slot: int, entry: bytes) -> None:
        """Replace the entry of a slot."""
        self.seek(slot * _ENTRY.itemsize)
        self.write(entry)


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o600)


class CachedFile:
    """A remote file, read through a cache by blocks; closing this closes the file.

    Raises:
        SourceError: the storage reports neither an ETag nor a modification time.
    """

    def __init__(self, source: SourceFile, cache: BlockCache) -> None:
        if source.fingerprint.endswith(UNMARKED):
            source.close()
            detail = "cannot be cached: its storage reports neither an ETag nor a modification time"
            raise SourceError(source.url, detail)
        self.url = source.url
        self.size = source.size
        self._source = source
        self._cache = cache
        self._key = hashlib.blake2b(source.identity.encode(), digest_size=16).digest()
        self._checked = time.monotonic()  # the storage has just described it
        self._unchecked: set[int] = set()  # blocks stored since then
        self._has_changed = False

    def read_ranges(self, ranges: Sequence[tuple[int, int]], *, max_gap: int | None = None) -> list[memoryview]:
        """The bytes of each (offset, size), in the order of `ranges`.

        Blocks that are not cached are fetched by one call, in requests of up to 16 MiB, with those in gaps of up to
        `max_gap` bytes between them.

        Raises:
            SourceError: a range leaves the file or could not be read, or the file has changed since it was opened.
        """
        for offset, size in ranges:
            self._source.check(offset, size)
        spans = merge_ranges([self._whole_blocks(offset, size) for offset, size in ranges], 0)
        buffers = [memoryview(bytearray(end - start)) for start, end in spans]
        wanted: dict[int, memoryview] = {}
        for (start, end), buffer in zip(spans, buffers, strict=True):
            for at in range(start, end, BLOCK):
                wanted[at // BLOCK] = buffer[at - start : at - start + BLOCK]
        missing = dict(wanted)
        for number, content in self._cache.get(self._key, list(wanted)):
            if len(content) == len(wanted[number]):
                wanted[number][:] = content
                del missing[number]
        if missing:
            self._fetch(missing, max_gap or 0)
        return slice_ranges(ranges, spans, buffers)

    def _whole_blocks(self, offset: int, size: int) -> tuple[int, int]:
        """The range of whole blocks that covers a range (offset, size); an empty one unchanged."""
        if not size:
            return offset, 0
        start = offset // BLOCK * BLOCK
        return start, min(-(-(offset + size) // BLOCK) * BLOCK, self.size) - start

    def _fetch(self, missing: Mapping[int, memoryview], max_gap: int) -> None:
        """Fill blocks from the storage, and cache them."""
        runs = merge_ranges([self._whole_blocks(number * BLOCK, 1) for number in missing], max_gap)
        views = self._source.read_ranges([(start, end - start) for start, end in runs], max_gap=0)
        fetched: dict[int, memoryview] = {}
        for (start, _), view in zip(runs, views, strict=True):
            for at in range(0, len(view), BLOCK):
                fetched[(start + at) // BLOCK] = view[at : at + BLOCK]
        self._check_unchanged()
        for number, target in missing.items():
            target[:] = fetched[number]
        self._unchecked.update(fetched)
        self._cache.put(self._key, fetched)

    def _check_unchanged(self) -> None:
        """Raise `SourceError` for a file that was replaced while it was read: new blocks would be cached as old ones.

        The storage is asked once a minute. If the file has changed, blocks stored since the last time are deleted.
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
        self._cache.drop(self._key, list(self._unchecked))
        raise SourceError(self.url, "has changed while it was read: open it again")

    def close(self) -> None:
        """Close the file; its blocks stay in the cache."""
        self._source.close()
