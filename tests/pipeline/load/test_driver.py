"""The load driver, over an engine whose tasks end as a script says, in a time that a test controls."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from mm_assets.errors import CredentialsError
from mm_assets.pipeline.load.driver import MIN_LIMIT_SECONDS, REPEATS, STRAGGLES, run_tasks
from mm_assets.pipeline.load.engine import Ended, EngineLostError, Loss, Running, Task
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Attempt, Earlier, Record, StageFailure
from mm_assets.pipeline.state.registration import register
from mm_assets.storage.retry import STORAGE

from ..chain import declare
from ..shards import make_shard

KEYS = "abcdefghij"


def record_like(key: str) -> Record:
    """A record without files."""
    return Record(
        dataset="data", partition=key, recipe="0" * 16, shards={}, stages={}, num_samples=0, decodable={}, losses={}
    )


def ok(key: str, seconds: float = 1.0) -> PartitionReport:
    return PartitionReport(
        partition=key, results={}, record=record_like(key), failure=None, seconds=seconds, peak_memory=0
    )


def failed(key: str, *, fault: str | None = None) -> PartitionReport:
    failure = StageFailure(partition=key, stage="rows", detail="it failed", storage_fault=fault)
    return PartitionReport(partition=key, failure=failure)


def lost(kind: str = "worker") -> Loss:
    return Loss(kind=kind, stage="rows", detail="the process was killed")


End = tuple[float, PartitionReport | Loss | None]  # after seconds; None ends well


@dataclass(kw_only=True)
class Script:
    """An engine with `slots`, whose tasks take a second and end well unless `ends` says otherwise, in order by key."""

    ends: dict[str, list[End]] = field(default_factory=dict)
    slots: int = 2
    spans_hosts: bool = False
    group_bytes: int = 0
    scratch: Callable[[Task], bool] = lambda _: True
    places: int | None = None  # of a cluster that has fewer than slots, so that groups wait; None has as many
    hosts: int = 2
    now: float = 0.0
    at_work: dict[Task, tuple[float, PartitionReport | Loss | None]] = field(default_factory=dict)
    begin: dict[Task, float] = field(default_factory=dict)
    free: list[float] = field(default_factory=list)  # when each place is
    submitted: list[list[str]] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tasks: list[Task] = field(default_factory=list)
    canceled: list[str] = field(default_factory=list)
    most: int = 0

    def submit(self, tasks: Sequence[Task]) -> None:
        self.submitted.append([task.partition.key for task in tasks])
        self.tasks += tasks
        began = self.now
        if self.places is not None:
            self.free = sorted(self.free or [0.0] * self.places)
            began = max(began, self.free.pop(0))
        for task in tasks:
            key = task.partition.key
            self.times[key].append(self.now)
            self.begin[task] = began
            script = self.ends.get(key)
            seconds, end = script.pop(0) if script else (1.0, None)
            began += seconds
            self.at_work[task] = (began, end)
        if self.places is not None:
            self.free.append(began)
        self.most = max(self.most, len(self.at_work))

    def submit_copy(self, task: Task, of: Task) -> bool:
        if self.hosts == 1:
            return False
        self.submit([task])
        return True

    def running(self, task: Task) -> Running | None:
        if task not in self.at_work or self.begin[task] > self.now:
            return None
        return Running(began=self.begin[task], stage="rows", worker="process 7")

    def fits(self, task: Task) -> bool:
        return self.scratch(task)

    def ended(self, timeout: float | None) -> Iterable[Ended]:
        if timeout == 0.0:
            return []
        first = min(when for when, _ in self.at_work.values())
        if timeout is not None and first > self.now + timeout:
            self.now += timeout
            return []
        self.now = first
        done = [task for task, (when, _) in self.at_work.items() if when == first]
        return [self._ended(task) for task in done]

    def _ended(self, task: Task) -> Ended:
        when, end = self.at_work.pop(task)
        if isinstance(end, Loss):
            return Ended(task=task, loss=end)
        return Ended(task=task, report=end or ok(task.partition.key, when - self.begin[task]))

    def cancel(self, task: Task) -> None:
        self.canceled.append(task.partition.key)
        self.at_work.pop(task, None)

    def close(self) -> None:
        self.at_work.clear()

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    folder = tmp_path_factory.mktemp("drive")
    for key in KEYS:
        make_shard(folder / f"{key}.tar", {f"{key}.txt": "words"})
    found = DatasetStore(declare(folder / "out", folder / "*.tar"))
    register(found)
    return found


Drive = Callable[..., dict[str, PartitionReport]]


@pytest.fixture
def drive(dataset: DatasetStore) -> Drive:
    partition, schema = dataset.partition("a"), dataset.schema()

    def run(engine: Script, keys: Iterable[str] = "ab", **options: Any) -> dict[str, PartitionReport]:
        tasks = [
            Task(spec=dataset.spec, schema=schema, partition=replace(partition, key=key), earlier=Earlier())
            for key in keys
        ]
        reports = list(run_tasks(engine, tasks, clock=lambda: engine.now, sleep=engine.sleep, **options))
        assert sorted(report.partition for report in reports) == sorted(keys), "each partition has one report"
        assert not engine.at_work
        return {report.partition: report for report in reports}

    return run


def test_slots_are_filled_and_not_exceeded(drive: Drive) -> None:
    """As many partitions are at work as the engine has slots, all the time."""
    engine = Script(slots=3)
    assert all(report.ok for report in drive(engine, KEYS[:9]).values())
    assert engine.most == 3
    assert engine.now == 3.0


def test_an_engine_without_a_slot_gets_one_task(drive: Drive) -> None:
    """A cluster that has no node yet sees one task that waits, and may start one for it."""
    engine = Script(slots=0)
    drive(engine, "abc")
    assert engine.submitted == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("kind", ["worker", "host", "memory", "timeout"])
def test_what_was_lost_is_repeated_at_once(drive: Drive, kind: str) -> None:
    """A partition that was lost three times runs a fourth time, before those that have not begun; each is reported."""
    engine, lines = Script(ends={"a": [(1.0, lost(kind))] * REPEATS}, slots=1), list[str]()
    assert drive(engine, "ab", warned=lines.append)["a"].ok
    assert len(lines) == REPEATS
    assert all(line.endswith("/a: stage rows: the process was killed; the partition runs again") for line in lines)
    assert engine.submitted == [["a"]] * (REPEATS + 1) + [["b"]]
    assert engine.times["a"] == [0.0, 1.0, 2.0, 3.0]


def test_after_too_little_memory_twice_as_much_is_asked_for(drive: Drive) -> None:
    """Each loss for want of memory doubles what the next task asks for; another loss does not."""
    ends = [(1.0, lost("memory")), (1.0, lost("worker")), (1.0, lost("memory"))]
    engine = Script(ends={"a": ends})
    assert drive(engine, "a")["a"].ok
    assert [task.memory_factor for task in engine.tasks] == [1, 2, 2, 4]


def test_what_is_lost_again_and_again_fails(drive: Drive, dataset: DatasetStore) -> None:
    """After three repeats the partition fails, with how it ended and what to do, and the failure is stored."""
    engine = Script(ends={"a": [(1.0, lost())] * (REPEATS + 1)})
    reports = drive(engine, "ab")
    assert reports["b"].ok
    failure = reports["a"].failure
    assert failure is not None
    assert failure.detail == (
        f"the process was killed, 4 times: `mm-assets run --dataset {dataset.spec.name} --partition a` runs the "
        "partition alone"
    )
    assert failure.stage == "rows"
    attempt = dataset.attempt("a")
    assert attempt is not None
    assert attempt.failure == failure


def test_a_failure_of_the_partition_is_not_repeated(drive: Drive) -> None:
    """A damaged shard or a violated check ends the partition: its next run would end the same way."""
    engine = Script(ends={"a": [(1.0, failed("a"))]})
    assert not drive(engine, "ab")["a"].ok
    assert engine.times["a"] == [0.0]


def test_a_failing_storage_is_waited_for(drive: Drive) -> None:
    """A partition that the storage failed is repeated after pauses that grow, and fails after the last."""
    ends = [(1.0, failed("a", fault="unavailable"))] * (len(STORAGE.pauses) + 1)
    engine = Script(ends={"a": ends[1:]})
    assert drive(engine, "ab")["a"].ok
    pauses = [after - before - 1.0 for before, after in zip(engine.times["a"], engine.times["a"][1:], strict=False)]
    for pause, least in zip(pauses, STORAGE.pauses, strict=True):
        assert least <= pause <= least * (1 + STORAGE.jitter)
    engine = Script(ends={"a": ends})
    assert not drive(engine, "a")["a"].ok


@pytest.mark.parametrize("end", [lost(), lost("memory"), failed("a", fault="unavailable")])
def test_a_repeat_uses_what_the_run_before_it_left(drive: Drive, end: PartitionReport | Loss) -> None:
    """The stages that it completed are in an attempt, which is newer than what the load listed when it began."""
    engine = Script(ends={"a": [(1.0, end)]})
    assert drive(engine, "a")["a"].ok
    assert [task.earlier for task in engine.tasks] == [Earlier(), None]


def test_refused_credentials_end_the_load_at_once(drive: Drive, dataset: DatasetStore) -> None:
    """What is at work ends, nothing is started or repeated, and one error says how many partitions were not run."""
    refused = failed("a", fault="credentials")
    engine = Script(ends={"a": [(1.0, refused)], "b": [(2.0, failed("b", fault="unavailable"))]})
    partition, schema = dataset.partition("a"), dataset.schema()
    tasks = [Task(spec=dataset.spec, schema=schema, partition=replace(partition, key=key)) for key in KEYS]
    reports = run_tasks(engine, tasks, clock=lambda: engine.now, sleep=engine.sleep)
    assert [next(reports).partition for _ in range(2)] == ["a", "b"]
    with pytest.raises(CredentialsError, match=r"it failed; 8 more partitions not run"):
        next(reports)
    assert (sorted(engine.times), engine.now) == (["a", "b"], 2.0)
    # The last one leaves nothing out, and is not repeated either.
    assert not drive(Script(ends={"a": [(1.0, refused)]}), "a")["a"].ok


def test_slow_down_lowers_what_is_at_work(drive: Drive) -> None:
    """After a "slow down" half as many partitions are at work, and more with each that ends well."""
    engine = Script(ends={"a": [(0.5, failed("a", fault="slow_down"))]}, slots=4)
    assert all(report.ok for report in drive(engine, KEYS).values())
    after = [sum(begun == when for times in engine.times.values() for begun in times) for when in (0.0, 0.5, 1.0)]
    assert after == [4, 0, 3]


def test_what_was_lowered_is_raised_again(drive: Drive, dataset: DatasetStore) -> None:
    """Each round of partitions that end well raises the bound by a tenth: a hundred slots are full after seven."""
    engine = Script(ends={"0": [(0.5, failed("0", fault="slow_down"))]}, slots=100)
    drive(engine, [str(number) for number in range(1500)])
    began = Counter(begun for times in engine.times.values() for begun in times)
    rounds = [number for begun, number in sorted(began.items()) if begun < 12]
    assert rounds[0] == 100
    assert rounds[1] < 65
    assert max(rounds[8:]) > 90


def test_memory_of_one_host_of_many_lowers_nothing(drive: Drive) -> None:
    """What one host lacks says nothing about the others: only the task asks for more."""
    engine = Script(ends={"a": [(0.5, lost("memory"))]}, slots=4, spans_hosts=True)
    drive(engine, KEYS)
    assert engine.times["a"] == [0.0, 0.5]
    assert engine.most == 4


def test_scratch_space_bounds_what_is_at_work(drive: Drive) -> None:
    """A partition for which there is no scratch space waits until another has ended; alone it is tried."""
    engine = Script(slots=4)
    engine.scratch = lambda task: task.partition.key != "c" or not engine.at_work
    assert all(report.ok for report in drive(engine, "abcd").values())
    assert engine.times == {"a": [0.0], "b": [0.0], "c": [1.0], "d": [1.0]}


def test_tiny_partitions_go_together(drive: Drive) -> None:
    """Tiny shards are submitted as groups that leave no slot without one; a repeated partition goes alone."""
    engine = Script(group_bytes=1 << 20, ends={"b": [(1.0, lost())]})
    drive(engine, KEYS)
    assert engine.submitted[0] == list("abcde")
    assert ["b"] in engine.submitted[1:]
    engine = Script(group_bytes=1)
    drive(engine, KEYS)
    assert engine.submitted == [[key] for key in KEYS]


def test_groups_fill_the_slots(drive: Drive) -> None:
    """A slot is a group's, however many partitions that has: no slot is without one while there is work."""
    engine = Script(group_bytes=1 << 20, slots=4)
    drive(engine, [str(number) for number in range(160)])
    assert [len(group) for group in engine.submitted[:4]] == [16] * 4
    assert engine.now < 160 / 4 + 4


