"""Values as items: payloads of fields by what their field says of itself, and plain values of a table's column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import singledispatch
from typing import Any

import numpy as np

from mm_assets.display.content import content_item, file_item
from mm_assets.display.item import Content, Item, absent_item, finite, human_bytes, unreadable_item
from mm_assets.display.trees import text_item, tree_item
from mm_assets.errors import EncodeError, FormatError, MediaError, MissingExtraError
from mm_assets.fields.base import Field
from mm_assets.fields.shown import Shown, ShownFile, ShownValue
from mm_assets.media.content_types import Buffer

__all__ = ["column_item", "value_item"]


def value_item(name: str, field: Field, payload: Content, metadata: Buffer = b"") -> Item:
    """What people see of a packed payload.

    Args:
        name: of the modality.
        field: its field; any registered one.
        payload: its data bytes.
        metadata: its metadata record.
    """
    try:
        item = _show(field.shown(metadata, payload), name, payload)
    except FormatError as error:
        return unreadable_item(name, f"The payload is damaged: {_words(error)}.", size=payload.size)
    except (MediaError, EncodeError, MissingExtraError) as error:
        reason = error.reason if isinstance(error, MediaError) else str(error)
        return unreadable_item(name, f"It cannot be shown: {reason}.", size=payload.size)
    return replace(item, facts={**item.facts, "field": type(field).__name__})


def _words(error: FormatError) -> str:
    if error.found is None and error.expected is None:
        return error.detail
    return f"{error.detail} (found {error.found}, expected {error.expected})"


def column_item(name: str, value: object) -> Item:
    """What people see of a value of a table's column."""
    return _of_value(value, name)


# --- what a field shows -----------------------------------------------------------------------------------------------


@singledispatch
def _show(shown: Shown, name: str, payload: Content) -> Item:
    raise TypeError(f"found {type(shown).__name__} as how a value is shown, expected one of mm_assets.fields.shown")


@_show.register
def _(shown: ShownFile, name: str, payload: Content) -> Item:
    return file_item(name, payload.part(shown.offset, shown.size), shown.content_type)


@_show.register
def _(shown: ShownValue, name: str, payload: Content) -> Item:
    item = _of_value(shown.value, name)
    return item if "bytes" in item.facts else replace(item, facts={**item.facts, "bytes": human_bytes(payload.size)})


# --- values -----------------------------------------------------------------------------------------------------------


@singledispatch
def _of_value(value: object, name: str) -> Item:
    return tree_item(name, value)


@_of_value.register
def _(value: None, name: str) -> Item:
    return absent_item(name)


@_of_value.register
def _(value: str, name: str) -> Item:
    return text_item(name, value)


@_of_value.register(bytes)
@_of_value.register(bytearray)
@_of_value.register(memoryview)
def _(value: Buffer, name: str) -> Item:
    return content_item(name, Content.of(value))


@_of_value.register(bool)
@_of_value.register(int)
@_of_value.register(float)
@_of_value.register(np.generic)
def _(value: Any, name: str) -> Item:
    number = value.item() if isinstance(value, np.generic) else value
    return scalar_item(name, number)


@_of_value.register(Mapping)
@_of_value.register(list)
@_of_value.register(tuple)
def _(value: Any, name: str) -> Item:
    return tree_item(name, value)


def scalar_item(name: str, value: object) -> Item:
    """A number, a truth value, or what else has one short text."""
    if isinstance(value, bool):
        return Item(name=name, kind="scalar", data={"value": value, "text": "true" if value else "false"})
    if isinstance(value, float):
        text = f"{value:.9g}" if math.isfinite(value) else str(value)
        return Item(name=name, kind="scalar", data={"value": finite(value, 17), "text": text})
    if isinstance(value, int):
        is_exact = abs(value) <= 2**53
        text = f"{value:,}" if value.bit_length() < 4096 else f"integer of {value.bit_length():,} bits"
        return Item(name=name, kind="scalar", data={"value": value if is_exact else None, "text": text})
    return text_item(name, str(value))
