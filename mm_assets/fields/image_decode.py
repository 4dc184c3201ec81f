"""Image files to pixels as they are stored: the codecs.

JPEG is decoded by libjpeg-turbo, also at a part of its size; other files by Pillow, and by the one plugin that the
codec's number names. Width and height are read from the file's own header before it is decoded. Any bytes decode or
raise `FormatError`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from mm_assets.errors import FormatError
from mm_assets.fields.base import corrupt
from mm_assets.media.content_types import Buffer
from mm_assets.media.images import PILLOW_ERRORS

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "CODECS",
    "CODEC_NAMES",
    "INVERSE_ORIENTATION",
    "MODES",
    "SCALES",
    "UPRIGHT",
    "Allocator",
    "decode_pixels",
    "new_pixels",
    "open_with_pillow",
    "orient",
    "scaled",
    "with_channels",
]

CODECS = {"jpeg": 1, "png": 2, "webp": 3, "tiff": 4, "gif": 5, "bmp": 6}  # docs/fields.md, type 10
CODEC_NAMES = {number: name for name, number in CODECS.items()}
MODES = {1: "L", 3: "RGB", 4: "RGBA"}

UPRIGHT: Final = 1
INVERSE_ORIENTATION = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}

# Of the eighths that libjpeg can decode at only these are faster: 7/8, 6/8 and 5/8 take longer than the whole image.
SCALES = (8, 4, 2)

_COLORSPACES = {1: "GRAY", 3: "RGB", 4: "RGBA"}

Allocator = Callable[[tuple[int, int, int]], npt.NDArray[np.uint8]]
"""Returns the C-contiguous array of a shape to decode into; called only if the file's header confirms the shape."""


