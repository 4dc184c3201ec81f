"""Colours of an ICC profile to sRGB, by LittleCMS.

A conversion is made once per profile and thread-safe. A profile that changes no colour by more than rounding does is
sRGB under whatever name, and costs nothing.
"""

from __future__ import annotations

import functools
import io
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Conversion", "conversion_of", "lab_to_srgb"]

_SPACES = {b"RGB ": "RGB", b"GRAY": "L", b"CMYK": "CMYK"}  # by bytes 16 to 20 of a profile (ICC.1:2022, 7.2.6)
_STEPS = 9  # colours of the comparison with sRGB: so many to the power of the channels
_ROUNDING = 2  # of 255: profiles of sRGB by several vendors differ by this much
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


def lab_to_srgb(image: Image.Image) -> Image.Image:
    """A Lab image (CIELAB of the white D50) in sRGB; it has no other form of 8 bits."""
    converted: Any = _lab_transform().apply(image)
    return converted  # type: ignore[no-any-return]


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
