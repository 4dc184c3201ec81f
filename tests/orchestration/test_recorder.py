"""The recorder over a list in place of Dagster's database, which refuses, is slow, or loses its answers on request."""

from __future__ import annotations

import gc
import logging
import shutil
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mm_assets.errors import MmAssetsError, SourceError
from mm_assets.orchestration import recorder as module
from mm_assets.orchestration.event_log import RunEvents
from mm_assets.orchestration.events import Checked, Event, EventSink, Line, Made, Planned
from mm_assets.orchestration.recorder import DATABASE, Recorder, RunRecording, unrecorded_message
from mm_assets.orchestration.runs import FailedRun
from mm_assets.pipeline.chain import CHAIN, MANIFEST, PUBLISHED, Stage
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.load.tasks import LoadEnd, load_partitions
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import Claims
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.manifests import ManifestReport
from mm_assets.pipeline.state.records import StageFailure
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.storage.retry import Retry

from ..pipeline.chain import declare
from ..pipeline.shards import CAPTIONS, make_shard

KEYS = ("a", "b", "c")
RETRY: Retry[BaseException] = Retry(pauses=(0.01, 0.01), jitter=0.0, may_pass=DATABASE.may_pass)
STAGES = {stage.name for stage in CHAIN if stage not in (MANIFEST, PUBLISHED)} - {"packed_mstr"}


@dataclass(kw_only=True)
class Database:
    """What is stored in all runs, and how the next calls end.

    Attributes:
        spec: as of an `EventSink`.
        is_available: whether it answers; a call waits for `answers`, if that is given.
        loses_answers: how many calls are stored and yet end with an error.
        rejects: what of it is refused for good, by the partition.
    """

    spec: DatasetSpec
    is_available: bool = True
    answers: threading.Event | None = None
    loses_answers: int = 0
    rejects: str = ""
    events: list[Event] = field(default_factory=list)
    runs: list[RunRecording | str] = field(default_factory=list)
    num_refused: int = 0

    def execute(self, body: Callable[[EventSink], RunRecording]) -> None:
        self._expect_available()
        try:
            self.runs.append(body(self))
        except KeyboardInterrupt:
            self.runs.append("canceled")
            raise

    def _expect_available(self) -> None:
        if not self.is_available:
            self.num_refused += 1
            raise ConnectionError("connection refused")

    def versions(self, stage: Stage, keys: Collection[str] | None) -> Mapping[str, str]:
        self._expect_available()
        made = [event for event in self.events if isinstance(event, Made) and event.asset_key.path[-1] == stage.name]
        versions = {event.partition: event.result.data_version for event in made}
        return {key: found.value for key, found in versions.items() if key and found and (not keys or key in keys)}

    def code_version(self, stage: Stage, key: str) -> str | None:
        made = [event for event in self.events if isinstance(event, Made) and event.partition == key]
        return next(event.code_version for event in reversed(made) if event.asset_key.path[-1] == stage.name)

    def failures(self) -> Mapping[str, FailedRun]:
        planned = [event for event in self.events if isinstance(event, Planned)]
        return {event.partition: FailedRun.of(event.tags, 0.0, "") for event in planned}

    def failed_checks(self, result: dg.AssetCheckResult) -> Mapping[str, str]:
        return {}

    def knows_manifest(self, digest: str) -> bool:
        made = [event for event in self.events if isinstance(event, Made) and not event.partition]
        return bool(made) and made[-1].result.data_version == dg.DataVersion(digest)

    def store(self, events: Sequence[Event]) -> None:
        self._expect_available()
        if self.answers is not None:
            self.answers.wait()
        if any(isinstance(event, Made) and event.partition == self.rejects for event in events):
            raise ValueError("a value that the database does not take")
        self.events += events
        if self.loses_answers:
            self.loses_answers -= 1
            raise ConnectionError("the connection was closed")

    @property
    def made(self) -> Counter[tuple[str, str]]:
        """How often each partition of each stage was stored."""
        made = (event for event in self.events if isinstance(event, Made) and event.partition)
        return Counter((event.partition or "", event.asset_key.path[-1]) for event in made)

    def expect_complete(self, keys: Collection[str] = KEYS) -> None:
        """Asserts that every stage of the partitions is stored once, and nothing else."""
        assert self.made == Counter({(key, stage): 1 for key in keys for stage in (*STAGES, PUBLISHED.name)})
        checked = Counter((e.partition, e.asset_key.path[-1]) for e in self.events if isinstance(e, Checked))
        assert {at for at in checked if at[0]} == {(key, stage) for key in keys for stage in STAGES}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for key in KEYS:
        make_shard(folder / f"{key}.tar", {f"{key}{name}": value for name, value in CAPTIONS.items()})
    return folder


