"""Runs from the command line: the same jobs on the same instance as the UI's, one process per run at a time.

A bad partition never stops the others; its errors are returned as text. Nothing here prints.
"""

import importlib
import itertools
import multiprocessing
import operator
import os
import pickle
import re
import signal
import sqlite3
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import dagster as dg

from mm_assets.errors import ConfigError, MmAssetsError, SourceError
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.component import ShardDataset, wrong_declarations_left_out
from mm_assets.orchestration.interrupts import begin_worker, end_workers, sheltered
from mm_assets.orchestration.partitions import add_partitions, job_name, manifest_job_name
from mm_assets.orchestration.runs import partition_fingerprints, run_tags, working_run
from mm_assets.pipeline.chain import CHAIN, PACKED_STAGES, RAW_SHARDS
from mm_assets.pipeline.register import Registration, register
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore, StageFailure

__all__ = [
    "PartitionRun",
    "declared_datasets",
    "ensure_dagster_home",
    "find_dagster_home",
    "make_manifest",
    "open_instance",
    "register_dataset",
    "run_partitions",
]

_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}  # the event log has it all
_DATABASES = ("history", "schedules")  # the folders of Dagster's databases, below the instance's
_HOME_SETTINGS = """\
# Settings of the local Dagster instance.
telemetry: {enabled: false}
nux: {enabled: false}
# Runs of the daemon that never begin are failed, and runs whose process was killed are repeated; failed ones are not.
run_monitoring: {enabled: true, start_timeout_seconds: 300, max_runtime_seconds: 86400}
run_retries: {enabled: true, max_retries: 2, retry_on_asset_or_op_failure: false}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRun:
    """How one run ended.

    Attributes:
        dataset: dataset name.
        partition: partition key; empty for a manifest.
        run_id: Dagster's run id; empty where no run was created.
        failures: what went wrong, one line each; empty on success.
        warnings: violations of checks that do not stop a partition, one line each.
    """

    dataset: str
    partition: str
    run_id: str
    failures: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the run succeeded and every check that stops a partition passed."""
        return not self.failures


def find_dagster_home(project: Path | None = None) -> Path:
    """The instance's folder, which may not exist yet.

    It is $DAGSTER_HOME, else the nearest `dagster_home` in this folder or above it, else a new one here. In a
    project the search ends at the project's folder, so that no instance around it is used; a new one is made there.

    Args:
        project: folder of the project around this folder, if there is one.
    """
    given = os.environ.get("DAGSTER_HOME")
    here = Path.cwd()
    if given:
        return Path(given).expanduser().absolute()
    folders = [folder for folder in (here, *here.parents) if project is None or folder.is_relative_to(project)]
    homes = (folder / "dagster_home" for folder in folders)
    return next(filter(Path.is_dir, homes), (project or here) / "dagster_home")


def ensure_dagster_home(project: Path | None = None) -> Path:
    """The folder of `find_dagster_home`, made if it is missing; the variable names it afterwards.

    Raises:
        SourceError: the folder cannot be made or written.
    """
    home = find_dagster_home(project)
    with _unusable_named(home):
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "dagster.yaml").exists():
            draft = home / f".dagster.yaml.{os.getpid()}"
            draft.write_text(_HOME_SETTINGS)
            draft.replace(home / "dagster.yaml")
    os.environ["DAGSTER_HOME"] = str(home)
    return home


def open_instance() -> dg.DagsterInstance:
    """The Dagster instance that the UI shows too.

    Raises:
        SourceError: its folder or a database of it cannot be opened for writing.
    """
    home = ensure_dagster_home()
    with _unusable_named(home):
        _create_databases(home)
        return dg.DagsterInstance.get()


def _create_databases(home: Path) -> None:
    """Creates the instance's databases, unless its settings place them elsewhere.

    Dagster creates them in place: a command at the same time, and every one after a kill, finds them without tables.
    So they are created beside their place and renamed; the first of several commands wins, and none waits.
    """
    missing = [name for name in _DATABASES if not (home / name).exists()]
    settings = (home / "dagster.yaml").read_bytes()
    if not missing or re.search(rb"^(run_|event_log_|schedule_)?storage\s*:", settings, re.M):
        return
    with tempfile.TemporaryDirectory(prefix=".new-", dir=home) as new:
        Path(new, "dagster.yaml").write_bytes(settings)  # without one Dagster warns, of this folder
        with dg.DagsterInstance.from_config(new):
            pass
        for name in missing:
            try:
                Path(new, name).rename(home / name)
            except OSError:
                if not (home / name).is_dir():  # else another command was faster
                    raise


@contextmanager
def _unusable_named(home: Path) -> Iterator[None]:
    """Turns the system's refusal to write the instance's files into a `SourceError` that says what to do."""
    try:
        yield
    except Exception as error:  # of SQLAlchemy, which is not a requirement of ours: what SQLite raised is its cause
        cause = error.__cause__ if isinstance(error.__cause__, sqlite3.OperationalError) else error
        refused = getattr(cause, "sqlite_errorname", "").startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN"))
        if not refused and not isinstance(cause, OSError):
            raise
        file = getattr(cause, "filename", None) or home
        what = cause.strerror if isinstance(cause, OSError) else str(cause)
        advice = f"give {home} write access and free space, or set DAGSTER_HOME to a folder of your own"
        raise SourceError(file, f"the Dagster instance cannot be used: {what}: {advice}") from error


