"""Lance: one version of a dataset, in which each shard is a fragment with one data file.

A row has the columns `__key__`, `json` and `__members__`, and one for each packed modality: text, bytes, lists of
bytes, or arrays of one shape. Videos are blobs, which `lance.dataset(out).take_blobs` opens without reading them. The
same samples and the same release of Lance give identical data files; the files that describe the dataset contain the
time and a random name.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from mm_assets.errors import EncodeError, optional_import
from mm_assets.exports.base import JSON_COLUMN, SAMPLE_COLUMNS, ExportColumn, ExportFile, ExportSample, ShardFacts
from mm_assets.exports.column_types import NUMBER_TYPES
from mm_assets.fields import ArraySpec
from mm_assets.json_text import dump_json
from mm_assets.sources import Source
from mm_assets.sources.lance import LanceSource
from mm_assets.sources.row_members import KEY_COLUMN, MEMBERS_COLUMN
from mm_assets.storage.store import Store

__all__ = ["LanceExport"]

FILE_VERSION = "2.1"  # later versions of data files store a large blob in a file of its own
BATCH_BYTES = 16 << 20
BATCH_ROWS = 64
_BLOB = {"lance-encoding:blob": "true"}


class LanceShardWriter:
    """Writes samples as rows of a data file."""

    def __init__(self, path: Path, columns: Sequence[ExportColumn]) -> None:
        with optional_import("lance", "an export to Lance"):
            from lance.file import LanceFileWriter
        path.parent.mkdir(parents=True, exist_ok=True)
        self._names = _column_names(columns)
        self._schema = _schema_of(columns)
        self._writer = LanceFileWriter(str(path), self._schema, version=FILE_VERSION)
        self._rows: list[Mapping[str, Any]] = []
        self._num_bytes = 0  # of the samples in `_rows`

    def write(self, sample: ExportSample) -> None:
        """Appends a row; errors as `ShardWriter.write`."""
        row: dict[str, Any] = {
            KEY_COLUMN: sample.key,
            JSON_COLUMN: sample.json,
            MEMBERS_COLUMN: dump_json([[self._names[column], file.suffix] for column, file in sample.columns()]),
        }
        for column, part in sample.parts.items():
            name = self._names[column]
            if isinstance(part, ExportFile):
                row[name] = self._value(name, part)
            else:
                row[name] = None if part is None else [bytes(file.data) for file in part]
        self._rows.append(row)
        self._num_bytes += sum(memoryview(file.data).nbytes for file in sample.files())
        if self._num_bytes >= BATCH_BYTES or len(self._rows) == BATCH_ROWS:
            self._flush()

    def _value(self, name: str, file: ExportFile) -> Any:
        """Returns the value of a column for a file.

        Raises:
            EncodeError: it is not of the column's type.
        """
        kind = self._schema.field(name).type
        if pa.types.is_large_binary(kind):
            return bytes(file.data)
        if pa.types.is_string(kind):
            return str(file.data, "utf-8")
        array, (dtype, shape) = file.content, _array_of(kind)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
            actual = (array.dtype, array.shape) if isinstance(array, np.ndarray) else type(array).__name__
            raise EncodeError(f"the array of {name!r} is {actual}, but its field says {(dtype, shape)}: pack it again")
        return array

    def _flush(self) -> None:
        if self._rows:
            columns = [_column_of([row.get(field.name) for row in self._rows], field.type) for field in self._schema]
            self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows = []
        self._num_bytes = 0

    def close(self) -> Mapping[str, Any]:
        """Ends the file."""
        self._flush()
        self._writer.close()
        return {}

    def abort(self) -> None:
        """Closes the incomplete file."""
        self._writer.close()


class LanceExport:
    """See `mm_assets.exports.base.Export`."""

    VERSION: ClassVar[int] = 1
    SUFFIX: ClassVar[str] = ".lance"
    source: ClassVar[type[Source]] = LanceSource

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns ``data/shard-000012.lance``."""
        return f"data/shard-{number:06d}.lance"

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> LanceShardWriter:
        """Opens a data file."""
        return LanceShardWriter(folder / name, columns)

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Commits the data files as the fragments of one version, in the order of the shards."""
        with optional_import("lance", "an export to Lance"):
            import lance
        schema = _schema_of(columns)
        with tempfile.TemporaryDirectory(prefix="lance-") as scratch:
            template = _fragment_of(schema, f"{scratch}/row")
            fragments = []
            for shard in shards:
                (name,) = shard.files
                file = {**template["files"][0], "path": Path(name).name, "file_size_bytes": shard.num_bytes}
                value = {**template, "id": shard.number, "physical_rows": shard.num_samples, "files": [file]}
                fragments.append(lance.FragmentMetadata.from_json(json.dumps(value)))
            folder = Path(scratch, "dataset")
            lance.LanceDataset.commit(str(folder), lance.LanceOperation.Overwrite(schema, fragments))
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            for path in sorted(paths, key=lambda path: path.suffix == ".manifest"):  # last: it publishes the version
                store.write_bytes(path.relative_to(folder).as_posix(), path.read_bytes())


def _fragment_of(schema: pa.Schema, scratch: str) -> Mapping[str, Any]:
    """Returns Lance's description of a fragment of a schema, with the numbers of its fields and columns."""
    from lance.fragment import write_fragments

    row = pa.record_batch([pa.nulls(1, field.type) for field in schema], schema=schema)
    (fragment,) = write_fragments(row, scratch, schema, mode="create", data_storage_version=FILE_VERSION)
    result: Mapping[str, Any] = fragment.to_json()
    return result


