"""Sample ids that several partitions have are counted by the manifest."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mm_assets.dataset.manifest import file_path
from mm_assets.orchestration.launch import open_instance
from mm_assets.orchestration.recorded_load import run_load
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.duplicate_ids import duplicate_ids, format_duplicates
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState

from ..chain import declare, record_name, run_chain, run_partition


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
    files = {key: entry.tables["filtered_rows"] for key, entry in DatasetState(dataset).listed.items()}
    for keys in ([], ["b"]):
        assert format_duplicates(duplicate_ids(dataset, {key: files[key] for key in keys})) == ""
    assert duplicate_ids(dataset, {key: files[key] for key in ("a.0", "b")})["examples"] == [
        {"sample_id": "x", "num_partitions": 2, "partitions": ["a.0", "b"]}
    ]


def test_the_check_of_the_manifest_warns(
    dataset: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load's warning names the check, an id and its partitions."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    with open_instance(), Processes() as processes:
        made = run_load(dataset.spec, [], engine=processes)
    assert made.ok
    (line,) = made.warnings
    assert line.startswith("manifest: check unique_ids: 8 sample ids in several partitions, 's0' in 2")


def test_ids_in_several_partitions_are_counted_with_examples(dataset: DatasetStore) -> None:
    """The manifest has their number and the first five, of the partitions that it lists."""
    report = manifests.build_manifest(dataset)
    found = report.manifest["duplicate_ids"]
    assert found["count"] == 8
    assert found["examples"] == [
        {"sample_id": f"s{n}", "num_partitions": 2, "partitions": ["a.0", "c"]} for n in range(5)
    ]
    assert format_duplicates(found).startswith("8 sample ids in several partitions, 's0' in 2, a.0 and c among them")
    assert manifests.build_manifest(dataset).digest == report.digest
    dataset.store.delete(record_name(dataset, "b"))
    report = manifests.build_manifest(dataset)
    assert report.manifest["duplicate_ids"]["count"] == 8
    dataset.store.delete(record_name(dataset, "c"))
    assert manifests.build_manifest(dataset).manifest["duplicate_ids"] == {"count": 0, "examples": []}


def write_ids(root: Path, key: str, ids: list[str]) -> tuple[int, str]:
    """Writes the table of a partition with two rows for each sample; returns its size and digest."""
    rows = {"sample_id": [*ids, *ids], "position": [-1] * len(ids) + [0] * len(ids)}
    types = pa.schema([("sample_id", pa.string()), ("position", pa.int32())])
    pq.write_table(pa.table(rows, types), content := io.BytesIO())
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    path = root / file_path("filtered_rows", key, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.getvalue())
    return len(content.getvalue()), digest


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
        files = {key: write_ids(root, key, sorted(ids)) for key, ids in partitions.items()}
        assert duplicate_ids(dataset, files) == expected(partitions)


def test_ids_of_one_new_partition_are_read(tmp_path: Path) -> None:
    """A manifest reads the tables of partitions that are new since the last one, and no others."""
    dataset = DatasetStore(declare(tmp_path, "in/*.tar"))
    root, files = Path(dataset.store.path_of("")), {}
    for number in range(20):
        files[f"{number}"] = write_ids(root, f"{number}", ["x", f"id {number}"])
        if number >= 9:
            assert duplicate_ids(dataset, files)["examples"][0]["num_partitions"] == number + 1
            for path in root.glob("filtered_rows/*"):
                path.unlink()


@given(partitions=PARTITIONS, unique=st.sets(st.sampled_from(["a", "b'", "c.1", "d", "e", "f", "g", "h"])))
@settings(max_examples=30, deadline=None)
def test_ids_of_partitions_that_are_known_to_be_unique_are_not_compared(
    tmp_path_factory: pytest.TempPathFactory, partitions: dict[str, frozenset[str]], unique: set[str]
) -> None:
    """Without the ids of unique partitions among themselves the duplicates are the same."""
    dataset = DatasetStore(declare(tmp_path_factory.mktemp("ids"), "in/*.tar"))
    seen: set[str] = set()
    for key in sorted(unique & partitions.keys()):  # makes it true that no two of them have an id in common
        partitions[key] -= seen
        seen |= partitions[key]
    files = {}
    for key, ids in partitions.items():
        with dataset.store.draft("filtered_rows/new.parquet") as draft:
            types = pa.schema([("sample_id", pa.string()), ("position", pa.int32())])
            pq.write_table(pa.table({"sample_id": [*ids], "position": [-1] * len(ids)}, types), draft.path)
            draft.name = file_path("filtered_rows", key, draft.digest())
        files[key] = draft.result().size, draft.result().sha256
    for _ in ("of the tables", "of the cache"):
        assert duplicate_ids(dataset, files, unique=unique) == expected(partitions)


def test_a_count_outlives_manifests_that_a_load_makes_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name the new partitions, and at the end the ids of these alone are compared with the others."""
    (tmp_path / "in").mkdir()

    def add(key: str) -> None:
        write_shard(tmp_path / "in" / f"{key}.tar", [key, "x"] if key in "ad" else [key])
        register(dataset)
        run_partition(dataset, key)

    dataset = DatasetStore(declare(tmp_path / "root", tmp_path / "in" / "*.tar"))
    add("a")
    add("b")
    assert manifests.build_manifest(dataset).manifest["duplicate_ids"]["count"] == 0
    for key in "cd":
        add(key)
        report = manifests.build_manifest(dataset, counts_duplicates=False)
        assert manifests.current_manifest(report.state) is None
    assert report.manifest["duplicate_ids"] == {"count": 0, "examples": [], "uncounted": ["c", "d"]}
    compared = []

    def count(dataset: DatasetStore, files: Mapping[str, tuple[int, str]], *, unique: set[str]) -> object:
        compared.append(unique)
        return duplicate_ids(dataset, files, unique=unique)

    monkeypatch.setattr(manifests, "duplicate_ids", count)
    found = manifests.build_manifest(dataset).manifest["duplicate_ids"]
    assert (found["count"], compared) == (1, [{"a", "b"}])
    assert "uncounted" not in found
