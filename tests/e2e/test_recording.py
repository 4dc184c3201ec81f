"""What Dagster knows of a load: partitions that failed, databases that go away, and events that are stored once."""

import hashlib
import json
import logging
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
import sqlalchemy
import sqlalchemy.exc
from click.testing import CliRunner
from dagster._core.storage.event_log import SqliteEventLogStorage
from dagster._core.storage.partition_status_cache import AssetPartitionStatus
from dagster._core.storage.runs import SqliteRunStorage

from mm_assets.cli.main import main
from mm_assets.orchestration import mirror, patience
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset, run_load, sync
from mm_assets.orchestration.partitions import shard_partitions
from mm_assets.orchestration.runs import PROCESS_TAG, failed_attempts, partition_fingerprints
from mm_assets.pipeline.chain import CHAIN, Stage
from mm_assets.pipeline.load import engine
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.load.tasks import PartitionRun
from mm_assets.pipeline.partition.run import PartitionReport, partition_steps
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.liveness import process_tag

from .loads import leased, pack, run_partitions

SpecOf = Callable[..., DatasetSpec]
Inbox = Callable[..., Path]


CANCELING = dg.DagsterEventType.PIPELINE_CANCELING


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


def said_of(instance: dg.DagsterInstance, run_id: str, partition: str) -> list[int]:
    """The levels of the lines about a partition in a run's log."""
    return [e.level for e in instance.all_logs(run_id) if e.user_message.startswith(f"{partition}: ")]


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
    assert said_of(instance, runs["b"].run_id, "b") == [logging.ERROR]
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
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, why: str
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
            held.enter_context(leased(spec, "a"))
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
    assert said_of(instance, found.run_id, "a") == [logging.WARNING]
    assert failed_attempts(instance, spec) == {}
    if why != "elsewhere":  # where the other run's own state is shown
        assert statuses(instance, spec, "a") == done


def test_a_run_of_a_partition_that_another_holds_is_canceled(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox
) -> None:
    """The job of a locked partition is canceled with the reason in its log, and the partition is shown as before."""
    spec = demo_spec("captions", shards=str(copies(inbox, "a")))
    register_dataset(instance, DatasetStore(spec))
    assert pack(instance, spec, "a").success
    done = statuses(instance, spec, "a")
    with leased(spec, "a"):
        refused = pack(instance, spec, "a")
    run = instance.get_run_by_id(refused.run_id)
    assert run is not None
    assert run.status == dg.DagsterRunStatus.CANCELED
    (said,) = (e.get_dagster_event().message for e in instance.all_logs(run.run_id, of_type=CANCELING))
    assert "another run is working on partition 'a', on host " in said
    assert "run it again when the other has ended" in said
    assert statuses(instance, spec, "a") == done
    assert pack(instance, spec, "a").success


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


class Unreachable:
    """A database server that no connection reaches while it `is_away`; what waits for it does not sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_away = False
        self.slept: list[float] = []
        self.returns_after = float("inf")
        real = sqlalchemy.engine.Engine.connect

        def connect(engine: sqlalchemy.engine.Engine) -> sqlalchemy.engine.Connection:
            if self.is_away:
                raise sqlalchemy.exc.OperationalError("select 1", {}, Exception("could not connect to server"))
            return real(engine)

        def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            self.is_away = self.is_away and len(self.slept) < self.returns_after

        monkeypatch.setattr(sqlalchemy.engine.Engine, "connect", connect)
        for module in (patience, mirror):
            monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))


def load(
    spec: DatasetSpec, keys: str, observed: Callable[[PartitionRun], object] = lambda _: None
) -> tuple[dict[str, PartitionRun], PartitionRun]:
    """A load of these partitions: how each ended, and how the rest did."""
    ended: dict[str, PartitionRun] = {}

    def observe(run: PartitionRun) -> None:
        ended[run.partition] = run
        observed(run)

    with Processes() as processes:
        rest = run_load(spec, list(keys), engine=processes, observed=observe)
    return ended, rest


def test_no_partition_waits_for_a_database(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the database is away partitions run one after the other; it is waited for once, at the end."""
    spec = demo_spec("captions", shards=str(copies(inbox, "abc")), checks="grouped")
    register_dataset(instance, DatasetStore(spec))
    server = Unreachable(monkeypatch)
    server.returns_after = 2

    def observe(run: PartitionRun) -> None:
        assert server.slept == []
        server.is_away = True

    runs, rest = load(spec, "abc", observe)
    assert [run.ok for run in (*runs.values(), rest)] == [True] * 4
    assert server.slept == list(patience.PAUSES[:2])
    counted = recorded(instance, spec)
    assert set(counted.values()) == {1}
    assert {key[-1] for key in counted} == {"a", "b", "c"}


