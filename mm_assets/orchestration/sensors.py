"""Sensors: new or changed shards become partitions and runs in one tick; what is published becomes a manifest."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from mm_assets.errors import MmAssetsError
from mm_assets.orchestration.checks import settled_checks
from mm_assets.orchestration.event_log import is_known_manifest
from mm_assets.orchestration.observed_shards import log_skipped, observe_shards
from mm_assets.orchestration.partitions import job_name, load_job_name, manifest_job_name, shard_partitions
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.runs import (
    ATTEMPT_TAG,
    FINGERPRINT_TAG,
    WORKING,
    busy_partitions,
    dataset_state,
    failed_manifest,
    failed_runs,
    live_runs,
    load_request,
    pack_request,
    partition_fingerprints,
    registered_state,
)
from mm_assets.orchestration.shown import secrets_hidden
from mm_assets.pipeline.partition.run import rare_collections
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import RECORDS, DatasetStore
from mm_assets.pipeline.state.manifests import current_manifest
from mm_assets.pipeline.state.records import canonical_json
from mm_assets.pipeline.state.registration import register, slow_pages
from mm_assets.pipeline.state.staleness import DatasetState, planned_runs, registered_runs
from mm_assets.storage.store import Store
from mm_assets.summaries import counted

__all__ = ["build_sensors"]


def build_sensors(spec: DatasetSpec, jobs: Sequence[Any]) -> list[dg.SensorDefinition]:
    """The sensor of shards, which requests runs of `jobs`, and the sensor of records, which requests manifests."""
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
        before = _Cursor.read(context.cursor, dataset.store)
        state = registered_state(dataset)
        with secrets_hidden():
            found = register(dataset, seen=before.seen, allow_empty=True)
        log_skipped(context.log, found)
        observe_shards(context.instance, spec, found)
        partitions = {partition.key: partition for partition in found.partitions}
        # What this tick registered is pending. What else is pending is read if something else has changed: it takes a
        # listing of all records.
        present = None if state == before.settled else DatasetState(dataset)
        pending = [*found.added, *found.changed] if present is None else present.incomplete
        if present is None:
            asked = {*before.requested, *pending}
            fingerprints = partition_fingerprints(dataset, (p for p in found.partitions if p.key in asked))
        else:
            fingerprints = present.recipes
        requested = {
            key: fingerprint for key, fingerprint in before.requested.items() if fingerprints.get(key) == fingerprint
        }
        # Also while nothing is due: it ends the runs whose process has exited, and Dagster's run_retries repeats them.
        busy = busy_partitions(context.instance, dataset, partitions) if requested or pending else set()
        if present is not None:
            requested = {key: requested[key] for key in pending if key in requested}
        waiting = [key for key in pending if key in partitions and key not in requested]
        if waiting and present is not None:
            # A load or a run that another asked for has tried them as they are: the schedule tries them again later.
            failed = failed_runs(context.instance, spec)
            tried = {key for key in waiting if key in failed and failed[key].fingerprint == fingerprints[key]}
            requested |= {key: fingerprints[key] for key in tried}
            waiting = [key for key in waiting if key not in tried]
        due = [key for key in waiting if key not in busy]
        is_bulk = len(due) > spec.bulk_threshold
        # Another load would take the same processors.
        if is_bulk and live_runs(context.instance, dataset, load_job_name(spec)):
            due, is_bulk = [], False
        due = due if is_bulk else due[: spec.runs_per_tick]
        requested |= {key: fingerprints[key] for key in due}
        is_settled = len(due) == len(waiting) and not (found.added or found.changed or found.removed)
        known = set(context.instance.get_dynamic_partitions(partitions_def.name or ""))
        new = [key for key in partitions if key not in known]
        number = len(found.partitions)
        _, rollup = settled_checks(context.instance, spec, number) if new else (spec, None)
        if new and (line := rollup or slow_pages(spec, number)) is not None:
            context.log.warning(line)
        if found.removed:
            number_removed = counted(len(found.removed), "partition")
            context.log.warning(f"the shards of {number_removed} are missing: {', '.join(found.removed[:10])}")

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
            cursor=after.write(dataset.store, before),
            skip_reason=None
            if requests
            else f"{counted(len(partitions), 'partition')}, {counted(len(found.unsettled), 'shard')} not settled yet",
        )

    return sensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cursor:
    """State of the sensor of shards; it has no entry for published partitions.

    The maps are in a file of the dataset's cache, since Dagster stores the cursor with every tick. The file has its
    digest in its name, and that of the tick before remains: a tick that is repeated, because its requests were not
    stored, finds what it had. Without the file, runs and their failures in Dagster say what was requested.

    Attributes:
        seen: shards that have not settled, as `Registration.seen`.
        requested: fingerprints of the keys that were requested and are not published yet.
        settled: `registered_state` in which everything pending had been requested; empty in no such state.
        count: number of the next tick that requests anything. It starts with the time, so that keys stay new when
            the cursor is reset, and counts on from there, so that a repeated tick gives the same keys.
        file: digest of the file that has the maps; empty if both are empty.
        former: digest of the file before it.
    """

    seen: Mapping[str, tuple[str, float]]
    requested: Mapping[str, str]
    settled: str
    count: int
    file: str = ""
    former: str = ""

    @classmethod
    def read(cls, cursor: str | None, store: Store) -> "_Cursor":
        value: Mapping[str, Any] = json.loads(cursor) if cursor else {}
        file = str(value.get("file", ""))
        content = store.found_bytes(_cursor_file(file)) if file else None
        is_whole = content is not None and _digest(content) == file
        maps = json.loads(content) if content and is_whole else {}
        return cls(
            seen={url: (str(fingerprint), float(since)) for url, (fingerprint, since) in maps.get("seen", {}).items()},
            requested=dict(maps.get("requested", {})),
            settled=str(value.get("settled", "")),
            count=int(value.get("count", time.time())),
            file=file,
            former=str(value.get("former", "")),
        )

    def write(self, store: Store, before: "_Cursor") -> str:
        """Returns the cursor, and stores its file if it is another one than before."""
        content = canonical_json({"seen": self.seen, "requested": self.requested})
        file = _digest(content) if self.seen or self.requested else ""
        former = before.former
        if file != before.file:
            if file:
                store.write_bytes(_cursor_file(file), content)
            former = before.file
            if before.former and before.former not in (file, former):
                store.delete(_cursor_file(before.former))
        value = {"settled": self.settled, "count": self.count, "file": file, "former": former}
        return json.dumps(value, sort_keys=True)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _cursor_file(digest: str) -> str:
    return f"cache/sensor/{digest}.json"


def _manifest_sensor(spec: DatasetSpec) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{spec.name}_records",
        job_name=manifest_job_name(spec),
        minimum_interval_seconds=spec.poll_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        required_resource_keys={resource_key(spec)},
        description=f"Builds the next manifest of {spec.name} when what is published or registered changes.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        dataset = open_dataset(context, spec)
        if not context.cursor and not dataset.store.sizes(RECORDS):
            return dg.SkipReason("no partition is published")
        # Before anything else: it ends a run whose process is gone, and Dagster's run_retries repeats it.
        if live_runs(context.instance, dataset, manifest_job_name(spec)):
            return dg.SkipReason("a manifest is being built")
        for load in live_runs(context.instance, dataset, load_job_name(spec)):
            if load.status in WORKING:  # else a run for every partition of a long load
                return dg.SkipReason(f"the load {load.run_id} is active, and builds the manifest itself")
        state = dataset_state(dataset)
        requested = f"{state}:requested"
        before = failed_manifest(context.instance, spec) if context.cursor == requested else None
        if context.cursor == state or (context.cursor == requested and before is None):
            return dg.SkipReason("nothing changed since the last manifest")
        if before is not None and before.due() > time.time():
            pause = (before.due() - time.time()) / 60
            advice = f"its page says why; the next attempt is in {pause:.0f} minutes"
            return dg.SkipReason(f"run {before.run_id} of {manifest_job_name(spec)} failed: {advice}")
        if _is_up_to_date(context.instance, dataset):
            context.update_cursor(state)
            return dg.SkipReason("the newest manifest is up to date")
        context.update_cursor(requested)
        # The dataset may return to an earlier state, so the time is part of the key: Dagster runs a key only once.
        tags = {ATTEMPT_TAG: str(1 if before is None else before.number + 1)}
        return dg.RunRequest(run_key=f"{spec.name}:{state}:{int(time.time())}", tags=tags)

    return sensor


def _is_up_to_date(instance: dg.DagsterInstance, dataset: DatasetStore) -> bool:
    """Whether the newest manifest is the one that would be made, and Dagster's latest; False where that is not known.

    A load makes a manifest too, and the manifest itself is a change of the dataset's folder.
    """
    try:
        report = current_manifest(DatasetState(dataset))
    except MmAssetsError:  # the run says what is wrong
        return False
    return report is not None and is_known_manifest(instance, dataset.spec, report.digest)
