"""Many partitions, side by side in processes of this machine that stay warm from one partition to the next.

A worker works on one partition at a time. One that is killed loses its partition only, and another takes its place.
Also a single partition at a time has a worker, which can be killed if it hangs. Workers are forked from a server that
has imported what they need and has no work of its own (7 ms each): a fork of this process, with its threads of Arrow
and DuckDB, may hang, and a new interpreter imports for 0.7 s. They end with this process, however that ends. One in
uninterruptible sleep, which no signal ends, is abandoned: nothing waits for it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, process, resource_tracker
from types import TracebackType
from typing import Any, Self

from mm_assets.checks.database import share_memory
from mm_assets.pipeline.load.engine import Ended, Loss, Running, Started, Task, unobserved
from mm_assets.storage.urls import is_local
from mm_assets.summaries import counted

__all__ = ["Processes", "num_processors", "scratch_bytes"]

WORKER_SECONDS = 2.5  # for workers to end by themselves
KILL_SECONDS = 5.0  # for a process to end that was killed: a core of many gigabytes takes a while to free
_FORKS = sys.platform == "linux"  # elsewhere a fork may fail, whatever the process has done
_CONTEXT = multiprocessing.get_context("forkserver") if _FORKS else multiprocessing.get_context("spawn")
_IMPORTED_BY_STAGES = ("duckdb", "pandas", "PIL.Image")  # when they run
_COPIES = 3  # a shard is fetched, its tables with media and packed files are made beside it, then uploaded
_log = logging.getLogger(__name__)


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_server() -> None:
    """Starts the server that workers are forked from, unless it runs: it imports while this process does other work."""
    if _FORKS:
        with sheltered():
            resource_tracker.ensure_running()  # which unblocks SIGINT
        with sheltered():
            multiprocessing.set_forkserver_preload([__name__, *_IMPORTED_BY_STAGES])
            forkserver.ensure_running()


def scratch_bytes(task: Task) -> int:
    """Scratch space that a task needs at most, in bytes: none where its shards and files are local."""
    is_remote = not is_local(task.spec.root) or not is_local(task.spec.shards)
    return _COPIES * task.size if is_remote else 0


class Processes:
    """A pool of worker processes, started when they are needed.

    Args:
        num_processes: how many partitions are in flight; 0 runs them in this process, one after the other, when `ended`
            is called. Nothing detects then that one hangs.
        prepares: whether to import what workers need at once, and not with the first task.
        started: as that of `open_engine`.
    """

    spans_hosts = False
    group_bytes = 0  # a partition costs one message each way

    def __init__(self, num_processes: int = 0, *, prepares: bool = True, started: Started = unobserved) -> None:
        self._started = started
        self._has_workers = num_processes > 0
        if self._has_workers and prepares:
            _start_server()
        self.slots = max(num_processes, 1)
        self._here: deque[Task] = deque()
        self._free: list[_Worker] = []
        self._busy: dict[connection.Connection, _Flight] = {}
        self._ended: list[Ended] = []
        self._abandoned: list[process.BaseProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers; what they are working on is abandoned."""
        self._here.clear()
        self._ended.clear()
        flights, self._busy = list(self._busy.values()), {}
        workers, self._free = [*self._free, *(flight.worker for flight in flights)], []
        end_workers(worker.process for worker in workers)
        for worker in workers:
            worker.connection.close()
            self._expect_exit(worker)
        pids = [str(abandoned.pid) for abandoned in self._abandoned if abandoned.exitcode is None]
        self._abandoned.clear()
        if pids:
            _log.warning(
                "%s did not end after SIGKILL (process %s): such a process ends when the disk or mount that it waits "
                "for answers, or with the machine",
                counted(len(pids), "worker"),
                ", ".join(pids),
            )

    def fits(self, task: Task) -> bool:
        """Whether the temporary folder has space for a task and for all that those at work may still need."""
        needed = scratch_bytes(task)
        if not needed or not self._busy:  # alone it may at least try
            return True
        at_work = sum(scratch_bytes(flight.task) for flight in self._busy.values())
        return shutil.disk_usage(tempfile.gettempdir()).free >= needed + at_work

    def submit(self, tasks: Sequence[Task]) -> None:
        """Gives each task to a free worker, or to a new one."""
        for task in tasks:
            if self._has_workers:
                self._start(task)
            else:
                self._here.append(task)

    def submit_copy(self, task: Task, of: Task) -> bool:
        """False: there is no other host."""
        return False

    def running(self, task: Task) -> Running | None:
        """Returns the worker of a task. Returns None for a task of this process."""
        return next((flight.running for flight in self._busy.values() if flight.task is task), None)

    def ended(self, timeout: float | None) -> Iterable[Ended]:
        """Those that ended, as `Engine.ended`; in this process, the next one is run first."""
        if self._here:
            task = self._here.popleft()
            self._started(task, "")
            for step in task.steps():
                if isinstance(step, str):
                    self._started(task, step)
                else:
                    return [Ended(task=task, report=step)]
        found, self._ended = self._ended, []
        if found:
            return found
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._busy and not found:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready = connection.wait(list(self._busy), left)
            if not ready:
                break
            found = list(self._received(ready))
        return found

    def cancel(self, task: Task) -> None:
        """Kills the worker of a task."""
        for pipe, flight in list(self._busy.items()):
            if flight.task is task:
                del self._busy[pipe]
                flight.worker.process.kill()
                self._end(flight.worker)

    def _end(self, worker: _Worker) -> int | None:
        """Ends a worker. Returns its exit code, or None if it cannot be killed."""
        code = worker.end()
        self._expect_exit(worker)
        return code

    def _expect_exit(self, worker: _Worker) -> None:
        """Abandons a worker that still exists after it was killed."""
        if worker.process.exitcode is None:
            _log.warning("process %s cannot be killed: it is abandoned", worker.process.pid)
            self._abandoned.append(worker.process)
            # At the exit of this process multiprocessing would wait for it and for the tracker that it shares, forever;
            # it has no public way to forget a process.
            process._children.discard(worker.process)  # type: ignore[attr-defined]
            resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]

    def _start(self, task: Task) -> None:
        while True:
            is_new = not self._free
            worker = _Worker(self.slots) if is_new else self._free.pop()
            flight = _Flight(worker, task)
            try:
                worker.connection.send(task)
            except OSError:
                code = self._end(worker)
                if is_new:
                    self._ended.append(flight.lost(code))
                    return
                continue  # it died between two partitions
            self._busy[worker.connection] = flight
            self._started(task, "")
            return

    def _received(self, ready: Iterable[Any]) -> Iterator[Ended]:
        """The ends of tasks among the messages of workers."""
        for each in ready:
            flight = self._busy[each]
            try:
                message = each.recv()
            except (EOFError, OSError):  # reset, where it died before it read its task
                ended = flight.lost(self._end(flight.worker))
            else:
                if isinstance(message, str):
                    flight.stage = message
                    self._started(flight.task, message)
                    continue
                ended = Ended(task=flight.task, report=message)
                self._free.append(flight.worker)
            del self._busy[each]
            yield ended


