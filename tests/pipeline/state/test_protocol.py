"""The protocol of the dataset's folder: whatever writers, manifests and `clean` do at the same time, nothing is lost.

Each actor is the project's own code in a coroutine, over a storage in memory that lets one request of one actor pass at
a time, in an order that Hypothesis draws, while hours or days go by in between. What no storage can prevent is
modeled, and not required: a writer that sleeps for a day between its last look at its files and its record may publish
files that are being deleted, until it wakes up and withdraws the record.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest
from greenlet import getcurrent, greenlet
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.dataset.manifest import file_path, manifest_partitions
from mm_assets.errors import ChangedError, SourceError
from mm_assets.pipeline.chain import PACKED_FOLDER, RAW_SHARDS, TABLES, Stage, recorded_stages
from mm_assets.pipeline.load.engine import Task
from mm_assets.pipeline.load.tasks import ClaimedWork
from mm_assets.pipeline.partition import inputs
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.partition.publish import publish as publish_partition
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import clean as clean_module
from mm_assets.pipeline.state import folder as folder_module
from mm_assets.pipeline.state import manifests, registration, staleness
from mm_assets.pipeline.state.claims import Claim, Claims
from mm_assets.pipeline.state.clean import clean
from mm_assets.pipeline.state.folder import MIN_AGE_SECONDS, DatasetStore
from mm_assets.pipeline.state.records import Attempt, Partition, Record, StageRecord
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.schema import DatasetSchema
from mm_assets.storage.listing import ShardFile
from mm_assets.storage.store import ListedFile, PublishedFile, Snapshot

from ..chain import declare, run_once
from ..shards import CAPTIONS, make_shard

HOUR = 3600.0
KEYS = ("a", "b")
Content: TypeAlias = tuple[bytes, float, int]  # bytes, time, version


class Halted(BaseException):
    """Ends an actor that is killed."""


class Actor(greenlet):
    """Work that stops before each of its requests to the storage, until it gets another turn."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work
        self._is_killed = False
        self.has_succeeded = False
        self.error: BaseException | None = None
        self.checked: float | None = None  # time when it last looked at the clock

    @property
    def has_ended(self) -> bool:
        return self.dead

    def step(self) -> None:
        """Lets it go on until its next request."""
        if not self.dead:
            self.switch()

    def kill(self) -> None:
        """Ends it before its next request."""
        self._is_killed = True
        self.step()

    def pause(self) -> None:
        """Waits for the next turn."""
        if not self._is_killed:  # else it makes no request on its way out
            assert self.parent is not None
            self.parent.switch()
        if self._is_killed:
            raise Halted

    def run(self) -> None:
        """Does the work."""
        try:
            if not self._is_killed:
                self._work()
                self.has_succeeded = True
        except (Halted, SourceError):  # of a file that was deleted by hand, the run says so
            pass
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error


class InTurn:
    """A pool of threads without threads: what they would ask the storage is asked in the turns of the actor."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    map = staticmethod(map)


@contextmanager
def without_threads() -> Iterator[pytest.MonkeyPatch]:
    """In the block all actors are coroutines of this thread."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (folder_module, manifests, staleness, clean_module):
            patch.setattr(module, "ThreadPoolExecutor", InTurn)
        for cached in (one for one in vars(DatasetState).values() if isinstance(one, cached_property)):
            patch.setattr(cached, "lock", nullcontext(), raising=False)  # Python 3.11 has one of all instances
        yield patch


