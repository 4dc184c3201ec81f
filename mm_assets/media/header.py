"""Reads of a media file's header that never go past its end, the structures of a TIFF, and the size of an ID3 tag."""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import Any, NamedTuple

import numpy as np

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer

__all__ = [
    "CHUNK_BE",
    "CHUNK_LE",
    "MAX_SEGMENTS",
    "HeaderReader",
    "TiffLayout",
    "read_tiff_layout",
    "read_tiff_numbers",
    "size_of_id3",
]

MAX_SEGMENTS = 65_536  # segments, chunks, blocks or directories of one header; past it the bytes are hostile

CHUNK_LE = struct.Struct("<4sI")  # RIFF: kind, size
CHUNK_BE = struct.Struct(">I4s")  # PNG and ISO media: size, kind


class HeaderReader:
    """Bytes read by position; a read past the end is a `MediaError`, never a short slice."""

    __slots__ = ("name", "size", "view")

    def __init__(self, data: Buffer, name: str) -> None:
        self.view = memoryview(data).cast("B")
        self.size = len(self.view)
        self.name = name

    def fail(self, reason: str) -> MediaError:
        """The error that names this file."""
        return MediaError(self.name, reason)

    def has(self, offset: int, size: int) -> bool:
        """Whether a range is inside the bytes."""
        return offset >= 0 and offset + size <= self.size

    def starts(self, offset: int, magic: bytes) -> bool:
        """Whether `magic` is at a position."""
        return bytes(self.view[offset : offset + len(magic)]) == magic

    def piece(self, offset: int, size: int, what: str) -> bytes:
        """A copy of a range; `MediaError` if the file is too short."""
        if not self.has(offset, size):
            raise self.fail(f"{what} is truncated: needs {size} bytes at {offset}, there are {self.size}")
        return bytes(self.view[offset : offset + size])

    def take(self, record: struct.Struct, offset: int, what: str) -> tuple[Any, ...]:
        """A record, unpacked; `MediaError` if the file is too short."""
        if not self.has(offset, record.size):
            raise self.fail(f"{what} is truncated: needs {record.size} bytes at {offset}, there are {self.size}")
        return record.unpack_from(self.view, offset)  # `piece` would copy first


def size_of_id3(data: memoryview) -> int:
    """Bytes of the ID3v2 tag at the start, without its footer; 0 for a file without a tag."""
    head = bytes(data[:10])
    if len(head) < 10 or not head.startswith(b"ID3"):
        return 0
    a, b, c, d = head[6:10]
    return 10 + ((a & 127) << 21 | (b & 127) << 14 | (c & 127) << 7 | d & 127)


_TIFF_NUMBERS = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8"}  # types of whole numbers


class TiffLayout(NamedTuple):
    """The structures of a TIFF, by the version and byte order in its header."""

    order: str  # as `struct` spells it
    is_big: bool  # whether it is a BigTIFF
    num_entries: struct.Struct  # at the start of a directory
    entry: struct.Struct  # tag, type, number of values, and the values or their position
    pointer: struct.Struct  # a position in the file
    first: int  # position of the first directory


def read_tiff_layout(head: HeaderReader) -> TiffLayout:
    """Read the header of a TIFF; `MediaError` where it is not one."""
    magic = bytes(head.view[:4])
    order = {b"II*\0": "<", b"MM\0*": ">", b"II+\0": "<", b"MM\0+": ">"}.get(magic)
    if order is None:
        raise head.fail(f"begins with {magic!r}, expected a TIFF header")
    is_big = b"+" in magic
    codes = ("Q", "HHQ8s", "Q") if is_big else ("H", "HHI4s", "I")
    num_entries, entry, pointer = (struct.Struct(order + code) for code in codes)
    (first,) = head.take(pointer, pointer.size, "TIFF header")
    return TiffLayout(order, is_big, num_entries, entry, pointer, first)


def read_tiff_numbers(
    head: HeaderReader, layout: TiffLayout, tags: Container[int], *, max_values: int | None = None
) -> dict[int, list[int]]:
    """Whole numbers of the first directory: of each of the tags the values, of a repeated one the first.

    Args:
        head: the file.
        layout: its structures.
        tags: the tags to read.
        max_values: tags with more values are left out; None reads them all.

    Raises:
        MediaError: the directory, or values of a tag, are not in the file.
    """
    (count,) = head.take(layout.num_entries, layout.first, "TIFF directory")
    start = layout.first + layout.num_entries.size
    if not head.has(start, count * layout.entry.size):
        raise head.fail(f"is truncated: its TIFF directory at byte {layout.first:,} needs {count:,} entries")
    found: dict[int, list[int]] = {}
    for index in range(min(count, MAX_SEGMENTS)):
        where = start + index * layout.entry.size
        tag, kind, number, _ = head.take(layout.entry, where, "TIFF entry")
        if tag not in tags or tag in found or kind not in _TIFF_NUMBERS or not number:
            continue
        if max_values is not None and number > max_values:
            continue
        dtype = np.dtype(layout.order + _TIFF_NUMBERS[kind])
        where += layout.entry.size - layout.pointer.size
        if number * dtype.itemsize > layout.pointer.size:
            (where,) = head.take(layout.pointer, where, "TIFF entry")
        if not head.has(where, number * dtype.itemsize):
            raise head.fail(f"is truncated: TIFF tag {tag} has {number:,} values at byte {where:,}, beyond its end")
        found[tag] = np.frombuffer(head.view, dtype, number, where).tolist()
    return found
