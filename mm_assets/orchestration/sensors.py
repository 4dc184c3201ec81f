"""Sensors: new or changed shards become partitions and runs in one tick; new markers become a manifest."""

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

import dagster as dg

from mm_assets.etl.publish import pending_partitions
from mm_assets.etl.register import register
from mm_assets.orchestration.partitions import job_name, manifest_job_name, shard_partitions
from mm_assets.orchestration.resources import StorageRoot, resource_key
from mm_assets.orchestration.runs import busy_partitions, is_running, partition_mark
from mm_assets.spec import DatasetSpec

__all__ = ["build_sensors"]


def build_sensors(spec: DatasetSpec) -> list[dg.SensorDefinition]:
    """The sensor of shards and the sensor of markers."""
    return [_shards_sensor(spec), _manifest_sensor(spec)]


def _shards_sensor(spec: DatasetSpec) -> dg.SensorDefinition:
    partitions_def = shard_partitions(spec)
    status = dg.DefaultSensorStatus.RUNNING if spec.run_sensor else dg.DefaultSensorStatus.STOPPED

    @dg.sensor(
        name=f"{spec.name}_shards",
        job_name=job_name(spec),
        minimum_interval_seconds=spec.poll_seconds,
        default_status=status,
        required_resource_keys={resource_key(spec)},
        description=f"Lists the shards of {spec.name}; new or changed ones that have settled are registered and run.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        storage: StorageRoot = getattr(context.resources, resource_key(spec))
        dataset = storage.open(spec)
        seen, requested = _read_cursor(context.cursor)
        found = register(dataset, seen=seen, allow_empty=True)
        marks = {p.key: partition_mark(spec, p) for p in found.partitions}
        fresh = [key for key, mark in marks.items() if requested.get(key) != mark]
        pending = set(pending_partitions(dataset)) if fresh else set()
        busy = busy_partitions(context.instance, spec) if pending else set()
        due = [key for key in fresh if key in pending and key not in busy][: spec.runs_per_tick]
        done = [key for key in fresh if key not in pending]
        requested = {key: mark for key, mark in requested.items() if key in marks}
        requested |= {key: marks[key] for key in (*due, *done)}
        known = set(context.instance.get_dynamic_partitions(partitions_def.name or ""))
        new = [key for key in marks if key not in known]
        if found.removed:
            context.log.warning(f"shards of {len(found.removed)} partitions are gone: {', '.join(found.removed[:10])}")
        requests = [dg.RunRequest(run_key=f"{spec.name}:{key}:{marks[key]}", partition_key=key) for key in due]
        return dg.SensorResult(
            run_requests=requests,
            dynamic_partitions_requests=[partitions_def.build_add_request(new)] if new else [],
            cursor=_write_cursor(found.seen, requested),
            skip_reason=None if requests else f"{len(marks)} partitions, {len(found.unsettled)} shards not settled yet",
        )

    return sensor


def _read_cursor(cursor: str | None) -> tuple[dict[str, tuple[str, float]], dict[str, str]]:
    value: Mapping[str, Any] = json.loads(cursor) if cursor else {}
    seen = {url: (str(mark), float(since)) for url, (mark, since) in value.get("seen", {}).items()}
    return seen, dict(value.get("requested", {}))


def _write_cursor(seen: Mapping[str, tuple[str, float]], requested: Mapping[str, str]) -> str:
    return json.dumps({"seen": dict(seen), "requested": dict(requested)}, sort_keys=True)


def _manifest_sensor(spec: DatasetSpec) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{spec.name}_markers",
        job_name=manifest_job_name(spec),
        minimum_interval_seconds=spec.poll_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys={resource_key(spec)},
        description=f"Makes the next manifest of {spec.name} when partitions have been published, one at a time.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        storage: StorageRoot = getattr(context.resources, resource_key(spec))
        markers = storage.open(spec).markers()
        if not markers:
            return dg.SkipReason("no partition is published")
        mark = hashlib.sha256(json.dumps(markers, sort_keys=True).encode()).hexdigest()[:16]
        if mark == context.cursor:
            return dg.SkipReason("no marker is new")
        if is_running(context.instance, manifest_job_name(spec)):
            return dg.SkipReason("a manifest is being made")
        context.update_cursor(mark)
        # Markers may go back to an earlier state, so the time makes the key one that is not used up.
        return dg.RunRequest(run_key=f"{spec.name}:{mark}:{int(time.time())}")

    return sensor
