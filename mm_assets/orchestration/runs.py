"""The runs of a dataset: runs of one partition must not overlap, and a dead one must not block it.

Two mechanisms separate runs. A request for runs leaves out the partitions that a live run is working on; and each step
claims its partition while it works, for whose end others wait, also on another host. A run is alive while its process
is, and on another host while it renews its claim.
"""

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from dagster import DagsterEventType

from mm_assets.errors import MmAssetsError, meant
from mm_assets.orchestration.partitions import (
    asset_key,
    job_name,
    load_job_name,
    load_op_name,
    manifest_job_name,
    shard_partitions,
)
from mm_assets.orchestration.shown import failure_of, shown_cause
from mm_assets.pipeline.chain import CHAIN, MANIFEST, PUBLISHED, export_stage
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import Claims, process_is_gone, process_tag
from mm_assets.pipeline.state.folder import RECORDS, DatasetStore
from mm_assets.pipeline.state.records import Partition
from mm_assets.pipeline.state.staleness import Stale

__all__ = [
    "ATTEMPT_TAG",
    "FINGERPRINT_TAG",
    "LOAD_TAG",
    "MAX_RETRIES_TAG",
    "PARTITION_TAG",
    "PROCESS_TAG",
    "WORKING",
    "FailedRun",
    "attempt_tags",
    "busy_partitions",
    "claimed_run",
    "dataset_state",
    "exclusive_step",
    "expect_partition",
    "failed_load",
    "failed_manifest",
    "failed_runs",
    "full_pool_said",
    "live_runs",
    "load_config",
    "load_request",
    "pack_request",
    "partition_fingerprints",
    "process_tags",
    "registered_state",
    "tag_process",
]

PARTITION_TAG = "dagster/partition"
MAX_RETRIES_TAG = "dagster/max_retries"  # by the daemon
_HIDDEN = ".dagster/mm_assets."  # Dagster's pages do not show tags that begin with `.dagster/`
PROCESS_TAG = f"{_HIDDEN}process"
FINGERPRINT_TAG = f"{_HIDDEN}fingerprint"
ATTEMPT_TAG = f"{_HIDDEN}attempt"
REASON_TAG = "mm_assets/reason"
LOAD_TAG = "mm_assets/load"  # id of the load: of its first run
_MAX_PARTITIONS_IN_CONFIG = 1000  # of a run
_BEGUN = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.SUSPENDED)  # the latter without a launcher's worker
WORKING = [dg.DagsterRunStatus.STARTING, *_BEGUN, dg.DagsterRunStatus.CANCELING]
_UNFINISHED = [dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED, *WORKING]
_FAILED = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_DAY = 86_400.0
_LOOK_SECONDS = 2.0  # between looks for the end of a claim
_MAX_LAUNCH_SECONDS = 3600.0  # of a run that waits to be started on another host: a cluster may have to grow
_MAX_UNCLAIMED_SECONDS = 300.0  # of a run on another host that has begun: between two steps it has no claim
_FIRST_PAUSE = 600.0  # shorter than the default period of the schedule: the first retry is its next tick
_ONE_PROCESS = {dg.in_process_executor.name, "execute_in_process_executor"}  # the latter is not public
_claims: dict[str, Claims] = {}  # as this process sees them, by the folder of the dataset
_unclaimed: dict[str, float] = {}  # by run, since when this process has seen it without a claim
_MAX_FAILED_RUNS = 10_000  # that are read; older ones are ignored
_MAX_FAILED_LOADS = 300  # of these the events of partitions that failed are read; two days have so many ticks


# -- claims


@contextmanager
def exclusive_step(context: dg.AssetExecutionContext | dg.OpExecutionContext, dataset: DatasetStore) -> Iterator[str]:
    """Claims the partition of a step, after those who have claimed it before; yields its key and tags the run.

    Raises:
        dg.Failure: the run has no partition, or the storage failed.
    """
    expect_partition(context.run, context.instance, dataset.spec)
    tag_process(context)
    key = context.partition_key
    with Claims(dataset, context.run.run_id) as claims:
        try:
            earlier = {claim.load: claim for claim in claims.take([key]) if key in claim}
            for claim in earlier.values():
                context.log.info(f"{key} is claimed by a run on {claim.place}: waiting for it")
            while any(claim.load in earlier and key in claim for claim in claims.others()):
                time.sleep(_LOOK_SECONDS)
        except MmAssetsError as error:
            raise failure_of(error, allow_retries=True) from shown_cause(error)
        yield key


