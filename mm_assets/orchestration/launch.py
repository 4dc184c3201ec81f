"""Runs from the command line: the same jobs on the same instance as the UI's, one process per run at a time.

A bad partition never stops the others; its errors are returned as text. Nothing here prints.
"""

import importlib
import multiprocessing
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import dagster as dg

from mm_assets.errors import ConfigError, MmAssetsError
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.component import ShardDataset
from mm_assets.orchestration.partitions import add_partitions, job_name, manifest_job_name
from mm_assets.orchestration.runs import partition_fingerprints, run_tags, working_run
from mm_assets.pipeline.register import Registration, register
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore

__all__ = [
    "PartitionRun",
    "declared_datasets",
    "ensure_dagster_home",
    "make_manifest",
    "open_instance",
    "register_dataset",
    "run_partitions",
]

_QUIET = {
    "loggers": {"console": {"config": {"log_level": "CRITICAL"}}}
}  # the event log has it all; a terminal wants a table
_HOME_SETTINGS = "# Settings of the local Dagster instance.\ntelemetry:\n  enabled: false\nnux:\n  enabled: false\n"


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


def ensure_dagster_home(project: Path | None = None) -> Path:
    """The instance's folder, which the variable then names.

    It is $DAGSTER_HOME, else the nearest `dagster_home` in this folder or above it, else a new one here. In a
    project the search ends at the project's folder, so that no instance around it is used; a new one is made there.

    Args:
        project: folder of the project around this folder, if there is one.
    """
    given = os.environ.get("DAGSTER_HOME")
    here = Path.cwd()
    if given:
        home = Path(given).expanduser().absolute()
    else:
        folders = [folder for folder in (here, *here.parents) if project is None or folder.is_relative_to(project)]
        found = [folder / "dagster_home" for folder in folders if (folder / "dagster_home").is_dir()]
        home = found[0] if found else (project or here) / "dagster_home"
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        (home / "dagster.yaml").write_text(_HOME_SETTINGS)
    os.environ["DAGSTER_HOME"] = str(home)
    return home


def open_instance() -> dg.DagsterInstance:
    """The Dagster instance that the UI shows too."""
    ensure_dagster_home()
    return dg.DagsterInstance.get()


def declared_datasets(module: str) -> dict[str, DatasetSpec]:
    """The datasets that a definitions module declares, by name.

    Raises:
        ConfigError: the module cannot be loaded or has no definitions, or a declaration in it is wrong.
    """
    try:
        found = [value for value in vars(importlib.import_module(module)).values() if _makes_definitions(value)]
        specs: dict[str, DatasetSpec] = {}
        for value in found:
            definitions = value if isinstance(value, dg.Definitions) else value()
            tree = definitions.component_tree
            for component in tree.get_all_components(of_type=ShardDataset) if tree else ():
                specs[component.spec.name] = component.spec
    except Exception as error:  # a module is its author's code and may raise anything
        raise _why_not_loaded(module, error) from error
    if not found:
        raise ConfigError(module, "module", "holds no Dagster definitions")
    return specs


def _why_not_loaded(module: str, error: Exception) -> ConfigError:
    """The cause that a person has to fix, from beneath the layers that Dagster wraps around it."""
    reason: BaseException = error
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, ConfigError):
            return ConfigError(link.where, link.key, link.detail)
        link = link.__cause__ or link.__context__
    while type(reason).__name__ == "ComponentTreeException" and reason.__cause__ is not None:
        reason = reason.__cause__  # it draws a tree of files and leaves the reason to its cause
    said = " ".join(str(reason).split())
    return ConfigError(module, "module", f"cannot be loaded: {type(reason).__name__}: {said}")


def _makes_definitions(value: object) -> bool:
    return isinstance(value, dg.Definitions) or type(value).__name__ == "LazyDefinitions"