def new_pixels(shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """The `Allocator` of new memory."""
    return np.empty(shape, dtype=np.uint8)


def scaled(size: tuple[int, int], scale: int) -> tuple[int, int]:
    """(height, width) of a JPEG of that size that is decoded at 1/`scale`."""
    return -(-size[0] // scale), -(-size[1] // scale)


def decode_pixels(
    data: Buffer, codec: int, size: tuple[int, int], channels: int, *, scale: int = 1, allocate: Allocator = new_pixels
) -> npt.NDArray[np.uint8]:
    """Decode the first frame.

    Args:
        data: the file.
        codec: its number.
        size: (height, width) that it must have.
        channels: 1, 3 or 4.
        scale: 1, 2, 4 or 8: decode at that part of the size where the codec can, which is JPEG.
        allocate: returns the array to decode into where the codec can, which is JPEG too.

    Returns:
        (height, width, channels) uint8 as stored, not rotated; of a JPEG (ceil(height / scale), ceil(width / scale),
        channels), but for those few that libjpeg-turbo leaves to Pillow.

    Raises:
        CorruptError: the bytes are damaged, or are an image of another size than `size`.
    """
    if codec == CODECS["jpeg"]:
        pixels = _decode_jpeg(data, size, channels, scale, allocate)
        if pixels is not None:
            return pixels
    return _decode_with_pillow(data, CODEC_NAMES[codec], size, channels)


def _decode_jpeg(
    data: Buffer, size: tuple[int, int], channels: int, scale: int, allocate: Allocator
) -> npt.NDArray[np.uint8] | None:
    """None where Pillow has to decode: CMYK, and JPEGs with a warning, of which it accepts the harmless ones."""
    import simplejpeg

    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if (height, width) != size:
            raise corrupt("JPEG is not of the size in its record", found=(height, width), expected=size)
        if space in ("CMYK", "YCCK"):
            return None
        wanted = scaled(size, scale)
        pixels = allocate((*wanted, channels))
        least_height, least_width = wanted if scale > 1 else (0, 0)
        decoded = simplejpeg.decode_jpeg(
            data,
            colorspace=_COLORSPACES[channels],
            min_height=least_height,
            min_width=least_width,
            buffer=pixels,
            strict=True,
        )
    except MemoryError as error:
        raise corrupt("JPEG needs more memory than there is", found=size) from error
    except FormatError:
        raise
    except ValueError:
        return None
    # libjpeg chose the scale itself, the smallest that gives at least these sides: pixels of another shape would be
    # there in disorder.
    return pixels if decoded.shape[:2] == wanted else None


def _decode_with_pillow(data: Buffer, codec: str, size: tuple[int, int], channels: int) -> npt.NDArray[np.uint8]:
    with open_with_pillow(data, codec) as image:
        turned = image.getexif().get(0x0112, UPRIGHT) if codec == "tiff" else UPRIGHT
        expected = size if turned < 5 else size[::-1]  # Pillow turns TIFFs upright while it loads them
        if (image.height, image.width) != expected:
            found = (image.height, image.width)
            raise corrupt(f"{codec} is not of the size in its record", found=found, expected=expected)
        image.load()
        pixels = _pixels_of(image, channels)
    if 1 < turned <= 8:
        pixels = np.ascontiguousarray(orient(pixels, INVERSE_ORIENTATION[turned]))
    if pixels.shape != (*size, channels):
        raise corrupt(f"{codec} is not of the size in its record", found=pixels.shape, expected=(*size, channels))
    return pixels


@contextmanager
def open_with_pillow(data: Buffer, codec: str) -> Iterator[Image.Image]:
    """An image file, opened by the one plugin of its codec.

    Raises:
        CorruptError: damage that Pillow finds while the file is open.
    """
    # The plugin itself rather than Image.open: no other format can be smuggled in, and the size limit is the field's
    # instead of a global of Pillow's that only warns.
    from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin
    from PIL.Image import DecompressionBombError

    plugins: dict[str, Callable[[io.BytesIO], Image.Image]] = {
        "jpeg": JpegImagePlugin.JpegImageFile,
        "png": PngImagePlugin.PngImageFile,
        "webp": WebPImagePlugin.WebPImageFile,
        "tiff": TiffImagePlugin.TiffImageFile,
        "gif": GifImagePlugin.GifImageFile,
        "bmp": BmpImagePlugin.BmpImageFile,
    }
    try:
        with plugins[codec](io.BytesIO(data)) as image:
            yield image
    except FormatError:
        raise
    except (*PILLOW_ERRORS, DecompressionBombError) as error:
        raise corrupt(f"{codec} cannot be decoded: {type(error).__name__}: {error}") from error


def _pixels_of(image: Image.Image, channels: int) -> npt.NDArray[np.uint8]:
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion would clip it to 255 instead of scaling
        deep = np.asarray(image)
        grey = (deep.astype(np.int64).clip(0, 65_535) >> 8).astype(np.uint8)[:, :, np.newaxis]
        pixels = with_channels(grey, channels)
        key = image.info.get("transparency")
        if channels == 4 and isinstance(key, int):
            pixels[:, :, 3] = np.where(deep == key, 0, 255)
        return pixels
    mode = MODES[channels]
    if image.mode == "P" and mode != "RGBA" and isinstance(image.info.get("transparency"), bytes):
        # The same colours without alpha; converted at once, Pillow warns that there was one.
        image = image.convert("RGBA")
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[:, :, np.newaxis] if channels == 1 else pixels


def with_channels(pixels: npt.NDArray[np.uint8], channels: int) -> npt.NDArray[np.uint8]:
    """Grey, colour, or colour with alpha as another of these, as Pillow converts them."""
    from PIL import Image

    if pixels.shape[2] == channels:
        return pixels
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    converted = np.array(image.convert(MODES[channels]))
    return converted[:, :, np.newaxis] if channels == 1 else converted


def orient(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Turn and mirror by an EXIF orientation, as a view."""
    if orientation == UPRIGHT:
        return pixels
    if orientation in (5, 7):
        turned = pixels.swapaxes(0, 1)
        return turned if orientation == 5 else turned[::-1, ::-1]
    if orientation in (6, 8):
        return np.rot90(pixels, -1 if orientation == 6 else 1)
    return {2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1]}[orientation]
