"""Shards of MDS and LitData made by hand, for tests: any bytes as table, columns and values."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from mm_assets.testing.sources import HOSTILE

HOSTILE_NAMES = tuple(name if "." in name else f"{name}.jpg" for name in HOSTILE)


def table_bytes(samples: Sequence[bytes], config: bytes = b"") -> bytes:
    """A shard with these samples."""
    offsets = [8 + 4 * len(samples) + len(config)]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    return struct.pack(f"<{len(samples) + 2}I", len(samples), *offsets) + config + b"".join(samples)


def sample_bytes(values: Sequence[bytes], sizes: Sequence[int | None] | None = None) -> bytes:
    """A sample of these values, which states the sizes of those that have none in `sizes`."""
    stated = [len(value) for value, size in zip(values, sizes or [None] * len(values), strict=True) if size is None]
    return struct.pack(f"<{len(stated)}I", *stated) + b"".join(values)


def mds_config(columns: Mapping[str, str], sizes: Sequence[int | None] | None = None, **changes: Any) -> bytes:
    """The description of columns that MDS has."""
    config = {
        "column_encodings": list(columns.values()),
        "column_names": list(columns),
        "column_sizes": list(sizes or [None] * len(columns)),
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    return json.dumps({**config, **changes}, sort_keys=True).encode()


def mds_bytes(
    columns: Mapping[str, str], rows: Sequence[Sequence[bytes]], sizes: Sequence[int | None] | None = None
) -> bytes:
    """A shard of MDS whose rows have these encoded values."""
    return table_bytes([sample_bytes(row, sizes) for row in rows], mds_config(columns, sizes))


def list_bytes(items: Sequence[bytes], *, placeholder: bool = True) -> bytes:
    """A list of files as MDS has it, or without the placeholder an array of JPEGs."""
    sizes = struct.pack(f"<{len(items) + 1}I", len(items), *map(len, items))
    return (bytes(4) if placeholder else b"") + sizes + b"".join(items)


def member_row(name: str, content: bytes) -> tuple[str, str, str, bytes]:
    """Key, JSON, `__members__` and content of a sample with one file of this name."""
    key, _, suffix = name.rpartition(".")
    if suffix == "json":
        return key, content.decode(), "[]", b""
    return key, "", json.dumps([["content", suffix]]), content


def litdata_index(spec: Any, formats: Sequence[str], sizes: Mapping[str, int], **config: Any) -> str:
    """The index of chunks of LitData, by name with their samples, whose values have this tree and these formats."""
    described = {
        "compression": None,
        "data_format": list(formats),
        "data_spec": json.dumps([1, _tree(spec)]),
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    chunks = [{"filename": name, "chunk_size": size, "chunk_bytes": 1, "dim": None} for name, size in sizes.items()]
    return json.dumps({"chunks": chunks, "config": {**described, **config}})


def _tree(spec: Any) -> dict[str, Any]:
    if isinstance(spec, dict):
        context = json.dumps(list(spec))
        return {"type": "builtins.dict", "context": context, "children_spec": [_tree(v) for v in spec.values()]}
    if isinstance(spec, (list, tuple)):
        kind = f"builtins.{type(spec).__name__}"
        return {"type": kind, "context": "null", "children_spec": [_tree(v) for v in spec]}
    return {"type": None, "context": None, "children_spec": []}
