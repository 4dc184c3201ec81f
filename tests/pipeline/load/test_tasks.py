"""A load without Dagster: what it runs, and what its manifest lists."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from mm_assets.errors import SourceError
from mm_assets.pipeline.chain import FILTERED_ROWS
from mm_assets.pipeline.load import engine, tasks
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.load.tasks import ClaimedWork, LoadEnd, PartitionRun, load_partitions
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.partition.stage_run import StageResult
from mm_assets.pipeline.state.claims import Claim, Claims
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import StageFailure
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.storage.retry import STORAGE
from mm_assets.storage.store import Store

from ..chain import declare, record_name, record_of, run_chain, table_name
from ..shards import CAPTIONS, make_shard


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    """A dataset of two shards, published and in a manifest."""
    folder = tmp_path_factory.mktemp("loaded")
    for name in "ab":
        make_shard(folder / "in" / f"{name}.tar", {f"{name}{member}": text for member, text in CAPTIONS.items()})
    return run_chain(declare(folder / "root", folder / "in"))[0]


@pytest.fixture
def dataset(loaded: DatasetStore, tmp_path: Path) -> DatasetStore:
    """A copy of it."""
    shutil.copytree(loaded.spec.root, tmp_path / "root")
    return DatasetStore(loaded.spec.replace(root=str(tmp_path / "root")))


@pytest.fixture
def remote(loaded: DatasetStore) -> Iterator[DatasetStore]:
    """A copy of it in a store that is not local."""
    memory = fsspec.filesystem("memory")
    memory.put(loaded.spec.root, "/copy", recursive=True)
    yield DatasetStore(loaded.spec.replace(root="memory://copy"))
    memory.store.clear()


def load(dataset: DatasetStore) -> tuple[LoadEnd, dict[str, bool]]:
    """Runs what is pending; returns the end of the load, and by key whether each partition that ran was published."""
    state, reports = DatasetState(dataset), list[PartitionReport]()
    with Processes(0) as processes, Claims(dataset, "load") as claims:
        end = load_partitions(
            state, state.pending, claims=claims, engine=processes, ended=reports.append, built=lambda _: None
        )
    ended = {report.partition: report.ok for report in reports}
    assert len(ended) == len(reports), "each runs once"
    return end, ended


@pytest.mark.parametrize("damage", ["missing", "truncated", "table", "record"])
def test_a_load_rebuilds_what_is_missing(dataset: DatasetStore, damage: str) -> None:
    """Without anything pending, a partition that lacks a published file runs in that load, and is in its manifest."""
    store, before, record = dataset.store, DatasetState(dataset), record_of(dataset, "b")
    assert record is not None
    path = table_name(dataset, "rows", "b") if damage == "table" else record.packed["mult"].path
    content = store.read_bytes(path)
    store.delete(path)
    if damage == "truncated":
        store.write_bytes(path, content[:-1])
    if damage == "record":
        store.write_bytes(record_name(dataset, "b"), b"{")
    end, ended = load(dataset)
    assert (ended, list(end.rebuilt)) == ({"b": True}, ["b"])
    assert end.manifest is not None
    assert (end.manifest.left_out, end.manifest.digest) == ({}, before.digest)
    assert store.read_bytes(path) == content
    end, ended = load(dataset)
    assert (ended, end.rebuilt) == ({}, {})


def test_a_load_reports_a_damaged_manifest_that_it_replaces(dataset: DatasetStore) -> None:
    """With nothing pending, a damaged `manifest.json` is written again with the same content, and a line says so."""
    state, lines = DatasetState(dataset), list[str]()
    content = dataset.store.read_bytes("manifest.json")
    dataset.store.write_bytes("manifest.json", content[:-9])
    with Processes(0) as processes, Claims(dataset, "load") as claims:
        load_partitions(state, (), claims=claims, engine=processes, built=lambda _: None, report=lines.append)
    assert lines == ["manifest.json was damaged: it was written again"]
    assert dataset.store.read_bytes("manifest.json") == content


def test_a_load_from_a_bucket_rebuilds_what_is_missing(remote: DatasetStore) -> None:
    """Packed files in an object store are looked for whenever a manifest is built, and not if nothing is pending."""
    record = record_of(remote, "b")
    assert record is not None
    remote.store.delete(record.packed["mstr"].path)
    end, ended = load(remote)
    assert (ended, end.rebuilt) == ({}, {})
    remote.store.delete(record_name(remote, "a"))
    end, ended = load(remote)
    assert (ended, list(end.rebuilt)) == ({"a": True, "b": True}, ["b"])
    assert remote.store.exists(record.packed["mstr"].path)


def test_a_load_of_others_rebuilds_what_is_missing(dataset: DatasetStore) -> None:
    """A load that has other partitions to run finds the lost file too; both are in its manifest."""
    lost = table_name(dataset, "rows", "a")
    dataset.store.delete(lost)
    dataset.store.delete(record_name(dataset, "b"))
    end, ended = load(dataset)
    assert list(ended.items()) == [("b", True), ("a", True)]
    assert lost in end.rebuilt["a"]
    assert end.manifest is not None
    assert list(end.manifest.state.listed) == ["a", "b"]


def test_files_that_are_not_published_are_reported(dataset: DatasetStore) -> None:
    """A run that was asked for again cannot replace what the same settings published, and says what can."""
    record = record_of(dataset, "a")
    assert record is not None
    stage = record.stages[FILTERED_ROWS]
    files = {name: replace(file, sha256="0" * 64) for name, file in stage.files.items()}
    for made, warnings in ((stage, 0), (replace(stage, files=files), 1)):
        results = {FILTERED_ROWS.name: StageResult.of_record(made, dataset.store)}
        run = PartitionRun.of("data", PartitionReport(partition="a", results=results, record=record))
        assert run.ok
        assert run.records == record.stages
        assert len([line for line in run.warnings if "filtered_rows: the files that this run made" in line]) == warnings


@pytest.mark.parametrize("num_faults", [len(STORAGE.pauses), len(STORAGE.pauses) + 1])
def test_a_load_that_waits_outlasts_a_storage_that_fails_for_a_moment(
    dataset: DatasetStore, num_faults: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again after the pauses of partitions that the storage failed, and fails after the last of them."""
    dataset.store.delete(record_name(dataset, "a"))
    state, pauses = DatasetState(dataset), list[float]()
    with Claims(dataset, "other") as other, Claims(dataset, "load") as claims:
        other.take(["a"])
        others = claims.others

        def failing() -> list[Claim]:
            if not pauses:  # the load takes its own claim
                return others()
            if len(pauses) < 2 * num_faults:
                raise SourceError("claims", "cannot be listed") from ConnectionError()
            other.release()
            return others()

        monkeypatch.setattr(claims, "others", failing)
        work = ClaimedWork(state, ["a"], claims, sleep=pauses.append)
        run = work.run(lambda tasks: (PartitionReport(partition=task.partition.key) for task in tasks))
        if num_faults > len(STORAGE.pauses):
            with pytest.raises(SourceError, match="cannot be listed"):
                list(run)
        else:
            assert [report.partition for report in run] == ["a"]
    waits = [pause for pause in pauses if pause >= min(STORAGE.pauses)]
    assert all(least <= pause for pause, least in zip(waits, STORAGE.pauses, strict=True))


