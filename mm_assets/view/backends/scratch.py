"""Contents that cannot be read by ranges where they are: in a file without a name, or held in memory."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable

from mm_assets.display import Content
from mm_assets.errors import SourceError, full_disk_named

__all__ = ["HeldContents", "Scratch"]

MAX_BYTES = 4 << 30
MAX_HELD = 128 << 20


class Scratch:
    """An append-only temporary file, read by ranges from several threads.

    Args:
        max_bytes: that it may take.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._limit = max_bytes
        self._file = tempfile.TemporaryFile(prefix="mm-assets-view-")  # noqa: SIM115  # `close` does
        weakref.finalize(self, self._file.close)  # it is dropped unclosed while others read it
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


class HeldContents:
    """Contents that are computed, such as a decompressed member: the last ones are held, others computed again.

    Items are cached, and hundreds of a sample must not hold their contents.

    Args:
        max_bytes: that are held; the last content always is.
    """

    def __init__(self, max_bytes: int = MAX_HELD) -> None:
        self._limit = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, bytes] = OrderedDict()

    def content(self, key: Hashable, make: Callable[[], bytes]) -> Content:
        """A content that is computed now, and again where it is read once it is no longer held."""
        return Content(len(self._get(key, make)), lambda at, size: self._get(key, make)[at : at + size])

    def _get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        made = make()
        with self._lock:
            self._held[key] = made
            total = sum(map(len, self._held.values()))
            while total > self._limit and len(self._held) > 1:
                total -= len(self._held.popitem(last=False)[1])
        return made
