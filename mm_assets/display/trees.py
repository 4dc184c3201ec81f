"""JSON and text, bounded for people: long texts, long lists and deep nesting end with what is left out.

JSON is parsed here from bytes that are not trusted. Numbers that JavaScript would round, and those that JSON has no
form for, become texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mm_assets.display.item import MAX_DATA, MAX_TEXT, Content, Item, clean_text, human_bytes, unreadable_item
from mm_assets.summaries import summarize

__all__ = ["bounded", "json_item", "text_item", "text_of_bytes", "tree_item"]

MAX_PARSED = 8 << 20  # bytes of JSON that are parsed
MAX_DEPTH = 24
MAX_CHILDREN = 1000  # of one list or object
MAX_STRING = 20_000  # characters of one string in a tree
_BUDGET = MAX_DATA - 16_384  # bytes for the values; the rest is for what else an item says
_SAFE = 2**53  # integers up to this are JavaScript's numbers


class _Bounds:
    """Bytes that are left for a tree, and whether something did not fit."""

    def __init__(self, budget: int) -> None:
        self.left = budget
        self.truncated = False

    def take(self, size: int) -> bool:
        self.left -= size
        if self.left < 0:
            self.truncated = True
        return self.left >= 0


def bounded(value: object, budget: int = _BUDGET) -> tuple[Any, bool]:
    """A value as JSON of at most `budget` bytes, and whether something was left out.

    Lists and objects end early where they are too long; what is nested too deeply becomes a text that says so. Values
    that JSON does not know are described in a line.
    """
    bounds = _Bounds(budget)
    return _bounded(value, bounds, 0), bounds.truncated


def _bounded(value: object, bounds: _Bounds, depth: int) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        bounds.take(6)
        return value
    if isinstance(value, int):
        bounds.take(24)
        return value if abs(value) <= _SAFE else _string(_digits(value), bounds)
    if isinstance(value, float):
        bounds.take(24)
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return _string(value, bounds)
    if isinstance(value, Mapping):
        return _object(value, bounds, depth)
    if isinstance(value, list | tuple):
        return _array(value, bounds, depth)
    return _string(summarize(value), bounds)


def _digits(value: int) -> str:
    return str(value) if value.bit_length() < 4096 else f"integer of {value.bit_length():,} bits"


def _string(text: str, bounds: _Bounds) -> str:
    limit = max(0, min(MAX_STRING, bounds.left // 6))  # a control character takes six bytes
    if len(text) > limit:
        bounds.truncated = True
        text = f"{text[:limit]}… ({len(text):,} characters)"
    text = clean_text(text)
    bounds.take(len(json.dumps(text, ensure_ascii=False).encode("utf-8")) + 1)
    return text


def _array(value: list[Any] | tuple[Any, ...], bounds: _Bounds, depth: int) -> Any:
    if depth >= MAX_DEPTH and value:
        bounds.truncated = True
        return _string(f"… list of {len(value):,}", bounds)
    bounds.take(3)
    found: list[Any] = []
    for one in value:
        if len(found) >= MAX_CHILDREN or bounds.left <= 0:
            bounds.truncated = True
            break
        found.append(_bounded(one, bounds, depth + 1))
    return found


def _object(value: Mapping[Any, Any], bounds: _Bounds, depth: int) -> Any:
    if depth >= MAX_DEPTH and value:
        bounds.truncated = True
        return _string(f"… object of {len(value):,}", bounds)
    bounds.take(3)
    found: dict[str, Any] = {}
    for key, one in value.items():
        if len(found) >= MAX_CHILDREN or bounds.left <= 0:
            bounds.truncated = True
            break
        found[_string(str(key)[:1000], bounds)] = _bounded(one, bounds, depth + 1)
    return found


# --- items ------------------------------------------------------------------------------------------------------------


def text_item(name: str, text: str, *, size: int | None = None, format: str = "plain", note: str = "") -> Item:
    """A text, shown as it is.

    Args:
        name: of the item.
        text: all of it, or its head.
        size: bytes of all of it, where `text` is only its head.
        format: what it is written in: plain, or such as ``musicxml``.
        note: what else to say.
    """
    shown, is_short = clean_text(text[:MAX_TEXT]), size is not None
    while len(json.dumps(shown, ensure_ascii=False).encode("utf-8")) > _BUDGET:
        shown, is_short = shown[: len(shown) * 2 // 3], True
    is_short = is_short or len(shown) < len(text)
    facts = {"characters": f"{len(text):,}"} if size is None else {"bytes": human_bytes(size)}
    if not is_short and len(text) > 200:
        facts["words"] = f"{len(text.split()):,}"
    if is_short:
        whole = f"{len(text):,} characters" if size is None else human_bytes(size)
        note = f"{note} Shown are the first {len(shown):,} characters of {whole}.".strip()
    return Item(name=name, kind="text", facts=facts, data={"text": shown, "format": format}, note=note)


def tree_item(name: str, value: object, *, size: int | None = None) -> Item:
    """A JSON value as a tree."""
    tree, is_short = bounded(value)
    facts = {}
    if isinstance(value, Mapping):
        facts["keys"] = f"{len(value):,}"
    elif isinstance(value, list | tuple):
        facts["entries"] = f"{len(value):,}"
    if size is not None:
        facts["bytes"] = human_bytes(size)
    note = "Long texts, lists and objects end early here." if is_short else ""
    return Item(name=name, kind="json", facts=facts, data={"value": tree}, note=note)


def json_item(name: str, content: Content) -> Item:
    """A JSON text as a tree; as text, with a note, where it is not JSON after all."""
    if content.size > MAX_PARSED:
        note = f"JSON of {human_bytes(content.size)} is not parsed here."
        return text_of_bytes(name, content, note=note)
    try:
        value = json.loads(str(content.whole(), "utf-8-sig"))
    except RecursionError:
        return text_of_bytes(name, content, note="The JSON is nested too deeply to be shown as a tree.")
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        return text_of_bytes(name, content, note=f"This is not JSON: {error}.")
    return tree_item(name, value, size=content.size)


def text_of_bytes(
    name: str, content: Content, *, format: str = "plain", note: str = "", content_type: str | None = None
) -> Item:
    """A text from its UTF-8 (or UTF-16 with its mark) bytes; unreadable where it is neither."""
    head = content.head(4 * MAX_TEXT + 4)
    is_whole = len(head) == content.size
    encoding = "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = head.decode(encoding)
    except UnicodeDecodeError as error:
        if is_whole or error.start < len(head) - 4:
            reason = f"It is not text: byte {error.start:,} is not {encoding[:6].rstrip('-').upper()}."
            return unreadable_item(name, f"{note} {reason}".strip(), size=content.size, content_type=content_type)
        text = head[: error.start].decode(encoding)
    if "\0" in text[:4096]:
        return unreadable_item(
            name,
            f"{note} It is not text, and its first bytes are of no known kind of media.".strip(),
            size=content.size,
            content_type=content_type,
        )
    return text_item(name, text, size=None if is_whole else content.size, format=format, note=note)
