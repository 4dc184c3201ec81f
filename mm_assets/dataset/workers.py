"""Threads for the calls of a dataset or loader: they decode, transform, and wait for remote files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from mm_assets.formats.batch import spans
from mm_assets.storage.forking import renew_in_children

__all__ = ["MAX_THREADS", "WorkerPool", "count_threads", "end"]

MAX_THREADS = 256  # far beyond where decoding gains; a mistyped number must not start thousands

# Rows cost differently: a thread that had cheap ones takes the next run. More runs would only cost more overhead.
_RUNS_PER_THREAD = 4

T = TypeVar("T")


def count_threads(threads: int | None) -> int:
    """The number of threads: None is one for each core that this process may use; `ValueError` for a wrong number."""
    if threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return min(cores or 1, MAX_THREADS)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= MAX_THREADS:
        raise ValueError(f"threads: found {threads!r}, expected None or an integer from 0 to {MAX_THREADS}")
    return threads


def end(futures: Sequence[Future[Any]]) -> None:
    """Cancel the tasks that have not begun, and wait for the others."""
    for future in futures:
        future.cancel()
    wait(futures)


class WorkerPool:
    """Threads that are started at the first use and joined by `close`; several callers may share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._made_for = (0, 0)  # threads, process
        self._closed = False
        renew_in_children(self)

    def renew_locks(self) -> None:
        """In a forked child: see `forking`."""
        self._lock = threading.Lock()

    def start(self, threads: int, tasks: Sequence[Callable[[], T]]) -> list[Future[T]]:
        """Submit tasks to that many threads, to be done in their order; `ValueError` if the pool is closed."""
        with self._lock:  # held until all tasks are in, so that the executor is not closed in between
            if self._closed:
                raise ValueError("the dataset is closed")
            wanted = (threads, os.getpid())
            if self._executor is None or self._made_for != wanted:
                if self._executor is not None and self._made_for[1] == wanted[1]:
                    self._executor.shutdown(wait=True)
                # In a forked child the parent's threads do not exist, and their executor is only dropped.
                self._executor = ThreadPoolExecutor(threads, thread_name_prefix="mm_assets-worker")
                self._made_for = wanted
            return [self._executor.submit(task) for task in tasks]

    def start_runs(self, threads: int, count: int, task: Callable[[int, int], T]) -> list[Future[T]]:
        """Submit a task of rows [start, stop) for each of a few runs per thread."""
        size = max(1, -(-count // (threads * _RUNS_PER_THREAD)))
        return self.start(threads, [partial(task, *run) for run in spans(count, size)])

    def map_runs(self, threads: int, count: int, task: Callable[[int, int], list[T]]) -> list[T]:
        """The lists that a task makes of runs of rows as one; in the calling thread where others would not help."""
        if threads < 2 or count < 2:
            return task(0, count)
        futures = self.start_runs(threads, count, task)
        try:
            return [item for future in futures for item in future.result()]
        finally:
            end(futures)

    def close(self) -> None:
        """Finish what was started, and join the threads; fine twice."""
        with self._lock:
            executor, self._executor, self._closed = self._executor, None, True
        if executor is not None:
            executor.shutdown(wait=True)
