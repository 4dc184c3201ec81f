"""Metadata records as Python objects."""

from __future__ import annotations

import functools
import math
import struct

import numpy as np

__all__ = ["record_struct"]

_STRUCT_CODES = {"|u1": "B", "|i1": "b", "<u2": "H", "<i2": "h", "<u4": "I", "<i4": "i", "<u8": "Q", "<i8": "q"}
_STRUCT_CODES |= {"<f2": "e", "<f4": "f", "<f8": "d", "|b1": "?"}


@functools.lru_cache(maxsize=256)
def record_struct(kind: np.dtype[np.void]) -> struct.Struct:
    """Packs and unpacks a record as Python objects, several times faster than NumPy."""
    codes = "<"
    for name in kind.names or ():
        part = kind[name]
        if name == "_pad":
            codes += f"{part.itemsize}x"
        elif part.kind in "SV" and not part.shape:
            codes += f"{part.itemsize}s"
        else:
            codes += f"{math.prod(part.shape)}{_STRUCT_CODES.get(part.base.str, '?')}"
    layout = struct.Struct(codes)
    if layout.size != kind.itemsize or any(kind[name].base.str[0] == ">" for name in kind.names or ()):
        raise TypeError(f"found the metadata_type {kind}, expected little-endian numbers without gaps")
    return layout
