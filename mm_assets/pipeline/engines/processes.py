"""Many partitions, side by side in processes of this machine that stay warm from one partition to the next.

A worker works on one partition at a time. One that is killed fails its partition only, and another takes its place.
Workers are spawned and not forked: a fork of a process with threads (Arrow, DuckDB) may hang. They end with this
process, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any, Self

from mm_assets.checks.database import share_memory
from mm_assets.errors import MmAssetsError
from mm_assets.pipeline.chain import CHAIN, RAW_SHARDS, Stage
from mm_assets.pipeline.partition_run import PartitionReport, failed_report, run_partition
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore, Partition, StageFailure
from mm_assets.rows.schema import DatasetSchema

__all__ = ["Guard", "Processes", "Task", "num_processors"]

WORKER_SECONDS = 2.5  # for workers to end by themselves
_SPAWN = multiprocessing.get_context("spawn")

Guard = Callable[[str], AbstractContextManager[object]]
"""Holds the right to work on a partition, by its key; raises `MmAssetsError` if another process has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One partition to run.

    Attributes:
        partition: as registered.
        first: the stage to start at; None for the first that is stale.
        markers: names of its markers; None lists them.
    """

    partition: Partition
    first: Stage | None = None
    markers: tuple[str, ...] | None = None


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes:
    """A pool of worker processes, started when they are needed.

    Args:
        num_processes: how many partitions are in flight; 1 or less runs them in this process.
    """

    def __init__(self, num_processes: int = 1) -> None:
        self.num_processes = num_processes
        self._free: list[_Worker] = []
        self._busy: dict[connection.Connection, _Flight] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers; what they are working on is abandoned."""
        flights, self._busy = list(self._busy.values()), {}
        workers, self._free = [*self._free, *(flight.worker for flight in flights)], []
        end_workers(worker.process for worker in workers)
        for worker in workers:
            worker.connection.close()
        for flight in flights:
            flight.held.close()

    def run(
        self, spec: DatasetSpec, schema: DatasetSchema, tasks: Iterable[Task], *, guard: Guard = nullcontext
    ) -> Generator[PartitionReport, None, None]:
        """Runs partitions of one dataset and yields the report of each as it ends.

        Closing the iterator ends the workers that are at work.

        Args:
            spec: the declaration.
            schema: the dataset's, as registered.
            tasks: the partitions.
            guard: entered before a partition is worked on and left after it; a partition that it refuses is not run.
        """
        if self.num_processes <= 1:
            for task in tasks:
                yield _run_here(spec, schema, task, guard)
            return
        todo = deque(tasks)
        try:
            while todo or self._busy:
                while todo and len(self._busy) < self.num_processes:
                    refused = self._start(spec, schema, todo.popleft(), guard)
                    if refused is not None:
                        yield refused
                if self._busy:
                    yield from self._ended(connection.wait(list(self._busy)))
        finally:
            if self._busy:
                self.close()

    def _start(self, spec: DatasetSpec, schema: DatasetSchema, task: Task, guard: Guard) -> PartitionReport | None:
        """Gives a partition to a free worker; the report if it cannot be started."""
        with ExitStack() as held:
            try:
                held.enter_context(guard(task.partition.key))
            except MmAssetsError as error:
                return _refused(error, task)
            while True:
                is_new = not self._free
                worker = _Worker(self.num_processes) if is_new else self._free.pop()
                flight = _Flight(worker=worker, spec=spec, task=task)
                try:
                    worker.connection.send((spec, task.partition, schema, task.first and task.first.name, task.markers))
                except OSError:
                    code = worker.end()
                    if is_new:
                        return flight.died(code)
                    continue  # it died between two partitions
                flight.held = held.pop_all()
                self._busy[worker.connection] = flight
                return None

    def _ended(self, ready: Iterable[Any]) -> Iterator[PartitionReport]:
        """The reports among the messages of workers; that of a worker that died says how."""
        for each in ready:
            flight = self._busy[each]
            try:
                message = each.recv()
            except (EOFError, OSError):  # reset, where it died before it read its task
                report = flight.died(flight.worker.end())
            else:
                if isinstance(message, str):
                    flight.stage = message
                    continue
                report = message
                self._free.append(flight.worker)
            del self._busy[each]
            flight.held.close()
            yield report


