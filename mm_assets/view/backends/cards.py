"""What a card shows of the items of a sample: which of them is its picture, and which its text."""

from __future__ import annotations

from typing import Any

from mm_assets.display import Item

__all__ = ["MAX_CANDIDATES", "PICTURED", "PICTURED_MODALITIES", "TEXTUAL", "text_of"]

PICTURED = ("image", "images", "page", "video", "depth", "document", "array", "series", "audio", "midi")
"""Kinds of items that may have a picture, the best one first."""

PICTURED_MODALITIES = ("image", "video", "array", "audio", "midi")
"""Modalities of rows, and of members, that may have a picture, the best one first."""

MAX_CANDIDATES = 4
"""How many items of a sample are tried for a picture: one may turn out to have none."""

TEXTUAL = ("text", "document", "page", "tokens")
"""Kinds of items that have a text, the best one first."""

_KEYS = ("text", "texts", "caption", "title", "value")  # of data, or of JSON, where a person would look for words
_MAX_DEPTH = 4


def text_of(item: Item) -> str:
    """The first words of an item, or ""."""
    return _words(item.data, _MAX_DEPTH)


def _words(value: Any, depth: int) -> str:
    if isinstance(value, str):
        return value
    if depth == 0:
        return ""
    if isinstance(value, dict):
        found = [value[key] for key in _KEYS if key in value]
        found += [one for key, one in value.items() if key not in _KEYS and isinstance(one, list | dict)]
    else:
        found = value if isinstance(value, list) else []
    for one in found[:8]:
        if words := _words(one, depth - 1).strip():
            return words
    return ""
