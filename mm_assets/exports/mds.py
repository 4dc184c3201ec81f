"""MDS, the shards of MosaicML's `streaming`: raw shards and ``index.json``, which its `StreamingDataset` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mm_assets.exports.base import ExportColumn, ShardFacts, read_files
from mm_assets.exports.offset_table import OffsetTableWriter
from mm_assets.sources import Source
from mm_assets.sources.mds import ARRAY_TYPES, MdsSource
from mm_assets.storage.store import Store

__all__ = ["MdsExport"]

INDEX = "index.json"
_ENCODINGS = {"text": "str", "array": "ndarray", "file": "bytes"}


class MdsExport:
    """See `mm_assets.exports.base.Export`."""

    VERSION: ClassVar[int] = 1
    SUFFIX: ClassVar[str] = ".mds"
    source: ClassVar[type[Source]] = MdsSource

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns ``shard.00012.mds``."""
        return f"shard.{number:05d}.mds"

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> MdsShardWriter:
        """Opens a shard."""
        return MdsShardWriter(folder / name, columns, num_samples)

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes the index of the shards."""
        entries = [
            {
                **_describe(columns),
                "raw_data": {"basename": shard.files[0], "bytes": shard.num_bytes, "hashes": {}},
                "samples": shard.num_samples,
                "zip_data": None,
            }
            for shard in shards
        ]
        _write_index(store, entries)

    @staticmethod
    def join(store: Store, folders: Sequence[str]) -> None:
        """Writes an index of the shards in all folders."""
        contents, entries = read_files(store, (f"{folder}/{INDEX}" for folder in folders)), []
        for folder, content in zip(folders, contents, strict=True):
            for shard in json.loads(content)["shards"]:
                shard["raw_data"]["basename"] = f"{folder}/{shard['raw_data']['basename']}"
                entries.append(shard)
        _write_index(store, entries)


def _write_index(store: Store, shards: Sequence[Mapping[str, Any]]) -> None:
    store.write_bytes(INDEX, json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())


class MdsShardWriter(OffsetTableWriter):
    """Writes one shard."""

    FORMAT: ClassVar[str] = "MDS"
    ARRAY_CODES: ClassVar[Mapping[np.dtype[Any], int]] = {np.dtype(name): code for code, name in ARRAY_TYPES.items()}

    @classmethod
    def _is_array(cls, column: ExportColumn) -> bool:
        dtype = None if column.field is None else column.field.config.get("dtype")
        if column.is_list or column.kind != "array" or dtype is None:
            return False
        try:
            return np.dtype(dtype) in cls.ARRAY_CODES
        except TypeError:  # NumPy does not know the type
            return False

    def _array_head(self, code: int, shape: tuple[int, ...]) -> bytes:
        width = next(n for n in range(4) if max(shape, default=0) < 1 << (8 << n))
        return bytes([code, len(shape) << 2 | width]) + np.array(shape, f"<u{1 << width}").tobytes()

    def _config(self) -> bytes:
        return json.dumps(_describe(self._columns), sort_keys=True).encode()


def _describe(columns: Sequence[ExportColumn]) -> Mapping[str, Any]:
    """Returns the description of the columns, which is in each shard and in the index."""
    kinds = MdsShardWriter.column_kinds(columns)
    return {
        "column_encodings": [_ENCODINGS[kind] for kind in kinds.values()],
        "column_names": list(kinds),
        "column_sizes": [None] * len(kinds),
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": None,
        "version": 2,
    }
