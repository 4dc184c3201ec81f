"""Images: encoded bytes kept as they are, or pixels encoded on the way in; 8-bit pixels on the way out.

JPEG is decoded by libjpeg-turbo straight into the caller's buffer, everything else by Pillow, and by the one plugin
that the metadata record names: bytes never choose their own decoder.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.fields.base import (
    Buffer,
    Encoded,
    Field,
    ValueLayout,
    as_bytes_view,
    config_error,
    corrupt,
    describe,
    wrong_content,
    wrong_value,
)
from mm_assets.media import ImageInfo, probe_image

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["ImageField"]

# docs/fields.md, type 10
_RECORD = np.dtype(
    [
        ("height", "<u4"),
        ("width", "<u4"),
        ("channels", "u1"),
        ("codec", "u1"),
        ("bit_depth", "u1"),
        ("orientation", "u1"),
        ("num_frames", "<u4"),
    ]
)
_CODECS = {"jpeg": 1, "png": 2, "webp": 3, "tiff": 4, "gif": 5, "bmp": 6}
_CODEC_NAMES = {number: name for name, number in _CODECS.items()}
_ENCODINGS = ("keep", "jpeg", "png", "webp")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}

DEFAULT_MAX_PIXELS = 178_956_970  # where Pillow itself refuses: 512 MiB of RGB
_UPRIGHT: Final = 1
_INVERSE_ORIENTATION = {6: 8, 8: 6}  # all others undo themselves

# What Pillow's plugins are known to raise on damaged bytes. They do not promise a set: a plugin that indexes past a
# list or asserts is as much a verdict on the bytes as one that raises OSError. `Warning` is for callers who turn
# warnings into errors.
_PILLOW_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
    Warning,
)


@dataclass(frozen=True, kw_only=True)
class ImageField(Field):
    """An image.

    Value: (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) uint8, or the bytes of a JPEG, PNG, WebP, TIFF, GIF or BMP file.
    Decodes to (H, W, C) uint8. Of an animation or a multi-page TIFF the first frame is decoded. 16-bit samples decode
    to their high byte, 1-bit ones to 0 and 255, palettes to their colours, CMYK to RGB. Images that have no 8-bit
    form, such as floating-point TIFFs, are refused: they are arrays.

    Attributes:
        encoding: ``keep`` stores encoded bytes as they are, and arrays as PNG, without loss. ``jpeg``, ``png`` and
            ``webp`` encode whatever comes, also bytes that are of that codec already.
        quality: of JPEG (4:4:4) and WebP, 1 to 100.
        size: (height, width) to store at; the image is stretched to it. Needs an encoding other than ``keep``.
        channels: of the decoded array: 1, 3 or 4, or None for as many as the image has (grey 1, colour 3, with alpha
            4). Dropped alpha is not blended with anything; added alpha is 255.
        apply_orientation: turn pixels upright by the EXIF orientation: while encoding, where pixels are encoded anew,
            otherwise while decoding.
        max_pixels: height times width that is encoded or decoded at most; more is refused by the header.
    """

    TYPE_ID: ClassVar[int] = 10

    encoding: str = "keep"
    quality: int = 95
    size: tuple[int, int] | None = None
    channels: int | None = None
    apply_orientation: bool = False
    max_pixels: int = DEFAULT_MAX_PIXELS

    def __post_init__(self) -> None:
        if self.encoding not in _ENCODINGS:
            raise config_error("encoding", self.encoding, f"one of {', '.join(_ENCODINGS)}")
        if not _is_int(self.quality, 1, 100):
            raise config_error("quality", self.quality, "an integer from 1 to 100")
        if not _is_int(self.max_pixels, 1, 2**40):
            raise config_error("max_pixels", self.max_pixels, "an integer from 1 to 2**40")
        if self.channels is not None and (not _is_int(self.channels, 1, 4) or self.channels == 2):
            raise config_error("channels", self.channels, "1, 3, 4 or None")
        if not isinstance(self.apply_orientation, bool):
            raise config_error("apply_orientation", self.apply_orientation, "true or false")
        if self.size is not None:
            ok = isinstance(self.size, tuple | list) and len(self.size) == 2
            if not ok or not all(_is_int(side, 1, 65_535) for side in self.size):
                raise config_error("size", self.size, "(height, width), integers from 1 to 65535")
            if self.encoding == "keep":
                raise config_error("size", self.size, "None: bytes that are kept keep their size; choose an encoding")
            if self.size[0] * self.size[1] > self.max_pixels:
                raise config_error("size", self.size, f"at most max_pixels ({self.max_pixels}) pixels")
            object.__setattr__(self, "size", tuple(self.size))
        if self.encoding == "jpeg" and self.channels == 4:
            raise config_error("channels", self.channels, "1, 3 or None: JPEG has no alpha")

    @property
    def metadata_type(self) -> np.dtype[np.void]:
        """The metadata record, 16 bytes."""
        return _RECORD

    @property
    def keeps_bytes(self) -> bool:
        """With the encoding ``keep``."""
        return self.encoding == "keep"

    @property
    def value_layout(self) -> ValueLayout | None:
        """(height, width, channels) uint8, where `size` and `channels` are set."""
        if self.size is None or self.channels is None:
            return None
        return ValueLayout((*self.size, self.channels), np.dtype(np.uint8))

    @property
    def decodes_in_parallel(self) -> bool:
        """Yes: the decoders let go of the interpreter lock."""
        return True

    # --- encode -------------------------------------------------------------------------------------------------------

    def encode(self, value: npt.NDArray[np.uint8] | Buffer) -> Encoded:
        """Take pixels, or an image file's bytes."""
        if isinstance(value, bytes | bytearray | memoryview):
            data = bytes(value)
            info = self._probe(data)
            if self.encoding == "keep":
                return Encoded(self._record(info), data)
            try:
                channels = self.channels or info.channels
                pixels = _decode_pixels(data, _CODECS[info.codec], (info.height, info.width), channels)
            except ValueError as error:  # a FormatError is one: the bytes are the caller's here
                raise wrong_content(self, f"{info.codec} bytes that cannot be decoded ({error})", "an image") from error
            orientation = info.orientation
        else:
            pixels, orientation = self._check_pixels(value), _UPRIGHT
        if self.apply_orientation and orientation != _UPRIGHT:
            pixels, orientation = np.ascontiguousarray(_orient(pixels, orientation)), _UPRIGHT
        if self.size is not None and pixels.shape[:2] != self.size:
            pixels = _resize(pixels, self.size)
        codec = "png" if self.encoding == "keep" else self.encoding
        data = self._encode_pixels(pixels, codec)
        height, width, channels = pixels.shape
        return Encoded(self._pack_record(height, width, channels, _CODECS[codec], 8, orientation, 1), data)

    def check(self, value: npt.NDArray[np.uint8] | Buffer) -> None:
        """Look at the header of bytes that are kept; encode everything else."""
        if self.encoding == "keep" and isinstance(value, bytes | bytearray | memoryview):
            self._probe(value)
        elif self.encoding in ("keep", "png") and not isinstance(value, bytes | bytearray | memoryview):
            self._check_pixels(value)  # PNG takes any pixels
        else:
            self.encode(value)

    def _probe(self, data: Buffer) -> ImageInfo:
        try:
            info = probe_image(data)
        except MediaError as error:
            raise wrong_content(self, f"bytes that are no image ({error.reason})", "an image file") from error
        if info.width * info.height > self.max_pixels:
            found = f"{info.codec} of {info.height} x {info.width} pixels"
            raise wrong_content(self, found, f"at most {self.max_pixels} pixels (max_pixels)")
        if not info.has_8bit_form:
            raise wrong_content(self, f"{info.codec} of {info.bit_depth} bits", "an image with an 8-bit form")
        return info

    def _record(self, info: ImageInfo) -> bytes:
        num_frames = min(info.num_frames, 2**32 - 1)
        codec = _CODECS[info.codec]
        return self._pack_record(
            info.height, info.width, info.channels, codec, info.bit_depth, info.orientation, num_frames
        )

    def _check_pixels(self, value: object) -> npt.NDArray[np.uint8]:
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
            raise wrong_value(self, value, "pixels of uint8 or an image file's bytes")
        pixels = value[:, :, np.newaxis] if value.ndim == 2 else value
        if pixels.ndim != 3 or pixels.shape[2] not in _MODES or 0 in pixels.shape:
            raise wrong_value(self, value, "shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) without a zero")
        if pixels.shape[0] * pixels.shape[1] > self.max_pixels:
            raise wrong_value(self, value, f"at most {self.max_pixels} pixels (max_pixels)")
        if self.encoding != "keep" and self.channels is not None:
            pixels = _with_channels(pixels, self.channels)
        if self.encoding == "jpeg" and pixels.shape[2] == 4:
            raise wrong_value(self, value, "no alpha in a JPEG: set channels to 3, or encode as png")
        return np.ascontiguousarray(pixels)

    def _encode_pixels(self, pixels: npt.NDArray[np.uint8], codec: str) -> bytes:
        if codec == "jpeg" and pixels.shape[2] == 4:
            raise wrong_value(self, pixels, "no alpha in a JPEG: set channels to 3, or encode as png")
        try:
            if codec == "jpeg":
                import simplejpeg

                grey = pixels.shape[2] == 1
                subsampling = "Gray" if grey else "444"
                return bytes(
                    simplejpeg.encode_jpeg(
                        pixels, quality=self.quality, colorspace="GRAY" if grey else "RGB", colorsubsampling=subsampling
                    )
                )
            from PIL import Image

            target = io.BytesIO()
            image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
            if codec == "webp":
                image.save(target, format="WEBP", quality=self.quality)
            else:
                image.save(target, format="PNG")
            return target.getvalue()
        except (ValueError, OSError) as error:  # a side longer than the codec can hold
            raise wrong_content(self, f"{describe(pixels)} ({error})", f"what {codec} can hold") from error

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[np.uint8]:
        """Give (H, W, C) uint8."""
        return self._decode(metadata, data, None)

    def _decode_into(self, metadata: Buffer, data: Buffer, target: npt.NDArray[Any]) -> None:
        pixels = self._decode(metadata, data, target)
        if pixels is not target:
            target[...] = pixels

    def _decode(
        self, metadata: Buffer | np.void, data: Buffer, target: npt.NDArray[np.uint8] | None
    ) -> npt.NDArray[np.uint8]:
        height, width, channels, codec, _, orientation, _ = self._unpack_record(metadata)
        if codec not in _CODEC_NAMES:
            raise corrupt("image is of an unknown codec", found=codec, expected=f"one of {_CODEC_NAMES}")
        if channels not in _MODES:
            raise corrupt("image has an impossible number of channels", found=channels, expected="1, 3 or 4")
        if not 1 <= orientation <= 8:
            raise corrupt("image has an unknown orientation", found=orientation, expected="1 to 8")
        if not 1 <= height * width <= self.max_pixels:
            raise corrupt("image is too large", found=f"{height} x {width}", expected=f"1 to {self.max_pixels} pixels")
        if self.size is not None and (height, width) != self.size:
            raise corrupt("image is not of the field's size", found=(height, width), expected=self.size)
        view = as_bytes_view(data)
        pixels = _decode_pixels(view, codec, (height, width), self.channels or channels, target)
        if self.apply_orientation and orientation != _UPRIGHT:
            if self.size is not None:
                raise corrupt("image stored at a size is not upright", found=orientation, expected=_UPRIGHT)
            pixels = np.ascontiguousarray(_orient(pixels, orientation))
        return pixels


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _decode_pixels(
    data: Buffer,
    codec: int,
    size: tuple[int, int],
    channels: int,
    target: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.uint8]:
    """(height, width, channels) uint8 as stored, not turned; into `target` where the codec can, else a new array.

    Raises:
        CorruptError: the bytes are damaged, or are an image of another size than `size`.
    """
    if codec == _CODECS["jpeg"]:
        pixels = _decode_jpeg(data, size, channels, target)
        if pixels is not None:
            return pixels
    return _decode_with_pillow(data, _CODEC_NAMES[codec], size, channels)


