"""Colours of an ICC profile, of a container's colour numbers, or of Lab to sRGB, by LittleCMS.

A conversion is made once per profile and thread-safe. A profile that changes no colour by more than rounding does is
sRGB under whatever name, and costs nothing.
"""

from __future__ import annotations

import functools
import io
import logging
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Conversion", "conversion_of", "lab_to_srgb", "profile_of"]

_SPACES = {b"RGB ": "RGB", b"GRAY": "L", b"CMYK": "CMYK"}  # by bytes 16 to 20 of a profile (ICC.1:2022, 7.2.6)
_STEPS = 9  # colours of the comparison with sRGB: so many to the power of the channels
_ROUNDING = 2  # of 255: profiles of sRGB by several vendors differ by this much

# By their numbers in ITU-T H.273: x and y of red, green, blue. The white of all is D65.
_PRIMARIES = {
    5: ((0.64, 0.33), (0.29, 0.60), (0.15, 0.06)),  # BT.601, 625 lines
    6: ((0.63, 0.34), (0.31, 0.595), (0.155, 0.07)),  # BT.601, 525 lines
    9: ((0.708, 0.292), (0.17, 0.797), (0.131, 0.046)),  # BT.2020
    12: ((0.68, 0.32), (0.265, 0.69), (0.15, 0.06)),  # Display P3
}
_PRIMARIES[7] = _PRIMARIES[6]
_BT709 = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
_D65, _D50 = (0.95047, 1.0, 1.08883), (0.9642, 1.0, 0.8249)
_BRADFORD = ((0.8951, 0.2664, -0.1614), (-0.7502, 1.7135, 0.0367), (0.0389, -0.0685, 1.0296))
# Parameters of ICC's parametric curves. Those of cameras (BT.709, BT.601, BT.2020) are shown as sRGB, as by browsers.
_SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
_CURVES = {4: (2.2,), 5: (2.8,), 8: (1.0,)}
_LOG = logging.getLogger(__name__)


class Conversion:
    """From the colours of one profile to sRGB.

    Attributes:
        space: Pillow's mode of the images that the profile is for: ``RGB``, ``L`` or ``CMYK``.
    """

    def __init__(self, profile: bytes) -> None:
        from PIL import ImageCms

        self.space = _SPACES[profile[16:20]]
        # Relative to white, and black to black, as viewers show photographs.
        intent, flags = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
        source, target = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
        modes = {"RGB": ("RGB", "RGBA"), "L": ("L",), "CMYK": ("CMYK",)}[self.space]
        self._transforms = {
            mode: ImageCms.buildTransform(source, target, mode, "RGBA" if mode == "RGBA" else "RGB", intent, flags)
            for mode in modes
        }

    def changes_colours(self) -> bool:
        """Whether a colour is another in sRGB."""
        from PIL import Image

        if self.space == "CMYK":
            return True
        levels = np.linspace(0, 255, _STEPS).round().astype(np.uint8)
        if self.space == "L":
            colours = levels[np.newaxis, :]
        else:
            colours = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(_STEPS, -1, 3)
        image = Image.fromarray(colours)
        differences = np.asarray(self.apply(image)).astype(np.int16) - np.asarray(image)
        return int(np.abs(differences).max()) > _ROUNDING

    def apply(self, image: Image.Image) -> Image.Image:
        """An image in sRGB; the image itself where the profile is not for its kind of colours."""
        from PIL import Image as Pillow

        if self.space == "RGB" and image.mode in ("P", "PA", "RGBX"):
            image = image.convert("RGBA" if image.mode == "PA" or "transparency" in image.info else "RGB")
        if self.space == "L" and image.mode == "LA":
            grey = self.apply(image.getchannel("L"))
            return Pillow.merge("LA", (grey, image.getchannel("A")))
        transform = self._transforms.get(image.mode)
        if transform is None:
            return image
        converted = transform.apply(image)
        return converted.getchannel(0) if self.space == "L" else converted

    def apply_to_pixels(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """(H, W, 1) or (H, W, 3) uint8 in sRGB."""
        from PIL import Image as Pillow

        image = Pillow.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        return np.asarray(self.apply(image)).reshape(pixels.shape)


@functools.cache
def profile_of(primaries: int, transfer: int) -> bytes:
    """The ICC profile of colours by their numbers in ITU-T H.273; b"" for those of sRGB and unknown ones."""
    if primaries not in _PRIMARIES and transfer not in _CURVES:
        return b""
    curve = _CURVES.get(transfer, _SRGB_CURVE)
    red_green_blue = np.array([(x / y, 1, (1 - x - y) / y) for x, y in _PRIMARIES.get(primaries, _BT709)]).T
    to_xyz = red_green_blue * np.linalg.solve(red_green_blue, _D65)
    cone = np.array(_BRADFORD)
    adapted = np.linalg.inv(cone) @ np.diag(cone @ _D50 / (cone @ _D65)) @ cone @ to_xyz

    def numbers(kind: bytes, head: bytes, values: Any) -> bytes:
        return kind + head + b"".join(struct.pack(">i", round(65_536 * float(value))) for value in values)

    tags = {b"wtpt": numbers(b"XYZ ", bytes(4), _D50)}
    for name, column in zip((b"r", b"g", b"b"), adapted.T, strict=True):
        tags[name + b"XYZ"] = numbers(b"XYZ ", bytes(4), column)
        tags[name + b"TRC"] = numbers(b"para", struct.pack(">4xH2x", 3 if len(curve) > 1 else 0), curve)
    table, body = b"", b""
    for name, value in tags.items():
        table += struct.pack(">4sII", name, 132 + 12 * len(tags) + len(body), len(value))
        body += value
    size = 132 + len(table) + len(body)
    head = struct.pack(">I4xI4s4s4s12x4s28x", size, 0x04200000, b"mntr", b"RGB ", b"XYZ ", b"acsp")
    head += b"".join(struct.pack(">i", round(65_536 * value)) for value in _D50)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def lab_to_srgb(image: Image.Image) -> Image.Image:
    """A Lab image (CIELAB of the white D50) in sRGB; it has no other form of 8 bits."""
    converted: Image.Image = _lab_transform().apply(image)  # Pillow gives it no type
    return converted


@functools.cache
def _lab_transform() -> Any:
    from PIL import ImageCms

    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    return ImageCms.buildTransform(lab, srgb, "LAB", "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC)


@functools.lru_cache(maxsize=256)
def conversion_of(profile: bytes) -> Conversion | None:
    """The conversion to sRGB; None for a profile that is sRGB itself, of another kind of colours, or damaged.

    A damaged profile is logged, once: its image decodes as without one.
    """
    from PIL import ImageCms

    errors: tuple[type[Exception], ...] = (ImageCms.PyCMSError, OSError, ValueError, TypeError, ArithmeticError)
    if len(profile) < 132 or profile[16:20] not in _SPACES:
        if profile:
            _LOG.warning(
                "an image's ICC profile of %d bytes is not used: it is not for grey, RGB or CMYK", len(profile)
            )
        return None
    try:
        conversion: Any = Conversion(profile)
        return conversion if conversion.changes_colours() else None
    except errors as error:
        _LOG.warning("an image's ICC profile of %d bytes is damaged and not used: %s", len(profile), error)
        return None
