"""Filters of image rows: aspect ratio, size and sharpness.

Ratio and size come from the header, without decoding; sharpness decodes at a reduced scale. Images are judged upright,
as they are decoded for training. Of a file with several frames the first counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from mm_assets.filters.base import Block, MeasuredRowFilter, Rows, Threshold, outside, thresholds_of
from mm_assets.filters.parameters import Limits, check_limits, check_number, check_whole, some_limit
from mm_assets.filters.sharpness import sharpness
from mm_assets.media.images import ImageInfo, probe_image

__all__ = [
    "DEFAULT_MIN_SIDE",
    "AspectRatioFilter",
    "BlurFilter",
    "ImageSizeFilter",
    "image_infos",
    "sharpness_measure",
    "sharpness_scores",
]

DEFAULT_MIN_SIDE = 256  # pixels; about the input of an image encoder, so blur below its resolution does not count


def image_infos(block: Block, rows: Rows) -> list[ImageInfo | None]:
    """The header of each row's image; None where there is none or it cannot be read."""
    return block.measure("image header", rows, probe_image)


def sharpness_scores(block: Block, rows: Rows, *, min_side: int | None) -> list[float | None]:
    """The sharpness of each row's image (see `mm_assets.filters.sharpness`); None where it cannot be decoded."""
    score: Callable[[memoryview], float] = partial(sharpness, min_side=min_side)
    return block.measure(("sharpness", min_side), rows, score, threaded=True)


def sharpness_measure(min_side: int | None) -> str:
    """What `Threshold.measure` calls these scores: those of another scale are another measure."""
    return f"image_sharpness, min_side {min_side}"


class AspectRatioFilter(MeasuredRowFilter):
    """Keeps images whose width divided by height lies in a closed interval.

    Args:
        min: smallest ratio kept; None sets no limit.
        max: largest ratio kept; None sets no limit.
        drop_invalid_rows: drop images that are not there or whose header cannot be read.
    """

    modality = "image"

    def __init__(self, *, min: float | None = 1.0, max: float | None = 2.0, drop_invalid_rows: bool = True) -> None:
        super().__init__(drop_invalid_rows=drop_invalid_rows)
        self.limits = check_limits("", min, max)

    def measure(self, block: Block, rows: Rows) -> Sequence[ImageInfo | None]:
        """Headers."""
        return image_infos(block, rows)

    def verdict(self, value: ImageInfo) -> tuple[str, float] | None:
        """``below_min`` or ``above_max`` with the ratio."""
        width, height = value.upright_size
        return outside(("", width / height, self.limits))

    def thresholds(self) -> Iterator[Threshold]:
        """Of ``image_aspect_ratio``."""
        return thresholds_of("image_aspect_ratio", self.limits)


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
        super().__init__(drop_invalid_rows=drop_invalid_rows)
        some_limit(min_width=min_width, max_width=max_width, min_height=min_height, max_height=max_height)
        self.width = check_limits("_width", min_width, max_width, check=check_whole)
        self.height = check_limits("_height", min_height, max_height, check=check_whole)

    def measure(self, block: Block, rows: Rows) -> Sequence[ImageInfo | None]:
        """Headers."""
        return image_infos(block, rows)

    def verdict(self, value: ImageInfo) -> tuple[str, float] | None:
        """``width_below_min``, ``width_above_max`` and likewise for height, with the side that offends, in pixels."""
        width, height = value.upright_size
        return outside(("width_", width, self.width), ("height_", height, self.height))

    def thresholds(self) -> Iterator[Threshold]:
        """Of ``image_width`` and ``image_height``."""
        yield from thresholds_of("image_width", self.width, setting="_width", reason="width_")
        yield from thresholds_of("image_height", self.height, setting="_height", reason="height_")


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
        super().__init__(drop_invalid_rows=drop_invalid_rows)
        self.limits = Limits(check_number("min", min))
        self.min_side = None if min_side is None else check_whole("min_side", min_side, least=1)

    def measure(self, block: Block, rows: Rows) -> Sequence[float | None]:
        """Scores."""
        return sharpness_scores(block, rows, min_side=self.min_side)

    def verdict(self, value: float) -> tuple[str, float] | None:
        """``below_min`` with the score."""
        return outside(("", value, self.limits))

    def thresholds(self) -> Iterator[Threshold]:
        """Of `sharpness_measure`."""
        return thresholds_of(sharpness_measure(self.min_side), self.limits)
