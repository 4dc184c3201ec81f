"""MDS, the shards of MosaicML's `streaming`: a row is a sample, a column a member.

A shard has a table of its samples, then its columns as JSON, then the samples. It describes itself: `index.json` is
compared if it is there, and is not needed. `row_members` says which members a row has. Pickles are never loaded.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from mm_assets.errors import SourceError
from mm_assets.json_text import parse_json, repair_json
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
from mm_assets.sources.row_members import KEY_COLUMN, MEMBERS_COLUMN, Cell, ColumnKind
from mm_assets.sources.stream import compression_of_head
from mm_assets.storage.listing import ShardFile

__all__ = ["ARRAY_TYPES", "MdsSource"]

INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 4 << 20  # of some 8,000 shards: every partition reads it
MAX_NUMBER_DIGITS = 15  # of a decimal that is a number: a double has them all, and not all of 16
MAX_EXPONENT = 300  # of a decimal that is a number: a double has few greater ones

ARRAY_TYPES: Mapping[int, str] = {
    code: kind + str(bits // 8)
    for bits in (8, 16, 32, 64)
    for code, kind in ((bits, "<u"), (bits + 1, "<i"), (bits + 2, "<f"))
    if code != 10  # a float of 8 bits
}
"""The type of an array by the number that an array without a declared type begins with."""

_TYPES = {np.dtype(code).name: np.dtype(code) for code in ARRAY_TYPES.values()}
_FILES = frozenset({"bytes", "jpeg", "png"})
_TEXTS = frozenset({"json", KEY_COLUMN, MEMBERS_COLUMN})  # texts, whatever their encoding
_COMPRESSIONS = {".br": "brotli", ".snappy": "snappy"}  # by suffix, since their first bytes do not show them


class MdsSource(OffsetTableSource):
    """A shard of MDS; see `mm_assets.sources.base.Source`."""

    SUFFIXES: ClassVar[tuple[str, ...]] = (
        *(".mds", ".mds.zstd", ".mds.zst", ".mds.gz"),
        *(".mds.bz2", ".mds.br", ".mds.snappy"),
    )
    FORMAT: ClassVar[str] = "an MDS shard"
    MARKS: ClassVar[tuple[str, ...]] = (INDEX_NAME,)

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether a file that starts with `head` is a shard, or may be a compressed one."""
        return is_table(head, has_config=True) or compression_of_head(head) is not None

    @classmethod
    def shards_in(cls, files: Sequence[ShardFile]) -> Sequence[ShardFile] | None:
        """Returns the shards of a folder, without compressed copies of shards that it also has uncompressed."""
        raw = {file.url for file in files if file.url.lower().endswith(".mds")}
        shards = [file for file in files if file.url.lower().endswith(cls.SUFFIXES)]
        return [shard for shard in shards if shard.url in raw or shard.url.rpartition(".")[0] not in raw] or None

    @cached_property
    def _compression(self) -> str | None:
        head = self.file.read(0, min(HEAD_BYTES, self.file.size))
        if is_table(head, has_config=True):
            return None
        return compression_of_head(head) or _COMPRESSIONS.get(posixpath.splitext(self.file.url)[1].lower())

    def _columns(self, config: bytes) -> Sequence[Column]:
        try:
            description = parse_json(config.decode())
        except ValueError as error:
            raise ValueError(f"its description of columns cannot be read: {error}") from error
        match description:
            case {"format": "mds", "version": 2}:
                pass
            case {"format": str(name), "version": int(version)}:
                raise ValueError(f"is of format {name!a}, version {version}, expected 'mds', version 2")
            case _:
                raise ValueError("its description has no format and version, expected 'mds', version 2")
        names, encodings, sizes = (description.get(f"column_{part}") for part in ("names", "encodings", "sizes"))
        if not (isinstance(names, list) and isinstance(encodings, list) and isinstance(sizes, list)):
            raise ValueError("its description lacks a list of column_names, column_encodings or column_sizes")
        if not len(names) == len(encodings) == len(sizes):
            detail = f"{len(names)} names, {len(encodings)} encodings and {len(sizes)} sizes"
            raise ValueError(f"its description has {detail}, expected the same number of each")
        return [_column(*column) for column in zip(names, encodings, sizes, strict=True)]

    @cached_property
    def _index(self) -> bytes | None:
        """The index beside the shard; None if it is missing or too large, since it is not needed."""
        try:
            index = self.file.beside(INDEX_NAME)
            return index.read(0, index.size) if index.size <= MAX_INDEX_BYTES else None
        except SourceError:
            return None

    def _check_index(self, num_samples: int) -> None:
        if self._index is None:
            return
        try:
            index = parse_json(self._index.decode())
        except ValueError as error:
            raise ValueError(f"{error}: restore it, or remove it, since it is not needed") from error
        name = posixpath.basename(self.file.url)
        for shard in index.get("shards", ()) if isinstance(index, dict) else ():
            match shard:
                case {"raw_data": {"basename": stored, "bytes": size}, "samples": samples} if stored == name:
                    pass
                case {"zip_data": {"basename": stored, "bytes": size}, "samples": samples} if stored == name:
                    pass
                case _:
                    continue
            if (samples, size) != (num_samples, self.file.size):
                detail = f"says that the shard has {samples} samples in {size} bytes, found {num_samples} samples"
                raise ValueError(f"{detail} in {self.file.size} bytes: download the shard, or its index, again")


