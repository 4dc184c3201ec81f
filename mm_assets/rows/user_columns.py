"""Keys of the samples' JSON as columns: their names and types, and the conversion of values.

Types are decided once, at registration, by what most of the sampled values are; a value that does not fit its column's
type is null there and stays in `metadata_json`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mm_assets.errors import MissingColumnError
from mm_assets.json_text import dump_json
from mm_assets.rows.schema import QUERY_COLUMNS, RESERVED_COLUMNS, MemberRules, UserColumn, free_name

__all__ = ["UNFIT", "ColumnTally", "Converter", "column_name", "columns_of", "converter", "is_rare", "structural_keys"]

MAX_COLUMNS = 512  # JSON whose keys are data would give a column for each; further keys stay in `metadata_json`
MAX_KEYS = 1 << 14  # different keys that are counted before the columns are chosen of them
MAX_NAME = 256  # characters of a column's name
RARE = 5  # what is less than one in so many decides nothing about a dataset

Converter = Callable[[object], object]

UNFIT = object()
"""The result of a converter for a value that does not fit."""

_NAME = re.compile(r"[^\x00-\x1f\x7f]+")
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1


def is_rare(number: int, total: int) -> bool:
    """Whether so few of all samples or values decide nothing: less than 20 %."""
    return number * RARE < total


def structural_keys(layout: MemberRules) -> set[str]:
    """Keys that make up rows; they are not columns unless named as such."""
    keys = {layout.texts_field, layout.images_field, *layout.per_image_fields, *layout.per_text_fields}
    keys.update(key for key in (layout.sample_id_field, layout.image_member_field) if key is not None)
    return keys


def column_name(key: str, taken: Iterable[str]) -> str | None:
    """Returns the column that a key becomes: itself, or ``user_<key>`` if that is reserved or taken; None if none can.

    Names are compared without case, as SQL does.
    """
    if not _NAME.fullmatch(key) or len(key) > MAX_NAME:
        return None
    return free_name(key, {name.casefold() for name in (*RESERVED_COLUMNS, *QUERY_COLUMNS, *taken)})


def _scalar_kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64" if MIN_INT64 <= value <= MAX_INT64 else "json"
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


class ColumnTally:
    """Counts the keys of JSON objects and the types of their values, and decides the columns.

    Args:
        layout: which keys are requested.
    """

    def __init__(self, layout: MemberRules) -> None:
        self.num_objects = 0
        self._layout = layout
        self._requested = layout.user_columns
        self._excluded = structural_keys(layout) if self._requested is None else set()
        self._keys: dict[str, _Key] = {}
        self._items: dict[tuple[str, str], Counter[str]] = {}
        for rows, keys in (("image", layout.per_image_fields), ("text", layout.per_text_fields)):
            self._items |= {(key, rows): Counter() for key in keys}

    def add(self, found: Mapping[str, Any], number: int | None = None) -> None:
        """Counts the JSON of a sample, which is empty where it has none; `number` orders it among those of others."""
        self.num_objects += 1
        number = self.num_objects if number is None else number
        for place, (key, value) in enumerate(found.items()):
            known = self._keys.get(key)
            if known is None:
                wanted = key not in self._excluded if self._requested is None else key in self._requested
                if not wanted or len(self._keys) >= MAX_KEYS:
                    continue
                known = self._keys[key] = _Key((number, place))
            known.num_samples += 1
            if (kind := _kind_of(value)) is not None:
                known.types[kind] += 1
        for (key, _), types in self._items.items():
            values = found.get(key)
            items = values if isinstance(values, list) else ()
            types.update(kind for kind in map(_kind_of, items) if kind is not None)

    def update(self, other: ColumnTally) -> None:
        """Adds the counts of other objects."""
        self.num_objects += other.num_objects
        for key, found in other._keys.items():
            known = self._keys.get(key)
            if known is None:
                if len(self._keys) >= MAX_KEYS:
                    continue
                known = self._keys[key] = _Key(found.first)
            known.first = min(known.first, found.first)
            known.num_samples += found.num_samples
            known.types.update(found.types)
        for name, types in other._items.items():
            self._items[name].update(types)

    def columns(self, *, shown: str, taken: Iterable[str] = ()) -> tuple[UserColumn, ...]:
        """The columns in order of first appearance, those of `per_image_fields` and `per_text_fields` last.

        Args:
            shown: source of the objects, for messages.
            taken: names of other columns.

        Raises:
            MissingColumnError: a requested key is in none of the objects.
        """
        missing = [key for key in self._requested or () if key not in self._keys]
        if missing and self.num_objects:
            detail = (
                f"none of {self.num_objects} samples has the key {missing[0]!r}, which samples.user_columns asks for"
            )
            raise MissingColumnError(shown, detail)
        columns: list[UserColumn] = []
        used = list(taken)
        every = [(key, "metadata", self._keys[key].types if key in self._keys else Counter()) for key in self._chosen()]
        every += [(key, rows, types) for (key, rows), types in self._items.items()]
        for key, rows, types in every:
            name = column_name(key, used)
            if name is None:
                continue  # no column can have such a name; the value stays in `metadata_json` and is counted there
            used.append(name)
            required = self._requested is not None and rows == "metadata"
            columns.append(UserColumn(name=name, source=key, type=_decided(types), rows=rows, required=required))
        return tuple(columns)

    def _chosen(self) -> Sequence[str]:
        if self._requested is not None:
            return self._requested
        return sorted(self._keys, key=lambda key: self._keys[key].first)[:MAX_COLUMNS]

    def evidence(self, column: UserColumn) -> tuple[int, dict[str, int]]:
        """How many objects have a column's key, and the type of how many values; of items, where it is one of those."""
        types = self._items.get((column.source, column.rows))
        found = self._keys.get(column.source)
        if types is not None:
            return sum(types.values()), dict(sorted(types.items()))
        return (found.num_samples, dict(sorted(found.types.items()))) if found is not None else (0, {})