def test_what_is_canceled_with_its_group_is_not_counted(drive: Drive) -> None:
    """A partition whose neighbor takes too long runs again, also when that happens more often than losses may."""
    late = [(1000.0, None)]
    ends: dict[str, list[End]] = {"a": [(1.0, lost("neighbor"))] * (REPEATS + 2), "b": list(late)}
    engine = Script(ends=ends)
    reports = drive(engine, "ab", timeout=10.0)
    assert reports["a"].ok
    assert reports["b"].ok
    assert len(engine.times["a"]) == REPEATS + 3


def test_a_straggler_gets_a_copy(drive: Drive, dataset: DatasetStore) -> None:
    """At the end, what takes three times the median runs twice where there are hosts; the first to end counts."""
    slow: list[End] = [(1000.0, None), (1.0, None)]
    engine = Script(ends={"a": list(slow)}, slots=2, spans_hosts=True)
    slower = StageFailure(partition="a", stage="rows", detail="of the slower copy")
    dataset.write_attempt(Attempt(partition="a", stages={}, failure=slower))
    assert all(report.ok for report in drive(engine, KEYS).values())
    assert engine.canceled == ["a"]
    assert len(engine.times["a"]) == 2
    assert engine.now < 20
    assert dataset.attempt("a") is None
    engine = Script(ends={"a": list(slow)}, slots=2)
    drive(engine, KEYS)
    assert (engine.canceled, engine.now) == ([], 1000.0)


