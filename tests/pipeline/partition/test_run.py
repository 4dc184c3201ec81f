"""The unit of work of a load: a partition from shard to record, without Dagster."""

from __future__ import annotations

import gc
import os
import pickle
import re
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mm_assets.errors import SourceError
from mm_assets.filters.base import Block
from mm_assets.filters.text import TextLengthFilter
from mm_assets.pipeline.chain import MATERIALIZED_ROWS, RAW_SHARDS, RECORDED_STAGES, TABLES
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.partition.run import partition_steps, rare_collections
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions
from mm_assets.rows.schema import Drop
from mm_assets.storage.store import Store

from ..chain import at_work, declare, record_name, record_of, run_once, stages_of
from ..state.test_losses import jpeg, write_tar


def test_a_partition_is_published_and_reported(tmp_path: Path) -> None:
    """The report has the record of the partition and of every stage, in a form that a process can send."""
    write_tar(tmp_path / "a.tar", {"0.jpg": jpeg(), "0.txt": b"a cat"})
    dataset = DatasetStore(declare(tmp_path / "out", tmp_path / "*.tar"))
    register(dataset)
    sent = pickle.dumps(run_once(dataset.spec, dataset.partition("a"), dataset.schema()))
    assert len(sent) < 50_000
    report = pickle.loads(sent)
    assert report.ok
    assert report.record.to_bytes() == record_of(dataset, "a").to_bytes()
    assert {name: result.record.to_json() for name, result in report.results.items()} == {
        stage.name: record.to_json() for stage, record in stages_of(dataset, "a").items()
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
    report = run_once(dataset.spec, dataset.partition("a"), dataset.schema())
    assert not report.ok
    assert report.failure is not None
    assert report.failure.stage == "raw_shards"
    assert report.failure.path == str(tmp_path / "a.tar")
    assert report.failure == dataset.attempt("a").failure
    assert report.results == {}


def test_an_error_of_a_filter_keeps_the_rows_that_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are filtered while they are materialized; if a filter fails, the next run starts at the filters."""
    write_tar(tmp_path / "a.tar", {f"{n:02}.txt": b"word " * 20_000 for n in range(30)})
    settings = {"filters": [{"type": "text_length", "min_words": 1}], "batch_bytes": 1 << 16, "pack": "generic"}
    dataset = DatasetStore(declare(tmp_path / "out", tmp_path / "*.tar", **settings))
    register(dataset)

    def failing(self: TextLengthFilter, block: Block) -> list[Drop]:
        if "07" in block.column("sample_id").to_pylist():
            raise ZeroDivisionError
        return []

    with monkeypatch.context() as patch:
        patch.setattr(TextLengthFilter, "judge", failing)
        report = run_once(dataset.spec, dataset.partition("a"), dataset.schema())
    assert report.failure is not None
    assert report.failure.stage == "filtered_rows"
    assert "ZeroDivisionError on sample '07'" in report.failure.detail
    assert [*report.results] == ["raw_shards", "rows", "materialized_rows"]
    assert dataset.attempt("a").stages[MATERIALIZED_ROWS].counts["rows"] == 60
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sha256")]
    report = run_once(dataset.spec, dataset.partition("a"), dataset.schema())
    assert report.ok
    assert next(iter(report.results)) == "filtered_rows"


def test_an_error_before_the_first_stage_keeps_what_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run reuses the stages of the attempt before, which a run that never began does not replace."""
    write_tar(tmp_path / "a.tar", {"0.jpg": jpeg(), "0.txt": b"a cat"})
    dataset = DatasetStore(declare(tmp_path / "out", tmp_path / "*.tar"))
    register(dataset)
    at_work(stages.raw_shards, dataset, "a")
    before = dataset.attempt("a")
    assert list(before.stages) == [RAW_SHARDS]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    report = run_once(dataset.spec, dataset.partition("a"), dataset.schema())
    assert report.failure is not None
    assert dataset.attempt("a") == replace(before, failure=report.failure)


def test_an_attempt_that_cannot_be_removed_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition is published by its record; what may not be deleted is left to `clean`."""
    write_tar(tmp_path / "a.tar", {"0.jpg": jpeg(), "0.txt": b"a cat"})
    dataset = DatasetStore(declare(tmp_path / "out", tmp_path / "*.tar"))
    register(dataset)

    def refuse(_: Store, name: str) -> None:
        raise SourceError(name, "cannot be deleted: access denied")

    monkeypatch.setattr(Store, "delete", refuse)
    assert run_once(dataset.spec, dataset.partition("a"), dataset.schema()).ok
    assert pending_partitions(dataset) == []


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
    assert not run_once(dataset.spec, dataset.partition("a"), dataset.schema(), first=RAW_SHARDS).ok
    assert gc.get_threshold() == before


def test_the_collector_is_as_before_when_the_last_block_ends() -> None:
    """Blocks of several threads, and of generators that are finished late, overlap in any order."""
    before = gc.get_threshold()
    blocks = [rare_collections() for _ in range(3)]
    for block in blocks:
        block.__enter__()
    for block in blocks:
        assert gc.get_threshold()[0] >= 20_000
        block.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_each_file_and_folder_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the record names, and the folders it is in, wait for the disk once, before the record does."""
    write_tar(tmp_path / "a.tar", {"0.jpg": jpeg(), "0.txt": b"a cat"})
    dataset = DatasetStore(declare(tmp_path / "out", tmp_path / "*.tar"))
    register(dataset)
    synced: list[Path] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(dataset.store.url))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    assert run_once(dataset.spec, dataset.partition("a"), dataset.schema()).ok
    names = [re.sub(r"\.\d+-[0-9a-f]{8}\.tmp$", ".tmp", str(path)) for path in synced]
    folders = [*TABLES, "packed", "records"]
    # Nothing was dropped: `filtered_rows` is another name of the file of `materialized_rows`.
    files = [
        *(f"{table}/.a.parquet.tmp" for table in TABLES if table != "filtered_rows"),
        "packed/.a.mult.tmp",
        "packed/.a.mstr.tmp",
    ]
    attempts = ["attempts/.a.json.tmp"] * len(RECORDED_STAGES)  # after each stage
    record = "records/." + record_name(dataset, "a").removeprefix("records/") + ".tmp"
    parents = ["."] * len([*folders, "attempts"])  # of each new folder
    assert sorted(names) == sorted([*parents, *folders, *files, *attempts, record])
    assert names[-2:] == [record, "records"]