def _column_names(columns: Sequence[ExportColumn]) -> dict[str, str]:
    """Returns the name of each column in Lance, whose names have no dots and ignore case."""
    names: dict[str, str] = {}
    used = set(SAMPLE_COLUMNS)
    for column in columns:
        plain = column.name.replace(".", "_")
        numbered = (f"{plain}_{number}" for number in range(len(columns) + len(used)))
        names[column.name] = next(name for name in (plain, *numbered) if name.lower() not in used)
        used.add(names[column.name].lower())
    return names


def _schema_of(columns: Sequence[ExportColumn]) -> pa.Schema:
    names = _column_names(columns)
    return pa.schema(
        [
            pa.field(KEY_COLUMN, pa.string()),
            pa.field(JSON_COLUMN, pa.string()),
            *(pa.field(names[column.name], _type_of(column), metadata=_metadata_of(column)) for column in columns),
            pa.field(MEMBERS_COLUMN, pa.string()),
        ]
    )


def _type_of(column: ExportColumn) -> pa.DataType:
    if column.is_list:
        return pa.list_(pa.large_binary())
    field = column.field
    layout = field.value_layout if field is not None and field.CONTENT_KIND == "array" else None
    if isinstance(layout, ArraySpec) and layout.shape and all(layout.shape) and layout.dtype.name in NUMBER_TYPES:
        kind = pa.from_numpy_dtype(layout.dtype)
        for extent in reversed(layout.shape):
            kind = pa.list_(kind, extent)
        return kind
    return pa.string() if column.kind == "text" else pa.large_binary()


def _array_of(kind: pa.DataType) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the dtype and shape of the arrays of a column."""
    shape = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    return np.dtype(kind.to_pandas_dtype()), tuple(shape)


def _column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Returns the values of rows as a column."""
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values, kind)
    dtype, shape = _array_of(kind)
    filled = [np.zeros(shape, dtype) if value is None else value for value in values]
    column = pa.array(np.concatenate(filled, axis=None))
    for extent in reversed(shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, extent)
    return pa.FixedSizeListArray.from_arrays(column, shape[0], mask=pa.array([value is None for value in values]))


def _metadata_of(column: ExportColumn) -> Mapping[str, str] | None:
    is_large = column.field is not None and column.field.CONTENT_KIND == "video"
    return _BLOB if is_large and pa.types.is_large_binary(_type_of(column)) else None
