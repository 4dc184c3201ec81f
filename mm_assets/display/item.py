"""What people see of a value: an item with facts, bounded data and media; and the content that it is made of.

Everything here is bounded: an item's data is at most `MAX_DATA` of JSON, and content that has to be held in memory at
once is at most `MAX_WHOLE`. No text is markup: who shows an item writes its strings as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mm_assets.errors import MediaError

__all__ = [
    "KINDS",
    "MAX_DATA",
    "MAX_SECONDS",
    "MAX_TEXT",
    "MAX_WHOLE",
    "Content",
    "Item",
    "Media",
    "absent_item",
    "clean_text",
    "finite",
    "human_bytes",
    "human_seconds",
    "human_size",
    "json_size",
    "made",
    "stored",
    "unreadable_item",
]

KINDS: tuple[str, ...] = ("text", "json", "scalar", "tokens", "array", "series", "image", "images", "depth", "audio")
KINDS += ("video", "midi", "document", "page", "absent", "unreadable")
MAX_DATA = 256 << 10  # bytes of an item's data as JSON
MAX_TEXT = 100_000  # characters of a text that is shown
MAX_WHOLE = 64 << 20  # bytes that are held at once for a look at them
MAX_SECONDS = 3.0  # after which no further part of a value is made, such as a page or an item of a sequence


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes that are read by ranges: a payload's data, a member of a container, a row's content.

    Attributes:
        size: bytes in all.
        read: takes an offset and a size within them, returns the bytes there.
    """

    size: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> Content:
        """Content in memory."""
        view = memoryview(data).cast("B")
        return cls(len(view), lambda offset, size: bytes(view[offset : offset + size]))

    def part(self, offset: int, size: int) -> Content:
        """A run of it; one that leaves it is truncated at its end."""
        start = min(max(offset, 0), self.size)
        length = min(max(size, 0), self.size - start)
        return Content(length, lambda at, count: self.read(start + at, min(count, length - at)))

    def head(self, size: int) -> bytes:
        """The first bytes, at most `size`."""
        return self.read(0, min(size, self.size)) if self.size else b""

    def whole(self) -> bytes:
        """All bytes; `MediaError` for more than `MAX_WHOLE`."""
        if self.size > MAX_WHOLE:
            limit = human_bytes(MAX_WHOLE)
            raise MediaError("<content>", f"has {human_bytes(self.size)}, and at most {limit} are decoded to be shown")
        return self.head(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """Bytes of an item that a browser fetches: stored ones by range, or made ones.

    Attributes:
        name: unique in its item, of ``[a-z0-9_-]+``.
        content_type: MIME type, one of a fixed list: never that of the content's own claim.
        size: bytes, where `read` is given.
        read: takes an offset and a size, returns the stored bytes there; None for made bytes.
        make: computes the bytes, of bounded size; `MediaError` where the content cannot be decoded. None for stored
            bytes.
    """

    name: str
    content_type: str
    size: int | None = None
    read: Callable[[int, int], bytes] | None = None
    make: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One modality, member or column of a sample, as people see it.

    Attributes:
        name: of the modality, member or column.
        kind: how it is shown, one of `KINDS`.
        facts: name to value, for people.
        data: JSON of the kind, at most `MAX_DATA`.
        media: what is fetched separately.
        note: why it is unreadable, or what is not shown.
    """

    name: str
    kind: str
    facts: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[Media, ...] = ()
    note: str = ""

    def medium(self, name: str) -> Media | None:
        """The media of a name, or None."""
        return next((one for one in self.media if one.name == name), None)


def absent_item(name: str) -> Item:
    """A modality that the sample does not have."""
    return Item(name=name, kind="absent", note="This sample has none.")


def unreadable_item(name: str, reason: str, *, size: int | None = None, content_type: str | None = None) -> Item:
    """Content that cannot be decoded, with the reason in plain words."""
    facts = {} if content_type is None else {"type": content_type}
    if size is not None:
        facts["bytes"] = human_bytes(size)
    return Item(name=name, kind="unreadable", facts=facts, note=clean_text(reason)[:2000])


def stored(name: str, content: Content, content_type: str) -> Media:
    """Media of stored bytes."""
    return Media(name=name, content_type=content_type, size=content.size, read=content.read)


def made(name: str, content_type: str, make: Callable[[], bytes]) -> Media:
    """Media of made bytes."""
    return Media(name=name, content_type=content_type, make=make)


def clean_text(text: str) -> str:
    """Text with a UTF-8 form: lone surrogates, which JSON may hold, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def finite(number: float, digits: int = 6) -> float | None:
    """A number that JSON can hold, rounded to significant digits; None for NaN and infinities."""
    rounded = float(f"{float(number):.{digits}g}")  # the largest of all numbers become infinite
    return rounded if math.isfinite(rounded) else None


def human_bytes(size: int) -> str:
    """A number of bytes for people: ``812 B``, ``1.2 MB``; a thousand bytes are a kB."""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.1f} TB"


def human_seconds(seconds: float) -> str:
    """A duration for people: ``3.2 s``, ``2:05 min``, ``1:02:03 h``."""
    if not math.isfinite(seconds) or seconds < 0:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60:,}:{minutes % 60:02}:{rest:02} h"


def human_size(width: int, height: int) -> str:
    """Width and height for people."""
    return f"{width:,} x {height:,}"


def json_size(value: object) -> int:
    """Bytes of a JSON value as it is sent."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))
