"""The content that a row of a table names in a shard or file: followed only where that is allowed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mm_assets.display import Content
from mm_assets.errors import SourceError
from mm_assets.rows.source_ref import SourceRef
from mm_assets.sources.base import open_container
from mm_assets.storage.files import SourceFile
from mm_assets.storage.urls import redirects_only_to
from mm_assets.view.backends.scratch import HeldContents

__all__ = ["References"]

MAX_OPEN = 32  # files
MAX_WHOLE = 64 << 20  # bytes of a member that is read by a pass over its shard


class References:
    """Opens what rows refer to.

    Args:
        is_allowed: whether a row may name a path or URL: a table is not trusted.
        storage_options: arguments for the URLs' file system.
    """

    def __init__(self, is_allowed: Callable[[str], bool], storage_options: Mapping[str, Any] | None = None) -> None:
        self._is_allowed = is_allowed
        self._options = storage_options
        self._lock = threading.Lock()
        self._held = HeldContents()
        self._open: OrderedDict[str, SourceFile] = OrderedDict()

    def content(self, ref: SourceRef) -> Content:
        """What a locator names, in parts where it is one range of a file.

        Raises:
            SourceError: it names nothing, a file that it may not name, or one that cannot be read.
        """
        if ref.path is None:
            raise SourceError("source_ref", "names no file")
        if not self._is_allowed(ref.path):
            detail = "is named by a row, and is neither a shard of the dataset nor below the folder of the table"
            raise SourceError(ref.path, detail)
        file = self._file(ref.path)
        if ref.byte_offset is not None and ref.byte_size is not None:
            file.check(ref.byte_offset, ref.byte_size)
            return self._range(ref.path, ref.byte_offset, ref.byte_size)
        if ref.member is None:
            return self._range(ref.path, 0, file.size)
        return self._held.content((ref.path, ref.member), partial(self._member, ref.path, ref.member))

    def _range(self, path: str, start: int, size: int) -> Content:
        """A range of a file, which each read opens again if it is no longer open: a sample may name hundreds."""
        return Content(size, lambda offset, count: self._file(path).read(start + offset, count))

    def _member(self, path: str, member: str) -> bytes:
        return _member_of(self._file(path), member)

    def _file(self, path: str) -> SourceFile:
        with self._lock:
            file = self._open.get(path)
            if file is None:
                options = redirects_only_to(self._is_allowed, path, self._options)
                file = self._open[path] = SourceFile(path, options)
                while len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)  # it is closed when nothing reads it any more
            self._open.move_to_end(path)
            return file

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            _close(self._open.values())
            self._open.clear()


def _member_of(file: SourceFile, wanted: str) -> bytes:
    """The content of a member, by a pass over its shard."""
    for _, content in open_container(file).payloads(
        wanted=lambda one: one.member == wanted, max_bytes=MAX_WHOLE, on_damaged_shard="salvage"
    ):
        return content
    raise SourceError(file.url, "the shard has no such member", member=wanted)


def _close(files: Iterable[SourceFile]) -> None:
    for file in files:
        file.close()
