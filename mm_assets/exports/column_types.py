"""Infers the types of table columns: for packed modalities from their fields, for JSON keys from all their values.

A key gets a column if all of its values, except nulls, have the same type: boolean, 64-bit integer, number, text, or
a list of one of these. Arrays get a typed column if they all have the same dtype and number of dimensions. Everything
else stays in the JSON text, or in the bytes of an `.npy` file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mm_assets.dataset.dataset import Dataset
from mm_assets.exports.base import SAMPLE_COLUMNS, ExportColumn, ExportFile
from mm_assets.exports.samples import SampleFiles
from mm_assets.fields import Field

__all__ = [
    "FILE_ITEMS",
    "MAX_DIMENSIONS",
    "MEDIA_ITEMS",
    "NUMBER_TYPES",
    "TypedColumn",
    "media_item",
    "typed",
    "typed_columns",
]

MEDIA_ITEMS = ("Image", "Audio", "Video")  # feature types of `datasets`, which decodes them
FILE_ITEMS = (*MEDIA_ITEMS, "File")
NUMBER_TYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
"""Names of the dtypes that Arrow stores as numbers."""

MAX_KEY_COLUMNS = 512  # the first keys of the JSON become columns, further ones do not
MAX_CLASSES = 4096
MAX_DIMENSIONS = 5  # `datasets` has no type for more
_RESERVED = (*SAMPLE_COLUMNS, "__url__")
_MAX_EXACT_INTEGER = 2**53  # float64 stores smaller integers exactly
_PART_ITEMS = {"image": "Image", "pages": "Image", "audio": "Audio", "video": "Video"}  # by part of a composite field


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedColumn(ExportColumn):
    """A column of a table.

    Attributes:
        item: the type of its values, or of the items of its lists: "Image", "Audio", "Video", "File", or the name of a
            type of Arrow and NumPy, such as "int64".
        shape: of arrays, the extents that all of them have, None for extents that differ; () for values and files.
        is_value: whether it contains the values of a key of the JSON.
        classes: the name of each number, if another key of the JSON has them.
    """

    item: str
    shape: tuple[int | None, ...] = ()
    is_value: bool = False
    classes: tuple[str, ...] = ()

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type; files are structs of `bytes` and `path`."""
        if self.item in FILE_ITEMS:
            kind: pa.DataType = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        else:
            kind = pa.type_for_alias(self.item)
        for _ in self.shape or ((None,) if self.is_list else ()):
            kind = pa.list_(kind)
        return kind


def typed(columns: Sequence[ExportColumn]) -> list[TypedColumn]:
    """Returns the result of `typed_columns` with its static type."""
    return [column for column in columns if isinstance(column, TypedColumn)]


def typed_columns(dataset: Dataset, columns: Sequence[ExportColumn]) -> list[TypedColumn]:
    """Returns the columns of a table: first the keys of the JSON, then the parts of samples.

    Reads the JSON and the arrays of all samples.

    Args:
        dataset: the dataset to export.
        columns: the parts of samples.
    """
    keys: dict[str, _KeyType] = {}
    arrays = {column.name: _Arrays() for column in columns if column.kind == "array" and not column.is_list}
    for sample in SampleFiles(dataset, only=arrays).samples(0, len(dataset)):
        _add_values(keys, sample.value)
        for name, part in sample.parts.items():
            if isinstance(part, ExportFile):
                arrays[name].add(part.content)
    reserved = {*_RESERVED, *(column.name for column in columns)}
    values = [
        TypedColumn(name=name, field=None, is_list=key.is_list, kind="value", item=key.item, is_value=True)
        for name, key in keys.items()
        if key.item and name not in reserved and name.isprintable() and name.strip()
    ]
    values = [replace(column, classes=_classes(keys, column)) for column in values]
    return values + [_part_column(column, arrays.get(column.name)) for column in columns]


def _part_column(column: ExportColumn, arrays: _Arrays | None) -> TypedColumn:
    item = "File"
    shape: tuple[int | None, ...] = ()
    if column.kind == "text":
        item = "string"
    elif arrays is not None and arrays.dtype is not None:
        item, shape = arrays.dtype, arrays.shape
    elif column.kind == "file":
        item = media_item(column.name, column.field)
    return TypedColumn(
        name=column.name, field=column.field, is_list=column.is_list, kind=column.kind, item=item, shape=shape
    )