def _decode_jpeg(
    data: Buffer, size: tuple[int, int], channels: int, target: npt.NDArray[np.uint8] | None
) -> npt.NDArray[np.uint8] | None:
    """None where Pillow has to look: CMYK, and JPEGs with a warning, of which it takes the harmless ones."""
    import simplejpeg

    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if (height, width) != size:
            raise corrupt("JPEG is not of the size in its record", found=(height, width), expected=size)
        if space in ("CMYK", "YCCK"):
            return None
        buffer = target if target is not None and target.flags.c_contiguous else None
        pixels = simplejpeg.decode_jpeg(
            data, colorspace={1: "GRAY", 3: "RGB", 4: "RGBA"}[channels], buffer=buffer, strict=True
        )
    except MemoryError as error:
        raise corrupt("JPEG needs more memory than there is", found=size) from error
    except ValueError as error:
        if type(error) is not ValueError:
            raise  # our own verdict, which is a ValueError too
        return None
    if buffer is not None:
        return buffer
    return np.asarray(pixels).reshape(*size, channels)


def _decode_with_pillow(data: Buffer, codec: str, size: tuple[int, int], channels: int) -> npt.NDArray[np.uint8]:
    from PIL.Image import DecompressionBombError

    try:
        image = _open_with_pillow(data, codec)
        with image:
            turned = image.getexif().get(0x0112, _UPRIGHT) if codec == "tiff" else _UPRIGHT
            expected = size if turned < 5 else size[::-1]  # Pillow turns TIFFs upright while it loads them
            if (image.height, image.width) != expected:
                raise corrupt(
                    f"{codec} is not of the size in its record", found=(image.height, image.width), expected=expected
                )
            image.load()
            pixels = _pixels_of(image, channels)
    except (*_PILLOW_ERRORS, DecompressionBombError) as error:
        if isinstance(error, ValueError) and type(error).__module__.startswith("mm_assets"):
            raise
        raise corrupt(f"{codec} cannot be decoded: {type(error).__name__}: {error}") from error
    if 1 < turned <= 8:
        pixels = np.ascontiguousarray(_orient(pixels, _INVERSE_ORIENTATION.get(turned, turned)))
    if pixels.shape != (*size, channels):
        raise corrupt(f"{codec} is not of the size in its record", found=pixels.shape, expected=(*size, channels))
    return pixels


