"""The runs of Dagster in which a recorder stores what a load does.

The driver of a load knows nothing of Dagster. Its recorder records it in one run, and a large load in several, one
after the other, while the driver goes on: the page of a run reads all its events. A load that Dagster starts begins
with the run that it was given; all others are executed in the recorder's thread.
"""

import uuid
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import dagster as dg
from pydantic import Field

from mm_assets.orchestration.checks import settled_checks
from mm_assets.orchestration.event_log import RunEvents
from mm_assets.orchestration.events import EventSink
from mm_assets.orchestration.monitoring import MAX_RUNTIME_TAG, has_no_worker
from mm_assets.orchestration.observed_shards import observe_shards
from mm_assets.orchestration.partitions import add_partitions, load_job_name, load_op_name
from mm_assets.orchestration.recorder import Recorder, RunRecording, unrecorded_message
from mm_assets.orchestration.report import failed_said, losses_of_failed
from mm_assets.orchestration.resources import StorageRoot, resource_key
from mm_assets.orchestration.runs import (
    LOAD_TAG,
    MAX_RETRIES_TAG,
    full_pool_said,
    live_runs,
    load_config,
    process_tags,
)
from mm_assets.pipeline.dagster_home import location_of
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.registration import Registration
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.summaries import counted

__all__ = ["LoadConfig", "LoadRuns", "load_job", "named_keys"]

_MAX_KEYS_IN_MESSAGE = 10
_MAX_EXPLAINED = 3  # failed partitions in the message of a run that have the reason, and what to do
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}  # the event log has it all
_RAY_JOB_TAG = "dagster-ray/config"  # of the Ray job that `RayRunLauncher` makes of a run
_DRIVER = '{"num_cpus": 0.001}'  # it waits for tasks, which need the processors; 0 would be the launcher's default
_REPOSITORY_TAG = ".dagster/repository"  # Dagster's pages list a run under the job of the repository that it names
_REPOSITORY = "__repository__"  # of every code location with one `Definitions`


class LoadConfig(dg.Config):
    """What a load does.

    Attributes:
        partitions: keys of the partitions to run; none means those that are pending.
        first_stage: run from this stage on, or from an earlier one that is stale, also what is up to date; without
            `partitions` all that are registered. Empty starts each at its first stale stage.
        only_pending: leave out those that were published since they were named.
        jobs: partitions that run at a time; 0 takes those of the dataset's `engine`.
        waits: wait for partitions that other loads have claimed; else they are left to those.
    """

    partitions: list[str] = Field(default_factory=list)
    first_stage: str = ""
    only_pending: bool = False
    jobs: int = 0
    waits: bool = True


