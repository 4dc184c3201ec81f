"""The bytes of a shard at increasing positions, with any compression.

A cursor returns bytes by their position in the archive. `RangeCursor` fetches only the requested bytes, with a
read-ahead that the walk over the headers sets; `StreamCursor` decompresses once from start to end and cannot go back.
The compression of a shard is determined by its first bytes, never by its name.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar, cast

import pyarrow as pa

from mm_assets.errors import first_line, optional_import
from mm_assets.sources.tar_header import BLOCK
from mm_assets.storage.files import SourceFile

__all__ = [
    "Cursor",
    "RangeCursor",
    "StreamCursor",
    "ZstdFrames",
    "compression_of_head",
    "decompressed",
    "open_cursor",
]

READ_AHEAD = 256 << 10  # bytes of one read where headers are dense
DENSE_STRIDE = 4 << 10  # members nearer than this: copying what is between costs less than a read for each
SMALL_STRIDE = 16 << 10  # members nearer than this have small ones among them, whose next headers a short read covers
MAX_LONE_READ = 4 << 10  # a header with its extended headers rarely takes more; payload bytes are fetched again later
SKIP_CHUNK = 1 << 20

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BZIP2 = b"BZh"
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")  # after the level: a block, or the end of the stream
_XZ = b"\xfd7zXZ\0"

MAX_XZ_MEMORY = 256 << 20  # bytes that the decoder may take: `xz -9` needs 65 MiB
MAX_SNAPPY = 512 << 20  # bytes of a block, which is in memory as a whole
RAW_CHUNK = 64 << 10  # compressed bytes of one read


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
            # Small members are read together, and after a payload that was taken the next one probably is.
            is_payload = size > BLOCK and self._mean_stride <= SMALL_STRIDE
            length = min(max(size, READ_AHEAD if is_payload else self._ahead), max(self.end - at, 0))
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
        compression: as `compression_of_head` gives it.
    """

    ranged = False

    def __init__(self, source: SourceFile, compression: str) -> None:
        self.earliest = 0
        self.end = 0  # position after the last byte that came out of the stream
        self.failure = None
        self._raw = source.stream()
        self._stream, self._errors = decompressed(self._raw, compression)
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
    """The compression of a file that starts with `head`: "gzip", "zstd", "bzip2", "xz"; None for every other file."""
    if head.startswith(_GZIP):
        return "gzip"
    # A skippable frame may come first: the last three bytes of its magic are fixed.
    if head.startswith(_ZSTD) or _is_skippable(head):
        return "zstd"
    if head.startswith(_BZIP2) and any(block.startswith(head[4:10]) for block in _BZIP2_BLOCKS):
        return "bzip2"
    return "xz" if head.startswith(_XZ) else None


def open_cursor(source: SourceFile, compression: str | None) -> Cursor:
    """A cursor over the archive in a shard."""
    return RangeCursor(source) if compression is None else StreamCursor(source, compression)


