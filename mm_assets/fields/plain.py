"""Bytes, text and JSON: values that are their own data bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.fields.array_spec import as_bytes_view
from mm_assets.fields.base import JSON, Encoded, Field, corrupt, decode_utf8, truncated
from mm_assets.json_text import MAX_DEPTH, call_with_room, parse_json
from mm_assets.media.content_types import Buffer
from mm_assets.summaries import describe

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BytesField", "JSONField", "RawJSON", "TextField", "json_of_utf8"]


@dataclass(frozen=True)
class BytesField(Field):
    """Bytes unchanged: a file of a kind that no other field knows.

    Value: bytes (bytearray and memoryview are taken too). Decodes to bytes.
    """

    TYPE_ID: ClassVar[int] = 1
    TAKES_JSON: ClassVar[bool] = False
    TAKES_ANY_BYTES: ClassVar[bool] = True
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype([("num_bytes", "<u8")])
    keeps_bytes: ClassVar[bool] = True

    def encode(self, value: Buffer) -> Encoded:
        """Encode bytes."""
        self.check(value)
        data = bytes(value)
        return Encoded(self._pack_record(len(data)), data)

    def check(self, value: Buffer) -> None:
        """Accept any bytes."""
        if not isinstance(value, Buffer):
            raise self._wrong_value(value, "bytes")

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> bytes:
        """Return bytes."""
        (num_bytes,) = self._unpack_record(metadata)
        view = as_bytes_view(data)
        if len(view) != num_bytes:
            raise truncated("data is not as long as its record says", found=len(view), expected=num_bytes)
        return bytes(view)


@dataclass(frozen=True)
class TextField(Field):
    """Text, stored as UTF-8 exactly as it is: no normalisation, no change of line ends.

    Value: str, or its UTF-8 bytes. Decodes to str. A lone surrogate has no UTF-8 form and is refused.
    """

    TYPE_ID: ClassVar[int] = 2
    CONTENT_KIND: ClassVar[str] = "text"
    SHOWN_TYPE: ClassVar[str] = "text/plain"
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype([("num_code_points", "<u4"), ("_pad", "<u4")])
    keeps_bytes: ClassVar[bool] = True

    @property
    def arrow_type(self) -> pa.DataType:
        """Text."""
        import pyarrow as pa

        return pa.string()

    def from_csv_cell(self, cell: str) -> str:
        """The cell's text."""
        return cell

    def encode(self, value: str | Buffer) -> Encoded:
        """Encode text or its UTF-8 bytes."""
        try:
            if isinstance(value, str):
                text, data = value, value.encode("utf-8")
            elif isinstance(value, Buffer):
                data = bytes(value)
                text = data.decode("utf-8")
            else:
                raise self._wrong_value(value, "text or UTF-8 bytes")
        except UnicodeError as error:
            raise self._wrong_content(f"{describe(value)} ({error})", "text or UTF-8 bytes") from error
        self._expect_data_size(len(data))
        return Encoded(self._pack_record(len(text)), data)

    def check(self, value: str | Buffer) -> None:
        """Accept text and UTF-8 bytes."""
        if type(self) is TextField and isinstance(value, memoryview):
            with suppress(UnicodeError):  # `encode` says what is wrong
                str(value, "utf-8")
                self._expect_data_size(value.nbytes)
                return
        self.encode(value)

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> str:
        """Return text."""
        (num_code_points,) = self._unpack_record(metadata)
        text = decode_utf8(data)
        if len(text) != num_code_points:
            raise corrupt("text is not as long as its record says", found=len(text), expected=num_code_points)
        return text

    def _decode_together(self, records: npt.NDArray[np.uint8], datas: Sequence[Buffer]) -> list[str] | None:
        """Texts, whose records are unpacked together."""
        try:
            texts = list(map(str, datas, repeat("utf-8")))
        except UnicodeDecodeError:
            return None
        counts = np.ascontiguousarray(records).view(self.metadata_type)["num_code_points"].ravel()
        return texts if list(map(len, texts)) == counts.tolist() else None


@dataclass(frozen=True, slots=True)
class RawJSON:
    """JSON text of one value, to be stored as it is written, numbers, spaces and all."""

    text: str


_KINDS = ((dict, 1), (list, 2), (str, 3), (bool, 5), (int | float, 4), (type(None), 6))


def _kind_of(value: JSON) -> int:
    return next(kind for types, kind in _KINDS if isinstance(value, types))


