"""Values in a few words: arrays by type and shape, bytes by size, long texts cut, so that a sample fits a screen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

__all__ = ["summarize", "summary_repr"]

MAX_TEXT = 100  # characters of a text
MAX_LINE = 400  # characters of anything else
MAX_ITEMS = 4  # of a list or mapping
MAX_DEPTH = 3


def summary_repr(value: object) -> str:
    """The ``__repr__`` of a dataclass that holds arrays."""
    return _of_dataclass(value, 0)


def summarize(value: object) -> str:
    """Any decoded value in one line of printable characters."""
    text = value if isinstance(value, str) else _summary(value, 0)
    text = "".join(c if c.isprintable() else "·" for c in text)
    return _cut(text, MAX_TEXT if isinstance(value, str) else MAX_LINE)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}… ({len(text):,} characters)"


def _summary(value: object, depth: int) -> str:
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            return repr(value.item())
        return f"<{value.dtype} {' x '.join(map(str, value.shape))}>"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value):,} bytes>"
    if isinstance(value, str):
        return repr(_cut(value, MAX_TEXT))
    if isinstance(value, Fraction):
        return str(value)
    if value is None or isinstance(value, bool | int | float | np.generic):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _of_dataclass(value, depth)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"{type(value).__name__}({_joined(dict(zip(value._fields, value, strict=True)), '=', depth)})"
    if isinstance(value, Mapping):
        return "{" + _joined({repr(key): item for key, item in value.items()}, ": ", depth) + "}"
    if isinstance(value, list | tuple):
        opened, closed = "[]" if isinstance(value, list) else "()"
        return opened + _listed(value, depth) + closed
    return _cut(repr(value), MAX_TEXT)


def _of_dataclass(value: object, depth: int) -> str:
    names = [field.name for field in dataclasses.fields(value) if field.repr]  # type: ignore[arg-type]  # it is one
    return f"{type(value).__name__}({_joined({name: getattr(value, name) for name in names}, '=', depth, all_of=True)})"


def _joined(items: Mapping[str, object], sign: str, depth: int, *, all_of: bool = False) -> str:
    if depth >= MAX_DEPTH:
        return "…"
    shown = list(items.items())[: None if all_of else MAX_ITEMS]
    parts = [f"{name}{sign}{_summary(item, depth + 1)}" for name, item in shown]
    return ", ".join([*parts, f"… {len(items)} in all"] if len(shown) < len(items) else parts)


def _listed(items: list[object] | tuple[object, ...], depth: int) -> str:
    if depth >= MAX_DEPTH and items:
        return f"… {len(items)} in all"
    parts = [_summary(item, depth + 1) for item in items[:MAX_ITEMS]]
    return ", ".join([*parts, f"… {len(items)} in all"] if len(items) > MAX_ITEMS else parts)