def decompressed(raw: BinaryIO, compression: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """The decompressed stream, and the errors of damaged bytes that it raises."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb"), (zlib.error, EOFError, gzip.BadGzipFile)
    if compression == "bzip2":
        return _Concatenated(raw, bz2.BZ2Decompressor, "bzip2"), (EOFError, OSError)
    if compression == "xz":
        return _Concatenated(raw, _xz_decoder, "xz"), (EOFError, lzma.LZMAError)
    if compression == "brotli":
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), "brotli"), (OSError, pa.ArrowException)
    if compression == "snappy":
        return _SnappyBlock(raw), (EOFError,)
    with optional_import("zstandard", "a zstd shard"):
        import zstandard

    frames = ZstdFrames(raw)
    stream = zstandard.ZstdDecompressor().stream_reader(
        cast("BinaryIO", frames), read_across_frames=True, closefd=False
    )
    return _WholeFrames(stream, frames), (zstandard.ZstdError, EOFError)


class _SnappyBlock:
    """The content of a block of Snappy, which is decompressed as a whole."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._content: BinaryIO | None = None

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, none only at the end; `EOFError` if the block is damaged or larger than `MAX_SNAPPY`."""
        if self._content is None:
            packed = self._raw.read(MAX_SNAPPY + 1)
            number = re.match(rb"[\x80-\xff]{0,4}[\0-\x7f]", packed)  # the size, 7 bits per byte
            content_size = sum((byte & 0x7F) << 7 * at for at, byte in enumerate(number[0])) if number else 0
            if max(content_size, len(packed)) > MAX_SNAPPY:
                limit = f"at most {MAX_SNAPPY:,} are read of a file in Snappy"
                raise EOFError(f"it holds {max(content_size, len(packed)):,} bytes, {limit}: compress it with zstd")
            try:
                self._content = io.BytesIO(pa.Codec("snappy").decompress(packed, content_size))
            except (OSError, pa.ArrowException) as error:
                raise EOFError(f"the block of Snappy is damaged: {first_line(error)}") from error
        return self._content.read(size)

    def close(self) -> None:
        """Releases the content."""
        self._content = None


def _xz_decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MAX_XZ_MEMORY)


class _Concatenated:
    """Streams of bzip2 or xz one after the other, as their tools and their parallel versions write them.

    Unlike `bz2.BZ2File` and `lzma.LZMAFile` it does not ignore bytes after a stream that are not another one.

    Args:
        raw: the compressed bytes.
        decoder: makes the decompressor of one stream.
        name: of the format, for messages.
    """

    def __init__(self, raw: BinaryIO, decoder: Callable[[], Any], name: str) -> None:
        self._raw = raw
        self._new = decoder
        self._name = name
        self._decoder = decoder()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, none only at the end.

        Raises:
            EOFError: the file ends inside a stream, or holds something else after one.
        """
        while True:
            if self._decoder.eof:
                rest = self._decoder.unused_data or self._raw.read(RAW_CHUNK)
                while rest and not rest.strip(b"\0"):  # xz pads between streams, and tapes after them
                    rest = self._raw.read(RAW_CHUNK)
                if not rest:
                    return b""
                self._decoder = self._new()
                try:
                    found = self._decoder.decompress(rest.lstrip(b"\0"), size)
                except (OSError, lzma.LZMAError) as error:
                    raise EOFError(f"bytes after the {self._name} stream are not another one") from error
            else:
                data = b""
                if self._decoder.needs_input:
                    data = self._raw.read(RAW_CHUNK)
                    if not data:
                        raise EOFError(f"the {self._name} stream is unfinished: the file ends inside it")
                found = self._decoder.decompress(data, size)
            if found:
                return bytes(found)

    def close(self) -> None:
        """Releases the decompressor."""
        self._decoder = self._new()


def _is_skippable(head: bytes) -> bool:
    return head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F


class ZstdFrames:
    """The bytes of a zstd file as they are, followed from frame to frame: zstandard does not tell an unfinished one.

    The format is in RFC 8878, section 3.1.

    Args:
        raw: the compressed bytes.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._held = b""  # of a header that is not complete yet
        self._pass = 0  # bytes to the next header
        self._checksum = 0
        self._expect(4, self._magic)

    @property
    def whole(self) -> bool:
        """Whether the bytes that were read end where a frame does."""
        return self._parse == self._magic and not self._pass and not self._held

    def read(self, size: int = -1) -> bytes:
        """The next bytes of the file."""
        data = self._raw.read(size)
        at = 0
        while at < len(data):
            step = min(self._pass, len(data) - at)
            self._pass -= step
            at += step
            if self._pass:
                break
            part = data[at : at + self._need - len(self._held)]
            self._held += part
            at += len(part)
            if len(self._held) == self._need:
                held, self._held = self._held, b""
                self._parse(held)
        return data

    def _expect(self, need: int, parse: Callable[[bytes], None]) -> None:
        self._need, self._parse = need, parse

    def _magic(self, head: bytes) -> None:
        if _is_skippable(head):
            self._expect(4, self._skippable)
        else:
            self._expect(1, self._descriptor)  # of anything else zstandard says what it is

    def _skippable(self, size: bytes) -> None:
        (self._pass,) = struct.unpack("<I", size)
        self._expect(4, self._magic)

    def _descriptor(self, flags: bytes) -> None:
        single, self._checksum = flags[0] >> 5 & 1, 4 * (flags[0] >> 2 & 1)
        size_bytes = (single, 2, 4, 8)[flags[0] >> 6]
        self._pass = (1 - single) + (0, 1, 2, 4)[flags[0] & 3] + size_bytes
        self._expect(3, self._block)

    def _block(self, header: bytes) -> None:
        value = int.from_bytes(header, "little")
        last, kind, size = value & 1, value >> 1 & 3, value >> 3
        self._pass = 1 if kind == 1 else size  # of a run one byte is stored
        if last:
            self._pass += self._checksum
            self._expect(4, self._magic)


class _WholeFrames:
    """A zstd stream whose end is an error if the last frame is unfinished."""

    def __init__(self, stream: Any, frames: ZstdFrames) -> None:
        self._stream = stream
        self._frames = frames

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, none only at the end; `EOFError` if the file ends inside a frame."""
        data: bytes = self._stream.read(size)
        if not data and size and not self._frames.whole:
            raise EOFError("the zstd frame is unfinished: the file ends inside it")
        return data

    def close(self) -> None:
        """Closes the stream."""
        self._stream.close()
