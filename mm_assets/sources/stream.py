"""The bytes of a shard at increasing positions, with any compression.

A cursor returns bytes by their position in the archive. `RangeCursor` fetches only the requested bytes, with a
read-ahead that the walk over the headers sets; `StreamCursor` decompresses once from start to end and cannot go back.
The compression of a shard is determined by its first bytes, never by its name.
"""

from __future__ import annotations

import gzip
import zlib
from abc import ABC, abstractmethod
from typing import Any, BinaryIO, ClassVar

from mm_assets.errors import ShardError, optional_import
from mm_assets.sources.tar_header import BLOCK
from mm_assets.storage.files import SourceFile

__all__ = [
    "Cursor",
    "RangeCursor",
    "StreamCursor",
    "compression_of",
    "compression_of_head",
    "open_cursor",
]

READ_AHEAD = 64 << 10  # bytes of one read where headers are dense
DENSE_STRIDE = 2 << 10  # members nearer than this: a quarter and more of what is read are headers
SMALL_STRIDE = 16 << 10  # members nearer than this have small ones among them, whose next headers a short read covers
MAX_LONE_READ = 4 << 10  # a header with its extended headers rarely takes more; payload bytes are fetched again later
SKIP_CHUNK = 1 << 20

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_UNSUPPORTED = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x04\x22\x4d\x18": "LZ4", b"PK\x03\x04": "a zip archive"}


class Cursor(ABC):
    """Bytes of an archive by position.

    Attributes:
        ranged: any position can be read; of a stream only those from `earliest` on.
        earliest: the first position that can still be read.
        end: how far the archive is known to reach.
        failure: why the archive ends there, where that is not its end.
    """

    ranged: ClassVar[bool]
    earliest: int
    end: int
    failure: str | None

    @abstractmethod
    def read(self, at: int, size: int) -> bytes:
        """The bytes from `at`, fewer than `size` only where the archive ends."""

    @abstractmethod
    def reach(self, end: int) -> bool:
        """Whether the archive has `end` bytes; a stream continues to there."""

    def note_stride(self, stride: int, span: int) -> None:  # noqa: B027  # a default: a stream reads everything anyway
        """Notes that a member took `stride` bytes, of which its headers `span`; ranges adapt what they read ahead."""

    def close(self) -> None:  # noqa: B027  # a default: a cursor over ranges holds nothing
        """Releases what the cursor holds; the file stays open."""


class RangeCursor(Cursor):
    """Reads an uncompressed shard by ranges; payloads that are not requested are not read."""

    ranged = True

    def __init__(self, source: SourceFile) -> None:
        self.earliest = 0
        self.end = source.size
        self.failure = None
        self._source = source
        self._start = 0
        self._window = b""
        self._mean_stride = 0
        self._ahead = BLOCK

    def read(self, at: int, size: int) -> bytes:
        """The bytes from `at`, fewer than `size` only where the archive ends."""
        offset = at - self._start
        if not 0 <= offset <= len(self._window) - size:
            length = min(max(size, self._ahead), max(self.end - at, 0))
            self._window = self._source.read(at, length) if length else b""
            self._start = at
            offset = 0
        return self._window[offset : offset + size]

    def reach(self, end: int) -> bool:
        """Whether the archive has `end` bytes."""
        return end <= self.end

    def note_stride(self, stride: int, span: int) -> None:
        """Widens the read-ahead among small members and narrows it to the headers among large ones."""
        self._mean_stride = stride if self._mean_stride == 0 else (3 * self._mean_stride + stride) // 4
        if self._mean_stride <= DENSE_STRIDE:
            self._ahead = READ_AHEAD
        elif self._mean_stride <= SMALL_STRIDE:
            self._ahead = MAX_LONE_READ
        else:
            self._ahead = min(span, MAX_LONE_READ)


class StreamCursor(Cursor):
    """Reads a compressed shard once from start to end.

    Where decompression fails the archive ends, and `failure` says why.

    Args:
        source: the shard.
        compression: "gzip" or "zstd".
    """

    ranged = False

    def __init__(self, source: SourceFile, compression: str) -> None:
        self.earliest = 0
        self.end = 0  # position after the last byte that came out of the stream
        self.failure = None
        self._raw = source.stream()
        self._stream, self._errors = _decompressed(self._raw, compression)
        self._window = b""  # from `earliest` to `end`

    def _more(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size > 0 and self.failure is None:
            try:
                part = self._stream.read(min(size, SKIP_CHUNK))
            except self._errors as error:
                self.failure = f"decompression failed: {str(error) or type(error).__name__}"
                break
            if not part:
                break
            parts.append(part)
            size -= len(part)
            self.end += len(part)
        return b"".join(parts)

    def read(self, at: int, size: int) -> bytes:
        """The bytes from `at`, fewer than `size` only where the archive ends.

        Raises:
            ValueError: `at` is before what the last call returned: a bug of the caller.
        """
        if at < self.earliest:
            raise ValueError(f"position {at} has passed, the stream is at {self.earliest}")
        if at > self.end and not self.reach(at):
            return b""
        held = self._window[at - self.earliest :]
        if len(held) < size:
            held += self._more(size - len(held))
        self.earliest, self._window = at, held
        return held[:size]

    def reach(self, end: int) -> bool:
        """Continues to `end`; returns whether the archive has that many bytes."""
        while self.end < end:
            passed = self._more(min(end - self.end, SKIP_CHUNK))
            if not passed:
                return False
            self.earliest, self._window = self.end - len(passed), passed
        return True

    def close(self) -> None:
        """Closes the stream."""
        self._stream.close()
        self._raw.close()


def compression_of_head(head: bytes) -> str | None:
    """The compression of a file that starts with `head`: "gzip" or "zstd"; None for every other file."""
    if head.startswith(_GZIP):
        return "gzip"
    # A skippable frame may come first: the last three bytes of its magic are fixed.
    if head.startswith(_ZSTD) or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        return "zstd"
    return None


def compression_of(source: SourceFile) -> str | None:
    """The compression of a tar shard by its first bytes: "gzip", "zstd", or None for a plain tar.

    Raises:
        ShardError: it is of a kind that is not read.
    """
    head = source.read(0, min(BLOCK, source.size))
    for magic, name in _UNSUPPORTED.items():
        if head.startswith(magic) and head[257:262] != b"ustar":
            detail = f"is {name}; a shard is a tar, plain or compressed with gzip or zstd"
            raise ShardError(source.url, detail, byte_offset=0)
    return compression_of_head(head)


def open_cursor(source: SourceFile, compression: str | None) -> Cursor:
    """A cursor over the archive in a shard."""
    return RangeCursor(source) if compression is None else StreamCursor(source, compression)


def _decompressed(raw: BinaryIO, compression: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """The decompressed stream, and the errors of damaged bytes that it raises."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb"), (zlib.error, EOFError, gzip.BadGzipFile)
    with optional_import("zstandard", "a zstd shard"):
        import zstandard

    stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
    return stream, (zstandard.ZstdError,)
