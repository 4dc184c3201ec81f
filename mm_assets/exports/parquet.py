"""Shards of Parquet: a row for each sample, with its key, its JSON, typed columns, and the files of its parts.

Row groups end before 32 MiB, so that a reader of one holds little; only a larger sample makes a larger one. Pages have
an index and checksums, and end where content defines it: a changed sample leaves the pages of all others as they are.
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
from mm_assets.exports.base import ExportColumn, ExportFile, ExportSample, ShardFacts
from mm_assets.exports.column_types import FILE_ITEMS, MEDIA_ITEMS, TypedColumn, typed, typed_columns
from mm_assets.json_text import parse_json
from mm_assets.sources import Source
from mm_assets.sources.parquet import ParquetSource
from mm_assets.storage.store import Store

__all__ = ["ParquetExport", "ParquetShardWriter", "TableExport"]

GROUP_BYTES = 32 << 20  # of content
GROUP_ROWS = 1000
MAX_CELL = 2**31 - 1  # bytes of one value: offsets in a page and in Arrow's binary type are int32
WRITE_BATCH = 16  # rows between two checks of a page's size: by default 1024, which are gigabytes of media
_PARAMETERS = inspect.signature(pq.ParquetWriter).parameters
_NEWER: Mapping[str, bool] = {name: True for name in ("use_content_defined_chunking",) if name in _PARAMETERS}


class ParquetShardWriter:
    """Writes samples as rows.

    Args:
        path: the file.
        columns: of the table, each a `TypedColumn`.
        metadata: of its schema.
    """

    def __init__(self, path: Path, columns: Sequence[ExportColumn], metadata: Mapping[str, str] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = columns = typed(columns)
        text = [pa.field(name, pa.string(), nullable=name == "json") for name in ("__key__", "json", "__members__")]
        fields = [text[0], *(pa.field(column.name, column.arrow) for column in columns), *text[1:]]
        self._schema = pa.schema(fields, metadata)
        media = {column.name for column in columns if column.item in MEDIA_ITEMS}  # which are compressed already
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
            write_batch_size=WRITE_BATCH,
            write_page_index=True,
            write_page_checksum=True,
            **_NEWER,
        )
        self._rows: list[tuple[ExportSample, Mapping[str, Any]]] = []
        self._group_bytes = 0
        self._num_bytes = 0

    def write(self, sample: ExportSample) -> None:
        """Appends a sample.

        Raises:
            EncodeError: a file is larger than a value of Parquet may be.
        """
        files = [file for _, file in sample.columns()]
        sizes = [memoryview(file.data).nbytes for file in files]
        if max(sizes, default=0) > MAX_CELL:
            name = f"{sample.key}.{files[sizes.index(max(sizes))].suffix}"
            raise EncodeError(f"{name!a} has {max(sizes):,} bytes, and a value of Parquet at most {MAX_CELL:,}")
        value = None if sample.json is None else parse_json(sample.json)
        size = sum(sizes) + 2 * len(sample.json or "")
        if self._rows and (self._group_bytes + size > GROUP_BYTES or len(self._rows) >= GROUP_ROWS):
            self._flush()
        self._rows.append((sample, value if isinstance(value, dict) else {}))
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
        """Finishes the file; returns the bytes of its values in memory."""
        if self._rows:
            self._flush()
        self._writer.close()
        return {"num_bytes": self._num_bytes}


def _leaves(path: str, kind: pa.DataType) -> Iterator[str]:
    """Yields the columns of a field inside the file."""
    if pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for child in kind:
            yield from _leaves(f"{path}.{child.name}", child.type)
    else:
        yield path


def _values(column: TypedColumn, values: Sequence[Any]) -> pa.Array:
    """The values of a key of the JSON."""
    if column.item == "float64":  # integers that are exact as such
        values = [_floats(value) for value in values]
    return pa.array(values, column.arrow)


def _floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return None if value is None else float(value)


def _parts(column: TypedColumn, samples: Sequence[ExportSample]) -> pa.Array:
    """The files of a part, its texts, or its arrays."""
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
    return _listed([None if files is None else len(files) for files in lists], _cells(column, items))


def _cells(column: TypedColumn, files: Sequence[tuple[str, ExportFile | None]]) -> pa.Array:
    """Texts, or structs of `bytes` and `path`: the base name of the key, and the suffix."""
    contents = [None if file is None else file.data for _, file in files]
    if column.item not in FILE_ITEMS:
        return pa.array([None if content is None else str(content, "utf-8") for content in contents], pa.string())
    paths = [None if file is None else f"{key}.{file.suffix}" for key, file in files]
    children = [pa.array(contents, pa.binary()), pa.array(paths, pa.string())]
    missing = pa.array([content is None for content in contents], pa.bool_())
    return pa.StructArray.from_arrays(children, names=["bytes", "path"], mask=missing)


def _listed(lengths: Sequence[int | None], items: pa.Array) -> pa.Array:
    """Lists of so many of the items each; None stands for null."""
    starts = list(accumulate((length or 0 for length in lengths), initial=0))
    offsets = [None if length is None else start for length, start in zip(lengths, starts, strict=False)]
    return pa.ListArray.from_arrays(pa.array([*offsets, starts[-1]], pa.int32()), items)


def _arrays(arrays: Sequence[npt.NDArray[Any] | None], column: TypedColumn) -> pa.Array:
    """Arrays of one type and number of dimensions, as lists in lists."""
    present = [array for array in arrays if array is not None]
    flat = np.concatenate([array.reshape(-1) for array in present]) if present else np.zeros(0, np.dtype(column.item))
    lists = pa.array(flat.astype(flat.dtype.newbyteorder("="), copy=False))
    for axis in range(len(column.shape) - 1, 0, -1):
        lengths = [array.shape[axis] for array in present for _ in range(int(np.prod(array.shape[:axis])))]
        lists = _listed(lengths, lists)
    return _listed([None if array is None else len(array) for array in arrays], lists)


class TableExport:
    """What exports to Parquet share; see `mm_assets.exports.base.Export`."""

    VERSION: ClassVar[int] = 1
    SUFFIX: ClassVar[str] = ".parquet"
    KEEPS_KEYS: ClassVar[bool] = False
    source: ClassVar[type[Source]] = ParquetSource

    @staticmethod
    def typed_columns(dataset: Dataset, columns: Sequence[ExportColumn]) -> Sequence[TypedColumn]:
        """Returns the columns of the table: those of the JSON's keys, and those of the parts of samples."""
        return typed_columns(dataset, columns)


class ParquetExport(TableExport):
    """Parquet without the metadata of any other project; see `mm_assets.exports.base.Export`."""

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
        """Nothing: the shards are all."""
