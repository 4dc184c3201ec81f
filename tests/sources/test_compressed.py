"""Tests of compressed members, and of members that must never be unpickled."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard
from PIL import Image

import mm_assets
from mm_assets.errors import SourceError
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.sources.compressed import TooLargeError, content_name, decompress, is_compressed
from mm_assets.sources.member import split_member_name

from ..pipeline.chain import at_work, table_name
from .tars import build

COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("x.json.gz", ("x", "", "json")),
        ("a/x.state.NPY.XZ", ("a/x", "state", "npy")),
        ("x.1.jpg.bz2", ("x", "1", "jpg")),
        ("x.nii.gz", ("x", "nii", "gz")),
        ("x.pkl.gz", ("x", "pkl", "gz")),
        ("x.tar.zst", ("x", "tar", "zst")),
        ("x.gz", ("x", "", "gz")),
        ("jpg.gz", ("jpg", "", "gz")),
        (".jpg.gz", ("", "jpg", "gz")),
        ("d.jpg/x.gz", ("d.jpg/x", "", "gz")),
    ],
)
def test_names_of_compressed_members(name: str, parts: tuple[str, str, str]) -> None:
    """The extension inside counts where its modality is known; every other name is as it was."""
    assert split_member_name(name) == parts
    assert is_compressed(name) == (parts[2] != "gz" and "tar" not in parts[1])
    assert content_name("a/x.Jpg.GZ") == "a/x.Jpg"


def test_decompression_is_bounded() -> None:
    """A bomb is refused at the limit, in every format; damage, a cut and a wrong name are errors with their reason."""
    bomb = bytes(50 << 20)
    for suffix, compress in COMPRESS.items():
        name = f"x.txt.{suffix}"
        with pytest.raises(TooLargeError, match="more than 1000 bytes"):
            decompress(compress(bomb), name, 1000)
        stored = compress(b"abc" * 100)
        assert decompress(stored, name, 300) == b"abc" * 100
        with pytest.raises(TooLargeError):
            decompress(stored, name, 299)
        for cut in range(16, len(stored)):
            with pytest.raises(SourceError, match="cannot be decompressed"):
                decompress(stored[:cut], name, 300)
        with pytest.raises(SourceError, match="does not begin as gzip"):
            decompress(b"plain text", name, 300)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def png(seed: int) -> bytes:
    target = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


def run(tmp_path: Path, files: list[tuple[str, bytes]], suffix: str = ".tar", **settings: object) -> DatasetStore:
    """A dataset whose one partition went through the whole chain and passed every check."""
    stored = gzip.compress(build(files)) if suffix == ".tar.gz" else build(files)
    (tmp_path / f"s{suffix}").write_bytes(stored)
    config = {"name": "d", "shards": str(tmp_path / f"s{suffix}"), "root": str(tmp_path / "root"), "settle_seconds": 0}
    dataset = DatasetStore(DatasetSpec.from_config({**config, **settings}, where="defs.yaml"))
    register(dataset)
    results = [at_work(make, dataset, "s") for make in stages.TABLE_STAGES.values()]
    results += at_work(stages.packed, dataset, "s").values()
    assert [o.name for result in results for o in result.outcomes if not o.passed] == []
    at_work(publish.publish, dataset, "s")
    manifests.build_manifest(dataset)
    return dataset


def table(dataset: DatasetStore, name: str) -> list[dict[str, Any]]:
    return pq.read_table(dataset.store.path_of(table_name(dataset, name, "s"))).to_pylist()


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_compressed_members_are_opened(tmp_path: Path, suffix: str) -> None:
    """JSON, texts, images and arrays in four compressions become the rows and samples that plain ones are."""
    array = io.BytesIO()
    np.save(array, np.arange(6, dtype=np.float32))
    files: list[tuple[str, bytes]] = []
    for k, (name, compress) in enumerate(COMPRESS.items()):
        files += [
            (f"{k}.json.{name}", compress(json.dumps({"score": k}).encode())),
            (f"{k}.png.{name}", compress(png(k))),
        ]
        files += [(f"{k}.txt.{name}", compress(f"text {k}".encode())), (f"{k}.npy.{name}", compress(array.getvalue()))]
        files += [(f"{k}.nii.gz", b"stored as it is")]
    dataset = run(tmp_path, files, suffix, pack="generic")
    rows = table(dataset, "materialized_rows")
    assert [row["score"] for row in rows if row["modality"] == "metadata"] == [0, 1, 2, 3]
    assert [row["text_content"] for row in rows if row["modality"] == "text"] == [f"text {k}" for k in range(4)]
    images = [(row["content_type"], row["binary_content"]) for row in rows if row["modality"] == "image"]
    assert images == [("image/png", png(k)) for k in range(4)]
    assert [row["binary_content"] for row in rows if row["modality"] == "array"] == [array.getvalue()] * 4
    assert [row["binary_content"] for row in rows if row["modality"] == "binary"] == [b"stored as it is"] * 4
    member = json.loads(next(row["source_ref"] for row in rows if row["modality"] == "image"))
    assert member["member"] == "0.png.gz"
    if suffix == ".tar":  # the locator is that of the stored bytes
        stored = (tmp_path / "s.tar").read_bytes()[member["byte_offset"] :][: member["byte_size"]]
        assert gzip.decompress(stored) == png(0)
    assert len(mm_assets.open(dataset.store.path_of("manifest.json"))) == 4


def test_what_is_wrong_with_a_compressed_member(tmp_path: Path) -> None:
    """A member that cannot be decompressed costs itself: a text is rejected, media has the error on its row."""
    files = [
        ("a.txt.gz", b"not compressed"), ("a.png.gz", gzip.compress(png(1))[:-9]), ("a.jpg", png(2)),
        ("b.txt.gz", gzip.compress(bytes(5000))), ("b.png.gz", gzip.compress(bytes(5000))), ("b.jpg", png(3)),
    ]  # fmt: skip
    dataset = run(tmp_path, files, max_content_bytes=4000, samples={"max_text_bytes": 4000}, pack="generic")
    rejects = {row["member"]: row["reason"] for row in table(dataset, "rejects")}
    assert rejects == {"a.txt.gz": "bad_compression", "b.txt.gz": "too_large"}
    errors = {
        row["sample_id"]: row["materialize_error"]
        for row in table(dataset, "materialized_rows")
        if row["position"] == 0
    }
    assert "cannot be decompressed" in errors["a"]
    assert "more than 4000 bytes" in errors["b"]


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    """Members that other libraries unpickle are bytes, through the whole chain and when they are read; cls is text."""
    trap = tmp_path / "sprung"
    bad = pickle.dumps(Trap(trap))
    array = io.BytesIO()
    np.save(array, np.array([Trap(trap)], dtype=object), allow_pickle=True)
    names = ["pyd", "pickle", "pkl", "pth", "pt", "pkl.gz"]
    files = [(f"a.{name}", bad) for name in names] + [
        ("a.cls", b"7"),
        ("a.npy", array.getvalue()),
        ("b.npy.gz", gzip.compress(array.getvalue())),
    ]
    dataset = run(tmp_path, files, pack="generic", on_materialize_error="keep")
    rows = [row for row in table(dataset, "materialized_rows") if row["position"] >= 0]
    assert [(r["modality"], r["binary_content"]) for r in rows if r["modality"] == "binary"] == [("binary", bad)] * 6
    assert [r["text_content"] for r in rows if r["modality"] == "text"] == ["7"]
    with mm_assets.open(dataset.store.path_of("manifest.json")) as packed:
        for sample in packed:
            dict(sample)
    assert not trap.exists()
    pickle.loads(bad)  # the trap works
    assert trap.exists()
