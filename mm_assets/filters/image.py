"""Filters of image rows: aspect ratio, size and sharpness.

Ratio and size come from the header, without decoding; sharpness decodes at a reduced scale. Width and height are those
stored: an EXIF orientation is not applied. Of a file with several frames the first counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mm_assets.filters.base import Block, MeasuredRowFilter, Rows
from mm_assets.filters.parameters import bounds, check_flag, check_number, check_whole, some_limit
from mm_assets.media.images import ImageInfo, probe_image
from mm_assets.media.sharpness import sharpness

__all__ = ["DEFAULT_MIN_SIDE", "AspectRatioFilter", "BlurFilter", "ImageSizeFilter", "image_infos", "sharpness_scores"]

DEFAULT_MIN_SIDE = 256  # pixels; about the input of an image encoder, so blur below its resolution does not count


def image_infos(block: Block, rows: Rows) -> list[ImageInfo | None]:
    """The header of each row's image; None where there is none or it cannot be read."""
    return block.measure("image header", rows, probe_image)


def sharpness_scores(block: Block, rows: Rows, *, min_side: int | None) -> list[float | None]:
    """The sharpness of each row's image (see `mm_assets.media.sharpness`); None where it cannot be decoded."""
    score: Callable[[memoryview], float] = partial(sharpness, min_side=min_side)
    return block.measure(("sharpness", min_side), rows, score, threaded=True)


class AspectRatioFilter(MeasuredRowFilter):
    """Keeps images whose width divided by height lies in a closed interval.

    Args:
        min: smallest ratio kept; None sets no limit.
        max: largest ratio kept; None sets no limit.
        drop_invalid_rows: drop images that are not there or whose header cannot be read.
    """

    modality = "image"

    def __init__(self, *, min: float | None = 1.0, max: float | None = 2.0, drop_invalid_rows: bool = True) -> None:
        super().__init__(drop_invalid_rows=check_flag("drop_invalid_rows", drop_invalid_rows))
        low = None if min is None else check_number("min", min)
        high = None if max is None else check_number("max", max)
        self.min, self.max = bounds("", low, high)

    def measure(self, block: Block, rows: Rows) -> Sequence[ImageInfo | None]:
        """Headers."""
        return image_infos(block, rows)

    def verdict(self, value: ImageInfo) -> tuple[str, float] | None:
        """``below_min`` or ``above_max`` with the ratio."""
        ratio = value.width / value.height
        if self.min is not None and ratio < self.min:
            return "below_min", ratio
        if self.max is not None and ratio > self.max:
            return "above_max", ratio
        return None


class ImageSizeFilter(MeasuredRowFilter):
    """Keeps images whose width and height, in pixels, lie between limits, all inclusive; None sets no limit.

    Args:
        min_width: smallest width kept.
        max_width: largest width kept.
        min_height: smallest height kept.
        max_height: largest height kept.
        drop_invalid_rows: drop images that are not there or whose header cannot be read.
    """

    modality = "image"

    def __init__(
        self,
        *,
        min_width: int | None = None,
        max_width: int | None = None,
        min_height: int | None = None,
        max_height: int | None = None,
        drop_invalid_rows: bool = True,
    ) -> None:
        super().__init__(drop_invalid_rows=check_flag("drop_invalid_rows", drop_invalid_rows))
        given = {
            "min_width": min_width,
            "max_width": max_width,
            "min_height": min_height,
            "max_height": max_height,
        }
        some_limit(*given.values(), parameters=tuple(given))
        limits = {name: None if limit is None else check_whole(name, limit) for name, limit in given.items()}
        self.min_width, self.max_width = bounds("_width", limits["min_width"], limits["max_width"])
        self.min_height, self.max_height = bounds("_height", limits["min_height"], limits["max_height"])

    def measure(self, block: Block, rows: Rows) -> Sequence[ImageInfo | None]:
        """Headers."""
        return image_infos(block, rows)

    def verdict(self, value: ImageInfo) -> tuple[str, float] | None:
        """``width_below_min``, ``width_above_max`` and likewise for height, with the side that offends, in pixels."""
        sides = (
            ("width", value.width, self.min_width, self.max_width),
            ("height", value.height, self.min_height, self.max_height),
        )
        for name, pixels, low, high in sides:
            if low is not None and pixels < low:
                return f"{name}_below_min", float(pixels)
            if high is not None and pixels > high:
                return f"{name}_above_max", float(pixels)
        return None


class BlurFilter(MeasuredRowFilter):
    """Keeps images that are sharp enough: variance of the Laplacian at least `min`.

    Args:
        min: smallest score kept, in grey levels squared.
        min_side: images are scored at the largest reduction (1/8, 1/4, 1/2) that leaves their shorter side this many
            pixels; None scores them at full size.
        drop_invalid_rows: drop images that are not there or cannot be decoded.
    """

    modality = "image"

    def __init__(
        self, *, min: float = 100.0, min_side: int | None = DEFAULT_MIN_SIDE, drop_invalid_rows: bool = True
    ) -> None:
        super().__init__(drop_invalid_rows=check_flag("drop_invalid_rows", drop_invalid_rows))
        self.min = check_number("min", min)
        self.min_side = None if min_side is None else check_whole("min_side", min_side, least=1)

    def measure(self, block: Block, rows: Rows) -> Sequence[float | None]:
        """Scores."""
        return sharpness_scores(block, rows, min_side=self.min_side)

    def verdict(self, value: float) -> tuple[str, float] | None:
        """``below_min`` with the score."""
        return ("below_min", value) if value < self.min else None
