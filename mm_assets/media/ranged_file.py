"""A large file for a demuxer, read by ranges as it asks, within limits of bytes and time.

Only for a look at it: damage between the ranges is not found. What the checks of `mm_assets.media.video` need of a file
is read too, and held as a buffer of the file's size in which all else is zero and takes no memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mm_assets.errors import MediaError

__all__ = ["RangedFile"]

MAX_SIZE = 64 << 30  # of the file: the buffer for the checks has addresses for all of it
MAX_HEADER = 32 << 20  # bytes of the boxes of an MP4 that are not its media
_MAX_BOXES = 20_000
_BLOCK = 1 << 16  # bytes that are read at least
_HEAD = 1 << 16  # bytes by which the type is known


class RangedFile:
    """A file that is read by ranges. For one reader at a time.

    Args:
        size: of the file, in bytes.
        read: takes an offset and a size within it, returns the bytes there.
        max_bytes: that are read at most.
        seconds: after which nothing more is read.
    """

    def __init__(
        self, size: int, read: Callable[[int, int], bytes], *, max_bytes: int = 64 << 20, seconds: float = 8.0
    ) -> None:
        self.size = size
        self._read = read
        self._left = max_bytes
        self._ends = time.monotonic() + seconds
        self._at = 0
        self._block = 0, b""  # the last one that was read, and where it is
        self.start = 0  # of what a demuxer sees

    @property
    def is_over(self) -> bool:
        """Whether nothing more is read."""
        return self._left < 0 or time.monotonic() > self._ends

    def bytes_at(self, offset: int, size: int) -> bytes:
        """A range of the file, shorter at its end.

        Raises:
            MediaError: more than the limits allow was read.
        """
        size = max(0, min(size, self.size - offset))
        start, block = self._block
        if start <= offset and offset + size <= start + len(block):
            return block[offset - start : offset - start + size]
        wanted = min(max(size, _BLOCK), self.size - offset)
        self._left -= wanted
        if self.is_over:
            raise MediaError("<video>", "takes too many bytes or too long to be looked at")
        block = self._read(offset, wanted)
        self._block = offset, block
        return block[:size]

    def head(self) -> memoryview:
        """The first bytes."""
        return memoryview(self.bytes_at(0, _HEAD))

    def boxes(self) -> memoryview:
        """An MP4 in which all media are zero: its boxes are as in the file.

        Raises:
            MediaError: it has too many boxes, or too many bytes in them.
        """
        if self.size > MAX_SIZE:
            raise MediaError("<video>", f"has {self.size:,} bytes, at most {MAX_SIZE:,} are looked at")
        sparse = np.zeros(self.size, np.uint8)
        at, held = 0, 0
        for _ in range(_MAX_BOXES):
            if at + 8 > self.size:
                return sparse.data
            head = self.bytes_at(at, 16)
            size, kind = int.from_bytes(head[:4], "big"), head[4:8]
            if size == 1:
                size = int.from_bytes(head[8:16], "big")
            stop = self.size if size == 0 else min(at + size, self.size)
            if stop < at + 8:
                return sparse.data
            content = head if kind == b"mdat" else b""
            if kind != b"mdat":
                held += stop - at
                if held > MAX_HEADER:
                    raise MediaError("<video>", f"has more than {MAX_HEADER:,} bytes beside its media")
                content = self.bytes_at(at, stop - at)
            sparse[at : at + len(content)] = np.frombuffer(content, np.uint8)
            at = stop
        raise MediaError("<video>", f"has more than {_MAX_BOXES:,} boxes")

    # What PyAV asks of a file.

    def read(self, size: int) -> bytes:
        """The next bytes; none where the limits are reached, as at the end of a file: PyAV drops some exceptions."""
        try:
            found = self.bytes_at(self.start + self._at, size)
        except MediaError:
            return b""
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        """Goes to a position."""
        self._at = max(0, offset + (0, self._at, self.size - self.start)[whence])
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at
