"""A remote file whose start is read in large blocks that stay in memory: a request costs more than its bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mm_assets.storage.files import SourceFile
from mm_assets.storage.urls import Options

__all__ = ["HeldFile", "read_ahead"]

BLOCK_BYTES = 8 << 20  # of one read where what is wanted is near: about as long as the request itself takes
LONE_BYTES = 64 << 10  # of one read elsewhere: a header, a JSON after it and the next header
NEAR = 1 << 20  # bytes from one wanted place to the next that are passed over by reading them
HELD_BYTES = 64 << 20  # of one file


def read_ahead(step: int) -> int:
    """Bytes of a read that is needed `step` bytes after the last place that was wanted."""
    return BLOCK_BYTES if 0 <= step <= NEAR else LONE_BYTES


class HeldFile(SourceFile):
    """A file of which, if it is remote, each read fetches a block, and the last `HELD_BYTES` stay in memory.

    A local file is read as it is. Arguments, attributes and errors as `SourceFile`; for one thread.
    """

    def __init__(self, url: str, storage_options: Options | None = None) -> None:
        super().__init__(url, storage_options)
        self._blocks: deque[tuple[int, memoryview]] = deque()  # with their first bytes, the newest first
        self._held = 0
        self._last = 0  # first byte of what was wanted last

    def read(self, offset: int, size: int) -> bytes:
        """As `SourceFile.read`, from memory where the bytes are there."""
        return super().read(offset, size) if self.is_local else bytes(self._view(offset, size))

    def read_ranges(self, ranges: Sequence[tuple[int, int]], *, max_gap: int | None = None) -> list[memoryview]:
        """As `SourceFile.read_ranges`, from memory where the bytes are there."""
        if self.is_local:
            return super().read_ranges(ranges, max_gap=max_gap)
        return [self._view(offset, size) for offset, size in ranges]

    def _view(self, offset: int, size: int) -> memoryview:
        self.check(offset, size)
        step, self._last = offset - self._last, offset
        for start, block in self._blocks:
            if start <= offset and offset + size <= start + len(block):
                return block[offset - start : offset - start + size]
        length = min(max(size, read_ahead(step)), self.size - offset)
        block = memoryview(super().read(offset, length))
        self._blocks.appendleft((offset, block))
        self._held += length
        while self._held > HELD_BYTES and len(self._blocks) > 1:
            self._held -= len(self._blocks.pop()[1])
        return block[:size]