class _Worker:
    """A process that runs one partition at a time, as one of a number of them, and this end of its pipe."""

    def __init__(self, num_processes: int) -> None:
        _start_server()  # unless it runs
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_work, args=(theirs, num_processes, dict(os.environ)), daemon=True)
        with sheltered():  # multiprocessing unblocks SIGINT when it starts the first process of its own
            self.process.start()
        theirs.close()

    def end(self) -> int | None:
        """Waits for the process, whose pipe is broken, to end, and kills it if it does not.

        Returns:
            Its exit code, or None if it still exists.
        """
        self.connection.close()
        self.process.join(WORKER_SECONDS)
        self.process.kill()
        self.process.join(KILL_SECONDS)
        return self.process.exitcode


class _Flight:
    """A task at a worker since `began`; `stage` is the name of the one at work, as far as it is known."""

    def __init__(self, worker: _Worker, task: Task) -> None:
        self.worker = worker
        self.task = task
        self.stage = task.first_stage
        self.began = time.monotonic()

    @property
    def running(self) -> Running:
        return Running(began=self.began, stage=self.stage, worker=f"process {self.worker.process.pid}")

    def lost(self, code: int | None) -> Ended:
        """The loss of a task whose worker ended with this exit code."""
        if code == -signal.SIGKILL:
            loss = Loss(kind="memory", stage=self.stage, detail="the process was killed (signal 9; out of memory?)")
        elif code is not None and code < 0:
            how = f"the process was ended by signal {-code} ({signal.strsignal(-code)})"
            loss = Loss(kind="worker", stage=self.stage, detail=how)
        else:
            loss = Loss(kind="worker", stage=self.stage, detail=f"the process ended with exit code {code}")
        return Ended(task=self.task, loss=loss)


def _work(theirs: connection.Connection, num_processes: int, environment: Mapping[str, str]) -> None:
    """Runs partitions in a worker, until the other end of its pipe is closed."""
    os.environ.clear()  # the server's is that of an earlier time
    os.environ.update(environment)
    share_memory(num_processes)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    with suppress(EOFError, BrokenPipeError):
        while True:
            task: Task = theirs.recv()
            for step in task.steps():
                theirs.send(step)


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


def end_workers(workers: Iterable[process.BaseProcess]) -> None:
    """Ends worker processes: they are interrupted, and what does not end by itself is killed, if it can be."""
    workers = list(workers)
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + WORKER_SECONDS
    for worker in workers:
        worker.join(max(deadline - time.monotonic(), 0.0))
        worker.kill()
    deadline = time.monotonic() + KILL_SECONDS
    for worker in workers:
        worker.join(max(deadline - time.monotonic(), 0.0))
