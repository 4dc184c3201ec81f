"""From an image's own size to another: the regions of both, and the resampling.

Images that are stored at a size and those that are decoded at one are both resized here. Pixels are (H, W, C) uint8
throughout. OpenCV resizes where it is installed, else Pillow: docs/spec/loading.md says how far their pixels differ.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["RESIZES", "Box", "place", "resample", "resize", "scratch"]

RESIZES = ("stretch", "crop", "pad")

# Memory that a thread holds between two images: 16 million RGB pixels. Larger ones allocate their own and free it.
MAX_SCRATCH_BYTES = 48 << 20

# Bilinear sampling reads four pixels, whatever it shrinks by. Where a pixel of the result covers more than this,
# or for more in one direction, it is sampled at several places; where for far more, by area, which is not slower then.
# By benchmarks/images.py, 3 would give its training pictures a median of 2 dB more, and take 4 % more time.
_MAX_ONCE_AREA = 3.5
_MAX_ONCE_RATIO = 2.5
_MAX_SAMPLED_RATIO = 4
_MAX_WARPED_SIDE = 32_766  # OpenCV counts its pixels in int16 there


class Box(NamedTuple):
    """A rectangle of an image, in whole pixels."""

    top: int
    left: int
    height: int
    width: int

    def of(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """These pixels, as a view; the array itself where they are all of it."""
        if pixels.shape[:2] == self[2:]:
            return pixels
        return pixels[self.top : self.top + self.height, self.left : self.left + self.width]


def place(shape: tuple[int, int], size: tuple[int, int], policy: str) -> tuple[Box, Box]:
    """Which rectangle of an image is shown in which rectangle of the result.

    Args:
        shape: (height, width) of the image.
        size: (height, width) of the result.
        policy: ``stretch``: all of the one to all of the other. ``crop``: the largest centred rectangle of the
            result's aspect ratio, to a whole pixel, to all of the result. ``pad``: all of the image to the largest
            centred rectangle of its aspect ratio, the odd pixel of the bars right and below.
    """
    if policy == "crop":
        return _centred(_fitting(size, shape), shape), _whole(size)
    if policy == "pad":
        return _whole(shape), _centred(_fitting(shape, size), size)
    return _whole(shape), _whole(size)


def _whole(size: tuple[int, int]) -> Box:
    return Box(0, 0, size[0], size[1])


def _centred(inner: tuple[int, int], outer: tuple[int, int]) -> Box:
    return Box((outer[0] - inner[0]) // 2, (outer[1] - inner[1]) // 2, *inner)


def _fitting(shape: tuple[int, int], room: tuple[int, int]) -> tuple[int, int]:
    """The largest (height, width) of a shape's aspect ratio in a room, rounded to whole pixels, at least 1."""
    height, width = shape
    if height * room[1] <= width * room[0]:  # as wide as the room
        return max(1, (2 * height * room[1] + width) // (2 * width)), room[1]
    return room[0], max(1, (2 * width * room[0] + height) // (2 * height))


def resize(
    pixels: npt.NDArray[np.uint8], size: tuple[int, int], *, policy: str = "stretch", fill: int = 0
) -> npt.NDArray[np.uint8]:
    """A new (*size, C) image: by pixel area where it shrinks, which does not alias, else bilinearly.

    Args:
        pixels: (H, W, C) uint8.
        size: (height, width).
        policy: as for `place`.
        fill: value of the bars' channels.
    """
    shown, where = place((pixels.shape[0], pixels.shape[1]), size, policy)
    target = np.empty((*size, pixels.shape[2]), dtype=np.uint8)
    if (where.height, where.width) != size:
        target[...] = fill
    resample(pixels, shown, where.of(target))
    return target


def resample(
    pixels: npt.NDArray[np.uint8],
    shown: Box,
    target: npt.NDArray[np.uint8],
    *,
    scale: int = 1,
    quick: bool = False,
) -> None:
    """Write a rectangle of an image into one of another size.

    Args:
        pixels: (H, W, C) uint8: the image, or 1/`scale` of it.
        shown: the rectangle, in pixels of the image.
        target: (h, w, C) uint8, every element of which is written.
        scale: how many pixels of the image one of `pixels` covers, each way.
        quick: where it shrinks, sample bilinearly instead of computing areas, at several places per pixel where one
            would alias.
    """
    cv2 = _opencv()
    height, width, channels = target.shape
    if cv2 is None:
        _resample_with_pillow(pixels, shown, target, scale)
        return
    if target.strides[1:] != (channels, 1) or target.strides[0] < width * channels:
        # OpenCV writes into rows of adjacent pixels only.
        straight = np.empty(target.shape, dtype=np.uint8)
        resample(pixels, shown, straight, scale=scale, quick=quick)
        target[...] = straight
        return
    ratios = (shown.height / (scale * height), shown.width / (scale * width))
    if quick and min(ratios) >= 1 and (max(ratios) <= _MAX_SAMPLED_RATIO or _lies_between(shown, scale)):
        if ratios[0] * ratios[1] <= _MAX_ONCE_AREA and max(ratios) <= _MAX_ONCE_RATIO:
            _sample(pixels, shown, target, scale)
        else:  # to a multiple of the size; the means of n x m pixels, mostly 2 x 2, are what OpenCV's area is fast at
            samples = [max(2, math.ceil(ratio / 2)) for ratio in ratios]
            several = scratch("several", (samples[0] * height, samples[1] * width, channels))
            _sample(pixels, shown, several, scale)
            cv2.resize(several, (width, height), dst=target, interpolation=cv2.INTER_AREA)
        return
    _resize_nearest(pixels, shown, target, scale, cv2.INTER_AREA if min(ratios) >= 1 else cv2.INTER_LINEAR)


@functools.cache  # Python does not cache that a module is missing, and would search for it for each image
def _opencv() -> Any:
    """OpenCV, or None where it is not installed."""
    try:
        import cv2
    except ModuleNotFoundError:
        return None
    return cv2


def _resample_with_pillow(pixels: npt.NDArray[np.uint8], shown: Box, target: npt.NDArray[np.uint8], scale: int) -> None:
    from PIL import Image

    height, width, channels = target.shape
    if shown[2:] == (height * scale, width * scale) and not _lies_between(shown, scale):
        target[...] = _nearest(shown, scale).of(pixels)
        return
    mode = {1: "L", 3: "RGB", 4: "RGBX"}[channels]  # not RGBA, where Pillow weighs colours by alpha
    rows, columns = pixels.shape[:2]
    image = Image.frombuffer(mode, (columns, rows), np.ascontiguousarray(pixels), "raw", mode, 0, 1)
    # Of Pillow's filters Hamming is the nearest to the mean of an area.
    shrinks = shown.height >= scale * height and shown.width >= scale * width
    method = Image.Resampling.HAMMING if shrinks else Image.Resampling.BILINEAR
    bottom, right = (shown.top + shown.height) / scale, (shown.left + shown.width) / scale
    box = (shown.left / scale, shown.top / scale, min(right, columns), min(bottom, rows))
    target[...] = np.asarray(image.resize((width, height), method, box)).reshape(target.shape)


def _lies_between(shown: Box, scale: int) -> bool:
    """Whether an edge is between pixels of 1/`scale` of the image, where area cannot begin."""
    return scale > 1 and any(edge % scale for edge in shown)


def _nearest(shown: Box, scale: int) -> Box:
    """The rectangle of 1/`scale` of an image, to whole pixels and at least one."""
    if scale == 1:
        return shown
    bottom, right = shown.top + shown.height, shown.left + shown.width
    top, left = shown.top // scale, shown.left // scale
    return Box(top, left, -(-bottom // scale) - top, -(-right // scale) - left)


def _resize_nearest(
    pixels: npt.NDArray[np.uint8], shown: Box, target: npt.NDArray[np.uint8], scale: int, method: int
) -> None:
    source = _nearest(shown, scale).of(pixels)
    if source.shape == target.shape:
        target[...] = source
    else:
        _opencv().resize(source, target.shape[1::-1], dst=target, interpolation=method)


def _sample(pixels: npt.NDArray[np.uint8], shown: Box, target: npt.NDArray[np.uint8], scale: int) -> None:
    """Bilinearly, at the centres of the target's pixels."""
    cv2 = _opencv()
    height, width = target.shape[:2]
    if not _lies_between(shown, scale) or max(*pixels.shape, *target.shape) > _MAX_WARPED_SIDE:
        _resize_nearest(pixels, shown, target, scale, cv2.INTER_LINEAR)
        return
    # The rectangle's edges lie between pixels, where `resize` cannot begin. To move them would shift the image by up
    # to a pixel: twice as large an error, on photographs, as all the rest of what `quick` does.
    y, x = shown.height / (scale * height), shown.width / (scale * width)
    matrix = np.array([[x, 0, shown.left / scale + x / 2 - 0.5], [0, y, shown.top / scale + y / 2 - 0.5]])
    how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    cv2.warpAffine(pixels, matrix, (width, height), dst=target, flags=how, borderMode=cv2.BORDER_REPLICATE)


_scratch = threading.local()  # arrays by their use


def scratch(use: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """An uninitialised uint8 array that is this thread's until it requests the same use again.

    New pages for every image would cost a tenth of its decoding. A thread holds at most `MAX_SCRATCH_BYTES` for a use.
    """
    size = math.prod(shape)
    if size > MAX_SCRATCH_BYTES:
        return np.empty(shape, dtype=np.uint8)
    block: npt.NDArray[np.uint8] | None = getattr(_scratch, use, None)
    if block is None or len(block) < size:
        block = np.empty(min(1 << (size - 1).bit_length(), MAX_SCRATCH_BYTES), dtype=np.uint8)
        setattr(_scratch, use, block)
    return block[:size].reshape(shape)