def declared_datasets(module: str) -> dict[str, DatasetSpec | ConfigError]:
    """The datasets that a definitions module declares, by name: for a wrong declaration the error.

    Raises:
        ConfigError: the module cannot be loaded or has no definitions.
    """
    try:
        with wrong_declarations_left_out():
            values = vars(importlib.import_module(module)).values()
            lazy = [value for value in values if type(value).__name__ == "LazyDefinitions"]
            found = [*(value() for value in lazy), *(value for value in values if isinstance(value, dg.Definitions))]
            trees = [definitions.component_tree for definitions in found]
            components = [c for tree in trees if tree for c in tree.get_all_components(of_type=ShardDataset)]
    except Exception as error:  # a module is its author's code and may raise anything
        reason: BaseException = error
        while type(reason).__name__ == "ComponentTreeException" and reason.__cause__ is not None:
            reason = reason.__cause__  # it draws a tree of files and leaves the reason to its cause
        said = " ".join(str(reason).split())
        raise ConfigError(module, "module", f"cannot be loaded: {type(reason).__name__}: {said}") from error
    if not found:
        raise ConfigError(module, "module", "holds no Dagster definitions")
    return {component.name: component.declared for component in components}


def register_dataset(
    instance: dg.DagsterInstance,
    dataset: DatasetStore,
    *,
    new_schema: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Registration:
    """Registers the dataset's shards in its folder, as `register` does, and as the instance's dynamic partitions."""
    found = register(dataset, new_schema=new_schema, wait=True, sleep=sleep)
    add_partitions(instance, dataset.spec, found.partitions)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A run to be started. Its id is chosen beforehand, so that the run is found when its process dies."""

    spec: DatasetSpec
    job: str
    partition: str = ""
    fingerprint: str | None = None
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def ended(self, failures: Iterable[str], *, run_id: str = "", warnings: Iterable[str] = ()) -> PartitionRun:
        """How the run ended; without an id none was created."""
        return PartitionRun(
            dataset=self.spec.name,
            partition=self.partition,
            run_id=run_id,
            failures=tuple(failures),
            warnings=tuple(warnings),
        )


@lru_cache(maxsize=8)
def _definitions(pickled: bytes) -> dg.Definitions:
    """The definitions of a pickled spec; a spec itself does not hash."""
    return build_definitions(pickle.loads(pickled))


def _execute(task: _Task) -> PartitionRun:
    definition = _definitions(pickle.dumps(task.spec)).resolve_job_def(task.job)
    with dg.DagsterInstance.get() as instance:
        other = working_run(instance, task.spec, task.partition) if task.partition else None
        if other is not None:
            return task.ended([f"run {other} is working on this partition: run it again when that has ended"])
        result = definition.execute_in_process(
            run_config=_QUIET,
            instance=instance,
            partition_key=task.partition or None,
            raise_on_error=False,
            run_id=task.run_id,
            tags=run_tags(task.run_id, task.fingerprint),
        )
    failures = [] if result.success else _failures(result.all_events)
    warnings: dict[str, str] = {}
    for line in _violated(result.all_events, dg.AssetCheckSeverity.WARN):
        warnings.setdefault(line.partition(": ")[2], line)  # MULT and MSTR hold the same samples: one line for both
    return task.ended(failures, run_id=result.run_id, warnings=warnings.values())


def _failures(events: Iterable[dg.DagsterEvent]) -> Iterator[str]:
    events = list(events)
    said = list(_violated(events, dg.AssetCheckSeverity.ERROR))
    yield from said
    steps: list[str] = []
    for event in events:
        if event.is_step_failure:
            data = event.step_failure_data
            given = data.user_failure_data.description if data.user_failure_data else None
            steps.append(f"{event.step_key}: {(given or _innermost(data.error)).strip()}")
    if not said:  # a step that follows a failed check adds no new failure
        yield steps[0] if steps else "the run failed before its first step"


def _violated(events: Iterable[dg.DagsterEvent], severity: dg.AssetCheckSeverity) -> Iterator[str]:
    """The violated checks of a severity, one line each."""
    for event in events:
        if event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            check = event.asset_check_evaluation_data
            if not check.passed and check.severity == severity:
                said = check.description or "violated"
                yield f"{check.asset_key.path[-1]}: check {check.check_name}: {said}"


def _innermost(error: Any) -> str:
    """The error raised first, which Dagster wraps in an error of its own, whose class is not public."""
    while error is not None and error.cause is not None:
        error = error.cause
    return "failed" if error is None else str(error.message)


def run_partitions(
    work: Iterable[tuple[DatasetSpec, str]], *, num_processes: int = 1
) -> Generator[PartitionRun, None, None]:
    """Runs partitions and yields each as it ends; one that another run is working on is refused.

    Args:
        work: (spec, partition key) pairs, those of one spec together.
        num_processes: 1 or less runs in this process; otherwise this number of processes is started. They end when
            the iterator is closed, or this process ends.
    """
    tasks: list[_Task] = []
    for spec, pairs in itertools.groupby(work, operator.itemgetter(0)):
        dataset, job = DatasetStore(spec), job_name(spec)
        fingerprints = partition_fingerprints(dataset, dataset.partitions().values())
        tasks += [_Task(spec=spec, job=job, partition=key, fingerprint=fingerprints.get(key)) for _, key in pairs]
    yield from map(_execute, tasks) if num_processes <= 1 else _run_side_by_side(tasks, num_processes)


@dataclass(slots=True)
class _Worker:
    """A process that runs one task at a time.

    Each is a pool of its own: a pool whose process dies ends all its others, and they may be at work. It is spawned
    and not forked: a fork of a process with threads (Arrow, DuckDB) may hang.
    """

    pool: ProcessPoolExecutor = field(
        default_factory=lambda: ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn"), initializer=begin_worker
        )
    )
    process: multiprocessing.process.BaseProcess | None = None

    def start(self, task: _Task) -> Future[PartitionRun]:
        before = set(multiprocessing.active_children())
        with sheltered():  # multiprocessing unblocks SIGINT when it starts the first process of its own
            future = self.pool.submit(_execute, task)
        # A pool does not tell which process is its own.
        self.process = next((p for p in multiprocessing.active_children() if p not in before), self.process)
        return future

    def end(self) -> int | None:
        """Waits for the process to end; its exit code."""
        self.pool.shutdown(cancel_futures=True)
        return None if self.process is None else self.process.exitcode


def _run_side_by_side(tasks: Sequence[_Task], num_processes: int) -> Iterator[PartitionRun]:
    free = [_Worker() for _ in range(min(num_processes, len(tasks)))]
    todo = deque(tasks)
    running: dict[Future[PartitionRun], tuple[_Worker, _Task]] = {}
    try:
        while todo or running:
            while todo and free:
                task, worker = todo.popleft(), free.pop()
                try:
                    future = worker.start(task)
                except BrokenProcessPool:  # its process died between two tasks
                    worker.end()
                    worker = _Worker()
                    future = worker.start(task)
                running[future] = (worker, task)
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                worker, task = running.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    result = _without_result(task, _death(task, worker.end()), is_failure=True)
                    worker = _Worker()
                elif error is not None:
                    result = _without_result(task, f"{type(error).__name__}: {error}")
                else:
                    result = future.result()
                free.append(worker)
                yield result
    finally:
        if running:  # the caller was stopped, or asks for no more
            end_workers(multiprocessing.active_children())
            for _, task in running.values():  # in the instance no run stays at work without a process
                _without_result(task, "it was stopped")
        for worker in [*free, *(worker for worker, _ in running.values())]:
            worker.end()


def _death(task: _Task, code: int | None) -> str:
    """What became of a process that died while it worked on a task, and what to do."""
    alone = f"`mm-assets run --dataset {task.spec.name} --partition {task.partition}` runs the partition alone"
    if code == -signal.SIGKILL:
        return f"the process was killed (signal 9; out of memory?): {alone}, without others that need memory"
    if code is not None and code < 0:
        return f"the process was ended by signal {-code} ({signal.strsignal(-code)}): {alone}"
    return f"the process ended with exit code {code}: {alone}"


def _without_result(task: _Task, reason: str, *, is_failure: bool = False) -> PartitionRun:
    """The result of a run whose process returned none.

    Args:
        task: the run.
        reason: why there is none.
        is_failure: store the reason as the partition's failure, since the process could not.
    """
    failures = [reason]
    with dg.DagsterInstance.get() as instance:
        run = instance.get_run_by_id(task.run_id)
        events = [] if run is None else [e.dagster_event for e in instance.all_logs(task.run_id) if e.dagster_event]
        if run is not None and run.is_success:
            failures = []
        elif run is not None and run.is_finished:
            failures = list(_failures(events))
        else:
            step = next(
                (str(e.step_key) for e in reversed(events) if e.event_type == dg.DagsterEventType.STEP_START), ""
            )
            failures = [f"{step}: {reason}" if step else reason]
            if is_failure:
                stage = step.removeprefix(f"{task.spec.name}__") or RAW_SHARDS.name
                if all(stage != known.name for known in CHAIN):  # the step of both packed formats
                    stage = next(iter(PACKED_STAGES.values())).name
                with suppress(MmAssetsError, OSError):  # the storage may be what failed
                    failure = StageFailure(partition=task.partition, stage=stage, detail=reason)
                    DatasetStore(task.spec).write_failure(failure)
            if run is not None:
                instance.report_run_failed(run, reason)
    return task.ended(failures, run_id="" if run is None else task.run_id)


def make_manifest(spec: DatasetSpec) -> PartitionRun:
    """Runs the dataset's manifest job in this process."""
    task = _Task(spec=spec, job=manifest_job_name(spec))
    try:
        return _execute(task)
    except MmAssetsError as error:
        return task.ended([str(error)])
