"""Modalities as columns of an Arrow table.

A column's type follows from the field alone, never from the values, so that tables of different samples can be
concatenated. An absent value is null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.decoding import Batch
from mm_assets.errors import optional_import
from mm_assets.fields import Field
from mm_assets.fields.arrow import bytes_column, tensor_column, tensor_type
from mm_assets.formats import Column

if TYPE_CHECKING:
    import pyarrow as pa

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

    A field with an `arrow_type` makes its column from its decoded values, one with a `value_layout` from its batches.
    Any other column is the stored data, as is one whose field is None. `read` returns the payloads of a block,
    `decode` the values of one modality, and `decode_batches` the batches of several.
    """
    with optional_import("pyarrow", "Dataset.to_arrow"):
        import pyarrow as pa

    kinds = {name: None if field is None else field.arrow_type for name, field in fields.items()}
    arrays = [name for name, field in fields.items() if field and field.value_layout and kinds[name] is None]
    chunks: dict[str, list[pa.Array]] = {name: [] for name in fields}
    for block in blocks:
        rows = read(block, tuple(fields))
        batches = decode_batches(block, {name: rows[name] for name in arrays}) if arrays else {}
        for name, field in fields.items():
            if name in batches:
                column = tensor_column(*batches[name])
            elif field is None or kinds[name] is None:
                column = bytes_column(rows[name].datas)
            else:
                column = field.to_arrow(decode(block, name, rows[name]), rows[name].datas)
            chunks[name] += column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    for name, field in fields.items():
        if kinds[name] is None:
            layout = None if field is None else field.value_layout
            kinds[name] = pa.large_binary() if layout is None else tensor_type(layout)
    return pa.table({name: pa.chunked_array(chunks[name], type=kinds[name]) for name in fields})
