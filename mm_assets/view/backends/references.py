"""Reads the contents that rows name in shards and files, if the rows may name them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mm_assets.display import Content
from mm_assets.errors import SourceError
from mm_assets.rows.columns import row_tuples
from mm_assets.rows.source_ref import SourceRef, is_allowed_reference
from mm_assets.sources.compressed import decompress, is_compressed
from mm_assets.storage.files import SourceFile
from mm_assets.storage.urls import is_local, redirects_only_to
from mm_assets.view.backends.row_files import MAX_WHOLE, RowFile

__all__ = ["References", "below"]

MAX_OPEN = 32  # files
MAX_CACHED_BYTES = 128 << 20  # of contents that are not one range of a file; others are read again
MAX_REFS_PER_PASS = 64  # contents of a page that one pass over their file reads


class References:
    """Opens what rows refer to.

    Args:
        table: the rows.
        is_allowed: whether a row may name a path or URL beside its own file: a table is not trusted.
        storage_options: arguments for the URLs' file system.
    """

    def __init__(
        self, table: RowFile, is_allowed: Callable[[str], bool], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._table = table
        self._is_allowed = is_allowed
        self._options = storage_options
        self._lock = threading.Lock()
        self._open: OrderedDict[str, SourceFile] = OrderedDict()
        self._reading = threading.Lock()  # guards `_cached` and `_next_refs`
        self._cached: OrderedDict[SourceRef, bytes] = OrderedDict()
        self._next_refs: Sequence[SourceRef] = ()  # that requests will ask for

    def content(self, ref: SourceRef) -> Content:
        """Returns the content that a locator names, which is read in parts if it is one range of a file.

        Raises:
            SourceError: it names nothing, a file that rows may not name, or a file that cannot be read.
        """
        if ref.path is None:
            raise SourceError("source_ref", "names no file")
        if ref.path != self._table.file.url and not self._is_allowed(ref.path):
            detail = "is named by a row, but is neither a shard of the dataset nor below the folder of the table"
            raise SourceError(ref.path, detail)
        path, ref = ref.path, ref._replace(frame_index=None)
        if not is_ranged(ref):
            return Content(len(self._whole(ref)), lambda at, size: self._whole(ref)[at : at + size])
        file = self._file(path)
        start, size = (0, file.size) if ref.byte_offset is None else (ref.byte_offset, ref.byte_size or 0)
        file.check(start, size)
        # Each read opens the file again if it is no longer open: a sample may name hundreds of files.
        return Content(size, lambda at, count: self._file(path).read(start + at, count))

    def expect(self, refs: Iterable[SourceRef]) -> None:
        """Announces the contents that will be requested next, so that one pass over their file reads them all."""
        self._next_refs = [ref._replace(frame_index=None) for ref in refs if not is_ranged(ref)][:MAX_REFS_PER_PASS]

    def _whole(self, ref: SourceRef) -> bytes:
        """Returns a content that is not one range of a file: from memory, or read with those announced."""
        with self._reading:
            if ref in self._cached:
                self._cached.move_to_end(ref)
                return self._cached[ref]
            if self._table.is_stream and ref.path == self._table.file.url and ref.member is not None:
                content = self._table.stream_content(ref.member)
                content = decompress(content, ref.member, MAX_WHOLE) if is_compressed(ref.member) else content
                self._cache(ref, content)
                return content
            others = [one for one in self._next_refs if one.path == ref.path and one not in self._cached and one != ref]
            self._next_refs = ()
            return self._extract(ref, others)

    def _extract(self, ref: SourceRef, others: Sequence[SourceRef]) -> bytes:
        import pyarrow as pa

        from mm_assets.rows.materialize import MaterializeStream
        from mm_assets.rows.schema import MULTIMODAL_SCHEMA

        refs = [ref, *others]
        rows = [{"sample_id": "", "position": 0, "modality": "binary", "source_ref": one.to_json()} for one in refs]
        batches = MaterializeStream(
            [pa.RecordBatch.from_pylist(rows, schema=MULTIMODAL_SCHEMA)],
            open_file=self._file,
            allowed=lambda _path: True,  # `content` has checked it
            max_content_bytes=MAX_WHOLE,
        )
        results = (result for batch in batches for result in row_tuples(batch, "binary_content", "materialize_error"))
        requested, error = next(results)
        for other, (content, _) in zip(others, results, strict=True):
            if content is not None:
                self._cache(other, content)
        if requested is None:
            raise SourceError(ref.path, error.removeprefix(f"{ref.path}, member {ref.member!r}: "), member=ref.member)
        self._cache(ref, requested)
        return bytes(requested)

    def _cache(self, ref: SourceRef, content: bytes) -> None:
        self._cached[ref] = content
        total = sum(map(len, self._cached.values()))
        while total > MAX_CACHED_BYTES and len(self._cached) > 1:
            total -= len(self._cached.popitem(last=False)[1])

    def _file(self, path: str) -> SourceFile:
        if path == self._table.file.url:
            return self._table.file
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
            for file in self._open.values():
                file.close()
            self._open.clear()


def below(prefixes: Iterable[str]) -> Callable[[str], bool]:
    """Returns whether a path or URL is below one of the prefixes, also after its symbolic links were followed."""
    allowed = tuple(prefixes)
    real = tuple(
        os.path.realpath(one) + ("/" if one.endswith("/") else "") if is_local(one) else one for one in allowed
    )

    def is_below(path: str) -> bool:
        if not is_allowed_reference(path, allowed):
            return False
        return not is_local(path) or is_allowed_reference(os.path.realpath(path), real)

    return is_below


def is_ranged(ref: SourceRef) -> bool:
    """Whether a content is a range of a file, or a whole one, as it is."""
    return (ref.member is None or ref.byte_offset is not None) and not is_compressed(ref.member or ref.path)
