"""Arrow streams and files that hold files, as `datasets.Dataset.save_to_disk` writes them: rows as of Parquet.

A record batch is in memory while its rows are read: `datasets` writes 100 rows of media, or 1,000 others, into each.
Nothing in the file is trusted: every batch is validated before a value of it is read.
"""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa

from mm_assets.errors import ShardError, SourceError, first_line
from mm_assets.sources.arrow_rows import ArrowRows, cell_columns
from mm_assets.sources.features import METADATA_KEY, read_features
from mm_assets.sources.member import Member, OnDamage, ShardDamage
from mm_assets.sources.parquet import PARQUET_ERRORS as ARROW_ERRORS
from mm_assets.sources.row_members import KEY_COLUMN, Entry, read_entries
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile

__all__ = ["ArrowSource"]

_FILE_MAGIC = b"ARROW1\0\0"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream
_CONTINUATION = 0xFFFFFFFF  # starts each message of a stream
MAX_SCHEMA_BYTES = 16 << 20


class ArrowSource:
    """An Arrow stream or file whose cells are members; see `mm_assets.sources.base.Source`.

    Attributes:
        missing_end: what lacks at the end of the file, once `members` has been read to it; None if nothing does.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".arrow",)
    MARKS: ClassVar[tuple[str, ...]] = ("state.json",)
    seekable = False
    text_encoding = "utf-8"

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self.missing_end: str | None = None

    @property
    def file(self) -> SourceFile:
        """The file."""
        return self._file

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Whether the bytes are those of an Arrow file, or the schema of a stream."""
        if head.startswith(_FILE_MAGIC):
            return True
        mark, size = struct.unpack_from("<Ii", head) if len(head) >= 8 else (0, 0)
        return bool(mark == _CONTINUATION and 0 < size <= MAX_SCHEMA_BYTES and size % 8 == 0)

    @classmethod
    def confirms(cls, file: SourceFile) -> bool:
        """Whether the rows are samples: they have cells, keys, or the metadata of `datasets`."""
        try:
            schema = cls(file)._open()[1].schema
        except ShardError:  # which is reported when its members are listed
            return True
        return bool(cell_columns(schema)) or KEY_COLUMN in schema.names or METADATA_KEY in (schema.metadata or {})

    @classmethod
    def shards_in(cls, files: Sequence[ShardFile]) -> Sequence[ShardFile] | None:
        """Returns the Arrow files of a folder that `save_to_disk` wrote, whose `state.json` is beside them."""
        return [file for file in files if file.url.endswith(cls.SUFFIXES)] or None

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Every cell, text, array and JSON of the rows, in order; arguments and errors as `Source.members`.

        "salvage" keeps the record batches before the damage.
        """
        for entry in self._entries(on_damaged_shard, damage):
            yield entry.member

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """The content of chosen members, in one pass over the file; arguments and errors as `Source.payloads`."""
        entries = self._entries(on_damaged_shard, damage)
        yield from read_entries(self.file.url, entries, wanted=wanted, max_bytes=max_bytes, on_error=on_error)

    def _open(self) -> tuple[_Limited, Any, ArrowRows]:
        """The file, a reader of its record batches, and what makes members of their rows.

        Raises:
            ShardError: it is not an Arrow stream or file.
            SourceError: the storage failed.
        """
        stream = _Limited(self.file)
        if not self.accepts(self.file.read(0, min(8, self.file.size))):
            raise ShardError(self.file.url, "is neither an Arrow stream nor an Arrow file", byte_offset=0)
        try:
            if self.file.read(0, 8) == _FILE_MAGIC:
                stream.seek(8)  # a file is a stream between a magic number and a footer, which is not needed
            reader = pa.ipc.open_stream(pa.PythonFile(stream, "r"))
            schema = reader.schema
            folder = posixpath.basename(self.file.url).removesuffix(".arrow") or "rows"
            rows = ArrowRows(self.file.url, folder, schema, read_features(schema))
            return stream, reader, rows
        except SourceError:
            raise
        except ARROW_ERRORS as error:
            raise ShardError(self.file.url, f"its schema cannot be read: {first_line(error)}", byte_offset=0) from error

    def _entries(self, on_damaged: OnDamage, damage: list[ShardDamage] | None) -> Iterator[Entry]:
        self.missing_end = None
        stream, reader, rows = self._open()
        start = 0
        try:
            while True:
                start = stream.at
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    if stream.at < 8 or self.file.read(stream.at - 8, 8) != _END:
                        self.missing_end = "ends without the mark of its end, so batches may be missing"
                    return
                batch.validate(full=True)
                yield from rows.of_batch(batch)
        except SourceError:
            raise
        except ARROW_ERRORS as error:
            detail = f"row {rows.number} or after cannot be read: {first_line(error)}"
            if on_damaged == "fail":
                raise ShardError(self.file.url, detail, byte_offset=start) from error
            size = self.file.size - start
            if damage is not None:
                damage.append(ShardDamage(byte_offset=start, byte_size=size, detail=detail))
            yield rows.lost(f"bytes from {start}", size, detail)


class _Limited:
    """The bytes of a file for Arrow, which asks for as many as a damaged message states."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self.at = 0
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        left = self._file.size - self.at
        content = self._file.read(self.at, left if size < 0 else min(size, left))
        self.at += len(content)
        return content

    def tell(self) -> int:
        return self.at

    def seek(self, position: int) -> int:
        self.at = position
        return position

    def close(self) -> None:
        self.closed = True
