"""How much of an audio file's samples is there: the size in its header is compared with the file.

A truncated file decodes, up to where it ends, without an error of the decoder. Layouts: RIFF and RF64, AIFF, Sun AU,
CAF, Sony Wave64. Those of video files are in `mm_assets.media.container_damage`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mm_assets.media.content_types import Buffer
from mm_assets.media.header import MAX_SEGMENTS

__all__ = ["Extent", "extent_of", "is_streamed_size", "wav_with_size"]

_W64_DATA: Final = b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of a file's media is there.

    Attributes:
        there: bytes of samples.
        claimed: bytes that the header promises.
    """

    there: int
    claimed: int

    @property
    def is_whole(self) -> bool:
        """Whether everything is there."""
        return self.there >= self.claimed


def is_streamed_size(size: int) -> bool:
    """Whether a 32-bit size of a RIFF or AIFF is that of a writer that could not seek back: about 2 or 4 GiB."""
    return size >= 0xFFFFFF00 or 0x7F000000 <= size <= 0x80000000


def extent_of(data: Buffer, codec: str) -> Extent | None:
    """The extent of a file by its headers; None where they have no size, as in streams that were recorded live.

    Args:
        data: the file's bytes.
        codec: ``wav``, ``aiff``, ``au``, ``caf`` or ``w64``.
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
            return None if size == 0 or is_streamed_size(size) else _of_chunk(view, at + 8, size)
        at += 8 + size + (size & 1)
    return None


def wav_with_size(view: memoryview) -> Buffer:
    """The WAV itself, or, if its samples have a size of 0, as a stopped recorder leaves it, a copy with their size."""
    at = 12
    for _ in range(MAX_SEGMENTS):
        if at + 8 > len(view):
            break
        kind, size = struct.unpack_from("<4sI", view, at)
        if kind == b"data":
            if size or at + 8 == len(view):
                break
            copy = bytearray(view)
            struct.pack_into("<I", copy, at + 4, min(len(view) - at - 8, 0xFFFFFFFF))
            return copy
        at += 8 + size + (size & 1)
    return view


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


_READERS: dict[str, Callable[[memoryview], Extent | None]] = {
    "wav": _wav,
    "aiff": _aiff,
    "au": _au,
    "caf": _caf,
    "w64": _w64,
}