@dataclass(slots=True)
class _Key:
    """A key of the JSON, counted."""

    first: tuple[int, int]  # number of the first object that has it, and its place there
    num_samples: int = 0
    types: Counter[str] = field(default_factory=Counter)  # of values that are not null


def _decided(types: Counter[str]) -> str:
    """The narrowest type that all values fit, or all but fewer than `RARE` of them; else JSON."""
    widest: str | None = None
    for kind in types:
        widest = _widest(widest, kind)
    if widest == "json":
        kinds = sorted(kind for kind in types if kind != "json")
        fits = {kind: sum(n for other, n in types.items() if _widest(kind, other) == kind) for kind in kinds}
        kind = max(kinds, key=fits.__getitem__, default="json")
        if kind != "json" and is_rare(types.total() - fits[kind], types.total()):
            widest = kind
    return "json" if widest is None or widest == "list<>" else widest


def columns_of(objects: Iterable[Mapping[str, Any]], layout: MemberRules, *, shown: str) -> tuple[UserColumn, ...]:
    """The columns that JSON objects give; arguments and errors as those of `ColumnTally`."""
    tally = ColumnTally(layout)
    for found in objects:
        tally.add(found)
    return tally.columns(shown=shown)


def _double(value: object) -> object:
    if type(value) is float:
        return value
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else UNFIT
    except OverflowError:
        return UNFIT


def _json(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return UNFIT
    try:
        return dump_json(value)
    except (RecursionError, TypeError, ValueError):
        return UNFIT  # a value of a Parquet list that JSON does not know


_SCALAR_CONVERTERS: dict[str, Converter] = {
    "bool": lambda value: value if isinstance(value, bool) else UNFIT,
    "int64": lambda value: value if type(value) is int and MIN_INT64 <= value <= MAX_INT64 else UNFIT,
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
        return UNFIT if UNFIT in items else items

    return convert
