"""Keys of the samples' JSON as columns: their names and types, and the conversion of values.

Types are decided once, from the first shard; a later value that does not fit its column's type is null there and stays
in `metadata_json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mm_assets.errors import MissingColumnError
from mm_assets.rows.schema import RESERVED_COLUMNS, MemberRules, UserColumn
from mm_assets.sources.text_members import dump_json

__all__ = ["UNFIT", "Converter", "column_name", "columns_of", "converter", "structural_keys"]

MAX_COLUMNS = 512  # JSON whose keys are data would give a column for each; further keys stay in `metadata_json`
MAX_NAME = 256  # characters of a column's name

Converter = Callable[[object], object]

UNFIT = object()
"""The result of a converter for a value that does not fit."""

_NAME = re.compile(r"[^\x00-\x1f\x7f]+")
_INT64 = range(-(2**63), 2**63)


def structural_keys(layout: MemberRules) -> set[str]:
    """Keys that make up rows; they are not columns unless named as such."""
    keys = {layout.texts_field, layout.images_field, *layout.per_image_fields, *layout.per_text_fields}
    keys.update(key for key in (layout.sample_id_field, layout.image_member_field) if key is not None)
    return keys


def column_name(key: str, taken: Iterable[str]) -> str | None:
    """The column that a key becomes: itself, ``user_<key>`` where that is reserved or taken; None where none can."""
    if not _NAME.fullmatch(key) or len(key) > MAX_NAME:
        return None
    used = RESERVED_COLUMNS.union(taken)
    name, number = key, 1
    while name in used:
        name = f"user_{key}" if number == 1 else f"user_{key}_{number}"
        number += 1
    return name


def _scalar_kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64" if value in _INT64 else "json"
    if isinstance(value, float):
        return "double"
    return "string" if isinstance(value, str) else "json"


def _kind_of(value: object) -> str | None:
    """The type of a JSON value; None of null, and ``list<>`` of a list without items that are not null."""
    if value is None:
        return None
    if not isinstance(value, list):
        return _scalar_kind(value)
    inner: str | None = None
    for item in value:
        inner = _widest(inner, None if item is None else _scalar_kind(item))
        if inner == "json":
            return "json"
    return "list<>" if inner is None else f"list<{inner}>"


def _widest(one: str | None, other: str | None) -> str | None:
    """The narrowest type that the values of both fit."""
    if one == other or other is None:
        return one
    if one is None:
        return other
    if one.startswith("list<") and other.startswith("list<"):
        if "list<>" in (one, other):  # a list without items fits any list
            return other if one == "list<>" else one
        inner = _widest(one[5:-1], other[5:-1])
        return "json" if inner == "json" else f"list<{inner}>"
    return "double" if {one, other} == {"int64", "double"} else "json"


def columns_of(
    objects: Iterable[Mapping[str, Any]], layout: MemberRules, *, shown: str, skip: Iterable[str] = ()
) -> tuple[UserColumn, ...]:
    """The columns that JSON objects give, in order of first appearance.

    Args:
        objects: the JSON of each sample, empty where it has none.
        layout: which keys are requested.
        shown: source of the objects, for messages.
        skip: further keys that are not columns unless requested.

    Raises:
        MissingColumnError: a requested key is in none of the objects.
    """
    requested = layout.user_columns
    excluded = structural_keys(layout).union(skip) if requested is None else set()
    kinds: dict[str, str | None] = dict.fromkeys(requested or ())
    per_item: dict[tuple[str, str], str | None] = dict.fromkeys(
        [*((key, "image") for key in layout.per_image_fields), *((key, "text") for key in layout.per_text_fields)]
    )
    seen: set[str] = set()
    num_objects = 0
    for found in objects:
        num_objects += 1
        for key, value in found.items():
            if key in kinds or (requested is None and key not in excluded and len(kinds) < MAX_COLUMNS):
                seen.add(key)
                kinds[key] = _widest(kinds.get(key), _kind_of(value))
        for key, rows in per_item:
            values = found.get(key)
            for item in values if isinstance(values, list) else ():
                per_item[key, rows] = _widest(per_item[key, rows], _kind_of(item))
    missing = [key for key in requested or () if key not in seen]
    if missing and num_objects:
        detail = f"none of {num_objects} samples has the key {missing[0]!r}, which samples.user_columns asks for"
        raise MissingColumnError(shown, detail)
    columns: list[UserColumn] = []
    taken: list[str] = []
    every = [(key, "metadata", kind) for key, kind in kinds.items()]
    every += [(key, rows, kind) for (key, rows), kind in per_item.items()]
    for key, rows, kind in every:
        name = column_name(key, taken)
        if name is None:
            continue  # no column can have such a name; the value stays in `metadata_json` and is counted there
        taken.append(name)
        type_name = "json" if kind is None or kind == "list<>" else kind
        required = requested is not None and rows == "metadata"
        columns.append(UserColumn(name=name, source=key, type=type_name, rows=rows, required=required))
    return tuple(columns)


def _double(value: object) -> object:
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else UNFIT
    except OverflowError:
        return UNFIT


def _json(value: object) -> object:
    try:
        return dump_json(value)
    except (RecursionError, TypeError, ValueError):
        return UNFIT  # parsed, but nested too deep to be written; or a Parquet value that JSON does not know


_SCALAR_CONVERTERS: dict[str, Converter] = {
    "bool": lambda value: value if _scalar_kind(value) == "bool" else UNFIT,
    "int64": lambda value: value if _scalar_kind(value) == "int64" else UNFIT,
    "double": _double,
    "string": lambda value: value if isinstance(value, str) else UNFIT,
    "json": _json,
}


def converter(type_name: str) -> Converter:
    """A function that makes a JSON value that is not null fit a column's type; `UNFIT` where it does not."""
    if not type_name.startswith("list<"):
        return _SCALAR_CONVERTERS[type_name]
    inner = _SCALAR_CONVERTERS[type_name[5:-1]]

    def convert(value: object) -> object:
        if not isinstance(value, list):
            return UNFIT
        items = [None if item is None else inner(item) for item in value]
        return UNFIT if any(item is UNFIT for item in items) else items

    return convert
