"""Arrow streams and files that hold files, as `datasets.Dataset.save_to_disk` writes them: rows as of Parquet.

A record batch is in memory while its rows are read: `datasets` writes 100 rows of media, or 1,000 others, into each.
Nothing in the file is trusted: every batch is validated before a value of it is read.
"""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from mm_assets.errors import ShardError, SourceError, first_line
from mm_assets.sources.arrow_rows import ArrowRows, cell_columns
from mm_assets.sources.entries import Entry, EntrySource, Scan
from mm_assets.sources.features import METADATA_KEY, read_features
from mm_assets.sources.parquet import PARQUET_ERRORS as ARROW_ERRORS
from mm_assets.sources.row_members import KEY_COLUMN
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile

__all__ = ["ArrowSource", "batch_bytes", "read_messages"]

_FILE_MAGIC = b"ARROW1\0\0"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream
_CONTINUATION = 0xFFFFFFFF  # starts each message of a stream
MAX_SCHEMA_BYTES = 16 << 20
MAX_BATCH_BYTES = 2 << 30  # of a compressed record batch with its dictionaries, without the compression
PEEK_BYTES = 16 << 10  # which most messages have before their body
_DICTIONARY, _RECORD_BATCH = 2, 3  # kinds of message
_KIND, _HEADER, _BODY_SIZE = 1, 2, 3  # numbers of fields of the Flatbuffers table `Message`
_DATA = 1  # of `DictionaryBatch`
_BUFFERS, _COMPRESSION = 2, 3  # of `RecordBatch`
_BUFFER_BYTES = 16  # of the struct `Buffer`: first byte and size in the body, both of 64 bits