def test_there_is_no_copy_where_there_is_one_host(drive: Drive) -> None:
    """On the host of the straggler a copy would be as slow."""
    engine = Script(ends={"a": [(100.0, None)]}, slots=2, spans_hosts=True, hosts=1)
    drive(engine, KEYS)
    assert engine.canceled == []
    assert len(engine.times["a"]) == 1


def test_what_waits_for_a_place_is_not_late(drive: Drive) -> None:
    """A cluster may have to grow: the time of a partition that Ray has queued has not begun."""
    engine = Script(slots=10, places=1, spans_hosts=True)
    assert all(report.ok for report in drive(engine, KEYS, timeout=3.0).values())
    assert engine.canceled == []
    assert engine.submitted == [[key] for key in KEYS]


@pytest.mark.parametrize("end", [lost("host"), failed("a")])
def test_a_copy_that_fails_leaves_the_other(drive: Drive, end: PartitionReport | Loss) -> None:
    """Of two copies that of a lost host, or one that the other's files were in the way of, does not count."""
    engine = Script(ends={"a": [(20.0, None), *[(1.0, end)] * 20]}, slots=2, spans_hosts=True)
    assert drive(engine, KEYS)["a"].ok
    pauses = [after - before for before, after in zip(engine.times["a"], engine.times["a"][1:], strict=False)]
    assert len(pauses) <= 20 / STRAGGLES
    assert min(pauses) >= STRAGGLES


