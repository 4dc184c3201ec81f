"""Files of any fsspec URL, read by ranges: shards, tables, and packed files that are not local.

Each requested byte is fetched once, near ranges in one request. The packed formats read remote files through
`RemoteFile`, with or without `disk_cache` in between.
"""

from __future__ import annotations

import io
import json
import os
import stat
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import fsspec

from mm_assets.errors import SourceError, full_disk_named, temporary_disk_named
from mm_assets.storage.listing import ShardFile, describe_file, describe_folder
from mm_assets.storage.ranges import MAX_GAP, merge_ranges, slice_ranges
from mm_assets.storage.urls import (
    Options,
    filesystem,
    is_local,
    is_web,
    protocols,
    reason,
    split_signature,
    storage_errors,
    without_query,
)

__all__ = ["SourceFile"]

MAX_PARTS = 512  # of one system call, which takes 1,024
MAX_LOCAL_GAP = 4 << 10  # of a local file, where a system call costs no more than copying a page


class ShortFileError(SourceError):
    """The file is shorter than the caller assumed; the storage itself works."""


class SourceFile:
    """A local or remote file, read by ranges. Safe to share between threads, and with forked children.

    A folder is a file with the content of `describe_folder` at the time when it was opened.

    Args:
        url: path or fsspec URL; the URL of a folder ends with a slash.
        storage_options: arguments for the file system.

    Attributes:
        url: absolute path or URL, for messages.
        location: what opens the file again: the given URL, or a local file's absolute path.
        size: bytes.
        fingerprint: as in `ShardFile`, when the file was opened.
        modified: likewise.
        is_described: whether other files describe it (see `ShardFile.described_by`); the caller may set it.
        before_reads: called before each read of a `stream`; it may wait, and so pauses who reads the stream.

    Raises:
        SourceError: the file is not there or may not be read.
    """

    def __init__(self, url: str, storage_options: Options | None = None) -> None:
        shard, listing = _describe(url, storage_options)
        self.url = shard.url
        self.size = shard.size
        self.fingerprint = shard.fingerprint
        self.modified = shard.modified
        self._fs, self._path = filesystem(url, storage_options)
        # Some file systems leave out the host in the URL that they make from a path.
        self.location = shard.url if "file" in protocols(self._fs) else url
        self._options = storage_options
        self.is_described = False
        self.before_reads: Callable[[], object] | None = None
        self._process = os.getpid()
        self._fd = -1
        if listing is not None:
            with temporary_disk_named(), tempfile.TemporaryFile(prefix="mm-assets-") as copy:
                copy.write(listing)
                copy.flush()
                self._hold(os.dup(copy.fileno()))
        elif "file" in protocols(self._fs):
            try:
                # Without O_NONBLOCK, a pipe without a writer, which an unpacked archive may have left, waits for ever.
                fd = os.open(self._path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            except OSError as error:
                raise SourceError(url, f"cannot be opened: {reason(error)}") from error
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise SourceError(url, "is a pipe or a device, expected a file")
            self._hold(fd)

    def _hold(self, fd: int) -> None:
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)  # files are dropped unclosed while others read them

    @property
    def is_local(self) -> bool:
        """Whether reads are system calls and not requests."""
        return self._fd >= 0

    @property
    def is_fetched(self) -> bool:
        """Whether reads are from a copy of a remote file."""
        return self._fd >= 0 and "file" not in protocols(self._fs)

    def fetch(self, folder: Path) -> None:
        """Copies a remote file as it was opened to a local folder, by one request; all further reads are from the copy.

        Raises:
            SourceError: it cannot be read, has changed since it was opened, or the folder is on a full disk.
        """
        if self.is_local:
            return
        options = {"max_concurrency": 1} if {"s3", "s3a"} & set(protocols(self._fs)) else {}
        with full_disk_named(folder), tempfile.NamedTemporaryFile(dir=folder, prefix="shard-") as copy:
            with storage_errors(self.url, "cannot be read"):
                self._remote().get_file(self._path, copy.name, **options)
            fetched = os.open(copy.name, os.O_RDONLY)  # the copy is gone as soon as this is closed
        found, size = self.now(), os.fstat(fetched).st_size
        if (found.fingerprint, size) != (self.fingerprint, self.size):
            os.close(fetched)
            detail = f"changed while it was fetched (found {found.fingerprint}, expected {self.fingerprint})"
            if found.fingerprint == self.fingerprint:
                detail = f"the storage gave {size} of {self.size} bytes"
            raise SourceError(self.url, f"{detail}: run this again")
        self._hold(fetched)

    @property
    def closed(self) -> bool:
        """Whether a local file's descriptor has been released, so that reads fail."""
        return self._fd < 0 and "file" in protocols(self._fs)

    def _remote(self) -> fsspec.AbstractFileSystem:
        """The file system; a new one in a forked child, which has neither the parent's connections nor their thread."""
        if self._process != os.getpid():
            self._fs, self._path = filesystem(self.location, self._options)
            self._process = os.getpid()
        return self._fs

    @property
    def identity(self) -> str:
        """What identifies the file as it was opened: location, server, fingerprint and time of change."""
        return json.dumps(
            [split_signature(self.location)[0], _endpoint(self._options or {}), self.fingerprint, self.modified]
        )

    @property
    def storage_options(self) -> Options | None:
        """The arguments for the file system, which may contain secrets."""
        return self._options

    def beside(self, name: str) -> SourceFile:
        """Opens a file by its name relative to the folder of this one, with the same storage options.

        Args:
            name: relative path without escapes; it may contain ``..`` and is normalized.

        Raises:
            SourceError: the name is empty, absolute or leads out of the storage, or the file is missing or cannot be
                read.
        """
        url = without_query(split_signature(self.location)[0])
        scheme, colon, host_and_path = ("", "", url) if is_local(url) else url.partition("://")
        host, _, path = host_and_path.partition("/")
        parts = path.split("/")[:-1]
        for part in (quote(name) if is_web(url) else name).split("/"):
            if part == ".." and parts:
                parts.pop()
            elif part == ".." or not name or name.startswith("/") or "\0" in name:
                detail = f"names a file {name!r}, expected a path relative to its folder that stays in its storage"
                raise SourceError(self.url, detail)
            elif part not in ("", "."):
                parts.append(part)
        return SourceFile(f"{scheme}{colon}{host}/{'/'.join(parts)}", self._options)

    def now(self) -> ShardFile:
        """The file as the storage describes it now; `SourceError` if it is gone or may not be read."""
        return _describe(self.location, self._options)[0]

    def has_changed(self) -> bool:
        """Whether the file was replaced or changed since it was opened; costs a request; errors as `now`."""
        now = self.now()
        return (now.fingerprint, now.modified) != (self.fingerprint, self.modified)

    def check(self, offset: int, size: int) -> None:
        """Raise `SourceError` for a range that leaves the file."""
        if offset < 0 or size < 0 or offset + size > self.size:
            detail = f"a range of {size} bytes does not lie inside the file's {self.size} bytes"
            raise ShortFileError(self.url, detail, byte_offset=offset)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`, in one request.

        Raises:
            SourceError: the range leaves the file, or the storage returned fewer bytes than it announced.
        """
        self.check(offset, size)
        if size == 0:
            return b""
        if self._fd >= 0:
            return self._read_local(offset, size)
        with storage_errors(self.url, "cannot be read", byte_offset=offset):
            got: bytes = self._remote().cat_file(self._path, start=offset, end=offset + size)
        return self._whole(got, offset, size)

    def _whole(self, got: bytes, offset: int, size: int) -> bytes:
        if len(got) == size:
            return got
        if len(got) > size:
            detail = (
                f"the server ignores ranges, by which the file is read (it gave {len(got)} bytes, expected {size}): "
                "copy it to a folder or to object storage"
            )
            raise SourceError(self.url, detail, byte_offset=offset)
        # A reply may be truncated in transit: the file itself has shrunk only if the storage now reports fewer bytes.
        left = self.now().size
        detail = f"the storage gave {len(got)} of {size} bytes"
        if left < self.size:
            detail = f"{detail}: the file has {left} bytes, it had {self.size} when it was opened"
            raise ShortFileError(self.url, detail, byte_offset=offset)
        raise SourceError(self.url, detail, byte_offset=offset)

    def _read_local(self, offset: int, size: int) -> bytes:
        with suppress(OSError):  # `_pread` says what is wrong, and reads on where not all bytes came
            if len(data := os.pread(self._fd, size, offset)) == size:
                return data
        rest = bytearray(size)
        self._pread(offset, memoryview(rest))
        return bytes(rest)

    def _pread(self, offset: int, target: memoryview) -> None:
        done = 0
        try:
            while done < len(target):
                got = os.preadv(self._fd, [target[done:]], offset + done)
                if got == 0:
                    detail = f"ended {len(target) - done} bytes early: it was truncated while being read"
                    raise SourceError(self.url, detail, byte_offset=offset)
                done += got
        except OSError as error:
            raise SourceError(self.url, f"cannot be read: {reason(error)}", byte_offset=offset) from error

    def read_ranges(self, ranges: Sequence[tuple[int, int]], *, max_gap: int | None = None) -> list[memoryview]:
        """The bytes of each (offset, size), in the order of `ranges`.

        Equal ranges are read once; ranges with gaps of up to `max_gap` bytes become one request of at most 16 MiB.

        Raises:
            SourceError: a range leaves the file or could not be read.
        """
        for offset, size in ranges:
            self.check(offset, size)
        gap = (MAX_LOCAL_GAP if self._fd >= 0 else MAX_GAP) if max_gap is None else max_gap
        merged = merge_ranges(ranges, gap)
        if self._fd >= 0:
            blocks = [memoryview(self._read_local(start, end - start)) for start, end in merged]
        else:
            starts, ends = [start for start, _ in merged], [end for _, end in merged]
            with storage_errors(self.url, "cannot be read"):
                fs = self._remote()
                got = fs.cat_ranges([self._path] * len(merged), starts, ends, on_error="raise") if merged else []
            blocks = [memoryview(self._whole(b, s, e - s)) for b, s, e in zip(got, starts, ends, strict=True)]
        return slice_ranges(ranges, merged, blocks)

    def read_into(self, ranges: Sequence[tuple[int, int]], buffer: memoryview, positions: Sequence[int]) -> None:
        """Read each (offset, size) into `buffer[position:position + size]`.

        Raises:
            SourceError: a range leaves the file or could not be read.
            ValueError: a position leaves the buffer.
        """
        for (_, size), position in zip(ranges, positions, strict=True):
            if position < 0 or position + size > len(buffer):
                raise ValueError(f"{size} bytes at {position} do not fit a buffer of {len(buffer)}")
        if self._fd >= 0:
            for offset, size in ranges:
                self.check(offset, size)
            self._read_near(ranges, buffer, positions)
            return
        for view, position in zip(self.read_ranges(ranges), positions, strict=True):
            buffer[position : position + len(view)] = view

    def _read_near(self, ranges: Sequence[tuple[int, int]], buffer: memoryview, positions: Sequence[int]) -> None:
        """Reads ranges of a local file to their positions, those with small gaps by one system call."""
        gap = memoryview(bytearray(MAX_LOCAL_GAP))  # what is between two ranges goes there
        parts: list[memoryview] = []
        places: list[tuple[int, memoryview]] = []  # of the ranges of the call
        start = end = 0
        for (offset, size), position in zip(ranges, positions, strict=True):
            target = buffer[position : position + size]
            if not (places and 0 <= offset - end <= MAX_LOCAL_GAP and len(parts) < MAX_PARTS):
                self._preadv(start, end, parts, places)
                parts, places, start, end = [], [], offset, offset
            if offset > end:
                parts.append(gap[: offset - end])
            parts.append(target)
            places.append((offset, target))
            end = offset + size
        self._preadv(start, end, parts, places)

    def _preadv(
        self, start: int, end: int, parts: Sequence[memoryview], places: Sequence[tuple[int, memoryview]]
    ) -> None:
        """Fills `parts` with the bytes from `start` to `end`; if not all come, each place alone."""
        if len(places) > 1:
            with suppress(OSError):
                if os.preadv(self._fd, parts, start) == end - start:
                    return
        for offset, target in places:
            self._pread(offset, target)

    def open(self) -> io.RawIOBase:
        """The file as a seekable, unbuffered binary file, for libraries that need one; each read is a request."""
        return _RawFile(self)

    def stream(self) -> BinaryIO:
        """The whole file from its start, sequentially; each byte is read once."""
        raw = _RawFile(self, self.before_reads)
        return io.BufferedReader(raw, buffer_size=(4 << 20) if self._fd < 0 else (256 << 10))

    def close(self) -> None:
        """Close the descriptor; ranges already read stay valid. A file that nothing refers to is closed too."""
        if self._fd >= 0:
            self._fd = -1
            self.size = 0  # later reads fail on their bounds and not on a reused descriptor
            self._close_fd()

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _describe(url: str, options: Options | None) -> tuple[ShardFile, bytes | None]:
    """Describes a file, or a folder with its content; errors as `describe_file` and `describe_folder`."""
    return describe_folder(url, options) if url.endswith("/") else (describe_file(url, options), None)


def _endpoint(options: Options) -> dict[str, str]:
    """The server in the options of a file system, without any secret."""
    client = options.get("client_kwargs")
    given = {**options, "client": client.get("endpoint_url") if isinstance(client, Mapping) else None}
    return {key: str(given[key]) for key in ("client", "endpoint_url", "host", "port") if given.get(key) is not None}


class _RawFile(io.RawIOBase):
    def __init__(self, source: SourceFile, before_reads: Callable[[], object] | None = None) -> None:
        self._source = source
        self._before_reads = before_reads
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence, self._source.size), 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._before_reads is not None:
            self._before_reads()
        target = memoryview(buffer).cast("B")
        size = max(min(len(target), self._source.size - self._at), 0)
        target[:size] = self._source.read(self._at, size) if size else b""
        self._at += size
        return size
