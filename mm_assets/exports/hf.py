"""Hugging Face datasets: Parquet files with features in their schema, in the Hub's layout, and a dataset card.

`datasets.load_dataset(folder)` and the Hub's viewer open them, and decode images, audio and video.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mm_assets.exports.base import ExportColumn, ShardFacts
from mm_assets.exports.column_types import MEDIA_ITEMS, TypedColumn, typed
from mm_assets.exports.parquet import ParquetShardWriter, TableExport
from mm_assets.storage.store import Store

__all__ = ["HuggingFaceExport"]

SPLIT = "train"  # the name that `load_dataset` gives the only split
_ARRAYS = {2: "Array2D", 3: "Array3D", 4: "Array4D", 5: "Array5D"}


class HuggingFaceExport(TableExport):
    """See `mm_assets.exports.base.Export`."""

    @staticmethod
    def shard_name(number: int, num_shards: int) -> str:
        """Returns ``data/train-00000-of-00012.parquet``."""
        return f"data/{SPLIT}-{number:05d}-of-{num_shards:05d}.parquet"

    @staticmethod
    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> ParquetShardWriter:
        """Opens a file with the features in its schema."""
        metadata = {"info": {"features": _features(columns)}}
        return ParquetShardWriter(folder / name, columns, {"huggingface": json.dumps(metadata)})

    @staticmethod
    def finish(store: Store, columns: Sequence[ExportColumn], shards: Sequence[ShardFacts]) -> None:
        """Writes the dataset card."""
        num_bytes = sum(shard.details["num_bytes"] for shard in shards)
        split = {
            "name": SPLIT,
            "num_bytes": num_bytes,
            "num_examples": sum(shard.num_samples for shard in shards),
        }
        card = {
            "dataset_info": {
                "features": [_yaml_of(name, feature) for name, feature in _features(columns).items()],
                "splits": [split],
                "download_size": sum(shard.num_bytes for shard in shards),
                "dataset_size": num_bytes,
            },
        }
        _write_card(store, card, [f"data/{SPLIT}-*"])

    @staticmethod
    def join(store: Store, folders: Sequence[str]) -> None:
        """Writes a dataset card that lists the files in all folders; the features are in their schemas."""
        _write_card(store, {}, [f"{folder}/data/{SPLIT}-*" for folder in folders])


def _write_card(store: Store, card: Mapping[str, Any], paths: Sequence[str]) -> None:
    """Writes the dataset card of the files that match the patterns."""
    files = [{"split": SPLIT, "path": paths[0] if len(paths) == 1 else [*paths]}]
    card = {**card, "configs": [{"config_name": "default", "data_files": files}]}
    text = yaml.safe_dump(card, sort_keys=False, allow_unicode=True)
    store.write_bytes("README.md", f"---\n{text}---\n".encode())


def _features(columns: Sequence[ExportColumn]) -> dict[str, Any]:
    """Returns the feature of each column, in the order of the table."""
    text = _value("string")
    features = {column.name: _feature(column) for column in typed(columns)}
    return {"__key__": text, **features, "json": text, "__members__": text}


def _value(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "_type": "Value"}


def _feature(column: TypedColumn) -> Any:
    if column.classes:
        return {"names": list(column.classes), "_type": "ClassLabel"}
    if column.item in MEDIA_ITEMS:
        item: Mapping[str, Any] = {"_type": column.item}
    elif column.item == "File":
        item = {"bytes": _value("binary"), "path": _value("string")}
    else:
        item = _value(column.item)
    is_array = len(column.shape) in _ARRAYS and None not in column.shape[1:]
    if is_array:
        return {"shape": list(column.shape), "dtype": column.item, "_type": _ARRAYS[len(column.shape)]}
    if column.is_list and column.item == "File":
        return [item]  # a `Sequence` of structs is a struct of lists
    for _ in column.shape or ((None,) if column.is_list else ()):
        item = {"feature": item, "_type": "Sequence"}
    return item


def _yaml_of(name: str, feature: Any) -> dict[str, Any]:
    """Returns a feature in the notation of dataset cards."""
    return {"name": name, **_yaml(feature)}


def _yaml(feature: Any) -> dict[str, Any]:
    match feature:
        case {"_type": "ClassLabel", "names": names}:
            return {"dtype": {"class_label": {"names": {str(n): label for n, label in enumerate(names)}}}}
        case {"_type": "Sequence", "feature": item} | [item]:
            inner = _yaml(item)
            return {"list": inner.get("dtype", inner.get("struct", inner))}
        case {"_type": "Value", "dtype": dtype}:
            return {"dtype": dtype}
        case {"_type": str(kind), "shape": shape, "dtype": dtype}:
            return {"dtype": {f"array{kind[5]}_d": {"shape": shape, "dtype": dtype}}}
        case {"_type": str(kind)}:
            return {"dtype": kind.lower()}
    return {"struct": [_yaml_of(name, one) for name, one in feature.items()]}
