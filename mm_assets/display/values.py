"""Values as items: payloads of fields as their field describes them, and plain values of a table's column."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import singledispatch
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from mm_assets.display.clips import clip_item
from mm_assets.display.content import content_item, file_item
from mm_assets.display.item import (
    MAX_DATA,
    MAX_SECONDS,
    Content,
    Item,
    Media,
    absent_item,
    finite,
    human_bytes,
    json_size,
    unreadable_item,
)
from mm_assets.display.numbers import array_item, map_item, series_item
from mm_assets.display.pages import pages_item
from mm_assets.display.pictures import MAX_FRAMES, frames_item
from mm_assets.display.sounds import samples_item
from mm_assets.display.trees import text_item, tree_item
from mm_assets.display.words import timed_item, tokens_data, tokens_item
from mm_assets.errors import EncodeError, FormatError, LimitError, MediaError, MissingExtraError
from mm_assets.fields.base import Field
from mm_assets.fields.series_value import TimeSeries
from mm_assets.fields.shown import (
    Shown,
    ShownClip,
    ShownFile,
    ShownList,
    ShownMap,
    ShownPages,
    ShownPair,
    ShownSamples,
    ShownTokens,
    ShownValue,
    StoredBytes,
)
from mm_assets.media.content_types import Buffer, content_type_of_name
from mm_assets.media.subtitles import TimedSegment

__all__ = ["column_item", "value_item"]

T = TypeVar("T")

_LEAST_ARRAY = 8  # numbers of a list that is shown as an array
_MOST_AXES = 4
_IDS = ("input_ids", "token_ids", "tokens")  # columns of token ids
_MOST_FILE_KEYS = 4


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
    except LimitError as error:
        return unreadable_item(name, f"It is too large to be decoded: {_words(error)}.", size=payload.size)
    except (MediaError, EncodeError, MissingExtraError) as error:
        reason = error.reason if isinstance(error, MediaError) else str(error)
        return unreadable_item(name, f"It cannot be shown: {reason}.", size=payload.size)
    return replace(item, facts={**item.facts, "field": type(field).__name__})


def _words(error: FormatError | LimitError) -> str:
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
    return (
        item
        if "bytes" in item.facts or not payload.size
        else replace(item, facts={**item.facts, "bytes": human_bytes(payload.size)})
    )


@_show.register
def _(shown: ShownSamples, name: str, payload: Content) -> Item:
    return samples_item(name, shown, payload)


@_show.register
def _(shown: ShownTokens, name: str, payload: Content) -> Item:
    return tokens_item(name, shown, size=payload.size)


@_show.register
def _(shown: ShownMap, name: str, payload: Content) -> Item:
    return map_item(name, shown.values, unit=shown.unit, size=payload.size)


@_show.register
def _(shown: ShownClip, name: str, payload: Content) -> Item:
    return clip_item(name, shown, payload)


@_show.register
def _(shown: ShownPair, name: str, payload: Content) -> Item:
    item = _show(shown.image, name, payload)
    facts = dict(item.facts)
    data = {**item.data, "tokens": tokens_data(shown.tokens)}
    facts["tokens"] = f"{len(shown.tokens.ids):,}"
    if shown.text is not None:
        data["caption"] = text_item(name, shown.text).data["text"][:20_000]
    if shown.score is not None:
        facts["score"] = f"{shown.score:.4g}"
    return replace(item, facts=facts, data=data)


@_show.register
def _(shown: ShownPages, name: str, payload: Content) -> Item:
    pages = [(number, _show(page, name, payload)) for number, page in enumerate(_in_time(shown.pages))]
    sizes = None if shown.layout is None else shown.layout.page_sizes
    count = len(shown.pages) or (0 if sizes is None else len(sizes))
    facts = {"pages": f"{count:,}", "bytes": human_bytes(payload.size)}
    item = pages_item(name, pages, shown.layout, facts)
    if len(pages) == len(shown.pages):
        return item
    return replace(item, note=f"{item.note} Shown are the first {len(pages)} of {count:,} pages.".strip())


@_show.register
def _(shown: ShownList, name: str, payload: Content) -> Item:
    items = [(position, _shown_item(one, name, content)) for position, content, one in _in_time(shown.items)]
    facts = {"items": f"{shown.count:,}", "bytes": human_bytes(payload.size)}
    note = f"Shown are the first {len(items)} of {shown.count:,}." if shown.count > len(items) else ""
    kinds = {item.kind for _, item in items}
    if "image" in kinds and kinds <= {"image", "unreadable"}:
        return frames_item(name, items, facts=facts, note=note)
    blocks, media, is_short = _blocks(items)
    if is_short:
        note = f"{note} Long items end early here.".strip()
    return Item(name=name, kind="document", facts=facts, data={"blocks": blocks}, media=media, note=note)


def _in_time(parts: Iterable[T]) -> Iterator[T]:
    """The first parts of a value: at most `MAX_FRAMES`, and those that are made within some seconds."""
    ends = time.monotonic() + MAX_SECONDS
    for part in islice(parts, MAX_FRAMES):
        yield part
        if time.monotonic() > ends:
            return


def _shown_item(shown: Shown, name: str, content: StoredBytes) -> Item:
    try:
        return _show(shown, name, Content(content.size, content.read))
    except (MediaError, EncodeError, MissingExtraError, FormatError) as error:
        return unreadable_item(name, f"It cannot be shown: {error}.", size=content.size)


def _blocks(items: list[tuple[int, Item]]) -> tuple[list[dict[str, Any]], tuple[Media, ...], bool]:
    """Items in one: each with its position, and its media under names of its own; whether some data did not fit."""
    blocks: list[dict[str, Any]] = []
    media: list[Media] = []
    left, is_short = MAX_DATA - 16_384, False
    for number, (position, item) in enumerate(items):
        prefix = f"i{number}-"
        block = {"position": position, "kind": item.kind, "facts": dict(item.facts), "note": item.note}
        data = dict(item.data)
        if json_size(data) > left and "text" in data:
            data["text"] = str(data["text"])[: max(0, left // 8)]
        if json_size(data) > left:
            data, is_short = {}, True
            block |= {"kind": "unreadable", "note": "The items before it take all the space of one value here."}
        left -= json_size(data) + 200
        blocks.append({**block, "data": data, "prefix": prefix})
        media += [replace(one, name=f"{prefix}{one.name}") for one in item.media]
    return blocks, tuple(media), is_short


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


@_of_value.register
def _(value: np.ndarray, name: str) -> Item:
    return tokens_item(name, ShownTokens(ids=value)) if _is_ids(name, value) else array_item(name, value)


@_of_value.register
def _(value: TimeSeries, name: str) -> Item:
    return series_item(name, value)


@_of_value.register(list)
@_of_value.register(tuple)
def _(value: Any, name: str) -> Item:
    if value and all(isinstance(one, TimedSegment) for one in value):
        return timed_item(name, value)
    array = _array_of(value) if len(value) >= _LEAST_ARRAY else None
    if array is not None and _is_ids(name, array):
        return tokens_item(name, ShownTokens(ids=array))
    return tree_item(name, value) if array is None else array_item(name, array)


def _is_ids(name: str, array: np.ndarray[Any, Any]) -> bool:
    """Whether integers are those of a text's tokens: by their name, as tables of tokenized text have them."""
    is_sequence = array.ndim == 1 and array.dtype.kind in "iu" and array.size > 0
    return is_sequence and name.rsplit(" ", 1)[-1].lower() in _IDS and int(array.min()) >= 0


def _array_of(value: Any) -> np.ndarray[Any, Any] | None:
    """The array that a list of numbers, or of equally long lists of them, is; None for any other list."""
    if not isinstance(value[0], int | float | list):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, TypeError):  # lists of several lengths, or integers of any length
        return None
    return array if array.dtype.kind in "iuf" and array.ndim <= _MOST_AXES else None


@_of_value.register(Mapping)
def _(value: Any, name: str) -> Item:
    data, path = value.get("bytes"), value.get("path")
    if isinstance(data, Buffer) and len(value) <= _MOST_FILE_KEYS:  # a file in a table, as Hugging Face's datasets have
        return file_item(name, Content.of(data), content_type_of_name(str(path or name)), trusted=False)
    return tree_item(name, value)


@_of_value.register(datetime.date)
@_of_value.register(datetime.time)
@_of_value.register(datetime.timedelta)
@_of_value.register(Decimal)
def _(value: object, name: str) -> Item:
    return Item(name=name, kind="scalar", data={"value": None, "text": str(value)[:200]})


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
