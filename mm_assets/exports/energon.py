"""Energon, the folders of NVIDIA's Megatron-Energon: the tars of WebDataset, and what its `prepare` writes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from mm_assets.errors import EncodeError
from mm_assets.exports.base import ExportColumn, ExportSample, ShardFacts, read_files
from mm_assets.exports.webdataset import TarShardWriter
from mm_assets.sources import Source
from mm_assets.sources.energon import EnergonSource, is_metadata
from mm_assets.storage.store import Store

__all__ = ["EnergonExport"]

FOLDER = ".nv-meta"


class EnergonShardWriter(TarShardWriter):
    """Writes a tar and its index: where each sample starts, and the end of the last."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._index_path = path.with_name(f"{path.name}.idx")
        self._starts: list[int] = []

    def write(self, sample: ExportSample) -> None:
        """Appends the files of a sample, the JSON first; `EncodeError` for a key that Energon passes over."""
        if is_metadata(sample.key):
            self._file.close()
            raise EncodeError(f"Energon does not read samples like {sample.key!a}, whose folder is in underscores")
        start = self.size
        super().write(sample)
        if self.size > start:
            self._starts.append(start)

    def close(self) -> Mapping[str, Any]:
        """Ends the archive, and returns its name and number of samples."""
        self._starts.append(self.size)
        super().close()
        self._index_path.write_bytes(struct.pack(f"<{len(self._starts)}Q", *self._starts))
        return {"name": self._index_path.name.removesuffix(".idx"), "samples": len(self._starts) - 1}


class EnergonExport:
    """See `mm_assets.exports.base.Export`."""

    VERSION: ClassVar[int] = 1
    SUFFIX: ClassVar[str] = ".tar"
    KEEPS_KEYS: ClassVar[bool] = False
    source: ClassVar[type[Source]] = EnergonSource

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns ``shard-000012.tar``."""
        return f"shard-{number:06d}.tar"

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> EnergonShardWriter:
        """Opens a tar and its index."""
        return EnergonShardWriter(folder / name)

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes the list of shards, one split with all of them, and a type of samples that keeps every file."""
        _write_metadata(
            store, {shard.details["name"]: shard.details["samples"] for shard in shards if shard.details["samples"]}
        )

    @staticmethod
    def join(store: Store, folders: Sequence[str]) -> None:
        """Writes the list of the shards in all folders, as of one folder."""
        contents = read_files(store, (f"{folder}/{FOLDER}/.info.json" for folder in folders))
        counts = {
            f"{folder}/{name}": number
            for folder, content in zip(folders, contents, strict=True)
            for name, number in json.loads(content)["shard_counts"].items()
        }
        _write_metadata(store, counts)


def _write_metadata(store: Store, counts: Mapping[str, int]) -> None:
    """Writes the metadata of shards with these numbers of samples; a `dataset.yaml` that users replaced remains."""
    split = {"split_parts": {"train": list(counts)}, "exclude": []}
    dataset = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    store.write_bytes(f"{FOLDER}/.info.json", json.dumps({"shard_counts": counts}, indent=2).encode())
    store.write_bytes(f"{FOLDER}/split.yaml", yaml.safe_dump(split, sort_keys=False).encode())
    store.create(f"{FOLDER}/dataset.yaml", yaml.safe_dump(dataset, sort_keys=False).encode())
