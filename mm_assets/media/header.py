"""Reads of a media file's header that never go past its end."""

from __future__ import annotations

import struct
from typing import Any

from mm_assets.errors import MediaError
from mm_assets.media.content_types import Buffer

__all__ = ["CHUNK_BE", "CHUNK_LE", "MAX_SEGMENTS", "HeaderReader"]

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
        """A copy of a range; `MediaError` where the file is too short."""
        if not self.has(offset, size):
            raise self.fail(f"{what} is truncated: needs {size} bytes at {offset}, there are {self.size}")
        return bytes(self.view[offset : offset + size])

    def take(self, record: struct.Struct, offset: int, what: str) -> tuple[Any, ...]:
        """A record unpacked; `MediaError` where the file is too short."""
        if not self.has(offset, record.size):
            raise self.fail(f"{what} is truncated: needs {record.size} bytes at {offset}, there are {self.size}")
        return record.unpack_from(self.view, offset)