def media_item(name: str, column_field: Field | None) -> str:
    """Returns one of `FILE_ITEMS`: the kind of file in a column of a field, or of the part that the name ends with."""
    if column_field is not None and column_field.CONTENT_KIND in ("image", "audio"):
        return column_field.CONTENT_KIND.capitalize()
    parts = {} if column_field is None else column_field.PARTS
    part = name.rpartition("_")[2]
    return _PART_ITEMS.get(part if part in parts else next(iter(parts), ""), "File")


# -- values of the JSON


@dataclass(slots=True)
class _KeyType:
    """The type of the values of a key so far; `item` is "" if all are null, or if they have no common type."""

    item: str = ""
    is_list: bool = False
    is_mixed: bool = False
    has_values: bool = False
    is_exact: bool = True  # whether float64 stores all integers exactly
    names: dict[int, str] | None = field(default_factory=dict)  # of numbers, from the key `<key>_name`


def _add_values(keys: dict[str, _KeyType], value: Mapping[str, Any]) -> None:
    for name, one in value.items():
        key = keys.get(name)
        if key is None:
            if len(keys) >= MAX_KEY_COLUMNS:
                continue
            key = keys[name] = _KeyType()
        if one is not None and not key.is_mixed:
            _add_value(key, one)
            if key.item == "int64" and key.names is not None and not key.is_list:
                _add_name(key, one, value.get(f"{name}_name"))


def _add_value(key: _KeyType, value: Any) -> None:
    is_list = isinstance(value, list)
    if key.has_values and key.is_list != is_list:
        key.is_mixed, key.item = True, ""
        return
    key.has_values, key.is_list = True, is_list
    for one in value if is_list else (value,):
        if one is None:
            continue
        item = _scalar_type(one)
        key.is_exact &= item != "int64" or abs(one) <= _MAX_EXACT_INTEGER
        both = {key.item or item, item}
        if both == {"int64", "float64"} and key.is_exact:
            both = {"float64"}
        if len(both) > 1 or not item:
            key.is_mixed, key.item = True, ""
            return
        key.item = both.pop()


def _scalar_type(value: Any) -> str:
    match value:
        case bool():
            return "bool"
        case int():
            return "int64" if -(2**63) <= value < 2**63 else ""
        case float():
            return "float64"
        case str():
            return "string"
    return ""


def _add_name(key: _KeyType, number: int, name: Any) -> None:
    assert key.names is not None
    if not isinstance(name, str) or not 0 <= number < MAX_CLASSES or key.names.setdefault(number, name) != name:
        key.names = None


def _classes(keys: Mapping[str, _KeyType], column: TypedColumn) -> tuple[str, ...]:
    """Returns the names of the numbers of a key, if they are numbered from 0 without gaps and differ; else ()."""
    names = keys[column.name].names
    if column.item != "int64" or column.is_list or not names or sorted(names) != list(range(len(names))):
        return ()
    return tuple(names[number] for number in range(len(names))) if len({*names.values()}) == len(names) else ()


# -- arrays


class _Arrays:
    """The type and shape of arrays so far.

    Attributes:
        dtype: the name of their common dtype, or None.
        shape: their extents, None for extents that differ.
    """

    def __init__(self) -> None:
        self.dtype: str | None = None
        self.shape: tuple[int | None, ...] = ()
        self._is_mixed = False

    def add(self, content: Any) -> None:
        """Adds an array; bytes have no type."""
        if self._is_mixed:
            return
        if not isinstance(content, np.ndarray) or not self._fits(content):
            self.dtype, self.shape, self._is_mixed = None, (), True
            return
        if self.dtype is None:
            self.dtype, self.shape = content.dtype.name, content.shape
        pairs = zip(self.shape, content.shape, strict=True)
        self.shape = tuple(extent if extent == other else None for extent, other in pairs)

    def _fits(self, array: npt.NDArray[Any]) -> bool:
        """Returns whether nested lists of numbers preserve the array; empty ones lose their extents."""
        dtype = array.dtype.name
        has_shape = 1 <= array.ndim <= MAX_DIMENSIONS and 0 not in array.shape
        is_alike = self.dtype is None or (dtype, array.ndim) == (self.dtype, len(self.shape))
        return dtype in NUMBER_TYPES and has_shape and is_alike
