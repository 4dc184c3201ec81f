"""Dagster's run monitoring, with the settings of `deploy/dagster.yaml`, leaves runs alone that are at work."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster import DagsterEventType
from dagster._daemon.monitoring import run_monitoring

from mm_assets.orchestration import recorder
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.event_log import RunEvents
from mm_assets.orchestration.events import Event, Made
from mm_assets.orchestration.launch import register_dataset
from mm_assets.orchestration.recorded_load import run_load
from mm_assets.orchestration.recorder import Recorder
from mm_assets.orchestration.runs import PROCESS_TAG, live_runs
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import process_tag
from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.shards import make_shard

SETTINGS = yaml.safe_load((Path(__file__).resolve().parents[2] / "deploy" / "dagster.yaml").read_text())
LAUNCHED = "f0000000-0000-4000-8000-000000000001"
KEYS = "abcde"
DAYS_LATER = 10 * 86_400.0
Open = Callable[..., dg.DagsterInstance]


@pytest.fixture
def open_instance(dagster_home: Path) -> Iterator[Open]:
    """Opens the instance of `deploy/dagster.yaml`, with SQLite, and with another launcher if one is given."""
    opened = []

    def get(launcher: dict[str, Any] | None = SETTINGS["run_launcher"]) -> dg.DagsterInstance:
        here = {name: value for name, value in SETTINGS.items() if name not in ("storage", "run_launcher")}
        here |= {"run_launcher": launcher} if launcher else {}
        (dagster_home / "dagster.yaml").write_text(yaml.safe_dump(here))
        opened.append(dg.DagsterInstance.get())
        return opened[-1]

    yield get
    for instance in opened:
        instance.dispose()


@pytest.fixture
def spec(tmp_path: Path) -> DatasetSpec:
    for key in KEYS:
        make_shard(tmp_path / "in" / f"{key}.tar", {f"{key}.txt": "words"})
    config = {"name": "d", "shards": f"{tmp_path}/in/*.tar", "root": f"{tmp_path}/out", "settle_seconds": 0}
    return DatasetSpec.from_config({**config, "engine": {"jobs": 1}}, where="test")


class Jobs:
    """Ray's server of jobs, which knows that of one run."""

    def get_job_status(self, submission: str) -> object:
        from ray.job_submission import JobStatus

        if submission == f"dagster-run-{LAUNCHED}":
            return JobStatus.RUNNING
        raise RuntimeError(f"Request failed with status code 404: Job {submission} does not exist")

    def list_jobs(self) -> list[object]:
        return []


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = pytest.importorskip("dagster_ray")
    pytest.importorskip("ray")
    monkeypatch.setattr(launchers.RayRunLauncher, "client", Jobs())


def monitored(monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance) -> list[set[str]]:
    """Monitors all runs before each partition is recorded; returns the statuses of runs after each time."""
    seen: list[set[str]] = []
    real = RunEvents.store

    def store(self: RunEvents, events: Sequence[Event]) -> None:
        if any(isinstance(event, Made) and event.partition for event in events):
            context: Any = SimpleNamespace(instance=instance, create_request_context=lambda: None)
            monitoring = run_monitoring.execute_run_monitoring_iteration(context, logging.getLogger(__name__))
            assert [error for error in monitoring if error] == []
            seen.append({run.status.value for run in instance.get_runs()})
        real(self, events)

    monkeypatch.setattr(RunEvents, "store", store)
    monkeypatch.setattr(recorder, "_MAX_BATCH", 1)
    return seen