class ArrowSource(EntrySource):
    """An Arrow stream or file whose cells are members; see `mm_assets.sources.base.Source`.

    Attributes:
        missing_end: what is missing at the end of the file, once its members are listed; None if nothing is.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".arrow",)
    MARKS: ClassVar[tuple[str, ...]] = ("state.json",)
    seekable = False
    text_encoding = "utf-8"
    missing_end: str | None = None

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether the bytes start an Arrow file, or the schema of a stream."""
        if head.startswith(_FILE_MAGIC):
            return True
        mark, size = struct.unpack_from("<Ii", head) if len(head) >= 8 else (0, 0)
        return bool(mark == _CONTINUATION and 0 < size <= MAX_SCHEMA_BYTES and size % 8 == 0)

    @classmethod
    def confirms(cls, file: SourceFile) -> bool:
        """Returns whether the rows are samples: they have cells, keys, or the metadata of `datasets`."""
        try:
            schema = cls(file)._open()[1].schema
        except ShardError:  # which is reported when its members are listed
            return True
        return bool(cell_columns(schema)) or KEY_COLUMN in schema.names or METADATA_KEY in (schema.metadata or {})

    @classmethod
    def shards_in(cls, files: Sequence[ShardFile]) -> Sequence[ShardFile] | None:
        """Returns the Arrow files of a folder that `save_to_disk` wrote, whose `state.json` is beside them."""
        return [file for file in files if file.url.endswith(cls.SUFFIXES)] or None

    def _open(self) -> tuple[_Limited, Any, ArrowRows]:
        """Returns the stream, a reader of its record batches, and what makes members of their rows.

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

    def _entries(self, scan: Scan) -> Iterator[Entry]:
        self.missing_end = None
        stream, reader, rows = self._open()
        start = 0
        try:
            while True:
                start = stream.at
                self._check_size(stream)
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
            size = self.file.size - start
            scan.salvage(self.file.url, detail, byte_offset=start, byte_size=size)
            yield rows.damage_entry(f"bytes from {start}", size, detail)

    def _check_size(self, stream: _Limited) -> None:
        """Raises `ValueError` if the next record batch, with the dictionaries before it, takes too much memory."""
        at, total, kind = stream.at, 0, _DICTIONARY
        while kind == _DICTIONARY and at + 8 <= self.file.size:
            mark, size = struct.unpack("<II", stream.peek(at, 8))
            start = at + 8
            if mark != _CONTINUATION:  # as written before Arrow 0.15
                start, size = at + 4, mark
            body = start + size
            if size == 0 or body > self.file.size:
                return  # the end, or a message that Arrow refuses
            header = _parse_header(memoryview(stream.peek(start, size)))
            places = header.size_places()
            if header.body_size < 0 or not all(place <= self.file.size - body - 8 for place in places):
                raise ValueError(f"the message at byte {at:,} has places outside of the file")
            sizes = self.file.read_ranges([(body + place, 8) for place in places])
            total += header.num_bytes(int.from_bytes(size, "little", signed=True) for size in sizes)
            if places and total > MAX_BATCH_BYTES:
                raise ValueError(f"takes {total:,} bytes without compression, at most {MAX_BATCH_BYTES:,} are read")
            at, kind = body + header.body_size, header.kind


def read_messages(content: bytes) -> Iterator[pa.Message]:
    """Yields the messages of an Arrow stream or file: its schema, then its record batches, which stay as they are."""
    start = len(_FILE_MAGIC) if content.startswith(_FILE_MAGIC) else 0
    reader = pa.ipc.MessageReader.open_stream(memoryview(content)[start:])
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        yield message


def batch_bytes(message: pa.Message) -> int:
    """Returns how many bytes the buffers of a record batch take in memory, where none is compressed.

    Raises:
        ValueError: the message has places outside of it.
    """
    body = memoryview(message.body)
    header = _parse_header(memoryview(message.metadata))
    return header.num_bytes([_number(body, start, "<q") for start in header.size_places()])


class _MessageHeader(NamedTuple):
    """The metadata of a message of Arrow.

    Attributes:
        kind: schema, dictionary or record batch, as the format numbers them.
        body_size: bytes of the body.
        is_compressed: whether the buffers are, each of which then begins with its size without compression.
        buffers: first byte in the body and size of each buffer that is not empty.
    """

    kind: int
    body_size: int
    is_compressed: bool = False
    buffers: Sequence[tuple[int, int]] = ()

    def size_places(self) -> list[int]:
        """Returns the place in the body of each size without compression, a signed integer of 64 bits."""
        return [start for start, _ in self.buffers] if self.is_compressed else []

    def num_bytes(self, sizes: Iterable[int]) -> int:
        """Returns the bytes that the buffers take in memory, with the sizes at `size_places`."""
        stored_sizes = [size for _, size in self.buffers]
        return sum(map(max, stored_sizes, sizes)) if self.is_compressed else sum(stored_sizes)


def _parse_header(metadata: memoryview) -> _MessageHeader:
    """Parses a table of Flatbuffers, whose references may lead anywhere; `ValueError` if they lead out of it."""
    message = _table(metadata, 0)
    kind_at, header_at, size_at = (_field(metadata, message, number) for number in (_KIND, _HEADER, _BODY_SIZE))
    kind = _number(metadata, kind_at, "<B") if kind_at else 0
    body_size = _number(metadata, size_at, "<q") if size_at else 0
    if kind not in (_DICTIONARY, _RECORD_BATCH):
        return _MessageHeader(kind, body_size)
    batch = _table(metadata, header_at)
    if kind == _DICTIONARY:
        batch = _table(metadata, _field(metadata, batch, _DATA))
    buffers = []
    if (buffers_at := _field(metadata, batch, _BUFFERS)) > 0:
        first = _table(metadata, buffers_at)
        for number in range(_number(metadata, first, "<I")):
            place = first + 4 + number * _BUFFER_BYTES
            start, size = _number(metadata, place, "<q"), _number(metadata, place + 8, "<q")
            if start < 0 or size < 0:
                raise ValueError(f"a message has a buffer of {size:,} bytes at {start:,}")
            buffers += [(start, size)] if size else []
    return _MessageHeader(kind, body_size, _field(metadata, batch, _COMPRESSION) > 0, buffers)


def _table(metadata: memoryview, at: int) -> int:
    """Returns the place that a reference of Flatbuffers leads to."""
    return at + _number(metadata, at, "<I")


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Returns the place of a field in a table of Flatbuffers; 0 if the table lacks it."""
    places = table - _number(metadata, table, "<i")
    at = 4 + 2 * number
    offset = _number(metadata, places + at, "<H") if at < _number(metadata, places, "<H") else 0
    return table + offset if offset else 0


def _number(content: memoryview, at: int, form: str) -> int:
    if not 0 <= at <= len(content) - struct.calcsize(form):
        raise ValueError(f"a message of {len(content):,} bytes has a place at {at:,}")
    (number,) = struct.unpack_from(form, content, at)
    return int(number)


class _Limited:
    """The bytes of a file for Arrow, which asks for as many as a damaged message states."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._ahead, self._ahead_at = b"", 0
        self.at = 0
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        left = self._file.size - self.at
        size = left if size < 0 else min(size, left)
        content = self._from_ahead(self.at, size)
        self.at += size
        return self._file.read(self.at - size, size) if content is None else content

    def peek(self, at: int, size: int) -> bytes:
        """Returns bytes of the file, and keeps those that follow for the next reads."""
        content = self._from_ahead(at, size)
        if content is None:
            self._ahead, self._ahead_at = self._file.read(at, min(max(size, PEEK_BYTES), self._file.size - at)), at
            content = self._ahead[:size]
        return content

    def _from_ahead(self, at: int, size: int) -> bytes | None:
        start = at - self._ahead_at
        return self._ahead[start : start + size] if 0 <= start <= len(self._ahead) - size else None

    def tell(self) -> int:
        return self.at

    def seek(self, position: int) -> int:
        self.at = position
        return position

    def close(self) -> None:
        self.closed = True
