"""What a field says about how people see its values: which bytes of a payload are a file, and which values are drawn.

`Field.shown` returns one of these; `mm_assets.display` makes pictures, players and plots of them. A field names places
in its payload rather than copy media, so that a player reads ranges of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mm_assets.media.text_boxes import PageLayout

__all__ = [
    "RangedBytes",
    "Shown",
    "ShownClip",
    "ShownFile",
    "ShownList",
    "ShownMap",
    "ShownPages",
    "ShownPair",
    "ShownSamples",
    "ShownTokens",
    "ShownValue",
    "StoredBytes",
]


class RangedBytes(Protocol):
    """The data bytes of a payload, read by ranges."""

    @property
    def size(self) -> int:
        """Bytes in all."""

    @property
    def read(self) -> Callable[[int, int], bytes]:
        """Takes an offset and a size; returns the bytes there."""


class StoredBytes(RangedBytes, Protocol):
    """The data bytes of a payload, and runs of them."""

    def part(self, offset: int, size: int) -> StoredBytes:
        """A run of them."""

    def whole(self) -> bytes:
        """All bytes; `MediaError` for more than are worth holding for a look at them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFile:
    """A run of the payload's data that is a file.

    Attributes:
        offset: of its first byte in the data.
        size: bytes.
        content_type: MIME type where the field determines it, None where the bytes do.
    """

    offset: int
    size: int
    content_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownValue:
    """A decoded value: text, number, JSON, array, series, segments.

    Attributes:
        value: as `Field.decode` returns it.
    """

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSamples:
    """A run of the payload's data that is audio samples as in memory, little-endian, channels interleaved.

    Attributes:
        offset: of the first byte.
        size: bytes.
        sample_rate: Hz.
        channels: at least 1.
        dtype: int16 or float32.
    """

    offset: int
    size: int
    sample_rate: int
    channels: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTokens:
    """Token ids.

    Attributes:
        ids: (num_tokens,) integers.
        text_of: decodes ids to text; None where no tokenizer is loaded.
        tokenizer: its name, or "".
    """

    ids: npt.NDArray[Any]
    text_of: Callable[[Sequence[int]], str] | None = None
    tokenizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMap:
    """One number per pixel.

    Attributes:
        values: (H, W) numbers; 0, NaN and infinities mean that nothing was measured.
        unit: of the values, or "" where it is not known.
    """

    values: npt.NDArray[Any]
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPair:
    """An image with its text.

    Attributes:
        image: the image's file.
        text: None where there is none or only its tokens are stored.
        tokens: the text's ids.
        score: how well they fit; None where it is not known.
    """

    image: ShownFile
    text: str | None
    tokens: ShownTokens
    score: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPages:
    """Page images and the words on them.

    Attributes:
        pages: image files in order; empty without images.
        layout: words and boxes with their pages' sizes; None where they are not known.
    """

    pages: Sequence[ShownFile]
    layout: PageLayout | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownList:
    """Values at positions.

    Attributes:
        items: (position, the item's data bytes, how its field shows them) in order, the first ones of very many. It
            is read once and may be an iterator, so that no two decoded items need be held.
        count: of all items.
    """

    items: Iterable[tuple[int, StoredBytes, Any]]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownClip:
    """A clip of video and audio.

    Attributes:
        video: the file with the video, and with the audio unless `audio` is given; None where frames are JPEGs, or
            without video.
        frames: (seconds, JPEG file) of frames, not all of a long clip's; empty where there is a video file.
        audio: a file or samples of their own; None where the video has it, or without audio.
        frame_rate: frames per second; 0 without video.
        num_frames: of the clip.
        size: (height, width) of frames once they are upright.
        start_seconds: of the clip within `video`.
        duration_seconds: of the clip.
        has_audio: whether there is any.
        audio_offset_seconds: how much later than frame 0 the audio starts; negative if it starts earlier.
    """

    video: ShownFile | None
    frames: Sequence[tuple[float, ShownFile]]
    audio: ShownFile | ShownSamples | None
    frame_rate: float
    num_frames: int
    size: tuple[int, int]
    start_seconds: float
    duration_seconds: float
    has_audio: bool
    audio_offset_seconds: float


Shown = ShownFile | ShownValue | ShownSamples | ShownTokens | ShownMap | ShownPair | ShownPages | ShownList | ShownClip
"""How a value is shown."""
