"""The recorder: turns records, attempts and manifests of a dataset's folder into events of runs of Dagster.

Files are the truth, and Dagster shows them: what is published and not recorded, because a load was killed or the
database was unavailable, is recorded by the next load or by ``mm-assets sync``. A recorder has a thread and a queue of
its own, so that nothing waits for the database. The queue holds names of files, and the latest reports of partitions,
which also have previews; without a report the file is read.

Only this module uses private names of Dagster. They store the events of many partitions in one transaction; without
them each event is stored by the public call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, Self

import dagster as dg
import sqlalchemy
import sqlalchemy.exc
from dagster import DagsterEventType

from mm_assets.errors import MmAssetsError, SchemaMismatchError, masked_urls
from mm_assets.orchestration.checks import UNIQUE_IDS
from mm_assets.orchestration.partitions import asset_key, code_version, shards_key
from mm_assets.orchestration.report import (
    MaterializeResult,
    check_results,
    end_of,
    export_result,
    failed_observation,
    manifest_result,
    published_result,
    stage_result,
    stage_version,
)
from mm_assets.orchestration.rollup import failed_before, rolled_up
from mm_assets.orchestration.runs import Attempt, attempt_tags, failed_attempts
from mm_assets.pipeline.chain import CHAIN, MANIFEST, PUBLISHED, RAW_SHARDS, STAGE_OF_FILE, Stage, export_stage
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.partition.stage_run import StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.added_streams import carried_over
from mm_assets.pipeline.state.claims import CLAIM_SECONDS, Claims
from mm_assets.pipeline.state.exports import complete_exports, export_folders, read_export
from mm_assets.pipeline.state.folder import ATTEMPTS, DatasetStore
from mm_assets.pipeline.state.manifests import ManifestReport
from mm_assets.pipeline.state.records import Record, StageFailure, StageRecord
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.storage.retry import Retry

__all__ = [
    "DATABASE",
    "Checked",
    "EventSink",
    "Line",
    "Made",
    "Planned",
    "Recorder",
    "RunEvents",
    "RunRecording",
    "forget_planned_checks",
    "is_known_manifest",
    "is_unavailable",
    "unrecorded_message",
]

MAX_PARTITIONS_OF_RUN = 1000  # a run has 25 events of each partition, and its page reads all
_MAX_BATCH = 32  # partitions that are stored in one transaction
_MAX_REPORTS = 64  # in memory: each may have pictures
_LINGER_SECONDS = 0.5  # in which further partitions join a transaction
_LOOK_SECONDS = 2.0  # between looks at the claims of other loads
_MAX_SILENCE_SECONDS = 120.0  # of a database that neither takes nor refuses anything, at the end of a load
_CANCEL_SECONDS = 3.0  # for the end of a run that is canceled
_MAX_NAMES_IN_MESSAGE = 10
_TAG = "dagster/"
_VERSION, _CODE = f"{_TAG}data_version", f"{_TAG}code_version"
_MANIFEST = "manifest.json"
_UNAVAILABLE = (
    ConnectionError,
    sqlalchemy.exc.OperationalError,
    sqlalchemy.exc.InterfaceError,
    sqlalchemy.exc.TimeoutError,
)
_GAVE_UP = "DagsterPostgresException"  # of dagster-postgres, which is not a requirement of ours
_log = logging.getLogger(__name__)
_Entry: Any = dg.EventLogEntry  # its constructor has no annotations


# -- the database


def is_unavailable(error: BaseException) -> bool:
    """Whether an error says that a database server is not there, as opposed to a file that cannot be used."""
    if isinstance(error, sqlalchemy.exc.DBAPIError) and isinstance(error.orig, sqlite3.Error):
        return False
    return isinstance(error, _UNAVAILABLE) or type(error).__name__ == _GAVE_UP


def _may_pass(error: BaseException) -> bool:
    """Whether the same may succeed later: the server is unavailable, or SQLite's file is locked or read-only."""
    return is_unavailable(error) or isinstance(error, sqlalchemy.exc.OperationalError | sqlite3.OperationalError)


DATABASE: Retry[BaseException] = Retry(pauses=(1.0, 2.0, 4.0, 8.0, 16.0, 30.0), jitter=0.0, may_pass=_may_pass)
"""For Dagster's database: a restart takes seconds, a failover a minute. While a load runs the last pause repeats."""


def _describe(error: BaseException) -> str:
    """Returns an error of a database in one line; the statement is in the others."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# -- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A materialization.

    Attributes:
        result: what was made.
        partition: partition key, if it is of a partition.
        inputs: data version of each asset that it was made from.
        code_version: what it was made with.
    """

    result: MaterializeResult
    partition: str | None = None
    inputs: Mapping[dg.AssetKey, str] = field(default_factory=dict)
    code_version: str | None = None

    @property
    def asset_key(self) -> dg.AssetKey:
        """The asset."""
        assert self.result.asset_key is not None
        return dg.AssetKey.from_coercible(self.result.asset_key)


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check, of a partition or, with None, of all."""

    result: dg.AssetCheckResult
    partition: str | None

    @property
    def asset_key(self) -> dg.AssetKey:
        """The asset that was checked."""
        assert self.result.asset_key is not None
        return dg.AssetKey.from_coercible(self.result.asset_key)


@dataclass(frozen=True, slots=True)
class Planned:
    """That a run was to make an asset of a partition: if it never does, and fails, Dagster shows it as failed."""

    asset_key: dg.AssetKey
    partition: str
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a run's log, of a level as in `logging`."""

    level: int
    text: str


