"""The two schedules of a dataset: a run for each of a few partitions, or one run for many."""

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
from mm_assets.orchestration.runs import load_config
from mm_assets.pipeline.pending import Present
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore

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
    assert sorted(Present(DatasetStore(spec)).markers()) == ["docs-00000", "docs-00001"]
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
