"""Decoded modalities as Arrow columns.

A column's type follows from the field alone, never from the values, so that tables of different samples join. An
absent value is null. What has no columnar form, such as a sound or an image of any size, is the stored data bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.decoding import Batch
from mm_assets.fields import ArraySpec, Field, JSONField, NDArrayField, TextField, TokensField
from mm_assets.fields.base import as_bytes_view
from mm_assets.formats import Column

if TYPE_CHECKING:
    import pyarrow as pa

    Array: TypeAlias = pa.Array

__all__ = ["BLOCK_ROWS", "make_table"]

BLOCK_ROWS = 4096  # rows of a chunk of a column; what is decoded at once

Positions: TypeAlias = npt.NDArray[np.int64]


def make_table(
    fields: Mapping[str, Field | None],
    blocks: Iterable[Positions],
    *,
    read: Callable[[Positions, Sequence[str]], dict[str, Column]],
    decode: Callable[[Positions, str, Column], list[Any]],
    decode_batches: Callable[[Positions, dict[str, Column]], dict[str, Batch]],
) -> pa.Table:
    """A table with a column for each modality.

    Args:
        fields: by modality; None for one whose stored bytes are wanted.
        blocks: the samples, by what `read` takes.
        read: gives the payloads of modalities of a block.
        decode: gives the values of one.
        decode_batches: gives the batches of several.
    """
    import pyarrow as pa

    forms = {name: _form(field) for name, field in fields.items()}
    chunks: dict[str, list[Array]] = {name: [] for name in fields}
    for block in blocks:
        rows = read(block, tuple(fields))
        batched = {name: rows[name] for name, form in forms.items() if form == "batch"}
        batches = decode_batches(block, batched) if batched else {}
        for name, field in fields.items():
            if name in batches:
                chunks[name].append(_batch_column(batches[name]))
            elif field is None or forms[name] == "bytes":
                chunks[name].append(_bytes_column(rows[name]))
            else:
                chunks[name] += _value_column(field, rows[name], decode(block, name, rows[name]))
    columns = {name: pa.chunked_array(chunks[name], type=_column_type(field)) for name, field in fields.items()}
    return pa.table(columns)


def _form(field: Field | None) -> Literal["batch", "values", "bytes"]:
    """What a column is made of: the field's batch, its single values, or the stored bytes."""
    if field is None:
        return "bytes"
    if isinstance(field, TextField | JSONField) or _element(field) is not None:
        return "values"
    return "bytes" if field.value_layout is None else "batch"


def _column_type(field: Field | None) -> pa.DataType:
    """The Arrow type of a field's column; None stands for stored bytes."""
    import pyarrow as pa

    if field is None:
        return pa.large_binary()
    if isinstance(field, TextField | JSONField):
        return pa.string()
    element, layout = _element(field), field.value_layout
    if element is not None:
        return pa.large_list(_tensor_type(element))
    if isinstance(layout, Mapping):
        return pa.struct([(name, _tensor_type(one)) for name, one in layout.items()])
    return pa.large_binary() if layout is None else _tensor_type(layout)


def _element(field: Field) -> ArraySpec | None:
    """Of a field whose value is an array of any length, shape and dtype of what is counted; None for any other."""
    if isinstance(field, TokensField):
        return ArraySpec((), np.dtype(field.decoded))
    if not isinstance(field, NDArrayField) or field.dtype is None or not field.shape or field.shape[0] is not None:
        return None
    shape = tuple(extent for extent in field.shape[1:] if extent is not None)
    return ArraySpec(shape, np.dtype(field.dtype)) if len(shape) == len(field.shape) - 1 else None


def _number_type(dtype: np.dtype[Any]) -> pa.DataType:
    import pyarrow as pa

    if dtype.kind == "c":  # Arrow has none: real and imaginary part
        return pa.list_(pa.from_numpy_dtype(f"f{dtype.itemsize // 2}"), 2)
    return pa.from_numpy_dtype(dtype)


def _tensor_type(layout: ArraySpec) -> pa.DataType:
    import pyarrow as pa

    kind = _number_type(layout.dtype)
    for extent in reversed(layout.shape):
        kind = pa.list_(kind, extent)
    return kind


# --- making columns ---------------------------------------------------------------------------------------------------


def _batch_column(batch: Batch) -> Array:
    """A batch of one array (n, …), or of several, as a column: nested lists of fixed sizes; no copy but of bool."""
    import pyarrow as pa

    if isinstance(batch.values, Mapping):
        parts = {name: _tensors(array) for name, array in batch.values.items()}
        return pa.StructArray.from_arrays(list(parts.values()), names=list(parts), mask=pa.array(~batch.present))
    return _tensors(batch.values, batch.present)


def _tensors(values: npt.NDArray[Any], present: npt.NDArray[np.bool_] | None = None) -> Array:
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    kind = _tensor_type(ArraySpec(values.shape[1:], values.dtype))
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
        # By buffers: of lists of no elements, the elements would not tell how many there are.
        count = math.prod(values.shape[:depth])
        array = pa.Array.from_buffers(kinds[depth - 1], count, [valid], children=[array])
    return array


def _bitmap(present: npt.NDArray[np.bool_]) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(present, bitorder="little").tobytes())


def _bytes_column(rows: Column) -> Array:
    """The data bytes of each row, large_binary."""
    import pyarrow as pa

    present = np.fromiter((data is not None for data in rows.datas), np.bool_, len(rows.datas))
    views = [as_bytes_view(data) for data in rows.datas if data is not None]
    offsets = np.zeros(len(present) + 1, np.int64)
    offsets[1:][present] = [len(view) for view in views]
    buffers = [_bitmap(present), pa.py_buffer(offsets.cumsum()), pa.py_buffer(b"".join(views))]
    return pa.Array.from_buffers(pa.large_binary(), len(present), buffers)


def _text_column(values: list[str | None]) -> list[Array]:
    """Texts, as one chunk, or several where they are past 2 GiB."""
    import pyarrow as pa

    array = pa.array(values, type=pa.string())
    return array.chunks if isinstance(array, pa.ChunkedArray) else [array]


def _value_column(field: Field, rows: Column, values: list[Any]) -> list[Array]:
    """Decoded values as a column, in chunks.

    Args:
        field: whose column is made of values.
        rows: the payloads.
        values: what they decode to, None where absent.
    """
    import pyarrow as pa

    element = _element(field)
    if element is None and isinstance(
        field, JSONField
    ):  # as the text that is stored: values of any type make no column
        texts = [None if data is None else str(as_bytes_view(data), "utf-8") for data in rows.datas]
        return _text_column(texts)
    if element is None:
        return _text_column(values)
    none = np.zeros((0, *element.shape), element.dtype)
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    offsets = np.zeros(len(values) + 1, np.int64)
    offsets[1:][present] = [len(value) for value in values if value is not None]
    # Of no values the type would be unknown.
    inner = _tensors(np.concatenate([none, *(value for value in values if value is not None)]))
    buffers = [_bitmap(present), pa.py_buffer(offsets.cumsum())]
    return [pa.Array.from_buffers(_column_type(field), len(values), buffers, children=[inner])]
