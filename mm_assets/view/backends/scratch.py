"""Contents that cannot be read again where they are, in a file without a name that goes with the process."""

from __future__ import annotations

import os
import tempfile

from mm_assets.errors import SourceError, full_disk_named

__all__ = ["Scratch"]

MAX_BYTES = 4 << 30


class Scratch:
    """An append-only temporary file, read by ranges from several threads.

    Args:
        max_bytes: that it may take.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._limit = max_bytes
        self._file = tempfile.TemporaryFile(prefix="mm-assets-view-")  # noqa: SIM115  # `close` does
        self._end = 0

    def put(self, content: bytes) -> int | None:
        """Where a content is from now on; None where it would be more than the limit.

        Raises:
            SourceError: the disk is full.
        """
        if self._end + len(content) > self._limit:
            return None
        with full_disk_named(tempfile.gettempdir()):
            self._file.write(content)
            self._file.flush()
        start, self._end = self._end, self._end + len(content)
        return start

    def read(self, offset: int, size: int) -> bytes:
        """The bytes of a range that was put; `SourceError` if the file is closed or shorter."""
        data = b"" if self._file.closed else os.pread(self._file.fileno(), size, offset)
        if len(data) != size:
            raise SourceError(tempfile.gettempdir(), "the viewer's temporary file is gone: start it again")
        return data

    def close(self) -> None:
        """Releases the file."""
        self._file.close()