Event = Made | Checked | Planned | Line | dg.AssetObservation


class EventSink(Protocol):
    """Where a recorder stores the events of one run, and asks what is stored already.

    Attributes:
        spec: the declaration, with `checks` as it applies.
    """

    spec: DatasetSpec

    def versions(self, stage: Stage, keys: Collection[str] | None) -> Mapping[str, str]:
        """Returns the data version of the latest materialization of each partition; None asks for all partitions."""
        ...

    def code_version(self, stage: Stage, key: str) -> str | None:
        """Returns the code version of the latest materialization of a partition."""
        ...

    def failures(self) -> Mapping[str, Attempt]:
        """Returns the latest failure of each partition before this run."""
        ...

    def failed_checks(self, result: dg.AssetCheckResult) -> Mapping[str, str]:
        """Returns the partitions that the latest result of an asset's check names, with what its rules found."""
        ...

    def knows_manifest(self, digest: str) -> bool:
        """Whether the manifest with this digest is the latest one."""
        ...

    def store(self, events: Sequence[Event]) -> None:
        """Stores events, all or none; raises what the database does."""
        ...


# -- the recorder


@dataclass(slots=True)
class _Item:
    """What is to be recorded.

    Attributes:
        name: of the file below the dataset's folder: a record, an attempt, or the manifest; empty for others.
        report: what is known of it, as long as there is memory for it.
        state: a dataset of which everything is to be recorded that is unknown to Dagster; None for others.
        line: a line for the log of the run.
        was_tried: whether it may have been stored.
    """

    name: str = ""
    report: PartitionReport | ManifestReport | None = None
    state: DatasetState | None = None
    line: Line | None = None
    was_tried: bool = False

    @property
    def is_partition(self) -> bool:
        return self.name not in ("", _MANIFEST)

    @property
    def title(self) -> str:
        """What it is, for users."""
        if self.state is not None:
            return "what earlier loads published"
        if isinstance(self.report, PartitionReport):
            return self.report.partition
        key = next(iter(DatasetStore.recipes([self.name])), "")
        return key or (self.name.partition("/")[2].removesuffix(".json") if self.is_partition else "the manifest")


@dataclass(kw_only=True)
class RunRecording:
    """What one run of Dagster recorded.

    Attributes:
        num_partitions: how many partitions it has events of.
        failed: why partitions failed, by key.
    """

    num_partitions: int = 0
    failed: dict[str, StageFailure] = field(default_factory=dict)