class MemoryStore:
    """The interface of `Store` that the folder uses, over a dictionary, with a clock that the test controls."""

    is_local = False
    url = "memory://data"

    def __init__(self) -> None:
        self.files: dict[str, Content] = {}
        self.elapsed = 1000 * HOUR
        self.clock_offset = 0.0  # of the storage's clock, which may be set
        self.at_risk: set[str] = set()  # files that were named so late that they may be deleted
        self.deleted_by_hand: set[str] = set()
        self._versions = 0
        self._is_in_step = False

    @property
    def now(self) -> float:
        """The storage's clock."""
        return self.elapsed + self.clock_offset

    @property
    def durable(self) -> MemoryStore:
        return self

    def _request(self) -> None:
        actor = getcurrent()
        if self._is_in_step:
            self._is_in_step = False
        elif isinstance(actor, Actor):
            actor.pause()

    def begin_step(self) -> None:
        """Ends a turn; with the next request what follows is one turn."""
        self._request()
        self._is_in_step = True

    def end_step(self) -> None:
        """Ends what `begin_step` began without a request."""
        self._is_in_step = False

    def _put(self, name: str, content: bytes) -> None:
        self._versions += 1
        self.files[name] = content, self.now, self._versions
        self.deleted_by_hand.discard(name)

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def sync(self, names: Iterable[str]) -> None:
        pass

    def listing(self, folder: str, *, prefix: str = "") -> dict[str, ListedFile]:
        self._request()
        start = f"{folder}/{prefix}" if folder else prefix
        return {
            name: ListedFile(len(content), str(version), modified=when)
            for name, (content, when, version) in sorted(self.files.items())
            if name.startswith(start) and "/" not in name[len(folder) + bool(folder) :]
        }

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: file.size for name, file in self.listing(folder).items()}

    def pages(self, folder: str) -> Iterator[dict[str, ListedFile]]:
        if page := self.listing(folder):
            yield page

    def leftovers(self, folder: str) -> dict[str, ListedFile]:
        return {}

    def abort_uploads(self, seconds: float) -> None:
        pass

    def found_bytes(self, name: str) -> bytes | None:
        self._request()
        return self.files[name][0] if name in self.files else None

    def read_bytes(self, name: str) -> bytes:
        content = self.found_bytes(name)
        assert content is not None
        return content

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        self._request()
        return len(self.files[name][0]) if name in self.files else None

    def modified(self, name: str) -> float | None:
        self._request()
        return self.files[name][1] if name in self.files else None

    def write_bytes(self, name: str, content: bytes, *, durable: bool = True) -> None:
        self._request()
        self._put(name, content)

    def create(self, name: str, content: bytes) -> bool:
        self._request()
        if name in self.files:
            return False
        self._put(name, content)
        return True

    def snapshot(self, name: str, listed: ListedFile | None = None) -> Snapshot:
        return Snapshot(name=name, content=self.found_bytes(name))

    def replace(self, before: Snapshot, content: bytes) -> None:
        self._request()
        if (self.files[before.name][0] if before.name in self.files else None) != before.content:
            raise ChangedError(before.name, "changed")
        if (
            before.name == "manifest.json"
            and isinstance(actor := getcurrent(), Actor)
            and actor.checked is not None
            and self.elapsed - actor.checked > HOUR
        ):
            self.at_risk.update(listed_files(content))  # until its process wakes up and makes another one
        self._put(before.name, content)

    def check_time(self) -> float:
        """Returns the time, and notes that the running actor knows it."""
        if isinstance(actor := getcurrent(), Actor):
            actor.checked = self.elapsed
        return self.elapsed

    def refresh(self, names: Iterable[str]) -> None:
        for name in names:
            self._request()
            if name not in self.files:
                raise ChangedError(name, "deleted")
            self._put(name, self.files[name][0])

    def delete(self, name: str) -> None:
        self._request()
        self.files.pop(name, None)

    def delete_all(self, names: Iterable[str]) -> None:
        # With the listing of the page before it, it is one step: the gap is one request.
        for name in names:
            self.files.pop(name, None)


SPECS = {
    mode: DatasetSpec.from_config(
        {
            "name": "data",
            "shards": "in",
            "root": "/nowhere",
            "pack": "generic",
            "settle_seconds": 0,
            "keep_manifests": 1,
            "formats": ["mult"],
            "on_empty_sample": mode,
        },
        where="test",
    )
    for mode in ("drop", "keep")
}
SCHEMA = DatasetSchema(pack={"preset": "generic", "modalities": [{"name": "text", "field": "TextField"}]})
COUNTS = {"samples": 1, "judged": 0, "undecodable": 0, "shard_bytes": 1}


