"""The schedule: a tick registers the shards and runs a limited number of partitions without an up-to-date marker.

Partitions that were never tried come first, then those whose last try is longest ago. A failed one is not tried again
for a while unless its shards, its configuration or the schema changed, so that it neither runs forever nor delays
others.
"""

import time

import dagster as dg

from mm_assets.orchestration.partitions import add_partitions, job_name
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.runs import (
    ATTEMPT_TAG,
    FINGERPRINT_TAG,
    busy_partitions,
    failed_attempts,
    pack_requests,
    partition_fingerprints,
)
from mm_assets.pipeline.pending import pending_partitions
from mm_assets.pipeline.register import Registration, register
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["build_schedule"]


def build_schedule(spec: DatasetSpec) -> dg.ScheduleDefinition:
    """A schedule over pending partitions; Dagster's own builder takes no dynamic partitions."""
    status = dg.DefaultScheduleStatus.RUNNING if spec.run_schedule else dg.DefaultScheduleStatus.STOPPED

    @dg.schedule(
        name=f"{spec.name}_pending",
        cron_schedule=spec.cron,
        job_name=job_name(spec),
        default_status=status,
        required_resource_keys={resource_key(spec)},
        description=f"Registers shards of {spec.name} and runs unpublished partitions, {spec.runs_per_tick} per tick.",
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        dataset = open_dataset(context, spec)
        found = register(dataset, allow_empty=True)
        add_partitions(context.instance, spec, found.partitions)
        busy = busy_partitions(context.instance, spec, (partition.key for partition in found.partitions))
        pending = [key for key in pending_partitions(dataset) if key not in busy]
        if not pending:
            return dg.SkipReason(
                f"none of {len(found.partitions)} registered partitions is pending{_young(spec, found)}"
            )
        fingerprints = partition_fingerprints(dataset, found.partitions)
        failed = failed_attempts(context.instance, spec)
        again = {
            key: failed[key].number
            for key in pending
            if key in failed and failed[key].fingerprint == fingerprints.get(key)
        }
        now = time.time()
        due = [key for key in pending if key not in again or failed[key].due() <= now]
        if not due:
            return dg.SkipReason(f"all {len(pending)} pending partitions failed recently and wait for their next try")
        due.sort(key=lambda key: (failed[key].when if key in failed else 0.0, key))
        tick = context.scheduled_execution_time.isoformat()

        def request(key: str) -> dg.RunRequest:
            return dg.RunRequest(
                run_key=f"{spec.name}:{key}:{tick}",
                partition_key=key,
                tags={FINGERPRINT_TAG: fingerprints.get(key, ""), ATTEMPT_TAG: str(again.get(key, 0) + 1)},
            )

        return pack_requests(dataset, due[: spec.runs_per_tick], request)

    return schedule


def _young(spec: DatasetSpec, found: Registration) -> str:
    """The part of a skipped tick's message about shards that were seen and not registered."""
    if not found.unsettled:
        return ""
    # A schedule has no cursor, so it cannot compare two ticks where the storage gives no modification time.
    return (
        f"; {len(found.unsettled)} shards are younger than settle_seconds ({spec.settle_seconds:g}) or have no "
        f"modification time; the sensor {spec.name}_shards and `mm-assets register` take the latter too"
    )
