"""The load: takes many partitions from shards to markers, and makes the manifest.

Its driver hands partitions to an engine that knows nothing of Dagster, and records each as it ends: the same
materializations and check results as those of the job of one partition. It records them in one run of Dagster, and
those of a large load in several, one after the other, while the driver goes on: the page of a run reads all its events.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Self

import dagster as dg
from dagster._core.errors import DagsterExecutionInterruptedError
from pydantic import Field

from mm_assets.errors import ConfigError, CredentialsError, MmAssetsError, masked_urls
from mm_assets.orchestration.interrupts import sigterm_kept
from mm_assets.orchestration.listing import listed_under_its_job
from mm_assets.orchestration.mirror import Mirror, lost_said
from mm_assets.orchestration.monitoring import MAX_RUNTIME_TAG, has_no_worker
from mm_assets.orchestration.observed_shards import log_skipped, observe_shards
from mm_assets.orchestration.partitions import add_partitions, load_job_name, load_op_name
from mm_assets.orchestration.patience import patient
from mm_assets.orchestration.report import end_of, failed_said, loss_tables, manifest_result
from mm_assets.orchestration.resources import StorageRoot, open_dataset, resource_key
from mm_assets.orchestration.runs import (
    LOAD_TAG,
    MAX_RETRIES_TAG,
    MOST_PARTITIONS,
    end_dead_loads,
    leased_run,
    load_config,
    loads_at_work,
    process_tags,
    tag_process,
    working_runs,
)
from mm_assets.orchestration.shown import failure_of, shown_cause
from mm_assets.pipeline.chain import Stage
from mm_assets.pipeline.load.driver import run_tasks
from mm_assets.pipeline.load.engine import Engine
from mm_assets.pipeline.load.engine_choice import open_engine
from mm_assets.pipeline.load.processes import num_processors
from mm_assets.pipeline.load.tasks import PartitionRun, partition_tasks
from mm_assets.pipeline.partition.run import PartitionReport, rare_collections
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import loss_totals
from mm_assets.pipeline.state.manifests import build_manifest, current_manifest
from mm_assets.pipeline.state.records import StageFailure
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import Present, chosen_partitions, stage_named
from mm_assets.summaries import counted

__all__ = [
    "Load",
    "LoadConfig",
    "Recorded",
    "build_load_job",
    "catch_up",
    "execute_load",
    "load_job",
    "named_keys",
]

_MANIFEST_SECONDS = 900.0  # a long load makes what it has published available meanwhile
_NAMED = 10  # failed partitions in the message of a run
_EXPLAINED = 3  # of them those with the reason, and what to do
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}  # the event log has it all
_RAY_JOB_TAG = "dagster-ray/config"  # of the Ray job that `RayRunLauncher` makes of a run
_DRIVER = '{"num_cpus": 0.001}'  # it waits for tasks, which need the processors; 0 would be the launcher's default


class LoadConfig(dg.Config):
    """What a load does.

    Attributes:
        partitions: keys of the partitions to run; none means those that are pending.
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
        try:
            found = register(dataset, allow_empty=True)
        except MmAssetsError as error:
            raise failure_of(error) from shown_cause(error)
        log_skipped(context.log, found)
        add_partitions(context.instance, spec, found.partitions)
        observe_shards(context.instance, spec, found)
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
        options = spec.engine.model_copy(update={"jobs": config.jobs} if config.jobs else {})
        try:
            with sigterm_kept():
                opened = open_engine(options, jobs=num_processors(), most=max(len(keys), 1))
        except MmAssetsError as error:
            raise failure_of(error) from shown_cause(error)
        with opened as engine, Load(dataset=dataset, keys=keys, first=first, engine=engine, present=present) as load:
            _run_all(load, context)

    return load_job(spec, drive)


def _run_all(load: "Load", context: dg.OpExecutionContext) -> None:
    """Runs a load in the run at hand, and records what is left in further runs, in this process.

    Raises:
        dg.Failure: partitions of this run failed, or the load ended early.
        DagsterExecutionInterruptedError: a signal ended one of the further runs.
    """
    own: dg.Failure | None = None
    interrupted: list[BaseException] = []

    def run(further: dg.OpExecutionContext) -> None:
        try:
            load.run(further)
        except (KeyboardInterrupt, DagsterExecutionInterruptedError) as error:
            interrupted.append(error)
            raise

    try:
        load.run(context)
    except dg.Failure as error:
        if not load.num_runs:
            raise
        own = error
    while not load.is_complete:
        run_id, recorded = str(uuid.uuid4()), load.num_runs
        tags = {LOAD_TAG: context.run_id}
        execute_load(context.instance, load.dataset.spec, run, run_id=run_id, tags=tags, parent=context.run)
        if interrupted:
            raise interrupted[0]
        if load.num_runs == recorded:
            raise dg.Failure(description=f"the load ended early: run {run_id} says why", allow_retries=False)
    if own is not None:
        raise own


