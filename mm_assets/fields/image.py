"""Images: encoded bytes stored unchanged, or pixels encoded here. Decoding gives 8-bit pixels.

Only the codec that the metadata record names decodes an image: bytes never choose their own decoder. The size that an
image is resized to while it is decoded is a setting of the reader, and does not change what is stored.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from mm_assets.errors import MediaError
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.base import JSON, Encoded, Field, Out, config_error, corrupt, is_int, over_limit
from mm_assets.fields.image_crop import RandomCrop
from mm_assets.fields.image_decode import (
    CODEC_NAMES,
    CODECS,
    INVERSE_ORIENTATION,
    MODES,
    SCALES,
    UPRIGHT,
    Allocator,
    check_pixels,
    confirm,
    decode_frames,
    decode_pixels,
    new_pixels,
    orient,
    pixels_of,
    scaled,
    with_channels,
)
from mm_assets.fields.image_resize import RESIZES, Box, place, resample, resize, scratch
from mm_assets.fields.shown import ShownFile, StoredBytes
from mm_assets.media.content_types import Buffer
from mm_assets.media.images import ImageInfo, probe_image
from mm_assets.summaries import describe

__all__ = ["ImageField", "decode_drawn"]

_JPEG = CODECS["jpeg"]
_ENCODINGS = ("keep", "jpeg", "png", "webp")
_SUBSAMPLINGS = ("444", "420")
_DECODE_MODES = ("exact", "fast")
_PIL_MODES = {  # channels of what Pillow calls a mode; the others have no 8-bit form
    **dict.fromkeys(("1", "L"), 1),
    **dict.fromkeys(("P", "RGB", "CMYK", "YCbCr", "RGBX", "LAB"), 3),
    **dict.fromkeys(("LA", "PA", "RGBA"), 4),
}

_HAS_8BIT_FORM = "an image with an 8-bit form (DepthField takes TIFFs of one float32 channel, NDArrayField arrays)"

DEFAULT_MAX_PIXELS = 178_956_970  # where Pillow itself refuses: 512 MiB of RGB


@dataclass(frozen=True, kw_only=True)
class ImageField(Field):
    """An image.

    Value: (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) uint8, as an array or a tensor on the CPU; a Pillow image; or a
    JPEG, PNG, WebP, TIFF, GIF, BMP, AVIF, HEIC, JPEG XL, JPEG 2000, PNM, ICO or TGA file, as its bytes or its `Path`.
    HEIC and JPEG XL need the extra ``images-extra``. Decodes to (H, W, C) uint8. Of an animation or a multi-page TIFF
    the first frame is decoded, of an ICO its largest image. 16-bit samples decode to their high byte, 1-bit ones to 0
    and 255, palettes to their colours, CMYK to RGB. Images that have no 8-bit form, such as floating-point TIFFs, are
    refused: they are arrays.

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
        orientation: ``apply`` turns pixels upright by the EXIF orientation: while encoding, where pixels are encoded
            again, otherwise while decoding. ``keep`` leaves them as they are stored.
        icc: ``convert`` converts colours by the file's ICC profile to sRGB, at the same places; a damaged profile is
            logged and not used. ``keep`` gives the stored numbers.
        frames: ``first``, or ``all``: decodes to (T, H, W, C), every frame of an animation or page of a TIFF, which
            must have one size. Needs the encoding ``keep``.
        max_pixels: height times width, and times the frames that are decoded, at most; more is refused by the header.
        decode_size: (height, width) of the decoded array, whatever is stored; None for what is stored.
        decode_resize: how an image of another shape comes to `decode_size`. ``stretch`` does not keep its aspect
            ratio. ``crop`` takes the largest centred rectangle of the size's aspect ratio, to a whole pixel, and fills
            the size with it. ``pad`` makes the whole image fit, centred, between bars of `decode_fill`.
        decode_fill: value of the bars' channels, 0 to 255.
        decode_mode: ``exact`` decodes all of an image and then shrinks by pixel area, or enlarges bilinearly. ``fast``
            decodes a JPEG at 1/2, 1/4 or 1/8 of its size where that is not below `decode_size`, and shrinks any image
            by bilinear samples. Its pixels differ; docs/spec/fields.md says how much.
        decode_crop: a random crop in place of `decode_resize`, as a mapping with some of the attributes of
            `RandomCrop`: ``{"scale": (0.35, 1), "ratio": (0.75, 1.33), "flip": True}``. Loaders draw it from seed,
            epoch and sample; everything else decodes the largest centered rectangle, as ``crop`` does.
    """

    TYPE_ID: ClassVar[int] = 10
    CONTENT_KIND: ClassVar[str] = "image"
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
    FORMER: ClassVar[tuple[str, ...]] = ("apply_orientation",)
    ADDED: ClassVar[tuple[str, ...]] = ("decode_crop",)

    encoding: str = "keep"
    quality: int = 95
    subsampling: str = "444"
    size: tuple[int, int] | None = None
    channels: int | None = None
    orientation: str = "apply"
    icc: str = "convert"
    frames: str = "first"
    max_pixels: int = DEFAULT_MAX_PIXELS
    decode_size: tuple[int, int] | None = None
    decode_resize: str = "stretch"
    decode_fill: int = 0
    decode_mode: str = "exact"
    decode_crop: RandomCrop | None = None

    def __post_init__(self) -> None:
        self._expect_choice("encoding", _ENCODINGS)
        self._expect_int("quality", 1, 100)
        if self.subsampling not in _SUBSAMPLINGS:
            raise self._wrong_setting("subsampling", "the text '444' or '420', in YAML with its quotes")
        self._expect_int("max_pixels", 1, 2**40)
        if self.channels is not None and (not is_int(self.channels, 1, 4) or self.channels == 2):
            raise self._wrong_setting("channels", "1, 3, 4 or None")
        self._expect_choice("orientation", ("apply", "keep"))
        self._expect_choice("icc", ("convert", "keep"))
        self._expect_choice("frames", ("first", "all"))
        if self.frames == "all" and self.encoding != "keep":
            raise self._wrong_setting("frames", "first: what is encoded again is the first frame")
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
        if self.decode_crop is not None:
            object.__setattr__(self, "decode_crop", RandomCrop.parse(self.decode_crop))
            if self.decode_size is None or self.decode_resize != "stretch" or self.frames == "all":
                raise self._wrong_setting("decode_crop", "None: it needs a decode_size, and no decode_resize or frames")

    @classmethod
    def from_config(cls, config: Mapping[str, JSON]) -> Self:
        """Restore a field from its configuration.

        Earlier releases had `apply_orientation`, false by default, and did not convert colours: a configuration that
        names it means what it meant to them.
        """
        if "apply_orientation" in config:
            if not isinstance(config["apply_orientation"], bool) or "orientation" in config:
                expected = "true or false, or rather the setting orientation: apply or keep"
                raise config_error("apply_orientation", config["apply_orientation"], expected)
            values = {"icc": "keep", **config}
            values["orientation"] = "apply" if values.pop("apply_orientation") else "keep"
            config = values
        return super().from_config(config)

    @property
    def keeps_bytes(self) -> bool:
        """With the encoding ``keep``."""
        return self.encoding == "keep"

    @property
    def value_layout(self) -> ArraySpec | None:
        """(height, width, channels) uint8, where `decode_size` or `size`, and `channels`, are set."""
        size = self.decode_size or self.size
        if size is None or self.channels is None or self.frames == "all":
            return None
        return ArraySpec((*size, self.channels), np.dtype(np.uint8))

    @property
    def draws(self) -> bool:
        """With a `decode_crop`."""
        return self.decode_crop is not None

    @property
    def empty_value(self) -> npt.NDArray[np.uint8]:
        """(0, 0, 0) uint8, with the extents that are set; (0, 0, 0, 0) with all frames."""
        frames = (0,) if self.frames == "all" else ()
        return np.empty((*frames, *(self.decode_size or self.size or (0, 0)), self.channels or 0), np.uint8)

    def shown(self, metadata: Buffer, stored: StoredBytes) -> ShownFile:
        """The image file, which is stored whatever the encoding."""
        return ShownFile(offset=0, size=stored.size)

    # --- encode -------------------------------------------------------------------------------------------------------

    def encode(self, value: npt.NDArray[np.uint8] | Buffer | Path | Any) -> Encoded:
        """Encode pixels, or an image file."""
        value = self._file_or_pixels(value)
        orientation = UPRIGHT
        if isinstance(value, Buffer):
            data, info = bytes(value), self._probe(value)
            if self.encoding == "keep":
                facts = (CODECS[info.codec], info.bit_depth, info.orientation, min(info.num_frames, 2**32 - 1))
                return Encoded(self._pack_record(info.height, info.width, info.channels, *facts), data)
            try:
                channels = self.channels or info.channels
                size, to_srgb = (info.height, info.width), self.icc == "convert"
                pixels = decode_pixels(data, CODECS[info.codec], size, channels, to_srgb=to_srgb)
            except ValueError as error:  # a FormatError is one: the bytes are the caller's here
                raise self._wrong_content(f"{info.codec} bytes that cannot be decoded ({error})", "an image") from error
            orientation = info.orientation
        else:
            pixels = self._check_pixels(value)
        if self.orientation == "apply" and orientation != UPRIGHT:
            pixels, orientation = np.ascontiguousarray(orient(pixels, orientation)), UPRIGHT
        if self.size is not None and pixels.shape[:2] != self.size:
            pixels = resize(pixels, self.size)
        codec = "png" if self.encoding == "keep" else self.encoding
        data = self._encode_pixels(pixels, codec)
        height, width, channels = pixels.shape
        return Encoded(self._pack_record(height, width, channels, CODECS[codec], 8, orientation, 1), data)

    def check(self, value: npt.NDArray[np.uint8] | Buffer | Path | Any) -> None:
        """Read the header of bytes that are stored unchanged; encode other values."""
        value = self._file_or_pixels(value)
        if self.encoding == "keep" and isinstance(value, Buffer):
            self._probe(value)
        elif self.encoding in ("keep", "png") and not isinstance(value, Buffer):
            self._check_pixels(value)  # PNG takes any pixels
        else:
            self.encode(value)

    def _file_or_pixels(self, value: Any) -> Any:
        """The bytes of a path; the array of a tensor or of a Pillow image; any other value unchanged."""
        if isinstance(value, np.ndarray | Buffer | str | list):
            return value
        if isinstance(value, Path):
            try:
                return value.read_bytes()
            except OSError as error:
                raise self._wrong_content(
                    f"the path {value}, which cannot be read ({error})", "an image file"
                ) from error
        if hasattr(value, "getexif"):  # a Pillow image, of its own classes or of a plug-in
            return self._pixels_of_pillow(value)
        if hasattr(value, "__array__"):
            try:
                return np.asarray(value)
            except (TypeError, ValueError, RuntimeError) as error:  # a tensor of another device, or with gradients
                raise self._wrong_content(f"{describe(value)} ({error})", "an array on the CPU") from error
        return value

    def _pixels_of_pillow(self, image: Any) -> npt.NDArray[np.uint8]:
        """What the image shows, as the bytes of its file would decode."""
        channels = _PIL_MODES.get(getattr(image, "mode", ""))
        if channels is None:
            raise self._wrong_content(f"a Pillow image of mode {getattr(image, 'mode', None)}", "one of 8-bit channels")
        if image.width * image.height > self.max_pixels:
            found = f"a Pillow image of {image.height} x {image.width} pixels"
            raise self._too_large(found, f"at most {self.max_pixels}", "max_pixels")
        orientation = image.getexif().get(0x0112, UPRIGHT) if self.orientation == "apply" else UPRIGHT
        channels = 4 if "transparency" in image.info else channels
        try:
            image.load()
            if getattr(image, "format", None) == "TIFF":
                orientation = UPRIGHT  # Pillow has turned it
            pixels = pixels_of(image, channels, to_srgb=self.icc == "convert")
        except (OSError, ValueError, SyntaxError) as error:
            raise self._wrong_content(f"a Pillow image that cannot be loaded ({error})", "an image") from error
        return np.ascontiguousarray(orient(pixels, orientation)) if 1 < orientation <= 8 else pixels

    def _probe(self, data: Buffer) -> ImageInfo:
        try:
            info = probe_image(data)
        except MediaError as error:
            raise self._wrong_content(f"bytes that are not an image ({error.reason})", "an image file") from error
        if self.frames == "all" and info.has_unread_frames:
            expected = "a GIF, APNG, WebP or AVIF, or the setting frames: first"
            raise self._wrong_content(
                f"an animated {info.codec}, of which only the first frame can be decoded", expected
            )
        num_frames = info.num_frames if self.frames == "all" else 1
        if num_frames * info.width * info.height > self.max_pixels:
            found = f"{info.codec} of {info.height} x {info.width} pixels"
            found += f" in {num_frames} frames" if num_frames > 1 else ""
            raise self._too_large(found, f"at most {self.max_pixels} pixels", "max_pixels")
        if not info.has_8bit_form:
            raise self._wrong_content(f"{info.codec} of {info.bit_depth} bits", _HAS_8BIT_FORM)
        return info

    def _check_pixels(self, value: object) -> npt.NDArray[np.uint8]:
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
            raise self._wrong_value(value, "pixels of uint8 or an image file's bytes")
        pixels = value[:, :, np.newaxis] if value.ndim == 2 else value
        if pixels.ndim != 3 or pixels.shape[2] not in MODES or 0 in pixels.shape:
            raise self._wrong_value(value, "shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) without a zero")
        if pixels.shape[0] * pixels.shape[1] > self.max_pixels:
            raise self._too_large(describe(value), f"at most {self.max_pixels} pixels", "max_pixels")
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
        """Return (H, W, C) uint8; (T, H, W, C) with all frames."""
        if self.frames == "all":
            return self._decode_frames(metadata, data)
        return self.decode_one(metadata, data, None)

    def decode_one(self, metadata: Buffer | np.void, data: Buffer, key: int | None) -> npt.NDArray[np.uint8]:
        """Returns (H, W, C) uint8, with a crop that is drawn from a key if it is given."""
        # Pillow's pixels are read-only. In a batch they are copied anyway.
        pixels: npt.NDArray[np.uint8] = self.writable(self._decode(metadata, data, None, key))
        return pixels

    def check_decodable(self, metadata: Buffer | np.void, data: Buffer) -> None:
        """Read all of a JPEG's data at an eighth of its size, where every bit is read too; load other files."""
        stored, num_frames = self._open(metadata, data)
        check_pixels(stored.data, stored.codec, stored.size, stored.channels, num_frames, to_srgb=stored.to_srgb)

    def decode_batch(
        self,
        records: npt.NDArray[np.uint8],
        datas: Sequence[Buffer | None],
        out: Out | None = None,
        *,
        keys: npt.NDArray[np.uint64] | None = None,
    ) -> tuple[Any, npt.NDArray[np.bool_]]:
        """As `Field.decode_batch`; random crops are drawn from `keys`, (n,) uint64."""
        if keys is None:
            return super().decode_batch(records, datas, out)
        return decode_drawn(self, records, datas, out, keys, self.decode_one, self.decode_into)

    def _decode_into(self, metadata: Buffer, data: Buffer, target: npt.NDArray[Any]) -> None:
        self.decode_into(metadata, data, target, None)

    def decode_into(self, metadata: Buffer, data: Buffer, target: npt.NDArray[Any], key: int | None) -> None:
        """Decodes into an array of the value's shape, with a crop that is drawn from a key if it is given."""
        pixels = self._decode(metadata, data, target, key)
        if pixels is not target:
            target[...] = pixels

    def _open(self, metadata: Buffer | np.void, data: Buffer) -> tuple[_Stored, int]:
        """An image's file with the facts of its record, checked, and the number of frames that are decoded."""
        height, width, channels, codec, _, orientation, num_frames = self._unpack_record(metadata)
        if codec not in CODEC_NAMES:
            raise corrupt("image is of an unknown codec", found=codec, expected=f"one of {CODEC_NAMES}")
        if channels not in MODES:
            raise corrupt("image has an impossible number of channels", found=channels, expected="1, 3 or 4")
        if not 1 <= orientation <= 8:
            raise corrupt("image has an unknown orientation", found=orientation, expected="1 to 8")
        num_frames = num_frames if self.frames == "all" else 1
        if not 1 <= num_frames * height * width <= self.max_pixels:
            found = (f"{num_frames} frames of " if self.frames == "all" else "") + f"{height} x {width}"
            if not num_frames * height * width:
                raise corrupt("image is empty", found=found, expected="1 pixel or more")
            confirm(data, CODEC_NAMES[codec], (height, width))  # a record that lies is damage
            expected = f"at most {self.max_pixels} pixels"
            raise over_limit("image is too large", "max_pixels", found=found, expected=expected)
        if self.size is not None and (height, width) != self.size:
            raise corrupt("image is not of the field's size", found=(height, width), expected=self.size)
        if self.orientation == "keep":
            orientation = UPRIGHT
        elif self.size is not None and orientation != UPRIGHT:
            raise corrupt("image stored at a size is not upright", found=orientation, expected=UPRIGHT)
        wanted, to_srgb = self.channels or channels, self.icc == "convert"
        return _Stored(as_bytes_view(data), codec, (height, width), wanted, orientation, to_srgb), num_frames

    def _decode(
        self, metadata: Buffer | np.void, data: Buffer, target: npt.NDArray[np.uint8] | None, key: int | None = None
    ) -> npt.NDArray[np.uint8]:
        """The decoded image: `target`, or another array where that is None or no codec can write there."""
        stored, _ = self._open(metadata, data)
        if self.decode_size is not None:
            return self._decode_to_size(stored, self.decode_size, target, key)
        pixels = stored.pixels(allocate=_allocator_for(target))
        upright = stored.orientation == UPRIGHT
        return pixels if upright else np.ascontiguousarray(orient(pixels, stored.orientation))

    def _decode_frames(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[np.uint8]:
        stored, num_frames = self._open(metadata, data)
        frames = decode_frames(
            stored.data, stored.codec, stored.size, stored.channels, num_frames, to_srgb=stored.to_srgb
        )
        upright = [np.ascontiguousarray(orient(pixels, stored.orientation)) for pixels in frames]
        if self.decode_size is not None:
            how, fill = self.decode_resize, self.decode_fill
            upright = [resize(pixels, self.decode_size, policy=how, fill=fill) for pixels in upright]
        return np.stack(upright)

    def _decode_to_size(
        self, stored: _Stored, size: tuple[int, int], target: npt.NDArray[np.uint8] | None, key: int | None
    ) -> npt.NDArray[np.uint8]:
        if target is None:
            target = new_pixels((*size, stored.channels))
        upright = stored.upright_size
        shown, where = place(upright, size, self.decode_resize if self.decode_crop is None else "crop")
        is_mirrored = False
        if self.decode_crop is not None and key is not None:
            shown, is_mirrored = self.decode_crop.draw(upright, key)
        if (where.height, where.width) != size:
            target[...] = self.decode_fill
        # The result as it lies before it is turned, a view: turning the small image is cheaper than the large one.
        inner = where.of(target)
        inner = orient(inner[:, ::-1] if is_mirrored else inner, INVERSE_ORIENTATION[stored.orientation])
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


def decode_drawn(
    field: Field,
    records: npt.NDArray[np.uint8],
    datas: Sequence[Buffer | None],
    out: Out | None,
    keys: npt.NDArray[np.uint64],
    decode: Callable[[memoryview, Buffer, int], Any],
    decode_into: Callable[[memoryview, Buffer, Any, int], None],
) -> tuple[Any, npt.NDArray[np.bool_]]:
    """Decodes a batch as `Field.decode_batch`, by functions that take the key of each row."""
    present, target = field._check_batch(records, datas), field._batch_target(len(datas), out)
    several = target if isinstance(target, dict) else {} if target is None else {"": target}
    for array in several.values():
        array[~present] = 0
    values: list[Any] = [None] * len(datas)
    for row, (data, key) in enumerate(zip(datas, keys.tolist(), strict=True)):
        if data is None:
            continue
        record = memoryview(records[row])
        if target is None:
            values[row] = field.writable(decode(record, data, key))
        else:
            rows = {name: array[row, ...] for name, array in several.items()}
            decode_into(record, data, rows if isinstance(target, dict) else rows[""], key)
    return (values if target is None else target), present


class _Stored(NamedTuple):
    """An image file with the facts of its record and its field; `orientation` is still to be applied."""

    data: memoryview
    codec: int
    size: tuple[int, int]
    channels: int
    orientation: int
    to_srgb: bool

    @property
    def upright_size(self) -> tuple[int, int]:
        """(height, width) once it is turned."""
        return self.size if self.orientation < 5 else (self.size[1], self.size[0])

    def pixels(self, *, scale: int = 1, allocate: Allocator) -> npt.NDArray[np.uint8]:
        """Pixels as stored, see `decode_pixels`."""
        return decode_pixels(
            self.data, self.codec, self.size, self.channels, scale=scale, allocate=allocate, to_srgb=self.to_srgb
        )


def _allocator_for(target: npt.NDArray[np.uint8] | None) -> Allocator:
    """`target` where it has the shape that is asked for and a codec can write into it, else new memory."""

    def allocate(shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
        if target is not None and target.shape == shape and target.flags.c_contiguous:
            return target
        return new_pixels(shape)

    return allocate
