"""Files of any fsspec URL: shards read by ranges, tables and packed files published whole or not at all.

`SourceFile` reads; each byte asked for is fetched once, near ranges in one request. `Store` writes below one root:
content is built in a local file that nobody sees under its final name and appears there by one rename (local) or one
completed upload (object store). `RemoteFile` is what the packed formats read from when their file is not local.
Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.core import url_to_fs

from mm_assets.errors import SourceError
from mm_assets.errors import TruncatedError as TruncatedFileError

__all__ = [
    "SHARD_SUFFIXES",
    "Draft",
    "PublishedFile",
    "RemoteFile",
    "ShardFile",
    "SourceFile",
    "Store",
    "describe_file",
    "expand_shards",
    "is_local",
    "local_path",
]

MAX_GAP = 64 << 10  # ranges of a remote file this near are fetched as one: less than a request's latency costs
MAX_LOCAL_GAP = 4 << 10  # of a local file, where a system call costs no more than copying a page
MAX_REQUEST = 16 << 20  # bounds what one merged request holds in memory
_UPLOAD_PART = 16 << 20  # bytes of one part of a multipart upload
_UPLOAD_PARTS_AT_ONCE = 2  # parts in memory at a time
_COPY_BLOCK = 1 << 20

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst")
"""Names that count as shards when a folder is given instead of a pattern."""

Options = Mapping[str, Any]


def is_local(url: str) -> bool:
    """Whether `url` is a path of the local file system (plain, or ``file://``)."""
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> Path:
    """The path behind a local URL, absolute, with ``~`` expanded."""
    return Path(os.path.abspath(os.path.expanduser(url.split("://", 1)[-1] if "://" in url else url)))


def _filesystem(url: str, options: Options | None) -> tuple[fsspec.AbstractFileSystem, str]:
    settings = dict(options or {})
    if not is_local(url):
        # A daemon lives for days: a remembered listing would hide new shards and changed ones.
        settings.setdefault("use_listings_cache", False)
    fs, path = url_to_fs(url, **settings)
    return fs, path


def _public_url(fs: fsspec.AbstractFileSystem, path: str) -> str:
    return path if "file" in _protocols(fs) else str(fs.unstrip_protocol(path))


def _protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
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
    if "file" in _protocols(fs):
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
        mark = str(modified) if modified is not None else "unmarked"
    mark = re.sub(r"[^A-Za-z0-9._:+-]", "", mark)
    return ShardFile(url=_public_url(fs, path), size=int(size), fingerprint=f"{size}-{mark}", modified=seconds)


def describe_file(url: str, storage_options: Options | None = None) -> ShardFile:
    """Size and fingerprint of one file as it is now.

    Raises:
        SourceError: the file is not there or may not be read.
    """
    fs, path = _filesystem(url, storage_options)
    try:
        info = fs.info(path)
        if info.get("type") == "directory":
            raise SourceError(url, "is a folder, expected a file")
        return _describe(fs, path, info)
    except OSError as error:
        raise SourceError(url, f"cannot be read: {_reason(error)}") from error


def expand_shards(pattern: str, storage_options: Options | None = None) -> list[ShardFile]:
    """The shards that a folder, a glob or one path names, sorted by URL.

    A folder gives every file below it with a name in `SHARD_SUFFIXES`; a pattern is taken as it is. Hidden files
    never count.
    """
    fs, path = _filesystem(pattern, storage_options)
    try:
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
    except OSError as error:
        raise SourceError(pattern, f"cannot be listed: {_reason(error)}") from error
    return sorted(listed, key=lambda shard: shard.url)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


class SourceFile:
    """One file that is read by ranges, local or remote. Safe to share between threads.

    Args:
        url: path or fsspec URL.
        storage_options: arguments for the file system.

    Raises:
        SourceError: the file is not there or may not be read.
    """

    def __init__(self, url: str, storage_options: Options | None = None) -> None:
        described = describe_file(url, storage_options)
        self.url = described.url
        self.size = described.size
        self.fingerprint = described.fingerprint
        self._fs, self._path = _filesystem(url, storage_options)
        self._fd = -1
        if "file" in _protocols(self._fs):
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise SourceError(url, f"cannot be opened: {_reason(error)}") from error

    @property
    def is_local(self) -> bool:
        """Whether reads are system calls and not requests."""
        return self._fd >= 0

    @property
    def closed(self) -> bool:
        """Whether a local file's descriptor has been given back, so that reads fail."""
        return self._fd < 0 and "file" in _protocols(self._fs)

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise SourceError(
                self.url,
                f"a range of {size} bytes does not lie inside the file's {self.size} bytes",
                byte_offset=offset,
            )

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`, in one request.

        Raises:
            SourceError: the range leaves the file, or the storage gave fewer bytes than it announced.
        """
        self._check(offset, size)
        if size == 0:
            return b""
        if self._fd >= 0:
            data = bytearray(size)
            self._pread(offset, memoryview(data))
            return bytes(data)
        try:
            got: bytes = self._fs.cat_file(self._path, start=offset, end=offset + size)
        except OSError as error:
            raise SourceError(self.url, f"cannot be read: {_reason(error)}", byte_offset=offset) from error
        return self._whole(got, offset, size)

    def _whole(self, got: bytes, offset: int, size: int) -> bytes:
        if len(got) != size:
            raise SourceError(self.url, f"the storage gave {len(got)} of {size} bytes", byte_offset=offset)
        return got

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
            raise SourceError(self.url, f"cannot be read: {_reason(error)}", byte_offset=offset) from error

    def read_ranges(self, ranges: Sequence[tuple[int, int]], *, max_gap: int | None = None) -> list[memoryview]:
        """The bytes of each (offset, size), in the order asked for.

        Equal ranges are read once; ranges nearer than `max_gap` bytes become one request of at most 16 MiB.

        Raises:
            SourceError: a range leaves the file or could not be read.
        """
        for offset, size in ranges:
            self._check(offset, size)
        gap = (MAX_LOCAL_GAP if self._fd >= 0 else MAX_GAP) if max_gap is None else max_gap
        merged = _merge(ranges, gap)
        if self._fd >= 0:
            blocks: list[memoryview] = []
            for start, end in merged:
                block = memoryview(bytearray(end - start))
                self._pread(start, block)
                blocks.append(block)
        else:
            starts = [start for start, _ in merged]
            ends = [end for _, end in merged]
            try:
                got = self._fs.cat_ranges([self._path] * len(merged), starts, ends, on_error="raise") if merged else []
            except OSError as error:
                raise SourceError(self.url, f"cannot be read: {_reason(error)}") from error
            blocks = [memoryview(self._whole(b, s, e - s)) for b, s, e in zip(got, starts, ends, strict=True)]
        return _cut(ranges, merged, blocks)

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
                self._check(offset, size)
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


def _merge(ranges: Sequence[tuple[int, int]], max_gap: int) -> list[tuple[int, int]]:
    """Sorted, disjoint (start, end) that cover `ranges`."""
    merged: list[tuple[int, int]] = []
    for offset, size in sorted(set(ranges)):
        end = offset + size
        if merged:
            last_start, last_end = merged[-1]
            near = offset - last_end <= max_gap and max(end, last_end) - last_start <= MAX_REQUEST
            if near or offset < last_end:  # overlapping ranges are one whatever their size: no byte twice
                merged[-1] = (last_start, max(last_end, end))
                continue
        merged.append((offset, end))
    return merged


def _cut(
    ranges: Sequence[tuple[int, int]], merged: Sequence[tuple[int, int]], blocks: Sequence[memoryview]
) -> list[memoryview]:
    from bisect import bisect_right

    starts = [start for start, _ in merged]
    views = []
    for offset, size in ranges:
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


class RemoteFile:
    """A remote file for the packed formats' readers: views of ranges, small ones through a bounded block cache.

    Args:
        url: fsspec URL.
        storage_options: arguments for the file system.
    """

    MAX_GAP = 256 << 10  # payloads this near are one request: a batch waits for all of them anyway
    BLOCK = 256 << 10  # small look-ups (ids, index entries) share requests of this size
    MAX_BLOCKS = 64  # 16 MiB of cache for one open file

    def __init__(self, url: str, storage_options: Options | None = None) -> None:
        self._source = SourceFile(url, storage_options)
        self._options = dict(storage_options or {})
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()  # of the blocks; requests run outside it

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
            return self.view_many([(offset, size)])[0]
        first, last = offset // self.BLOCK, max(offset, offset + size - 1) // self.BLOCK
        blocks = [self._block(number) for number in range(first, last + 1)]
        at = offset - first * self.BLOCK
        if len(blocks) == 1:
            return blocks[0][at : at + size]
        return memoryview(b"".join(blocks))[at : at + size]

    def _block(self, number: int) -> memoryview:
        with self._lock:
            block = self._blocks.get(number)
            if block is not None:
                self._blocks.move_to_end(number)
                return block
        start = number * self.BLOCK
        block = memoryview(self._read([(start, min(self.BLOCK, self.size - start))])[0])
        with self._lock:
            self._blocks[number] = block
            while len(self._blocks) > self.MAX_BLOCKS:
                self._blocks.popitem(last=False)
        return block

    def view_many(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each (offset, size), in one coalesced request."""
        return self._read(ranges)

    def _read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        try:
            return self._source.read_ranges(ranges, max_gap=self.MAX_GAP)
        except SourceError as error:
            raise TruncatedFileError(self.name, error.detail) from error

    def close(self) -> None:
        """Forgets the cached blocks."""
        with self._lock:
            self._blocks.clear()
        self._source.close()

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteFile, (self._source.url, self._options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """A file as it was published.

    Attributes:
        path: relative to the store's root.
        size: bytes.
        sha256: hexadecimal digest of the content.
    """

    path: str
    size: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """The file as markers and manifests list it."""
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


class Draft:
    """A file under construction: write to `path`, set `name` if it depends on the content, leave the `with` block.

    Attributes:
        path: local file to write.
        name: where it will stand, relative to the root.
        published: set once the file stands there.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.published: PublishedFile | None = None
        self._digest: tuple[tuple[int, int, int], str] | None = None

    def digest(self) -> str:
        """SHA-256 of what has been written, hexadecimal; asked for again, it is computed only if the file changed."""
        status = os.stat(self.path)
        mark = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._digest is None or self._digest[0] != mark:
            self._digest = mark, _sha256(self.path)
        return self._digest[1]

    def result(self) -> PublishedFile:
        """The published file.

        Raises:
            RuntimeError: the `with` block has not been left yet.
        """
        if self.published is None:
            raise RuntimeError(f"{self.name} is not published yet")
        return self.published


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Store:
    """All files below one root URL.

    Args:
        url: folder path or fsspec URL; made when the first file is published.
        storage_options: arguments for the file system.
    """

    def __init__(self, url: str, storage_options: Options | None = None) -> None:
        self.storage_options = dict(storage_options or {})
        self.is_local = is_local(url)
        self._url = str(local_path(url)) if self.is_local else url.rstrip("/")
        self.fs, self._root = _filesystem(self._url, storage_options)

    def __repr__(self) -> str:
        return f"Store({self._url!r})"

    @property
    def url(self) -> str:
        """The root."""
        return self._url

    def child(self, name: str) -> Store:
        """The store of a folder below the root."""
        return Store(self.url_of(name), self.storage_options)

    def url_of(self, name: str) -> str:
        """Path or URL of a file below the root."""
        return f"{self._url}/{name}" if name else self._url

    def path_of(self, name: str) -> str:
        """The same as the file system itself spells it."""
        return f"{self._root}/{name}" if name else self._root

    def exists(self, name: str) -> bool:
        """Whether a file stands at `name`."""
        return bool(self.fs.isfile(self.path_of(name)))

    def size(self, name: str) -> int | None:
        """Bytes of a file, or None where there is none."""
        try:
            return int(self.fs.info(self.path_of(name))["size"])
        except FileNotFoundError:
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Name (relative to the root) and bytes of each file directly in a folder, hidden ones left out."""
        try:
            listed = self.fs.ls(self.path_of(folder), detail=True)
        except FileNotFoundError:
            return {}
        found = {}
        for info in listed:
            base = info["name"].rstrip("/").rsplit("/", 1)[-1]
            if info["type"] == "file" and base and not base.startswith("."):
                found[f"{folder}/{base}" if folder else base] = int(info["size"])
        return dict(sorted(found.items()))

    def read_bytes(self, name: str) -> bytes:
        """The whole content.

        Raises:
            SourceError: there is no such file, or it cannot be read.
        """
        try:
            content: bytes = self.fs.cat_file(self.path_of(name))
        except OSError as error:
            raise SourceError(self.url_of(name), f"cannot be read: {_reason(error)}") from error
        return content

    def open(self, name: str) -> Any:
        """A seekable binary file object, as pyarrow reads it.

        Raises:
            SourceError: there is no such file.
        """
        try:
            if self.is_local:
                return self.fs.open(self.path_of(name), "rb")
            # Column chunks are read whole and once: a read-ahead cache would fetch their neighbours.
            return self.fs.open(self.path_of(name), "rb", cache_type="none")
        except OSError as error:
            raise SourceError(self.url_of(name), f"cannot be opened: {_reason(error)}") from error

    @contextmanager
    def draft(self, name: str) -> Iterator[Draft]:
        """Builds a file out of sight and publishes it when the block ends without an exception.

        Raises:
            SourceError: another process is building the same file, or the upload failed.
        """
        if self.is_local:
            with self._local_draft(name) as draft:
                yield draft
            return
        with tempfile.TemporaryDirectory(prefix="mm-assets-") as scratch:
            draft = Draft(Path(scratch) / name.rsplit("/", 1)[-1], name)
            yield draft
            digest, size = draft.digest(), draft.path.stat().st_size
            self._upload(draft.path, draft.name)
            draft.published = PublishedFile(path=draft.name, size=size, sha256=digest)

    @contextmanager
    def _local_draft(self, name: str) -> Iterator[Draft]:
        target = Path(self.path_of(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        path = target.with_name(f".{target.name}.tmp")
        # Beside the content and not the content: writers that replace their file would lose a lock held on it.
        guard = target.with_name(f".{target.name}.lock")
        lock = _lock(guard, target)
        try:
            path.unlink(missing_ok=True)  # left over from a run that was killed
            draft = Draft(path, name)
            yield draft
            digest = draft.digest()
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                os.fsync(file.fileno())
            final = Path(self.path_of(draft.name))
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, final)
            _sync_folder(final.parent)
            draft.published = PublishedFile(path=draft.name, size=size, sha256=digest)
        finally:
            path.unlink(missing_ok=True)
            guard.unlink(missing_ok=True)
            os.close(lock)

    def _upload(self, path: Path, name: str) -> None:
        extra: dict[str, Any] = {}
        if {"s3", "s3a"} & set(_protocols(self.fs)):
            extra = {"chunksize": _UPLOAD_PART, "max_concurrency": _UPLOAD_PARTS_AT_ONCE}
        try:
            if not ({"s3", "s3a"} & set(_protocols(self.fs))):
                self.fs.makedirs(self.path_of(name).rsplit("/", 1)[0], exist_ok=True)
            self.fs.put_file(str(path), self.path_of(name), **extra)
        except OSError as error:
            raise SourceError(self.url_of(name), f"cannot be written: {_reason(error)}") from error

    def write_bytes(self, name: str, content: bytes) -> PublishedFile:
        """Publishes a small file.

        Raises:
            SourceError: another process is writing it, or the upload failed.
        """
        with self.draft(name) as draft:
            draft.path.write_bytes(content)
        return draft.result()

    def delete(self, name: str) -> None:
        """Removes a file if it is there."""
        try:
            self.fs.rm_file(self.path_of(name))
        except FileNotFoundError:
            return


def _lock(guard: Path, target: Path) -> int:
    """Takes the right to build `target`; a process that dies gives it back by dying."""
    deadline = time.monotonic() + 1.0
    while True:
        fd = os.open(guard, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if guard.exists() and os.fstat(fd).st_ino == guard.stat().st_ino:
                return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                detail = "another process is writing this file: runs of one partition must not overlap"
                raise SourceError(target, detail) from None
            time.sleep(0.05)
        # Its last holder removed the guard between our open and our lock: try the name again.
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
