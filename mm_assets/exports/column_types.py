"""Types of the columns of tables: of packed modalities by their fields, of keys of the JSON by all values of a dataset.

A key has a column if all of its values, nulls aside, have one type: booleans, integers of 64 bits, numbers, texts, or
lists of one of them. Arrays have typed columns if they all have one type of numbers and one number of dimensions.
Everything else is whole in the text of the JSON, or in the bytes of an `.npy` file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mm_assets.dataset.dataset import Dataset
from mm_assets.exports.base import ExportColumn, ExportFile
from mm_assets.exports.samples import BLOCK_SAMPLES, SampleFiles
from mm_assets.fields import Field
from mm_assets.json_text import parse_json

__all__ = ["FILE_ITEMS", "MEDIA_ITEMS", "TypedColumn", "media_item", "typed", "typed_columns"]

MEDIA_ITEMS = ("Image", "Audio", "Video")  # types of `datasets`, which decodes them
FILE_ITEMS = (*MEDIA_ITEMS, "File")

MAX_KEYS = 512  # of the JSON that may become columns: the first ones
MAX_CLASSES = 4096
MAX_DIMENSIONS = 5  # that `datasets` has a type for
_RESERVED = ("json", "__key__", "__members__", "__url__")
_MAX_EXACT = 2**53  # integers up to it are exact as float64
_PARTS = {"image": "Image", "pages": "Image", "audio": "Audio", "video": "Video"}  # of composite fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedColumn(ExportColumn):
    """A column of a table.

    Attributes:
        item: the type of its values, or of the items of its lists: "Image", "Audio", "Video" or "File", or one of Arrow
            and NumPy, such as "int64".
        shape: of arrays: the extents that all have, None where they differ; () for a value or file.
        is_value: whether it holds a key of the JSON.
        classes: names of the numbers, which another key has.
    """

    item: str
    shape: tuple[int | None, ...] = ()
    is_value: bool = False
    classes: tuple[str, ...] = ()

    @property
    def arrow(self) -> pa.DataType:
        """The type in a file; a file is a struct of `bytes` and `path`."""
        if self.item in FILE_ITEMS:
            kind: pa.DataType = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        else:
            kind = pa.type_for_alias(self.item)
        for _ in self.shape or ((None,) if self.is_list else ()):
            kind = pa.list_(kind)
        return kind


def typed(columns: Sequence[ExportColumn]) -> list[TypedColumn]:
    """Returns columns that `typed_columns` returned, with their type."""
    return [column for column in columns if isinstance(column, TypedColumn)]


def typed_columns(dataset: Dataset, columns: Sequence[ExportColumn]) -> list[TypedColumn]:
    """Returns the columns of a table: those of the keys of the JSON first, then those of the parts of samples.

    Reads the JSON and the arrays of all samples.

    Args:
        dataset: what is exported.
        columns: the parts of samples.
    """
    samples = SampleFiles(dataset)
    keys: dict[str, _Values] = {}
    if samples.metadata is not None:
        for first in range(0, len(dataset), BLOCK_SAMPLES):
            block = range(first, min(first + BLOCK_SAMPLES, len(dataset)))
            for payload in dataset.read_raw(block, [samples.metadata])[samples.metadata]:
                _add_values(keys, None if payload is None else parse_json(str(payload, "utf-8")))
    arrays = {column.name: _Arrays() for column in columns if column.kind == "array" and not column.is_list}
    if arrays:
        for sample in SampleFiles(dataset, only=arrays).samples(0, len(dataset)):
            for name, part in sample.parts.items():
                if isinstance(part, ExportFile):
                    arrays[name].add(part.content)
    taken = {*_RESERVED, *(column.name for column in columns)}
    values = [
        TypedColumn(name=name, field=None, is_list=found.is_list, kind="value", item=found.item, is_value=True)
        for name, found in keys.items()
        if found.item and name not in taken and name.isprintable() and name.strip()
    ]
    values = [replace(column, classes=_classes(keys, column)) for column in values]
    return values + [_of_part(column, arrays.get(column.name)) for column in columns]


def _of_part(column: ExportColumn, arrays: _Arrays | None) -> TypedColumn:
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


def media_item(name: str, made: Field | None) -> str:
    """Returns the kind of file that a field keeps, or that a part of it is, by which a column is named."""
    if made is not None and made.CONTENT_KIND in ("image", "audio"):
        return made.CONTENT_KIND.capitalize()
    parts = {} if made is None else made.PARTS
    part = name.rpartition("_")[2]
    return _PARTS.get(part if part in parts else next(iter(parts), ""), "File")


# -- values of the JSON


@dataclass(slots=True)
class _Values:
    """The type of the values of a key so far; `item` is "" while all are null, or if they have no type in common."""

    item: str = ""
    is_list: bool = False
    is_mixed: bool = False
    has_values: bool = False
    is_exact: bool = True  # as float64, if they are integers
    pairs: dict[int, str] | None = field(default_factory=dict)  # number and name, of a key with names beside it


def _add_values(keys: dict[str, _Values], value: Any) -> None:
    if not isinstance(value, dict):
        return
    for name, one in value.items():
        found = keys.get(name)
        if found is None:
            if len(keys) >= MAX_KEYS:
                continue
            found = keys[name] = _Values()
        if one is not None and not found.is_mixed:
            _add_value(found, one)
            if found.item == "int64" and found.pairs is not None and not found.is_list:
                _add_pair(found, one, value.get(f"{name}_name"))


def _add_value(found: _Values, value: Any) -> None:
    is_list = isinstance(value, list)
    if found.has_values and found.is_list != is_list:
        found.is_mixed, found.item = True, ""
        return
    found.has_values, found.is_list = True, is_list
    for one in value if is_list else (value,):
        if one is None:
            continue
        item = _scalar_type(one)
        found.is_exact &= item != "int64" or abs(one) <= _MAX_EXACT
        both = {found.item or item, item}
        if both == {"int64", "float64"} and found.is_exact:
            both = {"float64"}
        if len(both) > 1 or not item:
            found.is_mixed, found.item = True, ""
            return
        found.item = both.pop()


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


def _add_pair(found: _Values, number: int, name: Any) -> None:
    assert found.pairs is not None
    fits = isinstance(name, str) and 0 <= number < MAX_CLASSES and found.pairs.setdefault(number, name) == name
    if not fits:
        found.pairs = None


def _classes(keys: Mapping[str, _Values], column: TypedColumn) -> tuple[str, ...]:
    """The names of the numbers of a key, in order, if `<key>_name` has one for each from 0 on, and all differ."""
    pairs = keys[column.name].pairs
    if column.item != "int64" or column.is_list or not pairs or sorted(pairs) != list(range(len(pairs))):
        return ()
    names = tuple(pairs[number] for number in range(len(pairs)))
    return names if len(set(names)) == len(names) else ()


# -- arrays


class _Arrays:
    """The type and shape of arrays so far.

    Attributes:
        dtype: of all of them, or None.
        shape: their extents, None where they differ.
    """

    def __init__(self) -> None:
        self.dtype: str | None = None
        self.shape: tuple[int | None, ...] = ()
        self._is_mixed = False

    def add(self, content: Any) -> None:
        """Takes another array into account; bytes have no type."""
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
        """Whether lists of numbers give the array again: nested empty lists have no extents."""
        is_typed = array.dtype.kind in "biuf" and array.dtype.itemsize <= 8
        has_shape = 1 <= array.ndim <= MAX_DIMENSIONS and 0 not in array.shape
        return (
            is_typed
            and has_shape
            and (self.dtype is None or (array.dtype.name, array.ndim) == (self.dtype, len(self.shape)))
        )