def folder(store: MemoryStore, mode: str) -> DatasetStore:
    """The dataset's folder, as a process with these settings sees it."""
    return DatasetStore(SPECS[mode]).over(store)  # type: ignore[arg-type]


def partition(key: str) -> Partition:
    """A registered partition of one shard."""
    return Partition(key=key, shards=(ShardFile(url=f"/in/{key}.tar", size=1, fingerprint="1", modified=None),))


def make_stage(work: PartitionWork, stage: Stage, build: str) -> None:
    """Writes the files of a stage: they differ by the settings that determine them, and by the build of a library."""
    digest = stage.digest(work.spec, work.schema)
    files = {}
    for kind in stage.files:
        content = f"{kind} {work.key} {digest} {build if stage.packed_format else ''}".encode()
        sha256 = hashlib.sha256(content).hexdigest()
        files[kind] = PublishedFile(path=file_path(kind, work.key, sha256), size=len(content), sha256=sha256)
        work.dataset.store.write_bytes(files[kind].path, content)
    tables = {above.tables[0].name: work.record(above).files[above.tables[0].name].sha256 for above in stage.upstream}
    record = StageRecord(
        stage=stage.name,
        partition=work.key,
        made_with=stage.made_with(work.spec, work.schema),
        inputs=work.partition.fingerprints if stage is RAW_SHARDS else tables,
        files=files,
        counts=COUNTS,
    )
    work.add_record(stage, record)


def publish(store: MemoryStore, mode: str, key: str, *, reuses: bool, build: str = "") -> None:
    """A run of a partition, if it is registered: the project's own, but for the contents of the files."""
    dataset = folder(store, mode)
    registered = dataset.registered()
    if key not in registered.partitions:
        return
    with PartitionWork(dataset, registered.partitions[key], dataset.schema(registered)) as work:
        if not reuses:
            work.restart(RAW_SHARDS)
        elif work.stages and not work.earlier.has_attempt:
            work.write_attempt()
        for stage in recorded_stages(work.spec):
            if stage not in work.stages:
                make_stage(work, stage, build)
        files = {file.path for record in work.stages.values() for file in record.files.values()}
        create, named = dataset.create_record, {"at": store.elapsed}
        keep_files = work.keep_files

        def keep() -> None:
            named["at"] = store.elapsed
            keep_files()

        def create_record(record: Record) -> bool:
            store.begin_step()
            if store.elapsed - named["at"] > MAX_UNNAMED_SECONDS:
                store.at_risk.update(files)
            return create(record)

        vars(dataset)["create_record"], vars(work)["keep_files"] = create_record, keep
        try:
            publish_partition(work)
        except SourceError:  # it has withdrawn its record
            store.at_risk.difference_update(files)
            raise
        store.at_risk.difference_update(files)


@lru_cache(1000)
def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@lru_cache(1000)
def listed_files(content: bytes) -> Mapping[str, str]:
    """Digest by path of the files that a manifest names."""
    found = {}
    for key, entry in manifest_partitions(json.loads(content), name="manifest").items():
        for kind, (_, sha256) in (*entry.packed.items(), *entry.tables.items()):
            found[file_path(kind, key, sha256)] = sha256
    return found


def expect_readable(store: MemoryStore, newest: dict[bytes, float]) -> None:
    """Every manifest that is the newest, or was within the minimum age, names complete files with their digests.

    `newest` is when each was the newest the last time.
    """
    if (current := store.files.get("manifest.json")) is not None:
        newest[current[0]] = store.elapsed
    for content, until in newest.items():
        if store.elapsed - until < MIN_AGE_SECONDS - 2 * MAX_CLOCK_OFFSET:
            expect_complete(store, content, except_for=store.at_risk | store.deleted_by_hand)


def expect_complete(store: MemoryStore, manifest: bytes, *, except_for: set[str]) -> None:
    """The files that a manifest names are there, with their digests."""
    for path, sha256 in listed_files(manifest).items():
        if path not in except_for:
            assert path in store.files, f"{path} is missing"
            assert digest(store.files[path][0]).startswith(sha256[:16])


