"""The facts of an image, as its header gives them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ImageInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """An image as its header describes it.

    Attributes:
        codec: ``jpeg``, ``png``, ``gif``, ``webp``, ``bmp``, ``tiff``, ``avif``, ``heic``, ``jxl``, ``jp2``, ``pnm``,
            ``ico`` or ``tga``.
        width: columns as stored, before any rotation, at least 1.
        height: rows as stored, at least 1.
        channels: of the image decoded to 8 bits: 1 grey, 3 colour, 4 colour with alpha. A palette and CMYK are 3,
            grey with alpha is 4, and a transparent colour counts as alpha.
        bit_depth: bits of one stored sample (of a palette's index).
        has_8bit_form: whether there is one way to convert it to 8-bit grey or RGB. False for floating-point, signed
            or wider than 16-bit samples, for Lab of 16 bits and the like (TIFF), and for 12-bit JPEG.
        num_frames: frames (TIFF pages, animation frames) whose headers are in the bytes, at least 1; the other
            attributes describe the first one.
        has_unread_frames: whether it is an animation of which no decoder here reads more than the first frame: HEIC
            and JPEG XL.
        orientation: EXIF orientation, 1 to 8, or what the container says in its place; 1 if there is none.
        colours: primaries and transfer function (numbers of ITU-T H.273) that the container of an AVIF or HEIC gives;
            None without them.
    """

    codec: str
    width: int
    height: int
    channels: int
    bit_depth: int
    has_8bit_form: bool = True
    num_frames: int = 1
    has_unread_frames: bool = False
    orientation: int = 1
    colours: tuple[int, int] | None = None

    @property
    def has_high_range(self) -> bool:
        """Whether the colours are of high dynamic range, PQ or HLG: decoded, they keep these numbers and look pale."""
        return self.colours is not None and self.colours[1] in (16, 18)

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) once it is turned by its orientation."""
        return (self.width, self.height) if self.orientation < 5 else (self.height, self.width)
