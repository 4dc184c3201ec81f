"""Small pictures of items, decoded at a part of their size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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

    It is the image, its first frame or page, a video's poster, a depth map, an audio's waveform, or a piano roll.
    """
    size = min(max(size, 16), MAX_SIZE)
    picture = next((one for one in item.media if one.content_type in _PICTURES), None)
    try:
        if picture is not None:
            data = bytes_of(picture)
            return None if data is None else thumbnail_of_image(data, size)
        if item.kind == "midi":
            return _piano_roll(item.data, size)
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


def _piano_roll(data: Mapping[str, Any], size: int) -> bytes | None:
    """The notes of a MIDI item over time, in the tones of a waveform; None where there are no notes."""
    notes = np.array(data["notes"], np.float64)
    if len(notes) == 0:
        return None
    onset, end, pitch = notes[:, 0], notes[:, 0] + notes[:, 1], notes[:, 2].astype(int)
    width, lowest, pitches = size, int(pitch.min()) - 2, int(np.ptp(pitch)) + 5
    height = max(16, size // 2)
    first = (onset / max(end.max(), 1e-9) * (width - 1)).astype(int)
    last = np.maximum(end / max(end.max(), 1e-9) * width, first + 1).astype(int)
    top = (lowest + pitches - 1 - pitch) * height // pitches
    thickness = max(2, height // pitches)
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:] = _BACKGROUND
    for row, left, right in zip(top.tolist(), first.tolist(), last.tolist(), strict=True):
        pixels[row : row + thickness, left:right] = _WAVE
    return jpeg_of(pixels, quality=80)


def bytes_of(media: Media) -> bytes | None:
    """All bytes of media; None for more than are held at once."""
    if media.make is not None:
        return media.make()
    if media.read is None or media.size is None or media.size > MAX_WHOLE:
        return None
    return media.read(0, media.size)
