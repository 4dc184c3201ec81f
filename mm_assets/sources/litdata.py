"""LitData, the chunks of Lightning's `litdata`: an item is a sample, a value of it a member.

``index.json`` beside the chunks says what the values are; its tree of containers is parsed as JSON, without their
classes. Values in nested containers have dotted names, in which the items of lists have numbers. `row_members` says
which members an item has. Pickles are never loaded.
"""

from __future__ import annotations

import io
import posixpath
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from mm_assets.errors import ShardError, SourceError, first_line
from mm_assets.json_text import parse_json, repair_json
from mm_assets.sources.arrow import batch_bytes, read_messages
from mm_assets.sources.arrow_rows import json_rows
from mm_assets.sources.entries import Entry, Scan
from mm_assets.sources.head import HEAD_BYTES
from mm_assets.sources.offset_table import (
    PICKLE_REASON,
    Column,
    OffsetTableSource,
    Value,
    array_cell,
    cells_of,
    file_cell,
    is_table,
    number_of,
    picture_cell,
    skipped_cell,
)
from mm_assets.sources.parquet import PARQUET_ERRORS
from mm_assets.sources.row_members import KEY_COLUMN, MEMBERS_COLUMN, Cell, ColumnKind, Row, RowMembers
from mm_assets.sources.stream import compression_of_head, decompressed
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardFile

__all__ = ["NUMPY_TYPES", "TENSOR_TYPES", "LitDataSource"]

INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 64 << 20  # of some 700,000 chunks
MAX_FRAME_BYTES = 512 << 20  # of a frame of items, and of a chunk's table of Arrow
BATCH_ROWS = 64  # converted to values of Python at a time
MAX_BATCH_VALUES = 1 << 26  # of a batch of rows, in lists at any depth: nulls take no bytes in a file
MAX_NESTED_DEPTH = 100  # containers in each other, in the binary form of JSON

NUMPY_TYPES = ("|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", "|b1")
"""The types of arrays, by number; the numbers after them are of objects and texts."""

TENSOR_TYPES = (
    *("<f4", "<f4", "<f8", "<f8", "<c8", "<c8", "<c16", "<c16", "<f2", "<f2"),
    *("bfloat16", "|u1", "|i1", "<i2", "<i2", "<i4", "<i4", "<i8", "<i8", "|b1", "<u2"),
)
"""The types of tensors, by number."""

_FRAMES_MAGIC = b"LDFZ01\0\0"
_FRAMES_HEAD = struct.Struct("<8sHHIII")  # magic, version, flags, items, items of a frame, frames
_FRAME = struct.Struct("<IIQII")  # first item, items, start, size, size without compression
_ARROW_MAGIC = b"LDARW01\0"
_TEXTS = frozenset({"json", KEY_COLUMN, MEMBERS_COLUMN})
_FILES = frozenset({"bytes", "jpeg", "image", "video", "audio", "file", "pdf", "mesh", "nifti", "tiff", "tifffile"})
_NUMBERS = {"int": np.dtype("<i8"), "float": np.dtype("<f8"), "bool": np.dtype("|b1")}