class Recorder:
    """Records what a load does, in a thread. Used in a `with` block, whose end waits until everything is recorded.

    That wait ends when the database has refused every attempt of the policy. An interruption of the block ends it at
    once, and cancels the run: the next load records the rest.

    Args:
        dataset: the dataset's folder.
        execute: executes a run of Dagster, in which it calls a function with the sink of the run.
        state: the dataset as it was listed.
        load: id of the load.
        running: partitions that the load runs, which are not caught up with.
        attempts: whether failures that are not recorded are caught up with too.
        report: called with a line when the database begins to refuse.
        retry: how long it is tried again.

    Attributes:
        unrecorded: what could not be recorded, with the reason: partition keys for instance.
        num_published: published partitions that were recorded.
        failed: keys of the failed partitions that were recorded.
        has_manifest: whether a manifest was recorded.
        error: why the load ended early, once it has.
    """

    def __init__(
        self,
        dataset: DatasetStore,
        execute: Callable[[Callable[[EventSink], RunRecording]], object],
        *,
        state: DatasetState,
        load: str,
        running: Collection[str] = (),
        attempts: bool = False,
        report: Callable[[str], object] = lambda _: None,
        retry: Retry[BaseException] = DATABASE,
    ) -> None:
        self._dataset = DatasetStore(dataset.spec)  # it remembers files, and is not made for two threads
        self._execute = execute
        self._claims = Claims(self._dataset, load)  # of others: its own is the load's
        self._state = state
        self._running = set(running)
        self._attempts = attempts
        self._report = report
        self._retry = retry
        self._items = deque([_Item(state=state)])
        self._num_reports = 0
        self._condition = threading.Condition()
        self._is_closed = self._is_canceled = self._has_given_up = False
        self._is_caught_up = self._is_postponed = self._has_left = False
        self._num_refused = 0
        self._num_stored = 0
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self.unrecorded: dict[str, str] = {}
        self.num_published = 0
        self.failed: list[str] = []
        self.has_manifest = False
        self.error = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._cancel()
            return
        if error is not None:
            self.error = self.error or masked_urls(str(error))
        if not self._is_caught_up or self._has_left:  # the other load may have ended since
            self._add(_Item(state=self._state))
        with self._condition:
            self._num_refused = 0  # the attempts of the policy begin again
            self._is_closed = True
            self._condition.notify_all()
        try:
            self._wait()
        except BaseException:
            self._cancel()
            raise

    def _wait(self) -> None:
        """Waits for the thread to end: as long as it stores something, or tries again."""
        num_stored = -1
        while self._thread.is_alive() and num_stored != self._num_stored:
            num_stored = self._num_stored
            self._thread.join(_MAX_SILENCE_SECONDS)
        if self._items:
            self._give_up(f"the database has not answered for {_MAX_SILENCE_SECONDS:.0f} seconds")

    def _cancel(self) -> None:
        with self._condition:
            self._is_canceled = True
            self._condition.notify_all()
        self._thread.join(_CANCEL_SECONDS)

    def wait_until_begun(self) -> None:
        """Waits for the first run to begin: it may wait for a slot of a pool."""
        while not self._begun.wait(1.0) and self._thread.is_alive():
            pass

    def add(self, report: PartitionReport) -> None:
        """Has a partition recorded that was published, or failed; never waits."""
        if report.claimed_by:  # the other load records it; if it is killed before, the end of this one does
            self._running.discard(report.partition)
            self._has_left |= report.record is not None
            return
        if report.record is not None:
            name = self._dataset.record_name(report.partition, report.record.recipe)
        else:
            name = "" if report.is_refused else self._dataset.attempt_name(report.partition)
        self._add(_Item(name=name, report=report))

    def add_manifest(self, report: ManifestReport | None = None) -> None:
        """Has the newest manifest recorded, unless it is known; never waits."""
        self._add(_Item(name=_MANIFEST, report=report))

    def warn(self, line: str) -> None:
        """Writes a warning into the log of the run; never waits."""
        self._add(_Item(line=Line(logging.WARNING, line)))

    def _add(self, item: _Item) -> None:
        with self._condition:
            if item.name == _MANIFEST:  # it replaces the one before, whose report may have very many partitions
                for earlier in self._items:
                    if earlier.name == _MANIFEST and earlier.report is not None:
                        earlier.report = None
                        self._num_reports -= 1
            if item.name and item.report is not None:
                if self._num_reports >= _MAX_REPORTS:
                    item.report = None
                else:
                    self._num_reports += 1
            self._items.append(item)
            self._condition.notify_all()

    # -- the thread

    def _work(self) -> None:
        while not self._has_given_up:
            num_stored = self._num_stored
            try:
                self._execute(self._record_run)
                if self._items and num_stored == self._num_stored:
                    raise RuntimeError("the run ended before anything was recorded")
            except Exception as error:  # noqa: BLE001 - databases raise their own types; each is tried again or reported
                self._refused(error)
            except KeyboardInterrupt:
                return
            with self._condition:
                self._condition.wait_for(lambda: self._items or self._is_closed or self._is_canceled)
                if self._is_canceled or not self._items:
                    return

    def _record_run(self, sink: EventSink) -> RunRecording:
        """Records what comes, until a run has enough, or everything is recorded.

        Raises:
            KeyboardInterrupt: the load was interrupted.
        """
        recording = RunRecording()
        self._begun.set()
        while items := self._next(recording):
            self._record_items(sink, items, recording)
        return recording

    def _next(self, recording: RunRecording) -> list[_Item]:
        """Waits for items, which remain in the queue until they are recorded; none if the run is complete."""
        is_full = recording.num_partitions >= MAX_PARTITIONS_OF_RUN
        with self._condition:
            self._condition.wait_for(lambda: self._items or self._is_closed or self._is_canceled)
            self._condition.wait_for(
                lambda: len(self._items) >= _MAX_BATCH or self._is_closed or self._is_canceled, _LINGER_SECONDS
            )
            if self._is_canceled:
                raise KeyboardInterrupt
            items = [self._items[n] for n in range(min(len(self._items), _MAX_BATCH))]
        return [] if is_full and any(item.is_partition for item in items) else items

    def _record_items(self, sink: EventSink, items: Sequence[_Item], recording: RunRecording) -> None:
        """Records the first items of the queue: all of them or, if the database refuses, none."""
        try:
            done = self._record(sink, items)
        except Exception as error:  # noqa: BLE001 - what may not pass is listed as unrecorded, and others go on
            if self._retry.may_pass(error):
                self._refused(error)
                return
            if len(items) > 1:  # one of them may be at fault
                for item in items:
                    if self._items and self._items[0] is item:
                        self._record_items(sink, [item], recording)
                return
            self.unrecorded[items[0].title] = _describe(error)
            done = []
        with self._condition:
            if self._has_given_up:
                return
            for _ in items:
                self._num_reports -= (item := self._items.popleft()).report is not None and bool(item.name)
            self._num_refused = 0
            self._num_stored += 1
        for report in done:
            recording.num_partitions += 1
            if report.record is not None:
                self.num_published += 1
            else:
                self.failed.append(report.partition)
            if report.record is None or report.failure is not None:
                recording.failed[report.partition] = end_of(report)

    def _refused(self, error: BaseException) -> None:
        """Waits before the next attempt; after the last of a load that has ended, gives up."""
        reason = _describe(error)
        pauses = self._retry.waits()
        with self._condition:
            number, is_closed = self._num_refused, self._is_closed
            self._num_refused += 1
        if not number and not is_closed:
            self._report(f"Dagster's database is unavailable, and partitions are recorded later: {reason}")
        if is_closed and (number >= len(pauses) or not self._retry.may_pass(error)):
            self._give_up(reason)
            return
        with self._condition:
            self._condition.wait_for(
                lambda: self._is_canceled or self._is_closed != is_closed, pauses[min(number, len(pauses) - 1)]
            )

    def _give_up(self, reason: str) -> None:
        with self._condition:
            self._has_given_up = True
            self.unrecorded |= {item.title: reason for item in self._items if item.name or item.report is not None}
            self._items.clear()

    # -- what is stored

    def _record(self, sink: EventSink, items: Sequence[_Item]) -> list[PartitionReport]:
        """Stores the events of items; returns the reports of their partitions."""
        events: list[Event] = []
        reports: list[tuple[PartitionReport, bool]] = []
        for item in items:
            if item.state is not None:
                self._catch_up(sink, item.state)
            elif item.line is not None:
                events.append(item.line)
            elif isinstance(item.report, PartitionReport):
                reports.append((item.report, not item.was_tried))
        reports += [(report, False) for report in self._read(item.name for item in items if item.report is None)]
        events += _PartitionEvents(sink, self._state, reports).events()
        made_manifest = False
        if manifests := [item for item in items if item.name == _MANIFEST]:  # the last one is the newest
            found = _manifest_events(sink, self._dataset, manifests[-1].report)
            made_manifest = bool(found)
            events += found
        for item in items:
            item.was_tried = True
        if events:
            sink.store(events)
        self.has_manifest |= made_manifest
        return [report for report, _ in reports]

    def _read(self, names: Iterable[str]) -> Iterator[PartitionReport]:
        """Yields reports from records and attempts; files that are missing by now, or damaged, have none."""
        names = list(names)
        listed = [(key, recipe) for key, recipes in self._dataset.recipes(names).items() for recipe in recipes]
        for _, record in self._dataset.read_records(listed):
            if record is not None:
                yield PartitionReport(partition=record.partition, record=record)
        for name in names:
            if name.startswith(f"{ATTEMPTS}/"):
                key = name.partition("/")[2].removesuffix(".json")
                attempt = self._dataset.attempt(key)
                if attempt is not None:
                    results = {s.name: self._result(record) for s, record in attempt.stages.items()}
                    if attempt.failure is not None or not all(result.passed for result in results.values()):
                        yield PartitionReport(  # else the run was killed, which is not a failure
                            partition=key,
                            results=results,
                            record=None,
                            failure=attempt.failure,
                            seconds=0.0,
                            peak_memory=0,
                        )

    def _result(self, record: StageRecord) -> StageResult:
        urls = {name: self._dataset.store.url_of(file.path) for name, file in record.files.items()}
        return StageResult.of_record(record, urls)

    def _catch_up(self, sink: EventSink, state: DatasetState) -> None:
        """Adds the names of what Dagster does not know, unless another load is active, which records its own."""
        if self._is_caught_up and not self._has_left:
            return
        # What the other load has published since is not in the state.
        current = DatasetState(self._dataset) if self._is_postponed or self._has_left else state
        self._is_postponed = bool(self._unknown(sink, current)) and self._another_load()
        if self._is_postponed:
            return
        self._is_caught_up, self._has_left = True, False
        for name in self._unknown(sink, current):  # asked again: what other loads recorded before they ended is known
            self._add(_Item(name=name))

    def _unknown(self, sink: EventSink, state: DatasetState) -> list[str]:
        """Returns the names of the records and attempts that Dagster does not know and this load does not make."""
        known, unknown_exports = sink.versions(PUBLISHED, None), set(_unknown_exports(sink, state))
        names = [
            state.dataset.record_name(key, recipe)
            for key, recipe in state.recipes.items()
            if key not in self._running
            and state.is_published(key)
            and (known.get(key) != recipe or key in unknown_exports)
        ]
        if self._attempts and (pending := [key for key in state.pending if key in state.attempts]):
            failures = sink.failures()
            for key in pending:
                if key not in failures or failures[key].fingerprint != state.recipes[key]:
                    names.append(state.dataset.attempt_name(key))
        return names

    def _another_load(self) -> bool:
        """Whether another load is active; without a load of its own, it waits until that is certain."""
        began = time.monotonic()
        while self._claims.others():
            if not self._attempts or time.monotonic() - began > CLAIM_SECONDS:
                return True
            time.sleep(_LOOK_SECONDS)
        return False


