"""Sensors: new or changed shards become partitions and runs in one tick; what is published becomes a manifest."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import dagster as dg

from mm_assets.errors import MmAssetsError
from mm_assets.orchestration.checks import slow_pages
from mm_assets.orchestration.mirror import is_known_manifest
from mm_assets.orchestration.observed_shards import log_skipped, observe_shards
from mm_assets.orchestration.partitions import job_name, load_job_name, manifest_job_name, shard_partitions
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.runs import (
    FINGERPRINT_TAG,
    busy_partitions,
    dataset_state,
    failed_attempts,
    is_running,
    load_request,
    loads_at_work,
    pack_request,
    partition_fingerprints,
    registered_state,
)
from mm_assets.orchestration.shown import secrets_hidden
from mm_assets.pipeline.chain import PUBLISHED
from mm_assets.pipeline.partition.run import rare_collections
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.manifests import current_manifest
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import Present, planned_runs, registered_runs

__all__ = ["build_sensors"]


def build_sensors(spec: DatasetSpec, jobs: Sequence[Any]) -> list[dg.SensorDefinition]:
    """The sensor of shards, which requests runs of `jobs`, and the sensor of markers."""
    return [_shards_sensor(spec, jobs), _manifest_sensor(spec)]


def _shards_sensor(spec: DatasetSpec, jobs: Sequence[Any]) -> dg.SensorDefinition:
    partitions_def = shard_partitions(spec)
    status = dg.DefaultSensorStatus.RUNNING if spec.run_sensor else dg.DefaultSensorStatus.STOPPED

    @dg.sensor(
        name=f"{spec.name}_shards",
        jobs=jobs,
        minimum_interval_seconds=spec.poll_seconds,
        default_status=status,
        required_resource_keys={resource_key(spec)},
        description=f"Lists the shards of {spec.name}; new or changed ones that have settled are registered and run.",
    )
    @rare_collections()  # there may be very many partitions
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        dataset = open_dataset(context, spec)
        before = _Cursor.read(context.cursor)
        state = registered_state(dataset)
        with secrets_hidden():
            found = register(dataset, seen=before.seen, allow_empty=True)
        log_skipped(context.log, found)
        observe_shards(context.instance, spec, found)
        partitions = {partition.key: partition for partition in found.partitions}
        of_known = (partitions[key] for key in before.requested.keys() & partitions.keys())
        fingerprints = dict(partition_fingerprints(dataset, of_known))
        requested = {
            key: fingerprint for key, fingerprint in before.requested.items() if fingerprints.get(key) == fingerprint
        }
        # What this tick registered is pending. What else is pending is asked where something else has changed: all
        # markers have to be listed for it.
        present = None if state == before.settled else Present(dataset)
        pending = [*found.added, *found.changed] if present is None else present.pending()
        # Also while nothing is due: it ends the runs whose process is gone, and Dagster's run_retries repeats them.
        busy = busy_partitions(context.instance, dataset, partitions) if requested or pending else set()
        if present is not None:
            requested = {key: requested[key] for key in pending if key in requested}
        waiting = [key for key in pending if key in partitions and key not in requested]
        if waiting and present is not None:
            # A load or a run that another asked for has tried them as they are: the schedule tries them again later.
            fingerprints |= partition_fingerprints(dataset, (partitions[key] for key in waiting))
            failed = failed_attempts(context.instance, spec)
            tried = {key for key in waiting if key in failed and failed[key].fingerprint == fingerprints[key]}
            requested |= {key: fingerprints[key] for key in tried}
            waiting = [key for key in waiting if key not in tried]
        due = [key for key in waiting if key not in busy]
        is_bulk = len(due) > spec.bulk_threshold
        # Another load would take the same processors.
        if is_bulk and is_running(context.instance, dataset, load_job_name(spec)):
            due, is_bulk = [], False
        due = due if is_bulk else due[: spec.runs_per_tick]
        fingerprints |= partition_fingerprints(dataset, (partitions[key] for key in due))
        requested |= {key: fingerprints[key] for key in due}
        is_settled = len(due) == len(waiting) and not (found.added or found.changed or found.removed)
        known = set(context.instance.get_dynamic_partitions(partitions_def.name or ""))
        new = [key for key in partitions if key not in known]
        slow = slow_pages(spec, len(found.partitions)) if new else None
        if slow is not None:
            context.log.warning(slow)
        if found.removed:
            context.log.warning(f"shards of {len(found.removed)} partitions are gone: {', '.join(found.removed[:10])}")

        # Dagster never starts a run with a used key again, but a fingerprint may return with former shards or settings.
        def request(key: str) -> dg.RunRequest:
            return dg.RunRequest(
                run_key=f"{spec.name}:{key}:{fingerprints[key]}:{before.count}",
                job_name=job_name(spec),
                partition_key=key,
                tags={FINGERPRINT_TAG: fingerprints[key]},
            )

        if is_bulk:
            load = {key: fingerprints[key] for key in due}
            requests = [load_request(spec, load, f"{spec.name}:load:{before.count}")]
        else:
            planned = registered_runs(found, due) if present is None else planned_runs(present, due)
            requests = [pack_request(spec, request(key), stale) for key, stale in planned.items()]
        after = _Cursor(
            seen=found.seen,
            requested=requested,
            settled=state if is_settled else "",
            count=before.count + (1 if requests else 0),
        )
        return dg.SensorResult(
            run_requests=requests,
            dynamic_partitions_requests=[partitions_def.build_add_request(new)] if new else [],
            cursor=after.write(),
            skip_reason=None
            if requests
            else f"{len(partitions)} partitions, {len(found.unsettled)} shards not settled yet",
        )

    return sensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cursor:
    """State of the sensor of shards; it has no entry for published partitions.

    Attributes:
        seen: shards that have not settled, as `Registration.seen`.
        requested: fingerprints of the keys that were requested and are not published yet.
        settled: `registered_state` in which everything pending had been requested; empty in no such state.
        count: number of the next tick that requests anything. It starts with the time, so that keys stay new when
            the cursor is reset, and counts on from there, so that a repeated tick gives the same keys.
    """

    seen: Mapping[str, tuple[str, float]]
    requested: Mapping[str, str]
    settled: str
    count: int

    @classmethod
    def read(cls, cursor: str | None) -> "_Cursor":
        value: Mapping[str, Any] = json.loads(cursor) if cursor else {}
        return cls(
            seen={url: (str(fingerprint), float(since)) for url, (fingerprint, since) in value.get("seen", {}).items()},
            requested=dict(value.get("requested", {})),
            settled=str(value.get("settled", "")),
            count=int(value.get("count", time.time())),
        )

    def write(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def _manifest_sensor(spec: DatasetSpec) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{spec.name}_markers",
        job_name=manifest_job_name(spec),
        minimum_interval_seconds=spec.poll_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys={resource_key(spec)},
        description=f"Makes the next manifest of {spec.name} when what is published or registered changes.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        dataset = open_dataset(context, spec)
        if not context.cursor and not dataset.store.sizes(PUBLISHED.name):
            return dg.SkipReason("no partition is published")
        # Before anything else: it ends a run whose process is gone, and Dagster's run_retries repeats it.
        if is_running(context.instance, dataset, manifest_job_name(spec)):
            return dg.SkipReason("a manifest is being made")
        if loads := loads_at_work(context.instance, dataset, but=""):  # else a run for every partition of a long load
            return dg.SkipReason(f"the load {loads[0]} is at work, which makes the manifest itself")
        state = dataset_state(dataset)
        if state == context.cursor:
            return dg.SkipReason("nothing changed since the last manifest")
        context.update_cursor(state)
        if _is_up_to_date(context.instance, dataset):
            return dg.SkipReason("the newest manifest is of the present data")
        # The dataset may return to an earlier state, so the time is part of the key: Dagster runs a key only once.
        return dg.RunRequest(run_key=f"{spec.name}:{state}:{int(time.time())}")

    return sensor


def _is_up_to_date(instance: dg.DagsterInstance, dataset: DatasetStore) -> bool:
    """Whether the newest manifest is the one that would be made, and Dagster's latest; False where that is not known.

    A load makes a manifest too, and the manifest itself is a change of the dataset's folder.
    """
    try:
        report = current_manifest(Present(dataset))
    except MmAssetsError:  # the run says what is wrong
        return False
    return report is not None and is_known_manifest(instance, dataset.spec, report.digest)
