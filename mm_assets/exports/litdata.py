"""LitData, the chunks of Lightning's `litdata`: chunks and ``index.json``, whose samples are dictionaries."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mm_assets.exports.base import ExportColumn, ShardFacts, read_files
from mm_assets.exports.offset_table import OffsetTableWriter
from mm_assets.sources import Source
from mm_assets.sources.litdata import NUMPY_TYPES, LitDataSource
from mm_assets.storage.store import Store

__all__ = ["LitDataExport"]

INDEX = "index.json"
_FORMATS = {"text": "str", "array": "numpy", "file": "bytes"}


class LitDataExport:
    """See `mm_assets.exports.base.Export`."""

    VERSION: ClassVar[int] = 1
    SUFFIX: ClassVar[str] = ".bin"
    source: ClassVar[type[Source]] = LitDataSource

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns ``chunk-0-000012.bin``; chunks are packed in the order of their names."""
        return f"chunk-0-{number:06d}.bin"

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> LitDataChunkWriter:
        """Opens a chunk."""
        return LitDataChunkWriter(folder / name, columns, num_samples)

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes the index of the chunks, without which they cannot be read."""
        chunks: list[dict[str, Any]] = [
            {
                "chunk_bytes": shard.num_bytes,
                "chunk_size": shard.num_samples,
                "dim": None,
                "filename": shard.files[0],
            }
            for shard in shards
        ]
        kinds = LitDataChunkWriter.column_kinds(columns)
        leaf: Mapping[str, Any] = {"type": None, "context": None, "children_spec": []}
        tree = {"type": "builtins.dict", "context": json.dumps(list(kinds)), "children_spec": [leaf] * len(kinds)}
        config = {
            "chunk_bytes": max((chunk["chunk_bytes"] for chunk in chunks), default=0),
            "chunk_size": None,
            "compression": None,
            "data_format": [_FORMATS[kind] for kind in kinds.values()],
            "data_spec": json.dumps([1, tree]),
            "encryption": None,
            "item_loader": "PyTreeLoader",
        }
        # LitData detects outdated copies in its cache by this time; a digest of the chunks does the same.
        version = str(int.from_bytes(bytes.fromhex("".join(shard.digest[:8] for shard in shards)), "big") % 10**12)
        _write_index(store, chunks, config, version)

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
        _write_index(store, chunks, config, version)


def _write_index(store: Store, chunks: Sequence[object], config: Mapping[str, Any], version: str) -> None:
    value = {"chunks": chunks, "config": config, "updated_at": version}
    store.write_bytes(INDEX, json.dumps(value, sort_keys=True).encode())


class LitDataChunkWriter(OffsetTableWriter):
    """Writes one chunk."""

    FORMAT: ClassVar[str] = "LitData"
    ARRAY_CODES: ClassVar[Mapping[np.dtype[Any], int]] = {np.dtype(name): n for n, name in enumerate(NUMPY_TYPES)}

    @classmethod
    def _is_array(cls, column: ExportColumn) -> bool:
        return column.kind == "array" and not column.is_list

    def _array_head(self, code: int, shape: tuple[int, ...]) -> bytes:
        return struct.pack(f"<{2 + len(shape)}I", code, len(shape), *shape)
