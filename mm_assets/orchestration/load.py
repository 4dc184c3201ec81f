"""The load: one run of Dagster that takes many partitions from shards to markers, and makes the manifest.

Its driver hands partitions to processes that know nothing of Dagster, and records each as it ends: the same
materializations and check results as those of the job of one partition. Markers are the truth, and Dagster mirrors
them: what is published and not recorded, because a load was killed or the database was away, is recorded by the next.
"""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterEventType
from pydantic import Field

from mm_assets.errors import ConfigError, MmAssetsError, SourceError
from mm_assets.orchestration.checks import UNIQUE_IDS
from mm_assets.orchestration.events import Batch, RunEvents
from mm_assets.orchestration.partitions import add_partitions, asset_key, code_version, load_job_name, load_op_name
from mm_assets.orchestration.patience import PAUSES, patient
from mm_assets.orchestration.report import (
    MaterializeResult,
    check_results,
    losses_table,
    manifest_result,
    marker_version,
    published_result,
    stage_result,
    stage_version,
)
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.rollup import failed_before, rolled_up
from mm_assets.orchestration.runs import attempt_tags, partition_lock, tag_process, working_runs
from mm_assets.pipeline.chain import CHAIN, PUBLISHED, RAW_SHARDS, STAGE_OF_FILE, Stage, packed_files
from mm_assets.pipeline.engines.processes import Processes, Task, num_processors
from mm_assets.pipeline.losses import loss_totals
from mm_assets.pipeline.partition_run import PartitionReport, failed_report
from mm_assets.pipeline.pending import Present, chosen_partitions, given_start, stage_named
from mm_assets.pipeline.publish import build_manifest
from mm_assets.pipeline.register import register
from mm_assets.pipeline.run import StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore, StageFailure, StageRecord
from mm_assets.summaries import counted

__all__ = ["MOST_PARTITIONS", "Load", "LoadConfig", "PartitionRun", "build_load_job", "catch_up", "load_job"]

