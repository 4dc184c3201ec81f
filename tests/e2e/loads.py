"""Loads and jobs in this process, on the instance that $DAGSTER_HOME names."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import dagster as dg

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.recorded_load import LoadResult, run_load
from mm_assets.pipeline.load.engine import Ended, Task
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.load.tasks import PartitionRun
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import Claims
from mm_assets.pipeline.state.folder import DatasetStore


class InProcess:
    """An engine that runs one task at a time in this process, which a test may have patched; no worker has to start."""

    slots = 1
    spans_hosts = False
    group_bytes = 0

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def fits(self, task: Task) -> bool:
        return True

    def submit(self, tasks: Sequence[Task]) -> None:
        self._tasks += tasks

    def submit_copy(self, task: Task, of: Task) -> bool:
        return False

    def running(self, task: Task) -> None:
        return None

    def ended(self, timeout: float | None) -> Iterator[Ended]:
        while self._tasks:
            task = self._tasks.pop(0)
            *_, report = task.steps()
            assert not isinstance(report, str)
            yield Ended(task=task, report=report)

    def cancel(self, task: Task) -> None:
        with suppress(ValueError):
            self._tasks.remove(task)

    def close(self) -> None:
        pass


def run_partitions(work: Iterable[tuple[DatasetSpec, str]], *, num_processes: int = 0) -> list[PartitionRun]:
    """Returns how each partition ended in loads of (spec, key) pairs, one per spec; without processes in this one."""
    ended: list[PartitionRun] = []
    for spec, pairs in itertools.groupby(work, operator.itemgetter(0)):
        keys = [key for _, key in pairs]
        if not num_processes:
            run_load(spec, keys, engine=InProcess(), observed=ended.append)
            continue
        with Processes(num_processes) as processes:
            run_load(spec, keys, engine=processes, observed=ended.append)
    return ended


def make_manifest(spec: DatasetSpec) -> LoadResult:
    """A load of no partition."""
    return run_load(spec, [], engine=InProcess())


@contextmanager
def claimed(spec: DatasetSpec, partition: str) -> Iterator[None]:
    """Another load, of this process, works on a partition."""
    with Claims(DatasetStore(spec), "another") as claims:
        claims.take([partition])
        yield


def pack(instance: dg.DagsterInstance, spec: DatasetSpec, partition: str) -> dg.ExecuteInProcessResult:
    """A run of the job of one partition, as the UI starts it."""
    job = build_definitions(spec).resolve_job_def(f"{spec.name}_pack")
    return job.execute_in_process(instance=instance, partition_key=partition, raise_on_error=False)