def load(instance: dg.DagsterInstance, spec: DatasetSpec, *, by: str) -> None:
    """Loads all partitions, as the command does, or as a run that was launched does."""
    register_dataset(instance, DatasetStore(spec))
    if by == "command":
        with Processes(1) as processes:
            assert run_load(spec, [*KEYS], engine=processes).ok
    else:
        job = build_definitions(spec).resolve_job_def("d_load")
        assert job.execute_in_process(instance=instance, run_id=LAUNCHED, raise_on_error=False).success


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize(
    ("by", "statuses"), [("command", [{"SUSPENDED"}, {"SUSPENDED"}]), ("job", [{"STARTED"}, {"STARTED", "SUSPENDED"}])]
)
def test_runs_that_no_launcher_started_are_not_failed(
    open_instance: Open, spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch, by: str, statuses: list[set[str]]
) -> None:
    """Of a command, and of the further runs of a load, there is no Ray job: monitoring fails none of them."""
    monkeypatch.setattr(recorder, "MAX_PARTITIONS_OF_RUN", 2)
    instance = open_instance()
    seen = monitored(monkeypatch, instance)
    load(instance, spec, by=by)
    first, further = statuses
    assert [found - {"SUCCESS"} for found in seen] == [first] * 2 + [further] * 3
    runs = instance.get_runs()
    assert [run.status.value for run in runs] == ["SUCCESS"] * 3
    for run in runs:
        assert instance.all_logs(run.run_id, of_type=DagsterEventType.RUN_FAILURE) == []
        for entry in instance.all_logs(run.run_id, of_type=DagsterEventType.RUN_SUSPENDED):
            how = f"terminate the first run of the load, {LAUNCHED}" if by == "job" else f"process {os.getpid()} on"
            assert how in entry.get_dagster_event().message, "what a reader does to stop it"
    assert instance.get_materialized_partitions(dg.AssetKey(["d", "published"])) == set(KEYS)


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize("by", ["command", "job"])
def test_a_load_may_take_days(open_instance: Open, spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """The longest time that an instance gives its runs ends that of one partition, and no load."""
    instance = open_instance()
    assert 0 < instance.run_monitoring_max_runtime_seconds < DAYS_LATER
    seen = monitored(monkeypatch, instance)
    now = run_monitoring.get_current_timestamp
    monkeypatch.setattr(run_monitoring, "get_current_timestamp", lambda: now() + DAYS_LATER)
    load(instance, spec, by=by)
    assert len(seen) == len(KEYS)
    assert [run.status.value for run in instance.get_runs()] == ["SUCCESS"]
    assert not any("FAILURE" in found or "CANCELING" in found for found in seen)
    assert "dagster/max_runtime" not in build_definitions(spec).resolve_job_def("d_pack").run_tags


@pytest.mark.parametrize(
    ("launcher", "status"), [(None, "STARTED"), ({"module": "not_installed", "class": "Launcher"}, "SUSPENDED")]
)
def test_only_a_launcher_that_is_asked_changes_the_status_of_a_run(
    open_instance: Open,
    spec: DatasetSpec,
    monkeypatch: pytest.MonkeyPatch,
    launcher: dict[str, str] | None,
    status: str,
) -> None:
    """With Dagster's own launcher a command's run is started; one that is not installed here may be asked."""
    instance = open_instance(launcher)
    seen: list[set[str]] = []
    register_dataset(instance, DatasetStore(spec))
    with Processes(1) as processes:
        ended = run_load(
            spec,
            [*KEYS],
            engine=processes,
            observed=lambda _: seen.append({run.status.value for run in instance.get_runs()}),
        )
    assert ended.ok
    assert seen == [{status}] * len(KEYS)
    assert [run.status.value for run in instance.get_runs()] == ["SUCCESS"]


def test_a_load_on_a_cluster_that_is_interrupted_is_lost(
    open_instance: Open, spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of SIGTERM that Ray sets does not make a step's error of it: Dagster repeats what was interrupted."""

    def exiting(*_: object, **__: object) -> Processes:
        signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(signum))  # as `ray.init` does
        return Processes(1)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("mm_assets.orchestration.load.open_engine", exiting)
    monkeypatch.setattr(Recorder, "add", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    instance = open_instance(None)
    try:
        job = build_definitions(spec).resolve_job_def("d_load")
        assert not job.execute_in_process(instance=instance, run_id=LAUNCHED, raise_on_error=False).success
    finally:
        signal.signal(signal.SIGTERM, before)
    run = instance.get_run_by_id(LAUNCHED)
    assert run is not None
    assert run.tags["dagster/failure_reason"] == "UNEXPECTED_TERMINATION"


def test_a_run_without_a_worker_ends_with_its_process(open_instance: Open, spec: DatasetSpec) -> None:
    """Monitoring does not fail a suspended run: the next look for a live load does, when its process is gone."""
    instance = open_instance(None)
    dataset = DatasetStore(spec)
    register_dataset(instance, dataset)
    job = build_definitions(spec).resolve_job_def("d_load")
    for is_gone in (False, True):
        run = instance.create_run_for_job(job)
        tag = process_tag(run.run_id)
        assert tag is not None, "these tests need Linux"
        instance.add_run_tags(run.run_id, {PROCESS_TAG: tag + "0" * is_gone})  # another start time
        for kind in (DagsterEventType.RUN_START, DagsterEventType.RUN_SUSPENDED):
            instance.report_dagster_event(dg.DagsterEvent(kind.value, job_name="d_load"), run.run_id)
        assert bool(live_runs(instance, dataset, "d_load")) is not is_gone
        found = instance.get_run_by_id(run.run_id)
        assert found is not None
        assert found.status.value == ("FAILURE" if is_gone else "SUSPENDED")
        instance.delete_run(run.run_id)