MOST_PARTITIONS = 1000  # of one run: its page reads all events, 25 of each
_MANIFEST_SECONDS = 900.0  # a long load makes what it has published available meanwhile
_NAMED = 10  # failed partitions in the message of a run
_TAG = "dagster/"
_VERSION = f"{_TAG}data_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRun:
    """How the run of one partition ended, or that of a manifest.

    Attributes:
        dataset: dataset name.
        partition: partition key; empty for a manifest.
        run_id: Dagster's run id; empty where no run was created.
        failures: what went wrong, one line each; empty on success.
        warnings: violations of checks that do not stop a partition, and remarks of its stages, one line each.
        records: what the stages recorded that ran, by name.
    """

    dataset: str
    partition: str
    run_id: str
    failures: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    records: Mapping[Stage, StageRecord] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the run succeeded and every check that stops a partition passed."""
        return not self.failures


class LoadConfig(dg.Config):
    """What a load does.

    Attributes:
        partitions: keys of the partitions to run; none means those that are pending, as many as one run takes.
        first_stage: run from this stage on, or from an earlier one that is stale, also what is up to date; without
            `partitions` all that are registered. Empty starts each at its first stale stage.
        only_pending: leave out those that were published since they were named.
        processes: partitions that are in flight at a time; 1 runs them in the process of the load, 0 takes as many
            as it may use processors.
    """

    partitions: list[str] = Field(default_factory=list)
    first_stage: str = ""
    only_pending: bool = False
    processes: int = 0


def build_load_job(spec: DatasetSpec) -> dg.JobDefinition:
    """The job `<dataset>_load`, which registers the shards first."""

    def drive(context: dg.OpExecutionContext, config: LoadConfig) -> None:
        patient(context.instance)
        dataset = open_dataset(context, spec)
        found = register(dataset, allow_empty=True)
        add_partitions(context.instance, spec, found.partitions)
        try:
            first = stage_named(config.first_stage, option="first_stage") if config.first_stage else None
        except ConfigError as error:
            raise dg.Failure(description=str(error), allow_retries=False) from error
        present = Present(dataset)
        keys = config.partitions or chosen_partitions(present, first=first)
        if config.only_pending or (
            context.run.parent_run_id and first is None
        ):  # its first attempt may have done a part
            pending = set(present.pending())
            keys = [key for key in keys if key in pending]
        if len(keys) > MOST_PARTITIONS:
            said = f"{len(keys):,} partitions are to run: this run takes the first {MOST_PARTITIONS:,}"
            more = "" if first is None else f", up to {keys[MOST_PARTITIONS - 1]}: name the others in `partitions`"
            context.log.warning(said + more)
        with Processes(config.processes or num_processors()) as processes:
            Load(dataset=dataset, keys=keys[:MOST_PARTITIONS], first=first, processes=processes).run(context)

    return load_job(spec, drive)


def load_job(spec: DatasetSpec, drive: Callable[[dg.OpExecutionContext, LoadConfig], object]) -> dg.JobDefinition:
    """A job of one step, in one process, that calls a driver."""

    @dg.op(name=load_op_name(spec), required_resource_keys={resource_key(spec)})
    def load_partitions(context: dg.OpExecutionContext, config: LoadConfig) -> None:
        tag_process(context)
        drive(context, config)

    @dg.job(
        name=load_job_name(spec),
        executor_def=dg.in_process_executor,
        description=f"Many partitions of {spec.name}, from shards to markers, and the manifest.",
    )
    def job() -> None:
        load_partitions()

    return job


@dataclass(kw_only=True)
class Load:
    """A load at work.

    Attributes:
        dataset: the dataset's folder.
        keys: the partitions to run.
        processes: where they run.
        first: the stage to start at, or an earlier one that is stale; None for the first stale one of what is pending.
        observed: called with each partition as it ends.
        failed: keys of the partitions that failed.
        warnings: what the manifest's check found, one line each.
        is_complete: whether every partition ended, and the manifest was made.
    """

    dataset: DatasetStore
    keys: Sequence[str]
    processes: Processes
    first: Stage | None = None
    observed: Callable[[PartitionRun], object] = lambda _: None
    failed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_complete: bool = False

    def run(self, context: dg.OpExecutionContext) -> None:
        """Runs the partitions and makes the manifest.

        Raises:
            dg.Failure: partitions failed, or the manifest could not be made.
        """
        spec, home = self.dataset.spec, Path(context.instance.root_directory)
        schema = self.dataset.schema()
        present = Present(self.dataset, schema)
        mirror = _Mirror(context, self.dataset)
        mirror.catch_up(present, set(self.keys))
        elsewhere = working_runs(context.instance, spec)

        def guard(key: str) -> AbstractContextManager[None]:
            if key in elsewhere:
                detail = f"run {elsewhere[key]} is working on this partition: run it again when that has ended"
                raise SourceError(self.dataset.store.url_of(PUBLISHED.name), f"{key}: {detail}")
            return partition_lock(home, spec.name, key)

        pending = set(present.pending())
        tasks = [
            Task(
                partition=present.partitions[key],
                first=given_start(self.first, is_pending=key in pending),
                markers=present.names.get(key, ()),
            )
            for key in self.keys
            if key in present.partitions
        ]
        gone = [
            failed_report(StageFailure(partition=key, stage=RAW_SHARDS.name, detail="it is not registered any more"))
            for key in self.keys
            if key not in present.partitions
        ]
        made = time.monotonic()
        try:
            with closing(self.processes.run(spec, schema, tasks, guard=guard)) as reports:
                for report in chain(gone, reports):
                    mirror.record(report)
                    if not report.ok:
                        self.failed.append(report.partition)
                    self.observed(_partition_run(spec.name, context.run_id, report))
                    if time.monotonic() - made > _MANIFEST_SECONDS:
                        self._make_manifest(mirror)
                        made = time.monotonic()
            mirror.add_passed()
            self._make_manifest(mirror)
        except MmAssetsError as error:
            raise dg.Failure(description=f"{type(error).__name__}: {error}", allow_retries=False) from error
        mirror.flush()
        self.is_complete = True
        if self.failed:
            metadata = {"losses": losses_table(loss_totals(self.dataset, self.failed[:_NAMED]))}
            named = ", ".join(self.failed[:_NAMED]) + (", …" if len(self.failed) > _NAMED else "")
            said = f"{len(self.failed):,} of {counted(len(self.keys), 'partition')} failed: {named}"
            raise dg.Failure(description=said, metadata=metadata, allow_retries=False)

    def _make_manifest(self, mirror: "_Mirror") -> None:
        made = manifest_result(self.dataset.spec, build_manifest(self.dataset))
        checks = made.check_results or ()
        self.warnings = [f"manifest: check {c.check_name}: {c.description}" for c in checks if not c.passed]
        mirror.add(made)


def _partition_run(dataset: str, run_id: str, report: PartitionReport) -> PartitionRun:
    failures: list[str] = []
    warnings: dict[str, str] = {note: note for result in report.results.values() for note in result.record.notes}
    for name, result in report.results.items():
        for outcome in result.outcomes:
            if outcome.stops:
                failures.append(f"{name}: check {outcome.name}: {outcome.said}")
            elif not outcome.passed:  # MULT and MSTR hold the same samples: one line for both
                line = f"check {outcome.name}: {outcome.said}"
                warnings.setdefault(line, f"{name}: {line}")
    if report.failure is not None:
        failures.append(f"{report.failure.stage}: {report.failure.said}")
    return PartitionRun(
        dataset=dataset,
        partition=report.partition,
        run_id=run_id,
        failures=tuple(failures),
        warnings=tuple(warnings.values()),
        records={STAGE_OF_FILE[next(iter(r.record.files))]: r.record for r in report.results.values()},
    )


def catch_up(context: dg.OpExecutionContext, dataset: DatasetStore) -> int:
    """Records in Dagster what is published and was not recorded; the number of partitions."""
    add_partitions(context.instance, dataset.spec, dataset.partitions().values())
    mirror = _Mirror(context, dataset)
    num_partitions = mirror.catch_up(Present(dataset), set())
    mirror.add_passed()
    mirror.flush()
    return num_partitions


class _Mirror:
    """Records what was published in Dagster, as events of the load's run; what the database refuses it tries again."""

    def __init__(self, context: dg.OpExecutionContext, dataset: DatasetStore) -> None:
        self._instance = context.instance
        self._dataset = dataset
        self._spec = dataset.spec
        self._events = RunEvents(
            context.instance, run_id=context.run_id, job_name=context.job_name, step_key=load_op_name(dataset.spec)
        )
        self._batch = Batch()  # of events that are prepared
        self._waiting: deque[Batch] = deque()
        self._refusal = ""  # why the last attempt failed
        self._passed: dict[str, tuple[dg.AssetCheckResult, list[str]]] = {}  # by asset, with `checks: rollup`
        self._failed: dict[dg.AssetKey, Mapping[str, str]] = {}  # by asset, those that its latest result names

    def record(self, report: PartitionReport) -> None:
        """Records the stages of a partition that ran, and its marker, or that and why it failed."""
        if report.marker is not None:
            try:
                self._add_missing(report.partition, self._dataset.records(report.partition), report.results)
                made = published_result(self._dataset, report.partition, report.marker)
            except MmAssetsError as error:  # its losses cannot be read: the next load records it
                self._say(logging.WARNING, f"{report.partition} is not recorded: {error}")
                made = None
        for result in report.results.values():
            self._add_stage(result, report.partition)
        if report.marker is not None:
            if made is not None:
                self._add(made, report.partition, _marker_inputs(report.marker))
        else:
            self._batch.calls.append(partial(self._log_failed, report))
        if report.failure is not None:
            self._say(logging.ERROR, f"{report.partition}: {report.failure.stage}: {report.failure.said}")
        self._end()

    def catch_up(self, present: Present, running: set[str]) -> int:
        """Records what is published and Dagster does not know, without the partitions that run now anyway.

        Returns:
            How many partitions that were.
        """
        num_partitions = 0
        known = self._instance.event_log_storage.get_latest_tags_by_partition(
            asset_key(self._spec, PUBLISHED), DagsterEventType.ASSET_MATERIALIZATION, [_VERSION]
        )
        for key in (key for key in present.names if key not in running):
            try:
                marker = present.markers([key])[key]
                if known.get(key, {}).get(_VERSION) == marker_version(marker).value:
                    continue
                records = self._dataset.records(key)
                published = published_result(self._dataset, key, marker)
            except MmAssetsError as error:  # of one partition, which others do not wait for
                self._say(logging.WARNING, f"{key} is not recorded: {error}")
                self._end()
                continue
            self._add_missing(key, records)
            self._add(published, key, _marker_inputs(marker))
            self._end()
            num_partitions += 1
        return num_partitions

    def _say(self, level: int, line: str) -> None:
        """Writes a line into the run's log."""
        self._batch.calls.append(partial(self._events.said, level, line))

    def _end(self) -> None:
        """Ends what is stored at once."""
        if self._batch.calls:
            self._waiting.append(self._batch)
        self._batch = Batch()
        self._try()

    def add(self, made: MaterializeResult) -> None:
        """Records one materialization without a partition, with its check results."""
        self._add(made)
        self._end()

    def _add(self, made: MaterializeResult, key: str | None = None, inputs: Mapping[Stage, str] | None = None) -> None:
        assert made.asset_key is not None
        if key is not None and self._batch.first is None:
            self._batch.first = dg.AssetKey.from_coercible(made.asset_key), key
        self._batch.calls.append(partial(self._log_made, made, key, inputs or {}))
        partition = None if self._spec.checks == "rollup" else key
        self._batch.calls.extend(partial(self._log_check, found, partition) for found in made.check_results or ())

    def _add_stage(self, result: StageResult, key: str) -> None:
        checks = check_results(self._spec, result)
        if self._spec.checks == "rollup":
            for found in checks:
                if found.passed:
                    self._passed.setdefault(result.record.stage, (found, []))[1].append(key)
                    self._batch.calls.append(partial(self._take_back, found, key))
                else:
                    self._batch.calls.append(partial(self._roll_up, found, key, ()))
            checks = []
        self._add(stage_result(self._spec, result, checks), key, _inputs(result.record))

    def _add_missing(
        self, key: str, records: Mapping[Stage, StageRecord], made: Mapping[str, StageResult] | None = None
    ) -> None:
        """Records stages that earlier runs made, but for those `made` now: a run that was killed recorded none."""
        for record in records.values():
            if record.stage not in (made or {}):
                urls = {name: self._dataset.store.url_of(file.path) for name, file in record.files.items()}
                self._batch.calls.append(partial(self._log_missing, StageResult.of_record(record, urls), key))

    def _log_missing(self, result: StageResult, key: str) -> None:
        """Stores a stage of a partition with its check results, unless Dagster has this version of it."""
        asset = asset_key(self._spec, STAGE_OF_FILE[next(iter(result.record.files))])
        known = self._instance.event_log_storage.get_latest_tags_by_partition(
            asset, DagsterEventType.ASSET_MATERIALIZATION, [_VERSION], [key]
        )
        if known.get(key, {}).get(_VERSION) != stage_version(result.record):
            outer, self._batch = self._batch, Batch()
            self._add_stage(result, key)
            added, self._batch = self._batch, outer
            for call in added.calls:
                call()

    def _roll_up(self, found: dg.AssetCheckResult, key: str, passed: Sequence[str]) -> None:
        assert found.asset_key is not None
        self._failed.pop(found.asset_key, None)
        self._log_check(rolled_up(self._instance, found, key, passed=passed, is_gate=False), None)

    def _take_back(self, found: dg.AssetCheckResult, key: str) -> None:
        """Rolls up a result at once that takes a partition from those that failed: the load may not reach its end."""
        assert found.asset_key is not None
        if found.asset_key not in self._failed:
            self._failed[found.asset_key] = failed_before(self._instance, found.asset_key)
        if key in self._failed[found.asset_key]:
            self._roll_up(found, key, ())

    def add_passed(self) -> None:
        """With ``checks: rollup``, records one result per asset for all partitions that passed."""
        for found, (key, *passed) in self._passed.values():
            self._batch.calls.append(partial(self._roll_up, found, key, passed))
        self._passed.clear()
        self._end()

    def _log_made(self, made: MaterializeResult, key: str | None, inputs: Mapping[Stage, str]) -> None:
        """Stores a materialization with those that it was made from: without them Dagster takes it for outdated."""
        above = {stage: self._events.latest(asset_key(self._spec, stage), key) for stage in inputs}
        pointers = {stage: "NULL" if found is None else str(found.storage_id) for stage, found in above.items()}
        self._events.made(_materialization(self._spec, made, key, inputs, pointers))

    def _log_check(self, found: dg.AssetCheckResult, partition: str | None) -> None:
        """Stores a check result with the materialization that it is about: without it Dagster takes it for outdated."""
        assert found.asset_key is not None
        asset = dg.AssetKey.from_coercible(found.asset_key)
        evaluation = dg.AssetCheckEvaluation(
            asset_key=asset,
            check_name=found.check_name or "",
            passed=found.passed,
            metadata=found.metadata,
            target_materialization_data=self._events.latest(asset, partition),
            severity=found.severity,
            description=found.description,
            blocking=found.check_name != UNIQUE_IDS,
            partition=partition,
        )
        self._events.checked(evaluation)

    def _log_failed(self, report: PartitionReport) -> None:
        """Stores that the rest of a partition was to be made: of a run that failed, Dagster shows that as failed."""
        key, partition = report.partition, self._dataset.partitions().get(report.partition)
        if partition is None:
            return
        tags = attempt_tags(self._instance, self._dataset, partition)
        reached = report.failure.stage if report.failure is not None else [*report.results][-1]
        names = [stage.name for stage in CHAIN]
        for stage in CHAIN[names.index(reached) : CHAIN.index(PUBLISHED) + 1]:
            if stage.is_made(self._spec) and stage.name not in report.results:
                self._events.planned(asset_key(self._spec, stage), key, tags)

    def flush(self) -> None:
        """Records what is left, in several attempts; the next load records what is left even then."""
        try:
            self._record_waiting()
        finally:
            self._events.release()

    def _record_waiting(self) -> None:
        for pause in PAUSES:
            if not self._waiting:
                return
            time.sleep(pause)
            self._try()
        num_lost = 0
        while self._waiting:
            num_lost += len(self._waiting.popleft().calls)
            before = len(self._waiting)
            self._try()
            if len(self._waiting) == before:  # not this partition alone: the database is away
                num_lost += sum(len(batch.calls) for batch in self._waiting)
                self._waiting.clear()
        if num_lost:
            lost = counted(num_lost, "event")
            self._say(logging.WARNING, f"{lost} could not be recorded: {self._refusal}: `mm-assets sync` does it later")
            self._end()

    def _try(self) -> None:
        while self._waiting:
            try:
                self._events.store(self._waiting[0])
            except Exception as error:  # noqa: BLE001 - SQLAlchemy's, and whatever a storage raises
                self._refusal = f"{type(error).__name__}: {error}"
                return
            self._waiting.popleft()