@pytest.fixture
def dataset(shards: Path, tmp_path: Path) -> DatasetStore:
    """A registered dataset of three partitions."""
    dataset = DatasetStore(declare(tmp_path / "root", shards, formats=["mult"]))
    register(dataset)
    return dataset


@pytest.fixture(scope="module")
def published_root(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    dataset = DatasetStore(declare(root, shards, formats=["mult"]))
    register(dataset)
    run(dataset, lambda _: None)
    return root


@pytest.fixture
def published(published_root: Path, shards: Path, tmp_path: Path) -> DatasetStore:
    """The same after a load of which Dagster knows nothing."""
    shutil.copytree(published_root, tmp_path / "root")
    return DatasetStore(declare(tmp_path / "root", shards, formats=["mult"]))


def run(
    dataset: DatasetStore, ended: Callable[[PartitionReport], object], *, load: str = "load", **options: Any
) -> LoadEnd:
    state = DatasetState(dataset)
    with Processes(1) as engine, Claims(dataset, load) as claims:
        return load_partitions(state, state.pending, claims=claims, engine=engine, ended=ended, **options)


def recorder(dataset: DatasetStore, database: Database, **options: Any) -> Recorder:
    state = DatasetState(dataset)
    return Recorder(dataset, database.execute, state=state, load="load", retry=RETRY, **options)


def test_a_load_is_recorded(dataset: DatasetStore) -> None:
    """Every stage of each partition, its checks, and the manifest are stored once, in one run."""
    database = Database(spec=dataset.spec)
    with recorder(dataset, database, running=KEYS) as recording:
        run(dataset, recording.add, built=recording.add_manifest)
    database.expect_complete()
    assert [
        event.asset_key.path[-1] for event in database.events if isinstance(event, Made) and not event.partition
    ] == [MANIFEST.name]
    assert recording.unrecorded == {}
    assert len(database.runs) == 1


def test_a_load_does_not_wait_for_a_database_that_refuses(dataset: DatasetStore) -> None:
    """All partitions and the manifest are done while every attempt to record is refused; then each is stored once."""
    database = Database(spec=dataset.spec, is_available=False)
    lines: list[str] = []
    with recorder(dataset, database, running=KEYS, report=lines.append) as recording:
        end = run(dataset, recording.add, built=recording.add_manifest)
        assert end.manifest is not None
        assert not DatasetState(dataset).pending
        assert database.events == []
        database.is_available = True
    assert recording.unrecorded == {}
    database.expect_complete()
    assert database.num_refused
    assert len(lines) == 1
    assert "connection refused" in lines[0]


def test_a_load_does_not_wait_for_a_database_that_does_not_answer(dataset: DatasetStore) -> None:
    """All partitions are done while the first transaction has not returned."""
    database = Database(spec=dataset.spec, answers=threading.Event())
    with recorder(dataset, database, running=KEYS) as recording:
        run(dataset, recording.add)
        assert not DatasetState(dataset).pending
        assert database.events == []
        assert database.answers is not None
        database.answers.set()
    database.expect_complete()


def test_what_a_database_never_takes_is_reported_and_recorded_by_the_next_load(dataset: DatasetStore) -> None:
    """After the last attempt the partitions are listed with the reason, and a later load stores each once."""
    database = Database(spec=dataset.spec, is_available=False)
    with recorder(dataset, database, running=KEYS) as recording:
        run(dataset, recording.add)
    assert {*KEYS} <= recording.unrecorded.keys()
    message = unrecorded_message(dataset.spec, {key: recording.unrecorded[key] for key in KEYS})
    assert message.startswith("not recorded in Dagster: a, b, c (3 in all): ConnectionError: connection refused: ")
    assert "mm-assets sync --dataset data" in message
    database.is_available = True
    with recorder(dataset, database):
        pass
    database.expect_complete()


def test_runs_that_always_fail_are_few(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the attempts of the policy nothing more is begun, with one line; everything is published, and listed."""
    attempts, given_up, lines = list[int](), threading.Event(), list[str]()

    def execute(self: Database, _: object) -> None:
        attempts.append(1)
        raise RuntimeError("the run failed before its first step")

    def report(line: str) -> None:
        lines.append(line)
        given_up.set()

    monkeypatch.setattr(Database, "execute", execute)
    with recorder(dataset, Database(spec=dataset.spec), running=KEYS, report=report) as recording:
        assert given_up.wait(30)
        run(dataset, recording.add)
        assert not DatasetState(dataset).pending
    assert len(attempts) == 1 + len(RETRY.pauses)
    assert len(lines) == 1
    assert recording.unrecorded.keys() == {*KEYS}
    assert {*recording.unrecorded.values()} == {"RuntimeError: the run failed before its first step"}


@pytest.mark.parametrize("is_available", [True, False])
def test_a_load_that_needs_a_slot_says_what_it_waits_for(
    dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch, is_available: bool
) -> None:
    """The limit of a pool is in Dagster's database: if that refuses every attempt, the load ends with an error."""
    monkeypatch.setattr(module, "_MAX_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    database, lines, has_slot, execute = Database(spec=dataset.spec), list[str](), threading.Event(), Database.execute

    def wait_for_slot(self: Database, body: Callable[[EventSink], RunRecording]) -> None:
        assert has_slot.wait(30)
        execute(self, body)

    def report(line: str) -> None:
        lines.append(line)
        has_slot.set()

    monkeypatch.setattr(Database, "execute", wait_for_slot)
    database.is_available = is_available
    expected = pytest.raises(SourceError, match="has the limit of the pool 'disks'")
    with nullcontext() if is_available else expected, recorder(dataset, database, report=report) as recording:
        recording.wait_until_begun("disks")
    assert lines[0] == "waiting for Dagster to begin the run of the load, which needs a slot of the pool 'disks'"


def test_what_was_published_and_not_recorded_is_recorded_once(published: DatasetStore) -> None:
    """The records of a load that was killed are stored by the next one, and by no further one."""
    database = Database(spec=published.spec)
    for _ in range(2):
        with recorder(published, database) as recording:
            recording.add_manifest()
        database.expect_complete()
    assert len(database.runs) == 2


@pytest.mark.parametrize("has_reports", [True, False])
def test_an_answer_that_is_lost_stores_nothing_twice(
    dataset: DatasetStore, has_reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the database stored before its connection broke is not stored by the next attempt."""
    if not has_reports:
        monkeypatch.setattr(module, "_MAX_REPORTS", 0)
    database = Database(spec=dataset.spec, loses_answers=2)
    with recorder(dataset, database, running=KEYS) as recording:
        run(dataset, recording.add)
    database.expect_complete()
    assert recording.unrecorded == {}


def test_one_partition_that_is_refused_for_good_keeps_no_other(dataset: DatasetStore) -> None:
    """A value that the database does not take is reported with its partition, and the others are stored."""
    database = Database(spec=dataset.spec, rejects="b")
    with recorder(dataset, database, running=KEYS) as recording:
        run(dataset, recording.add)
    database.expect_complete("ac")
    assert recording.unrecorded == {"b": "ValueError: a value that the database does not take"}


def test_a_large_load_is_recorded_in_several_runs(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has events of a limited number of partitions, and the last one those of the manifest."""
    monkeypatch.setattr(module, "MAX_PARTITIONS_OF_RUN", 1)
    monkeypatch.setattr(module, "_MAX_BATCH", 1)
    database = Database(spec=dataset.spec)
    with recorder(dataset, database, running=KEYS) as recording:
        run(dataset, recording.add, built=recording.add_manifest)
    database.expect_complete()
    assert [run.num_partitions for run in database.runs if isinstance(run, RunRecording)] == [1, 1, 1]


def test_an_interrupted_load_cancels_its_run(dataset: DatasetStore) -> None:
    """The run is canceled at once, also while the database does not answer, and the next load records the rest."""
    database = Database(spec=dataset.spec)
    recording = recorder(dataset, database, running=KEYS)

    def stop(_: PartitionReport) -> None:
        raise KeyboardInterrupt

    def load() -> None:
        with recording:
            recording.wait_until_begun("disks")
            run(dataset, stop)

    with pytest.raises(KeyboardInterrupt):
        load()
    assert database.runs == ["canceled"]
    assert database.made == Counter()
    with recorder(dataset, database):
        pass
    database.expect_complete(sorted(DatasetState(dataset).partitions.keys() - DatasetState(dataset).pending))


def test_an_interruption_does_not_wait_for_dagster(dataset: DatasetStore) -> None:
    """A load that is interrupted while Dagster is imported ends at once, and begins no run afterwards."""
    database, imported = Database(spec=dataset.spec), threading.Event()
    recording = recorder(dataset, database, running=KEYS, prepare=imported.wait)
    with pytest.raises(KeyboardInterrupt), recording:
        raise KeyboardInterrupt
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "recorder"]
    imported.set()
    thread.join()
    assert database.runs == []


def broken(dataset: DatasetStore) -> Path:
    """Damages a shard, and registers it."""
    folder = Path(dataset.store.url_of("")).parent.parent / "in"
    shutil.copytree(str(dataset.spec.shards), folder)
    (folder / "b.tar").write_bytes(b"no tar" * 1000)
    return folder


@pytest.mark.parametrize("is_told", [True, False])
def test_a_partition_that_fails_is_planned_and_explained(dataset: DatasetStore, tmp_path: Path, is_told: bool) -> None:
    """Dagster gets what was to be made, with the number of the attempt, and why it failed, from a report or a file."""
    folder = broken(dataset)
    dataset = DatasetStore(declare(tmp_path / "other", folder, formats=["mult"]))
    register(dataset)
    database = Database(spec=dataset.spec)
    if not is_told:
        run(dataset, lambda _: None)
    for number in (1, 2) if is_told else (1,):
        with recorder(dataset, database, running=KEYS if is_told else (), attempts=not is_told) as recording:
            if is_told:
                run(dataset, recording.add)
        planned = [event for event in database.events if isinstance(event, Planned)]
        assert {event.asset_key.path[-1] for event in planned} == {*STAGES, PUBLISHED.name}
        assert {event.partition for event in planned} == {"b"}
        assert database.failures()["b"].number == number
        (last,) = [run for run in database.runs[-1:] if isinstance(run, RunRecording)]
        assert [*last.failed] == ["b"]
    assert any(isinstance(event, dg.AssetObservation) and event.partition == "b" for event in database.events)
    assert any(isinstance(event, Line) and event.text.startswith("b: raw_shards: ") for event in database.events)
    database.expect_complete("ac")


def test_a_partition_that_is_not_registered_has_a_warning(dataset: DatasetStore) -> None:
    """It did not run: the log of the run says why, and Dagster shows its former state, not a failure."""
    database = Database(spec=dataset.spec)
    state = DatasetState(dataset)
    with recorder(dataset, database) as recording, Claims(dataset, "load") as claims, Processes(1) as engine:
        load_partitions(state, ["missing"], claims=claims, engine=engine, ended=recording.add)
    assert [(line.level, line.text) for line in database.events if isinstance(line, Line)] == [
        (logging.WARNING, "missing: raw_shards: it is not registered any more")
    ]
    assert len(database.events) == 1
    assert recording.unrecorded == {}


def test_what_could_not_be_recorded_is_named(dataset: DatasetStore) -> None:
    """A partition without a file, since it did not run, is named too."""
    database = Database(spec=dataset.spec, is_available=False)
    failure = StageFailure(partition="missing", stage="raw_shards", detail="it is not registered any more")
    with recorder(dataset, database) as recording:
        recording.add(PartitionReport(partition="missing", failure=failure, is_refused=True))
    assert [*recording.unrecorded] == ["missing"]


def test_manifests_that_wait_for_the_database_take_no_memory(dataset: DatasetStore) -> None:
    """Of the manifests of a long load only the newest one is recorded, and only that one is held."""

    class Watched(ManifestReport):  # which has weak references
        pass

    database, reports = Database(spec=dataset.spec, is_available=False), list[weakref.ref[Watched]]()
    with recorder(dataset, database) as recording:
        for digest in "123":
            state = DatasetState(dataset)
            report = Watched(digest=digest, manifest={}, url="", state=state, left_out={}, missing_streams={})
            reports.append(weakref.ref(report))
            recording.add_manifest(report)
            del report
        gc.collect()
        assert [report() is None for report in reports] == [True, True, False]


def test_a_manifest_that_cannot_be_built_keeps_nothing_else(dataset: DatasetStore) -> None:
    """The load ends with the reason, which its run gets too, and its partitions are recorded."""
    database = Database(spec=dataset.spec)
    Path(dataset.store.path_of("manifest.json")).mkdir()
    recording = recorder(dataset, database, running=KEYS)

    def load() -> None:
        with recording:
            run(dataset, recording.add, built=recording.add_manifest)

    with pytest.raises(MmAssetsError, match=r"manifest\.json"):
        load()
    database.expect_complete()
    assert "manifest.json" in recording.error


def test_what_another_load_publishes_is_left_to_its_recorder(dataset: DatasetStore) -> None:
    """While another load has a claim, a recorder stores nothing that its own load did not do; afterwards it does."""
    database = Database(spec=dataset.spec)
    with Claims(dataset, "another") as other:
        run(dataset, lambda _: None, load="another")
        other.take(())
        with recorder(dataset, database):
            pass
        assert database.made == Counter()
    with recorder(dataset, database):
        pass
    database.expect_complete()


def test_two_loads_at_once_record_every_partition_once(dataset: DatasetStore) -> None:
    """Both loads end well, and of what either published there is one event."""
    database = Database(spec=dataset.spec)
    ended: list[PartitionReport] = []
    lines: list[str] = []
    first_runs, second_waits = threading.Event(), threading.Event()

    def load(name: str, ready: Callable[[], object], ended_one: Callable[[PartitionReport], object]) -> None:
        state = DatasetState(dataset)
        recording = Recorder(dataset, database.execute, state=state, load=name, running=state.pending, retry=RETRY)

        def end(report: PartitionReport) -> None:
            ended.append(report)
            recording.add(report)
            ended_one(report)

        def report(line: str) -> None:
            lines.append(line)
            ready()

        with Claims(dataset, name) as claims, recording, Processes(1) as engine:
            load_partitions(state, state.pending, claims=claims, engine=engine, ended=end, report=report)

    def hold(_: PartitionReport) -> None:
        first_runs.set()
        assert second_waits.wait(30)

    first = threading.Thread(target=load, args=("1", lambda: None, hold))
    second = threading.Thread(target=load, args=("2", second_waits.set, lambda _: None))
    first.start()
    assert first_runs.wait(30)
    second.start()
    first.join()
    second.join()
    assert Counter(report.partition for report in ended if report.ok) == {"a": 1, "b": 2, "c": 2}
    assert any("claimed by a load on" in line for line in lines)
    database.expect_complete()


def test_a_load_that_ends_between_two_questions_is_not_recorded_again(dataset: DatasetStore) -> None:
    """What another load records and ends right after a recorder has asked what is known has one event all the same."""
    database = Database(spec=dataset.spec)
    published: list[PartitionReport] = []
    run(dataset, published.append, load="another")
    others = [Claims(dataset, "another")]
    others[0].take(())
    versions = database.versions

    def end_another(stage: Stage, keys: Collection[str] | None) -> Mapping[str, str]:
        answer = versions(stage, keys)
        if others:
            claims = others.pop()
            with recorder(dataset, database, running=KEYS) as recording:
                for report in published:
                    recording.add(report)
            claims.release()
        return answer

    database.versions = end_another  # type: ignore[method-assign]  # between the question and its use
    with recorder(dataset, database):
        pass
    assert not others
    database.expect_complete()


def test_loads_that_do_not_see_each_other_record_every_partition_once(dataset: DatasetStore) -> None:
    """A load that makes what another one has published since its start leaves the events to that one."""
    database = Database(spec=dataset.spec)
    state, ended = DatasetState(dataset), list[PartitionReport]()
    with recorder(dataset, database, running=KEYS) as recording:
        run(dataset, recording.add)
    recording = Recorder(dataset, database.execute, state=state, load="late", running=KEYS, retry=RETRY)
    with Claims(dataset, "late") as claims, recording, Processes(1) as engine:

        def end(report: PartitionReport) -> None:
            ended.append(report)
            recording.add(report)

        load_partitions(state, state.pending, claims=claims, engine=engine, ended=end)
    assert [(report.ok, report.claimed_by) for report in ended] == [(True, "another load")] * 3
    database.expect_complete()


def test_what_a_killed_load_published_is_recorded_by_one_that_met_it(dataset: DatasetStore) -> None:
    """A load whose partitions another one published, which never recorded them, does that when it ends."""
    database = Database(spec=dataset.spec)
    state = DatasetState(dataset)
    run(dataset, lambda _: None, load="killed")
    recording = Recorder(dataset, database.execute, state=state, load="late", running=KEYS, retry=RETRY)
    with Claims(dataset, "late") as claims, recording, Processes(1) as engine:
        load_partitions(state, state.pending, claims=claims, engine=engine, ended=recording.add)
    database.expect_complete()


def test_rolled_up_checks_are_stored_together(dataset: DatasetStore) -> None:
    """With `checks: rollup` the partitions of a transaction have one result per asset, without a partition."""
    database = Database(spec=dataset.spec.replace(checks="rollup"))
    with recorder(dataset, database, running=KEYS) as recording:
        run(dataset, recording.add)
    checked = [event for event in database.events if isinstance(event, Checked)]
    assert {event.partition for event in checked} == {None}
    assert {event.asset_key.path[-1] for event in checked} == STAGES
    assert all(event.result.passed for event in checked)


@pytest.fixture(autouse=True)
def _short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINGER_SECONDS", 0.01)


def test_an_unknown_form_of_storage_is_reported_once(
    instance: dg.DagsterInstance, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Where private names of Dagster are missing, events are stored by its public call, with one warning."""
    monkeypatch.setitem(sys.modules, "dagster._core.storage.event_log.schema", None)
    events = RunEvents(instance, declare(tmp_path, shards), run_id="", job_name="", step_key=None)
    for key in "ab":
        result = dg.MaterializeResult(asset_key=["data", "published"], data_version=dg.DataVersion("1"))
        events.store([Made(result=result, partition=key)])
    assert instance.get_materialized_partitions(dg.AssetKey(["data", "published"])) == {"a", "b"}
    assert [record.levelname for record in caplog.records if record.name == RunEvents.__module__] == ["WARNING"]
