"""Random crops of images: which rectangle of an image is shown, drawn from a key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from mm_assets.errors import ConfigError
from mm_assets.fields.image_resize import Box

__all__ = ["RandomCrop"]

_ATTEMPTS = 10
_MAX_RATIO = 1000.0
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class RandomCrop(NamedTuple):
    """A crop of random size, aspect ratio and place, perhaps mirrored.

    It is drawn as `RandomResizedCrop` of torchvision does: an area and a ratio that fit the image, or after ten
    attempts the largest centered rectangle whose ratio is allowed.

    Attributes:
        scale: least and largest part of the image's area, above 0 and up to 1.
        ratio: least and largest width divided by height; its logarithm is uniform.
        flip: whether every second crop is mirrored left to right.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    @classmethod
    def parse(cls, value: object) -> Self:
        """Returns the crop that a setting describes: a mapping with some of the attributes, or all three in a list.

        Raises:
            ConfigError: it is something else, or a number is out of range.
        """
        crop = None
        if isinstance(value, Mapping):
            crop = None if value.keys() - set(cls._fields) else cls()._replace(**value)
        elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == len(cls._fields):
            crop = cls(*value)
        if crop is not None:
            scale, ratio = _range(crop.scale, 1.0), _range(crop.ratio, _MAX_RATIO)
            if scale is not None and ratio is not None and isinstance(crop.flip, bool):
                return cls(scale, ratio, crop.flip)
        expected = "{'scale': (0.08, 1), 'ratio': (0.75, 1.33), 'flip': True}, or some of these, with positive numbers"
        raise ConfigError("arguments", "decode_crop", f"found {value!r}, expected {expected}")

    def draw(self, shape: tuple[int, int], key: int) -> tuple[Box, bool]:
        """Returns the rectangle of an image of a shape (height, width), and whether it is mirrored.

        The same key and shape give the same rectangle on every machine and in every release.

        Args:
            shape: of the image.
            key: 64 bits.
        """
        height, width = shape
        draws = (_uniform(key, number) for number in range(4 * _ATTEMPTS + 1))
        is_mirrored = next(draws) < 0.5 and self.flip
        low, high = (math.log(ratio) for ratio in self.ratio)
        for _ in range(_ATTEMPTS):
            area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * next(draws))
            ratio = math.exp(low + (high - low) * next(draws))
            inner = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            top, left = next(draws), next(draws)
            if 0 < inner[0] <= height and 0 < inner[1] <= width:
                at = int(top * (height - inner[0] + 1)), int(left * (width - inner[1] + 1))
                return Box(*at, *inner), is_mirrored
        inner = height, width
        if width < self.ratio[0] * height:
            inner = max(1, min(height, round(width / self.ratio[0]))), width
        elif width > self.ratio[1] * height:
            inner = height, max(1, min(width, round(height * self.ratio[1])))
        return Box((height - inner[0]) // 2, (width - inner[1]) // 2, *inner), is_mirrored


def _range(value: object, most: float) -> tuple[float, float] | None:
    """Returns two numbers in order, above 0 and up to `most`; None for anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return None
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in value):
        return None
    low, high = map(float, value)
    return (low, high) if 0 < low <= high <= most else None


def _uniform(key: int, number: int) -> float:
    """Returns a number in [0, 1), a multiple of 2**-53: SplitMix64 (Steele, Lea and Flood 2014) from the key on."""
    value = (key + (number + 1) * _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((value ^ (value >> 31)) >> 11) * 2.0**-53
