"""A large file for a decoder, read by ranges as it asks, within limits of bytes and time.

Damage between the ranges is not found. What the checks of `mm_assets.media.video` need of a file
is read too, and held as a buffer of the file's size in which all else is zero and takes no memory.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Self

import numpy as np

from mm_assets.errors import MediaError, MmAssetsError
from mm_assets.media.content_types import Buffer

__all__ = ["RangedFile", "whole_of"]

MAX_SIZE = 64 << 30  # of the file: the buffer for the checks has addresses for all of it
MAX_HEADER = 32 << 20  # bytes of the boxes of an MP4 that are not its media
_MAX_BOXES = 20_000
_BLOCK = 1 << 16  # bytes that are read at least
_HEAD = 1 << 16  # bytes by which the type is known
_KEPT_BLOCKS = 32  # of a file that is decoded: its header is read several times, and a window is in few blocks
WINDOW_BLOCK = 1 << 19  # bytes that are read at least where a file is decoded: a second of most clips


class RangedFile:
    """A file that is read by ranges. For one reader at a time.

    Args:
        size: of the file, in bytes.
        read: takes an offset and a size within it, returns the bytes there.
        max_bytes: that are read at most.
        seconds: after which nothing more is read.
        block: bytes that are read at least.

    Attributes:
        failed: the error of `read` that a decoder did not see: to it the file ends there. Leaving a ``with`` block
            around its use raises it.
    """

    def __init__(
        self,
        size: int,
        read: Callable[[int, int], bytes],
        *,
        max_bytes: int = 64 << 20,
        seconds: float = 8.0,
        block: int = _BLOCK,
    ) -> None:
        self.failed: MmAssetsError | OSError | None = None
        self._least = block
        self.size = size
        self._read = read
        self._left = max_bytes
        self._ends = time.monotonic() + seconds
        self._at = 0
        self._blocks: deque[tuple[int, bytes]] = deque(maxlen=1)  # that were read last, and where they are
        self.start = 0  # of what a demuxer sees

    @classmethod
    def to_decode(cls, size: int, read: Callable[[int, int], bytes]) -> Self:
        """A file that is decoded, not only looked at: without limits."""
        file = cls(size, read, max_bytes=MAX_SIZE, seconds=math.inf, block=WINDOW_BLOCK)
        file._blocks = deque(maxlen=_KEPT_BLOCKS)
        return file

    def part(self, offset: int, size: int) -> RangedFile:
        """A range of the file as a file that is decoded."""
        return RangedFile.to_decode(size, lambda at, count: self._read(offset + at, count))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.failed is not None:
            raise self.failed

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
        for start, block in self._blocks:
            if start <= offset and offset + size <= start + len(block):
                return block[offset - start : offset - start + size]
        wanted = min(max(size, self._least), self.size - offset)
        self._left -= wanted
        if self.is_over:
            raise MediaError("<video>", "takes too many bytes or too long to be looked at")
        block = self._read(offset, wanted)
        self._blocks.appendleft((offset, block))
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
        except (MmAssetsError, OSError) as error:
            self.failed = error
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


def whole_of(data: Buffer | RangedFile) -> memoryview:
    """All bytes of a file."""
    return memoryview(data.bytes_at(0, data.size) if isinstance(data, RangedFile) else data).cast("B")
