"""Loads in a Dagster instance with SQLite: their runs, what these record, and how they end."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dagster as dg
import pytest
import sqlalchemy.exc
from click.testing import CliRunner
from dagster._core.storage.event_log import SqliteEventLogStorage

from mm_assets.cli.main import main
from mm_assets.errors import SourceError
from mm_assets.orchestration import load as module
from mm_assets.orchestration import recorder
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.event_log import RunEvents
from mm_assets.orchestration.events import Made
from mm_assets.orchestration.launch import prepare_home, sync
from mm_assets.orchestration.partitions import shard_partitions
from mm_assets.orchestration.recorded_load import LoadResult, run_load
from mm_assets.orchestration.runs import LOAD_TAG, PROCESS_TAG, failed_runs, load_config
from mm_assets.pipeline.chain import CHAIN, MANIFEST
from mm_assets.pipeline.dagster_home import declared_in
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.load.tasks import PartitionRun, load_partitions
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import Claims
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState

from ..pipeline.chain import declare, run_partition
from ..pipeline.shards import CAPTIONS, make_shard

MATERIALIZATION = dg.DagsterEventType.ASSET_MATERIALIZATION
SUCCESS, FAILURE, CANCELED = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED


@pytest.fixture
def spec(tmp_path: Path, dagster_home: Path) -> DatasetSpec:
    """A registered dataset of two partitions, and an empty Dagster instance."""
    for key in "ab":
        make_shard(tmp_path / "in" / f"{key}.tar", {f"{key}{name}": value for name, value in CAPTIONS.items()})
    prepare_home()
    return declare(tmp_path / "root", tmp_path / "in", formats=["mult"])


def load(spec: DatasetSpec, keys: str = "ab", **options: Any) -> LoadResult:
    dataset = DatasetStore(spec)
    found = register(dataset)
    with Processes(1) as engine:
        return run_load(spec, list(keys), engine=engine, found=found, **options)


def made(instance: dg.DagsterInstance, *, without_runs: bool = False) -> Counter[tuple[str, str]]:
    """How often each stage of each partition is in the event log of runs."""
    runs = [run.run_id for run in instance.get_runs()] if not without_runs else [""]
    events = [e.get_dagster_event() for run in runs for e in instance.all_logs(run, of_type=MATERIALIZATION)]
    return Counter((event.asset_key.path[-1], event.partition or "") for event in events)


def complete(spec: DatasetSpec) -> Counter[tuple[str, str]]:
    stages = [stage.name for stage in CHAIN if stage.is_made(spec) and stage is not MANIFEST]
    return Counter({(MANIFEST.name, ""): 1, **{(stage, key): 1 for stage in stages for key in "ab"}})


def test_a_load_is_one_run_that_dagster_lists_under_its_job(spec: DatasetSpec) -> None:
    """The run succeeds, has every event once, and names the code location of the dataset; nothing is stale after it."""
    declared_in(spec.where, spec.name, "definitions")
    assert load(spec).ok
    with dg.DagsterInstance.get() as instance:
        (run,) = instance.get_runs(
            dg.RunsFilter(job_name="data_load", tags={".dagster/repository": "__repository__@definitions"})
        )
        assert run.status is SUCCESS
        assert made(instance) == complete(spec)
        assert set(instance.get_dynamic_partitions("data_shards")) == {"a", "b"}
        checks = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
        evaluations = [entry.get_dagster_event().asset_check_evaluation_data for entry in checks]
        assert all(found.target_materialization_data.run_id == run.run_id for found in evaluations)
        tags = instance.fetch_materializations(dg.AssetKey(["data", "rows"]), limit=1).records[0].asset_materialization
        assert tags is not None
        assert (tags.tags or {})["dagster/input_event_pointer/data/raw_shards"].isdecimal()


def test_a_large_load_has_several_runs(spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if Dagster has started it, in the only slot of a pool: the others name the first run, and each succeeds."""
    monkeypatch.setattr(recorder, "MAX_PARTITIONS_OF_RUN", 1)
    monkeypatch.setattr(recorder, "_MAX_BATCH", 1)
    monkeypatch.setattr(recorder, "_MAX_SILENCE_SECONDS", 20.0)
    spec = spec.replace(pool="disks")
    with dg.DagsterInstance.get() as instance:
        instance.event_log_storage.set_concurrency_slots("disks", 1)
        job = build_definitions(spec).resolve_job_def("data_load")
        result = job.execute_in_process(instance=instance, run_config=load_config(spec, ["a", "b"], waits=False))
        assert result.success
        runs = {run.run_id: run for run in instance.get_runs()}
        assert {run.status for run in runs.values()} == {SUCCESS}
        (further,) = runs.keys() - {result.run_id}
        assert runs[further].tags[LOAD_TAG] == result.run_id
        assert made(instance) == complete(spec)


