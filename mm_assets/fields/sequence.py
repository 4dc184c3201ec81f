"""Several values of one field at their positions: the images of an interleaved document, the lines of a dialogue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import ge, gt
from struct import pack, unpack_from
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError, FormatError, LimitError, MediaError
from mm_assets.fields.array_spec import as_bytes_view
from mm_assets.fields.base import (
    JSON,
    PAYLOAD,
    Encoded,
    Field,
    Item,
    Locating,
    StoredPart,
    config_error,
    corrupt,
    truncated,
)
from mm_assets.fields.parts import Path
from mm_assets.fields.registry import field_from_config
from mm_assets.fields.shown import RangedBytes, Shown, ShownList, StoredBytes
from mm_assets.media.content_types import Buffer
from mm_assets.summaries import describe

__all__ = ["SequenceField"]

_MAX_POSITION = 2**31 - 1  # positions are int32, as in the row table
_MAX_SHOWN = 500  # items that people are shown
_MAX_SHOWN_TABLES = 8 << 20  # bytes of positions, offsets and records that are read for that


@dataclass(frozen=True)
class SequenceField(Field):
    """Values at positions.

    Value: an iterable of (position, value), positions increasing, from 0, at most 2**31 - 1. Positions may have gaps:
    in an interleaved document, texts and images are two sequences that share one count. Decodes to a list of
    (position, value). `decode_item` reads one without the others; `item_payloads` gives all of them undecoded.

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
        if "inner" not in config:
            return super().from_config(config)  # which refuses it
        inner = config["inner"]
        if not isinstance(inner, Mapping) or not set(inner) <= {"type", "config"}:
            raise config_error("inner", inner, '{"type": …, "config": …}')
        if inner.get("type") == cls.__name__:  # refused before it is built: a hostile schema must not recurse
            raise config_error("inner", cls.__name__, "a field other than SequenceField")
        return super().from_config({**config, "inner": field_from_config(inner.get("type"), inner.get("config"))})

    def encode(self, value: Iterable[tuple[int, Any]]) -> Encoded:
        """Encode (position, value) pairs in order of position."""
        return self._join(self._encoded(value))

    def _encoded(self, value: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Encoded]]:
        for position, item in self._pairs(value):
            try:
                yield position, self.inner.encode(item)
            except EncodeError as error:
                raise self._placed(error, f"item at position {position}") from error

    def encode_items(self, items: Iterable[tuple[int, Encoded]]) -> Encoded:
        """Join (position, payload) pairs in order of position."""
        return self._join(self._pairs(items))

    def _join(self, pairs: Iterable[tuple[int, Encoded]]) -> Encoded:
        joined = list(pairs)
        count = len(joined)
        size = self.inner.metadata_type.itemsize
        offsets_start, _, items_start = _starts(count, size)
        offsets = [*accumulate([len(item.data) for _, item in joined], initial=items_start)]
        self._expect_data_size(offsets[-1])
        parts: list[bytes | memoryview] = [
            pack(f"<{count}i", *[position for position, _ in joined]).ljust(offsets_start, b"\0"),
            pack(f"<{count + 1}Q", *offsets),
            *[item.metadata for _, item in joined],
            *[item.data for _, item in joined],
        ]
        return Encoded(self._pack_record(count, self.inner.TYPE_ID, size), b"".join(parts))

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
        """Return the list of (position, value)."""
        items = self._open(metadata, data)
        return [self._decode_item(items, index) for index in range(len(items))]

    def check_decodable(self, metadata: Buffer | np.void, data: Buffer) -> None:
        """Judge each item as its field does."""
        items = self._open(metadata, data)
        for index in range(len(items)):
            self._within(f"item {index}", self.inner.check_decodable, *items.payload(index)[1:])

    def decode_item(self, metadata: Buffer | np.void, data: Buffer, k: int) -> tuple[int, Any]:
        """Return (position, value) of item `k`, counted from 0 (from the end where negative), reading no other.

        Raises:
            IndexError: there is no such item.
            FormatError: the payload is damaged.
        """
        items = self._open(metadata, data)
        if not -len(items) <= k < len(items):
            raise IndexError(f"item {k} of a sequence of {len(items)}")
        return self._decode_item(items, k % len(items))

    def stored_part(self, path: Path) -> StoredPart | None:
        """An item, by its number: it is found by the tables, and no other item is read."""
        number = path[0]
        if not isinstance(number, int):
            return None
        return StoredPart(number, self.inner, path[1:], partial(self._locate_item, number))

    def _locate_item(self, number: int, metadata: Buffer, size: int) -> Locating:
        tables_size = _starts(self._unpack_record(metadata)[0], self.inner.metadata_type.itemsize)[2]
        items = self._open(metadata, (yield 0, min(tables_size, size)), size=size)
        if not -len(items) <= number < len(items):
            return None
        _, record, start, end = items.place(number % len(items))
        return record, start, end - start

    def item_payloads(self, metadata: Buffer | np.void, data: Buffer) -> Iterator[tuple[int, memoryview, memoryview]]:
        """Return (position, metadata record, data) of each item in order, not decoded and not copied."""
        items = self._open(metadata, data)
        yield from map(items.payload, range(len(items)))

    def item_table(
        self, metadata: Buffer | np.void, stored: RangedBytes
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.void]]:
        """Return the items' positions and metadata records, reading only the tables before their data."""
        return self._open_tables(metadata, stored).table(self.inner.metadata_type)

    def items(self, metadata: Buffer | np.void, data: Buffer) -> Iterator[Item]:
        """Return each item's position and data."""
        for position, _, content in self.item_payloads(metadata, data):
            yield Item("", position, content)

    def writable(self, value: list[tuple[int, Any]] | None) -> list[tuple[int, Any]] | None:
        """Returns the items as their field makes them writable."""
        return None if value is None else [(position, self.inner.writable(item)) for position, item in value]

    def shown(self, metadata: Buffer, stored: StoredBytes) -> ShownList:
        """Each item as its field shows it, without reading any but those that it reads."""
        num_items, size = self._unpack_record(metadata)[0], self.inner.metadata_type.itemsize
        tables_size = _starts(num_items, size)[2]
        if min(tables_size, stored.size) > _MAX_SHOWN_TABLES:
            raise MediaError(PAYLOAD, f"has {num_items:,} items, too many to be listed for a look at them")
        items = self._open_tables(metadata, stored)
        return ShownList(items=self._shown_items(items, stored), count=len(items))

    def _shown_items(self, items: _Items, stored: StoredBytes) -> Iterator[tuple[int, StoredBytes, Shown]]:
        for index in range(min(len(items), _MAX_SHOWN)):
            position, record, start, end = items.place(index)
            content = stored.part(start, end - start)
            yield position, content, self._within(f"item {index}", self.inner.shown, record, content)

    def _open(self, metadata: Buffer | np.void, data: Buffer, *, size: int | None = None) -> _Items:
        num_items, type_id, metadata_size = self._unpack_record(metadata)
        expected = (self.inner.TYPE_ID, self.inner.metadata_type.itemsize)
        if (type_id, metadata_size) != expected:
            raise corrupt("items are not of the field's type", found=(type_id, metadata_size), expected=expected)
        return _Items(num_items, metadata_size, as_bytes_view(data), size)

    def _open_tables(self, metadata: Buffer | np.void, stored: RangedBytes) -> _Items:
        """Opens the tables before the items' data, which is not read."""
        tables_size = _starts(self._unpack_record(metadata)[0], self.inner.metadata_type.itemsize)[2]
        return self._open(metadata, stored.read(0, min(tables_size, stored.size)), size=stored.size)

    def _decode_item(self, items: _Items, index: int) -> tuple[int, Any]:
        position, metadata, data = items.payload(index)
        try:
            return position, self.inner.decode(metadata, data)
        except (FormatError, LimitError) as error:
            raise self._placed(error, f"item {index}") from error