def test_a_task_that_takes_too_long_is_ended(drive: Drive) -> None:
    """A task is canceled after the time that it may take, and repeated."""
    engine = Script(ends={"a": [(1000.0, None)]})
    assert drive(engine, "ab", timeout=10.0)["a"].ok
    assert engine.canceled == ["a"]
    assert engine.now < 15


HOUR = 3600.0


def test_a_worker_that_hangs_is_ended_without_a_setting(drive: Drive, dataset: DatasetStore) -> None:
    """By default a partition is killed after half an hour, and after twice as long each time; the fourth time it fails.

    The message names the process, the stage, the limit and the setting, and the others have long ended.
    """
    engine = Script(ends={"a": [(1000 * HOUR, None)] * (REPEATS + 1)})
    reports = drive(engine, KEYS)
    assert engine.canceled == ["a"] * (REPEATS + 1)
    starts = [*engine.times["a"], engine.now]
    limits = [after - before for before, after in pairwise(starts)]
    assert limits == pytest.approx([MIN_LIMIT_SECONDS * factor for factor in (1, 2, 4, 8)], abs=2.0)
    assert all(report.ok for key, report in reports.items() if key != "a")
    failure = reports["a"].failure
    assert failure is not None
    assert failure.stage == "rows"
    assert failure.detail == (
        "process 7 did not end the partition within 14,400 seconds and was killed (`engine.timeout_seconds` sets the "
        f"limit), 4 times: `mm-assets run --dataset {dataset.spec.name} --partition a` runs the partition alone"
    )


