"""Arrays as files whose size follows from the type and the shape: NPY, and PNG without compression.

So a source lists the members that it makes of arrays without reading them, and their bytes are the same with every
version of a library.
"""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import numpy.typing as npt

__all__ = ["is_picture", "npy_bytes", "npy_size", "png_bytes", "png_size"]

_NPY_KINDS = "biufc"  # bool, integers, floats and complex numbers: no objects, no texts
_MAX_BLOCK = 0xFFFF  # bytes of a stored block of Deflate
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by channels: grey, grey and alpha, RGB, RGBA
MAX_SIDE = 1 << 16  # columns or rows of a picture


def npy_size(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> int:
    """Returns the size of `npy_bytes` of an array.

    Raises:
        ValueError: the type is not of numbers.
    """
    return len(_npy_header(dtype, shape)) + dtype.itemsize * int(np.prod(shape, dtype=object))


def npy_bytes(array: npt.NDArray[np.generic]) -> bytes:
    """Returns an array of numbers as a NPY file, little endian and in C order; errors as `npy_size`."""
    return _npy_header(array.dtype, array.shape) + array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _npy_header(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    if dtype.kind not in _NPY_KINDS:
        raise ValueError(f"has values of type {dtype}, expected numbers")
    target = io.BytesIO()
    description = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(target, description)
    return target.getvalue()


def is_picture(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> bool:
    """Returns whether `png_bytes` takes an array."""
    channels = shape[2] if len(shape) == 3 else 1
    if len(shape) not in (2, 3) or channels not in _COLOR_TYPES or dtype.kind != "u" or dtype.itemsize > 2:
        return False
    return min(shape[:2]) > 0 and max(shape[:2]) <= MAX_SIDE


def png_size(dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> int:
    """Returns the size of `png_bytes` of an array."""
    raw = shape[0] * (1 + int(np.prod(shape[1:], dtype=object)) * dtype.itemsize)
    return len(_PNG_MAGIC) + 3 * 12 + 13 + 2 + raw + 5 * -(-raw // _MAX_BLOCK) + 4


def png_bytes(picture: npt.NDArray[np.generic]) -> bytes:
    """Returns a picture as a PNG whose pixels are stored without compression.

    Args:
        picture: (H, W) or (H, W, channels) uint8 or uint16; 1 to 4 channels.
    """
    height, width = picture.shape[:2]
    depth = 8 * picture.dtype.itemsize
    rows = np.ascontiguousarray(picture, picture.dtype.newbyteorder(">")).view(np.uint8).reshape(height, -1)
    raw = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()  # each row begins with its filter
    blocks = [raw[at : at + _MAX_BLOCK] for at in range(0, len(raw), _MAX_BLOCK)]
    stored = b"".join(
        struct.pack("<BHH", number == len(blocks) - 1, len(block), len(block) ^ 0xFFFF) + block
        for number, block in enumerate(blocks)
    )
    color_type = _COLOR_TYPES[picture.shape[2] if picture.ndim == 3 else 1]
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    content = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(raw))
    return _PNG_MAGIC + _chunk(b"IHDR", header) + _chunk(b"IDAT", content) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(content, zlib.crc32(kind)))