def execute_load(
    instance: dg.DagsterInstance,
    spec: DatasetSpec,
    drive: Callable[[dg.OpExecutionContext], object],
    *,
    run_id: str,
    keys: Sequence[str] = (),
    tags: Mapping[str, str] | None = None,
    parent: dg.DagsterRun | None = None,
    **config: object,
) -> dg.ExecuteInProcessResult:
    """Executes a run of the job `<dataset>_load` in this process, with a driver of its own.

    Args:
        instance: where it is recorded.
        spec: the declaration.
        drive: what its step does.
        run_id: the run's.
        keys: the partitions that its configuration names.
        tags: of the run.
        parent: the run whose load it continues, if any.
        config: the rest of its configuration, as of `load_config`.
    """

    def stoppable(context: dg.OpExecutionContext, _: object) -> None:
        try:
            has_no_worker(context)
            drive(context)
        except (KeyboardInterrupt, DagsterExecutionInterruptedError):
            context.instance.report_run_canceling(context.run)  # else Dagster says that the run failed, and is repeated
            raise

    with listed_under_its_job(instance, spec, parent):
        return load_job(spec, stoppable).execute_in_process(
            run_config={**_QUIET, **load_config(spec, keys, **config)},
            instance=instance,
            raise_on_error=False,
            run_id=run_id,
            tags={**process_tags(run_id), MAX_RETRIES_TAG: "0", **(tags or {})},  # its caller repeats the load
            resources={resource_key(spec): StorageRoot(root=spec.root)},
        )


def load_job(spec: DatasetSpec, drive: Callable[[dg.OpExecutionContext, LoadConfig], object]) -> dg.JobDefinition:
    """A job of one step, in one process, that calls a driver."""

    @dg.op(name=load_op_name(spec), pool=spec.pool, required_resource_keys={resource_key(spec)})
    def load_partitions(context: dg.OpExecutionContext, config: LoadConfig) -> None:
        tag_process(context)
        drive(context, config)

    tags = {MAX_RUNTIME_TAG: "0"}  # a load takes as long as it takes; `timeout_seconds` is for each partition
    if spec.engine.type == "ray":
        tags[_RAY_JOB_TAG] = _DRIVER

    @dg.job(
        name=load_job_name(spec),
        executor_def=dg.in_process_executor,
        tags=tags,
        description=f"Many partitions of {spec.name}, from shards to markers, and the manifest.",
    )
    def job() -> None:
        load_partitions()

    return job


