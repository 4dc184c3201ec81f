"""Small pictures of items, decoded at a part of their size."""

from __future__ import annotations

from mm_assets.display.item import MAX_WHOLE, Item, Media
from mm_assets.display.pictures import thumbnail_of_image
from mm_assets.errors import MediaError, MissingExtraError

__all__ = ["thumbnail"]

MAX_SIZE = 1024
_PICTURES = ("image/jpeg", "image/png", "image/gif", "image/webp", "image/avif", "image/bmp")


def thumbnail(item: Item, size: int = 256) -> bytes | None:
    """A JPEG of an item, at most `size` pixels on a side; None where there is no picture of it.

    It is the image, its first frame or page, a video's poster, a depth map, or an audio's waveform.
    """
    size = min(max(size, 16), MAX_SIZE)
    picture = next((one for one in item.media if one.content_type in _PICTURES), None)
    if picture is None:
        return None
    try:
        data = bytes_of(picture)
    except (MediaError, MissingExtraError):
        return None
    return None if data is None else thumbnail_of_image(data, size)


def bytes_of(media: Media) -> bytes | None:
    """All bytes of media; None for more than are held at once."""
    if media.make is not None:
        return media.make()
    if media.read is None or media.size is None or media.size > MAX_WHOLE:
        return None
    return media.read(0, media.size)