def expect_partition(run: dg.DagsterRun, instance: dg.DagsterInstance, spec: DatasetSpec) -> None:
    """Raises `dg.Failure` for a run that names no partition, or one that is not registered, with what to do."""
    name, key = shard_partitions(spec).name or "", run.tags.get(PARTITION_TAG)
    if key is not None and instance.has_dynamic_partition(name, key):
        return
    keys = sorted(instance.get_dynamic_partitions(name))
    fault = "names no partition" if key is None else f"names {key!r}, which is not registered{meant(key, keys)}"
    tags = json.dumps({PARTITION_TAG: keys[0] if keys else "KEY"})
    detail = (
        f"the run {fault}: choose one under Materialize in the UI, or with --tags '{tags}' on the command "
        f"line; `mm-assets run --dataset {spec.name}` registers the shards and runs all of them"
    )
    instance.add_run_tags(run.run_id, {MAX_RETRIES_TAG: "0"})  # the daemon would repeat it
    raise dg.Failure(description=detail, allow_retries=False)


@contextmanager
def claimed_run(context: dg.AssetExecutionContext | dg.OpExecutionContext, dataset: DatasetStore) -> Iterator[Claims]:
    """Tags a run without a partition, and claims nothing in its name yet: that shows that the run is alive.

    Raises:
        SourceError: the storage cannot be read or written.
    """
    tag_process(context)
    with Claims(dataset, context.run.run_id) as claims:
        claims.take(())
        yield claims


def tag_process(context: dg.AssetExecutionContext | dg.OpExecutionContext) -> None:
    """Tags the run of a step with this process, unless the run has others."""
    # With other executors the process of a step ends before its run does and does not tell whether the run is alive.
    if context.job_def.executor_def.name in _ONE_PROCESS:
        tags = process_tags(context.run.run_id)
        if any(context.run.tags.get(name) != value for name, value in tags.items()):
            context.instance.add_run_tags(context.run.run_id, tags)


def process_tags(run_id: str) -> dict[str, str]:
    """Tags of a run that this process executes itself."""
    tag = process_tag(run_id)
    return {} if tag is None else {PROCESS_TAG: tag}


# -- runs that have not finished


def busy_partitions(instance: dg.DagsterInstance, dataset: DatasetStore, registered: Iterable[str]) -> set[str]:
    """Those of the registered keys that a live run is working on or waiting for; dead runs are ended."""
    spec = dataset.spec
    runs = live_runs(instance, dataset, job_name(spec))
    busy = {run.tags[PARTITION_TAG] for run in runs if PARTITION_TAG in run.tags}
    for run in live_runs(instance, dataset, load_job_name(spec)):
        busy |= set(loaded_partitions(run, spec) or registered)
    return busy


def pack_request(spec: DatasetSpec, request: dg.RunRequest, stale: Stale) -> dg.RunRequest:
    """The request of a run of one partition, of the assets from the first stale one on, and tagged with the reason."""
    left = CHAIN[CHAIN.index(stale.first) :]
    stages = [stage for stage in left if stage is not MANIFEST and stage.is_made(spec)]
    stages += map(export_stage, spec.exports)
    tags = {**request.tags, REASON_TAG: stale.reason}
    return request.with_replaced_attrs(asset_selection=[asset_key(spec, stage) for stage in stages], tags=tags)


def load_request(
    spec: DatasetSpec, due: Mapping[str, str], run_key: str, before: "FailedRun | None" = None
) -> dg.RunRequest:
    """The request of a load.

    Args:
        spec: the declaration.
        due: fingerprints by the key of the partitions to run; of very many all that are pending run.
        run_key: the request's.
        before: the last attempt, where it is repeated.
    """
    number = 1 if before is None else before.number + 1
    return dg.RunRequest(
        run_key=run_key,
        job_name=load_job_name(spec),
        run_config=load_config(spec, due, only_pending=True),
        tags={FINGERPRINT_TAG: _digest(due), ATTEMPT_TAG: str(number)},
    )


def _digest(fingerprints: Mapping[str, str]) -> str:
    """The fingerprint of a load of partitions with these."""
    return hashlib.sha256(json.dumps(sorted(fingerprints.items())).encode()).hexdigest()[:16]


def load_config(spec: DatasetSpec, partitions: Collection[str], **config: object) -> dict[str, Any]:
    """The run configuration of a load of these partitions; of none or very many, of those that are pending then."""
    named = list(partitions) if len(partitions) <= _MAX_PARTITIONS_IN_CONFIG else []
    return {"ops": {load_op_name(spec): {"config": {"partitions": named, **config}}}}


def loaded_partitions(run: dg.DagsterRun, spec: DatasetSpec) -> list[str]:
    """The partitions of `load_config` in a run."""
    config: Mapping[str, Any] = run.run_config
    ops = config.get("ops", {})
    return list(ops.get(load_op_name(spec), {}).get("config", {}).get("partitions", ()))


