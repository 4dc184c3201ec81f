"""The load: one run of Dagster that takes many partitions from shards to markers, and makes the manifest.

Its driver hands partitions to processes that know nothing of Dagster, and records each as it ends: the same
materializations and check results as those of the job of one partition.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain

import dagster as dg
from pydantic import Field

from mm_assets.errors import ConfigError, MmAssetsError, SourceError
from mm_assets.orchestration.mirror import Mirror, lost_said
from mm_assets.orchestration.partitions import add_partitions, load_job_name, load_op_name
from mm_assets.orchestration.patience import patient
from mm_assets.orchestration.report import losses_table, manifest_result
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.runs import end_dead_loads, leased_run, tag_process, working_runs
from mm_assets.pipeline.chain import PUBLISHED, RAW_SHARDS, STAGE_OF_FILE, Stage
from mm_assets.pipeline.drive import run_tasks
from mm_assets.pipeline.engines.base import Engine, Task
from mm_assets.pipeline.engines.choice import open_engine
from mm_assets.pipeline.engines.processes import num_processors
from mm_assets.pipeline.losses import loss_totals
from mm_assets.pipeline.partition_run import PartitionReport, failed_report, rare_collections
from mm_assets.pipeline.pending import Present, chosen_partitions, given_start, stage_named
from mm_assets.pipeline.publish import build_manifest
from mm_assets.pipeline.register import register
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore, StageFailure, StageRecord
from mm_assets.summaries import counted

__all__ = [
    "MOST_PARTITIONS",
    "Load",
    "LoadConfig",
    "PartitionRun",
    "Recorded",
    "build_load_job",
    "catch_up",
    "load_job",
]

MOST_PARTITIONS = 1000  # of one run: its page reads all events, 25 of each
_MANIFEST_SECONDS = 900.0  # a long load makes what it has published available meanwhile
_NAMED = 10  # failed partitions in the message of a run


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
        present: the dataset as the manifest lists it; None for a partition, or where no manifest was made.
    """

    dataset: str
    partition: str
    run_id: str
    failures: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    records: Mapping[Stage, StageRecord] = field(default_factory=dict)
    present: Present | None = None

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
        jobs: partitions that are at work at a time; 0 takes those of the dataset's `engine`.
    """

    partitions: list[str] = Field(default_factory=list)
    first_stage: str = ""
    only_pending: bool = False
    jobs: int = 0


def build_load_job(spec: DatasetSpec) -> dg.JobDefinition:
    """The job `<dataset>_load`, which registers the shards first."""

    def drive(context: dg.OpExecutionContext, config: LoadConfig) -> None:
        patient(context.instance)
        dataset = open_dataset(context, spec)
        found = register(dataset, allow_empty=True)
        add_partitions(context.instance, spec, found.partitions)
        try:
            first = None
            if config.first_stage:
                first = stage_named(config.first_stage, option="first_stage", specs=[spec])
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
        taken = keys[:MOST_PARTITIONS]
        options = spec.engine.model_copy(update={"jobs": config.jobs} if config.jobs else {})
        try:
            opened = open_engine(options, jobs=num_processors(), most=max(len(taken), 1))
        except MmAssetsError as error:
            raise dg.Failure(description=f"{type(error).__name__}: {error}", allow_retries=False) from error
        with opened as engine:
            Load(dataset=dataset, keys=taken, first=first, engine=engine, present=present).run(context)

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
        engine: where they run.
        first: the stage to start at, or an earlier one that is stale; None for the first stale one of what is pending.
        observed: called with each partition as it ends.
        present: the dataset as it is, if that is known; then as the last manifest lists it.
        failed: keys of the partitions that failed.
        warnings: what the manifest's check found, one line each.
        unrecorded: as `Mirror.lost`.
        is_complete: whether every partition ended, and the manifest was made.
    """

    dataset: DatasetStore
    keys: Sequence[str]
    engine: Engine
    first: Stage | None = None
    observed: Callable[[PartitionRun], object] = lambda _: None
    present: Present | None = None
    failed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unrecorded: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = False

    def run(self, context: dg.OpExecutionContext) -> None:
        """Runs the partitions and makes the manifest.

        Raises:
            dg.Failure: partitions failed, the manifest could not be made, or something could not be recorded.
        """
        spec = self.dataset.spec
        present = self.present = self.present or Present(self.dataset)
        mirror = Mirror(context, present)
        self.unrecorded = mirror.lost
        end_dead_loads(context.instance, self.dataset)
        elsewhere = working_runs(context.instance, self.dataset)
        tasks, gone = partition_tasks(present, self.keys, self.first)
        made = time.monotonic()
        try:
            with rare_collections(), ExitStack() as held:
                leases = held.enter_context(leased_run(context, self.dataset))

                def guard(key: str) -> AbstractContextManager[None]:
                    if key in elsewhere:
                        detail = f"run {elsewhere[key]} is working on this partition: run it again when that has ended"
                        raise SourceError(self.dataset.store.url_of(PUBLISHED.name), f"{key}: {detail}")
                    return leases.held(key)

                held.enter_context(mirror)
                reports = held.enter_context(
                    closing(run_tasks(self.engine, tasks, guard=guard, timeout=spec.engine.timeout_seconds))
                )
                mirror.catch_up(set(self.keys))
                for report in chain(gone, reports):
                    mirror.record(report)
                    if not report.ok:
                        self.failed.append(report.partition)
                    self.observed(partition_run(spec.name, context.run_id, report))
                    if time.monotonic() - made > _MANIFEST_SECONDS:
                        try:
                            self._make_manifest(mirror)
                        except MmAssetsError as error:  # partitions do not wait for it, and another one follows
                            mirror.warn(f"the manifest is as before: {error}")
                        made = time.monotonic()
                self._make_manifest(mirror)
        except MmAssetsError as error:
            raise dg.Failure(description=f"{type(error).__name__}: {error}", allow_retries=False) from error
        self.is_complete = True
        said: list[str] = []
        if self.failed:
            named = ", ".join(self.failed[:_NAMED]) + (", …" if len(self.failed) > _NAMED else "")
            said.append(f"{len(self.failed):,} of {counted(len(self.keys), 'partition')} failed: {named}")
        if self.unrecorded:
            said.append(lost_said(spec, self.unrecorded))
        if said:
            metadata = {"losses": losses_table(loss_totals(self.dataset, self.failed[:_NAMED]))}
            raise dg.Failure(description="; ".join(said), metadata=metadata, allow_retries=False)

    def _make_manifest(self, mirror: Mirror) -> None:
        report = build_manifest(self.dataset, self.present)
        self.present = report.present
        made = manifest_result(self.dataset.spec, report)
        checks = made.check_results or ()
        self.warnings = [f"manifest: check {c.check_name}: {c.description}" for c in checks if not c.passed]
        mirror.add(made, "the manifest")


