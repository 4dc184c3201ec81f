"""Files of any fsspec URL, read by ranges: shards, tables, and packed files that are not local.

`SourceFile` reads; each byte asked for is fetched once, near ranges in one request. `RemoteFile` is what the packed
formats read from when their file is not local; `mm_assets.storage.disk_cache` may stand between the two. Nothing here knows
what the bytes mean.
"""

from __future__ import annotations

import io
import json
import os
import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import fsspec
from fsspec.core import url_to_fs

from mm_assets.errors import MmAssetsError, SourceError
from mm_assets.errors import TruncatedError as TruncatedFileError
from mm_assets.storage.forking import renew_in_children

__all__ = [
    "MAX_GAP",
    "MAX_REQUEST",
    "SHARD_SUFFIXES",
    "UNMARKED",
    "Options",
    "RangeCache",
    "RangeSource",
    "RemoteFile",
    "ShardFile",
    "SourceFile",
    "cut_ranges",
    "describe_file",
    "expand_shards",
    "filesystem",
    "is_local",
    "local_path",
    "merge_ranges",
    "protocols",
    "reason",
]

MAX_GAP = 64 << 10  # ranges of a remote file this near are fetched as one: less than a request's latency costs
MAX_LOCAL_GAP = 4 << 10  # of a local file, where a system call costs no more than copying a page
MAX_REQUEST = 16 << 20  # bounds what one merged request holds in memory

# Connections of an S3 client: the ranges of a random batch are asked for together, and its own default is 10.
S3_CONNECTIONS = 64

UNMARKED = "unmarked"
"""Ends the fingerprint of a file of whose changes its storage tells nothing."""

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst")
"""Names that count as shards when a folder is given instead of a pattern."""

Options = Mapping[str, Any]


def is_local(url: str) -> bool:
    """Whether `url` is a path of the local file system (plain, or ``file://``)."""
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> Path:
    """The path behind a local URL, absolute, with ``~`` expanded."""
    return Path(os.path.abspath(os.path.expanduser(url.split("://", 1)[-1] if "://" in url else url)))


def filesystem(url: str, options: Options | None) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL, and the path in it."""
    settings = dict(options or {})
    if not is_local(url):
        # A daemon lives for days: a remembered listing would hide new shards and changed ones.
        settings.setdefault("use_listings_cache", False)
    if url.startswith(("s3://", "s3a://")):
        settings["config_kwargs"] = {"max_pool_connections": S3_CONNECTIONS, **(settings.get("config_kwargs") or {})}
    fs, path = url_to_fs(url, **settings)
    return fs, path


def _public_url(fs: fsspec.AbstractFileSystem, path: str) -> str:
    return path if "file" in protocols(fs) else str(fs.unstrip_protocol(path))


def protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    """The names under which a file system is known."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A shard as a listing shows it.

    Attributes:
        url: absolute path or URL.
        size: bytes.
        fingerprint: changes whenever the content does: the object's ETag, or size and modification time.
        modified: seconds since 1970, or None where the storage does not tell.
    """

    url: str
    size: int
    fingerprint: str
    modified: float | None


def _describe(fs: fsspec.AbstractFileSystem, path: str, info: Mapping[str, Any]) -> ShardFile:
    if "file" in protocols(fs):
        status = os.stat(path)  # fsspec's mtime is a float and loses nanoseconds
        return ShardFile(
            url=path,
            size=status.st_size,
            fingerprint=f"{status.st_size}-{status.st_mtime_ns}",
            modified=status.st_mtime,
        )
    size = info.get("size")
    if size is None:
        raise SourceError(_public_url(fs, path), "the storage does not tell the file's size")
    modified = next((info[k] for k in ("LastModified", "last_modified", "mtime", "created") if info.get(k)), None)
    seconds: float | None = None
    if isinstance(modified, datetime):
        seconds = modified.timestamp()
    elif isinstance(modified, int | float):
        seconds = float(modified)
    mark = next((str(info[k]) for k in ("ETag", "etag", "md5Hash", "content_md5", "crc32c") if info.get(k)), None)
    if mark is None:
        mark = str(modified) if modified is not None else UNMARKED
    mark = re.sub(r"[^A-Za-z0-9._:+-]", "", mark)
    return ShardFile(url=_public_url(fs, path), size=int(size), fingerprint=f"{size}-{mark}", modified=seconds)


def describe_file(url: str, storage_options: Options | None = None) -> ShardFile:
    """Size and fingerprint of one file as it is now.

    Raises:
        SourceError: the file is not there or may not be read.
    """
    fs, path = filesystem(url, storage_options)
    with _told(url, "cannot be read"):
        info = fs.info(path)
        if info.get("type") == "directory":
            raise SourceError(url, "is a folder, expected a file")
        return _describe(fs, path, info)


def expand_shards(pattern: str, storage_options: Options | None = None) -> list[ShardFile]:
    """The shards that a folder, a glob or one path names, sorted by URL.

    A folder gives every file below it with a name in `SHARD_SUFFIXES`; a pattern is taken as it is. Hidden files
    never count.
    """
    fs, path = filesystem(pattern, storage_options)
    with _told(pattern, "cannot be listed"):
        if any(c in path for c in "*?["):
            found = {p: i for p, i in fs.glob(path, detail=True).items() if i.get("type") != "directory"}
        elif fs.isdir(path):
            found = {p: i for p, i in fs.find(path, detail=True).items() if p.lower().endswith(SHARD_SUFFIXES)}
        elif fs.exists(path):
            found = {path: fs.info(path)}
        else:
            found = {}
        listed = []
        for place, info in found.items():
            if place.rsplit("/", 1)[-1].startswith("."):
                continue
            try:
                listed.append(_describe(fs, place, info))
            except FileNotFoundError:
                continue  # removed since it was listed, or a link that leads nowhere: there is no shard
    return sorted(listed, key=lambda shard: shard.url)


def reason(error: Exception) -> str:
    """What went wrong, in the system's words where it has some."""
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"


