"""LitData, the chunks of Lightning's `litdata`: chunks and ``index.json``, whose samples are dictionaries."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.exports.base import ExportColumn, ShardFacts, read_files
from mm_assets.exports.offset_table import TEXT_COLUMNS, OffsetTableWriter, column_names
from mm_assets.sources import Source
from mm_assets.sources.litdata import NUMPY_TYPES, LitDataSource
from mm_assets.storage.store import Store

__all__ = ["LitDataExport"]

INDEX = "index.json"
_CODES = {np.dtype(code): number for number, code in enumerate(NUMPY_TYPES)}


class LitDataExport:
    """See `mm_assets.exports.base.Export`."""

    VERSION: ClassVar[int] = 1
    SUFFIX: ClassVar[str] = ".bin"
    KEEPS_KEYS: ClassVar[bool] = False
    source: ClassVar[type[Source]] = LitDataSource

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns ``chunk-0-000012.bin``: partitions are packed in the order of these names."""
        return f"chunk-0-{number:06d}.bin"

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> LitDataChunkWriter:
        """Opens a chunk."""
        return LitDataChunkWriter(folder / name, columns, num_samples)

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes the index of the chunks, without which they cannot be read."""
        chunks = [
            {
                "chunk_bytes": shard.details["bytes"],
                "chunk_size": shard.details["samples"],
                "dim": None,
                "filename": shard.details["name"],
            }
            for shard in shards
        ]
        names = column_names(columns)
        formats = dict.fromkeys(TEXT_COLUMNS, "str")
        for column in columns:
            is_text = column.kind == "text" and not column.is_list
            formats[names[column.name]] = "numpy" if _is_array(column) else "str" if is_text else "bytes"
        leaf: Mapping[str, Any] = {"type": None, "context": None, "children_spec": []}
        tree = {"type": "builtins.dict", "context": json.dumps(list(formats)), "children_spec": [leaf] * len(formats)}
        config = {
            "chunk_bytes": max((chunk["chunk_bytes"] for chunk in chunks), default=0),
            "chunk_size": None,
            "compression": None,
            "data_format": list(formats.values()),
            "data_spec": json.dumps([1, tree]),
            "encryption": None,
            "item_loader": "PyTreeLoader",
        }
        # The digests of the chunks stand for the time, by which LitData knows copies of an older version in its cache.
        version = str(int.from_bytes(bytes.fromhex("".join(shard.digest[:8] for shard in shards)), "big") % 10**12)
        value = {"chunks": chunks, "config": config, "updated_at": version}
        store.write_bytes(INDEX, json.dumps(value, sort_keys=True).encode())

    @staticmethod
    def join(store: Store, folders: Sequence[str]) -> None:
        """Writes an index of the chunks in all folders."""
        values = [json.loads(content) for content in read_files(store, (f"{folder}/{INDEX}" for folder in folders))]
        chunks = [
            {**chunk, "filename": f"{folder}/{chunk['filename']}"}
            for folder, value in zip(folders, values, strict=True)
            for chunk in value["chunks"]
        ]
        largest = max((value["config"]["chunk_bytes"] for value in values), default=0)
        config = {**(values[0]["config"] if values else {}), "chunk_bytes": largest}
        version = str(sum(int(value["updated_at"]) for value in values) % 10**12)
        value = {"chunks": chunks, "config": config, "updated_at": version}
        store.write_bytes(INDEX, json.dumps(value, sort_keys=True).encode())


class LitDataChunkWriter(OffsetTableWriter):
    """Writes one chunk."""

    def _is_array(self, column: ExportColumn) -> bool:
        return _is_array(column)

    def _array(self, array: npt.NDArray[Any]) -> bytes:
        stored = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if stored.dtype not in _CODES:
            raise EncodeError(f"LitData has no arrays of {array.dtype}, expected one of {', '.join(map(str, _CODES))}")
        return struct.pack(f"<{2 + array.ndim}I", _CODES[stored.dtype], array.ndim, *array.shape) + stored.tobytes()

    def _head(self, sizes: Sequence[int]) -> bytes:
        return struct.pack(f"<{len(sizes)}I", *sizes)

    def _config(self) -> bytes:
        return b""


def _is_array(column: ExportColumn) -> bool:
    return column.kind == "array" and not column.is_list