def _column(name: Any, encoding: Any, size: Any) -> Column:
    """Returns a column as a shard describes it; `ValueError` if it is not one."""
    if not isinstance(name, str) or not isinstance(encoding, str):
        raise ValueError(f"a column has the name {name!a} and the encoding {encoding!a}, expected texts")
    if not (size is None or (type(size) is int and 0 <= size < 1 << 32)):
        raise ValueError(f"column {name!a} has the size {size!a}, expected bytes or null")
    column = _decoder(name, encoding)
    if size and column.size is not None and column.size != size:
        raise ValueError(f"column {name!a} has {size} bytes, expected {column.size} of encoding {encoding!a}")
    return column._replace(size=size or None)  # as `streaming` reads it, a size of 0 is none


def _decoder(name: str, encoding: str) -> Column:
    kind: ColumnKind = "file"
    base, _, arguments = encoding.partition(":")
    if encoding in ("bytes", "str", "json") and (name in _TEXTS or encoding == "str"):
        return Column(name, "text", Value.whole)
    if encoding == "json":
        return Column(name, "text" if name.endswith(".json") else "value", _json)
    if encoding in _FILES:
        return Column(name, kind, file_cell)
    if encoding == "pil":
        return Column(name, kind, picture_cell)
    if encoding in ("jpeg_array", "jpegarray"):
        return Column(name, "files", partial(cells_of, at=0, cell=file_cell))
    if encoding in ("list[jpeg]", "list[png]"):
        return Column(name, "files", partial(cells_of, at=4, cell=file_cell))
    if encoding == "list[pil]":
        return Column(name, "files", partial(cells_of, at=4, cell=picture_cell))
    if base == "ndarray":
        return _array_column(name, arguments)
    if encoding == "int" or encoding in _TYPES:
        dtype = np.dtype("<i8") if encoding == "int" else _TYPES[encoding]
        return Column(name, "value", partial(number_of, dtype=dtype), dtype.itemsize)
    if encoding in _NUMBER_TEXTS:
        return Column(name, "value", _NUMBER_TEXTS[encoding])
    reason = PICKLE_REASON if encoding == "pkl" else f"encoding {encoding[:40]!a} is not one of `streaming`"
    return Column(name, kind, partial(skipped_cell, reason=reason))


def _json(value: Value) -> Any:
    return parse_json(repair_json(value.whole().decode()).text)


def _decimal(value: Value) -> float | str:
    text = value.whole().decode()
    try:
        number = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"is {text[:40]!a}, expected a decimal number") from error
    is_short = len(number.as_tuple().digits) <= MAX_NUMBER_DIGITS and abs(number.adjusted()) <= MAX_EXPONENT
    return float(number) if is_short or not number.is_finite() else text


_NUMBER_TEXTS = {
    "str_int": lambda value: int(value.whole()),
    "str_float": lambda value: float(value.whole()),
    "str_decimal": _decimal,
}


def _array_column(name: str, arguments: str) -> Column:
    """Returns a column of encoding ``ndarray[:type[:shape]]``."""
    declared, _, shape_text = arguments.partition(":")
    if declared and declared not in _TYPES:
        raise ValueError(f"column {name!a} has arrays of type {declared[:40]!a}, expected one of {', '.join(_TYPES)}")
    dtype = _TYPES[declared] if declared else None
    sides = shape_text.split(",") if shape_text else None
    if sides is not None and not all(side.isascii() and side.isdigit() and len(side) < 20 for side in sides):
        raise ValueError(f"column {name!a} has arrays of shape {shape_text[:40]!a}, expected numbers")
    shape = None if sides is None else tuple(map(int, sides))
    size = dtype.itemsize * int(np.prod(shape, dtype=object)) if dtype is not None and shape is not None else None
    return Column(name, "file", partial(_array, dtype=dtype, shape=shape), size)


def _array(value: Value, *, dtype: np.dtype[np.generic] | None, shape: tuple[int, ...] | None) -> Cell:
    at = 0
    if dtype is None:
        code = int.from_bytes(value.part(at, 1).head(1), "little")
        if code not in ARRAY_TYPES:
            raise ValueError(f"is an array of type {code}, expected one of {', '.join(map(str, ARRAY_TYPES))}")
        dtype, at = np.dtype(ARRAY_TYPES[code]), 1
    if shape is None:
        packed = int.from_bytes(value.part(at, 1).head(1), "little")
        number, width = packed >> 2, 1 << (packed & 3)
        stored = value.part(at + 1, number * width).head(number * width)
        shape = tuple(int.from_bytes(stored[n : n + width], "little") for n in range(0, len(stored), width))
        at += 1 + number * width
    return array_cell(value.part(at, value.size - at), dtype, shape)
