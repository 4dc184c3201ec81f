"""The schedules: a tick registers the shards and runs the partitions that are pending.

Partitions that were never tried come first, then those whose last try is longest ago. A failed one is not tried again
for a while unless its shards, its configuration or the schema changed, so that it neither runs forever nor delays
others; nor is a load that ended before any of its partitions did.
"""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from mm_assets.orchestration.observed_shards import log_skipped, observe_shards
from mm_assets.orchestration.partitions import add_partitions, job_name, load_job_name
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.runs import (
    ATTEMPT_TAG,
    FINGERPRINT_TAG,
    FailedRun,
    busy_partitions,
    failed_load,
    failed_runs,
    live_runs,
    load_request,
    pack_request,
)
from mm_assets.orchestration.shown import secrets_hidden
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import Registration, register
from mm_assets.pipeline.state.staleness import DatasetState, planned_runs

__all__ = ["build_schedules"]


def build_schedules(spec: DatasetSpec) -> list[dg.ScheduleDefinition]:
    """Two schedules over pending partitions: Dagster's own builder takes no dynamic partitions.

    One requests runs of single partitions, the other a load of more than `bulk_threshold`: a schedule has one job.
    """
    status = dg.DefaultScheduleStatus.RUNNING if spec.run_schedule else dg.DefaultScheduleStatus.STOPPED
    of_loads = f"{spec.name}_pending_load"
    given: Mapping[str, Any] = {
        "cron_schedule": spec.cron,
        "default_status": status,
        "required_resource_keys": {resource_key(spec)},
    }

    @dg.schedule(
        name=f"{spec.name}_pending",
        job_name=job_name(spec),
        description=f"Registers shards of {spec.name} and runs unpublished partitions, {spec.runs_per_tick} per tick.",
        **given,
    )
    def pending(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        dataset = open_dataset(context, spec)
        due = _due(context, dataset)
        if isinstance(due, dg.SkipReason):
            return due
        if len(due) > spec.bulk_threshold and _is_on(context.instance, of_loads, default=spec.run_schedule):
            return dg.SkipReason(f"{len(due):,} partitions are due: the schedule {of_loads} requests one run for them")
        tick = context.scheduled_execution_time.isoformat()

        def request(key: str) -> dg.RunRequest:
            return dg.RunRequest(run_key=f"{spec.name}:{key}:{tick}", partition_key=key, tags=due[key])

        planned = planned_runs(DatasetState(dataset), [*due][: spec.runs_per_tick])
        return [pack_request(spec, request(key), stale) for key, stale in planned.items()]

    @dg.schedule(
        name=of_loads,
        job_name=load_job_name(spec),
        description=f"As {spec.name}_pending, one run for all where more than {spec.bulk_threshold:,} are due.",
        **given,
    )
    def pending_load(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        dataset = open_dataset(context, spec)
        due = _due(context, dataset)
        if isinstance(due, dg.SkipReason):
            return due
        if len(due) <= spec.bulk_threshold:
            return dg.SkipReason(f"{len(due):,} partitions are due, not more than {spec.bulk_threshold:,}")
        if live_runs(context.instance, dataset, load_job_name(spec)):  # another one would take the same processors
            return dg.SkipReason(f"a load is running; then {len(due):,} more partitions are due")
        fingerprints = {key: tags[FINGERPRINT_TAG] for key, tags in due.items()}
        before = failed_load(context.instance, spec, fingerprints)
        if before is not None and before.due() > time.time():
            return dg.SkipReason(_waits(spec, before, len(due)))
        run_key = f"{of_loads}:{context.scheduled_execution_time.isoformat()}"
        return load_request(spec, fingerprints, run_key, before)

    return [pending, pending_load]


def _waits(spec: DatasetSpec, before: FailedRun, num_due: int) -> str:
    """Why a load is not requested again yet."""
    again = datetime.fromtimestamp(before.due(), tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        f"run {before.run_id} of {load_job_name(spec)} (attempt {before.number}) ended before any of its partitions "
        f"did, and {num_due:,} partitions are due: its page says why; the next attempt is after {again}, or at once "
        f"with `mm-assets run --dataset {spec.name}`"
    )


def _is_on(instance: dg.DagsterInstance, name: str, *, default: bool) -> bool:
    """Whether a schedule is started; without a state, or with one that refers to the declaration, it is as declared."""
    states = [state for state in instance.all_instigator_state() if state.instigator_name == name]
    switched = [state.status.name for state in states if state.status.name != "DECLARED_IN_CODE"]
    return "RUNNING" in switched if switched else default


def _due(context: dg.ScheduleEvaluationContext, dataset: DatasetStore) -> dict[str, dict[str, str]] | dg.SkipReason:
    """The partitions to run, the most urgent first, with the tags of the attempt; the shards are registered."""
    spec = dataset.spec
    with secrets_hidden():
        found = register(dataset, allow_empty=True)
    log_skipped(context.log, found)
    observe_shards(context.instance, spec, found, add_partitions(context.instance, spec, found.partitions))
    busy = busy_partitions(context.instance, dataset, (partition.key for partition in found.partitions))
    state = DatasetState(dataset)
    pending = [key for key in state.incomplete if key not in busy]
    if not pending:
        return dg.SkipReason(f"none of {len(found.partitions)} registered partitions is pending{_young(spec, found)}")
    failed = failed_runs(context.instance, spec)
    again = {
        key: failed[key].number for key in pending if key in failed and failed[key].fingerprint == state.recipes[key]
    }
    now = time.time()
    due = [key for key in pending if key not in again or failed[key].due() <= now]
    if not due:
        return dg.SkipReason(f"all {len(pending)} pending partitions failed recently and wait for their next try")
    due.sort(key=lambda key: (failed[key].when if key in failed else 0.0, key))
    return {key: {FINGERPRINT_TAG: state.recipes[key], ATTEMPT_TAG: str(again.get(key, 0) + 1)} for key in due}


def _young(spec: DatasetSpec, found: Registration) -> str:
    """The part of a skipped tick's message about shards that were seen and not registered."""
    if not found.unsettled:
        return ""
    # A schedule has no cursor, so it cannot compare two ticks where the storage gives no modification time.
    return (
        f"; {len(found.unsettled)} shards are younger than settle_seconds ({spec.settle_seconds:g}) or have no "
        f"modification time; the sensor {spec.name}_shards and `mm-assets register` take the latter too"
    )
