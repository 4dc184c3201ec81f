"""Files that are hashed while they are written or read, so that their bytes are not read again for their digest."""

from __future__ import annotations

import hashlib
import io
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["BlockDigest", "HashedFile", "file_state"]

_BEHIND = 4  # blocks that may be written and not hashed yet
_ONE_CALL = 256 << 10  # bytes of one call of the operating system, as in `formats.output`
_LARGE = 4 << 20  # bytes of a block after which the writer waits: blocks in the queue are held in memory


def file_state(status: os.stat_result) -> tuple[int, int, int, int]:
    """What changes when a file is written or replaced: inode, size, and both times in nanoseconds."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class BlockDigest:
    """The SHA-256 of blocks, computed in a thread beside the work of the caller; leaving the `with` block ends it."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        self._behind: deque[Future[None]] = deque()

    def __enter__(self) -> BlockDigest:
        return self

    def __exit__(self, *_: object) -> None:
        self._hashing.shutdown()

    def update(self, block: Any) -> None:
        """Adds a block: bytes, or a buffer that the caller does not change afterwards.

        Raises:
            MemoryError: an earlier block could not be hashed.
        """
        self._behind.append(self._hashing.submit(self._digest.update, block))
        self.wait(0 if memoryview(block).nbytes > _LARGE else _BEHIND)

    def wait(self, most: int = 0) -> None:
        """Waits until at most so many blocks are not hashed; raises what hashing one raised."""
        while len(self._behind) > most:
            self._behind.popleft().result()

    @property
    def sha256(self) -> str:
        """The digest of the blocks so far, hexadecimal; `MemoryError` if one of them could not be hashed."""
        self.wait()
        return self._digest.hexdigest()


class HashedFile(io.RawIOBase):
    """A new file, written from its first byte to its last, with the SHA-256 of what was written.

    The digest is computed in a thread, beside the writing.

    Args:
        path: the file; an existing one is replaced.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb", buffering=0)
        self._digest = BlockDigest()

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, block: Any, /) -> int:
        """Writes all of a block: bytes, or a buffer that the caller does not change afterwards.

        Raises:
            OSError: the disk is full, or the file cannot be written.
            MemoryError: an earlier block could not be hashed.
        """
        view = memoryview(block).cast("B")
        written = 0
        while written < len(view):
            written += self._file.write(view[written : written + _ONE_CALL])
        self._digest.update(block)
        return written

    def close(self) -> None:
        """Closes the file when everything is hashed.

        Raises:
            MemoryError: a block could not be hashed.
        """
        if self.closed:
            return
        try:
            with self._digest:
                self._digest.wait()
        finally:
            self._file.close()
            super().close()

    @property
    def sha256(self) -> str:
        """Digest of everything that was written, hexadecimal; of a closed file."""
        assert self.closed
        return self._digest.sha256