def _unknown_exports(sink: EventSink, state: DatasetState) -> Iterator[str]:
    """Yields the partitions with a complete export that Dagster does not know."""
    for options in state.dataset.spec.exports:
        known, complete = sink.versions(export_stage(options), None), complete_exports(state.dataset, options)
        for key, folder in export_folders(state.dataset, options, state.published().values()).items():
            if folder in complete and known.get(key) != folder:
                yield key


def unrecorded_message(spec: DatasetSpec, unrecorded: Mapping[str, str]) -> str:
    """Returns what a load could not record, and what to do."""
    names = ", ".join([*unrecorded][:_MAX_NAMES_IN_MESSAGE]) + (
        ", …" if len(unrecorded) > _MAX_NAMES_IN_MESSAGE else ""
    )
    reasons = "; ".join(dict.fromkeys(unrecorded.values()))
    advice = f"the next load or `mm-assets sync --dataset {spec.name}` records them"
    return f"not recorded in Dagster: {names} ({len(unrecorded):,} in all): {reasons}: {advice}"


class _PartitionEvents:
    """The events of some partitions.

    Args:
        sink: where they are stored.
        state: the dataset, for the recipes of partitions that failed.
        reports: of the partitions, and whether what one says that it did is certainly not stored.
    """

    def __init__(self, sink: EventSink, state: DatasetState, reports: Sequence[tuple[PartitionReport, bool]]) -> None:
        self._sink = sink
        self._spec = sink.spec
        self._state = state
        self._reports = reports
        self._known: dict[Stage, Mapping[str, str]] = {}
        self._exports = [(options, export_stage(options)) for options in self._spec.exports]
        self._rolled_up: dict[str, list[tuple[dg.AssetCheckResult, str]]] = {}

    def events(self) -> Iterator[Event]:
        for report, is_new in self._reports:
            yield from self._of(report, is_new)
        for results in self._rolled_up.values():
            yield Checked(rolled_up(self._sink.failed_checks(results[0][0]), results, is_gate=False), None)

    def _of(self, report: PartitionReport, is_new: bool) -> Iterator[Event]:
        key, record = report.partition, report.record
        records = {} if record is None else dict(record.stages)
        results = {STAGE_OF_FILE[next(iter(r.record.files))]: r for r in report.results.values()}
        made_with = {stage: result.record.made_with for stage, result in results.items()}
        made_with |= {stage: one.made_with for stage, one in records.items()}
        # A report of a run that failed has the stages that ran: then those before it were up to date.
        given = made_with if RAW_SHARDS in made_with else None
        for stage in CHAIN:
            result = results.get(stage)
            is_missing = result is None or not is_new
            if result is None and stage in records:
                store = self._state.dataset.store
                urls = {name: store.url_of(file.path) for name, file in records[stage].files.items()}
                result = StageResult.of_record(records[stage], urls)
            if result is None:
                continue
            code = code_version(self._spec, stage, given)
            if not (is_missing and self._is_known(stage, key, stage_version(result.record), code)):
                yield from self._stage(stage, result, key, code)
        if record is not None:
            made_with[PUBLISHED] = PUBLISHED.made_with(self._spec)
            if (is_new and report.results) or not self._is_known(PUBLISHED, key, record.recipe):
                code = code_version(self._spec, PUBLISHED, made_with)
                inputs = {asset_key(self._spec, STAGE_OF_FILE[form]): f.sha256 for form, f in record.packed.items()}
                yield Made(result=published_result(self._spec, record), partition=key, inputs=inputs, code_version=code)
            yield from self._exported(report, record, made_with)
            return
        if not report.is_refused:
            yield from self._failure(report)
        if report.failure is not None:
            level = logging.WARNING if report.is_refused else logging.ERROR
            yield Line(level, f"{key}: {report.failure.stage}: {report.failure.said}")

    def _exported(
        self, report: PartitionReport, record: Record, made_with: Mapping[Stage, Mapping[str, str]]
    ) -> Iterator[Event]:
        """Yields the exports of a published partition, and the one that failed."""
        key, dataset = report.partition, self._state.dataset
        for options, stage in self._exports:
            folder = export_folders(dataset, options, [record.listed])[key]
            if self._is_known(stage, key, folder):
                continue
            made = report.exports.get(options.asset)
            with suppress(SchemaMismatchError):  # the next export of the partition reports it
                made = made or read_export(dataset, options, folder)
            if made is not None:
                result = export_result(self._spec, options, key, made)
                code = code_version(self._spec, stage, {**made_with, stage: stage.made_with(self._spec)})
                inputs = {asset_key(self._spec, PUBLISHED): record.recipe}
                yield Made(result=result, partition=key, inputs=inputs, code_version=code)
                yield from (Checked(check, key) for check in result.check_results or ())
            elif report.failure is not None and report.failure.stage == stage.name:
                yield Planned(asset_key(self._spec, stage), key, {})
                yield failed_observation(self._spec, report.failure)
                yield Line(logging.ERROR, f"{key}: {report.failure.stage}: {report.failure.said}")

    def _is_known(self, stage: Stage, key: str, version: str, code: str | None = None) -> bool:
        if stage not in self._known:
            self._known[stage] = self._sink.versions(stage, [report.partition for report, _ in self._reports])
        is_equal = self._known[stage].get(key) == version
        return is_equal and (code is None or self._sink.code_version(stage, key) == code)

    def _stage(self, stage: Stage, result: StageResult, key: str, code: str | None) -> Iterator[Event]:
        checks = check_results(self._spec, result)
        if self._spec.checks == "rollup":
            for check in checks:
                self._rolled_up.setdefault(result.record.stage, []).append((check, key))
            checks = []
        inputs = {
            asset_key(self._spec, STAGE_OF_FILE[name]): version
            for name, version in result.record.inputs.items()
            if name in STAGE_OF_FILE
        }
        yield Made(result=stage_result(self._spec, result, ()), partition=key, inputs=inputs, code_version=code)
        for check in checks:
            yield Checked(check, key)

    def _failure(self, report: PartitionReport) -> Iterator[Event]:
        """Yields that the rest of a partition was to be made, and why it failed."""
        key, failure = report.partition, end_of(report)
        tags = attempt_tags(self._state.recipes.get(key, ""), self._sink.failures().get(key))
        names = [stage.name for stage in CHAIN]
        for stage in CHAIN[names.index(failure.stage) : CHAIN.index(PUBLISHED) + 1]:
            if stage.is_made(self._spec) and stage.name not in report.results:
                yield Planned(asset_key(self._spec, stage), key, tags)
        yield failed_observation(self._spec, failure)


