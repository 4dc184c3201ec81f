"""The load driver, over an engine whose tasks end as a script says, in a time that a test controls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from mm_assets.errors import CredentialsError
from mm_assets.pipeline.load.driver import REPEATS, STORAGE_PAUSES, STRAGGLES, run_tasks
from mm_assets.pipeline.load.engine import Ended, Loss, Task
from mm_assets.pipeline.partition.run import PartitionReport, failed_report
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.leases import Leases
from mm_assets.pipeline.state.records import StageFailure
from mm_assets.pipeline.state.registration import register

from ..chain import declare
from ..shards import make_shard

KEYS = "abcdefghij"


def ok(key: str, seconds: float = 1.0) -> PartitionReport:
    return PartitionReport(partition=key, results={}, marker={}, failure=None, seconds=seconds, peak_memory=0)


def failed(key: str, *, fault: str | None = None) -> PartitionReport:
    return failed_report(StageFailure(partition=key, stage="rows", detail="it failed", storage_fault=fault))


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

    def began(self, task: Task) -> float | None:
        return self.begin[task] if task in self.at_work and self.begin[task] <= self.now else None

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

    def run(engine: Script, keys: Iterable[str] = "ab", **options: object) -> dict[str, PartitionReport]:
        tasks = [Task(spec=dataset.spec, schema=schema, partition=replace(partition, key=key)) for key in keys]
        reports = list(run_tasks(engine, tasks, clock=lambda: engine.now, sleep=engine.sleep, **options))  # type: ignore[arg-type]
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
    """A partition that was lost three times runs a fourth time, before those that have not begun."""
    engine = Script(ends={"a": [(1.0, lost(kind))] * REPEATS}, slots=1)
    assert drive(engine, "ab")["a"].ok
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
    assert dataset.failure("a") == failure


def test_a_failure_of_the_partition_is_not_repeated(drive: Drive) -> None:
    """A damaged shard or a violated check ends the partition: its next run would end the same way."""
    engine = Script(ends={"a": [(1.0, failed("a"))]})
    assert not drive(engine, "ab")["a"].ok
    assert engine.times["a"] == [0.0]


def test_a_failing_storage_is_waited_for(drive: Drive) -> None:
    """A partition that the storage failed is repeated after pauses that grow, and fails after the last."""
    ends = [(1.0, failed("a", fault="unavailable"))] * (len(STORAGE_PAUSES) + 1)
    engine = Script(ends={"a": ends[1:]})
    assert drive(engine, "ab")["a"].ok
    pauses = [after - before - 1.0 for before, after in zip(engine.times["a"], engine.times["a"][1:], strict=False)]
    assert pauses == list(STORAGE_PAUSES)
    engine = Script(ends={"a": ends})
    assert not drive(engine, "a")["a"].ok


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
    dataset.write_failure(StageFailure(partition="a", stage="rows", detail="of the slower copy"))
    assert all(report.ok for report in drive(engine, KEYS).values())
    assert engine.canceled == ["a"]
    assert len(engine.times["a"]) == 2
    assert engine.now < 20
    assert dataset.failure("a") is None
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


def test_the_times_of_a_group_are_its_tasks(drive: Drive) -> None:
    """The time of a task in a group begins when the one before it ends."""
    engine = Script(group_bytes=1 << 20, slots=1, ends={key: [(6.0, None)] for key in KEYS})
    drive(engine, KEYS, timeout=10.0)
    assert engine.canceled == []


def refused(key: str, retry_after: float | None) -> PartitionReport:
    failure = StageFailure(partition=key, stage="raw_shards", detail="another run is working on it")
    return failed_report(failure, is_refused=True, retry_after=retry_after)


@pytest.mark.parametrize("frees", [True, False])
def test_a_lease_of_another_host_is_waited_for_once(drive: Drive, frees: bool) -> None:
    """The host may be lost: its partition runs once the lease has ended, and is refused if that was renewed."""
    engine = Script(ends={"a": [(0.0, refused("a", 30.0)), (1.0, None if frees else refused("a", 30.0))]})
    report = drive(engine, "ab")["a"]
    assert engine.times["a"] == [0.0, 30.0]
    assert report.ok == frees
    assert report.is_refused != frees


def test_a_lease_of_a_living_process_is_refused_at_once(drive: Drive) -> None:
    """A partition that another process is known to work on is not tried again."""
    engine = Script(ends={"c": [(0.0, refused("c", None))]})
    assert drive(engine, "bc")["c"].is_refused
    assert engine.times["c"] == [0.0]


def test_a_task_is_refused_while_its_lease_is_held(dataset: DatasetStore) -> None:
    """A worker works in the name of its load, beside others of the same load, and stores nothing of what it refuses.

    The lease ends before the report: who gets that may end the worker, or give the partition to another one.
    """
    with Leases(dataset, "mine") as mine, Leases(dataset, "other") as other:
        task = Task(spec=dataset.spec, schema=dataset.schema(), partition=dataset.partition("c"), holder=mine.holder)
        with other.held("c"):
            (report,) = task.steps()
            assert isinstance(report, PartitionReport)
            assert report.is_refused
            assert report.failure is not None
            assert "another run is working on partition 'c'" in report.failure.detail
            assert dataset.failure("c") is None
            assert not dataset.marker_names().get("c")
        with mine.holder.held(dataset, "c"):  # a copy of the task
            *stages, report = task.steps()
            assert isinstance(report, PartitionReport)
            assert report.ok
            assert stages == ["raw_shards", "rows", "materialized_rows", "filtered_rows", "packed_mult", "published"]
        for step in task.steps():
            assert (other.live("c") is None) == isinstance(step, PartitionReport)
        assert other.live("c") is None
        assert not dataset.store.sizes("leases")


def test_an_abandoned_load_ends_its_tasks(dataset: DatasetStore) -> None:
    """Closing the iterator cancels what is at work."""
    engine, schema = Script(), dataset.schema()
    tasks = [Task(spec=dataset.spec, schema=schema, partition=p) for p in dataset.partitions().values()]
    reports = run_tasks(engine, tasks, clock=lambda: engine.now, sleep=engine.sleep)
    next(reports)
    assert engine.at_work
    reports.close()
    assert engine.at_work == {}
