"""The load driver: runs many partitions on an engine, repeats what was lost, and never exceeds its bounds.

What ended a partition decides what follows. A worker or host that was lost, too little memory, a time-out: the
partition is repeated at once, three times at most, after too little memory with twice as much. A storage that fails for
a moment: it is repeated after a pause that doubles. A damaged shard, a wrong setting, a violated check: never, since
its next run would end the same way. Credentials that the storage refuses end the load: all others would fail alike.

A worker may hang: a decoder in an endless loop, a mount that does not answer. Its partition is reported after some
minutes, and killed and repeated after a time that no healthy partition of the load takes.

Where an engine spans hosts, the last partitions are watched: one that takes three times as long as the median gets a
second copy on another host, and what is published first counts. Both copies make the same bytes. The time of a
partition begins when it is at work, not when it is submitted: a cluster may have to grow first.
"""

from __future__ import annotations

import heapq
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from mm_assets.errors import CredentialsError
from mm_assets.pipeline.load.engine import Ended, Engine, Loss, Running, Task
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import StageFailure
from mm_assets.storage.retry import STORAGE
from mm_assets.summaries import counted

__all__ = ["run_tasks"]

REPEATS = 3  # of a partition, after losses
STRAGGLES = 3.0  # times the median
MIN_LIMIT_SECONDS = 1800.0  # that a partition may take if no limit is set
LIMIT_MEDIANS = 20.0  # times the median that it may take, if that is longer
MIN_WARNING_SECONDS = 300.0  # after which a partition that runs is reported
_FEWEST = 5  # partitions that have ended before a median means something
_LATEST = 1000  # of whose times the median is taken
_RECOVERY = 0.1  # of a bound that fell, with each round of partitions that end well: seven rounds double it
_ALL_DUE = 2.0  # seconds after which a bound that fell may fall again: what was in flight may fail for the same reason
_WATCH = 1.0  # seconds between looks at time-outs and stragglers
_GROUP = 16  # tasks at most
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Run:
    """A partition on its way to a report.

    Attributes:
        task: as it is submitted next.
        copies: its tasks at work.
        losses: how many tasks of it were lost.
        timeouts: how many of them took too long.
        faults: how many failed because of the storage.
        copied: when a second copy was started.
    """

    task: Task
    copies: list[Task] = field(default_factory=list)
    losses: int = 0
    timeouts: int = 0
    faults: int = 0
    copied: float = float("-inf")