MAX_UNNAMED_SECONDS = 12 * HOUR
MAX_CLOCK_OFFSET = 2 * HOUR
MOST_ACTORS = 4
STEPS = 60  # of an example: each starts, kills or resumes an actor, or lets time go by


def set_registered(store: MemoryStore, keys: Iterable[str]) -> None:
    """Registers these partitions alone."""
    dataset = folder(store, "drop")
    dataset.write_partitions(map(partition, keys), dataset.registered())


def works(store: MemoryStore, choose: random.Random) -> Callable[[], object]:
    """What an actor does, as a process with one of the two settings."""
    mode, key, reuses = choose.choice(sorted(SPECS)), choose.choice("aaab"), choose.random() < 0.5
    build = choose.choice(("", "", "other"))
    write = partial(publish, store, mode, key, reuses=reuses, build=build)
    list_published = partial(manifests.build_manifest, folder(store, mode), counts_duplicates=False)

    def load() -> None:
        write()
        list_published()
        clean(folder(store, mode))

    register = partial(set_registered, store, choose.choice((KEYS, KEYS, KEYS[:1])))
    return choose.choice((load, load, load, write, list_published, lambda: clean(folder(store, mode)), register))


def delete_by_hand(store: MemoryStore, choose: random.Random) -> None:
    """Deletes a packed file, as users do."""
    if packed := sorted(name for name in store.files if name.startswith(f"{PACKED_FOLDER}/")):
        name = choose.choice(packed)
        del store.files[name]
        store.deleted_by_hand.add(name)


def expect_recovery(store: MemoryStore, mode: str) -> None:
    """A load after all this publishes every registered partition, and after some days `clean` has left no orphan."""
    dataset = folder(store, mode)
    for _ in range(2):  # the first manifest may find that files are missing
        for key in DatasetState(dataset).pending:
            publish(store, mode, key, reuses=True)
        report = manifests.build_manifest(dataset, counts_duplicates=False)
        keys = set(dataset.partitions())
        assert keys <= report.state.listed.keys() | report.left_out.keys()
    assert report.state.listed.keys() == keys
    newest = store.files["manifest.json"][0]
    expect_complete(store, newest, except_for={name for name in store.at_risk if not name.startswith(PACKED_FOLDER)})
    for _ in range(4):
        store.elapsed += 25 * HOUR
        clean(dataset)
        expect_complete(store, newest, except_for=store.at_risk)
    named = set(listed_files(newest))
    for name, (content, _, _) in store.files.items():
        if name.startswith(("records/", "attempts/")):
            read = Record.from_bytes if name.startswith("records/") else Attempt.from_bytes
            stages = read(content, where=name).stages
            named |= {file.path for record in stages.values() for file in record.files.values()}
    assert {name for name in store.files if name.startswith(FOLDERS)} <= named


FOLDERS = tuple(f"{name}/" for name in (*TABLES, PACKED_FOLDER))