def _open_with_pillow(data: Buffer, codec: str) -> Image.Image:
    # The plugin itself rather than Image.open: no other format can be smuggled in, and the size limit is the field's
    # instead of a global of Pillow's that only warns.
    from PIL import (
        BmpImagePlugin,
        GifImagePlugin,
        JpegImagePlugin,
        PngImagePlugin,
        TiffImagePlugin,
        WebPImagePlugin,
    )

    plugins: dict[str, Callable[[io.BytesIO], Image.Image]] = {
        "jpeg": JpegImagePlugin.JpegImageFile,
        "png": PngImagePlugin.PngImageFile,
        "webp": WebPImagePlugin.WebPImageFile,
        "tiff": TiffImagePlugin.TiffImageFile,
        "gif": GifImagePlugin.GifImageFile,
        "bmp": BmpImagePlugin.BmpImageFile,
    }
    return plugins[codec](io.BytesIO(data))


def _pixels_of(image: Image.Image, channels: int) -> npt.NDArray[np.uint8]:
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion would clip it to 255 instead of scaling
        deep = np.asarray(image)
        grey = (deep.astype(np.int64).clip(0, 65_535) >> 8).astype(np.uint8)[:, :, np.newaxis]
        pixels = _with_channels(grey, channels)
        key = image.info.get("transparency")
        if channels == 4 and isinstance(key, int):
            pixels[:, :, 3] = np.where(deep == key, 0, 255)
        return pixels
    mode = _MODES[channels]
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[:, :, np.newaxis] if channels == 1 else pixels


def _with_channels(pixels: npt.NDArray[np.uint8], channels: int) -> npt.NDArray[np.uint8]:
    from PIL import Image

    if pixels.shape[2] == channels:
        return pixels
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    converted = np.array(image.convert(_MODES[channels]))
    return converted[:, :, np.newaxis] if channels == 1 else converted


def _orient(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Turn and mirror by an EXIF orientation, as a view."""
    if orientation in (5, 7):
        turned = pixels.swapaxes(0, 1)
        return turned if orientation == 5 else turned[::-1, ::-1]
    if orientation in (6, 8):
        return np.rot90(pixels, -1 if orientation == 6 else 1)
    return {1: pixels, 2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1]}[orientation]


def _resize(pixels: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Stretch to (height, width): by pixel area where it shrinks, which does not alias, else bilinear."""
    import cv2

    shrinks = size[0] <= pixels.shape[0] and size[1] <= pixels.shape[1]
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    resized = cv2.resize(pixels, (size[1], size[0]), interpolation=method)
    return np.ascontiguousarray(resized.reshape(*size, pixels.shape[2]))
