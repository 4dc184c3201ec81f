"""What Dagster knows of a load: partitions that failed, databases that go away, and events that are stored once."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy.exc
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.partition_status_cache import AssetPartitionStatus
from dagster._core.storage.runs import SqliteRunStorage

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset
from mm_assets.orchestration.partitions import shard_partitions
from mm_assets.orchestration.runs import failed_attempts, partition_fingerprints, partition_lock
from mm_assets.pipeline.chain import CHAIN
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore

from .loads import pack, run_partitions

SpecOf = Callable[..., DatasetSpec]
Inbox = Callable[..., Path]


def copies(inbox: Inbox, names: str) -> Path:
    """A folder with a copy of one shard under each name."""
    folder = inbox("captions-00000.tar")
    for name in names:
        shutil.copy(folder / "captions-00000.tar", folder / f"{name}.tar")
    (folder / "captions-00000.tar").unlink()
    return folder


def statuses(instance: dg.DagsterInstance, spec: DatasetSpec, partition: str) -> dict[str, str]:
    """By stage, what Dagster shows of a partition; stages of which it shows nothing are left out."""
    found = {}
    for stage in CHAIN[:-1]:
        key = dg.AssetKey([spec.name, stage.name])
        status = instance.get_status_by_partition(key, [partition], shard_partitions(spec))
        if status is not None and status.get(partition) is not None:
            found[stage.name] = status[partition].value
    return found


@pytest.mark.parametrize("checks", ["grouped", "rollup"])
def test_a_partition_that_fails_in_a_load_is_failed_in_dagster(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, checks: str
) -> None:
    """The failed stage and those after it are shown as the job of one partition leaves them, until the next success."""
    folder = copies(inbox, "abc")
    whole = (folder / "b.tar").read_bytes()
    for name in "bc":
        (folder / f"{name}.tar").write_bytes(whole[: len(whole) // 2])
    spec = demo_spec("captions", shards=str(folder), checks=checks)
    register_dataset(instance, DatasetStore(spec))
    runs = {run.partition: run for run in run_partitions([(spec, key) for key in "ab"])}
    assert [runs["a"].ok, runs["b"].ok] == [True, False]
    assert not pack(instance, spec, "c").success
    done = dict.fromkeys((stage.name for stage in CHAIN[:-1]), AssetPartitionStatus.MATERIALIZED.value)
    assert statuses(instance, spec, "a") == done
    assert statuses(instance, spec, "b") == statuses(instance, spec, "c")
    assert statuses(instance, spec, "b")["published"] == AssetPartitionStatus.FAILED.value
    (folder / "b.tar").write_bytes(whole)
    register_dataset(instance, DatasetStore(spec))
    (again,) = run_partitions([(spec, "b")])
    assert again.ok
    assert statuses(instance, spec, "b") == done


def test_failures_of_loads_are_counted(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """What the schedule reads knows each failure of a partition in a load: its fingerprint, its number and its time."""
    folder = copies(inbox, "ab")
    (folder / "b.tar").write_bytes((folder / "a.tar").read_bytes()[:20_000])
    spec = demo_spec("captions", shards=str(folder))
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    fingerprint = partition_fingerprints(dataset, dataset.partitions().values())["b"]
    for number in (1, 2):
        assert [run.ok for run in run_partitions([(spec, "a"), (spec, "b")])] == [True, False]
        (attempt,) = failed_attempts(instance, spec).items()
        assert (attempt[0], attempt[1].fingerprint, attempt[1].number) == ("b", fingerprint, number)
    (folder / "b.tar").write_bytes((folder / "a.tar").read_bytes()[:30_000])
    register_dataset(instance, dataset)
    assert not run_partitions([(spec, "b")])[0].ok
    assert failed_attempts(instance, spec)["b"].number == 1
    assert failed_attempts(instance, spec)["b"].fingerprint != fingerprint


def test_many_failures_read_the_earlier_ones_once(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load reads the events of earlier loads as often for four partitions that fail as for one."""
    folder = copies(inbox, "abcde")
    for name in "abcd":
        (folder / f"{name}.tar").write_bytes((folder / "e.tar").read_bytes()[:20_000])
    spec = demo_spec("captions", shards=str(folder))
    register_dataset(instance, DatasetStore(spec))
    real, read = SqliteEventLogStorage.get_records_for_run, list[str]()

    def get_records_for_run(self: SqliteEventLogStorage, run_id: str, *args: Any, **kwargs: Any) -> Any:
        read.append(run_id)
        return real(self, run_id, *args, **kwargs)

    monkeypatch.setattr(SqliteEventLogStorage, "get_records_for_run", get_records_for_run)
    earlier = run_partitions([(spec, "a")])[0].run_id
    counts = []
    for keys in ("b", "abcd"):
        read.clear()
        assert not any(run.ok for run in run_partitions([(spec, key) for key in keys]))
        counts.append(read.count(earlier))
    assert counts == [1, 1]
    assert {key: attempt.number for key, attempt in failed_attempts(instance, spec).items()} == {
        "a": 2,
        "b": 2,
        "c": 1,
        "d": 1,
    }


