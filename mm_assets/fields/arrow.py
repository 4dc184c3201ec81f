"""Arrow columns of arrays, of lists of any length, and of stored bytes.

PyArrow is imported in the functions: reading samples works without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mm_assets.fields.array_spec import ArraySpec, as_bytes_view
from mm_assets.media.content_types import Buffer

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["bytes_column", "list_column", "list_type", "tensor_column", "tensor_type"]


def tensor_type(layout: ArraySpec | Mapping[str, ArraySpec]) -> pa.DataType:
    """The type of arrays of one shape: nested lists of fixed sizes; of several arrays by name a struct of these."""
    import pyarrow as pa

    if not isinstance(layout, ArraySpec):
        return pa.struct([(name, tensor_type(one)) for name, one in layout.items()])
    if layout.dtype.kind == "c":  # Arrow has no complex numbers: a list of the real and the imaginary part
        kind = pa.list_(pa.from_numpy_dtype(f"f{layout.dtype.itemsize // 2}"), 2)
    else:
        kind = pa.from_numpy_dtype(layout.dtype)
    for extent in reversed(layout.shape):
        kind = pa.list_(kind, extent)
    return kind


def list_type(element: ArraySpec) -> pa.DataType:
    """The type of arrays of any length whose elements have one shape and dtype."""
    import pyarrow as pa

    return pa.large_list(tensor_type(element))


def tensor_column(
    values: npt.NDArray[Any] | Mapping[str, npt.NDArray[Any]], present: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """A batch as a column of `tensor_type`. Only booleans are copied.

    Args:
        values: (n, …), or several such arrays by name.
        present: (n,) which rows are not null; None for all.
    """
    import pyarrow as pa

    if isinstance(values, Mapping):
        parts = [tensor_column(array) for array in values.values()]
        return pa.StructArray.from_arrays(
            parts, names=list(values), mask=None if present is None else pa.array(~present)
        )
    values = np.ascontiguousarray(values)
    kind = tensor_type(ArraySpec(values.shape[1:], values.dtype))
    if values.dtype.kind == "c":
        values = values.view(f"f{values.dtype.itemsize // 2}").reshape(*values.shape, 2)
    if values.ndim == 1:
        return pa.array(values, mask=None if present is None else ~present)
    kinds = [kind]
    while len(kinds) < values.ndim - 1:
        kinds.append(kinds[-1].value_type)
    array = pa.array(values.reshape(-1))
    for depth in range(values.ndim - 1, 0, -1):
        valid = _bitmap(present) if depth == 1 and present is not None else None
        # By buffers: the number of empty lists does not follow from their elements.
        count = math.prod(values.shape[:depth])
        array = pa.Array.from_buffers(kinds[depth - 1], count, [valid], children=[array])
    return array


def list_column(values: Sequence[npt.NDArray[Any] | None], element: ArraySpec) -> pa.Array:
    """Arrays of any length as a column of `list_type`; None is null."""
    import pyarrow as pa

    present, offsets = _extents(values)
    # The empty array gives the type where there is no value.
    none = np.zeros((0, *element.shape), element.dtype)
    inner = tensor_column(np.concatenate([none, *(value for value in values if value is not None)]))
    buffers = [_bitmap(present), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(list_type(element), len(values), buffers, children=[inner])


def bytes_column(datas: Sequence[Buffer | None]) -> pa.Array:
    """Bytes as a column of large_binary; None is null."""
    import pyarrow as pa

    views = [None if data is None else as_bytes_view(data) for data in datas]
    present, offsets = _extents(views)
    joined = b"".join(view for view in views if view is not None)
    buffers = [_bitmap(present), pa.py_buffer(offsets), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.large_binary(), len(views), buffers)


def _extents(values: Sequence[Any]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Which values are present, (n,), and where each starts and the last ends, (n + 1,)."""
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    offsets = np.zeros(len(values) + 1, np.int64)
    offsets[1:][present] = [len(value) for value in values if value is not None]
    return present, offsets.cumsum()


def _bitmap(present: npt.NDArray[np.bool_]) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(present, bitorder="little").tobytes())
