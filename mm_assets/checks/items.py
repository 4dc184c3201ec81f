"""Single items, read again from local shards and files by their locators: nothing that the pipeline noted is trusted.

An item that lies in a remote file is not read again, since each request costs money; nor is one of a compressed or
sparse archive, which would have to be read through.
"""

from __future__ import annotations

import os
from contextlib import suppress

from mm_assets.checks.context import CheckContext
from mm_assets.errors import SourceError
from mm_assets.media.content_types import Buffer
from mm_assets.media.pdf import Frames, frames_of
from mm_assets.rows.source_ref import SourceRef, is_allowed_reference, of_own_file
from mm_assets.sources.compressed import decompress, is_compressed
from mm_assets.storage.files import SourceFile
from mm_assets.storage.urls import is_local, local_path

__all__ = ["StoredItems"]


class StoredItems:
    """Reads items of one partition again; of several frames of a TIFF, or pages of a PDF, in a row the file once.

    Args:
        context: the partition.
    """

    def __init__(self, context: CheckContext) -> None:
        self._shards = {shard.file.url: shard.file for shard in context.shards if shard.file.is_local}
        folders = (folder for listing in context.listings for folder in listing.folders)
        self._allowed = (*context.layout.prefixes, *folders, *(url for url in self._shards if url.endswith("/")))
        self._max_bytes = context.max_content_bytes
        self._pdf_dpi = context.layout.pdf_dpi
        self._frames: tuple[SourceRef, Frames] | None = None

    def read(self, item: SourceRef, *, changed_before_ns: int | None = None) -> Buffer | None:
        """The content of an item; None where it is not to be read again.

        Args:
            item: where it is.
            changed_before_ns: leave out a file beside the shards that changed later, in nanoseconds since 1970.

        Raises:
            SourceError: the item is empty, too large, or cannot be read.
            MediaError: it is not a frame of its TIFF or a page of its PDF.
        """
        file = item._replace(frame_index=None)
        if item.frame_index is not None and self._frames is not None and self._frames[0] == file:
            return self._frames[1].extract(item.frame_index)
        content = self._stored(item, changed_before_ns)
        if content is None:
            return None
        name = item.member or item.path or ""
        if is_compressed(name):
            content = decompress(content, name, self._max_bytes)
        if not 0 < len(content) <= self._max_bytes:
            raise SourceError(item.path, f"holds {len(content)} bytes, allowed are 1 to {self._max_bytes}")
        frames = None if item.frame_index is None else frames_of(content, pdf_dpi=self._pdf_dpi)
        if item.frame_index is None or frames is None:
            return content
        self._frames = file, frames
        return frames.extract(item.frame_index)

    def _stored(self, item: SourceRef, changed_before_ns: int | None) -> bytes | None:
        item = of_own_file(item)
        shard = self._shards.get(item.path or "")
        if shard is not None:
            if item.byte_offset is None or item.byte_size is None:
                return None
            return self._range(shard, item.byte_offset, item.byte_size)
        path = item.path
        if path is None or item.member is not None or not is_local(path):
            return None
        if not is_allowed_reference(path, self._allowed):
            return None
        if changed_before_ns is not None:
            with suppress(OSError):  # a file that is missing is opened, which fails as it should
                if os.stat(local_path(path)).st_ctime_ns > changed_before_ns:
                    return None
        with SourceFile(path) as file:
            size = file.size if item.byte_size is None else item.byte_size
            if item.byte_offset is None and size != file.size:
                raise SourceError(path, f"holds {file.size} bytes, the source_ref says {size}")
            return self._range(file, item.byte_offset or 0, size)

    def _range(self, file: SourceFile, offset: int, size: int) -> bytes:
        if not 0 < size <= self._max_bytes or offset + size > file.size:
            raise SourceError(file.url, f"{size} bytes are not an item of it", byte_offset=offset)
        return file.read(offset, size)
