"""The schedule: registered partitions without an up-to-date marker are run, a capped number per tick."""

import dagster as dg

from mm_assets.etl.publish import pending_partitions
from mm_assets.orchestration.partitions import job_name, shard_partitions
from mm_assets.orchestration.resources import StorageRoot, resource_key
from mm_assets.orchestration.runs import busy_partitions
from mm_assets.spec import DatasetSpec

__all__ = ["build_schedule"]


def build_schedule(spec: DatasetSpec) -> dg.ScheduleDefinition:
    """A schedule over pending partitions; Dagster's own builder takes no dynamic partitions."""
    partitions_def = shard_partitions(spec)
    status = dg.DefaultScheduleStatus.RUNNING if spec.run_schedule else dg.DefaultScheduleStatus.STOPPED

    @dg.schedule(
        name=f"{spec.name}_pending",
        cron_schedule=spec.cron,
        job_name=job_name(spec),
        default_status=status,
        required_resource_keys={resource_key(spec)},
        description=f"Runs registered, unpublished partitions of {spec.name}, at most {spec.runs_per_tick} a tick.",
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        storage: StorageRoot = getattr(context.resources, resource_key(spec))
        known = set(context.instance.get_dynamic_partitions(partitions_def.name or ""))
        busy = busy_partitions(context.instance, spec)
        due = [key for key in pending_partitions(storage.open(spec)) if key in known and key not in busy]
        if not due:
            return dg.SkipReason("no registered partition is pending")
        tick = context.scheduled_execution_time.isoformat()
        return [
            dg.RunRequest(run_key=f"{spec.name}:{key}:{tick}", partition_key=key) for key in due[: spec.runs_per_tick]
        ]

    return schedule
