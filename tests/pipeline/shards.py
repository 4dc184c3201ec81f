"""Small shards, and what the stages make of them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import mm_assets
from mm_assets.pipeline.chain import PACKED_STAGES
from mm_assets.pipeline.state.folder import DatasetStore

from .chain import stages_of, table_name

Members = Mapping[str, object]


def pixels(seed: int, size: tuple[int, int] = (8, 12)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def png(seed: int, size: tuple[int, int] = (8, 12)) -> bytes:
    target = io.BytesIO()
    Image.fromarray(pixels(seed, size)).save(target, format="PNG")
    return target.getvalue()


def tiff(*seeds: int) -> bytes:
    target = io.BytesIO()
    first, *others = (Image.fromarray(pixels(seed)) for seed in seeds)
    first.save(target, format="TIFF", save_all=True, append_images=others, compression="tiff_deflate")
    return target.getvalue()


def content_of(value: object) -> bytes:
    return (
        value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else json.dumps(value).encode()
    )


def tar_bytes(members: Members) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, value in members.items():
            content = content_of(value)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return target.getvalue()


def make_shard(path: Path, members: Members) -> Path:
    """A shard, compressed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tar_bytes(members)
    if path.name.endswith((".gz", ".tgz")):
        content = gzip.compress(content)
    elif path.name.endswith((".zst", ".tzst")):
        content = pa.Codec("zstd").compress(content, asbytes=True)
    path.write_bytes(content)
    return path


DOCUMENTS: Members = {
    "a.json": {"texts": ["one", None, "two", None], "images": [None, "t0", None, "t1"], "score": 1},
    "a.tiff": tiff(1, 2),
    "b.json": {"texts": [None, "drei"], "images": ["b.0.png", None], "score": 2},
    "b.0.png": png(3),
    "c.json": {"texts": ["no image at all"], "images": [None], "score": 3},
}
CAPTIONS: Members = {
    name: value
    for n in range(4)
    for name, value in {f"{n}.png": png(n), f"{n}.txt": f"caption {n}", f"{n}.json": {"n": n}}.items()
}


def table(dataset: DatasetStore, name: str, key: str = "s") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(dataset.store.path_of(table_name(dataset, name, key))).to_pylist()
    return rows


def packed(dataset: DatasetStore, key: str = "s", form: str = "mult") -> mm_assets.Dataset:
    return mm_assets.open(dataset.store.path_of(stages_of(dataset, key)[PACKED_STAGES[form]].files[form].path))


def values(dataset: DatasetStore, key: str = "s") -> dict[str, dict[str, Any]]:
    """What the packed files hold by sample id, the same in both; arrays as nested lists."""
    found = []
    for form in PACKED_STAGES:
        with packed(dataset, key, form) as opened:
            found.append({i: plain(opened[n]) for n, i in enumerate(opened.sample_ids)})
    assert found[0] == found[1]
    return found[0]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value.tolist() if isinstance(value, np.ndarray) else value


def drops(dataset: DatasetStore, key: str = "s") -> list[tuple[str, int, str, str]]:
    return [(d["sample_id"], d["position"], d["filter"], d["reason"]) for d in table(dataset, "dropped", key)]


def broken(members: Members, at: str) -> tuple[bytes, int]:
    """A shard whose header of the member `at` is overwritten, and where that header stands."""
    content = bytearray(tar_bytes(members))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        offset = tar.getmember(at).offset
    content[offset : offset + 512] = b"\xa5" * 512
    return bytes(content), offset