def _manifest_events(sink: EventSink, dataset: DatasetStore, report: object) -> list[Event]:
    """Returns the events of a manifest, of the newest one without a report; none if Dagster knows it."""
    if not isinstance(report, ManifestReport):
        content = dataset.store.found_bytes(_MANIFEST)
        if content is None:
            return []
        try:
            state = DatasetState(dataset)
            report = ManifestReport(
                digest=hashlib.sha256(content).hexdigest(),
                manifest=json.loads(content),
                url=dataset.store.url_of(_MANIFEST),
                state=state,
                left_out={
                    key: state.fault(key) or "published since"
                    for key in sorted(state.partitions.keys() - state.listed.keys())
                },
                missing_streams=carried_over(state, state.listed).missing,
            )
        except (MmAssetsError, ValueError, KeyError, TypeError) as error:
            return [Line(logging.WARNING, f"the manifest is not recorded: {error!r}: `mm-assets run` builds it again")]
    if sink.knows_manifest(report.digest):
        return []
    result = manifest_result(sink.spec, report)
    return [Made(result=result), *(Checked(check, None) for check in result.check_results or ())]


# -- Dagster


def is_known_manifest(instance: dg.DagsterInstance, spec: DatasetSpec, digest: str) -> bool:
    """Whether the manifest with this digest is Dagster's latest one."""
    latest = _latest(instance, asset_key(spec, MANIFEST))
    return latest is not None and _tags(latest).get(_VERSION) == digest


