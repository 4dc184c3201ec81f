"""The two schedules of a dataset: a run for each of a few partitions, or one run for many."""

import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    InstigatorType,
    ScheduleInstigatorData,
)

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset
from mm_assets.orchestration.resources import StorageRoot
from mm_assets.orchestration.runs import failed_runs, load_config
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.staleness import DatasetState

from .loads import run_partitions

SpecOf = Callable[..., DatasetSpec]
Inbox = Callable[..., Path]
SHARDS = ("docs-00000.tar", "docs-00001.tar")


def ticks(instance: dg.DagsterInstance, spec: DatasetSpec) -> dict[str, Any]:
    """What a tick of each schedule gives, by its job."""
    definitions, found = build_definitions(spec), {}
    for name in ("docs_pending", "docs_pending_load"):
        schedule = definitions.resolve_schedule_def(name)
        with dg.build_schedule_context(
            instance=instance,
            instance_ref=instance.get_ref(),
            scheduled_execution_time=datetime(2024, 1, 1, tzinfo=UTC),
            resources={f"{spec.name}_storage": StorageRoot(root=spec.root)},
            repository_def=definitions.get_repository_def(),
        ) as context:
            found[schedule.job_name] = schedule.evaluate_tick(context)
    return found


def requested(found: dict[str, Any]) -> dict[str, int]:
    return {job: len(tick.run_requests or []) for job, tick in found.items()}


