"""Fields of Protocol Buffers messages, read without their schema."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["read_fields"]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # types of fields
_MAX_VARINT_BYTES = 10


def read_fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields the number and the value of each field: an integer, or bytes.

    Raises:
        ValueError: the bytes are not a message, or end inside of a field.
    """
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"byte {at} of a message has a field of type {kind}, which does not exist")
        if size > len(message) - at:
            raise ValueError(f"a field at byte {at} of a message has {size} bytes, only {len(message) - at} follow")
        content = message[at : at + size]
        yield tag >> 3, content if kind == _BYTES else int.from_bytes(content, "little")
        at += size


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """Returns a number of variable size, and the byte after it."""
    value = 0
    for place, byte in enumerate(message[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError(f"the number at byte {at} of a message has no end")
