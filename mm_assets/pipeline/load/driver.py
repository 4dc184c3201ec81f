"""The load driver: runs many partitions on an engine, repeats what was lost, and never exceeds its bounds.

What ended a partition decides what follows. A worker or host that was lost, too little memory, a time-out: the
partition is repeated at once, three times at most, after too little memory with twice as much. A storage that fails for
a moment: it is repeated after a pause that doubles. A damaged shard, a wrong setting, a violated check: never, since
its next run would end the same way. Credentials that the storage refuses end the load: all others would fail alike.

Where an engine spans hosts, the last partitions are watched: one that takes three times as long as the median gets a
second copy on another host, and what is published first counts. Both copies make the same bytes. The time of a
partition begins when it is at work, not when it is submitted: a cluster may have to grow first.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

from mm_assets.errors import CredentialsError, MmAssetsError
from mm_assets.pipeline.load.engine import Ended, Engine, Loss, Task
from mm_assets.pipeline.partition.run import PartitionReport, failed_report
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import StageFailure
from mm_assets.summaries import counted

__all__ = ["run_tasks"]

REPEATS = 3  # of a partition, after losses
STORAGE_PAUSES = (5.0, 20.0, 60.0)  # seconds, in addition to the attempts of the storage's client
STRAGGLES = 3.0  # times the median
_FEWEST = 5  # partitions that have ended before a median means something
_LATEST = 1000  # of whose times the median is taken
_RECOVERY = 0.1  # of a bound that fell, with each round of partitions that end well: seven rounds double it
_ALL_DUE = 2.0  # seconds after which a bound that fell may fall again: what was in flight may fail for the same reason
_WATCH = 1.0  # seconds between looks at time-outs and stragglers
_GROUP = 16  # tasks at most


@dataclass(eq=False)
class _Run:
    """A partition on its way to a report.

    Attributes:
        task: as it is submitted next.
        copies: its tasks at work.
        losses: how many tasks of it were lost.
        faults: how many failed because of the storage.
        has_waited: whether it has waited for the end of a lease.
        copied: when a second copy was started.
    """

    task: Task
    copies: list[Task] = field(default_factory=list)
    losses: int = 0
    faults: int = 0
    has_waited: bool = False
    copied: float = float("-inf")


def run_tasks(
    engine: Engine,
    tasks: Iterable[Task],
    *,
    timeout: float | None = None,
    idle: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[PartitionReport, None, None]:
    """Runs partitions and yields the report of each as it ends.

    Closing the iterator abandons what is at work, which ends with `Engine.close`.

    Args:
        engine: where they run.
        tasks: one for each partition.
        timeout: seconds after which a task is ended and repeated; None lets it run.
        idle: called before each wait: all that has ended was yielded.
        clock: seconds that pass.
        sleep: waits for some.

    Raises:
        CredentialsError: after the last report, partitions were not run because the storage refused the credentials.
    """
    driver = _Driver(engine, tasks, timeout, idle, clock, sleep)
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
        idle: Callable[[], object],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._engine = engine
        self._timeout = timeout
        self._idle = idle
        self._clock = clock
        self._sleep = sleep
        self._todo = deque(_Run(task) for task in tasks)
        self._waiting: list[tuple[float, int, _Run]] = []  # until a time
        self._numbers = count()  # runs are not ordered
        self._at_work: dict[Task, _Run] = {}
        self._groups: dict[Task, set[Task]] = {}  # what is at work of the group of each task
        self._num_groups = 0
        self._seconds: deque[float] = deque(maxlen=_LATEST)
        self._bound = float("inf")  # of groups at work, below the engine's own
        self._may_fall = float("-inf")
        self._watched = float("-inf")  # when
        self._refusal: CredentialsError | None = None

    def reports(self) -> Iterator[PartitionReport]:
        while self._todo or self._waiting or self._at_work:
            while self._waiting and self._waiting[0][0] <= self._clock():
                self._todo.appendleft(heapq.heappop(self._waiting)[-1])
            self._submit()
            self._idle()
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
            if self._waits_for_lease(run, report) or self._waits_for_storage(run, report):
                return
            if report.ok:
                self._seconds.append(report.seconds)
                self._bound += max(1 / self._bound, _RECOVERY)
            self._finish(run)
            self._submit()  # before what takes the report is done with it
            yield report

    def _waits_for_lease(self, run: _Run, report: PartitionReport) -> bool:
        """Whether a partition is tried again when the lease ends that another host has: it may be lost."""
        if report.retry_after is None or run.has_waited:
            return False
        self._wait(run, report.retry_after)
        run.has_waited = True
        return True

    def _waits_for_storage(self, run: _Run, report: PartitionReport) -> bool:
        """Whether a partition is repeated later, because the storage failed with what may pass."""
        fault = None if report.failure is None else report.failure.storage_fault
        if fault == "slow_down":
            self._fall()
        if report.failure is not None and fault == "credentials":
            self._give_up(report.failure)
        if fault in (None, "credentials") or self._refusal is not None or run.faults == len(STORAGE_PAUSES):
            return False
        self._wait(run, STORAGE_PAUSES[run.faults])
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
            dataset, key = DatasetStore(run.task.spec), run.task.partition.key
            with suppress(MmAssetsError, OSError):  # what a copy wrote of its end: the storage may be what failed
                dataset.clear_failure(key)
            _release(run.task, dataset)

    def _lost(self, run: _Run, loss: Loss) -> Iterator[PartitionReport]:
        """Repeats a task that was lost, or yields the report of a partition that was lost too often."""
        if loss.kind == "memory" and not self._engine.spans_hosts:  # one of many hosts says nothing about the others
            self._fall()
        if run.copies:  # the other one goes on
            return
        run.losses += loss.kind != "neighbor"
        if run.losses <= REPEATS:
            if loss.kind == "memory":
                run.task = replace(run.task, memory_factor=2 * run.task.memory_factor)
            self._todo.appendleft(run)
            return
        key, spec = run.task.partition.key, run.task.spec
        again = f"`mm-assets run --dataset {spec.name} --partition {key}` runs the partition alone"
        failure = StageFailure(partition=key, stage=loss.stage, detail=f"{loss.detail}, {run.losses} times: {again}")
        dataset = DatasetStore(spec)
        with suppress(MmAssetsError, OSError):  # the storage may be what failed
            dataset.write_failure(failure)
        _release(run.task, dataset)
        yield failed_report(failure)

    def _fall(self) -> None:
        """Halves the bound of what is at work."""
        if self._clock() >= self._may_fall:
            self._bound = max(min(self._bound, self._num_groups + 1) / 2, 1)
            self._may_fall = self._clock() + _ALL_DUE

    # -- what takes long

    def _pause(self) -> float | None:
        """Seconds to wait for ends: until something else is to be done."""
        found = [self._waiting[0][0] - self._clock()] if self._waiting else []
        if self._timeout is not None or (self._engine.spans_hosts and not self._todo):
            found.append(_WATCH)
        if self._todo:  # slots may come, and scratch space be freed
            found.append(_WATCH * 5)
        return max(min(found), 0.0) if found else None

    def _watch(self) -> Iterator[PartitionReport]:
        if self._clock() - self._watched < _WATCH:
            return
        self._watched = self._clock()
        if self._timeout is not None:
            for ended in self._engine.ended(0.0):  # while reports were recorded: it did not take too long
                yield from self._take(ended)
            yield from self._end_late(self._timeout)
        self._copy_stragglers()

    def _end_late(self, timeout: float) -> Iterator[PartitionReport]:
        now = self._clock()
        for task in list(self._at_work):
            began = self._engine.began(task)
            if began is not None and now - began > timeout:
                run = self._cancel(task)
                loss = Loss(kind="timeout", stage=task.first_stage, detail=f"it took longer than {timeout:.0f} seconds")
                yield from self._lost(run, loss)

    def _cancel(self, task: Task) -> _Run:
        run = self._remove(task)
        assert run is not None
        self._engine.cancel(task)
        return run

    def _copy_stragglers(self) -> None:
        if not self._engine.spans_hosts or self._todo or self._waiting or len(self._seconds) < _FEWEST:
            return
        late = self._clock() - STRAGGLES * statistics.median(self._seconds)
        for task, run in list(self._at_work.items()):
            if self._num_groups >= self._most():
                return
            began = self._engine.began(task) if len(run.copies) == 1 else None
            if began is None or max(began, run.copied) > late or not self._engine.fits(task):
                continue
            copy = replace(run.task)
            if self._engine.submit_copy(copy, task):
                self._add([copy], [run])
                run.copied = self._clock()  # a copy that fails at once is not followed by another


def _release(task: Task, dataset: DatasetStore) -> None:
    """Ends the lease that a worker left which was killed: while the load goes on, it would keep others out."""
    if task.holder is not None:
        task.holder.release(dataset, task.partition.key)
