"""Image files to pixels as they are stored: the codecs.

JPEG is decoded by libjpeg-turbo, also at a part of its size; other files by Pillow, and by the one plug-in that the
codec's number names. Width and height are read from the file's own header before it is decoded. Any bytes decode or
raise `FormatError`. Damage that libjpeg only warns of is damage: pixels that it made up are not the image's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from mm_assets.errors import FormatError, MediaError
from mm_assets.fields.array_spec import as_bytes_view
from mm_assets.fields.base import corrupt, truncated
from mm_assets.fields.image_color import Conversion, conversion_of, lab_to_srgb, profile_of
from mm_assets.fields.image_pillow import open_with_pillow
from mm_assets.fields.image_resize import scratch
from mm_assets.media.content_types import Buffer
from mm_assets.media.images import ImageInfo, probe_image
from mm_assets.media.jpeg import MAX_SCANS, JpegHead, num_scans, read_jpeg_head, without_padding

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
    "check_pixels",
    "confirm",
    "decode_frames",
    "decode_pixels",
    "new_pixels",
    "orient",
    "pixels_of",
    "scaled",
    "with_channels",
]

CODECS = {"jpeg": 1, "png": 2, "webp": 3, "tiff": 4, "gif": 5, "bmp": 6}  # docs/spec/fields.md, type 10
CODECS |= {"avif": 7, "heic": 8, "jxl": 9, "jp2": 10, "pnm": 11, "ico": 12, "tga": 13}
CODEC_NAMES = {number: name for name, number in CODECS.items()}
MODES = {1: "L", 3: "RGB", 4: "RGBA"}

UPRIGHT: Final = 1
INVERSE_ORIENTATION = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}

# Of the eighths that libjpeg can decode at only these are faster: 7/8, 6/8 and 5/8 take longer than the whole image.
SCALES = (8, 4, 2)

_COLORSPACES = {1: "GRAY", 3: "RGB", 4: "RGBA"}

# Their decoders allocate while they open a file, or know its size only once it is decoded: its header is read here.
_PROBED = frozenset({"avif", "heic", "jxl", "jp2", "pnm", "ico", "tga"})

# What libjpeg warns of, and decodes all the same. It gives its last warning only, and those of the data come last.
_HARMLESS = ("Warning: unknown JFIF revision", "Unknown Adobe color transform", "Invalid SOS parameters")
_DAMAGE = ("Premature end", "Corrupt JPEG data", "Inconsistent progression")
_EXTRANEOUS = re.compile(r"(\d+) extraneous bytes before marker 0x([0-9a-f]{2})")
_EOI = 0xD9

Allocator = Callable[[tuple[int, int, int]], npt.NDArray[np.uint8]]
"""Returns the C-contiguous array of a shape to decode into; called only if the file's header confirms the shape."""


