"""The unit of work of a load: a partition from shard to marker, without Dagster."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path

import pytest

from mm_assets.pipeline.chain import RAW_SHARDS, RECORDED_STAGES, TABLES
from mm_assets.pipeline.partition.run import partition_steps, run_partition
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions

from ..chain import declare, marker_name, marker_of
from ..state.test_losses import jpeg, write_tar


def test_a_partition_is_published_and_reported(tmp_path: Path) -> None:
    """The report has the marker and every stage's record, in a form that a process can send."""
    write_tar(tmp_path / "a.tar", {"0.jpg": jpeg(), "0.txt": b"a cat"})
    dataset = DatasetStore(declare(tmp_path / "out", tmp_path / "*.tar"))
    register(dataset)
    sent = pickle.dumps(run_partition(dataset.spec, dataset.partition("a"), dataset.schema()))
    assert len(sent) < 50_000
    report = pickle.loads(sent)
    assert report.ok
    assert report.marker == marker_of(dataset, "a")
    assert {name: result.record.to_json() for name, result in report.results.items()} == {
        stage.name: record.to_json() for stage, record in dataset.records("a").items()
    }
    assert pending_partitions(dataset) == []
    assert report.failure is None
    assert report.seconds > 0
    assert report.peak_memory > 1 << 20


def test_an_error_is_reported_and_stored(tmp_path: Path) -> None:
    """An error ends the run of its partition, names stage and file, and is not raised."""
    write_tar(tmp_path / "a.tar", {"0.jpg": jpeg(), "0.txt": b"a cat"})
    dataset = DatasetStore(declare(tmp_path / "out", tmp_path / "*.tar"))
    register(dataset)
    (tmp_path / "a.tar").unlink()
    report = run_partition(dataset.spec, dataset.partition("a"), dataset.schema())
    assert not report.ok
    assert report.failure is not None
    assert report.failure.stage == "raw_shards"
    assert report.failure.path == str(tmp_path / "a.tar")
    assert report.failure == dataset.failure("a")
    assert report.results == {}


def test_the_collector_of_the_process_is_as_before(tmp_path: Path) -> None:
    """A run looks for reference cycles after 20,000 new objects, and leaves the process as it was, whatever happens."""
    write_tar(tmp_path / "a.tar", {"0.jpg": jpeg(), "0.txt": b"a cat"})
    dataset = DatasetStore(declare(tmp_path / "out", tmp_path / "*.tar"))
    register(dataset)
    before = gc.get_threshold()
    found = [gc.get_threshold()[0] for _ in partition_steps(dataset.spec, dataset.partition("a"), dataset.schema())]
    assert before[0] < 20_000
    assert len(found) > 5
    assert min(found[:-1]) >= 20_000  # the last is the report
    assert gc.get_threshold() == before

    (tmp_path / "a.tar").unlink()
    assert not run_partition(dataset.spec, dataset.partition("a"), dataset.schema(), first=RAW_SHARDS).ok
    assert gc.get_threshold() == before


def test_each_file_and_folder_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the marker names, and the folders it is in, wait for the disk once, before the marker does."""
    write_tar(tmp_path / "a.tar", {"0.jpg": jpeg(), "0.txt": b"a cat"})
    dataset = DatasetStore(declare(tmp_path / "out", tmp_path / "*.tar"))
    register(dataset)
    synced: list[Path] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(dataset.store.url))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    assert run_partition(dataset.spec, dataset.partition("a"), dataset.schema()).ok
    folders = [*TABLES, "packed", "records", "published"]
    files = [*(f"{table}/.a.parquet.tmp" for table in TABLES), "packed/.a.mult.tmp", "packed/.a.mstr.tmp"]
    records = ["records/.a.json.tmp"] * len(RECORDED_STAGES)  # a new version after each stage
    marker = "published/." + marker_name(dataset, "a").removeprefix("published/") + ".tmp"
    assert sorted(map(str, synced)) == sorted([*folders, *files, *records, marker])
    assert list(map(str, synced[-2:])) == [marker, "published"]
