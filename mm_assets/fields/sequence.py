"""Several values of one field at their positions: the images of an interleaved document, the lines of a dialogue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.fields.base import (
    JSON,
    Encoded,
    Field,
    Item,
    as_bytes_view,
    config_error,
    corrupt,
    describe,
    stored_array,
    truncated,
)
from mm_assets.media.content_types import Buffer

__all__ = ["SequenceField"]

_MAX_POSITION = 2**31 - 1  # positions are int32, as in the row table


@dataclass(frozen=True)
class SequenceField(Field):
    """Values at positions.

    Value: an iterable of (position, value), positions increasing, from 0, at most 2**31 - 1. Positions may have gaps:
    in an interleaved document, texts and images are two sequences that share one count. Decodes to a list of
    (position, value). `decode_item` reads one without the others; `item_payload` gives its payload undecoded,
    `item_payloads` those of all.

    Attributes:
        inner: the field of each value; not itself a sequence.
    """

    TYPE_ID: ClassVar[int] = 60
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype(
        [("num_items", "<u4"), ("item_type_id", "<u2"), ("item_metadata_size", "<u2")]
    )

    inner: Field

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Field) or isinstance(self.inner, SequenceField):
            raise self._wrong_setting("inner", "a field other than SequenceField")

    @property
    def item_field(self) -> Field:
        """`inner`."""
        return self.inner

    def from_json_value(self, value: JSON) -> list[tuple[int, Any]]:
        """A list: each item at its index. Null is a gap."""
        if not isinstance(value, list):
            raise EncodeError(f"found {type(value).__name__}, expected a list for a sequence")
        return [(index, self.inner.from_json_value(item)) for index, item in enumerate(value) if item is not None]

    @property
    def decodes_in_parallel(self) -> bool:
        """As the inner field."""
        return self.inner.decodes_in_parallel

    @property
    def config(self) -> dict[str, JSON]:
        """The inner field's type name and configuration."""
        return {"inner": {"type": type(self.inner).__name__, "config": self.inner.config}}

    def declared_config(self, given: Mapping[str, JSON]) -> dict[str, JSON]:
        """The inner field's type as declared, which may be an import path, and its settings."""
        inner = given["inner"]
        return {"inner": {"type": inner["type"], "config": self.inner.declared_config(inner.get("config") or {})}}

    @classmethod
    def from_config(cls, config: Mapping[str, JSON]) -> Self:
        """Restore a field from its configuration."""
        from mm_assets.fields.registry import field_from_config  # the table of all fields has this one in it

        inner = config.get("inner")
        if set(config) != {"inner"} or not isinstance(inner, Mapping) or not set(inner) <= {"type", "config"}:
            raise config_error("inner", config, '{"inner": {"type": …, "config": …}}')
        if inner.get("type") == cls.__name__:  # refused before it is built: a hostile schema must not recurse
            raise config_error("inner", cls.__name__, "a field other than SequenceField")
        return cls(field_from_config(inner.get("type"), inner.get("config")))

    def encode(self, value: Iterable[tuple[int, Any]]) -> Encoded:
        """Take (position, value) pairs in order of position."""
        return self._join(
            (position, self._within(f"item at position {position}", self.inner.encode, item))
            for position, item in self._pairs(value)
        )

    def encode_items(self, items: Iterable[tuple[int, Encoded]]) -> Encoded:
        """Take (position, payload) pairs in order of position."""
        return self._join(self._pairs(items))

    def _join(self, pairs: Iterable[tuple[int, Encoded]]) -> Encoded:
        positions, items = [], []
        for position, item in pairs:
            positions.append(position)
            items.append(item)
        layout = _Layout(len(items), self.inner.metadata_type.itemsize)
        offsets = layout.items_start + np.cumsum([0, *(len(item.data) for item in items)], dtype="<u8")
        self._expect_data_size(int(offsets[-1]))
        parts: list[bytes | memoryview] = [
            np.array(positions, dtype="<i4").tobytes().ljust(layout.offsets_start, b"\0"),
            offsets.tobytes(),
            *(item.metadata for item in items),
            *(item.data for item in items),
        ]
        record = self._pack_record(layout.num_items, self.inner.TYPE_ID, layout.metadata_size)
        return Encoded(record, b"".join(parts))

    def check(self, value: Iterable[tuple[int, Any]]) -> None:
        """Check each item as its field does."""
        for position, item in self._pairs(value):
            self._within(f"item at position {position}", self.inner.check, item)

    def _pairs(self, value: Iterable[tuple[int, Any]]) -> Iterable[tuple[int, Any]]:
        if isinstance(value, str | Buffer | Mapping) or not isinstance(value, Iterable):
            raise self._wrong_value(value, "a list of (position, value)")
        last = -1
        for index, pair in enumerate(value):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise self._wrong_content(f"{describe(pair)} as item {index}", "(position, value)")
            position, item = pair
            if isinstance(position, bool) or not isinstance(position, int | np.integer):
                raise self._wrong_content(f"position {describe(position)} of item {index}", "an integer")
            if not last < position <= _MAX_POSITION:
                expected = f"positions that increase, from 0, up to {_MAX_POSITION}"
                raise self._wrong_content(f"position {position} after {last} at item {index}", expected)
            if item is None:
                raise self._wrong_content(f"None at position {position}", "a value; leave out a position without one")
            last = int(position)
            yield last, item

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> list[tuple[int, Any]]:
        """Give the list of (position, value)."""
        items = self._open(metadata, data)
        return [self._decode_item(items, index) for index in range(items.layout.num_items)]

    def decode_item(self, metadata: Buffer | np.void, data: Buffer, k: int) -> tuple[int, Any]:
        """Give (position, value) of item `k`, counted from 0 (from the end where negative), reading no other.

        Raises:
            IndexError: there is no such item.
            FormatError: the payload is damaged.
        """
        items = self._open(metadata, data)
        return self._decode_item(items, items.index(k))

    def item_payload(self, metadata: Buffer | np.void, data: Buffer, k: int) -> tuple[int, memoryview, memoryview]:
        """Give (position, metadata record, data) of item `k`, not decoded and not copied; errors as `decode_item`."""
        items = self._open(metadata, data)
        index = items.index(k)
        return (items.position(index), *items.payload(index))

    def item_payloads(self, metadata: Buffer | np.void, data: Buffer) -> Iterator[tuple[int, memoryview, memoryview]]:
        """Give (position, metadata record, data) of each item in order, not decoded and not copied.

        The tables are checked once for all items; `item_payload` checks them at each call.
        """
        items = self._open(metadata, data)
        for index in range(items.layout.num_items):
            yield (items.position(index), *items.payload(index))

    def items(self, metadata: Buffer | np.void, data: Buffer) -> Iterator[Item]:
        """Give each item's position and data."""
        for position, _, content in self.item_payloads(metadata, data):
            yield Item("", position, content)

    def positions(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[np.int32]:
        """Give the positions of all items, (num_items,) int32, increasing."""
        return self._open(metadata, data).positions

    def _open(self, metadata: Buffer | np.void, data: Buffer) -> _Items:
        num_items, type_id, metadata_size = self._unpack_record(metadata)
        expected = (self.inner.TYPE_ID, self.inner.metadata_type.itemsize)
        if (type_id, metadata_size) != expected:
            raise corrupt("items are not of the field's type", found=(type_id, metadata_size), expected=expected)
        return _Items(_Layout(num_items, metadata_size), as_bytes_view(data))

    def _decode_item(self, items: _Items, index: int) -> tuple[int, Any]:
        return items.position(index), self._within(f"item {index}", self.inner.decode, *items.payload(index))


class _Layout:
    """Where the parts of the data start: positions, offsets, records, items."""

    __slots__ = ("items_start", "metadata_size", "num_items", "offsets_start", "records_start")

    def __init__(self, num_items: int, metadata_size: int) -> None:
        self.num_items = num_items
        self.metadata_size = metadata_size
        self.offsets_start = (4 * num_items + 7) & ~7
        self.records_start = self.offsets_start + 8 * (num_items + 1)
        self.items_start = self.records_start + num_items * metadata_size


class _Items:
    """The parts of a payload, checked: positions increase, items lie one after the other and end with the data."""

    __slots__ = ("layout", "offsets", "positions", "view")

    def __init__(self, layout: _Layout, view: memoryview) -> None:
        if layout.items_start > len(view):
            raise truncated("sequence is shorter than its tables", found=len(view), expected=layout.items_start)
        self.layout = layout
        self.view = view
        positions = stored_array(view, "<i4", (layout.num_items,))
        self.positions: npt.NDArray[np.int32] = positions.astype(np.int32)
        self.offsets = stored_array(view, "<u8", (layout.num_items + 1,), offset=layout.offsets_start)
        if int(self.offsets[0]) != layout.items_start or int(self.offsets[-1]) != len(view):
            found = (int(self.offsets[0]), int(self.offsets[-1]))
            raise corrupt("items do not fill the data", found=found, expected=(layout.items_start, len(view)))
        if (self.offsets[1:] < self.offsets[:-1]).any():
            raise corrupt("items are out of order", found="decreasing offsets", expected="increasing ones")
        if (positions < 0).any() or (positions[1:] <= positions[:-1]).any():
            raise corrupt("positions are out of order", found="a negative or repeated one", expected="increasing ones")

    def index(self, k: int) -> int:
        if not -self.layout.num_items <= k < self.layout.num_items:
            raise IndexError(f"item {k} of a sequence of {self.layout.num_items}")
        return k % self.layout.num_items

    def position(self, index: int) -> int:
        return int(self.positions[index])

    def payload(self, index: int) -> tuple[memoryview, memoryview]:
        record = self.layout.records_start + index * self.layout.metadata_size
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.view[record : record + self.layout.metadata_size], self.view[start:end]
