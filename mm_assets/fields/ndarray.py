"""Arrays: dtype and shape per sample in the metadata record, elements as in memory."""

from __future__ import annotations

import io
import math
import re
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeGuard

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.fields.base import (
    JSON,
    Encoded,
    Field,
    are_equal,
    config_error,
    corrupt,
    is_int,
    join_arrays,
    split_rows,
    stored_array,
    truncated,
)
from mm_assets.media.content_types import Buffer
from mm_assets.summaries import describe

__all__ = ["REAL_CODES", "NDArrayField", "array_of_npy", "dtype_name", "is_npy"]

MAX_DIMENSIONS = 8  # as many as the record holds
_FIRST_EXTENT = slice(8, 12)  # bytes of the record

# What a record may name; extended precision differs between machines and is not among them.
REAL_CODES = ("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
_DTYPES = {code.encode("ascii"): np.dtype(code) for code in (*REAL_CODES, "<c8", "<c16")}
_KINDS = "bool, integer, float (16 to 64 bits) or complex"
_FLOAT8 = {  # bits of the exponent, its bias, and what the largest and the negative zero are
    "float8_e4m3fn": (4, 7, "nan at the ends"),
    "float8_e4m3fnuz": (4, 8, "nan at -0"),
    "float8_e5m2": (5, 15, "inf and nan"),
    "float8_e5m2fnuz": (5, 16, "nan at -0"),
}
SMALL_FLOATS: Mapping[str, tuple[int, np.dtype[Any]]] = {
    "bfloat16": (2, np.dtype("<f4")),
    **dict.fromkeys(_FLOAT8, (1, np.dtype("<f2"))),
}
"""Floats that NumPy lacks, by ml_dtypes' names: bytes of an element, and the dtype that holds each value exactly."""
_FLOAT8_DESCR = re.compile(rb"('descr': *)'[<>|=]f1'")
_MAX_NPY_HEADER = 10_000  # characters; a plain array's has under 200


@dataclass(frozen=True)
class NDArrayField(Field):
    """An array of numbers.

    Value: ndarray of bool, integer, float or complex kind and up to 8 dimensions, or the bytes of an ``.npy`` file.
    Decodes to a read-only view of the payload, little-endian and in C order: copy it before writing to it or closing
    the file. Nothing is cast: an array of another dtype than the field's is refused.

    NumPy lacks bfloat16 and the floats of 8 bits, and `np.save` writes them as opaque elements (``|V2``, ``|V1``,
    ``<f1``) that do not tell what they are. With a `dtype` of ``bfloat16`` such elements become float32, with
    ``float8_e4m3fn``, ``float8_e4m3fnuz``, ``float8_e5m2`` or ``float8_e5m2fnuz`` float16, each without any loss;
    arrays that have that dtype already are taken too.

    Attributes:
        dtype: NumPy name that every value must have, or one of those five; None for any of NumPy's.
        shape: extents that every value must have, None for a free one; None for any shape.
    """

    TYPE_ID: ClassVar[int] = 4
    CONTENT_KIND: ClassVar[str] = "array"
    metadata_type: ClassVar[np.dtype[np.void]] = np.dtype(
        [("dtype", "S6"), ("num_dimensions", "u1"), ("_pad", "u1"), ("shape", "<u4", (MAX_DIMENSIONS,))]
    )

    dtype: str | None = None
    shape: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in SMALL_FLOATS:
            expected = f"a NumPy dtype of kind {_KINDS}, or {', '.join(SMALL_FLOATS)}"
            object.__setattr__(self, "dtype", dtype_name(self.dtype, _DTYPES, expected))
        if self.shape is not None:
            if not isinstance(self.shape, tuple | list) or len(self.shape) > MAX_DIMENSIONS:
                raise self._wrong_setting("shape", f"up to {MAX_DIMENSIONS} extents")
            for extent in self.shape:
                if extent is not None and not is_int(extent, 0, 2**63):
                    raise self._wrong_setting("shape", "extents that are integers from 0, or None")
            object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def _value_dtype(self) -> np.dtype[Any] | None:
        """The dtype that every value has; None if it is free."""
        if self.dtype is None:
            return None
        return SMALL_FLOATS[self.dtype][1] if self.dtype in SMALL_FLOATS else np.dtype(self.dtype)

    @property
    def value_layout(self) -> ArraySpec | None:
        """The field's dtype and shape where both are fixed."""
        dtype = self._value_dtype
        if dtype is None or self.shape is None:
            return None
        shape = tuple(extent for extent in self.shape if extent is not None)
        return ArraySpec(shape, dtype) if len(shape) == len(self.shape) else None

    @property
    def vector_size(self) -> int | None:
        """Also 0 if the dtype or the size is open."""
        return 0 if self.value_layout is None and len(self.shape or (0,)) == 1 else super().vector_size

    def _mismatch(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str | None:
        """What this field expects, if the array is not of it."""
        if self._value_dtype not in (None, dtype.newbyteorder("<")):
            return f"dtype {self.dtype}"
        fits = self.shape is None or (
            len(shape) == len(self.shape)
            and all(want is None or want == have for want, have in zip(self.shape, shape, strict=True))
        )
        return None if fits else f"shape {self.shape}"

    @property
    def empty_value(self) -> npt.NDArray[Any]:
        """Of the field's shape, with 0 for free extents, or (0,) where it has none."""
        shape = (None,) if self.shape is None else self.shape
        return np.empty([extent or 0 for extent in shape], self._value_dtype or np.float32)

    @property
    def _element(self) -> ArraySpec | None:
        """Shape and dtype of what an array of free length counts; None where more than the length is free."""
        dtype = self._value_dtype
        if dtype is None or not self.shape or self.shape[0] is not None:
            return None
        shape = tuple(extent for extent in self.shape[1:] if extent is not None)
        return ArraySpec(shape, dtype) if len(shape) == len(self.shape) - 1 else None

    def from_json_value(self, value: JSON) -> Any:
        """Numbers, or lists of them, as an array of `dtype`, or of their own; none is truncated, wrapped or guessed."""
        if not isinstance(value, list | int | float):
            return value
        try:
            given = np.asarray(value)
        except (ValueError, OverflowError) as error:
            raise EncodeError(f"found a list that is not an array ({error}), expected one of numbers") from error
        if given.dtype.kind not in "biuf" or (given.dtype.kind != "b" and _has_bool(value)):
            raise EncodeError(f"found a list of {given.dtype}, expected one of numbers, or of true and false")
        if self.dtype is None:
            return given
        with np.errstate(over="ignore", invalid="ignore"):
            array = given.astype(self._value_dtype)
        is_float = array.dtype.kind in "fc"
        wrong = np.isinf(array) & ~np.isinf(given) if is_float else array.astype(np.float64) != given.astype(np.float64)
        if (given.dtype.kind == "b") != (array.dtype.kind == "b") or wrong.any():
            raise EncodeError(f"found numbers of {given.dtype} that do not fit {self.dtype}, expected such that do")
        return array

    def encode(self, value: npt.NDArray[Any] | Buffer) -> Encoded:
        """Encode an array, or ``.npy`` bytes."""
        if isinstance(value, Buffer):
            value = self._within("", array_of_npy, value)
        if not isinstance(value, np.ndarray):
            raise self._wrong_value(value, "an ndarray or .npy bytes")
        value = self._widened(value)
        code = value.dtype.newbyteorder("<").str.encode("ascii")
        if code not in _DTYPES or value.dtype.names is not None:
            names = [name for name, (size, _) in SMALL_FLOATS.items() if _is_opaque(value.dtype, size)]
            hint = f"; if its elements are {' or '.join(names)}, declare that as the field's dtype" if names else ""
            raise self._wrong_value(value, f"an array of kind {_KINDS}{hint}")
        if value.ndim > MAX_DIMENSIONS or any(extent > 2**32 - 1 for extent in value.shape):
            raise self._wrong_value(value, f"up to {MAX_DIMENSIONS} dimensions of up to 2**32 - 1")
        expected = self._mismatch(value.dtype, value.shape)
        if expected is not None:
            raise self._wrong_value(value, expected)
        data = np.ascontiguousarray(value, dtype=_DTYPES[code]).tobytes()
        shape = value.shape + (0,) * (MAX_DIMENSIONS - value.ndim)
        return Encoded(self._pack_record(code, value.ndim, *shape), data)

    def _widened(self, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Opaque elements as the numbers that the field's dtype says they are; any other array as it is."""
        if self.dtype is None or self.dtype not in SMALL_FLOATS:
            return value
        size, wide = SMALL_FLOATS[self.dtype]
        if value.dtype.name != self.dtype and not _is_opaque(value.dtype, size):
            return value
        bits = np.frombuffer(value.tobytes(), f"<u{size}").reshape(value.shape)
        return (bits.astype("<u4") << 16).view(wide) if size == 2 else _float8_values(self.dtype)[bits]

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> npt.NDArray[Any]:
        """Return a read-only view of the payload."""
        dtype, shape = self._dtype_and_shape(metadata)
        view = as_bytes_view(data)
        size = math.prod(shape) * dtype.itemsize
        if len(view) != size:
            raise truncated("array is not as long as its record says", found=len(view), expected=size)
        try:
            return stored_array(view, dtype, shape)
        except ValueError as error:  # an empty array whose other extents pass NumPy's own limits
            raise corrupt("array has an impossible shape", found=shape, expected="one that NumPy can hold") from error

    def _decode_together(self, records: npt.NDArray[np.uint8], datas: Sequence[Buffer]) -> Any:
        """Arrays that may differ in their first extent alone."""
        is_array = self.value_layout is not None
        if not are_equal(records, but=None if is_array else _FIRST_EXTENT):
            return None
        dtype, shape = self._dtype_and_shape(memoryview(records[0]))
        item_size = math.prod(shape[1:]) * dtype.itemsize
        if is_array:
            joined = join_arrays(datas, dtype, [math.prod(shape) * dtype.itemsize] * len(datas))
            return None if joined is None else joined.reshape(len(datas), *shape)
        if not shape or not item_size or (self.shape is not None and self.shape[0] is not None):
            return None
        counts = np.ascontiguousarray(records[:, _FIRST_EXTENT]).view("<u4")[:, 0].tolist()
        joined = join_arrays(datas, dtype, [count * item_size for count in counts])
        return None if joined is None else split_rows(joined.reshape(-1, *shape[1:]), counts)

    def _dtype_and_shape(self, metadata: Buffer | np.void) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Of a payload, as its record says."""
        code, num_dimensions, *extents = self._unpack_record(metadata)
        dtype = _DTYPES.get(code.rstrip(b"\0"))
        if dtype is None:
            raise corrupt("array is of an unknown dtype", found=code, expected=f"kind {_KINDS}")
        if num_dimensions > MAX_DIMENSIONS:
            raise corrupt("array has too many dimensions", found=num_dimensions, expected=MAX_DIMENSIONS)
        shape = tuple(extents[:num_dimensions])
        if any(extents[num_dimensions:]):
            raise corrupt("array has extents past its dimensions", found=extents, expected=num_dimensions)
        expected = self._mismatch(dtype, shape)
        if expected is not None:
            raise corrupt("array is not of the field's type", found=f"{dtype} {shape}", expected=expected)
        return dtype, shape


def _is_opaque(dtype: np.dtype[Any], size: int) -> bool:
    """Whether a dtype is of opaque elements of so many bytes, without parts."""
    return dtype.kind == "V" and dtype.itemsize == size and dtype.names is None and dtype.subdtype is None


@cache
def _float8_values(name: str) -> npt.NDArray[np.float16]:
    """The number of each of the 256 patterns of a float of 8 bits: (256,) float16, exact (OCP OFP8 1.0; ml_dtypes)."""
    num_bits, bias, special = _FLOAT8[name]
    num_fraction = 7 - num_bits
    patterns = np.arange(256)
    exponent, fraction = (patterns & 127) >> num_fraction, patterns & ((1 << num_fraction) - 1)
    scaled = np.where(exponent > 0, fraction + (1 << num_fraction), fraction)  # a subnormal has no hidden bit
    values: npt.NDArray[np.float64] = np.ldexp(scaled.astype(np.float64), np.maximum(exponent, 1) - bias - num_fraction)
    values = np.where(patterns > 127, -values, values)
    if special == "inf and nan":
        values[exponent == 2**num_bits - 1] = np.nan
        values[[0x7C, 0xFC]] = np.inf, -np.inf
    else:
        values[[0x7F, 0xFF] if special == "nan at the ends" else [0x80]] = np.nan
    return values.astype(np.float16)


def _has_bool(value: JSON) -> bool:
    return isinstance(value, bool) or (isinstance(value, list) and any(map(_has_bool, value)))


def is_npy(value: object) -> TypeGuard[Buffer]:
    """Whether a value is bytes that begin as those of an ``.npy`` file."""
    return isinstance(value, Buffer) and bytes(as_bytes_view(value)[:6]) == b"\x93NUMPY"


def array_of_npy(content: Buffer) -> npt.NDArray[Any]:
    """The array of an ``.npy`` file: a view of its bytes, in its own byte order; of any dtype without objects or parts.

    Elements of ``f1``, as which `np.save` writes some floats of 8 bits that NumPy cannot read again, are ``|V1``.

    Raises:
        EncodeError: it is not such a file.
    """
    data = as_bytes_view(content)
    if not is_npy(data):
        raise EncodeError(f"found {len(data)} bytes without the .npy magic, expected an ndarray or .npy bytes")
    # The header's length is in its first bytes: no more than that is copied.
    stream = io.BytesIO(_FLOAT8_DESCR.sub(rb"\1'|V1'", data[: 12 + _MAX_NPY_HEADER].tobytes(), count=1))
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version}; 3.0 is only for structured arrays")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream, max_header_size=_MAX_NPY_HEADER)
    except (
        ValueError,
        TypeError,
        EOFError,
        SyntaxError,
        tokenize.TokenError,
        RecursionError,
        MemoryError,
    ) as error:
        raise EncodeError(f"found .npy bytes with a bad header ({error}), expected an .npy file") from error
    elements = data[stream.tell() :]
    expected = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise EncodeError(f"found .npy bytes of {describe(dtype)} {dtype}, expected an array of kind {_KINDS}")
    if len(shape) > MAX_DIMENSIONS or any(extent < 0 for extent in shape) or len(elements) != expected:
        found = f".npy bytes of {dtype} with shape {shape} and {len(elements)} bytes of elements"
        raise EncodeError(f"found {found}, expected {expected} bytes of elements and up to {MAX_DIMENSIONS} dimensions")
    try:
        flat = np.frombuffer(elements, dtype=dtype) if expected else np.empty(0, dtype=dtype)
        return flat.reshape(shape, order="F" if is_fortran else "C")
    except ValueError as error:  # an element type of no bytes, or a shape past NumPy's own limits
        raise EncodeError(f"found .npy bytes of {dtype} with shape {shape}, expected an array") from error


def dtype_name(dtype: str | None, known: Mapping[bytes, np.dtype[Any]], expected: str) -> str | None:
    """NumPy's name of the dtype that a setting names; None for None.

    Raises:
        ConfigError: it is not one of `known`, which are little-endian, by their codes.
    """
    if dtype is None:
        return None
    try:
        plain = np.dtype(dtype).newbyteorder("<")
    except (TypeError, ValueError, SyntaxError) as error:
        raise config_error("dtype", dtype, expected) from error
    if plain.str.encode("ascii") not in known:
        raise config_error("dtype", dtype, expected)
    return plain.name
