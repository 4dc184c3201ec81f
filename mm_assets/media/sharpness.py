"""Sharpness of an image: the variance of its Laplacian at a reduced scale.

For given pixels the score is reproducible to the last bit. These functions follow docs/filters.md step by step:
reduction, 8-bit luma, 3 x 3 Laplacian, exact variance. JPEGs are decoded at the reduced scale.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError, optional_import
from mm_assets.media.images import PILLOW_ERRORS, ImageInfo, probe_image
from mm_assets.media.quiet_pillow import quiet_pillow

__all__ = ["MAX_JPEG_PIXELS", "MAX_PIXELS", "decode_luma", "laplacian_variance", "reduction", "sharpness"]

MAX_PIXELS = 89_478_485  # of an image that is decoded whole: 256 MiB as RGB, above which Pillow warns
MAX_JPEG_PIXELS = 178_956_970  # twice that: JPEGs of this size are decoded at an eighth
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
        MediaError: the image cannot be decoded, or has more than `MAX_PIXELS` (JPEG: `MAX_JPEG_PIXELS`) pixels.
    """
    return laplacian_variance(decode_luma(data, min_side=min_side))


def decode_luma(data: memoryview, *, min_side: int | None) -> npt.NDArray[np.uint8]:
    """Decode the first frame to 8-bit luma, reduced by `reduction`: (height, width) uint8, each side rounded up.

    Raises:
        MediaError: the image cannot be decoded, or has more than `MAX_PIXELS` (JPEG: `MAX_JPEG_PIXELS`) pixels.
    """
    info = probe_image(data)
    limit = MAX_JPEG_PIXELS if info.codec == "jpeg" else MAX_PIXELS
    if info.width * info.height > limit:
        raise MediaError("<image>", f"has {info.width} x {info.height} pixels, expected at most {limit} of them")
    factor = reduction(info.width, info.height, min_side=min_side)
    return _decode_jpeg(data, info, factor) if info.codec == "jpeg" else _decode_other(data, factor)


def _decode_jpeg(data: memoryview, info: ImageInfo, factor: int) -> npt.NDArray[np.uint8]:
    import simplejpeg

    # The decoder takes the smallest scale that reaches both minima; 0 asks for the full size.
    height, width = -(-info.height // factor), -(-info.width // factor)
    least = {"min_height": height, "min_width": width} if factor > 1 else {}
    try:
        colors = simplejpeg.decode_jpeg_header(data, strict=False)[2]
        if colors not in ("CMYK", "YCCK"):
            # Damage that the decoder recovers from is scored as decoded; zeros for the rest make it repeatable.
            buffer = np.zeros(height * width, dtype=np.uint8)
            pixels = simplejpeg.decode_jpeg(data, "GRAY", buffer=buffer, strict=False, **least)
            return np.asarray(pixels, dtype=np.uint8)[:, :, 0]
    except (ValueError, LookupError, RuntimeError) as error:  # LookupError: no known subsampling
        raise MediaError("<image>", f"JPEG cannot be decoded: {error}") from error
    if info.width * info.height > MAX_PIXELS:
        raise MediaError("<image>", f"has more than {MAX_PIXELS} pixels in {colors}")
    return _decode_other(data, factor)  # simplejpeg does not convert CMYK to luma


def _decode_other(data: memoryview, factor: int) -> npt.NDArray[np.uint8]:
    from PIL import Image

    try:
        with quiet_pillow(), Image.open(io.BytesIO(data)) as image:
            image.load()
            luma = _luma(image)
    except (*PILLOW_ERRORS, Image.DecompressionBombError) as error:
        raise MediaError("<image>", f"cannot be decoded: {error}") from error
    if factor > 1:
        luma = luma.reduce(factor)
    return np.asarray(luma, dtype=np.uint8)


def _luma(image: Any) -> Any:
    """8-bit luma of a Pillow image, on white; the upper 8 bits if it has more."""
    from PIL import Image

    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64)
        return Image.fromarray((np.clip(levels, 0, 65535) >> 8).astype(np.uint8))
    if image.mode == "F":
        return Image.fromarray(np.clip(np.nan_to_num(np.asarray(image)), 0, 255).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("L")
    # Many drawings are black, with their shape in the alpha channel alone: without it they would be flat.
    visible = image.convert("RGBA")
    paper = Image.new("L", image.size, 255)
    paper.paste(visible.convert("L"), mask=visible.getchannel("A"))
    return paper
