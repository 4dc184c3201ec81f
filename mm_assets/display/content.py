"""Raw bytes as an item: a member of a container, the content of a row, or the file in a payload.

Bytes choose how they are shown: media by their magic number, and only what has none by the type or name that is given.
Whatever bytes arrive, `content_item` returns an item.
"""

from __future__ import annotations

from collections.abc import Callable

from mm_assets.display.clips import video_item
from mm_assets.display.item import MAX_WHOLE, Content, Item, unreadable_item
from mm_assets.display.numbers import array_item, map_item
from mm_assets.display.pictures import MAX_PIXELS, image_item
from mm_assets.display.scores import midi_item
from mm_assets.display.sounds import audio_item
from mm_assets.display.trees import json_item, text_of_bytes
from mm_assets.display.words import subtitles_item
from mm_assets.errors import EncodeError, FormatError, MediaError, MissingExtraError
from mm_assets.fields.depth import DepthField
from mm_assets.fields.ndarray import array_of_npy
from mm_assets.media.content_types import content_type_of_name, sniff_content_type
from mm_assets.media.images import probe_image

__all__ = ["content_item", "file_item"]

_HEAD = 512  # bytes that determine a type
_JSON = ("application/json", "application/geo+json", "application/ld+json")
_TEXT = (
    "application/jsonl",
    "application/yaml",
    "application/xml",
    "application/vnd.recordare.musicxml+xml",
    "application/x-subrip",
    "image/svg+xml",
)
_FORMATS = {
    "image/svg+xml": "svg",
    "text/html": "html",
    "text/csv": "csv",
    "application/yaml": "yaml",
    "application/xml": "xml",
    "application/vnd.recordare.musicxml+xml": "musicxml",
    "application/jsonl": "jsonl",
}
_WORDS = {
    "application/pdf": "a PDF",
    "application/zip": "a zip archive",
    "application/gzip": "compressed with gzip",
    "application/zstd": "compressed with zstd",
    "application/x-tar": "a tar archive",
}


def content_item(name: str, content: Content, content_type: str | None = None) -> Item:
    """What people see of bytes.

    Args:
        name: of the item; its extension determines a type that the bytes do not show.
        content: the bytes.
        content_type: MIME type that the source claims. Magic numbers have precedence over it.
    """
    return file_item(name, content, content_type, trusted=False)


def file_item(name: str, content: Content, content_type: str | None, *, trusted: bool = True) -> Item:
    """As `content_item`; a text type is taken at its word where a field, and not a source, says it."""
    head = content.head(_HEAD)
    claimed = (content_type or _type_of_name(name) or "").split(";", 1)[0].strip().lower()
    is_text = claimed.startswith("text/") or claimed in _TEXT or claimed in _JSON
    found = claimed if trusted and is_text else sniff_content_type(head) or claimed
    if not content.size:
        return text_of_bytes(name, content, note="It is empty.")
    try:
        for accepts, show in _READERS:
            if accepts(found):
                return show(name, content, found)
        if found in _JSON or (not found and head.lstrip()[:1] in (b"{", b"[")):
            return json_item(name, content)
        if found in _WORDS:
            reason = f"It is {_WORDS[found]}, which is not opened here."
            return unreadable_item(name, reason, size=content.size, content_type=found)
        return text_of_bytes(name, content, format=_FORMATS.get(found, "plain"), content_type=found or None)
    except (MediaError, EncodeError, MissingExtraError) as error:
        reason = error.reason if isinstance(error, MediaError) else str(error)
        return unreadable_item(name, f"It cannot be shown: {reason}.", size=content.size, content_type=found or None)


def _type_of_name(name: str) -> str | None:
    """The type of a file's extension; of lyrics that of subtitles, which are read in the same way."""
    return "application/x-subrip" if name.lower().endswith(".lrc") else content_type_of_name(name)


def _is_image(content_type: str) -> bool:
    return content_type.startswith("image/") and content_type not in _TEXT


def _image(name: str, content: Content, content_type: str) -> Item:
    """A picture; a map of numbers where its samples have more than 8 bits and one channel."""
    if content_type in ("image/png", "image/tiff") and content.size <= MAX_WHOLE:
        data = content.whole()
        if _is_map(data):
            field = DepthField(max_pixels=MAX_PIXELS)
            try:
                return map_item(name, field.decode(*field.encode(data)), size=content.size)
            except (EncodeError, FormatError):
                pass  # a picture after all, or damaged, and said so below
    return image_item(name, content)


def _is_map(data: bytes) -> bool:
    try:
        info = probe_image(data)
    except MediaError:
        return False
    is_small = info.width * info.height <= MAX_PIXELS
    return info.bit_depth >= 16 and info.channels == 1 and info.num_frames == 1 and is_small


def _npy(name: str, content: Content, content_type: str) -> Item:
    return array_item(name, array_of_npy(content.whole()), size=content.size)


_READERS: tuple[tuple[Callable[[str], bool], Callable[[str, Content, str], Item]], ...] = (
    (lambda kind: kind == "audio/midi", midi_item),
    (lambda kind: kind.startswith("audio/"), audio_item),
    (lambda kind: kind.startswith("video/"), video_item),
    (lambda kind: kind in ("text/vtt", "application/x-subrip"), subtitles_item),
    (lambda kind: kind == "application/x-npy", _npy),
    (_is_image, _image),
)
"""Which types are shown how; the first match applies."""
