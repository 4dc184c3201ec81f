"""Tiny pictures of media, which an event log can hold: a page of Dagster shows them without a click."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MmAssetsError, best_effort
from mm_assets.fields import AudioField, ImageField
from mm_assets.rows.charts import drawn_bars

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_BYTES", "MAX_CONTENT", "thumbnail"]

MAX_BYTES = 480  # base64 takes a third more; Dagster shows Markdown of less than 1,000 characters in place
MAX_CONTENT: Mapping[str, int] = {"image": 4 << 20, "audio": 2 << 20, "video": 8 << 20}  # bytes; larger is not drawn
GROUND = 245  # grey level
_STEPS = ((104, 30), (88, 25), (72, 20), (56, 15), (40, 10), (24, 5))  # edge in pixels and quality, until it fits
_EDGE = _STEPS[0][0]
_MAX_PIXELS = 32 << 20
_MAX_FRAMES = 1 << 23  # of audio: three minutes at 44.1 kHz
_WAVE = 48  # bars of a waveform
_IMAGE = ImageField(
    max_pixels=_MAX_PIXELS,
    decode_size=(_EDGE, _EDGE),
    decode_resize="pad",
    decode_fill=GROUND,
    decode_mode="fast",
)
_AUDIO = AudioField(max_frames=_MAX_FRAMES)


def thumbnail(content: bytes, modality: str = "image") -> bytes | None:
    """A picture of a media item of at most `MAX_BYTES`: a WebP, of audio the waveform as a PNG.

    An image is decoded as the reader of a packed file does it; of a video the keyframe in the middle is. Returns None
    for what cannot be decoded or drawn, or is too large to be worth it: checks and filters validate it.
    """
    draw = _DRAWN.get(modality)
    if draw is None or len(content) > MAX_CONTENT[modality]:
        return None
    with best_effort(f"the picture of an item ({modality})"), suppress(MmAssetsError):
        return draw(content)
    return None


def _image(content: bytes) -> bytes | None:
    return _small(_IMAGE.decode(*_IMAGE.encode(content)).squeeze())


def _video(content: bytes) -> bytes | None:
    from mm_assets.media.frames import read_frames
    from mm_assets.media.video import index_frames

    found = index_frames(content, max_pixels=_MAX_PIXELS)
    if found is None:
        return None
    index = found[0]
    keyframe = index.keyframe_pts[len(index.keyframe_pts) // 2]
    position = min(int(np.searchsorted(index.pts, keyframe)), len(index.pts) - 1)
    return _small(next(read_frames(content, index, [position], max_pixels=_MAX_PIXELS)))


def _audio(content: bytes) -> bytes | None:
    samples = np.abs(_AUDIO.decode(*_AUDIO.encode(content)).samples).max(axis=1)
    if not len(samples):
        return None
    loudest = [float(part.max()) for part in np.array_split(samples, min(_WAVE, len(samples)))]
    return drawn_bars(loudest, is_centred=True)


_DRAWN: Mapping[str, Callable[[bytes], bytes | None]] = {"image": _image, "audio": _audio, "video": _video}


def _small(pixels: npt.NDArray[np.uint8]) -> bytes | None:
    """Pixels before a light ground, as large as fits."""
    from PIL import Image

    image = Image.fromarray(pixels)
    ground = Image.new("RGBA", image.size, (GROUND, GROUND, GROUND, 255))
    image = Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
    return next(filter(None, (_webp(image, edge, quality) for edge, quality in _STEPS)), None)


def _webp(image: Image, edge: int, quality: int) -> bytes | None:
    small, target = image.copy(), io.BytesIO()
    small.thumbnail((edge, edge))
    small.save(target, "WEBP", quality=quality, method=6)
    return target.getvalue() if target.tell() <= MAX_BYTES else None
