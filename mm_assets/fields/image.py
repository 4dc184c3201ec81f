"""Images: encoded bytes stored unchanged, or pixels encoded here. Decoding gives 8-bit pixels.

Only the codec that the metadata record names decodes an image: bytes never choose their own decoder. The size that an
image is resized to while it is decoded is a setting of the reader, and does not change what is stored.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.fields.base import ArraySpec, Encoded, Field, as_bytes_view, corrupt, is_int
from mm_assets.fields.image_decode import (
    CODEC_NAMES,
    CODECS,
    INVERSE_ORIENTATION,
    MODES,
    SCALES,
    UPRIGHT,
    Allocator,
    decode_pixels,
    new_pixels,
    orient,
    scaled,
    with_channels,
)
from mm_assets.fields.image_resize import RESIZES, Box, place, resample, resize, scratch
from mm_assets.media.content_types import Buffer
from mm_assets.media.images import ImageInfo, probe_image
from mm_assets.summaries import describe

__all__ = ["ImageField"]

_JPEG = CODECS["jpeg"]
_ENCODINGS = ("keep", "jpeg", "png", "webp")
_SUBSAMPLINGS = ("444", "420")
_DECODE_MODES = ("exact", "fast")

DEFAULT_MAX_PIXELS = 178_956_970  # where Pillow itself refuses: 512 MiB of RGB


@dataclass(frozen=True, kw_only=True)
class ImageField(Field):
    """An image.

    Value: (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) uint8, or the bytes of a JPEG, PNG, WebP, TIFF, GIF or BMP file.
    Decodes to (H, W, C) uint8. Of an animation or a multi-page TIFF the first frame is decoded. 16-bit samples decode
    to their high byte, 1-bit ones to 0 and 255, palettes to their colours, CMYK to RGB. Images that have no 8-bit
    form, such as floating-point TIFFs, are refused: they are arrays.

    Attributes:
        encoding: ``keep`` stores encoded bytes as they are, and arrays as PNG, without loss. ``jpeg``, ``png`` and
            ``webp`` encode every value, also bytes that have that codec already.
        quality: of JPEG and WebP, 1 to 100.
        subsampling: of JPEG, a text. ``444`` keeps the colour of every pixel. ``420`` keeps one of four, as most
            photographs have it already: two thirds of the bytes, decoded in three fifths of the time. Grey has none.
        size: (height, width) to store at; the image is stretched to it. Needs an encoding other than ``keep``. Nothing
            is resized later, unless `decode_size` asks for another size.
        channels: of the decoded array: 1, 3 or 4, or None for as many as the image has (grey 1, colour 3, with alpha
            4). Dropped alpha is not blended with anything; added alpha is 255.
        apply_orientation: turn pixels upright by the EXIF orientation: while encoding, where pixels are encoded again,
            otherwise while decoding.
        max_pixels: height times width that is encoded or decoded at most; more is refused by the header.
        decode_size: (height, width) of the decoded array, whatever is stored; None for what is stored.
        decode_resize: how an image of another shape comes to `decode_size`. ``stretch`` does not keep its aspect
            ratio. ``crop`` takes the largest centred rectangle of the size's aspect ratio, to a whole pixel, and fills
            the size with it. ``pad`` makes the whole image fit, centred, between bars of `decode_fill`.
        decode_fill: value of the bars' channels, 0 to 255.
        decode_mode: ``exact`` decodes all of an image and then shrinks by pixel area, or enlarges bilinearly. ``fast``
            decodes a JPEG at 1/2, 1/4 or 1/8 of its size where that is not below `decode_size`, and shrinks any image
            by bilinear samples. Its pixels differ; docs/fields.md says how much.
    """

    TYPE_ID: ClassVar[int] = 10
    TAKES_JSON: ClassVar[bool] = False
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype(
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
    decodes_in_parallel: ClassVar[bool] = True  # the decoders release the interpreter lock
    LIMITS: ClassVar[tuple[str, ...]] = ("max_pixels",)

    encoding: str = "keep"
    quality: int = 95
    subsampling: str = "444"
    size: tuple[int, int] | None = None
    channels: int | None = None
    apply_orientation: bool = False
    max_pixels: int = DEFAULT_MAX_PIXELS
    decode_size: tuple[int, int] | None = None
    decode_resize: str = "stretch"
    decode_fill: int = 0
    decode_mode: str = "exact"

    def __post_init__(self) -> None:
        self._expect_choice("encoding", _ENCODINGS)
        self._expect_int("quality", 1, 100)
        if self.subsampling not in _SUBSAMPLINGS:
            raise self._wrong_setting("subsampling", "the text '444' or '420', in YAML with its quotes")
        self._expect_int("max_pixels", 1, 2**40)
        if self.channels is not None and (not is_int(self.channels, 1, 4) or self.channels == 2):
            raise self._wrong_setting("channels", "1, 3, 4 or None")
        self._expect_bool("apply_orientation")
        self._expect_size("size", 65_535, max_pixels=self.max_pixels)
        self._expect_size("decode_size", 65_535, max_pixels=self.max_pixels)
        if self.size is not None and self.encoding == "keep":
            raise self._wrong_setting("size", "None: bytes that are kept keep their size; choose an encoding")
        if self.encoding == "jpeg" and self.channels == 4:
            raise self._wrong_setting("channels", "1, 3 or None: JPEG has no alpha")
        self._expect_choice("decode_resize", RESIZES)
        self._expect_int("decode_fill", 0, 255)
        self._expect_choice("decode_mode", _DECODE_MODES)
        if self.decode_size is None:
            for name, default in (("decode_resize", "stretch"), ("decode_fill", 0), ("decode_mode", "exact")):
                if getattr(self, name) != default:
                    raise self._wrong_setting(name, f"{default!r}: without decode_size it would do nothing")

    @property
    def keeps_bytes(self) -> bool:
        """With the encoding ``keep``."""
        return self.encoding == "keep"

    @property
    def value_layout(self) -> ArraySpec | None:
        """(height, width, channels) uint8, where `decode_size` or `size`, and `channels`, are set."""
        size = self.decode_size or self.size
        if size is None or self.channels is None:
            return None
        return ArraySpec((*size, self.channels), np.dtype(np.uint8))

    # --- encode -------------------------------------------------------------------------------------------------------

    def encode(self, value: npt.NDArray[np.uint8] | Buffer) -> Encoded:
        """Encode pixels, or an image file's bytes."""
        if isinstance(value, Buffer):
            data, info = bytes(value), self._probe(value)
            if self.encoding == "keep":
                facts = (CODECS[info.codec], info.bit_depth, info.orientation, min(info.num_frames, 2**32 - 1))
                return Encoded(self._pack_record(info.height, info.width, info.channels, *facts), data)
            try:
                channels = self.channels or info.channels
                pixels = decode_pixels(data, CODECS[info.codec], (info.height, info.width), channels)
            except ValueError as error:  # a FormatError is one: the bytes are the caller's here
                raise self._wrong_content(f"{info.codec} bytes that cannot be decoded ({error})", "an image") from error
            orientation = info.orientation
        else:
            pixels, orientation = self._check_pixels(value), UPRIGHT
        if self.apply_orientation and orientation != UPRIGHT:
            pixels, orientation = np.ascontiguousarray(orient(pixels, orientation)), UPRIGHT
        if self.size is not None and pixels.shape[:2] != self.size:
            pixels = resize(pixels, self.size)
        codec = "png" if self.encoding == "keep" else self.encoding
        data = self._encode_pixels(pixels, codec)
        height, width, channels = pixels.shape
        return Encoded(self._pack_record(height, width, channels, CODECS[codec], 8, orientation, 1), data)

    def check(self, value: npt.NDArray[np.uint8] | Buffer) -> None:
        """Read the header of bytes that are stored unchanged; encode other values."""
        if self.encoding == "keep" and isinstance(value, Buffer):
            self._probe(value)
        elif self.encoding in ("keep", "png") and not isinstance(value, Buffer):
            self._check_pixels(value)  # PNG takes any pixels
        else:
            self.encode(value)

    def _probe(self, data: Buffer) -> ImageInfo:
        try:
            info = probe_image(data)
        except MediaError as error:
            raise self._wrong_content(f"bytes that are not an image ({error.reason})", "an image file") from error
        if info.width * info.height > self.max_pixels:
            found = f"{info.codec} of {info.height} x {info.width} pixels"
            raise self._wrong_content(found, f"at most {self.max_pixels} pixels (max_pixels)")
        if not info.has_8bit_form:
            raise self._wrong_content(f"{info.codec} of {info.bit_depth} bits", "an image with an 8-bit form")
        return info

    def _check_pixels(self, value: object) -> npt.NDArray[np.uint8]:
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
            raise self._wrong_value(value, "pixels of uint8 or an image file's bytes")
        pixels = value[:, :, np.newaxis] if value.ndim == 2 else value
        if pixels.ndim != 3 or pixels.shape[2] not in MODES or 0 in pixels.shape:
            raise self._wrong_value(value, "shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) without a zero")
        if pixels.shape[0] * pixels.shape[1] > self.max_pixels:
            raise self._wrong_value(value, f"at most {self.max_pixels} pixels (max_pixels)")
        if self.encoding != "keep" and self.channels is not None:
            pixels = with_channels(pixels, self.channels)
        return np.ascontiguousarray(pixels)

    def _encode_pixels(self, pixels: npt.NDArray[np.uint8], codec: str) -> bytes:
        if codec == "jpeg" and pixels.shape[2] == 4:
            raise self._wrong_value(pixels, "no alpha in a JPEG: set channels to 3, or encode as png")
        try:
            if codec == "jpeg":
                import simplejpeg

                space, subsampling = ("GRAY", "Gray") if pixels.shape[2] == 1 else ("RGB", self.subsampling)
                return bytes(
                    simplejpeg.encode_jpeg(pixels, quality=self.quality, colorspace=space, colorsubsampling=subsampling)
                )
            from PIL import Image

            target = io.BytesIO()
            image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
            image.save(target, format=codec, quality=self.quality)  # which PNG ignores
            return target.getvalue()
        except (ValueError, OSError) as error:  # a side longer than the codec can hold
            raise self._wrong_content(f"{describe(pixels)} ({error})", f"what {codec} can hold") from error

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[np.uint8]:
        """Return (H, W, C) uint8."""
        return self._decode(metadata, data, None)

    def _decode_into(self, metadata: Buffer, data: Buffer, target: npt.NDArray[Any]) -> None:
        pixels = self._decode(metadata, data, target)
        if pixels is not target:
            target[...] = pixels

    def _decode(
        self, metadata: Buffer | np.void, data: Buffer, target: npt.NDArray[np.uint8] | None
    ) -> npt.NDArray[np.uint8]:
        """The decoded image: `target`, or another array where that is None or no codec can write there."""
        height, width, channels, codec, _, orientation, _ = self._unpack_record(metadata)
        if codec not in CODEC_NAMES:
            raise corrupt("image is of an unknown codec", found=codec, expected=f"one of {CODEC_NAMES}")
        if channels not in MODES:
            raise corrupt("image has an impossible number of channels", found=channels, expected="1, 3 or 4")
        if not 1 <= orientation <= 8:
            raise corrupt("image has an unknown orientation", found=orientation, expected="1 to 8")
        if not 1 <= height * width <= self.max_pixels:
            raise corrupt("image is too large", found=f"{height} x {width}", expected=f"1 to {self.max_pixels} pixels")
        if self.size is not None and (height, width) != self.size:
            raise corrupt("image is not of the field's size", found=(height, width), expected=self.size)
        if not self.apply_orientation:
            orientation = UPRIGHT
        elif self.size is not None and orientation != UPRIGHT:
            raise corrupt("image stored at a size is not upright", found=orientation, expected=UPRIGHT)
        stored = _Stored(as_bytes_view(data), codec, (height, width), self.channels or channels, orientation)
        if self.decode_size is not None:
            return self._decode_to_size(stored, self.decode_size, target)
        pixels = stored.pixels(allocate=_allocator_for(target))
        return pixels if orientation == UPRIGHT else np.ascontiguousarray(orient(pixels, orientation))

    def _decode_to_size(
        self, stored: _Stored, size: tuple[int, int], target: npt.NDArray[np.uint8] | None
    ) -> npt.NDArray[np.uint8]:
        if target is None:
            target = new_pixels((*size, stored.channels))
        upright = stored.upright_size
        shown, where = place(upright, size, self.decode_resize)
        if (where.height, where.width) != size:
            target[...] = self.decode_fill
        # The result as it lies before it is turned, a view: turning the small image is cheaper than the large one.
        inner = orient(where.of(target), INVERSE_ORIENTATION[stored.orientation])
        quick, scale = self.decode_mode == "fast", 1
        if quick and stored.codec == _JPEG:
            # The smallest part of its size that has the pixels of the result.
            fitting = (part for part in SCALES if min(shown.height // where.height, shown.width // where.width) >= part)
            scale = next(fitting, 1)
        direct = scaled(stored.size, scale) == inner.shape[:2]
        pixels = stored.pixels(scale=scale, allocate=_allocator_for(inner) if direct else partial(scratch, "decoded"))
        if pixels is not inner:
            if pixels.shape[:2] == stored.size:
                scale = 1  # the codec had none
            resample(pixels, _before_turning(shown, upright, stored.orientation), inner, scale=scale, quick=quick)
        return target


def _before_turning(box: Box, upright: tuple[int, int], orientation: int) -> Box:
    """Where a rectangle of the upright image of a size lies in the image as stored."""
    top, left, height, width = box
    if orientation in (3, 4, 7, 8):
        top = upright[0] - height - top
    if orientation in (2, 3, 6, 7):
        left = upright[1] - width - left
    return Box(top, left, height, width) if orientation < 5 else Box(left, top, width, height)


class _Stored(NamedTuple):
    """An image file with the facts of its record and its field; `orientation` is still to be applied."""

    data: memoryview
    codec: int
    size: tuple[int, int]
    channels: int
    orientation: int

    @property
    def upright_size(self) -> tuple[int, int]:
        """(height, width) once it is turned."""
        return self.size if self.orientation < 5 else (self.size[1], self.size[0])

    def pixels(self, *, scale: int = 1, allocate: Allocator) -> npt.NDArray[np.uint8]:
        """Pixels as stored, see `decode_pixels`."""
        return decode_pixels(self.data, self.codec, self.size, self.channels, scale=scale, allocate=allocate)


def _allocator_for(target: npt.NDArray[np.uint8] | None) -> Allocator:
    """`target` where it has the shape that is asked for and a codec can write into it, else new memory."""

    def allocate(shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
        if target is not None and target.shape == shape and target.flags.c_contiguous:
            return target
        return new_pixels(shape)

    return allocate