def partition_tasks(
    present: Present, keys: Iterable[str], first: Stage | None
) -> tuple[list[Task], list[PartitionReport]]:
    """What a load does: the tasks of registered partitions, and the reports of those that are not registered any more.

    Args:
        present: the dataset as it is.
        keys: the partitions.
        first: as `Load.first`.
    """
    spec, schema = present.dataset.spec, present.schema if present.partitions else present.dataset.schema()
    pending, tasks, gone = set(present.pending()), [], []
    for key in keys:
        if key in present.partitions:
            task = Task(
                spec=spec,
                schema=schema,
                partition=present.partitions[key],
                first=given_start(first, is_pending=key in pending),
                markers=present.names.get(key, ()),
            )
            tasks.append(task)
        else:
            failure = StageFailure(partition=key, stage=RAW_SHARDS.name, detail="it is not registered any more")
            gone.append(failed_report(failure, is_refused=True))
    return tasks, gone


def partition_run(dataset: str, run_id: str, report: PartitionReport) -> PartitionRun:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What was recorded: the number of partitions, and whether the manifest was."""

    num_partitions: int
    manifest: bool


def catch_up(context: dg.OpExecutionContext, dataset: DatasetStore) -> Recorded:
    """Records in Dagster what is published and was not recorded, and that loads whose process is gone have ended.

    Raises:
        dg.Failure: something could not be recorded.
    """
    end_dead_loads(context.instance, dataset)
    add_partitions(context.instance, dataset.spec, dataset.partitions().values())
    with Mirror(context, Present(dataset)) as mirror:
        recorded = Recorded(num_partitions=mirror.catch_up(), manifest=mirror.catch_up_manifest())
    if mirror.lost:
        raise dg.Failure(description=lost_said(dataset.spec, mirror.lost), allow_retries=False)
    return recorded
