"""Depth maps: one number per pixel, without loss: 16-bit PNGs and TIFFs stored unchanged, arrays compressed or raw.

NumPy reads raw and zstd payloads, Pillow reads files, by the one plugin that the metadata record names. Nothing is
scaled, resized or cast, except to metres on request.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import FormatError, MediaError, optional_import
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.base import Encoded, Field, corrupt, over_limit, stored_array, truncated
from mm_assets.fields.image import DEFAULT_MAX_PIXELS
from mm_assets.fields.image_decode import confirm
from mm_assets.fields.image_pillow import open_with_pillow
from mm_assets.fields.ndarray import array_of_npy, is_npy
from mm_assets.fields.shown import ShownMap, StoredBytes
from mm_assets.media.content_types import Buffer
from mm_assets.media.images import probe_image
from mm_assets.summaries import describe

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["DepthField"]

_CODECS = {"png": 1, "tiff": 2, "raw": 3, "zstd": 4}
_CODEC_NAMES = {number: name for name, number in _CODECS.items()}
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<f4")}
_DTYPE_NUMBERS = {dtype.name: number for number, dtype in _DTYPES.items()}
_ENCODINGS = ("keep", "png", "raw", "zstd")

_ZSTD_LEVEL = 3  # zstd's own default; a fixed one, since the bytes of a file depend on it
# (tag, default): bits per sample; photometric, of which 0 would turn near into far; compression
_TIFF_TAGS = ((258, 1), (262, None), (259, 1))


@dataclass(frozen=True, kw_only=True)
class DepthField(Field):
    """A depth map, or any other map of one number per pixel, such as disparity.

    Value: (H, W) uint16 or float32; the bytes of a 16-bit grey PNG, or of a TIFF of one page and one channel, uint16
    or float32; or the bytes of such an array as ``.npy``. Decodes to (H, W) in the dtype it had, bit for bit (NaN and
    infinities too), or to metres. 8-bit and colour images are refused: they are pictures of depth, not depth.

    Attributes:
        encoding: ``keep`` stores files as they are, uint16 arrays as PNG and float32 arrays as zstd. ``png`` (uint16
            only), ``raw`` and ``zstd`` store arrays so, and files decoded to store them so. All are lossless.
        dtype: ``uint16`` or ``float32`` that every map must have, None for either.
        size: (height, width) that every map must have; nothing is resized. None for any.
        metres_per_step: metres of a stored 1: 0.001 for millimetres. Needed for metres.
        decoded: ``stored`` gives what is stored, ``metres`` (H, W) float32: stored times `metres_per_step`. 0, which
            means no measurement, stays 0.
        invalid: a stored uint16 that also means no measurement (65535 with some cameras): 0 in metres.
        max_pixels: height times width that is encoded or decoded at most; more is refused by the header.
    """

    TYPE_ID: ClassVar[int] = 11
    TAKES_JSON: ClassVar[bool] = False
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype(
        [("height", "<u4"), ("width", "<u4"), ("codec", "u1"), ("dtype", "u1"), ("_pad", "u1", (6,))]
    )
    decodes_in_parallel: ClassVar[bool] = True  # the decoders release the interpreter lock
    keeps_bytes: ClassVar[bool] = False  # files are, with the encoding "keep", but .npy bytes become their array
    LIMITS: ClassVar[tuple[str, ...]] = ("max_pixels",)

    encoding: str = "keep"
    dtype: str | None = None
    size: tuple[int, int] | None = None
    metres_per_step: float | None = None
    decoded: str = "stored"
    invalid: int | None = None
    max_pixels: int = DEFAULT_MAX_PIXELS

    def __post_init__(self) -> None:
        self._expect_choice("encoding", _ENCODINGS)
        self._expect_choice("dtype", (*_DTYPE_NUMBERS, None))
        if self.encoding == "png" and self.dtype == "float32":
            raise self._wrong_setting("encoding", "zstd or raw: PNG has no float32")
        self._expect_int("max_pixels", 1, 2**40)
        self._expect_size("size", 2**31 - 1, max_pixels=self.max_pixels)
        self._expect_choice("decoded", ("stored", "metres"))
        step = self.metres_per_step
        if step is not None:
            is_number = isinstance(step, int | float) and not isinstance(step, bool)
            if not is_number or not 1e-12 <= step <= 1e12:
                raise self._wrong_setting("metres_per_step", "metres, a number from 1e-12 to 1e12, or None")
            object.__setattr__(self, "metres_per_step", float(step))
        elif self.decoded == "metres":
            raise self._wrong_setting("metres_per_step", "what a stored 1 is in metres, to decode to metres")
        self._expect_int("invalid", 0, 65_535, optional=True)
        if self.invalid is not None and self.dtype == "float32":
            raise self._wrong_setting("invalid", "None: with float32 NaN says so")

    @property
    def value_layout(self) -> ArraySpec | None:
        """(height, width), where `size` is set, and `dtype` or metres."""
        if self.size is None or (self.dtype is None and self.decoded == "stored"):
            return None
        return ArraySpec(self.size, np.dtype("float32" if self.decoded == "metres" else self.dtype))

    @property
    def empty_value(self) -> npt.NDArray[Any]:
        """(0, 0), or `size`, of `dtype` or in metres."""
        dtype = "float32" if self.decoded == "metres" else self.dtype
        return np.empty(self.size or (0, 0), dtype or np.float32)

    # --- encode -------------------------------------------------------------------------------------------------------

    def encode(self, value: npt.NDArray[Any] | Buffer) -> Encoded:
        """Encode a map, or a file's bytes."""
        if not isinstance(value, Buffer) or is_npy(value):
            return self._encode_map(self._check_map(value))
        data = bytes(value)
        codec, dtype, size = self._probe(data)
        if self.encoding in ("keep", codec):
            return Encoded(self._record(size, codec, dtype), data)
        try:
            values = _decode_file(data, codec, size, dtype)
        except ValueError as error:  # a FormatError is one: the bytes are the caller's here
            raise self._wrong_content(f"{codec} bytes that cannot be decoded ({error})", "a map") from error
        return self._encode_map(values)

    def check(self, value: npt.NDArray[Any] | Buffer) -> None:
        """Read the header of a file that is stored unchanged, and an array's extent; decode other files."""
        is_file = isinstance(value, Buffer) and not is_npy(value)
        if not is_file:
            self._codec_of(self._check_map(value))
        elif self.encoding == "keep":
            self._probe(bytes(value))
        else:
            self.encode(value)

    def _record(self, size: tuple[int, int], codec: str, dtype: np.dtype[Any]) -> bytes:
        return self._pack_record(*size, _CODECS[codec], _DTYPE_NUMBERS[dtype.name])

    def _probe(self, data: bytes) -> tuple[str, np.dtype[Any], tuple[int, int]]:
        """Codec, dtype and (height, width) of a file, by its header."""
        expected = "a 16-bit grey PNG, or a TIFF of one uint16 or float32 channel"
        try:
            info = probe_image(data)
        except MediaError as error:
            raise self._wrong_content(f"bytes that are not an image ({error.reason})", expected) from error
        size = (info.height, info.width)
        words = f"{info.codec} of {info.bit_depth} bits and {info.channels} channels"
        if info.codec not in ("png", "tiff") or info.bit_depth not in (16, 32) or info.channels != 1:
            raise self._wrong_content(f"{words} when decoded", expected)
        if info.num_frames != 1:
            raise self._wrong_content(f"{info.codec} of {info.num_frames} pages", "one page")
        self._check_extent(size)
        dtype = _DTYPES[1]
        if info.codec == "tiff":
            if info.orientation != 1:
                raise self._wrong_content(f"tiff of orientation {info.orientation}", "one that is stored upright")
            tiff_dtype = self._dtype_of_tiff(data)
            if tiff_dtype is None:
                found = f"{words}, of another kind of numbers, or compressed big-endian floats"
                raise self._wrong_content(found, expected)
            dtype = tiff_dtype
        self._check_dtype(dtype)
        return info.codec, dtype, size

    def _dtype_of_tiff(self, data: bytes) -> np.dtype[Any] | None:
        try:
            with open_with_pillow(data, "tiff") as image:
                return _tiff_dtype(image)
        except FormatError as error:
            raise self._wrong_content(f"tiff bytes that cannot be read ({error.detail})", "a TIFF") from error

    def _check_map(self, value: object) -> npt.NDArray[Any]:
        if isinstance(value, Buffer):
            value = self._within("", array_of_npy, value)
        if not isinstance(value, np.ndarray) or value.dtype.newbyteorder("<") not in _DTYPES.values():
            raise self._wrong_value(value, "a map of uint16 or float32, or a PNG's or TIFF's bytes (nothing is cast)")
        if value.ndim != 2 or 0 in value.shape:
            raise self._wrong_value(value, "shape (H, W) without a zero")
        self._check_extent(value.shape)
        self._check_dtype(value.dtype)
        return value

    def _check_extent(self, size: tuple[int, ...]) -> None:
        if size[0] * size[1] > self.max_pixels:
            raise self._too_large(f"{size[0]} x {size[1]} pixels", f"at most {self.max_pixels}", "max_pixels")
        if self.size is not None and size != self.size:
            raise self._wrong_content(f"{size[0]} x {size[1]} pixels", f"{self.size} (nothing is resized)")

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        if self.dtype is not None and dtype.name != self.dtype:
            raise self._wrong_content(f"a map of {dtype.name}", f"{self.dtype} (nothing is cast)")

    def _codec_of(self, values: npt.NDArray[Any]) -> str:
        if self.encoding == "keep":
            return "png" if values.dtype.kind == "u" else "zstd"
        if self.encoding == "png" and values.dtype.kind == "f":
            raise self._wrong_value(values, "uint16 for PNG; float32 is stored by keep, zstd or raw")
        return self.encoding

    def _encode_map(self, values: npt.NDArray[Any]) -> Encoded:
        codec, size = self._codec_of(values), (values.shape[0], values.shape[1])
        stored = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        if codec == "png":
            from PIL import Image

            target = io.BytesIO()
            try:
                Image.fromarray(stored).save(target, format="PNG")
            except (ValueError, OSError) as error:  # a side longer than the codec can hold
                raise self._wrong_content(f"{describe(values)} ({error})", "what PNG can hold") from error
            data = target.getvalue()
        elif codec == "zstd":
            with optional_import("zstandard", "DepthField with zstd"):
                import zstandard

            # One thread: more would make the bytes depend on their number.
            data = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, threads=0).compress(stored.tobytes())
        else:
            data = stored.tobytes()
        return Encoded(self._record(size, codec, values.dtype), data)

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[Any]:
        """Return (H, W); what is stored raw is a read-only view of the payload."""
        values = self._stored(metadata, data)
        if self.decoded == "metres":
            return self._metres(values, np.empty(values.shape, np.float32))
        is_raw = _CODEC_NAMES[self._unpack_record(metadata)[2]] == "raw"
        own: npt.NDArray[Any] = values if is_raw else self.writable(values)
        return own

    def shown(self, metadata: Buffer, stored: StoredBytes) -> ShownMap:
        """The map, in metres where it is known what a step is."""
        values = self._stored(metadata, stored.whole())
        if self.metres_per_step is None:
            return ShownMap(values=values)
        return ShownMap(values=self._metres(values, np.empty(values.shape, np.float32)), unit="m")

    def _decode_into(self, metadata: Buffer, data: Buffer, target: npt.NDArray[Any]) -> None:
        values = self._stored(metadata, data)
        if self.decoded == "metres":
            self._metres(values, target)
        else:
            target[...] = values

    def _metres(self, values: npt.NDArray[Any], target: npt.NDArray[Any]) -> npt.NDArray[Any]:
        np.multiply(values, np.float32(self.metres_per_step or 0.0), out=target, dtype=np.float32, casting="same_kind")
        if self.invalid is not None and values.dtype.kind == "u":
            target[values == self.invalid] = 0
        return target

    def _stored(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[Any]:
        height, width, codec, number = self._unpack_record(metadata)
        if codec not in _CODEC_NAMES:
            raise corrupt("map is of an unknown codec", found=codec, expected=f"one of {_CODEC_NAMES}")
        dtype = _DTYPES.get(number)
        if dtype is None:
            raise corrupt("map is of an unknown dtype", found=number, expected="1 (uint16) or 2 (float32)")
        if self.dtype not in (None, dtype.name):
            raise corrupt("map is not of the field's dtype", found=dtype.name, expected=self.dtype)
        if not height * width:
            raise corrupt("map is empty", found=f"{height} x {width}", expected="1 pixel or more")
        if height * width > self.max_pixels:
            if _CODEC_NAMES[codec] in ("png", "tiff"):
                confirm(data, _CODEC_NAMES[codec], (height, width))  # a record that lies is damage
            expected = f"at most {self.max_pixels} pixels"
            raise over_limit("map is too large", "max_pixels", found=f"{height} x {width}", expected=expected)
        if self.size is not None and (height, width) != self.size:
            raise corrupt("map is not of the field's size", found=(height, width), expected=self.size)
        view, name, num_bytes = as_bytes_view(data), _CODEC_NAMES[codec], height * width * dtype.itemsize
        if name in ("png", "tiff"):
            return _decode_file(view, name, (height, width), dtype)
        if name == "zstd":
            view = _decompress(view, num_bytes)
        if len(view) != num_bytes:
            raise truncated("map is not as long as its record says", found=len(view), expected=num_bytes)
        return stored_array(view, dtype, (height, width))


def _decompress(data: memoryview, num_bytes: int) -> memoryview:
    """Exactly `num_bytes` bytes: the frame's own header is read first, so that a bomb is never unpacked."""
    with optional_import("zstandard", "DepthField with zstd"):
        import zstandard

    try:
        claimed = zstandard.frame_content_size(data)
        if claimed != num_bytes:
            raise corrupt("map is not as long as its record says", found=claimed, expected=num_bytes)
        return memoryview(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise corrupt(f"map cannot be decompressed: {error}") from error


def _tiff_dtype(image: Image.Image) -> np.dtype[Any] | None:
    """The dtype of a TIFF that Pillow reads exactly, by its tags; None for any other."""
    from PIL import TiffImagePlugin

    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return None
    tags = image.tag_v2
    bits, photometric, compression = (_number_of(tags.get(tag, default)) for tag, default in _TIFF_TAGS)
    if photometric != 1:
        return None
    if image.mode == "F" and compression != 1 and tags.prefix == b"MM":
        return None  # libtiff has turned these bytes already, and Pillow turns them again
    kinds = {("I;16", 16): _DTYPES[1], ("I;16B", 16): _DTYPES[1], ("F", 32): _DTYPES[2]}
    return kinds.get((image.mode, bits))


def _number_of(value: object) -> int:
    """A tag's one number, or the first of several; -1 where it has none."""
    first = value[0] if isinstance(value, tuple) and value else value
    return first if isinstance(first, int) else -1


def _decode_file(data: Buffer, codec: str, size: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """(height, width) of `dtype`; `CorruptError` if the bytes are damaged or of another size or dtype."""
    modes = ("I;16", "I;16B", "I") if dtype.kind == "u" else ("F",)  # some releases of Pillow open a PNG as "I"
    with open_with_pillow(data, codec) as image:
        if (image.height, image.width) != size:
            found = (image.height, image.width)
            raise corrupt(f"{codec} is not of the size in its record", found=found, expected=size)
        if image.mode not in modes or (codec == "tiff" and _tiff_dtype(image) != dtype):
            raise corrupt(f"{codec} is not of the dtype in its record", found=image.mode, expected=dtype.name)
        image.load()
        values = np.asarray(image)
    if values.shape != size:  # a TIFF that turns itself while it is loaded
        raise corrupt(f"{codec} is not of the size in its record", found=values.shape, expected=size)
    if values.dtype.kind == "i" and (int(values.min()) < 0 or int(values.max()) > 65_535):
        raise corrupt(f"{codec} is not of the dtype in its record", found=values.dtype.name, expected=dtype.name)
    return np.ascontiguousarray(values, dtype=dtype)
