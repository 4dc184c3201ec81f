"""Names of parts of values, such as `document.layout.words` and `image[0]`, and taking a part of a decoded value.

A name is a modality's, followed by attributes or keys after dots, and by numbers of items in brackets. Nothing here
knows payloads.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np

from mm_assets.summaries import describe

__all__ = ["Path", "as_text", "parse_path", "part_names", "split_name", "take"]

Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead from a value to its part: names of attributes or keys, and numbers of items."""

_KEY = re.compile(r"\.([^.\[\]]+)|\[(-?\d{1,18})\]")


def parse_path(text: str) -> Path | None:
    """The keys of a path such as ``.layout.words`` or ``[0]``; None if the text is not one."""
    keys: list[str | int] = []
    end = 0
    while end < len(text):
        match = _KEY.match(text, end)
        if match is None:
            return None
        keys.append(match[1] if match[2] is None else int(match[2]))
        end = match.end()
    return tuple(keys)


def as_text(path: Path) -> str:
    """A path as it is written after a modality's name."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def split_name(name: str, modalities: Collection[str]) -> tuple[str, Path] | None:
    """The modality that a name begins with, the longest one, and the path after it; None if it begins with none."""
    if name in modalities:
        return name, ()
    ends = [match.start() for match in re.finditer(r"[.\[]", name)]
    for end in reversed(ends):
        path = parse_path(name[end:]) if name[:end] in modalities else None
        if path is not None:
            return name[:end], path
    return None


def take(value: Any, path: Path) -> Any:
    """A part of a value; None if the value is absent, or has no item of a number.

    An item of a sequence, which is (position, value), counts as its value.

    Raises:
        LookupError: the value has no such part; the message says which it has.
    """
    for key in path:
        if value is None:
            return None
        value = _take(value, key)
    return value


def _take(value: Any, key: str | int) -> Any:
    if isinstance(key, int):
        if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
            item: Any = value[key] if -len(value) <= key < len(value) else None
            is_item = isinstance(value, list) and isinstance(item, tuple) and len(item) == 2
            return item[1] if is_item and isinstance(item[0], int) else item
    elif isinstance(value, Mapping):
        if key in value:
            return value[key]
    elif not key.startswith("_") and not callable(part := getattr(value, key, len)):
        return part
    part_name = as_text((key,)).lstrip(".")
    raise LookupError(f"found {describe(value)} without the part {part_name}; it has {part_names(value)}")


def part_names(value: Any) -> str:
    """The parts that a value, or all values of a class, have: for messages."""
    names: list[str] = []
    if isinstance(value, Mapping):
        names = list(map(str, value))
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif hasattr(value, "_fields"):
        names = list(value._fields)
    elif isinstance(value, list | tuple | np.ndarray) and np.ndim(value):
        names = [f"{len(value)} items, by number"]
    return ", ".join(names) or "none"
