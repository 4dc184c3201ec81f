"""Energon, the folders of NVIDIA's Megatron-Energon: WebDataset tars, and the metadata that its `prepare` writes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from mm_assets.errors import EncodeError
from mm_assets.exports.base import ExportColumn, ExportSample, ShardFacts, read_files
from mm_assets.exports.webdataset import TarShardWriter, WebDatasetExport
from mm_assets.sources import Source
from mm_assets.sources.energon import EnergonSource, is_metadata
from mm_assets.storage.store import Store

__all__ = ["EnergonExport"]

FOLDER = ".nv-meta"


class EnergonShardWriter(TarShardWriter):
    """Writes a tar and its index: the offset of each sample, and the end of the last."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._index_path = path.with_name(f"{path.name}.idx")
        self._starts: list[int] = []

    def write(self, sample: ExportSample) -> None:
        """Appends the files of a sample, the JSON first; raises `EncodeError` for a key that Energon skips."""
        if is_metadata(sample.key):
            detail = "Energon skips keys in folders whose names begin and end with two underscores"
            raise EncodeError(f"{detail}: leave the sample out, or pack it with another id")
        start = self.size
        super().write(sample)
        if self.size > start:
            self._starts.append(start)

    def close(self) -> Mapping[str, Any]:
        """Ends the archive, writes its index, and returns the number of samples that have files."""
        self._starts.append(self.size)
        super().close()
        self._index_path.write_bytes(struct.pack(f"<{len(self._starts)}Q", *self._starts))
        return {"samples": len(self._starts) - 1}


class EnergonExport(WebDatasetExport):
    """See `mm_assets.exports.base.Export`."""

    VERSION: ClassVar[int] = 1
    source: ClassVar[type[Source]] = EnergonSource

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> EnergonShardWriter:
        """Opens a tar and its index."""
        return EnergonShardWriter(folder / name)

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes the list of shards, one split with all of them, and a sample type that keeps every file."""
        counts = {shard.files[0]: shard.details["samples"] for shard in shards}  # the tar is before its index
        _write_metadata(store, {name: number for name, number in counts.items() if number})

    @staticmethod
    def join(store: Store, folders: Sequence[str]) -> None:
        """Writes the metadata of the shards in all folders as if they were one dataset."""
        contents = read_files(store, (f"{folder}/{FOLDER}/.info.json" for folder in folders))
        counts = {
            f"{folder}/{name}": number
            for folder, content in zip(folders, contents, strict=True)
            for name, number in json.loads(content)["shard_counts"].items()
        }
        _write_metadata(store, counts)


def _write_metadata(store: Store, counts: Mapping[str, int]) -> None:
    """Writes the metadata, given the number of samples of each shard; keeps a `dataset.yaml` that users replaced."""
    split = {"split_parts": {"train": list(counts)}, "exclude": []}
    dataset = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    store.write_bytes(f"{FOLDER}/.info.json", json.dumps({"shard_counts": counts}, indent=2).encode())
    store.write_bytes(f"{FOLDER}/split.yaml", yaml.safe_dump(split, sort_keys=False).encode())
    store.create(f"{FOLDER}/dataset.yaml", yaml.safe_dump(dataset, sort_keys=False).encode())