def test_what_a_database_refuses_keeps_nothing_else_waiting(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that cannot be stored are given up at once, and named with what records them; the others are stored."""
    spec = demo_spec("captions", shards=str(copies(inbox, "ab")))
    register_dataset(instance, DatasetStore(spec))
    server, published = Unreachable(monkeypatch), dg.AssetKey(["captions", "published"])
    real = SqliteEventLogStorage.store_event

    def store_event(self: SqliteEventLogStorage, event: dg.EventLogEntry) -> None:
        if event.dagster_event is not None and event.dagster_event.partition == "a":
            raise ValueError("a string literal cannot contain NUL\nand more")
        real(self, event)

    with monkeypatch.context() as refusing:
        refusing.setattr(SqliteEventLogStorage, "store_event", store_event)
        runs, rest = load(spec, "ab")
    assert instance.get_materialized_partitions(published) == {"b"}
    assert [runs["a"].ok, runs["b"].ok, server.slept] == [True, True, []]
    reason = "ValueError: a string literal cannot contain NUL"
    again = "`mm-assets sync --dataset captions` records what is published"
    assert rest.failures == (f"not recorded in Dagster: a (1 in all): {reason}: {again}",)
    assert sync(DatasetStore(spec)).num_partitions == 1
    assert instance.get_materialized_partitions(published) == {"a", "b"}


def test_one_refused_record_is_not_a_database_that_is_away(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the last record is refused until patience ends, a database that then leaves is still waited for."""
    spec = demo_spec("captions", shards=str(copies(inbox, "a")))
    register_dataset(instance, DatasetStore(spec))
    server = Unreachable(monkeypatch)
    server.returns_after = len(patience.PAUSES) + 2
    real = SqliteEventLogStorage.store_event

    def store_event(self: SqliteEventLogStorage, event: dg.EventLogEntry) -> None:
        made = event.dagster_event.asset_key if event.dagster_event is not None else None
        if made == dg.AssetKey(["captions", "manifest"]):
            server.is_away = len(server.slept) == len(patience.PAUSES)  # from its last attempt on
            raise sqlalchemy.exc.OperationalError("insert", {}, sqlite3.OperationalError("database is locked"))
        real(self, event)

    monkeypatch.setattr(SqliteEventLogStorage, "store_event", store_event)
    _, rest = load(spec, "a")
    (failure,) = rest.failures
    assert failure.startswith("not recorded in Dagster: the manifest (1 in all): OperationalError")
    assert server.slept == [*patience.PAUSES, *patience.PAUSES[:2]]
    run = instance.get_run_by_id(rest.run_id)
    assert run is not None
    assert run.status == dg.DagsterRunStatus.FAILURE


def test_a_manifest_that_cannot_be_made_stops_no_partition(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a load it is a warning, at its end an error; what the load did is recorded in any case."""
    spec = demo_spec("captions", shards=str(copies(inbox, "abc")), checks="rollup")
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    assert load(spec, "a")[1].ok
    manifest = Path(dataset.store.path_of("manifest.json"))
    manifest.unlink()
    manifest.mkdir()  # in its place
    monkeypatch.setattr("mm_assets.orchestration.load._MANIFEST_SECONDS", 0.0)
    runs, rest = load(spec, "bc")
    assert [runs["b"].ok, runs["c"].ok, rest.ok] == [True, True, False]
    assert str(manifest) in rest.failures[0]
    assert instance.get_materialized_partitions(dg.AssetKey(["captions", "published"])) == {"a", "b", "c"}
    assert instance.all_logs(rest.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    said = [entry.user_message for entry in instance.all_logs(rest.run_id)]
    assert any(line.startswith("the manifest is as before: ") for line in said)


def test_a_database_that_stays_away_is_an_error(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` publishes, and fails with what is not recorded and the command that does it when the database is back."""
    shards = str(copies(inbox, "ab"))
    given = ("--root", str(root), "--dataset", "captions")
    command = ("run", *given, "--shards", shards, "--set", "settle_seconds=0")
    server = Unreachable(monkeypatch)
    real = partition_steps

    def steps_and_leave(*args: Any, **kwargs: Any) -> Iterator[Stage | PartitionReport]:
        server.is_away = True
        return real(*args, **kwargs)

    with monkeypatch.context() as leaving:
        leaving.setattr(engine, "partition_steps", steps_and_leave)
        done = CliRunner().invoke(main, command)
    assert done.exit_code == 1
    assert done.stdout.startswith("2 partitions run in ")
    *_, away, lost = done.stderr.splitlines()
    reason = "OperationalError: (builtins.Exception) could not connect to server"
    assert away == f"failed: captions: Dagster's database is away: {reason}: run the command again when it is back"
    assert lost.startswith(f"failed: captions: not recorded in Dagster: a, b, the manifest (3 in all): {reason}: `mm-")
    for again in (command, ("sync", *given)):
        done = CliRunner().invoke(main, again)
        assert (done.exit_code, isinstance(done.exception, SystemExit)) == (1, True)
        assert f"Dagster's database is away: {reason}: run the command again when it is back" in done.stderr
    assert server.slept == list(patience.PAUSES), "nothing waits again for a database that has been waited for"
    server.is_away = False
    done = CliRunner().invoke(main, ("sync", *given))
    assert (done.exit_code, done.stdout) == (0, "captions: 2 partitions and the manifest recorded\n")
    assert instance.get_materialized_partitions(dg.AssetKey(["captions", "published"])) == {"a", "b"}
    made = instance.get_latest_materialization_event(dg.AssetKey(["captions", "manifest"]))
    assert made is not None
    assert made.asset_materialization is not None
    content = Path(root, "captions", "manifest.json").read_bytes()
    assert (made.asset_materialization.tags or {})["dagster/data_version"] == hashlib.sha256(content).hexdigest()
    assert made.asset_materialization.metadata["count/shards"].value == 2
    assert made.asset_materialization.metadata["left_out"].value == "nothing"
    done = CliRunner().invoke(main, ("sync", *given))
    assert (done.exit_code, done.stdout) == (0, "captions: 0 partitions recorded\n")


@pytest.mark.parametrize("how", ["sync", "load"])
def test_a_load_that_could_not_report_its_end_is_ended(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, how: str
) -> None:
    """A load whose process is gone and that Dagster shows as at work is ended by `sync` and by the next load."""
    spec = demo_spec("captions", shards=str(copies(inbox, "a")))
    register_dataset(instance, DatasetStore(spec))
    job, runs = build_definitions(spec).resolve_job_def("captions_load"), list[str]()
    for is_gone in (True, False):
        run = instance.create_run_for_job(job_def=job, status=dg.DagsterRunStatus.STARTED)
        tag = process_tag(run.run_id)
        if tag is None:
            pytest.skip("loads are tagged with their process on Linux only: other systems have no /proc")
        start = "0" if is_gone else tag.split(" ")[-1]  # else the process id was reused
        instance.add_run_tags(run.run_id, {PROCESS_TAG: " ".join([*tag.split(" ")[:-1], start])})
        runs.append(run.run_id)
    if how == "sync":
        sync(DatasetStore(spec))
    else:
        assert run_partitions([(spec, "a")])[0].ok
    ended, live = map(instance.get_run_by_id, runs)
    assert ended is not None
    assert live is not None
    assert [ended.status, live.status] == [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.STARTED]
