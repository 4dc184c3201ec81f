"""Sample ids that several partitions have are found by the manifest, and said."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from mm_assets.orchestration.launch import open_instance
from mm_assets.pipeline import publish
from mm_assets.pipeline.duplicate_ids import duplicate_ids, duplicates_said
from mm_assets.pipeline.store import DatasetStore

from ..e2e.loads import make_manifest
from .chain import declare, marker_name, run_chain


def write_shard(path: Path, ids: list[str]) -> None:
    with tarfile.open(path, "w") as tar:
        for sample_id in ids:
            info = tarfile.TarInfo(f"{sample_id}.txt")
            info.size = len(sample_id)
            tar.addfile(info, io.BytesIO(sample_id.encode()))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    """Three partitions, of which all have `x`, and two have seven more ids in common."""
    tmp_path = tmp_path_factory.mktemp("dataset")
    shards = tmp_path / "a=1"  # not a Hive partition
    shards.mkdir()
    shared = [f"s{n}" for n in range(7)]
    for name, ids in {"a.0": ["a", "x", *shared], "b": ["b", "x"], "c": [*shared, "x"]}.items():
        write_shard(shards / f"{name}.tar", ids)
    dataset, _ = run_chain(declare(tmp_path / "k=v", shards / "*.tar"))
    return dataset


def test_partitions_without_common_ids_say_nothing(dataset: DatasetStore) -> None:
    """One partition, or none, has nothing in common with another."""
    for keys in ([], ["b"]):
        assert duplicates_said(duplicate_ids(dataset, keys)) == ""
    assert duplicate_ids(dataset, ["a.0", "b"])["examples"] == [
        {"sample_id": "x", "num_partitions": 2, "partitions": ["a.0", "b"]}
    ]


def test_the_check_of_the_manifest_warns(dataset: DatasetStore, tmp_path: Path, monkeypatch) -> None:
    """The manifest's run succeeds, and its warning names the check, an id and its partitions."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    with open_instance():
        made = make_manifest(dataset.spec)
    assert made.ok
    (line,) = made.warnings
    assert line.startswith("manifest: check unique_ids: 8 sample ids in several partitions, 's0' in 2")


def test_ids_in_several_partitions_are_counted_with_examples(dataset: DatasetStore, monkeypatch) -> None:
    """The manifest has their number and the first five; it compares them again only where partitions changed."""
    report = publish.build_manifest(dataset)
    found = report.manifest["duplicate_ids"]
    assert found["count"] == 8
    assert found["examples"] == [
        {"sample_id": f"s{n}", "num_partitions": 2, "partitions": ["a.0", "c"]} for n in range(5)
    ]
    assert duplicates_said(found).startswith("8 sample ids in several partitions, 's0' in 2, a.0 and c among them")
    compared: list[list[str]] = []
    monkeypatch.setattr(publish, "duplicate_ids", lambda _, keys: compared.append(keys) or {"count": 0, "examples": []})
    assert publish.build_manifest(dataset).digest == report.digest
    assert compared == []
    dataset.store.delete(marker_name(dataset, "b"))
    assert publish.build_manifest(dataset).manifest["duplicate_ids"]["count"] == 0
    assert compared == [["a.0", "c"]]