def _latest(instance: dg.DagsterInstance, asset: dg.AssetKey, partition: str | None = None) -> Any:
    """Returns the record of the latest materialization of an asset, or of a partition of it; None if there is none."""
    wanted = dg.AssetRecordsFilter(asset, asset_partitions=None if partition is None else [partition])
    return next(iter(instance.fetch_materializations(wanted, limit=1).records), None)


def _tags(record: dg.EventLogRecord) -> Mapping[str, str]:
    made = record.asset_materialization
    return {} if made is None else made.tags or {}


class RunEvents:
    """Stores events of one step of a run in Dagster's event log.

    Args:
        instance: of the run.
        spec: the declaration.
        run_id: the run's; empty for events without a run.
        job_name: the run's job.
        step_key: the step, if there is one.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        spec: DatasetSpec,
        *,
        run_id: str,
        job_name: str,
        step_key: str | None,
    ) -> None:
        self._instance = instance
        self.spec = spec
        self._run_id = run_id
        self._job_name = job_name
        self._step_key = step_key
        self._has_warned = False
        self._failures: Mapping[str, Attempt] | None = None
        self._observed: Mapping[str, int] | None = None
        self._made: dict[tuple[dg.AssetKey, str | None], Any] = {}  # latest materializations of the events at hand

    @classmethod
    def of(cls, context: dg.OpExecutionContext, spec: DatasetSpec) -> Self:
        """Returns those of the run of an op, for a declaration whose `checks` are settled."""
        step = context.op_def.name
        return cls(context.instance, spec, run_id=context.run_id, job_name=context.job_name, step_key=step)

    def versions(self, stage: Stage, keys: Collection[str] | None) -> Mapping[str, str]:
        """Returns the data version of the latest materialization of each partition; None asks for all partitions."""
        found = self._instance.event_log_storage.get_latest_tags_by_partition(
            asset_key(self.spec, stage),
            DagsterEventType.ASSET_MATERIALIZATION,
            [_VERSION],
            asset_partitions=None if keys is None else list(keys),
        )
        return {key: tags[_VERSION] for key, tags in found.items() if _VERSION in tags}

    def code_version(self, stage: Stage, key: str) -> str | None:
        """Returns the code version of the latest materialization of a partition."""
        latest = _latest(self._instance, asset_key(self.spec, stage), key)
        return None if latest is None else _tags(latest).get(_CODE)

    def failures(self) -> Mapping[str, Attempt]:
        """Returns the latest failure of each partition before this run; the events of earlier runs are read once."""
        if self._failures is None:
            self._failures = failed_attempts(self._instance, self.spec)
        return self._failures

    def failed_checks(self, result: dg.AssetCheckResult) -> Mapping[str, str]:
        """Returns the partitions that the latest result of an asset's check names, with what its rules found."""
        return failed_before(self._instance, result)

    def knows_manifest(self, digest: str) -> bool:
        """Whether the manifest with this digest is Dagster's latest one."""
        return is_known_manifest(self._instance, self.spec, digest)

    def store(self, events: Sequence[Event]) -> None:
        """Stores events in one transaction, or one by one by the public call if Dagster's storage has another form."""
        self._made = {}
        self._read_latest(events)
        try:
            self._store_at_once(events)
        except (ImportError, AttributeError, TypeError) as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("this version of Dagster stores events in another way, so recording is slower: %r", error)
            self._store_one_by_one(events)

    def _read_latest(self, events: Sequence[Event]) -> None:
        """Reads the materializations that events refer to and that are not among them: before, a transaction locks."""
        made: set[tuple[dg.AssetKey, str | None]] = set()
        for event in events:
            if isinstance(event, Made):
                needed = [(asset, event.partition) for asset in event.inputs]
                if event.asset_key == asset_key(self.spec, RAW_SHARDS) and self._observed is None:
                    storage = self._instance.event_log_storage
                    kind = DagsterEventType.ASSET_OBSERVATION
                    self._observed = storage.get_latest_storage_id_by_partition(shards_key(self.spec), kind)
            elif isinstance(event, Checked):
                needed = [(event.asset_key, event.partition)]
            else:
                continue
            for at in needed:
                if at not in made and at not in self._made:
                    latest = _latest(self._instance, *at)
                    self._made[at] = latest and (latest.storage_id, latest.run_id, latest.timestamp)
            if isinstance(event, Made):
                made |= {(event.asset_key, event.partition), (event.asset_key, None)}

    def _materialization(self, event: Made) -> dg.AssetMaterialization:
        """Returns the event that Dagster stores, with what it was made from: else Dagster takes it for outdated."""
        version = "" if event.result.data_version is None else event.result.data_version.value
        tags = {_VERSION: version, f"{_TAG}data_version_is_user_provided": "true"}
        if event.code_version is not None:
            tags[_CODE] = event.code_version
        above = {asset: self._made.get((asset, event.partition)) for asset in event.inputs}
        inputs = [(asset, version, above[asset]) for asset, version in event.inputs.items()]
        if event.asset_key == asset_key(self.spec, RAW_SHARDS):
            number = (self._observed or {}).get(event.partition or "")
            inputs.append((shards_key(self.spec), "", None if number is None else (number,)))
        for asset, version, latest in inputs:
            # Of an input with partitions Dagster stores the SHA-256 of the versions of those that were read.
            name = asset.to_user_string()
            tags[f"{_TAG}input_data_version/{name}"] = hashlib.sha256(version.encode()).hexdigest()
            tags[f"{_TAG}input_event_pointer/{name}"] = "NULL" if latest is None else str(latest[0])
        return dg.AssetMaterialization(
            event.asset_key, partition=event.partition, metadata=event.result.metadata, tags=tags
        )

    def _evaluation(self, event: Checked, target: Any) -> dg.AssetCheckEvaluation:
        """Returns a check result as the event that Dagster stores, with the materialization that it is about."""
        found = event.result
        return dg.AssetCheckEvaluation(
            asset_key=event.asset_key,
            check_name=found.check_name or "",
            passed=found.passed,
            metadata=found.metadata,
            target_materialization_data=target,
            severity=found.severity,
            description=found.description,
            blocking=found.check_name != UNIQUE_IDS,
            partition=event.partition,
        )

    def _store_one_by_one(self, events: Sequence[Event]) -> None:
        """Stores events by the public call, which takes no `Planned`: pages then show no partitions as failed."""
        for event in events:
            if isinstance(event, Made):
                self._instance.report_runless_asset_event(self._materialization(event))
            elif isinstance(event, Checked):
                self._instance.report_runless_asset_event(self._evaluation(event, None))
            elif isinstance(event, dg.AssetObservation):
                self._instance.report_runless_asset_event(event)
            elif isinstance(event, Line):
                _log.log(event.level, "%s", event.text)

    # -- private names of Dagster

    def _store_at_once(self, events: Sequence[Event]) -> None:
        """Stores events in one transaction; with SQLite in one for the run's database and one for the common one."""
        from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable

        storage: Any = self._instance.event_log_storage
        tagged: list[tuple[Any, int]] = []
        last: dict[tuple[str, str], tuple[Any, int]] = {}  # by asset and type of event
        with ExitStack() as opened:
            index = opened.enter_context(storage.index_connection())
            if not index.in_transaction():  # a server's; SQLite's has begun one
                index = index.execution_options(isolation_level="READ COMMITTED")
                opened.enter_context(index.begin())
            log = index
            if hasattr(storage, "conn_string_for_shard"):  # committed first: what a kill keeps out of the index is
                engine = sqlalchemy.create_engine(storage.conn_string_for_shard(self._run_id))  # not recorded
                opened.callback(engine.dispose)
                log = opened.enter_context(engine.begin())
            for event in events:
                entry = self._entry(event)
                statement = storage.prepare_insert_event(entry)
                is_logged = log is not index
                if is_logged:
                    log.execute(statement)
                if is_logged and isinstance(event, Line):
                    continue
                number = index.execute(statement).inserted_primary_key[0]
                if isinstance(event, Made):
                    where = self._run_id, entry.timestamp
                    self._made[event.asset_key, event.partition] = self._made[event.asset_key, None] = (number, *where)
                if isinstance(event, Checked):
                    self._store_check(index, AssetCheckExecutionsTable, event, entry, number)
                elif not isinstance(event, Line):
                    tagged.append((entry, number))
                    kind = entry.get_dagster_event().event_type_value
                    last[event.asset_key.to_string(), kind] = entry, number
            if tagged:
                storage._store_asset_event_tags(index, *zip(*tagged, strict=True))
            for _, (entry, number) in sorted(last.items(), key=lambda one: one[0]):  # no two loads wait for each other
                storage._store_asset_event(index, entry, number)

    def _store_check(self, connection: Any, table: Any, event: Checked, entry: Any, number: int) -> None:
        target = self._made.get((event.asset_key, event.partition))
        values = {
            "asset_key": event.asset_key.to_string(),
            "check_name": event.result.check_name,
            "partition": event.partition,
            "run_id": self._run_id,
        }
        if event.partition is None:  # one result of a run, which Dagster replaces
            same = [table.c[name] == value for name, value in values.items()]
            connection.execute(table.delete().where(sqlalchemy.and_(*same)))
        connection.execute(
            table.insert().values(
                **values,
                execution_status="SUCCEEDED" if event.result.passed else "FAILED",
                evaluation_event=dg.serialize_value(entry),
                evaluation_event_timestamp=datetime.fromtimestamp(entry.timestamp, UTC).replace(tzinfo=None),
                evaluation_event_storage_id=number,
                materialization_event_storage_id=None if target is None else target[0],
            )
        )

    def _entry(self, event: Event) -> Any:
        """Returns the entry of the log. Dagster's own hold the step's handles too, which no page shows."""
        line = isinstance(event, Line)
        fields = {
            "error_info": None,
            "level": event.level if isinstance(event, Line) else logging.INFO,
            "user_message": masked_urls(event.text) if isinstance(event, Line) else "",
            "run_id": self._run_id,
            "timestamp": time.time(),
            "step_key": self._step_key,
            "job_name": self._job_name,
        }
        return _Entry(**fields, dagster_event=None if line else self._dagster_event(event))

    def _dagster_event(self, event: Event) -> dg.DagsterEvent:
        from dagster._core.definitions.asset_checks.asset_check_evaluation import (
            AssetCheckEvaluationTargetMaterializationData as Target,
        )
        from dagster._core.events import (
            AssetMaterializationPlannedData,
            AssetObservationData,
            StepMaterializationData,
        )

        data: Any
        message: str | None = None
        tags: Mapping[str, str] | None = None
        if isinstance(event, Made):
            kind, message = DagsterEventType.ASSET_MATERIALIZATION, f"Materialized {event.asset_key.to_user_string()}."
            data = StepMaterializationData(self._materialization(event), [])
        elif isinstance(event, Checked):
            kind, target = DagsterEventType.ASSET_CHECK_EVALUATION, self._made.get((event.asset_key, event.partition))
            about = None if target is None else Target(storage_id=target[0], run_id=target[1], timestamp=target[2])
            data = self._evaluation(event, about)
        elif isinstance(event, Planned):
            kind, tags = DagsterEventType.ASSET_MATERIALIZATION_PLANNED, event.tags
            data = AssetMaterializationPlannedData(event.asset_key, partition=event.partition)
        else:
            assert isinstance(event, dg.AssetObservation)
            kind, message, data = DagsterEventType.ASSET_OBSERVATION, "", AssetObservationData(event)
        return dg.DagsterEvent(
            event_type_value=kind.value,
            job_name=self._job_name,
            step_key=self._step_key,
            event_specific_data=data,
            message=message,
            logging_tags=tags,
        )


def forget_planned_checks(instance: dg.DagsterInstance, run_id: str) -> None:
    """Removes what a run that fails had planned to check: Dagster would show checks that never ran as failed."""
    storage: Any = instance.event_log_storage
    with suppress(ImportError, AttributeError):
        from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable as Executions

        with storage.index_connection() as connection:
            is_planned = Executions.c.execution_status == "PLANNED"
            connection.execute(Executions.delete().where(sqlalchemy.and_(Executions.c.run_id == run_id, is_planned)))
