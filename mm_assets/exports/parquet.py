"""Parquet: a row for each sample, with its key, its JSON, typed columns, and the files of its parts.

Row groups have at most 32 MiB, so that readers need little memory; only a larger sample makes a larger one. Pages have
an index, checksums and content-defined boundaries: a changed sample does not change the pages of other samples.
"""

from __future__ import annotations

import inspect
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mm_assets.dataset.dataset import Dataset
from mm_assets.errors import EncodeError
from mm_assets.exports.base import SAMPLE_COLUMNS, ExportColumn, ExportFile, ExportSample, ShardFacts
from mm_assets.exports.column_types import FILE_ITEMS, MEDIA_ITEMS, TypedColumn, typed, typed_columns
from mm_assets.sources import Source
from mm_assets.sources.parquet import ParquetSource
from mm_assets.storage.store import Store

__all__ = ["ParquetExport", "ParquetShardWriter", "TableExport"]

GROUP_BYTES = 32 << 20
GROUP_ROWS = 1000
MAX_CELL_BYTES = 2**31 - 1  # offsets in a page and in Arrow's binary type are int32
WRITE_BATCH_ROWS = 16  # between checks of a page's size; the default, 1024, can be gigabytes of media
_PARAMETERS = inspect.signature(pq.ParquetWriter).parameters
_NEW_OPTIONS: Mapping[str, bool] = {name: True for name in ("use_content_defined_chunking",) if name in _PARAMETERS}


class ParquetShardWriter:
    """Writes samples as rows.

    Args:
        path: the file.
        columns: the columns of the table, each a `TypedColumn`.
        metadata: metadata of the schema.
    """

    def __init__(self, path: Path, columns: Sequence[ExportColumn], metadata: Mapping[str, str] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = columns = typed(columns)
        text = [pa.field(name, pa.string(), nullable=name == "json") for name in SAMPLE_COLUMNS]
        fields = [text[0], *(pa.field(column.name, column.arrow) for column in columns), *text[1:]]
        self._schema = pa.schema(fields, metadata)
        media = {column.name for column in columns if column.item in MEDIA_ITEMS}  # compressed by their own codecs
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression={
                leaf: "NONE" if field.name in media else "ZSTD"
                for field in self._schema
                for leaf in _leaves(field.name, field.type)
            },
            use_dictionary=[c.name for c in columns if c.is_value and not c.is_list] or False,
            write_statistics=["__key__", *(c.name for c in columns if c.is_value and not c.is_list)],
            write_batch_size=WRITE_BATCH_ROWS,
            write_page_index=True,
            write_page_checksum=True,
            **_NEW_OPTIONS,
        )
        self._rows: list[tuple[ExportSample, Mapping[str, Any]]] = []
        self._group_bytes = 0
        self._num_bytes = 0

    def write(self, sample: ExportSample) -> None:
        """Appends a sample.

        Raises:
            EncodeError: a file is larger than a Parquet value can be.
        """
        files = [file for _, file in sample.columns()]
        sizes = [memoryview(file.data).nbytes for file in files]
        if max(sizes, default=0) > MAX_CELL_BYTES:
            suffix = files[sizes.index(max(sizes))].suffix
            detail = f"its file {suffix!a} has {max(sizes):,} bytes, and a Parquet value at most {MAX_CELL_BYTES:,}"
            raise EncodeError(f"{detail}: leave the sample or the modality out")
        size = sum(sizes) + 2 * len(sample.json or "")
        if self._rows and (self._group_bytes + size > GROUP_BYTES or len(self._rows) >= GROUP_ROWS):
            self._flush()
        self._rows.append((sample, sample.value))
        self._group_bytes += size

    def _flush(self) -> None:
        samples = [sample for sample, _ in self._rows]
        arrays = [pa.array([sample.key for sample in samples], pa.string())]
        for column in self._columns:
            if column.is_value:
                arrays.append(_values(column, [value.get(column.name) for _, value in self._rows]))
            else:
                arrays.append(_parts(column, samples))
        arrays += [
            pa.array([sample.json for sample in samples], pa.string()),
            pa.array([sample.members() for sample in samples], pa.string()),
        ]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        self._writer.write_table(table, row_group_size=len(samples))
        self._num_bytes += table.nbytes
        self._rows, self._group_bytes = [], 0

    def close(self) -> Mapping[str, Any]:
        """Ends the file, and returns the size of its values in memory, in bytes."""
        if self._rows:
            self._flush()
        self._writer.close()
        return {"num_bytes": self._num_bytes}

    def abort(self) -> None:
        """Closes the incomplete file."""
        self._writer.close()


