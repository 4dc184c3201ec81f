"""Values that hold arrays: compared by their elements, and described briefly.

A description has arrays by type and shape, bytes by size, and long texts truncated.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import repeat
from typing import Any, Self

import numpy as np

__all__ = ["ArrayValue", "bytes_said", "counted", "describe", "same_value", "summarize", "summary_repr"]

MAX_TEXT = 100  # characters of a text
MAX_LINE = 400  # characters of anything else
MAX_ITEMS = 4  # of a list or mapping
MAX_DEPTH = 3


def counted(number: int, noun: str) -> str:
    """A number of things: "1 file", "2,000 files"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def bytes_said(size: int) -> str:
    """A size for people, in powers of 1,000: "812 bytes", "1.2 MB", "340 GB"."""
    if size < 1000:
        return "1 byte" if size == 1 else f"{size} bytes"
    value, units = float(size), ["kB", "MB", "GB", "TB", "PB"]
    for unit in units:
        value /= 1000
        if value < 999.5 or unit == units[-1]:
            break
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:,.0f} {unit}"


def describe(value: object) -> str:
    """A value in a few words for a message: its type and extent, not its content."""
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} with shape {value.shape}"
    if isinstance(value, bytes | bytearray):
        return f"{type(value).__name__} of {len(value)} bytes"
    if isinstance(value, str | list | tuple | dict):
        return f"{type(value).__name__} of length {len(value)}"
    if isinstance(value, bool | int | float | np.generic | None):
        return f"{type(value).__name__} {value!r}"[:80]
    return type(value).__name__


def summary_repr(value: object) -> str:
    """The ``__repr__`` of a dataclass that holds arrays."""
    return _of_dataclass(value, 0)


def summarize(value: object) -> str:
    """Any decoded value in one line of printable characters."""
    text = value if isinstance(value, str) else _summary(value, 0)
    text = "".join(c if c.isprintable() else "·" for c in text)
    return _truncated(text, MAX_TEXT if isinstance(value, str) else MAX_LINE)


def _truncated(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}… ({len(text):,} characters)"


def _summary(value: object, depth: int) -> str:
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return f"<{value.dtype} {' x '.join(map(str, value.shape))}>"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value):,} bytes>"
    if isinstance(value, str):
        return repr(_truncated(value, MAX_TEXT))
    if isinstance(value, Fraction):
        return str(value)
    if value is None or isinstance(value, bool | int | float | np.generic | np.ndarray):
        return repr(value.item() if isinstance(value, np.generic | np.ndarray) else value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _of_dataclass(value, depth)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"{type(value).__name__}({_joined(value._fields, value, '=', depth)})"
    if isinstance(value, Mapping):
        return "{" + _joined([repr(key) for key in value], list(value.values()), ": ", depth) + "}"
    if isinstance(value, list | tuple):
        opened, closed = "[]" if isinstance(value, list) else "()"
        return opened + _joined([""] * len(value), value, "", depth) + closed
    return _truncated(repr(value), MAX_TEXT)


def _of_dataclass(value: object, depth: int) -> str:
    names = [field.name for field in dataclasses.fields(value) if field.repr]  # type: ignore[arg-type]  # it is one
    values = [getattr(value, name) for name in names]
    return f"{type(value).__name__}({_joined(names, values, '=', depth, most=len(names))})"


def _joined(names: Sequence[str], values: Sequence[object], sign: str, depth: int, *, most: int = MAX_ITEMS) -> str:
    if depth >= MAX_DEPTH and values:
        return "…" if sign else f"… {len(values)} in all"
    parts = [
        f"{name}{sign}{_summary(value, depth + 1)}" for name, value in zip(names[:most], values[:most], strict=True)
    ]
    return ", ".join([*parts, f"… {len(values)} in all"] if len(values) > most else parts)


def same_value(one: object, other: object) -> bool:
    """Equality, of arrays by their elements."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(one, other)
    return one == other


class ArrayValue:
    """A base of dataclasses that hold arrays: equal by `same_value`, without a hash, with a short ``__repr__``."""

    __slots__ = ()

    __repr__ = summary_repr

    @classmethod
    def of_checked(cls, **attributes: Iterable[Any]) -> list[Self]:
        """Returns many values, as long as the first of their attributes has some, all of which the caller has checked.

        Of the small values of a batch, the loop and ``__init__`` would take several times as long.
        """
        first = next(iter(attributes.values()))
        found = [object.__new__(cls) for _ in first]
        for name, column in attributes.items():
            deque(map(object.__setattr__, found, repeat(name), column), maxlen=0)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        # mypy sees this class, which is not a dataclass; its subclasses are.
        names = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return all(same_value(getattr(self, name), getattr(other, name)) for name in names)

    # Python's way to say unhashable, which typeshed's `object` does not allow: arrays that change have no hash.
    __hash__ = None  # type: ignore[assignment]
