"""Several values of one field at their positions: the images of an interleaved document, the lines of a dialogue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError, FormatError
from mm_assets.fields.base import (
    JSON,
    Encoded,
    Field,
    Item,
    as_bytes_view,
    config_error,
    corrupt,
    describe,
    truncated,
    wrong_content,
    wrong_value,
)
from mm_assets.media.content_types import Buffer

__all__ = ["SequenceField"]

# docs/fields.md, type 60
_RECORD = np.dtype([("num_items", "<u4"), ("item_type_id", "<u2"), ("item_metadata_size", "<u2")])

_MAX_POSITION = 2**31 - 1  # positions are int32, as in the row table
_MAX_DATA = 2**32 - 1  # a container's payload size is uint32


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

    inner: Field

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Field) or isinstance(self.inner, SequenceField):
            raise config_error("inner", self.inner, "a field other than SequenceField")

    @property
    def metadata_type(self) -> np.dtype[np.void]:
        """The metadata record, 8 bytes."""
        return _RECORD

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
        items = []
        for position, item in self._pairs(value):
            try:
                items.append((position, self.inner.encode(item)))
            except EncodeError as error:
                raise EncodeError(f"SequenceField, item at position {position}: {error}") from error
        return self._join(items)

    def encode_items(self, items: Iterable[tuple[int, Encoded]]) -> Encoded:
        """Take (position, payload) pairs in order of position."""
        return self._join(list(self._pairs(items)))

    def _join(self, pairs: list[tuple[int, Encoded]]) -> Encoded:
        positions, items = [position for position, _ in pairs], [item for _, item in pairs]
        num_items = len(items)
        offsets = np.zeros(num_items + 1, dtype="<u8")
        np.cumsum(np.array([len(item.data) for item in items], dtype="<u8"), out=offsets[1:])
        layout = _Layout(num_items, self.inner.metadata_type.itemsize)
        offsets += np.uint64(layout.items_start)
        if offsets[-1] > _MAX_DATA:
            raise wrong_content(self, f"{offsets[-1]} bytes of data", f"at most {_MAX_DATA}")
        parts: list[bytes | memoryview] = [
            np.array(positions, dtype="<i4").tobytes().ljust(layout.offsets_start, b"\0"),
            offsets.tobytes(),
            *(item.metadata for item in items),
            *(item.data for item in items),
        ]
        record = self._pack_record(num_items, self.inner.TYPE_ID, self.inner.metadata_type.itemsize)
        return Encoded(record, b"".join(parts))

    def check(self, value: Iterable[tuple[int, Any]]) -> None:
        """Check each item as its field does."""
        for position, item in self._pairs(value):
            try:
                self.inner.check(item)
            except EncodeError as error:
                raise EncodeError(f"SequenceField, item at position {position}: {error}") from error

    def _pairs(self, value: Iterable[tuple[int, Any]]) -> Iterable[tuple[int, Any]]:
        if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
            raise wrong_value(self, value, "a list of (position, value)")
        last = -1
        for index, pair in enumerate(value):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise wrong_content(self, f"{describe(pair)} as item {index}", "(position, value)")
            position, item = pair
            if isinstance(position, bool) or not isinstance(position, int | np.integer):
                raise wrong_content(self, f"position {describe(position)} of item {index}", "an integer")
            if not last < position <= _MAX_POSITION:
                expected = f"positions that increase, from 0, up to {_MAX_POSITION}"
                raise wrong_content(self, f"position {position} after {last} at item {index}", expected)
            if item is None:
                raise wrong_content(self, f"None at position {position}", "a value; leave out a position without one")
            last = int(position)
            yield last, item

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> list[tuple[int, Any]]:
        """Give the list of (position, value)."""
        items = self._open(metadata, data)
        return [(items.position(k), self._decode_item(items, k)) for k in range(items.layout.num_items)]

    def decode_item(self, metadata: Buffer | np.void, data: Buffer, k: int) -> tuple[int, Any]:
        """Give (position, value) of item `k`, counted from 0 (from the end where negative), reading no other.

        Raises:
            IndexError: there is no such item.
            FormatError: the payload is damaged.
        """
        items = self._open(metadata, data)
        index = items.index(k)
        return items.position(index), self._decode_item(items, index)

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

    def _decode_item(self, items: _Items, index: int) -> Any:
        try:
            return self.inner.decode(*items.payload(index))
        except FormatError as error:
            raise type(error)(
                error.path, f"item {index}: {error.detail}", found=error.found, expected=error.expected
            ) from error


class _Layout:
    """Where the four parts of the data start."""

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
        positions = np.frombuffer(view, dtype="<i4", count=layout.num_items) if layout.num_items else np.zeros(0, "<i4")
        self.positions: npt.NDArray[np.int32] = positions.astype(np.int32)
        self.offsets = np.frombuffer(view, dtype="<u8", count=layout.num_items + 1, offset=layout.offsets_start)
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
