"""The load: one run of Dagster that takes many partitions from shards to markers, and makes the manifest.

Its driver hands partitions to processes that know nothing of Dagster, and records each as it ends: the same
materializations and check results as those of the job of one partition.
"""

import time
from collections.abc import Callable, Mapping, Sequence
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
from mm_assets.pipeline.chain import PUBLISHED, Stage
from mm_assets.pipeline.drive import run_tasks
from mm_assets.pipeline.engines.base import Engine
from mm_assets.pipeline.engines.choice import open_engine
from mm_assets.pipeline.engines.processes import num_processors
from mm_assets.pipeline.load import PartitionRun, partition_tasks
from mm_assets.pipeline.losses import loss_totals
from mm_assets.pipeline.partition_run import rare_collections
from mm_assets.pipeline.pending import Present, chosen_partitions, stage_named
from mm_assets.pipeline.publish import build_manifest
from mm_assets.pipeline.register import register
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore
from mm_assets.summaries import counted

__all__ = [
    "MOST_PARTITIONS",
    "Load",
    "LoadConfig",
    "Recorded",
    "build_load_job",
    "catch_up",
    "load_job",
    "named_keys",
]

MOST_PARTITIONS = 1000  # of one run: its page reads all events, 25 of each
_MANIFEST_SECONDS = 900.0  # a long load makes what it has published available meanwhile
_NAMED = 10  # failed partitions in the message of a run


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
                    self.observed(PartitionRun.of(spec.name, context.run_id, report))
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
            number = f"{len(self.failed):,} of {counted(len(self.keys), 'partition')}"
            said.append(f"{number} failed: {named_keys(self.failed)}")
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


def named_keys(keys: Sequence[str]) -> str:
    """Partition keys in a message: the first of them."""
    return ", ".join(keys[:_NAMED]) + (", …" if len(keys) > _NAMED else "")


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
        with leased_run(context, dataset), Mirror(context, Present(dataset)) as mirror:
            num_partitions, failed = mirror.catch_up(), mirror.catch_up_failures()
            if makes_manifest:
                build_manifest(dataset)
            manifest = mirror.catch_up_manifest()
    except MmAssetsError as error:
        raise dg.Failure(description=f"{type(error).__name__}: {error}", allow_retries=False) from error
    if mirror.lost:
        raise dg.Failure(description=lost_said(dataset.spec, mirror.lost), allow_retries=False)
    return Recorded(num_partitions=num_partitions, failed=tuple(failed), manifest=manifest)