class LitDataSource(OffsetTableSource):
    """A chunk of LitData; see `mm_assets.sources.base.Source`."""

    SUFFIXES: ClassVar[tuple[str, ...]] = (".zstd.bin", *(f".zstd:{level}.bin" for level in range(1, 23)))
    FORMAT: ClassVar[str] = "a chunk of LitData"
    MARKS: ClassVar[tuple[str, ...]] = (INDEX_NAME,)

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether a file that starts with `head` is a chunk, or may be a compressed one."""
        is_chunk = is_table(head, has_config=False) or head.startswith(_FRAMES_MAGIC)
        return is_chunk or compression_of_head(head) == "zstd"

    @classmethod
    def shards_in(cls, files: Sequence[ShardFile]) -> Sequence[ShardFile] | None:
        """Returns the chunks of each folder with an index, which describes them."""
        indices = {file.url.rpartition("/")[0]: file for file in files if file.url.endswith(f"/{INDEX_NAME}")}
        chunks = []
        for file in files:
            folder, _, name = file.url.rpartition("/")
            if folder in indices and fnmatchcase(name, "chunk-*.bin"):
                chunks.append(file.described_by([indices[folder]]))
        return chunks or None

    @property
    def _folder(self) -> str:
        return super()._folder.removesuffix(".bin")

    @cached_property
    def _index(self) -> Mapping[str, Any]:
        """The content of the index.

        Raises:
            ShardError: it is missing, too large, or not an index.
        """
        try:
            index = self.file.beside(INDEX_NAME)
            if index.size > MAX_INDEX_BYTES:
                detail = f"has {index.size:,} bytes, at most {MAX_INDEX_BYTES:,} are read"
                raise ShardError(index.url, detail, byte_offset=0)
            content = parse_json(index.read(0, index.size).decode())
        except ShardError:
            raise
        except (SourceError, ValueError) as error:
            reason = error.detail if isinstance(error, SourceError) else first_line(error)
            detail = f"has no {INDEX_NAME} beside it that says what its values are ({reason}): copy the whole folder"
            raise ShardError(self.file.url, detail, byte_offset=0) from error
        match content:
            case {"config": {"data_format": [*_]}, "chunks": [*_]}:
                return dict(content)
        raise ShardError(self.file.url, f"its {INDEX_NAME} has no chunks or data_format", byte_offset=0)

    @cached_property
    def _compression(self) -> str | None:
        head = self.file.read(0, min(HEAD_BYTES, self.file.size))
        if head.startswith(_FRAMES_MAGIC):
            return "batch"
        if is_table(head, has_config=False):
            return "sample" if self._index["config"].get("compression_level") == "sample" else None
        return compression_of_head(head)

    def _columns(self, config: bytes) -> Sequence[Column]:
        if config:
            raise ValueError(f"the first sample is {len(config):,} bytes after its table, expected it there")
        settings = self._index["config"]
        loader = settings.get("item_loader")
        if settings.get("encryption") is not None:
            raise ShardError(self.file.url, "is encrypted: decrypt it with LitData first", byte_offset=0)
        if loader not in (None, "PyTreeLoader", "TokensLoader"):
            detail = f"was written for the loader {loader!a}, expected 'PyTreeLoader' or 'TokensLoader'"
            raise ShardError(self.file.url, detail, byte_offset=0)
        formats = settings["data_format"]
        if not all(isinstance(each, str) for each in formats):
            raise ValueError(f"its {INDEX_NAME} has data_format {formats!a:.100}, expected texts")
        names = ["tokens"] if loader == "TokensLoader" else _names(settings.get("data_spec"))
        if len(names) != len(formats):
            detail = f"{len(names)} values in data_spec and {len(formats)} in data_format, expected the same number"
            raise ValueError(f"its {INDEX_NAME} has {detail}")
        return [_column(name, each) for name, each in zip(names, formats, strict=True)]

    def _check_index(self, num_samples: int) -> None:
        name = posixpath.basename(self.file.url)
        chunks = (chunk for chunk in self._index["chunks"] if isinstance(chunk, dict))
        entry = next((chunk for chunk in chunks if chunk.get("filename") == name), None)
        if entry is None:
            raise ValueError("does not list this chunk: remove the chunk, or write the dataset again")
        if entry.get("chunk_size") != num_samples:
            detail = f"says that the chunk has {entry.get('chunk_size')} samples, found {num_samples}"
            raise ValueError(f"{detail}: download the chunk, or its index, again")

    def _row(self, rows: RowMembers, columns: Sequence[Column], sample: Value) -> Mapping[str, Any]:
        if self._index["config"].get("item_loader") != "TokensLoader":
            return super()._row(rows, columns, sample)
        (column,) = columns  # whose value has no size before it
        return {column.name: column.decode(sample)}

    # -- chunks with a table of Arrow

    def _entries(self, scan: Scan) -> Iterator[Entry]:
        raw, failure = self._raw
        size = 0 if failure is not None else _arrow_size(raw)
        if not size:
            yield from super()._entries(scan)
            return
        rows = RowMembers(self.file.url, self._folder, {})
        try:
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"has {size:,} bytes, expected at most {MAX_FRAME_BYTES:,}")
            messages = read_messages(raw.read(raw.size - 12 - size, size))
            first = next(messages, None)
            if first is None:
                raise ValueError("has no schema")
            schema = pa.ipc.read_schema(first)
            rows = RowMembers(self.file.url, self._folder, {f.name: _arrow_kind(f.type) for f in schema})
            number = int.from_bytes(raw.read(0, 4), "little")
            self._check_index(number)
            for batch in _batches(messages, schema):
                if rows.number + batch.num_rows > number:
                    raise ValueError(f"has more than the {number:,} rows that the chunk has samples")
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    for row in json_rows(batch.slice(start, BATCH_ROWS)):
                        yield from rows.entries(_arrow_row(row))
            if rows.number < number:
                raise ValueError(f"has {rows.number:,} rows, the chunk has {number:,} samples")
        except SourceError:
            raise
        except PARQUET_ERRORS as error:
            detail = f"row {rows.number} or after cannot be read from its table of Arrow: {first_line(error)}"
            scan.salvage(self.file.url, detail, byte_offset=max(raw.size - 12 - size, 0), byte_size=size)
            yield rows.damage_entry("rows", size, detail)

    # -- compression inside of a chunk

    def _decompress(self, compression: str) -> Iterator[bytes]:
        if compression == "batch":
            yield from self._batches()
        elif compression == "sample":
            yield from self._samples()
        else:
            yield from super()._decompress(compression)

    def _batches(self) -> Iterator[bytes]:
        """Yields a chunk whose items are compressed together, some at a time."""
        magic, version, _, number, _, num_frames = _FRAMES_HEAD.unpack(self._part(0, _FRAMES_HEAD.size))
        assert magic == _FRAMES_MAGIC
        if version != 1:
            raise ValueError(f"is of version {version} of frames, expected 1")
        start = _FRAMES_HEAD.size
        offsets = np.frombuffer(self._part(start, 4 * (number + 1)), "<u4").astype(np.int64)
        start += 4 * (number + 1)
        frames = list(_FRAME.iter_unpack(self._part(start, _FRAME.size * num_frames)))
        new_offsets = offsets - offsets[0] + 4 + 4 * (number + 1)
        if offsets[0] != 0 or new_offsets[-1] >= 1 << 32:
            raise ValueError(f"its items are at {offsets[0]:,} to {offsets[-1]:,}, expected a place from 0 on")
        yield struct.pack("<I", number) + new_offsets.astype("<u4").tobytes()
        at = 0
        for first, items, place, size, content_size in frames:
            if first != at or items > number - at or content_size != offsets[first + items] - offsets[first]:
                raise ValueError(f"a frame has items {first} to {first + items} in {content_size:,} bytes")
            at += items
            yield self._frame(place, size, content_size)

    def _samples(self) -> Iterator[bytes]:
        """Yields a chunk whose items are compressed one by one; twice, since their sizes come first."""
        number = int.from_bytes(self._part(0, 4), "little")
        offsets = np.frombuffer(self._part(4, 4 * (number + 1)), "<u4").astype(np.int64)
        sizes = [0, *(len(self._frame(a, b - a)) for a, b in pairwise(offsets))]
        new_offsets = np.cumsum(sizes) + 4 + 4 * (number + 1)
        if new_offsets[-1] >= 1 << 32:
            raise ValueError(f"holds {new_offsets[-1]:,} bytes, expected at most {1 << 32:,}")
        yield struct.pack("<I", number) + new_offsets.astype("<u4").tobytes()
        for a, b in pairwise(offsets):
            yield self._frame(a, b - a)

    def _part(self, start: int, size: int) -> bytes:
        if not 0 <= start <= start + size <= self.file.size:
            raise ValueError(f"bytes {start:,} to {start + size:,} are needed, it has {self.file.size:,}")
        return self.file.read(int(start), int(size))

    def _frame(self, start: int, size: int, content_size: int | None = None) -> bytes:
        """Returns the content of a frame; `ValueError` if it is damaged, or has another size or too many bytes."""
        limit = MAX_FRAME_BYTES if content_size is None else content_size
        if max(size, limit) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame has {max(size, limit):,} bytes, at most {MAX_FRAME_BYTES:,} are read")
        stream, errors = decompressed(io.BytesIO(self._part(start, size)), "zstd")
        parts = []
        try:
            while part := stream.read(limit + 1):
                parts.append(part)
                limit -= len(part)
                if limit < 0:
                    raise ValueError("a frame has more bytes than it states, or than are read")
        except errors as error:
            raise ValueError(first_line(error)) from error
        if content_size is not None and limit:
            raise ValueError(f"a frame has {content_size - limit:,} bytes, expected {content_size:,}")
        return b"".join(parts)


def _names(spec: Any) -> list[str]:
    """Returns the name of each value of an item; `ValueError` if `spec` is not a tree of containers."""
    try:
        _, tree = parse_json(spec) if isinstance(spec, str) else (1, {"type": None, "children_spec": []})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"its {INDEX_NAME} has data_spec {spec!a:.100}, expected a tree: {first_line(error)}"
        ) from error
    names = list(_names_in(tree))
    return [".".join(name) or "value" for name in names]


def _names_in(tree: Any) -> Iterator[tuple[str, ...]]:
    match tree:
        case {"type": None}:
            yield ()
        case {"type": str(), "context": context, "children_spec": [*children]}:
            try:
                keys = parse_json(context) if isinstance(context, str) else None
            except ValueError:
                keys = None
            if not isinstance(keys, list) or len(keys) != len(children):
                keys = list(range(len(children)))  # of a list, a tuple or a class
            for key, child in zip(keys, children, strict=True):
                for name in _names_in(child):
                    yield (str(key), *name)
        case _:
            raise ValueError(f"its {INDEX_NAME} has a data_spec with {tree!a:.100}, expected a container or a value")


def _column(name: str, form: str) -> Column:
    """Returns a column of values of a format, such as ``jpeg`` or ``no_header_numpy:9``."""
    kind: ColumnKind = "file"
    base, _, argument = form.partition(":")
    decode: Callable[[Value], Any]
    if base in ("str", "text") or (base == "bytes" and name in _TEXTS):
        return Column(name, "text", Value.whole)
    if base in _FILES:
        return Column(name, kind, partial(_file, extension=argument))
    if base in _NUMBERS:
        return Column(name, "value", partial(number_of, dtype=_NUMBERS[base]))
    if base == "json":
        return Column(name, "value", _json)
    if base == "jpeg_array":
        return Column(name, "files", partial(cells_of, at=0, cell=file_cell))
    if base == "pil":
        return Column(name, kind, picture_cell)
    types = {"numpy": NUMPY_TYPES, "tensor": TENSOR_TYPES}.get(base.removeprefix("no_header_"))
    if types is None:
        is_pickle = base in ("pickle", "graph")  # a graph has a pickle in it
        reason = PICKLE_REASON if is_pickle else f"format {form[:40]!a} is not one of `litdata`"
        decode = partial(skipped_cell, reason=reason)
    elif base.startswith("no_header_"):
        code = int(argument) if argument.isascii() and argument.isdigit() and len(argument) < 9 else len(types)
        decode = partial(_vector, types=types, code=code)
    else:
        decode = partial(_array, types=types, order="little" if base == "numpy" else "big")
    return Column(name, kind, decode)


def _file(value: Value, *, extension: str) -> Cell:
    return file_cell(value)._replace(path=f"x.{extension}" if extension else None)


def _vector(value: Value, *, types: Sequence[str], code: int) -> Cell:
    """Returns an array of one dimension, whose type is in the index."""
    size = 2 if types[code : code + 1] == ("bfloat16",) else np.dtype(types[code]).itemsize if code < len(types) else 1
    return _array_cell(value, types, code, (value.size // size,))


def _array(value: Value, *, types: Sequence[str], order: Any) -> Cell:
    """Returns an array that begins with its type, its number of dimensions and its shape."""
    code, number = (int.from_bytes(value.part(at, 4).head(4), order) for at in (0, 4))
    if number > 64:
        raise ValueError(f"has {number:,} dimensions, at most 64 are read")
    stored = value.part(8, 4 * number).head(4 * number)
    shape = tuple(int.from_bytes(stored[at : at + 4], order) for at in range(0, len(stored), 4))
    return _array_cell(value.part(8 + 4 * number, value.size - 8 - 4 * number), types, code, shape)


def _array_cell(value: Value, types: Sequence[str], code: int, shape: tuple[int, ...]) -> Cell:
    if code >= len(types):
        return skipped_cell(value, f"an array of type {code}, which is not one of numbers")
    if types[code] != "bfloat16":
        return array_cell(value, np.dtype(types[code]), shape)

    def as_float32(stored: bytes) -> bytes:
        return (np.frombuffer(stored, "<u2").astype("<u4") << 16).tobytes()

    return array_cell(value, np.dtype("<f4"), shape, stored_as=(np.dtype("<u2"), as_float32))


def _json(value: Value) -> Any:
    content = value.whole()
    if content[:1] > b"\x20":
        return parse_json(repair_json(content.decode()).text)
    return _Nested(content).value(0)


class _Nested:
    """Reads the binary form of JSON that `litdata` has: a tag, then numbers, texts with their sizes, or containers.

    Args:
        content: all of it.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def value(self, depth: int) -> Any:
        """Returns the value that follows; `ValueError` if there is none."""
        if depth > MAX_NESTED_DEPTH:
            raise ValueError(f"has more than {MAX_NESTED_DEPTH} containers within each other")
        (tag,) = self._take(1)
        match tag:
            case 0:
                return parse_json(repair_json(self._text()).text)
            case 1:
                return [self._text() for _ in range(self._number(4))]
            case 2 | 3 | 4:
                code = {2: "<i8", 3: "<f8", 4: "|b1"}[tag]
                return np.frombuffer(self._take(self._number() * np.dtype(code).itemsize), code).tolist()
            case 5:
                return {self._text(): self.value(depth + 1) for _ in range(self._number(5))}
            case 6:
                number = self._number()
                keys = [self._text() for _ in range(self._number(4))]
                if number * max(len(keys), 1) > len(self._content):
                    raise ValueError(f"has {number:,} rows of {len(keys):,} values, more than its bytes")
                return [{key: self._scalar(self._take(1)[0] - 16) for key in keys} for _ in range(number)]
            case 7 | 8 | 9 | 10:
                return self._scalar(tag - 6)
            case 11:
                return None
            case _:
                raise ValueError(f"has the tag {tag}, expected one from 0 to 11")

    def _scalar(self, kind: int) -> Any:
        match kind:
            case 0:
                return None
            case 1:
                return self._text()
            case 2 | 3:
                return struct.unpack("<q" if kind == 2 else "<d", self._take(8))[0]
            case 4:
                return bool(self._take(1)[0])
            case _:
                raise ValueError(f"has the tag {kind + 16} of a value, expected one from 16 to 20")

    def _number(self, item_size: int = 0) -> int:
        """Returns the number of items that follow, which have `item_size` bytes or more each."""
        number = int.from_bytes(self._take(4), "little")
        if number * item_size > len(self._content):
            raise ValueError(f"has {number:,} items, more than its bytes")
        return number

    def _text(self) -> str:
        return self._take(self._number()).decode()

    def _take(self, size: int) -> bytes:
        if size > len(self._content) - self._at:
            raise ValueError(f"ends after {len(self._content):,} bytes, expected {size:,} after byte {self._at:,}")
        self._at += size
        return self._content[self._at - size : self._at]