def full_pool_said(instance: dg.DagsterInstance, dataset: DatasetStore) -> str | None:
    """Returns which runs have all slots of the dataset's pool, so that a run has to wait; None if one is free.

    The slots of the dataset's runs whose process is gone are freed.
    """
    pool, storage = dataset.spec.pool, instance.event_log_storage
    if pool is None or not storage.supports_global_concurrency_limits:
        return None
    for job in (load_job_name(dataset.spec), job_name(dataset.spec)):
        live_runs(instance, dataset, job)
    found = storage.get_concurrency_info(pool)
    if found.limit is None or found.active_slot_count < found.limit:
        return None
    runs = ", ".join(sorted(run_id[:8] for run_id in found.active_run_ids))
    return f"waiting for a slot of the pool {pool!r}: its limit is {found.limit}, in use by {runs or 'nothing'}"


def live_runs(instance: dg.DagsterInstance, dataset: DatasetStore, job: str) -> list[dg.DagsterRun]:
    """Returns the runs of a job that have not finished. Ends those whose process has exited: they seem to be running.

    A process that is killed, or that Dagster's database did not answer, cannot report the end of its run.
    """
    runs = instance.get_runs(dg.RunsFilter(job_name=job, statuses=_UNFINISHED))
    return [run for run in runs if not _end_if_dead(instance, dataset, run)]


def _end_if_dead(instance: dg.DagsterInstance, dataset: DatasetStore, run: dg.DagsterRun) -> bool:
    if run.status == dg.DagsterRunStatus.QUEUED:
        return False
    message = "the process of this run has exited: it was killed, or the machine restarted"
    gone = process_is_gone(run.run_id, run.tags.get(PROCESS_TAG, ""))
    if gone is None:
        limit = _MAX_UNCLAIMED_SECONDS if run.status in _BEGUN else _MAX_LAUNCH_SECONDS
        gone = _unclaimed_seconds(dataset, run) > limit
        message = f"this run has claimed no partition for {limit / 60:.0f} minutes"
    if not gone:
        return False
    # Read again: it may have finished, and its process with it, after we asked for the runs.
    latest = instance.get_run_by_id(run.run_id)
    if latest is not None and not latest.is_finished:
        instance.report_run_failed(latest, f"{message}\n{_again(dataset.spec, run)}")
        if dataset.spec.pool is not None and instance.event_log_storage.supports_global_concurrency_limits:
            # Dagster would free its slot if run monitoring is set up for that, and by its daemon.
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
    return True


def _again(spec: DatasetSpec, run: dg.DagsterRun) -> str:
    """What to do about a run whose process is gone."""
    partition = run.tags.get(PARTITION_TAG)
    command = f"mm-assets run --dataset {spec.name}" + ("" if partition is None else f" --partition {partition}")
    return f"What to do: nothing if Dagster's daemon repeats the run (run_retries), else: {command}"


def _unclaimed_seconds(dataset: DatasetStore, run: dg.DagsterRun) -> float:
    """Returns for how long this process has seen a run without a claim; clocks of hosts are not compared."""
    claims = _claims.setdefault(dataset.store.url, Claims(dataset, ""))  # it knows since when claims are unchanged
    now, load = time.monotonic(), run.tags.get(LOAD_TAG, run.run_id)
    try:
        is_claimed = any(claim.load in (run.run_id, load) for claim in claims.others())
    except MmAssetsError:  # the storage does not answer
        is_claimed = True
    if is_claimed:
        _unclaimed.pop(run.run_id, None)
    return 0.0 if is_claimed else now - _unclaimed.setdefault(run.run_id, now)