@dataclass(frozen=True)
class JSONField(Field):
    """Any JSON value.

    Value: dict with str keys, list, tuple (comes back as a list), str, int, finite float, bool. A str is a value, a
    JSON string; `RawJSON` or bytes are JSON text and stored as it is. The top-level JSON null is a value too; as
    Python's None it means absent, so it is written as ``RawJSON("null")``.
    """

    TYPE_ID: ClassVar[int] = 3
    CONTENT_KIND: ClassVar[str] = "json"
    SHOWN_TYPE: ClassVar[str] = "application/json"
    HOLDS_JSON: ClassVar[bool] = True
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype([("kind", "u1"), ("_pad", "u1", (7,))])
    keeps_bytes: ClassVar[bool] = True  # JSON text

    @property
    def arrow_type(self) -> pa.DataType:
        """JSON text."""
        import pyarrow as pa

        return pa.string()

    def to_arrow(self, values: Sequence[Any], datas: Sequence[Buffer | None]) -> pa.Array | pa.ChunkedArray:
        """The stored texts: values of any JSON type are not a column."""
        import pyarrow as pa

        return pa.array([None if data is None else str(as_bytes_view(data), "utf-8") for data in datas], pa.string())

    def encode(self, value: JSON | RawJSON | Buffer) -> Encoded:
        """Encode a value, or JSON text as bytes or `RawJSON`."""
        try:
            if isinstance(value, RawJSON | Buffer):
                data = value.text.encode("utf-8") if isinstance(value, RawJSON) else bytes(value)
                kind = _kind_of(json_of_utf8(data))
            else:
                data = self._dump(value)
                kind = 2 if isinstance(value, tuple) else _kind_of(value)
        except ValueError as error:
            if isinstance(error, EncodeError):
                raise
            raise self._wrong_content(f"{describe(value)} ({error})", "a JSON value, or JSON text as bytes") from error
        return Encoded(self._pack_record(kind), data)

    def check(self, value: JSON | RawJSON | Buffer) -> None:
        """Accept a value, or JSON text."""
        if type(self) is JSONField and isinstance(value, memoryview):
            with suppress(ValueError):  # `encode` says what is wrong
                json_of_utf8(value)
                return
        self.encode(value)

    def _dump(self, value: JSON) -> bytes:
        self._check_types(value)
        try:
            return call_with_room(_DUMP.encode, value).encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate, which JSON can hold only as an escape
            return call_with_room(_DUMP_ASCII.encode, value).encode("ascii")

    def _check_types(self, value: JSON) -> None:
        # json would turn the keys 1 and None into "1" and "null": what is read back must be what was written.
        if value is None:
            raise self._wrong_value(value, "a value; None means absent, RawJSON('null') the JSON null")
        stack: list[tuple[JSON, int]] = [(value, 0)]
        while stack:
            item, depth = stack.pop()
            if depth >= MAX_DEPTH and isinstance(item, dict | list | tuple):
                raise self._wrong_content(f"a value nested more than {MAX_DEPTH} deep, or within itself", "JSON")
            if isinstance(item, dict):
                for key in item:
                    if not isinstance(key, str):
                        raise self._wrong_content(f"a dict with key {describe(key)}", "str keys")
                stack.extend((child, depth + 1) for child in item.values())
            elif isinstance(item, list | tuple):
                stack.extend((child, depth + 1) for child in item)
            elif not isinstance(item, str | bool | int | float | None):
                raise self._wrong_value(item, "dict, list, str, int, float, bool or None")

    def writable(self, value: JSON) -> JSON:
        """The value itself, which has no arrays."""
        return value

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> JSON:
        """Return the value."""
        (kind,) = self._unpack_record(metadata)
        try:
            value = json_of_utf8(data, max_depth=None)  # earlier releases stored deeper ones
        except ValueError as error:
            raise corrupt(f"data {error}") from error
        if _kind_of(value) != kind:
            raise corrupt("JSON is of another kind than its record says", found=_kind_of(value), expected=kind)
        return value


_DUMP = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DUMP_ASCII = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def json_of_utf8(data: Buffer, *, max_depth: int | None = MAX_DEPTH) -> JSON:
    """The value of JSON text, as `parse_json` of `mm_assets.json_text` reads it.

    Raises:
        ValueError: it is not JSON in UTF-8, or too deep.
    """
    # Decoded here, since json would guess UTF-16 and UTF-32, and take a byte order mark.
    return parse_json(str(data, "utf-8"), max_depth=max_depth)