@pytest.mark.nightly_examples(20_000)
@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_manifest_names_only_complete_files(choose: random.Random) -> None:
    """In any order of requests of writers, manifests and cleaners, and wherever they are killed, nothing is lost."""
    store = MemoryStore()
    dataset = folder(store, "drop")
    dataset.write_schema(SCHEMA, dataset.registered(), decided_by="test")
    set_registered(store, KEYS)
    clean(dataset)  # its note is old enough from the next day on
    actors: list[Actor] = []
    newest: dict[bytes, float] = {}
    is_calm = (
        choose.random() < 0.5
    )  # no files are deleted by hand, and no clocks set: all that is published has to be there
    with without_threads() as patch:
        patch.setattr(manifests, "seconds_passed", store.check_time)
        patch.setattr(inputs, "seconds_passed", lambda: store.elapsed)
        patch.setattr(clean_module, "seconds_passed", lambda: store.elapsed)
        try:
            for _ in range(STEPS):
                running = [actor for actor in actors if not actor.has_ended]
                draw = choose.random()
                if not running or (draw < 0.25 and len(running) < MOST_ACTORS):
                    actors.append(Actor(works(store, choose)))
                elif draw < 0.35:
                    store.elapsed += choose.choice((1.0, 13.0, 25.0, 25.0)) * HOUR
                elif draw < 0.38:
                    choose.choice(running).kill()
                elif draw < 0.39:
                    store.files.pop("clean.json", None)
                elif draw < 0.42 and not is_calm:
                    delete_by_hand(store, choose)
                elif draw < 0.45 and not is_calm:
                    store.clock_offset = choose.uniform(-1, 1) * MAX_CLOCK_OFFSET
                else:
                    one = choose.choice(running)
                    for _ in range(choose.choice((1, 3, 10, 30, 1000))):
                        one.step()
                        if one.has_ended:
                            break
                        expect_readable(store, newest)
                expect_readable(store, newest)
        finally:
            for actor in actors:
                if not actor.has_ended:
                    actor.kill()
        for actor in actors:
            if actor.error is not None:
                raise actor.error
        set_registered(store, KEYS)
        expect_recovery(store, choose.choice(sorted(SPECS)))


@pytest.mark.nightly_examples(20_000)
@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_registrations_at_once_lose_nothing(choose: random.Random) -> None:
    """Whatever the order of their requests, what was there all the time is registered, and one schema is decided.

    One that has nothing to store promises nothing: an older listing may be stored after it.
    """
    store, there = MemoryStore(), {"a"}
    actors: dict[Actor, set[str]] = {}  # with the shards that have been there since each began
    decided: set[bytes] = set()
    have_stored: set[Actor] = set()

    def list_shards(*_: object) -> registration.Grouped:
        store.begin_step()
        store.end_step()
        return registration.Grouped([partition(key) for key in sorted(there)], ())

    def decide(*_: object) -> SimpleNamespace:
        return SimpleNamespace(schema=SCHEMA, evidence=dict, decided_by=f"{choose.random()}")

    with without_threads() as patch:
        patch.setattr(registration, "list_shards", list_shards)
        patch.setattr(registration, "decide_layout", decide)
        for _ in range(STEPS):
            draw, running = choose.random(), [actor for actor in actors if not actor.has_ended]
            if not running or (draw < 0.2 and len(running) < MOST_ACTORS):
                dataset = folder(store, "drop")
                actors[Actor(lambda dataset=dataset: registration.register(dataset))] = set(there)
            elif draw < 0.45:
                there ^= {choose.choice("bcd")}
                for since in actors.values():
                    since &= there
            else:
                actor = choose.choice(running)
                for _ in range(choose.choice((1, 2, 5))):
                    before = store.files.get("shards.json")
                    actor.step()
                    if store.files.get("shards.json") != before:
                        have_stored.add(actor)
                    if "schema.json" in store.files:
                        decided.add(store.files["schema.json"][0])
                registered = folder(store, "drop").partitions().keys()
                for one, since in actors.items():
                    if one.has_succeeded and one in have_stored:
                        assert since <= registered
        for actor in actors:
            if not actor.has_ended:
                actor.kill()
    assert len(decided) <= 1
    assert [actor.error for actor in actors if actor.error is not None] == []