# -- runs that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """The last run of a partition, or of a load, that failed.

    Attributes:
        fingerprint: that of the partition, or of the load's, at the time; empty where the run was requested by hand.
        when: seconds since 1970 at which it ended.
        number: how many runs with that fingerprint had been requested by then.
        run_id: the run.
    """

    fingerprint: str
    when: float
    number: int
    run_id: str

    @classmethod
    def of(cls, tags: Mapping[str, str], when: float, run_id: str) -> "FailedRun":
        """That with the tags of a run, or of a planned event of a load."""
        number = tags.get(ATTEMPT_TAG, "")
        return cls(
            fingerprint=tags.get(FINGERPRINT_TAG, ""),
            when=when,
            number=int(number) if number.isdecimal() and int(number) else 1,
            run_id=run_id,
        )

    def due(self) -> float:
        """Seconds since 1970 before which the same fingerprint is not tried again: the pause doubles, to a day."""
        return self.when + min(_FIRST_PAUSE * 2.0 ** min(self.number - 1, 16), _DAY)


def failed_runs(instance: dg.DagsterInstance, spec: DatasetSpec) -> dict[str, FailedRun]:
    """The last failure of each partition key, alone or in a load, of those recent enough to matter."""
    found: dict[str, FailedRun] = {}
    for record in _failed_records(instance, job_name(spec), limit=_MAX_FAILED_RUNS):
        # The newest is the first.
        found.setdefault(record.dagster_run.tags.get(PARTITION_TAG, ""), _failed_run(record))
    for record in _failed_records(instance, load_job_name(spec), limit=_MAX_FAILED_LOADS):
        for key, run in _failed_in(instance, spec, record.dagster_run.run_id):
            if key not in found or found[key].when < run.when:
                found[key] = run
    return found


def failed_load(instance: dg.DagsterInstance, spec: DatasetSpec, due: Mapping[str, str]) -> FailedRun | None:
    """Returns the last load that was requested, if it failed and would begin with the same partitions again.

    Returns None if any of them was published, failed, or changed in the meantime.

    Args:
        instance: the instance.
        spec: the declaration.
        due: fingerprints by the key of the partitions that are due.
    """
    failed = _failed_records(instance, load_job_name(spec), limit=_MAX_FAILED_LOADS)
    record = next((record for record in failed if record.dagster_run.tags.get(FINGERPRINT_TAG)), None)
    if record is None:
        return None
    attempt, named = _failed_run(record), loaded_partitions(record.dagster_run, spec) or due
    if _digest({key: due.get(key, "") for key in named}) != attempt.fingerprint:
        return None
    return None if any(_failed_in(instance, spec, attempt.run_id)) else attempt


def failed_manifest(instance: dg.DagsterInstance, spec: DatasetSpec) -> FailedRun | None:
    """Returns the latest run of the manifest if it failed; None if it succeeded or was canceled, or there is none."""
    latest = next(iter(instance.get_run_records(dg.RunsFilter(job_name=manifest_job_name(spec)), limit=1)), None)
    has_failed = latest is not None and latest.dagster_run.status == dg.DagsterRunStatus.FAILURE
    return _failed_run(latest) if latest is not None and has_failed else None


def _failed_run(record: dg.RunRecord) -> FailedRun:
    run, when = record.dagster_run, record.end_time or record.update_timestamp.timestamp()
    return FailedRun.of(run.tags, when, run.run_id)


def _failed_in(instance: dg.DagsterInstance, spec: DatasetSpec, run_id: str) -> Iterator[tuple[str, FailedRun]]:
    """The partitions that failed in a load, each with its attempt."""
    published = asset_key(spec, PUBLISHED)
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION_PLANNED):
        event = entry.get_dagster_event()
        if event.asset_key == published and event.partition is not None:
            yield event.partition, FailedRun.of(event.logging_tags or {}, entry.timestamp, run_id)


def _failed_records(instance: dg.DagsterInstance, job: str, *, limit: int) -> Sequence[dg.RunRecord]:
    since = datetime.fromtimestamp(time.time() - 2 * _DAY, tz=UTC)
    return instance.get_run_records(dg.RunsFilter(job_name=job, statuses=_FAILED, updated_after=since), limit=limit)


def attempt_tags(fingerprint: str, before: FailedRun | None) -> dict[str, str]:
    """The facts of an attempt at a partition that failed in a load, for the next one's `failed_runs`.

    Args:
        fingerprint: the partition's.
        before: the last failure before it, if there was one.
    """
    number = 1 if before is None or before.fingerprint != fingerprint else before.number + 1
    return {FINGERPRINT_TAG: fingerprint, ATTEMPT_TAG: str(number)}


# -- fingerprints


def partition_fingerprints(dataset: DatasetStore, partitions: Iterable[Partition]) -> Mapping[str, str]:
    """By key, a digest that changes when a shard of the partition, the configuration or the dataset's schema does."""
    listed: Sequence[Partition] = list(partitions)
    if not listed:
        return {}
    made_with = PUBLISHED.digest(dataset.spec, dataset.schema())
    return {p.key: p.recipe(made_with) for p in listed}


def dataset_state(dataset: DatasetStore) -> str:
    """A digest that changes when a record, the registered partitions, the configuration or the schema does.

    Records are listed and not read: there may be very many, and their names say all.
    """
    digest = hashlib.sha256(registered_state(dataset).encode())
    for name in dataset.store.sizes(RECORDS):
        digest.update(f"{name}\n".encode())
    return digest.hexdigest()[:16]


def registered_state(dataset: DatasetStore) -> str:
    """A digest that changes when the registered partitions, the manifest, the configuration or the schema does.

    It takes one request, however many partitions there are. A manifest deletes records of lost files, and lists what
    other runs have published.
    """
    digest = hashlib.sha256(PUBLISHED.digest(dataset.spec).encode())
    for options in dataset.spec.exports:
        digest.update(export_stage(options).digest(dataset.spec).encode())
    listed = dataset.store.listing("")
    for name in ("schema.json", "shards.json", "manifest.json"):
        digest.update(f"{name} {listed[name].version if name in listed else None}\n".encode())
    return digest.hexdigest()[:16]