def test_a_run_is_alive_while_it_lists_the_shards(spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hosts see its claim from the start: a run that has none for minutes counts as dead."""
    claims: list[str] = []

    def registered(dataset: DatasetStore, **_: object) -> None:
        claims.extend(dataset.store.sizes("claims"))
        raise SourceError("in", "cannot be listed")

    monkeypatch.setattr(module, "register", registered)
    job = build_definitions(spec).resolve_job_def("data_load")
    with dg.DagsterInstance.get() as instance:
        result = job.execute_in_process(instance=instance, raise_on_error=False)
        assert not result.success
        assert PROCESS_TAG in instance.get_run_by_id(result.run_id).tags
    assert claims == [f"claims/{result.run_id}.json"]
    assert DatasetStore(spec).store.sizes("claims") == {}


def test_a_load_that_fails_fails_its_run(spec: DatasetSpec) -> None:
    """The message of the run names the partition and what to do, and its next attempt is the second one."""
    (Path(spec.shards) / "b.tar").write_bytes(b"no tar" * 1000)
    ended: list[PartitionRun] = []
    for number in (1, 2):
        assert load(spec, observed=ended.append).ok
        with dg.DagsterInstance.get() as instance:
            run = instance.get_runs(limit=1)[0]
            assert run.status is FAILURE
            (step,) = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
            assert failed_runs(instance, spec)["b"].number == number
        failure = step.get_dagster_event().step_failure_data.user_failure_data
        assert failure is not None
        assert "1 of" in (failure.description or "")
        assert "What to do:" in (failure.description or "")
    assert [run.ok for run in ended] == [True, False, True, False]


def test_two_loads_at_once_both_succeed(spec: DatasetSpec) -> None:
    """The second one reports what the first is processing and waits for it; with `waits=False` it leaves that to it."""
    runs, lines, results = threading.Event(), list[str](), list[LoadResult]()
    released = threading.Event()

    def hold(_: PartitionRun) -> None:
        runs.set()
        assert released.wait(60)

    first = threading.Thread(target=lambda: results.append(load(spec, observed=hold)))
    first.start()
    assert runs.wait(60)
    elsewhere: list[PartitionRun] = []
    results.append(load(spec, "b", waits=False, observed=elsewhere.append))
    assert [run.status for run in elsewhere] == ["in progress elsewhere"]

    def report(line: str) -> None:
        lines.append(line)
        released.set()

    waited: list[PartitionRun] = []
    results.append(load(spec, "b", report=report, observed=waited.append))
    first.join()
    assert [run.status for run in waited] == ["published elsewhere"]
    assert "claimed by a load on" in lines[0]
    assert all(result.ok for result in results)
    with dg.DagsterInstance.get() as instance:
        assert [run.status for run in instance.get_runs()] == [SUCCESS] * 3
        assert {at: number for at, number in made(instance).items() if at[1]} == {
            at: number for at, number in complete(spec).items() if at[1]
        }


def test_a_command_that_waits_says_what_others_did(spec: DatasetSpec) -> None:
    """It prints what it waits for on stderr, and counts what another load published apart from what it ran."""
    arguments = ["--shards", str(spec.shards), "--root", spec.root, "--dataset", "data"]
    settings = ["--set", "settle_seconds=0", "--set", "formats=[mult]"]
    dataset = DatasetStore(spec)
    register(dataset)
    is_claimed = threading.Event()

    def publish_b() -> None:
        with Claims(dataset, "another") as claims:
            claims.take(["b"])
            is_claimed.set()
            ends = time.monotonic() + 60
            while not dataset.store.sizes("records") and time.monotonic() < ends:
                time.sleep(0.01)
            run_partition(DatasetStore(spec), "b")

    other = threading.Thread(target=publish_b)
    other.start()
    assert is_claimed.wait(60)
    done = CliRunner().invoke(main, ["run", *arguments, *settings], catch_exceptions=False)
    other.join()
    assert done.exit_code == 0
    assert "data: 1 partition claimed by a load on " in done.stderr
    assert re.match(r"1 partition run in [\d.]+ s; 1 published by another load\n", done.stdout), done.output


def test_an_interrupted_load_is_canceled_and_continued(spec: DatasetSpec) -> None:
    """The run is shown as canceled, and the next load records what was published before."""

    def stop(_: PartitionRun) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(spec, observed=stop)
    with dg.DagsterInstance.get() as instance:
        assert [run.status for run in instance.get_runs()] == [CANCELED]
    assert load(spec, "b").ok
    with dg.DagsterInstance.get() as instance:
        assert made(instance) == complete(spec)


def test_sync_records_what_slices_did(spec: DatasetSpec) -> None:
    """Partitions that ran without Dagster are recorded once, with the manifest."""
    dataset = DatasetStore(spec)
    register(dataset)
    state = DatasetState(dataset)
    with Processes(1) as engine, Claims(dataset, "slice") as claims:
        load_partitions(state, state.pending, claims=claims, engine=engine)
    assert [sync(dataset, makes_manifest=True).num_partitions for _ in range(2)] == [2, 0]
    with dg.DagsterInstance.get() as instance:
        assert made(instance) == complete(spec)


def test_a_database_that_comes_back_is_recorded_in(spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load begins, and publishes, while the instance cannot be opened; when it can, everything is recorded."""
    get, published = dg.DagsterInstance.get, threading.Event()

    def unavailable(*_: object) -> dg.DagsterInstance:
        if not published.is_set():
            raise sqlalchemy.exc.OperationalError("select 1", {}, ConnectionRefusedError("refused"))
        return get()

    monkeypatch.setattr(dg.DagsterInstance, "get", unavailable)
    lines: list[str] = []
    ended: list[PartitionRun] = []

    def observe(run: PartitionRun) -> None:
        ended.append(run)
        if len(ended) == 2:
            published.set()

    assert load(spec, observed=observe, report=lines.append).ok
    assert "unavailable" in lines[0]
    with dg.DagsterInstance.get() as instance:
        assert made(instance) == complete(spec)


def test_a_database_that_stays_unavailable_is_an_error(spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load publishes, and names what is not recorded and the command that records it; so does that command."""
    monkeypatch.setitem(recorder.Recorder.__init__.__kwdefaults__, "retry", replace(recorder.DATABASE, pauses=(0.0,)))
    with monkeypatch.context() as patched:
        error = sqlalchemy.exc.OperationalError("select 1", {}, ConnectionRefusedError("refused"))
        patched.setattr(dg.DagsterInstance, "get", Mock(side_effect=error))
        result = load(spec)
        assert not DatasetState(DatasetStore(spec)).pending
        (failure,) = result.failures
        assert failure.startswith("not recorded in Dagster: ")
        assert failure.endswith("the next load or `mm-assets sync --dataset data` records them")
        with pytest.raises(SourceError, match="not recorded in Dagster"):
            sync(DatasetStore(spec))
    assert sync(DatasetStore(spec)).num_partitions == 2
    with dg.DagsterInstance.get() as instance:
        assert made(instance) == complete(spec)


def test_a_crash_between_the_two_databases_of_sqlite_records_once(
    spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that are in the log of a run and not in the index, which pages read, are recorded by the next load."""
    published, storing = dg.AssetKey(["data", "published"]), threading.Event()
    index, store = SqliteEventLogStorage.index_connection, RunEvents._store_at_once

    @contextmanager
    def index_connection(self: SqliteEventLogStorage) -> Iterator[Any]:
        is_outermost = storing.is_set()  # the first of a transaction
        storing.clear()
        with index(self) as connection:
            yield connection
            if is_outermost:
                raise ValueError("the process was killed here")

    def store_at_once(self: RunEvents, events: Any) -> None:
        if any(isinstance(event, Made) for event in events):
            storing.set()
        store(self, events)

    with monkeypatch.context() as patched:
        patched.setattr(SqliteEventLogStorage, "index_connection", index_connection)
        patched.setattr(RunEvents, "_store_at_once", store_at_once)
        assert "a, b" in load(spec).failures[0]
    with dg.DagsterInstance.get() as instance:
        assert made(instance)["published", "a"] > 0
        assert not instance.fetch_materializations(published, limit=9).records
        assert load(spec, "").ok
        records = instance.fetch_materializations(published, limit=9).records
        assert sorted(record.partition_key or "" for record in records) == ["a", "b"]


def test_a_failed_partition_is_shown_as_its_job_leaves_it(spec: DatasetSpec) -> None:
    """Dagster shows the failed stage and those after it as failed, until the partition is published."""
    shard = Path(spec.shards) / "b.tar"
    whole = shard.read_bytes()
    shard.write_bytes(b"no tar" * 1000)
    stages = [stage.name for stage in CHAIN if stage.is_made(spec) and stage is not MANIFEST]

    def statuses(instance: dg.DagsterInstance, key: str) -> set[str]:
        found = [
            instance.get_status_by_partition(dg.AssetKey(["data", stage]), [key], shard_partitions(spec)) or {}
            for stage in stages
        ]
        return {status.value for one in found if (status := one.get(key)) is not None}

    load(spec)
    with dg.DagsterInstance.get() as instance:
        assert statuses(instance, "a") == {"MATERIALIZED"}
        assert statuses(instance, "b") == {"FAILED"}
    shard.write_bytes(whole)
    load(spec)
    with dg.DagsterInstance.get() as instance:
        assert statuses(instance, "b") == {"MATERIALIZED"}


def test_another_release_of_dagster_has_the_public_call(spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the private names each event is stored by the public call, which names no run."""

    def missing(*_: object) -> None:
        raise AttributeError("_store_asset_event")

    monkeypatch.setattr(RunEvents, "_store_at_once", missing)
    assert load(spec).ok
    with dg.DagsterInstance.get() as instance:
        assert [run.status for run in instance.get_runs()] == [SUCCESS]
        assert made(instance, without_runs=True) == complete(spec)
        assert load(spec, "").ok
        assert made(instance, without_runs=True) == complete(spec)