def _inputs(record: StageRecord) -> Mapping[Stage, str]:
    """The data version of each stage that a stage read."""
    return {STAGE_OF_FILE[name]: version for name, version in record.inputs.items() if name in STAGE_OF_FILE}


def _marker_inputs(marker: Mapping[str, Any]) -> Mapping[Stage, str]:
    return {STAGE_OF_FILE[form]: file["sha256"] for form, file in packed_files(marker).items()}


def _materialization(
    spec: DatasetSpec,
    made: MaterializeResult,
    key: str | None,
    inputs: Mapping[Stage, str],
    pointers: Mapping[Stage, str],
) -> dg.AssetMaterialization:
    """A result of an asset as the event that Dagster stores of one, with the tags that tell whether it is stale."""
    assert made.asset_key is not None
    asset = dg.AssetKey.from_coercible(made.asset_key)
    version = "" if made.data_version is None else made.data_version.value
    tags = {_VERSION: version, f"{_TAG}data_version_is_user_provided": "true"}
    stage = next(stage for stage in CHAIN if stage.name == asset.path[-1])
    code = code_version(spec, stage)
    if code is not None:
        tags[f"{_TAG}code_version"] = code
    for above, of_above in inputs.items():
        # Of an input with partitions Dagster stores the SHA-256 of the versions of those that were read.
        digest = hashlib.sha256(of_above.encode()).hexdigest()
        name = asset_key(spec, above).to_user_string()
        tags |= {f"{_TAG}input_data_version/{name}": digest, f"{_TAG}input_event_pointer/{name}": pointers[above]}
    return dg.AssetMaterialization(asset, partition=key, metadata=made.metadata, tags=tags)
