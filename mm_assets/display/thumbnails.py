"""Small pictures of items, decoded at a part of their size."""

from __future__ import annotations

import json

import numpy as np

from mm_assets.display.item import MAX_WHOLE, Item, Media
from mm_assets.display.pictures import jpeg_of, thumbnail_of_image
from mm_assets.errors import MediaError, MissingExtraError

__all__ = ["thumbnail"]

MAX_SIZE = 1024
_WAVE, _BACKGROUND = (70, 130, 210), (238, 240, 244)
_PICTURES = ("image/jpeg", "image/png", "image/gif", "image/webp", "image/avif", "image/bmp")


def thumbnail(item: Item, size: int = 256) -> bytes | None:
    """A JPEG of an item, at most `size` pixels on a side; None where there is no picture of it.

    It is the image, its first frame or page, a video's poster, a depth map, or an audio's waveform.
    """
    size = min(max(size, 16), MAX_SIZE)
    picture = next((one for one in item.media if one.content_type in _PICTURES), None)
    try:
        if picture is not None:
            data = bytes_of(picture)
            return None if data is None else thumbnail_of_image(data, size)
        peaks = item.medium("peaks") if item.kind == "audio" else None
        return None if peaks is None or peaks.make is None else _waveform(json.loads(peaks.make())["peaks"], size)
    except (MediaError, MissingExtraError):
        return None


def _waveform(peaks: list[list[float]], size: int) -> bytes:
    """A waveform in mid tones, which is seen on a light and on a dark page."""
    height, width = max(16, size // 2), size
    columns = np.array(peaks or [[0.0, 0.0]], np.float64)
    chosen = columns[np.arange(width) * len(columns) // width]
    low = np.rint((1 - chosen[:, 0]) / 2 * (height - 1)).astype(int)
    high = np.rint((1 - chosen[:, 1]) / 2 * (height - 1)).astype(int)
    rows = np.arange(height)[:, np.newaxis]
    inside = (rows >= high) & (rows <= np.maximum(low, high))
    pixels = np.where(inside[:, :, np.newaxis], np.array(_WAVE), np.array(_BACKGROUND)).astype(np.uint8)
    return jpeg_of(pixels, quality=80)


def bytes_of(media: Media) -> bytes | None:
    """All bytes of media; None for more than are held at once."""
    if media.make is not None:
        return media.make()
    if media.read is None or media.size is None or media.size > MAX_WHOLE:
        return None
    return media.read(0, media.size)
