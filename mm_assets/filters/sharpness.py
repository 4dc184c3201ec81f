"""Sharpness of an image: the variance of its Laplacian at a reduced scale.

For given pixels the score is reproducible to the last bit. These functions follow docs/spec/filters.md step by step:
reduction, 8-bit luma, 3 x 3 Laplacian, exact variance. Images are decoded as the reader of a packed file decodes them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mm_assets.errors import FormatError, MediaError, optional_import
from mm_assets.fields.image import DEFAULT_MAX_PIXELS
from mm_assets.fields.image_decode import CODECS, decode_pixels, orient
from mm_assets.media.images import probe_image

__all__ = ["MAX_PIXELS", "decode_luma", "laplacian_variance", "reduction", "sharpness"]

MAX_PIXELS = DEFAULT_MAX_PIXELS
_REDUCTIONS = (8, 4, 2)  # fast in JPEG decoders, which reduce in the frequency domain


def reduction(width: int, height: int, *, min_side: int | None) -> int:
    """The largest of 8, 4, 2 and 1 that leaves the shorter side at least `min_side` pixels; None is 1."""
    if min_side is None:
        return 1
    return next((f for f in _REDUCTIONS if min(width, height) >= min_side * f), 1)


def laplacian_variance(luma: npt.NDArray[np.uint8]) -> float:
    """Variance of the Laplacian (Pech-Pacheco et al., 2000) of luma: (height, width) uint8, in grey levels squared.

    The kernel is [0 1 0; 1 -4 1; 0 1 0] with borders mirrored about the edge pixels.
    """
    with optional_import("cv2", "measuring sharpness"):
        import cv2

    laplacian = cv2.Laplacian(luma, cv2.CV_16S, ksize=1)
    # Sums of integers below 2**53 are exact in float64, so the order of summation does not matter.
    total = cv2.sumElems(laplacian)[0]
    squares = cv2.norm(laplacian, cv2.NORM_L2SQR)
    return float((squares - total * total / luma.size) / luma.size)


def sharpness(data: memoryview, *, min_side: int | None) -> float:
    """Score of one encoded image, 0 (flat) to about a million; see `laplacian_variance`.

    Raises:
        MediaError: as of `decode_luma`.
    """
    return laplacian_variance(decode_luma(data, min_side=min_side))


def decode_luma(data: memoryview, *, min_side: int | None) -> npt.NDArray[np.uint8]:
    """Decode the first frame as the reader of a packed file does, to 8-bit luma: upright and in sRGB.

    Returns:
        (height, width) uint8, each side divided by `reduction` and rounded up.

    Raises:
        MediaError: the image cannot be decoded, has no 8-bit form, or has more than `MAX_PIXELS`.
    """
    from PIL import Image

    info = probe_image(data)
    if info.width * info.height > MAX_PIXELS:
        raise MediaError("<image>", f"has {info.width} x {info.height} pixels, expected at most {MAX_PIXELS} of them")
    if not info.has_8bit_form:
        raise MediaError("<image>", f"is a {info.codec} of {info.bit_depth} bits, expected one with an 8-bit form")
    factor = reduction(info.width, info.height, min_side=min_side)
    size, channels = (info.height, info.width), 4 if info.channels == 4 else 1
    try:
        pixels = decode_pixels(data, CODECS[info.codec], size, channels, scale=factor, to_srgb=True)
    except FormatError as error:
        raise MediaError("<image>", error.detail) from error
    luma = pixels[:, :, 0] if channels == 1 else _on_white(pixels)
    if factor > 1 and luma.shape == size:  # only JPEGs are decoded at a part of their size
        luma = np.asarray(Image.fromarray(luma).reduce(factor))
    return np.ascontiguousarray(orient(luma, info.orientation))


def _on_white(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The luma of RGBA pixels before white.

    Many drawings are black, with their shape in the alpha channel alone: without it they would be flat.
    """
    from PIL import Image

    visible = Image.fromarray(pixels)
    paper = Image.new("L", visible.size, 255)
    paper.paste(visible.convert("L"), mask=visible.getchannel("A"))
    return np.asarray(paper)
