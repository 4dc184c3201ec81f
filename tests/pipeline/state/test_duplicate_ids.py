"""Sample ids that several partitions have are found by the manifest, and said."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mm_assets.orchestration.launch import open_instance
from mm_assets.pipeline.chain import FILTERED_ROWS
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.duplicate_ids import duplicate_ids, duplicates_said
from mm_assets.pipeline.state.folder import DatasetStore

from ...e2e.loads import make_manifest
from ..chain import declare, marker_name, run_chain


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
    digests = {key: dataset.records(key)[FILTERED_ROWS].files["filtered_rows"].sha256 for key in dataset.partitions()}
    for keys in ([], ["b"]):
        assert duplicates_said(duplicate_ids(dataset, {key: digests[key] for key in keys})) == ""
    assert duplicate_ids(dataset, {key: digests[key] for key in ("a.0", "b")})["examples"] == [
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
    report = manifests.build_manifest(dataset)
    found = report.manifest["duplicate_ids"]
    assert found["count"] == 8
    assert found["examples"] == [
        {"sample_id": f"s{n}", "num_partitions": 2, "partitions": ["a.0", "c"]} for n in range(5)
    ]
    assert duplicates_said(found).startswith("8 sample ids in several partitions, 's0' in 2, a.0 and c among them")
    compared: list[list[str]] = []
    monkeypatch.setattr(
        manifests, "duplicate_ids", lambda _, keys, sizes: compared.append([*keys]) or {"count": 0, "examples": []}
    )
    assert manifests.build_manifest(dataset).digest == report.digest
    assert compared == []
    dataset.store.delete(marker_name(dataset, "b"))
    assert manifests.build_manifest(dataset).manifest["duplicate_ids"]["count"] == 0
    assert compared == [["a.0", "c"]]


def expected(partitions: dict[str, frozenset[str]]) -> dict[str, object]:
    """The same by counting."""
    keys: dict[str, list[str]] = {}
    for key in sorted(partitions):
        for sample_id in partitions[key]:
            keys.setdefault(sample_id, []).append(key)
    found = {sample_id: found for sample_id, found in sorted(keys.items()) if len(found) > 1}
    examples = [
        {"sample_id": sample_id, "num_partitions": len(found), "partitions": [found[0], found[-1]]}
        for sample_id, found in found.items()
    ]
    return {"count": len(examples), "examples": examples[:5]}


PARTITIONS = st.dictionaries(
    st.sampled_from(["a", "b'", "c.1", "d", "e", "f", "g", "h"]), st.frozensets(st.sampled_from("uvwxyz'")), max_size=8
)


@given(states=st.lists(PARTITIONS, min_size=1, max_size=7), damage=st.integers(0, 20))
@example(states=[{"a": frozenset(), "b'": frozenset("u")}, {"a": frozenset("u"), "b'": frozenset()}], damage=1)
@example(states=[{}, {"a": frozenset(), "b'": frozenset("u")}, {"a": frozenset("u"), "b'": frozenset()}], damage=2)
@settings(max_examples=40, deadline=None)
def test_partitions_that_come_change_and_go_give_what_counting_gives(
    tmp_path_factory: pytest.TempPathFactory, states: list[dict[str, frozenset[str]]], damage: int
) -> None:
    """Whatever earlier manifests kept, also in a damaged file, the ids are those of the tables as they are now."""
    dataset = DatasetStore(declare(tmp_path_factory.mktemp("ids"), "in/*.tar"))
    root = Path(dataset.store.path_of(""))
    for number, partitions in enumerate(states):
        if number == damage:
            for path in root.glob("cache/*"):
                content = path.read_bytes()
                path.write_bytes(content[:-9] if number % 2 else content[:4] + bytes(40) + content[44:])
        for key, ids in partitions.items():
            (root / "filtered_rows").mkdir(parents=True, exist_ok=True)
            rows = {"sample_id": [*ids, *ids], "position": [-1] * len(ids) + [0] * len(ids)}
            types = pa.schema([("sample_id", pa.string()), ("position", pa.int32())])
            pq.write_table(pa.table(rows, types), root / dataset.table("filtered_rows", key))
        tables = {key: f"{sorted(ids)}" for key, ids in partitions.items()}
        assert duplicate_ids(dataset, tables) == expected(partitions)


def test_ids_of_one_new_partition_are_read(tmp_path: Path) -> None:
    """A manifest reads the tables of partitions that are new since the last one, and no others."""
    dataset = DatasetStore(declare(tmp_path, "in/*.tar"))
    folder = Path(dataset.store.path_of("filtered_rows"))
    folder.mkdir(parents=True)
    tables = {}
    for number in range(20):
        pq.write_table(pa.table({"sample_id": ["x", f"{number}"], "position": [-1, -1]}), folder / f"{number}.parquet")
        tables[f"{number}"] = f"digest of {number}"
        if number >= 9:
            assert duplicate_ids(dataset, tables)["examples"][0]["num_partitions"] == number + 1
            for path in folder.glob("*.parquet"):
                path.unlink()