@pytest.mark.parametrize("why", ["locked", "elsewhere", "gone"])
def test_a_partition_that_was_refused_is_as_before(
    instance: dg.DagsterInstance, dagster_home: Path, demo_spec: SpecOf, inbox: Inbox, why: str
) -> None:
    """Of what another run works on, or is not registered, a load says that it did not run, and records no failure."""
    folder = copies(inbox, "ab")
    spec = demo_spec("captions", shards=str(folder))
    register_dataset(instance, DatasetStore(spec))
    assert run_partitions([(spec, "a")])[0].ok
    done = statuses(instance, spec, "a")
    assert set(done.values()) == {AssetPartitionStatus.MATERIALIZED.value}
    with ExitStack() as held:
        if why == "locked":
            held.enter_context(partition_lock(dagster_home, "captions", "a"))
        elif why == "elsewhere":
            job = build_definitions(spec).resolve_job_def("captions_pack")
            tags = {"dagster/partition": "a"}
            instance.create_run_for_job(job_def=job, tags=tags, status=dg.DagsterRunStatus.STARTED)
        else:
            (folder / "a.tar").unlink()
            register_dataset(instance, DatasetStore(spec))
        runs = {run.partition: run for run in run_partitions([(spec, "a"), (spec, "b")])}
    assert [runs["a"].ok, runs["b"].ok] == [False, True]
    found = instance.get_run_by_id(runs["a"].run_id)
    assert found is not None
    assert found.status == dg.DagsterRunStatus.FAILURE
    assert not instance.all_logs(found.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED)
    assert failed_attempts(instance, spec) == {}
    if why != "elsewhere":  # where the other run's own state is shown
        assert statuses(instance, spec, "a") == done


class Away:
    """A database that refuses calls of Dagster's storages, those whose numbers are given; it counts all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: range | set[int] = set()
        self.calls: list[str] = []
        for storage in (SqliteRunStorage, SqliteEventLogStorage):
            self._patch(monkeypatch, storage)
        for module in ("patience", "mirror"):
            monkeypatch.setattr(f"mm_assets.orchestration.{module}.PAUSES", (0.0,) * 8)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, storage: type) -> None:
        for name in dir(storage):
            method = getattr(storage, name)
            if name in CALLS:
                monkeypatch.setattr(storage, name, self._refusing(name, method))

    def _refusing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(storage: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) in self.refused:
                raise sqlalchemy.exc.OperationalError("select 1", {}, Exception("server closed the connection"))
            return method(storage, *args, **kwargs)

        return call


CALLS = (
    "add_dynamic_partitions",
    "add_run",
    "add_run_tags",
    "get_dynamic_partitions",
    "get_latest_tags_by_partition",
    "get_run_records",
    "handle_run_event",
    "store_event",
)


def recorded(instance: dg.DagsterInstance, spec: DatasetSpec) -> Counter[tuple[str, ...]]:
    """How often each materialization and check result of each partition is stored."""
    found: Counter[tuple[str, ...]] = Counter()
    for stage in CHAIN[:-1]:
        key = dg.AssetKey([spec.name, stage.name])
        for record in instance.fetch_materializations(key, limit=1000).records:
            assert record.partition_key is not None
            found[stage.name, record.partition_key] += 1
    for run in instance.get_runs():
        for event in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION):
            made = event.get_dagster_event().asset_check_evaluation_data
            if made.partition is not None:
                found[made.asset_key.path[-1], made.check_name, made.partition] += 1
    return found


def test_a_restart_at_any_moment_of_a_load_loses_nothing(
    dagster_home: Path, demo_spec: SpecOf, inbox: Inbox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever calls in a row a database refuses, the load and its run succeed, and each event is stored once."""
    folder = copies(inbox, "a")
    away = Away(monkeypatch)
    number = 0
    while True:
        shutil.rmtree(root, ignore_errors=True)
        for name in ("history", "schedules", "locks"):
            shutil.rmtree(dagster_home / name, ignore_errors=True)
        spec = demo_spec("captions", shards=str(folder), checks="grouped")
        away.refused, away.calls = set(), []
        with dg.DagsterInstance.get() as instance:
            register_dataset(instance, DatasetStore(spec))
            away.refused, away.calls = range(number, number + 5) if number else set(), []
            (run,) = run_partitions([(spec, "a")])
            number_of_calls = len(away.calls)
            away.refused = set()
            assert run.ok, away.calls
            found = instance.get_run_by_id(run.run_id)
            assert found is not None
            assert found.status == dg.DagsterRunStatus.SUCCESS, away.calls
            counted = recorded(instance, spec)
            assert set(counted.values()) == {1}, json.dumps([str(key) for key, n in counted.items() if n > 1])
            assert len(counted) >= 20
        if number > number_of_calls:
            break
        number = number + 9 if number else 1
    assert number > 40, away.calls