def _leaves(path: str, kind: pa.DataType) -> Iterator[str]:
    """Yields the paths of a field's leaf columns."""
    if pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for child in kind:
            yield from _leaves(f"{path}.{child.name}", child.type)
    else:
        yield path


def _values(column: TypedColumn, values: Sequence[Any]) -> pa.Array:
    """Returns the values of a key of the JSON as a column."""
    if column.item == "float64":  # some may be integers
        values = [_floats(value) for value in values]
    return pa.array(values, column.arrow)


def _floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return None if value is None else float(value)


def _parts(column: TypedColumn, samples: Sequence[ExportSample]) -> pa.Array:
    """Returns the files, texts or arrays of a part as a column."""
    parts = [sample.parts.get(column.name) for sample in samples]
    if column.shape:
        contents = (part.content if isinstance(part, ExportFile) else None for part in parts)
        return _arrays([content if isinstance(content, np.ndarray) else None for content in contents], column)
    keys = [posixpath.basename(sample.key) for sample in samples]
    if not column.is_list:
        return _cells(
            column,
            [(key, part if isinstance(part, ExportFile) else None) for key, part in zip(keys, parts, strict=True)],
        )
    lists = [None if part is None else [part] if isinstance(part, ExportFile) else part for part in parts]
    items = [(key, file) for key, files in zip(keys, lists, strict=True) for file in files or ()]
    return _lists_of([None if files is None else len(files) for files in lists], _cells(column, items))


def _cells(column: TypedColumn, files: Sequence[tuple[str, ExportFile | None]]) -> pa.Array:
    """Returns texts, or structs of `bytes` and `path`, which is the base name of the key and the suffix."""
    contents = [None if file is None else file.data for _, file in files]
    if column.item not in FILE_ITEMS:
        return pa.array([None if content is None else str(content, "utf-8") for content in contents], pa.string())
    paths = [None if file is None else f"{key}.{file.suffix}" for key, file in files]
    children = [pa.array(contents, pa.binary()), pa.array(paths, pa.string())]
    missing = pa.array([content is None for content in contents], pa.bool_())
    return pa.StructArray.from_arrays(children, names=["bytes", "path"], mask=missing)


def _lists_of(lengths: Sequence[int | None], items: pa.Array) -> pa.Array:
    """Returns lists with the given lengths of consecutive items; None is null."""
    starts = list(accumulate((length or 0 for length in lengths), initial=0))
    offsets = [None if length is None else start for length, start in zip(lengths, starts, strict=False)]
    return pa.ListArray.from_arrays(pa.array([*offsets, starts[-1]], pa.int32()), items)


def _arrays(arrays: Sequence[npt.NDArray[Any] | None], column: TypedColumn) -> pa.Array:
    """Returns arrays with the same dtype and number of dimensions as nested lists."""
    present = [array for array in arrays if array is not None]
    flat = np.concatenate([array.reshape(-1) for array in present]) if present else np.zeros(0, np.dtype(column.item))
    lists = pa.array(flat.astype(flat.dtype.newbyteorder("="), copy=False))
    for axis in range(len(column.shape) - 1, 0, -1):
        lengths = [array.shape[axis] for array in present for _ in range(int(np.prod(array.shape[:axis])))]
        lists = _lists_of(lengths, lists)
    return _lists_of([None if array is None else len(array) for array in arrays], lists)


class TableExport:
    """Base of the exports to Parquet; see `mm_assets.exports.base.Export`."""

    VERSION: ClassVar[int] = 1
    SUFFIX: ClassVar[str] = ".parquet"
    source: ClassVar[type[Source]] = ParquetSource

    @staticmethod
    def typed_columns(dataset: Dataset, columns: Sequence[ExportColumn]) -> Sequence[TypedColumn]:
        """Returns the columns of the table."""
        return typed_columns(dataset, columns)


class ParquetExport(TableExport):
    """Plain Parquet without metadata of other projects; see `mm_assets.exports.base.Export`."""

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns ``part-00000-of-00012.parquet``."""
        return f"part-{number:05d}-of-{num_shards:05d}.parquet"

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> ParquetShardWriter:
        """Opens a file."""
        return ParquetShardWriter(folder / name, columns)

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes nothing: Parquet files need no index."""