def _arrow_size(raw: SourceFile) -> int:
    """Returns the bytes of the table of Arrow between the items of a chunk and its end; 0 if there is none."""
    tail = raw.read(raw.size - 12, 12) if raw.size >= 24 else b""
    size = int.from_bytes(tail[:4], "little")
    number = int.from_bytes(raw.read(0, min(raw.size, 4)), "little")
    if not tail.endswith(_ARROW_MAGIC) or 8 + 4 * number > raw.size:
        return 0
    end = int.from_bytes(raw.read(4 + 4 * number, 4), "little")  # of the items
    return size if end + size + 12 == raw.size else 0


def _batches(messages: Iterable[pa.Message], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a table of Arrow.

    Raises:
        ValueError: one is too large, also without its compression, or has types that `litdata` does not write.
    """
    for field in schema:
        _check_type(field.name, field.type)
    for message in messages:
        if message.type != "record batch":
            raise ValueError(f"has a message {message.type!a}, expected a record batch")
        size = batch_bytes(message)
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"has a batch of {size:,} bytes without compression, at most {MAX_FRAME_BYTES:,} are read")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        num_values = sum(map(_num_values, batch.columns))
        if num_values > MAX_BATCH_VALUES:
            raise ValueError(f"has a batch of {num_values:,} values, at most {MAX_BATCH_VALUES:,} are read")
        yield batch


def _check_type(name: str, kind: pa.DataType) -> None:
    """Raises `ValueError` for a type whose values may share their bytes, and so take more memory than the table."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if is_list or pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            _check_type(name, kind.field(number).type)
    elif (
        isinstance(kind, pa.BaseExtensionType)
        or pa.types.is_nested(kind)
        or pa.types.is_dictionary(kind)
        or kind in (pa.string_view(), pa.binary_view())
    ):
        raise ValueError(f"has column {name!a} of type {kind}, which `litdata` does not write")


def _num_values(column: pa.Array) -> int:
    if pa.types.is_struct(column.type):
        return len(column) + sum(_num_values(column.field(number)) for number in range(column.type.num_fields))
    return len(column) + (_num_values(column.values) if pa.types.is_nested(column.type) else 0)


def _arrow_kind(kind: pa.DataType) -> ColumnKind:
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "file"
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "value"


def _arrow_row(row: Mapping[str, Any]) -> Row:
    return {name: Cell.of_bytes(value) if isinstance(value, bytes) else value for name, value in row.items()}
