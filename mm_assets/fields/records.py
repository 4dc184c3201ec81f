"""Metadata records: as Python objects, and what is in them."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["record_entries", "record_struct", "take_entry"]

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


def record_entries(kind: np.dtype[np.void]) -> Iterator[tuple[tuple[str, ...], np.dtype[Any]]]:
    """Yields the entries of a record but for padding: their keys, several in a record within it, and their types."""
    for name in kind.names or ():
        if kind[name].names:
            yield from (((name, *keys), entry) for keys, entry in record_entries(kind[name]))
        elif not name.startswith("_pad"):
            yield (name,), kind[name]


def take_entry(records: npt.NDArray[Any], keys: Iterable[str]) -> npt.NDArray[Any]:
    """Returns the values, (n,), of an entry of n records, by its keys."""
    for key in keys:
        records = records[key]
    return records
