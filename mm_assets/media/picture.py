"""How the frames of a video file are meant to be shown: orientation, shape of pixels, fields and colours."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from mm_assets.media.content_types import Buffer
from mm_assets.media.ranged_file import RangedFile
from mm_assets.media.video import DEFAULT_MAX_PIXELS, decoded_frames, open_media, video_stream_of

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

__all__ = ["Picture", "has_high_range", "orientation_of", "picture_of"]

_MATRIX = struct.Struct("=9i")
_TRANSFERS = {1: "bt709", 6: "smpte170m", 8: "linear", 13: "srgb", 14: "bt2020", 15: "bt2020", 16: "pq", 18: "hlg"}
_HIGH_RANGE = ("pq", "hlg")
_PRIMARIES = {1: "bt709", 5: "bt470bg", 6: "smpte170m", 9: "bt2020", 11: "dci-p3", 12: "display-p3"}
_MAX_ASPECT = 100  # of a pixel's sides: what is beyond is an error of the file, as in players


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The first frame of a file and its stream, as they describe themselves.

    Attributes:
        orientation: how a frame must be turned to be upright, as EXIF numbers it: 1 not at all, 3 by 180 degrees, 6 by
            90 degrees clockwise, 8 counterclockwise, the others mirrored. FFmpeg's command line turns frames so.
        pixel_aspect: width of a pixel by its height; 1 where the file does not say.
        is_interlaced: whether a frame consists of two fields, shown one after the other.
        bits: of a colour component.
        transfer: from values to light: ``bt709``, ``pq`` or ``hlg`` (both of high dynamic range), and so on;
            ``unknown``, or H.273's number where it has no name here.
        primaries: likewise ``bt709``, ``bt2020``, and so on.
    """

    orientation: int
    pixel_aspect: Fraction
    is_interlaced: bool
    bits: int
    transfer: str
    primaries: str

    @property
    def is_hdr(self) -> bool:
        """Whether the range of light is high: the decoded RGB keeps the file's transfer and looks pale and dark."""
        return self.transfer in _HIGH_RANGE

    def square(self, size: tuple[int, int]) -> tuple[int, int]:
        """(height, width) of a stored frame with its pixels made square: the width is stretched, rounded to nearest."""
        height, width = size
        return height, max(1, math.floor(width * self.pixel_aspect + Fraction(1, 2)))


def picture_of(data: Buffer | RangedFile, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Picture | None:
    """Decode the first frame for its facts; None for a file without video or without a frame.

    Raises:
        MediaError: the file is damaged, or its frames have more than `max_pixels`.
    """
    with open_media(data, max_pixels=max_pixels) as (container, _):
        stream = video_stream_of(container, max_pixels)
        frame = None if stream is None else next(decoded_frames(container, stream), None)
        if stream is None or frame is None:
            return None
        aspect = stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio
        is_plausible = aspect is not None and Fraction(1, _MAX_ASPECT) <= aspect <= _MAX_ASPECT
        return Picture(
            orientation=orientation_of(frame),
            pixel_aspect=Fraction(aspect) if aspect is not None and is_plausible else Fraction(1),
            is_interlaced=frame.interlaced_frame,
            bits=max(part.bits for part in frame.format.components),
            transfer=_named(_TRANSFERS, int(frame.color_trc)),
            primaries=_named(_PRIMARIES, int(frame.color_primaries)),
        )


def orientation_of(frame: VideoFrame) -> int:
    """How a decoded frame must be turned to be upright, as EXIF numbers it."""
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    return 1 if matrix is None else _orientation(bytes(matrix))


def has_high_range(data: Buffer) -> bool:
    """Whether the header of a file says that its frames have a high dynamic range, PQ or HLG; nothing is decoded.

    Raises:
        MediaError: the bytes are not a video or audio file, or its header is damaged.
    """
    with open_media(data) as (container, _):
        stream = video_stream_of(container)
        return stream is not None and _TRANSFERS.get(int(stream.codec_context.color_trc)) in _HIGH_RANGE


def _named(names: dict[int, str], number: int) -> str:
    return names.get(number) or ("unknown" if number in (0, 2) else str(number))


def _orientation(matrix: bytes) -> int:
    """The EXIF number of a display matrix, by the rules of FFmpeg's command line; 1 for other angles."""
    if len(matrix) < _MATRIX.size:
        return 1
    a, b, _, c, d, *_ = _MATRIX.unpack_from(matrix)
    if not (math.hypot(a, c) and math.hypot(b, d)):
        return 1
    angle = round(math.degrees(math.atan2(b / math.hypot(b, d), a / math.hypot(a, c)))) % 360
    turns = {
        0: 4 if d < 0 else 1,
        90: 5 if c > 0 else 6,
        180: {(True, True): 3, (True, False): 2, (False, True): 4}.get((a < 0, d < 0), 1),
        270: 7 if c < 0 else 8,
    }
    return turns.get(angle, 1)
