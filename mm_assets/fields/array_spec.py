"""Shape and dtype of decoded values, and the bytes of buffers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mm_assets.media.content_types import Buffer

__all__ = ["ArraySpec", "as_bytes_view"]


class ArraySpec(NamedTuple):
    """Shape and dtype that every decoded value of a field has, so that a batch is one array.

    Attributes:
        shape: of one value; () for a number.
        dtype: of its elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def as_bytes_view(value: Buffer) -> memoryview:
    """The bytes of a buffer, uncopied."""
    view = memoryview(value)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