class LoadRuns:
    """The runs of Dagster that record a load, one after the other.

    Args:
        state: the dataset as it was listed.
        load: id of the load, and of its first run.
        found: what registration found, for Dagster to know too.
        recorder: what stores events in them.
        context: of the run that executes the load, if Dagster has started it.
        keys: the partitions that the load runs.
        report: called with each line on what the load waits for.
        config: the rest of the configuration of runs, as of `load_config`.

    Attributes:
        own: what the run of `context` has recorded.
    """

    def __init__(
        self,
        state: DatasetState,
        load: str,
        found: Registration | None,
        *,
        recorder: Recorder,
        context: dg.OpExecutionContext | None = None,
        keys: Sequence[str] = (),
        report: Callable[[str], object],
        **config: Any,
    ) -> None:
        self._dataset = state.dataset
        self._state = state
        self._load = load
        self._found = found
        self._recorder = recorder
        self._context = context
        self._keys = keys
        self._report = report
        self._config = config
        self._unfinished = ""  # id of a run whose end may not have been recorded
        self._has_run = False
        self.own: RunRecording | None = None

    def execute(self, body: Callable[[EventSink], RunRecording]) -> None:
        """Calls a function with the sink of a run, in the run that Dagster has started, or in another one.

        Raises:
            KeyboardInterrupt: the load was interrupted.
        """
        if self._context is not None and not self._has_run:
            sink = self._sink(self._context)
            self._has_run = True
            self.own = body(sink)
            return
        if self._context is not None:
            self._execute_run(self._context.instance, body)
            return
        with dg.DagsterInstance.get() as instance:
            self._execute_run(instance, body)

    def _sink(self, context: dg.OpExecutionContext) -> RunEvents:
        """Returns the sink of a run, after what registration found is known to Dagster."""
        instance, spec = context.instance, self._dataset.spec
        if self._found is not None:
            observe_shards(instance, spec, self._found, add_partitions(instance, spec, self._found.partitions))
        settled, line = settled_checks(instance, spec, len(self._state.partitions))
        if line is not None:
            self._recorder.warn(line)
        self._found = None
        return RunEvents.of(context, settled)

    def _execute_run(self, instance: dg.DagsterInstance, body: Callable[[EventSink], RunRecording]) -> None:
        spec, entered = self._dataset.spec, list[bool]()
        if self._unfinished:  # the database was unavailable when it ended
            run = instance.get_run_by_id(self._unfinished)
            if run is not None and not run.is_finished:
                instance.report_run_failed(run, "Dagster's database was unavailable when this run ended")
        if not self._has_run:
            live_runs(instance, self._dataset, load_job_name(spec))  # it ends the dead ones
            if (line := full_pool_said(instance, self._dataset)) is not None:
                self._report(line)
        run_id = str(uuid.uuid4()) if self._has_run else self._load
        tags = {LOAD_TAG: self._load} if self._has_run else {}
        self._unfinished, self._has_run = run_id, True

        def drive(context: dg.OpExecutionContext, _: object) -> None:
            try:
                has_no_worker(context)
                sink = self._sink(context)
                entered.append(True)
                recording = body(sink)
            except KeyboardInterrupt:
                context.instance.report_run_canceling(context.run)  # else Dagster says that the run failed
                raise
            if (failure := self.failure(recording)) is not None:
                raise failure

        location = location_of(spec.where, spec.name)
        origin = None if self._context is None else self._context.run.remote_job_origin
        label = f"{_REPOSITORY}@{location}" if location else None
        if origin is not None:
            label = origin.repository_origin.get_label()
        # The run that Dagster has started has a slot of the pool until this one has ended.
        result = load_job(spec, drive, pool=spec.pool if self._context is None else None).execute_in_process(
            run_config={**_QUIET, **load_config(spec, self._keys, **self._config)},
            instance=instance,
            raise_on_error=False,
            run_id=run_id,
            tags={
                **process_tags(run_id),
                MAX_RETRIES_TAG: "0",  # its caller repeats the load
                **({} if label is None else {_REPOSITORY_TAG: label}),
                **tags,
            },
            resources={resource_key(spec): StorageRoot(root=spec.root)},
        )
        self._unfinished = ""
        if not entered:
            data = [event.step_failure_data for event in result.all_events if event.is_step_failure]
            errors = [one.error.cause or one.error for one in data if one.error is not None]
            reasons = [error.message.strip().partition("\n")[0] for error in errors]
            raise RuntimeError(reasons[0] if reasons else "the run failed before its first step")

    def failure(self, recording: RunRecording | None) -> dg.Failure | None:
        """Returns why a run failed by what it recorded, and by what ended the load; None if it did not."""
        recording = recording or RunRecording()
        spec, failed, lines = self._dataset.spec, recording.failed, list[str]()
        if self._recorder.error:
            lines.append(self._recorder.error)
        if failed:
            number = counted(recording.num_partitions, "partition")
            lines.append(f"{len(failed):,} of {number} failed: {named_keys([*failed])}")
            lines += [failed_said(spec, failure) for failure in islice(failed.values(), _MAX_EXPLAINED)]
        if self._recorder.unrecorded:
            lines.append(unrecorded_message(spec, self._recorder.unrecorded))
        if not lines:
            return None
        metadata = losses_of_failed(self._dataset, [*failed][:_MAX_KEYS_IN_MESSAGE]) if failed else {}
        return dg.Failure(description="\n".join(lines), metadata=metadata, allow_retries=False)


def load_job(
    spec: DatasetSpec, drive: Callable[[dg.OpExecutionContext, LoadConfig], object], *, pool: str | None
) -> dg.JobDefinition:
    """A job of one step, in one process, that calls a driver; the step needs a slot of a pool, if one is named."""

    @dg.op(name=load_op_name(spec), pool=pool, required_resource_keys={resource_key(spec)})
    def run_load(context: dg.OpExecutionContext, config: LoadConfig) -> None:
        drive(context, config)

    tags = {MAX_RUNTIME_TAG: "0"}  # a load takes as long as it takes; `timeout_seconds` is for each partition
    if spec.engine.type == "ray":
        tags[_RAY_JOB_TAG] = _DRIVER

    @dg.job(
        name=load_job_name(spec),
        executor_def=dg.in_process_executor,
        tags=tags,
        description=f"Many partitions of {spec.name}, from shards to records, and the manifest.",
    )
    def job() -> None:
        run_load()

    return job


def named_keys(keys: Sequence[str]) -> str:
    """Partition keys in a message: the first of them."""
    return ", ".join(keys[:_MAX_KEYS_IN_MESSAGE]) + (", …" if len(keys) > _MAX_KEYS_IN_MESSAGE else "")
