"""Features of Hugging Face's `datasets`: what a schema says about its columns beyond their Arrow types.

Two things are read. Numbers of a `ClassLabel` have names, which become values beside the numbers: ``label`` 3 and
``label_name`` "cat". Columns of `Array2D` to `Array5D`, and lists of numbers with a fixed length, are arrays. Nothing
in the metadata is trusted: what does not fit the type of its column is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from mm_assets.json_text import parse_json

__all__ = ["Features", "NamedLabels", "add_label_names", "is_numbers", "item_type_of_lists", "read_features"]

METADATA_KEY = b"huggingface"
MAX_DEPTH = 32  # lists and structs within each other
_ARRAYS = ("Array2D", "Array3D", "Array4D", "Array5D")  # tuples: what is searched for may be a list
_LISTS = ("Sequence", "List", "LargeList")

NamedLabels = Mapping[str, Any]
"""Names of class labels by key; an object has a mapping of its own, and a list has the names of its items."""


class Features(NamedTuple):
    """What features say about the columns of a schema.

    Attributes:
        labels: the names of class labels.
        arrays: columns whose values are arrays of numbers.
    """

    labels: NamedLabels
    arrays: frozenset[str]


def read_features(schema: pa.Schema) -> Features | None:
    """Returns what the metadata of a schema say about its columns, or None if they cannot be read."""
    try:
        features = parse_json((schema.metadata or {})[METADATA_KEY].decode())["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return None
    if not isinstance(features, dict):
        return None
    columns = {name: features[name] for name in schema.names if name in features}
    arrays = {
        name
        for name, feature in columns.items()
        if _is_array(feature) and is_numbers(item_type_of_lists(schema.field(name).type))
    }
    return Features(_labels_of(columns), frozenset(arrays))


def _is_array(feature: Any) -> bool:
    """Returns whether a feature is an array, or lists of numbers with fixed lengths."""
    if isinstance(feature, dict) and feature.get("_type") in _ARRAYS:
        return True
    depth = 0
    while isinstance(feature, dict) and feature.get("_type") in _LISTS and depth < MAX_DEPTH:
        length = feature.get("length")
        if not isinstance(length, int) or length < 1:
            return False
        feature, depth = feature.get("feature"), depth + 1
    return depth > 0 and isinstance(feature, dict) and feature.get("_type") == "Value"


def item_type_of_lists(kind: pa.DataType) -> pa.DataType | None:
    """Returns the type of the items of lists, also of lists in lists; None for a type that is not of lists."""
    items = None
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        items = kind = kind.value_type
    return items


def is_numbers(kind: pa.DataType | None) -> bool:
    """Returns whether a type is one of numbers or booleans that NumPy has."""
    return kind is not None and (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _labels_of(features: Mapping[str, Any], depth: int = 0) -> NamedLabels:
    names: dict[str, Any] = {}
    for name, feature in features.items():
        labels = _labels_in(feature, depth + 1)
        if labels:
            names[name] = labels
    return names


def _labels_in(feature: Any, depth: int) -> NamedLabels | tuple[str, ...] | None:
    """Returns the names of class labels, also inside a struct; None if a feature has none."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(feature, list):  # a list as early releases wrote it
        return _labels_in(feature[0], depth + 1) if len(feature) == 1 else None
    if not isinstance(feature, dict):
        return None
    kind = feature.get("_type")
    if kind in _LISTS:
        return _labels_in(feature.get("feature"), depth + 1)
    if kind == "ClassLabel":
        names = feature.get("names")
        is_named = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return tuple(names) if is_named and names else None
    return None if isinstance(kind, str) else _labels_of(feature, depth)


def add_label_names(values: dict[str, Any], labels: NamedLabels) -> None:
    """Adds the names of class labels as ``<key>_name``, unless there is such a key; null for a number without a name.

    Args:
        values: the values of a row, or of an object in one, by key.
        labels: the names.
    """
    for key, below in labels.items():
        if key not in values:
            continue
        if isinstance(below, tuple):
            values.setdefault(f"{key}_name", _names(values[key], below))
        else:
            _add_in(values[key], below)


def _add_in(value: Any, labels: NamedLabels) -> None:
    if isinstance(value, dict):
        add_label_names(value, labels)
    elif isinstance(value, list):
        for item in value:
            _add_in(item, labels)


def _names(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_names(item, names) for item in value]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return names[value] if is_number and 0 <= value < len(names) else None
