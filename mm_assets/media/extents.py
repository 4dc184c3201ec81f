"""Whether the bytes of a container are all there: the sizes in its own headers are compared with the file.

A truncated file often decodes, up to where it ends, without an error of the decoder. Layouts: RIFF, AIFF, Sun AU, CAF,
Sony Wave64; ISO 14496-12 (MP4), RFC 8794 (EBML, for Matroska and WebM), Microsoft's ASF, RFC 3533 (Ogg).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer
from mm_assets.media.header import MAX_SEGMENTS

__all__ = ["Extent", "OggStream", "extent_of", "is_streamed_size", "read_ogg"]

_UNKNOWN_EBML = {(1 << 7 * width) - 1: width for width in range(1, 9)}
_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
_ASF_HEADER_SIZE = 24  # an identifier of 16 bytes and a size
_W64_RIFF: Final = b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\x00\x00"
_W64_DATA: Final = b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a"
_OGG_PAGE = struct.Struct("<4sBBqIIIB")
_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of a file's media is there.

    Attributes:
        there: bytes of media, or of the file where the header has only the size of all.
        claimed: bytes that the header promises.
    """

    there: int
    claimed: int

    @property
    def is_whole(self) -> bool:
        """Whether everything is there."""
        return self.there >= self.claimed


def is_streamed_size(size: int) -> bool:
    """Whether a 32-bit size of a RIFF is that of a writer that could not seek back: about 2 or 4 GiB."""
    return size >= 0xFFFFFF00 or 0x7FFFF000 <= size <= 0x80000000


def extent_of(data: Buffer, codec: str) -> Extent | None:
    """The extent of a file by its headers; None where they have no size, as in streams that were recorded live.

    Args:
        data: the file's bytes.
        codec: ``wav``, ``aiff``, ``au``, ``caf``, ``w64``, ``mp4``, ``matroska`` or ``asf``.
    """
    view = memoryview(data).cast("B")
    return _READERS[codec](view)


def _of_chunk(view: memoryview, body: int, size: int) -> Extent:
    return Extent(there=max(0, min(len(view) - body, size)), claimed=size)


def _wav(view: memoryview) -> Extent | None:
    at, size64 = 12, None
    for _ in range(MAX_SEGMENTS):
        if at + 8 > len(view):
            break
        kind, size = struct.unpack_from("<4sI", view, at)
        if kind == b"ds64" and at + 24 <= len(view):
            (size64,) = struct.unpack_from("<Q", view, at + 16)
        elif kind == b"data":
            if size == 0xFFFFFFFF and size64 is not None:
                return _of_chunk(view, at + 8, size64)
            return None if is_streamed_size(size) else _of_chunk(view, at + 8, size)
        at += 8 + size + (size & 1)
    return None


def _aiff(view: memoryview) -> Extent | None:
    at = 12
    for _ in range(MAX_SEGMENTS):
        if at + 8 > len(view):
            break
        kind, size = struct.unpack_from(">4sI", view, at)
        if kind == b"SSND":
            # The samples follow an offset and a block size, 8 bytes.
            return None if size < 8 or is_streamed_size(size) else _of_chunk(view, at + 16, size - 8)
        at += 8 + size + (size & 1)
    return None


def _au(view: memoryview) -> Extent | None:
    if len(view) < 24:
        return None
    start, size = struct.unpack_from("<II" if view[0] == ord("d") else ">II", view, 4)
    return None if size == 0xFFFFFFFF else _of_chunk(view, start, size)


def _caf(view: memoryview) -> Extent | None:
    at = 8
    for _ in range(MAX_SEGMENTS):
        if at + 12 > len(view):
            break
        kind, size = struct.unpack_from(">4sq", view, at)
        if kind == b"data":
            return None if size < 0 else _of_chunk(view, at + 12, size)
        if size < 0:
            break
        at += 12 + size
    return None


def _w64(view: memoryview) -> Extent | None:
    at = 40
    for _ in range(MAX_SEGMENTS):
        if at + 24 > len(view):
            break
        (size,) = struct.unpack_from("<Q", view, at + 16)  # with the header
        if bytes(view[at : at + 16]) == _W64_DATA:
            return _of_chunk(view, at + 24, size - 24) if size >= 24 else None
        if size < 24:
            break
        at += size + (-size % 8)
    return None


def _mp4(view: memoryview) -> Extent | None:
    """The end of the last box at the top level."""
    at = 0
    for _ in range(MAX_SEGMENTS):
        if at + 8 > len(view):
            break
        (size,) = struct.unpack_from(">I", view, at)
        if size == 1 and at + 16 <= len(view):
            (size,) = struct.unpack_from(">Q", view, at + 8)
        if size == 0:  # to the end of the file
            return None
        if size < 8 or not bytes(view[at + 4 : at + 8]).isalnum():
            break  # what follows the boxes is not one: trailing bytes
        if at + size > len(view):
            return Extent(there=len(view), claimed=at + size)
        at += size
    return Extent(there=len(view), claimed=at)