@pytest.mark.nightly_examples(20_000)
@given(st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_loads_at_once_publish_everything(choose: random.Random) -> None:
    """Loads that are stopped for hours, so that their claims expire, or killed, hold up no other load for ever."""
    store, keys = MemoryStore(), ["a", "b"]
    dataset = folder(store, "drop")
    dataset.write_schema(SCHEMA, dataset.registered(), decided_by="test")
    dataset.write_partitions(map(partition, keys), dataset.registered())
    published: dict[str, set[str]] = {}  # by load
    waited: list[str] = []

    def load(number: int, asked: list[str]) -> None:
        dataset, name = folder(store, "drop"), f"load-{number}"

        def run(tasks: list[Task]) -> Iterator[PartitionReport]:
            for task in tasks:
                publish(store, "drop", task.partition.key, reuses=True)
                record = dataset.record(task.partition.key, DatasetState(dataset).recipes[task.partition.key])
                assert record is not None
                yield PartitionReport(partition=record.partition, record=record)

        def sleep(seconds: float) -> None:
            waited.append(name)
            store.elapsed += seconds
            store.begin_step()
            store.end_step()

        with Claims(dataset, name, clock=lambda: store.elapsed) as claims:
            work = ClaimedWork(DatasetState(dataset), asked, claims, sleep=sleep)
            reports = list(work.run(run))
        assert all(report.ok for report in reports)
        published[name] = {report.partition for report in reports}

    loads = {f"load-{number}": choose.choice((["a"], ["b"], keys)) for number in range(4)}
    with without_threads() as patch:
        patch.setattr(Claims, "_renew_all", lambda _: None)  # a load that makes no request does not renew either
        actors = {name: Actor(partial(load, number, loads[name])) for number, name in enumerate(loads)}
        for _ in range(STEPS):
            running = [actor for actor in actors.values() if not actor.has_ended]
            draw = choose.random()
            if draw < 0.1:
                store.elapsed += choose.choice((10.0, 44.0, 46.0, HOUR))
            elif draw < 0.13 and running:
                choose.choice(running).kill()
            elif running:
                one = choose.choice(running)
                for _ in range(choose.choice((1, 2, 5, 20))):
                    one.step()
        for _ in range(1000):
            for actor in actors.values():
                actor.step()
        stuck = [name for name, actor in actors.items() if not actor.has_ended]
        for name in stuck:
            actors[name].kill()
    assert stuck == []
    assert [actor.error for actor in actors.values() if actor.error is not None] == []
    assert all(published[name] == set(loads[name]) for name, actor in actors.items() if actor.has_succeeded)


def test_a_partition_that_another_load_publishes_is_not_run_again() -> None:
    """A load that publishes a partition, and ends its claim while another one waits for it, has done the work."""
    store = MemoryStore()
    dataset = folder(store, "drop")
    dataset.write_schema(SCHEMA, dataset.registered(), decided_by="test")
    set_registered(store, ["a"])
    other, claims = (Claims(folder(store, "drop"), name, clock=lambda: store.elapsed) for name in ("other", "mine"))
    other.take(["a"])
    seen = claims.others

    def publishes_meanwhile() -> list[Claim]:
        if store.elapsed > 1000 * HOUR:  # the load waits
            publish(store, "drop", "a", reuses=True)
            other.release()
        return seen()

    def sleep(seconds: float) -> None:
        store.elapsed += seconds

    vars(claims)["others"] = publishes_meanwhile
    run: list[Task] = []
    with claims:
        work = ClaimedWork(DatasetState(dataset), ["a"], claims, sleep=sleep)
        (report,) = work.run(lambda tasks: (run.extend(tasks), iter(()))[1])
    assert report.ok
    assert run == []


def test_a_load_takes_over_what_a_lost_load_has_completed() -> None:
    """A partition whose load is lost is resumed at the stage that this load had reached."""
    store = MemoryStore()
    dataset = folder(store, "drop")
    dataset.write_schema(SCHEMA, dataset.registered(), decided_by="test")
    set_registered(store, ["a"])
    claim = Claim(load="other", process="elsewhere/pid:[1] boot 17 99", keys=None)
    store.write_bytes("claims/other.json", claim.to_bytes(1))
    state = DatasetState(dataset)
    assert not state.earlier("a").has_attempt
    stages: list[Stage] = []

    def run(tasks: list[Task]) -> Iterator[PartitionReport]:
        for task in tasks:
            with PartitionWork(dataset, task.partition, task.schema, earlier=task.earlier) as work:
                stages.extend(work.stages)
            yield PartitionReport(partition="a", claimed_by="test")

    def sleep(seconds: float) -> None:
        if not store.listing("attempts"):
            with PartitionWork(dataset, partition("a"), dataset.schema()) as work:
                make_stage(work, RAW_SHARDS, "")
        store.elapsed += seconds

    with Claims(dataset, "mine", clock=lambda: store.elapsed) as claims:
        assert len(list(ClaimedWork(state, ["a"], claims, sleep=sleep).run(run))) == 1
    assert stages == [RAW_SHARDS]


def test_a_manifest_that_is_about_to_be_published_stays() -> None:
    """A copy that is newer than the newest manifest stays for a day: its process has not swapped the pointer yet."""
    store = MemoryStore()
    dataset = folder(store, "drop")
    dataset.write_schema(SCHEMA, dataset.registered(), decided_by="test")
    set_registered(store, ["a"])
    publish(store, "drop", "a", reuses=True)
    manifests.build_manifest(dataset, counts_duplicates=False)
    store.elapsed += HOUR
    store.write_bytes(next_one := f"manifests/{'0' * 64}.json", store.files["manifest.json"][0] + b" ")
    clean(dataset)
    assert next_one in store.files
    store.elapsed += 25 * HOUR
    clean(dataset)
    assert next_one not in store.files


def test_a_manifest_of_a_suspended_process_has_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that sleeps for a day right before it swaps the pointer, while `clean` runs, stores the copy again."""
    store = MemoryStore()
    dataset = folder(store, "drop")
    dataset.write_schema(SCHEMA, dataset.registered(), decided_by="test")
    set_registered(store, ["a"])
    publish(store, "drop", "a", reuses=True)
    swap = store.replace

    def suspended(before: Snapshot, content: bytes) -> None:
        if before.name == "manifest.json" and before.content is None:
            store.elapsed += 25 * HOUR
            for name in store.listing("manifests"):
                store.delete(name)
        swap(before, content)

    monkeypatch.setattr(store, "replace", suspended)
    monkeypatch.setattr(manifests, "seconds_passed", store.check_time)
    report = manifests.build_manifest(dataset, counts_duplicates=False)
    assert f"manifests/{report.digest}.json" in store.files


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"[" * 100_000,
        b'{"losses": [{"at": NaN, "keys": ["a"]}]}',
        b'{"losses": [{"at": 1, "keys": "a"}]}',
        b'{"losses": [{"at": 1, "keys": [1]}]}',
    ],
)
def test_a_damaged_note_protects_all_files(note: bytes) -> None:
    """If it is unknown what was deleted when, the day starts again for all partitions."""
    store = MemoryStore()
    dataset = folder(store, "drop")
    dataset.write_schema(SCHEMA, dataset.registered(), decided_by="test")
    set_registered(store, ["a"])
    store.write_bytes(orphan := f"rows/a.{'0' * 16}.parquet", b"orphan")
    store.elapsed += 25 * HOUR
    store.write_bytes("clean.json", note)
    clean(dataset)
    assert orphan in store.files
    store.elapsed += 25 * HOUR
    clean(dataset)
    assert orphan not in store.files


def test_a_writer_that_was_suspended_withdraws_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that sleeps for a day right before it creates a record, whose files `clean` deletes, publishes nothing."""
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    spec = declare(tmp_path / "root", tmp_path / "in")
    dataset = DatasetStore(spec)
    registration.register(dataset)
    create, now = DatasetStore.create_record, time.monotonic()

    def suspended(self: DatasetStore, record: Record) -> bool:
        monkeypatch.setattr(inputs, "seconds_passed", lambda: now + 25 * HOUR)
        self.store.delete(record.packed["mult"].path)
        return create(self, record)

    monkeypatch.setattr(inputs, "seconds_passed", lambda: now)
    monkeypatch.setattr(DatasetStore, "create_record", suspended)
    report = run_once(spec, dataset.partition("a"), dataset.schema())
    assert not report.ok
    assert DatasetState(dataset).pending == ["a"]
    monkeypatch.undo()
    assert run_once(spec, dataset.partition("a"), dataset.schema()).ok
    assert DatasetState(dataset).pending == []