def _starts(num_items: int, metadata_size: int) -> tuple[int, int, int]:
    """Where the offsets, the records and the items begin; the positions are before them."""
    offsets_start = (4 * num_items + 7) & ~7
    records_start = offsets_start + 8 * (num_items + 1)
    return offsets_start, records_start, records_start + num_items * metadata_size


class _Items:
    """The parts of a payload, checked: positions increase, items lie one after the other and end with the data.

    With a `size`, the view is only what is before the items of data of that many bytes.
    """

    __slots__ = ("_metadata_size", "_offsets", "_positions", "_records_start", "_view")

    def __init__(self, num_items: int, metadata_size: int, view: memoryview, size: int | None = None) -> None:
        size = len(view) if size is None else size
        offsets_start, self._records_start, items_start = _starts(num_items, metadata_size)
        if items_start > len(view):
            raise truncated("sequence is shorter than its tables", found=len(view), expected=items_start)
        self._metadata_size, self._view = metadata_size, view
        # Tuples and not arrays: most sequences are short, and each call of NumPy costs more than their few items.
        positions = self._positions = unpack_from(f"<{num_items}i", view)
        offsets = self._offsets = unpack_from(f"<{num_items + 1}Q", view, offsets_start)
        if offsets[0] != items_start or offsets[-1] != size:
            found = (offsets[0], offsets[-1])
            raise corrupt("items do not fill the data", found=found, expected=(items_start, size))
        if any(map(gt, offsets, offsets[1:])):
            raise corrupt("items are out of order", found="decreasing offsets", expected="increasing ones")
        if (positions and positions[0] < 0) or any(map(ge, positions, positions[1:])):
            raise corrupt("positions are out of order", found="a negative or repeated one", expected="increasing ones")

    def __len__(self) -> int:
        return len(self._positions)

    def table(self, record: np.dtype[np.void]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.void]]:
        """Returns positions and metadata records of all items, views of the tables."""
        records = np.frombuffer(self._view, record, len(self), self._records_start)
        return np.frombuffer(self._view, "<i4", len(self)), records

    def place(self, index: int) -> tuple[int, memoryview, int, int]:
        """Position and metadata record of an item, and where its data begins and ends."""
        record = self._records_start + index * self._metadata_size
        metadata = self._view[record : record + self._metadata_size]
        return self._positions[index], metadata, self._offsets[index], self._offsets[index + 1]

    def payload(self, index: int) -> tuple[int, memoryview, memoryview]:
        """Position, metadata record and data of an item."""
        position, metadata, start, end = self.place(index)
        return position, metadata, self._view[start:end]