def new_pixels(shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """The `Allocator` of new memory."""
    return np.empty(shape, dtype=np.uint8)


def scaled(size: tuple[int, int], scale: int) -> tuple[int, int]:
    """(height, width) of a JPEG of that size that is decoded at 1/`scale`."""
    return -(-size[0] // scale), -(-size[1] // scale)


def decode_pixels(
    data: Buffer,
    codec: int,
    size: tuple[int, int],
    channels: int,
    *,
    scale: int = 1,
    allocate: Allocator = new_pixels,
    to_srgb: bool = False,
) -> npt.NDArray[np.uint8]:
    """Decode the first frame.

    Args:
        data: the file.
        codec: its number.
        size: (height, width) that it must have.
        channels: 1, 3 or 4.
        scale: 1, 2, 4 or 8: decode at that part of the size where the codec can, which is JPEG.
        allocate: returns the array to decode into where the codec can, which is JPEG too.
        to_srgb: convert colours by the file's ICC profile.

    Returns:
        (height, width, channels) uint8 as stored, not rotated; of a JPEG (ceil(height / scale), ceil(width / scale),
        channels), but for those few that libjpeg-turbo leaves to Pillow.

    Raises:
        CorruptError: the bytes are damaged, or are an image of another size than `size`.
        TruncatedError: a JPEG that ends too early.
        MissingExtraError: the codec's plug-in is not installed.
    """
    if codec == CODECS["jpeg"]:
        pixels = _decode_jpeg(as_bytes_view(data), size, channels, scale, allocate, to_srgb)
        if pixels is not None:
            return pixels
    return _decode_with_pillow(data, CODEC_NAMES[codec], size, channels, 1, to_srgb)[0]


def decode_frames(
    data: Buffer, codec: int, size: tuple[int, int], channels: int, num_frames: int, *, to_srgb: bool = False
) -> list[npt.NDArray[np.uint8]]:
    """Decode all frames, each (height, width, channels) uint8; arguments and errors as of `decode_pixels`."""
    if num_frames == 1:
        return [decode_pixels(data, codec, size, channels, to_srgb=to_srgb)]
    return _decode_with_pillow(data, CODEC_NAMES[codec], size, channels, num_frames, to_srgb)


def check_pixels(
    data: Buffer, codec: int, size: tuple[int, int], channels: int, num_frames: int = 1, *, to_srgb: bool = False
) -> None:
    """Raise what `decode_frames` would, with the same arguments, for less.

    A JPEG's data is read to its end, for grey pixels at an eighth of its size. Other files are decoded, but only one
    pixel is converted: whether that is possible depends on the kind of pixels alone.
    """
    name = CODEC_NAMES[codec]
    if name == "jpeg" and num_frames == 1:
        decode_pixels(data, codec, size, 1, scale=SCALES[0], allocate=partial(scratch, "decoded"))
        return
    for image, _ in _load_with_pillow(data, name, size, num_frames):
        pixels_of(image.crop((0, 0, 1, 1)), channels, to_srgb=to_srgb)


def _decode_jpeg(
    view: memoryview, size: tuple[int, int], channels: int, scale: int, allocate: Allocator, to_srgb: bool
) -> npt.NDArray[np.uint8] | None:
    """None where Pillow has to decode: CMYK, and JPEGs that libjpeg-turbo cannot describe."""
    import simplejpeg

    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(view)
    except ValueError:
        return None
    if (height, width) != size:
        raise corrupt("JPEG is not of the size in its record", found=(height, width), expected=size)
    head = read_jpeg_head(view)
    if head.is_progressive and num_scans(view, head) > MAX_SCANS:
        return None  # refused before Pillow
    if space in ("CMYK", "YCCK"):
        # Pillow converts its colours, but would not see its damage.
        _read_scans(view, head, size, "CMYK", 8, np.empty((*scaled(size, 8), 4), dtype=np.uint8))
        return None
    conversion = conversion_of(head.icc) if to_srgb and head.icc else None
    if conversion is not None and (conversion.space == "L") == (space == "Gray"):
        return _converted_jpeg(view, head, size, channels, scale, conversion)
    pixels = allocate((*scaled(size, scale), channels))
    return pixels if _read_scans(view, head, size, _COLORSPACES[channels], scale, pixels) else None


def _converted_jpeg(
    view: memoryview, head: JpegHead, size: tuple[int, int], channels: int, scale: int, conversion: Conversion
) -> npt.NDArray[np.uint8] | None:
    own = 1 if conversion.space == "L" else 3
    pixels = new_pixels((*scaled(size, scale), own))
    if not _read_scans(view, head, size, _COLORSPACES[own], scale, pixels):
        return None
    return with_channels(conversion.apply_to_pixels(pixels), channels)


def _read_scans(
    view: Buffer,
    head: JpegHead,
    size: tuple[int, int],
    colorspace: str,
    scale: int,
    pixels: npt.NDArray[np.uint8],
    *,
    is_padded: bool = False,
) -> bool:
    """Decode into `pixels`, reading all of the data; False where libjpeg-turbo cannot, so that they hold nothing."""
    import simplejpeg

    wanted = scaled(size, scale)
    least_height, least_width = wanted if scale > 1 else (0, 0)
    try:
        decoded = simplejpeg.decode_jpeg(
            view,
            colorspace=colorspace,
            min_height=least_height,
            min_width=least_width,
            buffer=pixels,
            strict=True,
        )
    except ValueError as error:
        said = str(error)
        if said.startswith("Insufficient memory"):
            raise MemoryError(f"decoding a JPEG: {said}") from error
        if said.startswith(_HARMLESS):
            return True
        match = _EXTRANEOUS.search(said)
        if match is not None and not is_padded:
            num_bytes, marker = int(match[1]), int(match[2], 16)
            if (num_bytes, marker) == head.junk:
                return True  # between two segments of the header
            if marker == _EOI and _is_padded(as_bytes_view(view), head, size, colorspace, scale, pixels):
                return True
        if not said.startswith(_DAMAGE):
            return False
        if said.startswith("Premature end"):
            raise truncated(f"JPEG is truncated: {_what_is_there(view, head, size)}") from error
        raise corrupt(f"JPEG is damaged: {said}") from error
    # libjpeg chose the scale itself, the smallest that gives at least these sides: pixels of another shape would be
    # there in disorder.
    return bool(decoded.shape[:2] == wanted)


def _is_padded(
    view: memoryview, head: JpegHead, size: tuple[int, int], colorspace: str, scale: int, pixels: npt.NDArray[np.uint8]
) -> bool:
    """Whether zeros before the end marker are padding, decoding into `pixels`: without them nothing is wrong."""
    for keep in (0, 1):  # the last byte of the data may be a zero itself
        shorter = without_padding(view, keep=keep)
        if shorter is None:
            break
        try:
            return _read_scans(shorter, head, size, colorspace, scale, pixels, is_padded=True)
        except FormatError:
            continue
    return False


def _what_is_there(view: Buffer, head: JpegHead, size: tuple[int, int]) -> str:
    """How much of a truncated JPEG there is: rows, or the scans of a progressive one."""
    import simplejpeg

    num_bytes = f"{len(view):,} bytes"
    if head.is_progressive:
        return f"{num_scans(as_bytes_view(view), head)} scans begin in {num_bytes}"
    height, width = scaled(size, 8)
    try:
        grey = simplejpeg.decode_jpeg(view, colorspace="GRAY", min_height=height, min_width=width, strict=False)
    except ValueError:
        return num_bytes
    # libjpeg fills what is missing with the middle grey.
    there = np.flatnonzero((grey[:, :, 0] != 128).any(axis=1))
    rows = 0 if not len(there) else min(size[0], -(-size[0] * (int(there[-1]) + 1) // grey.shape[0]))
    return f"{rows:,} of {size[0]:,} rows in {num_bytes}"


def _decode_with_pillow(
    data: Buffer, codec: str, size: tuple[int, int], channels: int, num_frames: int, to_srgb: bool
) -> list[npt.NDArray[np.uint8]]:
    """The first frames, as stored."""
    frames = []
    for image, turned in _load_with_pillow(data, codec, size, num_frames):
        pixels = pixels_of(image, channels, to_srgb=to_srgb)
        if 1 < turned <= 8:
            pixels = np.ascontiguousarray(orient(pixels, INVERSE_ORIENTATION[turned]))
        frames.append(pixels)
    return frames


def _load_with_pillow(
    data: Buffer, codec: str, size: tuple[int, int], num_frames: int
) -> Iterator[tuple[Image.Image, int]]:
    """The first frames, loaded, each with the orientation by which its decoder has turned it."""
    info = confirm(data, codec, size) if codec in _PROBED else None
    with open_with_pillow(data, codec) as image:
        turned = UPRIGHT
        if codec == "tiff":
            turned = image.getexif().get(0x0112, UPRIGHT)  # Pillow turns TIFFs upright while it loads them
        elif codec == "heic" or (codec == "jxl" and not getattr(image, "jpeg", False)):
            turned = UPRIGHT if info is None else info.orientation
        expected = size if turned < 5 else size[::-1]

        def check_size(problem: str) -> None:
            found = (image.height, image.width)
            if found != expected:
                raise corrupt(f"{codec} {problem}", found=found, expected=expected)

        if codec != "ico":  # the plug-in knows the size once it is loaded
            check_size("is not of the size in its record")
        first = int(bool(num_frames > 1 and getattr(image, "default_image", False)))  # of an APNG: not a frame of it
        for index in range(num_frames):
            if num_frames > 1:
                image.seek(first + index)
                check_size("has frames of two sizes")
            image.load()
            check_size("is not of the size in its record")
            if info is not None and info.colours and not info.has_high_range and not image.info.get("icc_profile"):
                image.info["icc_profile"] = profile_of(*info.colours)
            yield image, turned


def confirm(data: Buffer, codec: str, size: tuple[int, int]) -> ImageInfo:
    """A file's own header, compared with its record."""
    try:
        info = probe_image(data)
    except MediaError as error:
        raise corrupt(f"{codec} is damaged: {error.reason}") from error
    if (info.codec, info.height, info.width) != (codec, *size):
        found = (info.codec, info.height, info.width)
        raise corrupt(f"{codec} is not of the size in its record", found=found, expected=(codec, *size))
    return info


def pixels_of(image: Image.Image, channels: int, *, to_srgb: bool = False) -> npt.NDArray[np.uint8]:
    """The 8-bit pixels of a loaded image, (H, W, channels); in sRGB where its ICC profile is to be used."""
    if image.mode == "LAB":
        image = lab_to_srgb(image)
    profile = image.info.get("icc_profile") if to_srgb else None
    conversion = conversion_of(profile) if isinstance(profile, bytes) and profile else None
    if conversion is not None:
        image = conversion.apply(image)
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