def run_tasks(
    engine: Engine,
    tasks: Iterable[Task],
    *,
    timeout: float | None = None,
    warned: Callable[[str], object] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[PartitionReport, None, None]:
    """Runs partitions and yields the report of each as it ends.

    Closing the iterator abandons what is at work, which ends with `Engine.close`.

    Args:
        engine: where they run.
        tasks: one for each partition.
        timeout: seconds after which a task is ended and repeated. None takes half an hour, or twenty times the median
            of the partitions that have ended if that is longer. The median grows with the bytes of a partition, and
            the limit of a partition doubles each time that it is exceeded: all partitions of a load may be slow.
        warned: called with each line about a partition that takes long or too long, which is also logged.
        clock: seconds that pass.
        sleep: waits for some.

    Raises:
        CredentialsError: after the last report, partitions were not run because the storage refused the credentials.
        EngineLostError: likewise, because the engine can run nothing any more.
    """
    driver = _Driver(engine, tasks, timeout, warned, clock, sleep)
    try:
        yield from driver.reports()
    finally:
        driver.release()


class _Driver:
    def __init__(
        self,
        engine: Engine,
        tasks: Iterable[Task],
        timeout: float | None,
        warned: Callable[[str], object],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._engine = engine
        self._timeout = timeout
        self._warned = warned
        self._clock = clock
        self._sleep = sleep
        self._todo = deque(_Run(task) for task in tasks)
        self._waiting: list[tuple[float, int, _Run]] = []  # until a time
        self._numbers = count()  # runs are not ordered
        self._at_work: dict[Task, _Run] = {}
        self._groups: dict[Task, set[Task]] = {}  # what is at work of the group of each task
        self._num_groups = 0
        self._ended: deque[tuple[float, int]] = deque(maxlen=_LATEST)  # seconds and bytes of partitions
        self._warnings: dict[Task, float] = {}  # seconds after which a task is reported next
        self._bound = float("inf")  # of groups at work, below the engine's own
        self._may_fall = float("-inf")
        self._watched = float("-inf")  # when
        self._refusal: CredentialsError | None = None

    def reports(self) -> Iterator[PartitionReport]:
        while self._todo or self._waiting or self._at_work:
            while self._waiting and self._waiting[0][0] <= self._clock():
                self._todo.appendleft(heapq.heappop(self._waiting)[-1])
            self._submit()
            if not self._at_work:
                if not self._todo and self._waiting:
                    self._sleep(max(self._waiting[0][0] - self._clock(), 0.0))
                continue
            for ended in self._engine.ended(self._pause()):
                yield from self._take(ended)
            yield from self._watch()
        if self._refusal is not None:
            raise self._refusal

    def release(self) -> None:
        """Ends what is at work."""
        for task in list(self._at_work):
            self._cancel(task)

    # -- submitting

    def _submit(self) -> None:
        """Fills the engine with what is to be done."""
        while self._todo and self._num_groups < self._most():
            if self._at_work and not self._engine.fits(self._todo[0].task):
                return
            self._start(self._next_group())

    def _most(self) -> int:
        return max(int(min(self._engine.slots, self._bound)), 1)

    def _next_group(self) -> list[_Run]:
        """The next partitions to run, in one place one after the other: several only where they are tiny."""
        group = [self._todo.popleft()]
        size = group[0].task.size
        # Near the end of a load groups would leave hosts idle.
        most = min(_GROUP, len(self._todo) // max(self._engine.slots, 1) + 1)
        while self._todo and len(group) < most and not group[-1].losses:  # what was lost may lose its neighbors
            size += self._todo[0].task.size
            if size > self._engine.group_bytes or self._todo[0].losses:
                break
            group.append(self._todo.popleft())
        return group

    def _wait(self, run: _Run, seconds: float) -> None:
        heapq.heappush(self._waiting, (self._clock() + seconds, next(self._numbers), run))

    def _start(self, runs: Sequence[_Run]) -> None:
        tasks = [replace(run.task) for run in runs]  # copies are distinguished by identity
        self._engine.submit(tasks)
        self._add(tasks, runs)

    def _add(self, tasks: Sequence[Task], runs: Sequence[_Run]) -> None:
        group = set(tasks)
        for task, run in zip(tasks, runs, strict=True):
            run.copies.append(task)
            self._at_work[task] = run
            self._groups[task] = group
        self._num_groups += 1

    def _remove(self, task: Task) -> _Run | None:
        """Takes a task from those at work: its run, or None if it was canceled while it ended."""
        run = self._at_work.pop(task, None)
        self._warnings.pop(task, None)
        if run is not None:
            run.copies.remove(task)
            group = self._groups.pop(task)
            group.remove(task)
            self._num_groups -= not group
        return run

    # -- ends

    def _take(self, ended: Ended) -> Iterator[PartitionReport]:
        run = self._remove(ended.task)
        if run is None:
            return
        report = ended.report
        if report is None:
            assert ended.loss is not None
            yield from self._lost(run, ended.loss)
        elif report.ok or not run.copies:
            if self._waits_for_storage(run, report):
                return
            if report.ok:
                self._ended.append((report.seconds, ended.task.size))
                self._bound += max(1 / self._bound, _RECOVERY)
            self._finish(run)
            self._submit()  # before what takes the report is done with it
            yield report

    def _waits_for_storage(self, run: _Run, report: PartitionReport) -> bool:
        """Whether a partition is repeated later, because the storage failed with what may pass."""
        fault, waits = None if report.failure is None else report.failure.storage_fault, STORAGE.waits()
        if fault == "slow_down":
            self._fall()
        if report.failure is not None and fault == "credentials":
            self._give_up(report.failure)
        if not STORAGE.may_pass(fault) or self._refusal is not None or run.faults == len(waits):
            return False
        run.task = replace(run.task, earlier=None)  # this run may have left an attempt
        self._wait(run, waits[run.faults])
        run.faults += 1
        return True

    def _give_up(self, failure: StageFailure) -> None:
        """Starts no partition any more; what is at work ends by itself."""
        num_left = len(self._todo) + len(self._waiting)
        if num_left:
            self._todo.clear()
            self._waiting.clear()
            detail = f"{failure.detail}; {counted(num_left, 'more partition')} not run"
            self._refusal = CredentialsError(failure.path or "storage", detail)

    def _finish(self, run: _Run) -> None:
        """Ends the other copies of a partition."""
        if run.copies:
            for task in list(run.copies):
                self._cancel(task)
            DatasetStore(run.task.spec).delete_attempt(run.task.partition.key)  # what a copy wrote of its end

    def _lost(self, run: _Run, loss: Loss) -> Iterator[PartitionReport]:
        """Repeats a task that was lost, or yields the report of a partition that was lost too often."""
        if loss.kind == "memory" and not self._engine.spans_hosts:  # one of many hosts says nothing about the others
            self._fall()
        if run.copies:  # the other one goes on
            return
        run.losses += loss.kind != "neighbor"
        run.timeouts += loss.kind == "timeout"
        if run.losses <= REPEATS:
            if loss.kind != "neighbor":
                self._warn(run.task, f"stage {loss.stage}: {loss.detail}; the partition runs again")
            factor = 2 if loss.kind == "memory" else 1
            # What earlier runs left is listed again: this one may have left an attempt.
            run.task = replace(run.task, earlier=None, memory_factor=factor * run.task.memory_factor)
            self._todo.appendleft(run)
            return
        key, spec = run.task.partition.key, run.task.spec
        again = f"`mm-assets run --dataset {spec.name} --partition {key}` runs the partition alone"
        failure = StageFailure(partition=key, stage=loss.stage, detail=f"{loss.detail}, {run.losses} times: {again}")
        DatasetStore(spec).write_failure(failure)
        yield PartitionReport(partition=key, failure=failure)

    def _fall(self) -> None:
        """Halves the bound of what is at work."""
        if self._clock() >= self._may_fall:
            self._bound = max(min(self._bound, self._num_groups + 1) / 2, 1)
            self._may_fall = self._clock() + _ALL_DUE

    # -- what takes long

    def _pause(self) -> float:
        """Seconds to wait for ends: until something else is to be done."""
        return max(min(self._waiting[0][0] - self._clock(), _WATCH), 0.0) if self._waiting else _WATCH

    def _watch(self) -> Iterator[PartitionReport]:
        if self._clock() - self._watched < _WATCH:
            return
        self._watched = self._clock()
        if any(self._late()):
            for ended in self._engine.ended(0.0):  # while reports were recorded: it did not take too long
                yield from self._take(ended)
            for task, running, limit in list(self._late()):
                run = self._cancel(task)
                detail = (
                    f"{running.worker} did not end the partition within {limit:,.0f} seconds and was killed "
                    "(`engine.timeout_seconds` sets the limit)"
                )
                yield from self._lost(run, Loss(kind="timeout", stage=running.stage, detail=detail))
        self._copy_stragglers()

    def _late(self) -> Iterator[tuple[Task, Running, float]]:
        """Yields the tasks that have run for longer than their limits, and reports those that take long."""
        now = self._clock()
        median, median_size = map(statistics.median, zip(*self._ended, strict=True)) if self._ended else (0.0, 0.0)
        for task, run in self._at_work.items():
            running = self._engine.running(task)
            if running is None:
                continue
            typical = median * max(task.size / median_size if median_size else 1.0, 1.0)
            limit = self._timeout or max(MIN_LIMIT_SECONDS, LIMIT_MEDIANS * typical) * 2**run.timeouts
            seconds = now - running.began
            if seconds > limit:
                yield task, running, limit
            elif seconds >= self._warnings.get(task, max(MIN_WARNING_SECONDS, STRAGGLES * typical)):
                self._warnings[task] = 2 * seconds
                line = (
                    f"no result after {seconds:,.0f} seconds: {running.worker} is at stage {running.stage}; after "
                    f"{limit:,.0f} seconds it is killed, and the partition repeated (`engine.timeout_seconds` sets the "
                    "limit)"
                )
                self._warn(task, line)

    def _warn(self, task: Task, line: str) -> None:
        line = f"{task.spec.name}/{task.partition.key}: {line}"
        _log.warning("%s", line)
        self._warned(line)

    def _cancel(self, task: Task) -> _Run:
        run = self._remove(task)
        assert run is not None
        self._engine.cancel(task)
        return run

    def _copy_stragglers(self) -> None:
        if not self._engine.spans_hosts or self._todo or self._waiting or len(self._ended) < _FEWEST:
            return
        late = self._clock() - STRAGGLES * statistics.median(seconds for seconds, _ in self._ended)
        for task, run in list(self._at_work.items()):
            if self._num_groups >= self._most():
                return
            running = self._engine.running(task) if len(run.copies) == 1 else None
            if running is None or max(running.began, run.copied) > late or not self._engine.fits(task):
                continue
            copy = replace(run.task)
            if self._engine.submit_copy(copy, task):
                self._add([copy], [run])
                run.copied = self._clock()  # a copy that fails at once is not followed by another
