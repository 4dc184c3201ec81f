"""A load: one run for many partitions, recorded in Dagster as the job of one partition records it."""

import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from mm_assets.cli.main import main
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset
from mm_assets.pipeline.chain import CHAIN
from mm_assets.pipeline.load.driver import run_tasks
from mm_assets.pipeline.load.engine import Task
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.shards import make_shard
from .loads import pack, run_partitions

SpecOf = Callable[..., DatasetSpec]
Inbox = Callable[..., Path]
DIFFERENT = ("seconds", "check_seconds", "throughput_mb_per_s")


def copies(inbox: Inbox, names: str) -> Path:
    """A folder with a copy of one shard under each name."""
    folder = inbox("captions-00000.tar")
    for name in names:
        shutil.copy(folder / "captions-00000.tar", folder / f"{name}.tar")
    (folder / "captions-00000.tar").unlink()
    return folder


def facts(instance: dg.DagsterInstance, spec: DatasetSpec, partition: str) -> dict[str, Any]:
    """What Dagster knows of a partition: each asset's metadata and tags, and its check results."""
    found: dict[str, Any] = {}
    for stage in CHAIN[:-1]:
        key = dg.AssetKey([spec.name, stage.name])
        events = instance.fetch_materializations(dg.AssetRecordsFilter(key, asset_partitions=[partition]), limit=1)
        (record,) = events.records
        made = record.asset_materialization
        assert made is not None
        metadata = {name: value for name, value in made.metadata.items() if name not in DIFFERENT}
        tags = {name: value for name, value in made.tags.items() if "event_pointer" not in name}
        found[stage.name] = metadata, tags
    return found


def test_a_load_records_what_the_job_of_one_partition_records(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox
) -> None:
    """Metadata, data versions, tags and check results are equal; a load is one run, and nothing is stale after it."""
    spec = demo_spec("captions", shards=str(copies(inbox, "ab")))
    register_dataset(instance, DatasetStore(spec))
    assert all(run.ok for run in run_partitions([(spec, "a"), (spec, "b")], num_processes=2))
    (run,) = instance.get_runs()
    loaded = facts(instance, spec, "a")
    recorded = evaluations(instance, run.run_id, "a")
    resolver = CachingStaleStatusResolver(
        instance, build_definitions(spec).resolve_asset_graph(), LoadingContextForTest(instance)
    )
    for stage in CHAIN[:-1]:
        assert resolver.get_status(dg.AssetKey(["captions", stage.name]), "a").value == "FRESH", stage.name
    packed = pack(instance, spec, "a")
    assert packed.success
    assert facts(instance, spec, "a") == loaded
    assert evaluations(instance, packed.run_id, "a") == recorded
    checks = list(build_definitions(spec).resolve_asset_graph().asset_check_keys)
    known = instance.event_log_storage.get_asset_check_partition_info(checks)
    assert [found for found in known if not found.is_current] == []
    assert {found.partition_key for found in known} == {"a", "b", None}
    assert len(recorded) >= 10


def evaluations(instance: dg.DagsterInstance, run_id: str, partition: str) -> dict[tuple[str, ...], Any]:
    """The check results that a run recorded of a partition."""
    found = {}
    for event in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION):
        made = event.get_dagster_event().asset_check_evaluation_data
        if made.partition == partition:
            facts = (made.passed, made.severity, made.description, made.metadata, made.blocking)
            found[(*made.asset_key.path, made.check_name)] = facts
    return found


def test_a_worker_that_dies_before_its_task_is_replaced(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox
) -> None:
    """A worker that is killed when it was just started costs no partition, and the next one takes its task."""
    spec = demo_spec("captions", shards=str(copies(inbox, "ab")))
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    schema = dataset.schema()
    tasks = [Task(spec=spec, schema=schema, partition=partition) for partition in dataset.partitions().values()]
    killed: list[int] = []

    class Killing(Processes):
        num_submitted = 0

        def submit(self, tasks: Sequence[Task]) -> None:
            if self.num_submitted == 1:  # the first worker is importing
                (worker,) = multiprocessing.active_children()
                os.kill(worker.pid or 0, signal.SIGKILL)
                killed.append(worker.pid or 0)
            self.num_submitted += 1
            super().submit(tasks)

    with Killing(2) as processes:
        reports = {r.partition: r for r in run_tasks(processes, tasks)}
    assert killed
    assert [reports["a"].ok, reports["b"].ok] == [True, True]


def test_the_run_that_decides_the_schema_notes_what_does_not_fit_it(
    instance: dg.DagsterInstance, inbox: Inbox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition without the images of those that decided the schema has a note, also in the run that decided it."""
    monkeypatch.setattr("mm_assets.pipeline.state.schema_inference.MAX_SHARDS", 2)
    monkeypatch.setattr("mm_assets.pipeline.state.schema_inference.MAX_TRIED", 2)
    shards = copies(inbox, "ac")
    make_shard(shards / "b.tar", {f"{n}.txt": "words" for n in range(3)})
    given = ["run", "--shards", f"{shards}/*.tar", "--set", "settle_seconds=0", "--root", str(root), "--dataset", "d"]
    done = CliRunner().invoke(main, given, catch_exceptions=False)
    assert done.exit_code == 0
    assert "d/b: none of 3 packed samples has 'image', which 80 of 80 had when the schema was decided" in done.stderr


def test_a_long_summary_has_totals(
    instance: dg.DagsterInstance, inbox: Inbox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many partitions `run` prints one row with the sums of those that ran."""
    monkeypatch.setattr("mm_assets.cli.run_summary.MAX_ROWS", 1)
    shards = f"{copies(inbox, 'ab')}/*.tar"

    def invoke(*arguments: str) -> Any:
        done = CliRunner().invoke(main, [*arguments, "--root", str(root), "--dataset", "many"], catch_exceptions=False)
        assert done.exit_code == 0
        return done

    given = ("run", "--shards", shards, "--set", "settle_seconds=0")
    (row,) = [line for line in invoke(*given).stdout.splitlines() if line.startswith("│ many")]
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["2", "2 done", "240", "240"]
    assert re.match(r"0 partitions run in [\d.]+ s; 2 partitions unchanged\n", invoke(*given).stdout)