@contextmanager
def _told(url: str, what: str, *, byte_offset: int | None = None) -> Iterator[None]:
    """Errors of a storage as ours.

    Of any type: a client may raise its HTTP library's errors, which have nothing in common with the system's.
    """
    try:
        yield
    except (MmAssetsError, MemoryError):
        raise
    except Exception as error:  # whatever the client's HTTP library has; it is kept as the cause
        raise SourceError(url, f"{what}: {reason(error)}", byte_offset=byte_offset) from error


class _CutError(SourceError):
    """The file is shorter than whoever asked for a range thought; the storage itself works."""


class SourceFile:
    """One file that is read by ranges, local or remote. Safe to share between threads, and with forked children.

    Args:
        url: path or fsspec URL.
        storage_options: arguments for the file system.

    Attributes:
        url: absolute path or URL, for messages.
        location: what opens the file again: the URL as it was given, or a local file's absolute path.
        size: bytes.
        fingerprint: of `ShardFile`, when the file was opened.
        modified: of `ShardFile`, likewise.

    Raises:
        SourceError: the file is not there or may not be read.
    """

    def __init__(self, url: str, storage_options: Options | None = None) -> None:
        described = describe_file(url, storage_options)
        self.url = described.url
        self.size = described.size
        self.fingerprint = described.fingerprint
        self.modified = described.modified
        self._fs, self._path = filesystem(url, storage_options)
        # Of some file systems the URL that is made from a path lacks the host.
        self.location = described.url if "file" in protocols(self._fs) else url
        self._options = storage_options
        self._process = os.getpid()
        self._fd = -1
        if "file" in protocols(self._fs):
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise SourceError(url, f"cannot be opened: {reason(error)}") from error

    @property
    def is_local(self) -> bool:
        """Whether reads are system calls and not requests."""
        return self._fd >= 0

    @property
    def closed(self) -> bool:
        """Whether a local file's descriptor has been given back, so that reads fail."""
        return self._fd < 0 and "file" in protocols(self._fs)

    def _remote(self) -> fsspec.AbstractFileSystem:
        """The file system; in a forked child one of its own: the parent's connections and their thread are not here."""
        if self._process != os.getpid():
            self._fs, self._path = filesystem(self.location, self._options)
            self._process = os.getpid()
        return self._fs

    @property
    def identity(self) -> str:
        """Tells the file as it was opened from every other: location, server, fingerprint and time of change."""
        return json.dumps([self.location, _endpoint(self._options or {}), self.fingerprint, self.modified])

    def now(self) -> ShardFile:
        """The file as the storage describes it at this moment.

        Raises:
            SourceError: it is no longer there, or may not be read.
        """
        return describe_file(self.location, self._options)

    def has_changed(self) -> bool:
        """Whether the storage has another file in its place than when it was opened; costs a request.

        Raises:
            SourceError: it is no longer there, or may not be read.
        """
        now = self.now()
        return (now.fingerprint, now.modified) != (self.fingerprint, self.modified)

    def check(self, offset: int, size: int) -> None:
        """Refuses a range that leaves the file.

        Raises:
            SourceError: it does.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise _CutError(
                self.url,
                f"a range of {size} bytes does not lie inside the file's {self.size} bytes",
                byte_offset=offset,
            )

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`, in one request.

        Raises:
            SourceError: the range leaves the file, or the storage gave fewer bytes than it announced.
        """
        self.check(offset, size)
        if size == 0:
            return b""
        if self._fd >= 0:
            data = bytearray(size)
            self._pread(offset, memoryview(data))
            return bytes(data)
        with _told(self.url, "cannot be read", byte_offset=offset):
            got: bytes = self._remote().cat_file(self._path, start=offset, end=offset + size)
        return self._whole(got, offset, size)

    def _whole(self, got: bytes, offset: int, size: int) -> bytes:
        if len(got) == size:
            return got
        # A reply may be cut on its way: only a storage that has fewer bytes than before has lost some.
        left = self.now().size
        detail = f"the storage gave {len(got)} of {size} bytes"
        if left < self.size:
            detail = f"{detail}: the file has {left} bytes, it had {self.size} when it was opened"
            raise _CutError(self.url, detail, byte_offset=offset)
        raise SourceError(self.url, detail, byte_offset=offset)

    def _pread(self, offset: int, target: memoryview) -> None:
        done = 0
        try:
            while done < len(target):
                got = os.preadv(self._fd, [target[done:]], offset + done)
                if got == 0:
                    raise SourceError(
                        self.url,
                        f"ended {len(target) - done} bytes early: it was cut while being read",
                        byte_offset=offset,
                    )
                done += got
        except OSError as error:
            raise SourceError(self.url, f"cannot be read: {reason(error)}", byte_offset=offset) from error

    def read_ranges(self, ranges: Sequence[tuple[int, int]], *, max_gap: int | None = None) -> list[memoryview]:
        """The bytes of each (offset, size), in the order asked for.

        Equal ranges are read once; ranges nearer than `max_gap` bytes become one request of at most 16 MiB.

        Raises:
            SourceError: a range leaves the file or could not be read.
        """
        for offset, size in ranges:
            self.check(offset, size)
        gap = (MAX_LOCAL_GAP if self._fd >= 0 else MAX_GAP) if max_gap is None else max_gap
        merged = merge_ranges(ranges, gap)
        if self._fd >= 0:
            blocks: list[memoryview] = []
            for start, end in merged:
                block = memoryview(bytearray(end - start))
                self._pread(start, block)
                blocks.append(block)
        else:
            starts = [start for start, _ in merged]
            ends = [end for _, end in merged]
            with _told(self.url, "cannot be read"):
                fs = self._remote()
                got = fs.cat_ranges([self._path] * len(merged), starts, ends, on_error="raise") if merged else []
            blocks = [memoryview(self._whole(b, s, e - s)) for b, s, e in zip(got, starts, ends, strict=True)]
        return cut_ranges(ranges, merged, blocks)

    def read_into(self, ranges: Sequence[tuple[int, int]], buffer: memoryview, positions: Sequence[int]) -> None:
        """Reads each (offset, size) straight to `buffer[position:position + size]`.

        Raises:
            SourceError: a range leaves the file or could not be read.
            ValueError: a position leaves the buffer.
        """
        for (_, size), position in zip(ranges, positions, strict=True):
            if position < 0 or position + size > len(buffer):
                raise ValueError(f"{size} bytes at {position} do not fit a buffer of {len(buffer)}")
        if self._fd >= 0:
            for (offset, size), position in zip(ranges, positions, strict=True):
                self.check(offset, size)
                self._pread(offset, buffer[position : position + size])
            return
        for view, position in zip(self.read_ranges(ranges), positions, strict=True):
            buffer[position : position + len(view)] = view

    def stream(self) -> BinaryIO:
        """The whole file from its start, sequentially; each byte is read once."""
        return io.BufferedReader(_SequentialReader(self), buffer_size=(4 << 20) if self._fd < 0 else (256 << 10))

    def close(self) -> None:
        """Closes the descriptor; ranges already read stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.size = 0  # later reads fail on their bounds and not on a reused descriptor

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _endpoint(options: Options) -> dict[str, str]:
    """The server that options of a file system name; nothing that is secret."""
    client = options.get("client_kwargs")
    given = {**options, "client": client.get("endpoint_url") if isinstance(client, Mapping) else None}
    return {key: str(given[key]) for key in ("client", "endpoint_url", "host", "port") if given.get(key) is not None}


def merge_ranges(ranges: Iterable[tuple[int, int]], max_gap: int) -> list[tuple[int, int]]:
    """Sorted, disjoint (start, end) that cover ranges (offset, size).

    Ranges nearer than `max_gap` bytes are one, up to `MAX_REQUEST`; overlapping ones always. Empty ones are left out:
    HTTP has no word for them, and servers answer with the whole file.
    """
    merged: list[tuple[int, int]] = []
    for offset, size in sorted({one for one in ranges if one[1]}):
        end = offset + size
        if merged:
            last_start, last_end = merged[-1]
            near = offset - last_end <= max_gap and max(end, last_end) - last_start <= MAX_REQUEST
            if near or offset < last_end:  # overlapping ranges are one whatever their size: no byte twice
                merged[-1] = (last_start, max(last_end, end))
                continue
        merged.append((offset, end))
    return merged


def cut_ranges(
    ranges: Sequence[tuple[int, int]], merged: Sequence[tuple[int, int]], blocks: Sequence[memoryview]
) -> list[memoryview]:
    """The bytes of each (offset, size) as views of the blocks that hold what `merge_ranges` made of them."""
    starts = [start for start, _ in merged]
    views = []
    for offset, size in ranges:
        if not size:
            views.append(memoryview(b""))
            continue
        k = bisect_right(starts, offset) - 1
        at = offset - starts[k]
        views.append(blocks[k][at : at + size])
    return views


class _SequentialReader(io.RawIOBase):
    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        size = min(len(target), self._source.size - self._at)
        if size > 0:
            target[:size] = self._source.read(self._at, size)
            self._at += size
        return max(size, 0)


class RangeSource(Protocol):
    """A file that is read by ranges: a `SourceFile`, or one behind a cache."""

    @property
    def url(self) -> str:
        """Path or URL, for messages."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def read_ranges(self, ranges: Sequence[tuple[int, int]], *, max_gap: int | None = None) -> list[memoryview]:
        """As `SourceFile.read_ranges`."""

    def close(self) -> None:
        """Gives the file back."""