@pytest.mark.parametrize("is_large", [False, True])
def test_a_load_that_waits_asks_for_little(
    dataset: DatasetStore, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a load waits for few partitions it lists no records, and for many the seldomer the more there are."""
    if is_large:
        monkeypatch.setattr(tasks, "_FEW", 0)
        monkeypatch.setattr(tasks, "_MAX_LISTED_PER_SECOND", 0.1)
    content = dataset.store.read_bytes(name := record_name(dataset, "a"))
    dataset.store.delete(name)
    state, pauses = DatasetState(dataset), list[float]()
    listed: list[str] = []
    listing = Store.listing
    monkeypatch.setattr(Store, "listing", lambda self, folder, **k: listed.append(folder) or listing(self, folder, **k))

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            dataset.store.write_bytes(name, content)

    with Claims(dataset, "other") as other, Claims(dataset, "load") as claims:
        other.take(["a"])
        (report,) = ClaimedWork(state, ["a"], claims, sleep=sleep).run(lambda _: iter(()))
    assert report.claimed_by
    assert report.record is not None
    assert pauses == ([20.0] * 2 if is_large else [2.0] * 2)
    assert listed.count("records") == (2 if is_large else 0)


def test_a_partition_that_cannot_be_rebuilt_fails_once(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported as failed, and the manifest has the others."""

    def fail(*_: object, **__: object) -> Iterator[PartitionReport]:
        yield PartitionReport(
            partition="a", failure=StageFailure(partition="a", stage="rows", detail="the shard is damaged")
        )

    monkeypatch.setattr(engine, "partition_steps", fail)
    dataset.store.delete(table_name(dataset, "rows", "a"))
    end, ended = load(dataset)
    assert ended == {"a": False}
    assert end.manifest is not None
    assert list(end.manifest.state.listed) == ["b"]
    assert list(end.manifest.left_out) == ["a"]
