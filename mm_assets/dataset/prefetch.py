"""Reading ahead: the results of tasks in their order, computed by threads, and memory that is reused.

At most `depth` results are computed or waiting at a time. The threads end with an error, `close`, or when no reference
to the `Prefetch` is left; none of them holds one.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.decoding import Allocate, Arrays
from mm_assets.errors import LoaderError
from mm_assets.fields import ArraySpec

__all__ = ["BufferPool", "Prefetch", "arrays_of"]

T = TypeVar("T")


class Prefetch(Generic[T]):
    """The results of tasks, in order.

    Args:
        tasks: what is to be done; asked for one after the other, by the thread that takes the results.
        threads: how many work; 0 does each task when its result is asked for.
        depth: how many tasks are begun before the results before them are taken. The first is done alone, since
            the caller waits for it.
        on_end: called when the reading has ended, perhaps several times and in several threads, and while other tasks
            are running. Not called if no reference to the `Prefetch` is left and nothing is running.
    """

    def __init__(
        self, tasks: Iterator[Callable[[], T]], *, threads: int, depth: int, on_end: Callable[[], None]
    ) -> None:
        self._tasks = tasks
        self._depth = max(depth, threads)
        self._has_first = False
        self._end = _End(on_end)
        self._started: deque[Future[T]] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        if threads:
            self._executor = ThreadPoolExecutor(threads, thread_name_prefix="mm_assets-read")

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next result.

        Raises:
            StopIteration: there are no more tasks, or it was closed.
            LoaderError: this is a process that was forked during the reading, and the threads are not in it.
            Exception: what the task raised. The next call continues after it.
        """
        if self._end.reached:
            raise StopIteration
        if self._is_forked():
            raise LoaderError("this iteration was begun in another process: begin one here")
        if self._executor is None:
            return _run(next(self._tasks), self._end)
        self._begin(self._executor, self._depth if self._has_first else 1)
        if not self._started:
            raise StopIteration
        first = self._started[0]
        try:
            result = first.result()
            if not self._has_first:
                self._has_first = True
                self._begin(self._executor, self._depth)
            return result
        finally:
            # An interrupt while waiting loses nothing: the result is still the next one.
            if first.done():
                self._started.popleft()

    def _begin(self, executor: ThreadPoolExecutor, count: int) -> None:
        """Have that many tasks under way or done."""
        while len(self._started) < count and (task := next(self._tasks, None)) is not None:
            self._started.append(executor.submit(_run, task, self._end))

    def _is_forked(self) -> bool:
        """Whether this is a copy in a forked process, without threads, and with locks as they were at that moment."""
        return self._executor is not None and self._process != os.getpid()

    def close(self) -> None:
        """End the reading and wait for its threads, each of which may be within a task; fine twice."""
        if self._is_forked():
            self._end.reached = True
        elif not self._end.reached:
            self._stop()
            if self._executor is not None:
                self._executor.shutdown(wait=True)
            self._end.call()

    def _stop(self) -> None:
        """No task begins after this."""
        self._end.reached = True
        for future in self._started:
            future.cancel()
        self._started.clear()

    def __del__(self) -> None:
        # A collector calls this in any thread at any point: in one of these threads, or while a lock is held. So
        # nothing is waited for, and no lock is taken but the futures' own, which are reentrant. The threads end by
        # themselves once their executor is gone, and a running task calls the end when it has finished.
        if not self._is_forked():
            self._stop()


class _End:
    """Whether a reading has ended; shared with its threads, which must not hold the reading itself."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.reached = False


def _run(task: Callable[[], T], end: _End) -> T:
    """A task's result; its `StopIteration`, which would end the whole reading, is an error as in generators."""
    try:
        return task()
    except StopIteration as error:
        raise RuntimeError("StopIteration was raised where a result was made") from error
    finally:
        if end.reached:
            end.call()


def arrays_of(layouts: Mapping[str, ArraySpec | Mapping[str, ArraySpec]], allocate: Allocate) -> dict[str, Arrays]:
    """One array of each layout, not initialized, by name, or by name and part."""
    return {
        name: (
            allocate(layout.shape, layout.dtype)
            if isinstance(layout, ArraySpec)
            else {part: allocate(one.shape, one.dtype) for part, one in layout.items()}
        )
        for name, layout in layouts.items()
    }


class BufferPool:
    """Memory for arrays, which is reused when no reference to them, or any view of them, is left. Safe in threads.

    Fresh memory costs the kernel a fault for each page, a tenth of the time of decoding into it.

    Args:
        keep: how many pieces of memory are cached, of each power of two in which their sizes are rounded up.
        least: bytes; smaller arrays are new each time.
    """

    def __init__(self, *, keep: int, least: int = 1 << 16) -> None:
        self._least = max(least, 1)
        # The deques are bounded: memory that returns to a full one evicts the oldest. They need no lock, for which a
        # finaliser that interrupts its own thread would wait forever.
        self._homes: tuple[deque[npt.NDArray[np.uint8]], ...] = tuple(deque(maxlen=keep) for _ in range(64))

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array that is not initialized."""
        size = math.prod(shape) * dtype.itemsize
        if size < self._least:
            return np.empty(shape, dtype)
        power = (size - 1).bit_length()
        home = self._homes[power]
        try:
            memory = home.pop()
        except IndexError:
            memory = np.empty(1 << power, np.uint8)  # pages after the array are never touched, and never resident
        return np.asarray(_Lease(memory, memory[:size].view(dtype).reshape(shape), home))


class _Lease:
    """The base of arrays over borrowed memory: when it is collected, the memory returns to the pool."""

    __slots__ = ("__array_interface__", "_home", "_memory")

    def __init__(
        self, memory: npt.NDArray[np.uint8], array: npt.NDArray[Any], home: deque[npt.NDArray[np.uint8]]
    ) -> None:
        self.__array_interface__ = array.__array_interface__
        self._memory = memory
        self._home = home

    def __del__(self) -> None:
        self._home.append(self._memory)