def _vint(view: memoryview, at: int, *, is_id: bool) -> tuple[int, int]:
    """An EBML number and its width; width 0 for none."""
    if at >= len(view) or not view[at]:
        return 0, 0
    width = 9 - int(view[at]).bit_length()
    raw = bytes(view[at : at + width])
    if len(raw) < width:
        return 0, 0
    value = int.from_bytes(raw, "big")
    return (value if is_id else value & (1 << 7 * width) - 1), width


def _matroska(view: memoryview) -> Extent | None:
    """The end of the last element of known size, of the segment or of those in it."""
    at = claimed = 0
    for _ in range(16 * MAX_SEGMENTS):
        kind, kind_width = _vint(view, at, is_id=True)
        size, width = _vint(view, at + kind_width, is_id=False)
        if not kind_width or not width:
            break
        body = at + kind_width + width
        is_open = _UNKNOWN_EBML.get(size) == width
        if not is_open:
            claimed = max(claimed, body + size)
        # A segment or a cluster without a size is entered: its children have sizes.
        if is_open and kind not in (_SEGMENT, _CLUSTER):
            break
        at = body if is_open or kind == _SEGMENT else body + size
        if at >= len(view):
            break
    return Extent(there=min(len(view), claimed), claimed=claimed) if claimed else None


def _asf(view: memoryview) -> Extent | None:
    at = 0
    for _ in range(MAX_SEGMENTS):
        if at + _ASF_HEADER_SIZE > len(view):
            break
        (size,) = struct.unpack_from("<Q", view, at + 16)
        if size < _ASF_HEADER_SIZE:
            break
        if at + size > len(view):
            return Extent(there=len(view), claimed=at + size)
        at += size
    return Extent(there=len(view), claimed=at) if at else None


_READERS: dict[str, Callable[[memoryview], Extent | None]] = {
    "wav": _wav,
    "aiff": _aiff,
    "au": _au,
    "caf": _caf,
    "w64": _w64,
    "mp4": _mp4,
    "matroska": _matroska,
    "asf": _asf,
}


# --- Ogg --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OggStream:
    """The pages of an Ogg file.

    Attributes:
        head: the first bytes of its first packet, which name the codec.
        num_pages: whole pages.
        granule: of the last page that has one, in the codec's units; -1 without one.
        problem: what is wrong; "" where nothing is.
    """

    head: bytes
    num_pages: int
    granule: int
    problem: str


def read_ogg(data: Buffer) -> OggStream:
    """Walk an Ogg file's pages and compare their checksums.

    Raises:
        MediaError: it does not begin with a page.
    """
    view = memoryview(data).cast("B")
    at = count = 0
    granule, problem, head = -1, "", b""
    numbers: dict[int, int] = {}  # of the last page of each stream that has not ended
    while at + _OGG_PAGE.size <= len(view):
        magic, version, flags, position, serial, number, checksum, num_segments = _OGG_PAGE.unpack_from(view, at)
        if magic != b"OggS" or version:
            break
        body = at + _OGG_PAGE.size + num_segments
        end = body + sum(view[at + _OGG_PAGE.size : body])
        if body > len(view) or end > len(view):
            problem = problem or f"page {count} has {len(view) - at} of {max(end, body) - at} bytes"
            break
        page = bytearray(view[at:end])
        page[22:26] = bytes(4)
        if _ogg_crc(page) != checksum:
            problem = problem or f"the checksum of page {count} is wrong"
        elif serial in numbers and number != numbers[serial] + 1:
            problem = problem or f"page {numbers[serial] + 1} is missing, found {number}"
        head = head or bytes(view[body : min(end, body + 64)])
        numbers[serial] = number
        if flags & 4:
            del numbers[serial]
        granule = position if position >= 0 else granule
        at = end
        count += 1
    if not count:
        raise MediaError("<audio>", f"Ogg is truncated: {problem}" if problem else "Ogg does not begin with a page")
    if numbers and not problem:
        rest = f"{len(view) - at} bytes that are not a page" if at < len(view) else "the end of the file"
        problem = f"found {rest} after page {count - 1}, expected the page that ends the stream"
    return OggStream(head=head, num_pages=count, granule=granule, problem=problem)


def _ogg_crc(page: bytearray) -> int:
    """Ogg's checksum: zlib's polynomial with the bits in the other order, and without zlib's inversions."""
    crc = zlib.crc32(page.translate(_REVERSED_BITS), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(crc.to_bytes(4, "little").translate(_REVERSED_BITS), "big")
