"""MDS, the shards of MosaicML's `streaming`: raw shards and ``index.json``, which its `StreamingDataset` reads."""

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
from mm_assets.sources.mds import ARRAY_TYPES, MdsSource
from mm_assets.storage.store import Store

__all__ = ["MdsExport"]

INDEX = "index.json"
_CODES = {np.dtype(code): number for number, code in ARRAY_TYPES.items()}


class MdsExport:
    """See `mm_assets.exports.base.Export`."""

    VERSION: ClassVar[int] = 1
    SUFFIX: ClassVar[str] = ".mds"
    KEEPS_KEYS: ClassVar[bool] = False
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
        described = [
            {
                **_describe(columns),
                "raw_data": {"basename": shard.details["name"], "bytes": shard.details["bytes"], "hashes": {}},
                "samples": shard.details["samples"],
                "zip_data": None,
            }
            for shard in shards
        ]
        _write_index(store, described)

    @staticmethod
    def join(store: Store, folders: Sequence[str]) -> None:
        """Writes an index of the shards in all folders."""
        contents, described = read_files(store, (f"{folder}/{INDEX}" for folder in folders)), []
        for folder, content in zip(folders, contents, strict=True):
            for shard in json.loads(content)["shards"]:
                shard["raw_data"]["basename"] = f"{folder}/{shard['raw_data']['basename']}"
                described.append(shard)
        _write_index(store, described)


def _write_index(store: Store, shards: Sequence[Mapping[str, Any]]) -> None:
    store.write_bytes(INDEX, json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())


class MdsShardWriter(OffsetTableWriter):
    """Writes one shard."""

    def _is_array(self, column: ExportColumn) -> bool:
        return _is_array(column)

    def _array(self, array: npt.NDArray[Any]) -> bytes:
        stored = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if stored.dtype not in _CODES:
            raise EncodeError(f"MDS has no arrays of {array.dtype}, expected one of {', '.join(map(str, _CODES))}")
        width = next(n for n in range(4) if max(array.shape, default=0) < 1 << (8 << n))
        shape = np.array(array.shape, f"<u{1 << width}").tobytes()
        return bytes([_CODES[stored.dtype], array.ndim << 2 | width]) + shape + stored.tobytes()

    def _head(self, sizes: Sequence[int]) -> bytes:
        return struct.pack(f"<{len(sizes)}I", *sizes)

    def _config(self) -> bytes:
        return json.dumps(_describe(self._columns), sort_keys=True).encode()


def _is_array(column: ExportColumn) -> bool:
    """Whether MDS has the arrays of a column: those whose field states a type that it knows."""
    stated = None if column.field is None else column.field.config.get("dtype")
    if column.is_list or column.kind != "array" or stated is None:
        return False
    try:
        return np.dtype(stated) in _CODES
    except TypeError:  # a type that NumPy lacks
        return False


def _describe(columns: Sequence[ExportColumn]) -> Mapping[str, Any]:
    """Returns what a shard says about itself."""
    names = column_names(columns)
    encodings = dict.fromkeys(TEXT_COLUMNS, "str")
    for column in columns:
        is_text = column.kind == "text" and not column.is_list
        encodings[names[column.name]] = "ndarray" if _is_array(column) else "str" if is_text else "bytes"
    return {
        "column_encodings": list(encodings.values()),
        "column_names": list(encodings),
        "column_sizes": [None] * len(encodings),
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": None,
        "version": 2,
    }