def test_many_pending_partitions_are_one_run(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """Above the threshold a tick requests one load of what is pending, which publishes it; then nothing is due."""
    spec = demo_spec("docs", shards=str(inbox(*SHARDS)), bulk_threshold=1, run_schedule=True)
    found = ticks(instance, spec)
    assert requested(found) == {"docs_pack": 0, "docs_load": 1}
    assert "2 partitions are due: the schedule docs_pending_load requests" in found["docs_pack"].skip_message
    (request,) = found["docs_load"].run_requests
    assert instance.get_dynamic_partitions("docs_shards") == ["docs-00000", "docs-00001"]
    assert run_partitions([(spec, "docs-00000")])[0].ok  # meanwhile
    job = build_definitions(spec).resolve_job_def("docs_load")
    result = job.execute_in_process(instance=instance, run_config=request.run_config, raise_on_error=False)
    assert result.success
    assert sorted(DatasetState(DatasetStore(spec)).published()) == ["docs-00000", "docs-00001"]
    made = dg.AssetRecordsFilter(dg.AssetKey(["docs", "raw_shards"]), asset_partitions=["docs-00000"])
    assert len(instance.fetch_materializations(made, limit=9).records) == 1, "what is published is not run again"
    assert requested(ticks(instance, spec)) == {"docs_pack": 0, "docs_load": 0}


def test_few_pending_partitions_are_a_run_each(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """Up to the threshold the runs are those of single partitions."""
    spec = demo_spec("docs", shards=str(inbox(*SHARDS)), bulk_threshold=2, run_schedule=True)
    assert requested(ticks(instance, spec)) == {"docs_pack": 2, "docs_load": 0}


def test_one_load_runs_at_a_time(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """While a load is live no tick requests another, nor runs of more partitions than the threshold."""
    spec = demo_spec("docs", shards=str(inbox(*SHARDS)), bulk_threshold=1, run_schedule=True)
    register_dataset(instance, DatasetStore(spec))
    job, config = build_definitions(spec).resolve_job_def("docs_load"), load_config(spec, ["another"])
    instance.create_run_for_job(job_def=job, run_config=config, status=dg.DagsterRunStatus.NOT_STARTED)
    assert requested(ticks(instance, spec)) == {"docs_pack": 0, "docs_load": 0}


def load_requests(instance: dg.DagsterInstance, spec: DatasetSpec) -> list[dg.RunRequest]:
    return ticks(instance, spec)["docs_load"].run_requests or []


def die(instance: dg.DagsterInstance, spec: DatasetSpec, request: dg.RunRequest) -> dg.DagsterRun:
    """A requested load that has just been killed before it did anything."""
    job, started = build_definitions(spec).resolve_job_def("docs_load"), dg.DagsterRunStatus.STARTED
    run = instance.create_run_for_job(job_def=job, run_config=request.run_config, tags=request.tags, status=started)
    instance.report_run_failed(run, "killed")
    return run


def attempt(request: dg.RunRequest) -> int:
    return int(request.tags[".dagster/mm_assets.attempt"])


def test_a_load_that_dies_waits_longer_each_time(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead loads are requested again after pauses that double; skipped ticks name the run, the time and a command."""
    spec = demo_spec("docs", shards=str(inbox(*SHARDS)), bulk_threshold=0, run_schedule=True)
    (request,) = load_requests(instance, spec)
    assert attempt(request) == 1
    run, now = die(instance, spec, request), time.time()
    for _ in range(3):
        found = ticks(instance, spec)
        assert requested(found) == {"docs_pack": 0, "docs_load": 0}
    said = found["docs_load"].skip_message
    assert f"run {run.run_id} of docs_load (attempt 1) ended before any of its partitions did" in said
    assert datetime.fromtimestamp(now + 600, tz=UTC).strftime("after %Y-%m-%d %H:") in said
    assert "at once with `mm-assets run --dataset docs`" in said
    shutil.copy(inbox() / SHARDS[0], inbox() / "another.tar")  # the wait is for the others
    monkeypatch.setattr("mm_assets.orchestration.schedules.time.time", lambda: now + 700)
    (request,) = load_requests(instance, spec)
    assert attempt(request) == 2
    die(instance, spec, request)
    monkeypatch.setattr("mm_assets.orchestration.schedules.time.time", lambda: now + 1800)
    assert load_requests(instance, spec) == [], "the second pause is twice the first"
    monkeypatch.setattr("mm_assets.orchestration.schedules.time.time", lambda: now + 2000)
    (request,) = load_requests(instance, spec)
    assert attempt(request) == 3


@pytest.mark.parametrize("what", ["published", "changed"])
def test_a_dead_load_that_got_further_is_followed_at_once(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, what: str
) -> None:
    """Where a load published a partition before it died, or the settings changed, the next tick requests another."""
    spec = demo_spec("docs", shards=str(inbox(*SHARDS)), bulk_threshold=0, run_schedule=True)
    (request,) = load_requests(instance, spec)
    if what == "published":
        assert run_partitions([(spec, "docs-00000")])[0].ok
    die(instance, spec, request)
    changed = spec.replace(renumber=not spec.renumber) if what == "changed" else spec
    (request,) = load_requests(instance, changed)
    assert attempt(request) == 1


def test_a_load_whose_partitions_failed_did_not_die(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed in a load waits as long as its own failures say, not as long as the loads that died before."""
    folder = inbox(SHARDS[0])
    spec = demo_spec("docs", shards=str(folder), bulk_threshold=0, run_schedule=True)
    load_requests(instance, spec)  # which decides the schema
    (folder / SHARDS[0]).write_bytes((folder / SHARDS[0]).read_bytes()[:20_000])
    (request,) = load_requests(instance, spec)
    die(instance, spec, request)
    now = time.time()
    with monkeypatch.context() as later:
        later.setattr("mm_assets.orchestration.schedules.time.time", lambda: now + 700)
        (request,) = load_requests(instance, spec)
        assert attempt(request) == 2
    job = build_definitions(spec).resolve_job_def("docs_load")
    given = {"run_config": request.run_config, "tags": request.tags}
    assert not job.execute_in_process(instance=instance, raise_on_error=False, **given).success
    assert [failed.number for failed in failed_runs(instance, spec).values()] == [1]
    monkeypatch.setattr("mm_assets.orchestration.schedules.time.time", lambda: now + 900)
    (request,) = load_requests(instance, spec)
    assert attempt(request) == 1


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("status", [None, *InstigatorStatus])
def test_a_schedule_of_loads_that_is_off_holds_nothing_up(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, status: InstigatorStatus | None, default: bool
) -> None:
    """The schedule of single partitions runs whatever is due unless that of loads is on, by hand or by default."""
    spec = demo_spec("docs", shards=str(inbox(*SHARDS)), bulk_threshold=1, run_schedule=default)
    if status is not None:
        data = ScheduleInstigatorData(spec.cron, start_timestamp=None)
        place = RegisteredCodeLocationOrigin("here")
        origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(place, "__repository__"), "docs_pending_load")
        instance.add_instigator_state(InstigatorState(origin, InstigatorType.SCHEDULE, status, data))
    switched = {InstigatorStatus.RUNNING: True, InstigatorStatus.STOPPED: False}
    expected = 0 if (default if status is None else switched.get(status, default)) else 2
    assert requested(ticks(instance, spec))["docs_pack"] == expected