def register_dataset(
    instance: dg.DagsterInstance,
    dataset: DatasetStore,
    *,
    new_schema: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Registration:
    """Registers the dataset's shards, in its folder and as the instance's dynamic partitions.

        instance: the Dagster instance.
        dataset: the dataset's folder.
        new_schema: decide the dataset's schema again.
        sleep: waits some seconds for young shards to settle.

    Raises:
        SourceError: no shard was found, or the first could not be read.
        ConfigError: the declaration's schema settings changed and `new_schema` was not given.
    """
    found = register(dataset, new_schema=new_schema, wait=True, sleep=sleep)
    add_partitions(instance, dataset.spec, found.partitions)
    return found


@lru_cache(maxsize=8)
def _jobs(spec_key: "_BySettings") -> dg.Definitions:
    return build_definitions(spec_key.spec)


class _BySettings:
    """A spec as a cache key: it holds mappings, which do not hash."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return hash(self.spec.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BySettings) and self.spec == other.spec


def _execute(spec: DatasetSpec, job: str, partition: str, run_id: str, fingerprint: str | None) -> PartitionRun:
    definition = _jobs(_BySettings(spec)).resolve_job_def(job)
    with dg.DagsterInstance.get() as instance:
        other = working_run(instance, spec, partition) if partition else None
        if other is not None:
            failure = f"run {other} is working on this partition: run it again when that has ended"
            return PartitionRun(dataset=spec.name, partition=partition, run_id="", failures=(failure,))
        result = definition.execute_in_process(
            run_config=_QUIET,
            instance=instance,
            partition_key=partition or None,
            raise_on_error=False,
            run_id=run_id,
            tags=run_tags(run_id, fingerprint),
        )
    failures = [] if result.success else list(_failures(result.all_events))
    return PartitionRun(
        dataset=spec.name,
        partition=partition,
        run_id=result.run_id,
        failures=tuple(failures),
        warnings=_once(_violated(result.all_events, dg.AssetCheckSeverity.WARN)),
    )


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


def _once(lines: Iterable[str]) -> tuple[str, ...]:
    """Drop lines that repeat for one asset what another line says: MULT and MSTR hold the same samples."""
    said: dict[str, str] = {}
    for line in lines:
        said.setdefault(line.partition(": ")[2], line)
    return tuple(said.values())


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


def _execute_pack(spec: DatasetSpec, partition: str, run_id: str, fingerprint: str | None) -> PartitionRun:
    return _execute(spec, job_name(spec), partition, run_id, fingerprint)


def run_partitions(
    work: Sequence[tuple[DatasetSpec, str]],
    *,
    num_processes: int = 1,
    started: Callable[[str, str], None] | None = None,
) -> Iterable[PartitionRun]:
    """Runs partitions and yields each as it ends; one that another run is working on is refused.

    Args:
        work: (spec, partition key) pairs.
        num_processes: 1 runs in this process; otherwise so many processes are started.
        started: called with each (dataset, partition) when it begins, with one process only.
    """
    fingerprints: dict[tuple[str, str], Mapping[str, str]] = {}
    tasks: list[_Task] = []
    for spec, key in work:
        if (spec.name, spec.root) not in fingerprints:
            dataset = DatasetStore(spec)
            fingerprints[spec.name, spec.root] = partition_fingerprints(dataset, dataset.partitions().values())
        fingerprint = fingerprints[spec.name, spec.root].get(key)
        tasks.append(_Task(spec=spec, partition=key, run_id=str(uuid.uuid4()), fingerprint=fingerprint))
    if num_processes > 1:
        yield from _run_side_by_side(tasks, num_processes)
        return
    for task in tasks:
        if started is not None:
            started(task.spec.name, task.partition)
        yield _execute_pack(task.spec, task.partition, task.run_id, task.fingerprint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A run to be started. Its id is chosen beforehand, so that the run is found when its process dies."""

    spec: DatasetSpec
    partition: str
    run_id: str
    fingerprint: str | None


def _pool() -> ProcessPoolExecutor:
    # Spawned and not forked: a fork of a process with threads (Arrow, DuckDB) may hang.
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _run_side_by_side(tasks: Sequence[_Task], num_processes: int) -> Iterator[PartitionRun]:
    # Pools of one process each: a pool whose process dies ends all its others, and they may be at work.
    free = [_pool() for _ in range(min(num_processes, len(tasks)))]
    todo = deque(tasks)
    running: dict[Future[PartitionRun], tuple[ProcessPoolExecutor, _Task]] = {}
    try:
        while todo or running:
            while todo and free:
                task, pool = todo.popleft(), free.pop()
                try:
                    future = pool.submit(_execute_pack, task.spec, task.partition, task.run_id, task.fingerprint)
                except BrokenProcessPool:  # its process died between two tasks
                    pool.shutdown()
                    pool = _pool()
                    future = pool.submit(_execute_pack, task.spec, task.partition, task.run_id, task.fingerprint)
                running[future] = (pool, task)
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                pool, task = running.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    pool.shutdown()
                    pool = _pool()
                free.append(pool)
                yield future.result() if error is None else _without_result(task, error)
    finally:
        for pool in [*free, *(pool for pool, _ in running.values())]:
            pool.shutdown(cancel_futures=True)


def _without_result(task: _Task, error: BaseException) -> PartitionRun:
    """The result of a run whose process died before it returned one, for lack of memory for instance."""
    failures: tuple[str, ...] = (f"its process ended: {type(error).__name__}: {error}",)
    with dg.DagsterInstance.get() as instance:
        run = instance.get_run_by_id(task.run_id)
        if run is not None and run.is_success:
            failures = ()
        elif run is not None and run.is_finished:
            events = (entry.dagster_event for entry in instance.all_logs(task.run_id))
            failures = tuple(_failures(event for event in events if event is not None))
        elif run is not None:
            instance.report_run_failed(run, failures[0])
    run_id = task.run_id if run is not None else ""
    return PartitionRun(dataset=task.spec.name, partition=task.partition, run_id=run_id, failures=failures)


def make_manifest(spec: DatasetSpec) -> PartitionRun:
    """Runs the dataset's manifest job in this process."""
    try:
        return _execute(spec, manifest_job_name(spec), "", str(uuid.uuid4()), None)
    except MmAssetsError as error:
        return PartitionRun(dataset=spec.name, partition="", run_id="", failures=(str(error),))