@dataclass(kw_only=True)
class Load:
    """A load at work, to be used in a `with` block, whose end abandons what is at work.

    Attributes:
        dataset: the dataset's folder.
        keys: the partitions to run.
        engine: where they run.
        first: the stage to start at, or an earlier one that is stale; None for the first stale one of what is pending.
        observed: called with each partition as it ends.
        present: the dataset as it is, if that is known; then as the last manifest lists it.
        warnings: what the manifest's check found, one line each.
        unrecorded: as `Mirror.lost`.
        refusal: why the rest of the partitions was not run; empty if none was left out.
        num_runs: runs of Dagster that have recorded a part of it.
        is_complete: whether every partition ended that was run, and the manifest was made.
    """

    dataset: DatasetStore
    keys: Sequence[str]
    engine: Engine
    first: Stage | None = None
    observed: Callable[[PartitionRun], object] = lambda _: None
    present: Present | None = None
    warnings: list[str] = field(default_factory=list)
    unrecorded: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    num_runs: int = 0
    is_complete: bool = False

    def __post_init__(self) -> None:
        self._held = ExitStack()
        self._reports: Iterator[PartitionReport] | None = None  # once it has begun
        self._num_left = len(self.keys)
        self._made = time.monotonic()  # when there was a manifest last
        self._mirror: Mirror | None = None  # of the run at hand
        self._is_caught_up = False  # with what was published without Dagster

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def run(self, context: dg.OpExecutionContext) -> None:
        """Runs partitions and records them, as many as one run of Dagster takes; after the last it makes the manifest.

        What is at work then goes on, and is recorded by the next call.

        Raises:
            dg.Failure: partitions failed, the manifest could not be made, or something could not be recorded.
        """
        spec = self.dataset.spec
        failed: dict[str, StageFailure] = {}
        number = min(self._num_left, MOST_PARTITIONS)
        try:
            present = self.present = self.present or Present(self.dataset)
            mirror = self._mirror = Mirror(context, present)
            with rare_collections(), ExitStack() as held:
                is_first = self._reports is None
                reports = self._begun(context, present)
                if not is_first:  # the lease of the first one is that of the load
                    held.enter_context(leased_run(context, self.dataset))
                held.enter_context(mirror)
                if is_first:
                    self._catch_up(mirror, context)
                for report in islice(self._until_refused(reports), number):
                    self._num_left -= 1
                    mirror.record(report)
                    if not report.ok:
                        failed[report.partition] = end_of(report)
                    self.observed(PartitionRun.of(spec.name, context.run_id, report))
                    if time.monotonic() - self._made > _MANIFEST_SECONDS:
                        try:
                            self._make_manifest(mirror)
                        except MmAssetsError as error:  # partitions do not wait for it, and another one follows
                            mirror.warn(f"the manifest is as before: {error}")
                        self._made = time.monotonic()
                mirror.store()
                if not self._num_left:
                    if not self._is_caught_up:  # the other may have ended since, or been dead
                        self._catch_up(mirror, context)
                    self._make_manifest(mirror)
        except MmAssetsError as error:
            raise failure_of(error) from shown_cause(error)
        self.num_runs += 1
        self.unrecorded |= mirror.lost
        self.is_complete = not self._num_left
        said: list[str] = []
        if failed:
            said.append(f"{len(failed):,} of {counted(number, 'partition')} failed: {named_keys([*failed])}")
            said += [failed_said(spec, failure) for failure in islice(failed.values(), _EXPLAINED)]
        if self.refusal:
            said.insert(0, self.refusal)
        if mirror.lost:
            said.append(lost_said(spec, mirror.lost))
        if said:
            metadata = loss_tables(loss_totals(self.dataset, [*failed][:_NAMED]))
            raise dg.Failure(description="\n".join(said), metadata=metadata, allow_retries=False)

    def _until_refused(self, reports: Iterator[PartitionReport]) -> Iterator[PartitionReport]:
        """The reports of the partitions; after them notes that the storage refused the credentials for the others."""
        try:
            yield from reports
        except CredentialsError as error:
            self.refusal = masked_urls(str(error))
            self._num_left = 0

    def _begun(self, context: dg.OpExecutionContext, present: Present) -> Iterator[PartitionReport]:
        """The reports of the partitions that have not ended; the first call begins with them."""
        if self._reports is None:
            spec = self.dataset.spec
            end_dead_loads(context.instance, self.dataset)
            elsewhere = working_runs(context.instance, self.dataset)
            leases = self._held.enter_context(leased_run(context, self.dataset, writes=bool(self.keys)))
            tasks, refused = partition_tasks(present, self.keys, self.first, leases.holder, busy=elsewhere)
            running = run_tasks(self.engine, tasks, timeout=spec.engine.timeout_seconds, idle=self._store)
            self._reports = chain(refused, self._held.enter_context(closing(running)))
        return self._reports

    def _catch_up(self, mirror: Mirror, context: dg.OpExecutionContext) -> None:
        self._is_caught_up = not _another_records(mirror, context, self.dataset)
        if self._is_caught_up:
            mirror.catch_up(set(self.keys))

    def _store(self) -> None:
        if self._mirror is not None:
            self._mirror.store()

    def _make_manifest(self, mirror: Mirror) -> None:
        assert self.present is not None
        report = None if self.keys else current_manifest(self.present)
        is_known = report is not None and mirror.knows_manifest(report.digest)
        report = report or build_manifest(self.dataset, self.present)
        self.present = report.present
        made = manifest_result(self.dataset.spec, report)
        checks = made.check_results or ()
        self.warnings = [f"manifest: check {c.check_name}: {c.description}" for c in checks if not c.passed]
        if not is_known:
            mirror.add(made, "the manifest")


def named_keys(keys: Sequence[str]) -> str:
    """Partition keys in a message: the first of them."""
    return ", ".join(keys[:_NAMED]) + (", …" if len(keys) > _NAMED else "")


def _another_records(mirror: Mirror, context: dg.OpExecutionContext, dataset: DatasetStore) -> bool:
    """Whether another load is at work, which records what it has published, or what failed, a moment later."""
    others = loads_at_work(context.instance, dataset, but=context.run_id)
    if others:
        mirror.warn(
            f"a load is at work in run {others[0]}, which records what it publishes: what was published without "
            "Dagster is recorded by the next load, or by `mm-assets sync` when that one has ended"
        )
    return bool(others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What was recorded: the number of published partitions, the keys of failed ones, and whether the manifest was."""

    num_partitions: int
    failed: tuple[str, ...]
    manifest: bool


def catch_up(context: dg.OpExecutionContext, dataset: DatasetStore, *, makes_manifest: bool) -> Recorded:
    """Records in Dagster what was done and not recorded, and that loads whose process is gone have ended.

    Args:
        context: of the step that works.
        dataset: the dataset's folder.
        makes_manifest: whether to make the manifest first, which takes the dataset's true declaration.

    Raises:
        dg.Failure: something could not be recorded, or the manifest could not be made.
    """
    end_dead_loads(context.instance, dataset)
    add_partitions(context.instance, dataset.spec, dataset.partitions().values())
    try:
        with leased_run(context, dataset, writes=makes_manifest), Mirror(context, Present(dataset)) as mirror:
            num_partitions, failed = 0, list[str]()
            if not _another_records(mirror, context, dataset):
                num_partitions, failed = mirror.catch_up(), mirror.catch_up_failures()
            if makes_manifest:
                build_manifest(dataset)
            manifest = mirror.catch_up_manifest()
    except MmAssetsError as error:
        raise failure_of(error) from shown_cause(error)
    if mirror.lost:
        raise dg.Failure(description=lost_said(dataset.spec, mirror.lost), allow_retries=False)
    return Recorded(num_partitions=num_partitions, failed=tuple(failed), manifest=manifest)