def _run_here(spec: DatasetSpec, schema: DatasetSchema, task: Task, guard: Guard) -> PartitionReport:
    with ExitStack() as held:
        try:
            held.enter_context(guard(task.partition.key))
        except MmAssetsError as error:
            return _refused(error, task)
        return run_partition(spec, task.partition, schema, first=task.first, markers=task.markers)


def _refused(error: MmAssetsError, task: Task) -> PartitionReport:
    """The report of a partition that another process works on; it is not stored, since that process may succeed."""
    failure = StageFailure.of(error, stage=(task.first or RAW_SHARDS).name, partition=task.partition.key)
    return failed_report(failure, is_refused=True)


class _Worker:
    """A process that runs one partition at a time, as one of a number of them, and this end of its pipe."""

    def __init__(self, num_processes: int) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_work, args=(theirs, num_processes), daemon=True)
        with sheltered():  # multiprocessing unblocks SIGINT when it starts the first process of its own
            self.process.start()
        theirs.close()

    def end(self) -> int | None:
        """Waits for the process, whose pipe is broken, to end, and kills it if it does not; its exit code."""
        self.connection.close()
        self.process.join(WORKER_SECONDS)
        self.process.kill()
        self.process.join()
        return self.process.exitcode


class _Flight:
    """A partition at a worker.

    Attributes:
        stage: name of the stage at work, as far as it is known.
        held: the right to work on it.
    """

    def __init__(self, *, worker: _Worker, spec: DatasetSpec, task: Task) -> None:
        self.worker = worker
        self.held = ExitStack()
        self._spec = spec
        self._key = task.partition.key
        self.stage = (task.first or RAW_SHARDS).name

    def died(self, code: int | None) -> PartitionReport:
        """The report of a partition whose worker died; it is stored as the partition's failure."""
        failure = StageFailure(partition=self._key, stage=self.stage, detail=self._death(code))
        with suppress(MmAssetsError, OSError):  # the storage may be what failed
            DatasetStore(self._spec).write_failure(failure)
        return failed_report(failure)

    def _death(self, code: int | None) -> str:
        """How the worker ended, and what to do."""
        alone = f"`mm-assets run --dataset {self._spec.name} --partition {self._key}` runs the partition alone"
        if code == -signal.SIGKILL:
            return f"the process was killed (signal 9; out of memory?): {alone}, without others that need memory"
        if code is not None and code < 0:
            return f"the process was ended by signal {-code} ({signal.strsignal(-code)}): {alone}"
        return f"the process ended with exit code {code}: {alone}"


def _work(theirs: connection.Connection, num_processes: int) -> None:
    """What a worker does: partitions, until the other end of its pipe is closed."""
    share_memory(num_processes)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    with suppress(EOFError, BrokenPipeError):
        while True:
            spec, partition, schema, name, markers = theirs.recv()
            first = next((stage for stage in CHAIN if stage.name == name), None)
            report = run_partition(
                spec, partition, schema, first=first, markers=markers, started=lambda stage: theirs.send(stage.name)
            )
            theirs.send(report)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)  # its work is as safe to abandon as that of a parent that was killed


@contextmanager
def sheltered() -> Iterator[None]:
    """Processes that are started in the block never get the SIGINT of a terminal: their parent decides for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_workers(workers: Iterable[multiprocessing.process.BaseProcess]) -> None:
    """Ends worker processes: they are interrupted, and what does not end by itself is killed."""
    workers = list(workers)
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + WORKER_SECONDS
    for worker in workers:
        worker.join(max(deadline - time.monotonic(), 0.0))
        worker.kill()
        worker.join()