@pytest.mark.parametrize("seconds", [0.4 * HOUR, 0.9 * HOUR, 2.5 * HOUR])
def test_partitions_that_are_slow_all_end(drive: Drive, seconds: float) -> None:
    """Without a setting a load of partitions that all take longer than the first limit still publishes all of them."""
    engine = Script(ends={key: [(seconds, None)] * (REPEATS + 1) for key in KEYS})
    assert all(report.ok for report in drive(engine, KEYS).values())
    assert len(engine.canceled) <= REPEATS * engine.slots


def test_the_limit_follows_the_median_and_the_bytes(drive: Drive, dataset: DatasetStore) -> None:
    """One that takes long is not killed before twenty times the median, in proportion to its bytes if it is larger."""
    median, most = 0.2 * HOUR, 3.9 * HOUR

    def script(last: float) -> Script:
        return Script(ends={**{key: [(median, None)] for key in KEYS}, "j": [(last, None)]})

    engine = script(most)
    drive(engine, KEYS)
    assert engine.canceled == []
    engine = script(most + 0.2 * HOUR)
    drive(engine, KEYS)
    assert engine.canceled == ["j"]
    partition, schema, engine = dataset.partition("a"), dataset.schema(), script(3 * most)
    large = tuple(replace(partition.shards[0], url=f"part-{number}") for number in range(4))
    shards = {key: large if key == "j" else partition.shards for key in KEYS}
    tasks = [
        Task(spec=dataset.spec, schema=schema, partition=replace(partition, key=k, shards=shards[k])) for k in KEYS
    ]
    assert all(report.ok for report in run_tasks(engine, tasks, clock=lambda: engine.now, sleep=engine.sleep))
    assert engine.canceled == []


def test_what_takes_long_is_reported_at_growing_intervals(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    """After 5, 10 and 20 minutes a line says which partition runs where, at which stage, and when it will be killed."""
    lines: list[str] = []
    drive(Script(ends={"a": [(1500.0, None)]}), "ab", warned=lines.append)
    reported = [
        re.search(r"/a: no result after ([\d,]+) seconds: process 7 is at stage rows; ", line) for line in lines
    ]
    seconds = [int(found[1].replace(",", "")) for found in reported if found]
    assert seconds == pytest.approx([300, 600, 1200], abs=3)
    assert all("after 1,800 seconds it is killed" in line and "`engine.timeout_seconds`" in line for line in lines)
    assert caplog.messages == lines
    lines.clear()
    drive(Script(ends={key: [(250.0, None)] for key in KEYS} | {"j": [(500.0, None)]}), KEYS, warned=lines.append)
    assert lines == [], "three times the median is not long"


def test_an_engine_that_is_lost_ends_the_load(dataset: DatasetStore) -> None:
    """What ended before is reported, nothing fails, and the error of the engine ends the load."""

    class Lost(Script):
        def ended(self, timeout: float | None) -> Iterable[Ended]:
            if self.now >= 2.0:
                raise EngineLostError("head:6379", "it does not answer")
            return super().ended(timeout)

    engine, schema = Lost(), dataset.schema()
    tasks = [Task(spec=dataset.spec, schema=schema, partition=p) for p in dataset.partitions().values()]
    reports = run_tasks(engine, tasks, clock=lambda: engine.now, sleep=engine.sleep)
    assert [next(reports).partition for _ in range(4)] == list("abcd")
    with pytest.raises(EngineLostError):
        next(reports)
    assert not engine.at_work
    assert not any(dataset.attempt(key) for key in "efghij")


def test_the_times_of_a_group_are_its_tasks(drive: Drive) -> None:
    """The time of a task in a group begins when the one before it ends."""
    engine = Script(group_bytes=1 << 20, slots=1, ends={key: [(6.0, None)] for key in KEYS})
    drive(engine, KEYS, timeout=10.0)
    assert engine.canceled == []


def test_an_abandoned_load_ends_its_tasks(dataset: DatasetStore) -> None:
    """Closing the iterator cancels what is at work."""
    engine, schema = Script(), dataset.schema()
    tasks = [Task(spec=dataset.spec, schema=schema, partition=p) for p in dataset.partitions().values()]
    reports = run_tasks(engine, tasks, clock=lambda: engine.now, sleep=engine.sleep)
    next(reports)
    assert engine.at_work
    reports.close()
    assert engine.at_work == {}