class RangeCache(Protocol):
    """What may keep the bytes of remote files, such as `mm_assets.storage.disk_cache.BlockCache`."""

    def over(self, source: SourceFile) -> RangeSource:
        """The file, read through the cache."""


class _Blocks:
    """The blocks that were looked into last, of all remote files of this process together, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.renew_locks()
        renew_in_children(self)

    def renew_locks(self) -> None:
        """In a forked child: see `forking`. What the parent kept is dropped."""
        self._lock = threading.Lock()  # requests run outside it
        self._kept: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        self._size = 0

    def get(self, file: int, numbers: Sequence[int]) -> dict[int, memoryview]:
        """Those of a file's blocks that are kept, by number."""
        with self._lock:
            found = {number: self._kept[file, number] for number in numbers if (file, number) in self._kept}
            for number in found:
                self._kept.move_to_end((file, number))
        return found

    def put(self, file: int, blocks: Mapping[int, memoryview]) -> None:
        """Keeps blocks of a file, and lets those go that were not used for the longest time."""
        with self._lock:
            for number, block in blocks.items():
                self._drop((file, number))
                self._kept[file, number] = block
                self._size += len(block)
            while self._size > self._limit:
                self._drop(next(iter(self._kept)))

    def forget(self, file: int) -> None:
        """Drops all blocks of a file."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == file]:
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        block = self._kept.pop(key, None)
        if block is not None:
            self._size -= len(block)


_BLOCKS = _Blocks(64 << 20)  # whatever number of files is open
_FILE_NUMBERS = count()


class RemoteFile:
    """A remote file for the packed formats' readers: views of ranges, small ones through a bounded block cache.

    Args:
        url: fsspec URL.
        storage_options: arguments for the file system.
        cache: keeps what was read, on disk; None: nothing does.

    Raises:
        SourceError: the file is not there or may not be read, or cannot be cached.
    """

    MAX_GAP = 256 << 10  # payloads this near are one request: a batch waits for all of them anyway
    BLOCK = 256 << 10  # small look-ups (ids, index entries) share requests of this size
    MAX_BLOCKS = 32  # of one look-up; a more scattered one would push out what others find

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
        """The bytes of each (offset, size), by the blocks around them: in one request, or none where they are kept."""
        spans = [(start // self.BLOCK, max(start, start + size - 1) // self.BLOCK) for start, size in ranges]
        numbers = sorted({number for first, last in spans for number in range(first, last + 1)})
        if len(numbers) > self.MAX_BLOCKS:
            # Too scattered for the next look-up to find anything kept: no more bytes than asked for.
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
        """Blocks by number, those that are not kept with one request."""
        found = _BLOCKS.get(self._number, numbers)
        missing = [number for number in numbers if number not in found]
        if not missing:
            return found
        ranges = [(number * self.BLOCK, min(self.BLOCK, self.size - number * self.BLOCK)) for number in missing]
        # Copied: neighbours come in one buffer, which one of them that is kept would keep whole.
        new = {number: memoryview(bytes(view)) for number, view in zip(missing, self._read(ranges, 0), strict=True)}
        _BLOCKS.put(self._number, new)
        return found | new

    def _read(self, ranges: Sequence[tuple[int, int]], max_gap: int) -> list[memoryview]:
        try:
            return self._source.read_ranges(ranges, max_gap=max_gap)
        except _CutError as error:  # any other is no damage, and must not be taken for it
            raise TruncatedFileError(self.name, error.detail) from error

    def close(self) -> None:
        """Forgets the cached blocks."""
        _BLOCKS.forget(self._number)
        self._source.close()

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteFile, (self._location, self._options, self._cache)
