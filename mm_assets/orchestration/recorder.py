"""The recorder: reads what a load did from the dataset's folder, and stores it as events of runs of Dagster.

Files are the truth, and Dagster shows them: what is published and not recorded, because a load was killed or the
database was unavailable, is recorded by the next load or by ``mm-assets sync``. A recorder has a thread and a queue of
its own, so that nothing waits for the database. The queue holds names of files, and the latest reports of partitions,
which also have previews; without a report the file is read.

The thread imports Dagster, while the load runs its first partition.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from mm_assets.errors import SourceError, masked_urls
from mm_assets.pipeline.chain import PUBLISHED, export_stage
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.partition.stage_run import StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import CLAIM_SECONDS, Claims
from mm_assets.pipeline.state.exports import complete_exports, export_folders
from mm_assets.pipeline.state.folder import ATTEMPTS, DatasetStore
from mm_assets.pipeline.state.manifests import ManifestReport
from mm_assets.pipeline.state.records import StageFailure
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.storage.retry import Retry

if TYPE_CHECKING:
    from mm_assets.orchestration.events import Event, EventSink

__all__ = ["DATABASE", "Recorder", "RunRecording", "is_unavailable", "unrecorded_message"]

MAX_PARTITIONS_OF_RUN = 1000  # a run has 25 events of each partition, and its page reads all
_MAX_BATCH = 32  # partitions that are stored in one transaction
_MAX_REPORTS = 64  # in memory: each may have pictures
_LINGER_SECONDS = 0.5  # in which further partitions join a transaction
_LOOK_SECONDS = 2.0  # between looks at the claims of other loads
_MAX_QUIET_SECONDS = 10.0  # for a run to begin, after which it is reported what the load waits for
_MAX_SILENCE_SECONDS = 120.0  # of a database that neither takes nor refuses anything, at the end of a load
_CANCEL_SECONDS = 3.0  # for the end of a run that is canceled
_MAX_NAMES_IN_MESSAGE = 10
_MANIFEST = "manifest.json"
_GAVE_UP = "DagsterPostgresException"  # of dagster-postgres, which is not a requirement of ours


# -- the database


def is_unavailable(error: BaseException) -> bool:
    """Whether an error says that a database server is not there, as opposed to a file that cannot be used."""
    from sqlalchemy import exc  # Dagster has imported it

    if isinstance(error, exc.DBAPIError) and isinstance(error.orig, sqlite3.Error):
        return False
    unavailable = (ConnectionError, exc.OperationalError, exc.InterfaceError, exc.TimeoutError)
    return isinstance(error, unavailable) or type(error).__name__ == _GAVE_UP


def _may_pass(error: BaseException) -> bool:
    """Whether the same may succeed later: the server is unavailable, or SQLite's file is locked or read-only."""
    from sqlalchemy.exc import OperationalError

    return is_unavailable(error) or isinstance(error, OperationalError | sqlite3.OperationalError)


DATABASE: Retry[BaseException] = Retry(pauses=(1.0, 2.0, 4.0, 8.0, 16.0, 30.0), jitter=0.0, may_pass=_may_pass)
"""For Dagster's database: a restart takes seconds, a failover a minute. While a load runs the last pause repeats."""


def _describe(error: BaseException) -> str:
    """Returns an error of a database in one line; the statement is in the others."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# -- the recorder


@dataclass(slots=True)
class _Item:
    """What is to be recorded.

    Attributes:
        name: of the file below the dataset's folder: a record, an attempt, or the manifest; empty for others.
        report: what is known of it, as long as there is memory for it.
        state: a dataset of which everything is to be recorded that is unknown to Dagster; None for others.
        line: a warning for the log of the run.
        was_tried: whether it may have been stored.
    """

    name: str = ""
    report: PartitionReport | ManifestReport | None = None
    state: DatasetState | None = None
    line: str = ""
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

    That wait ends when the database has refused every attempt of the policy. What does not pass, such as a run that
    fails before its first step, ends the recording after as many attempts, also while the load runs. An interruption of
    the block ends the wait at once, and cancels the run: the next load records the rest.

    Args:
        dataset: the dataset's folder.
        execute: executes a run of Dagster, in which it calls a function with the sink of the run.
        prepare: called in the thread before it; imports Dagster, which an interruption does not wait for.
        state: the dataset as it was listed.
        load: id of the load.
        running: partitions that the load runs, which are not caught up with.
        attempts: whether failures that are not recorded are caught up with too.
        report: called with a line when the database begins to refuse, and when the recording has ended early.
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
        prepare: Callable[[], object] = lambda: None,
        state: DatasetState,
        load: str,
        running: Collection[str] = (),
        attempts: bool = False,
        report: Callable[[str], object] = lambda _: None,
        retry: Retry[BaseException] = DATABASE,
    ) -> None:
        self._dataset = DatasetStore(dataset.spec)  # it remembers files, and is not made for two threads
        self._execute = execute
        self._prepare = prepare
        self._claims = Claims(self._dataset, load)  # of others: its own is the load's
        self._state = state
        self._running = set(running)
        self._attempts = attempts
        self._report = report
        self._retry = retry
        self._items = deque([_Item(state=state)])
        self._num_reports = 0
        self._condition = threading.Condition()
        self._is_closed = self._is_canceled = self._is_prepared = False
        self._given_up = ""  # why nothing more is recorded
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
            pool = self._dataset.spec.pool
            slot = f", or the run waits for a slot of the pool {pool!r}" if pool else ""
            silence = f"the database has not answered for {_MAX_SILENCE_SECONDS:.0f} seconds{slot}"
            self._give_up(self._given_up or silence)

    def _cancel(self) -> None:
        with self._condition:
            self._is_canceled = True
            self._condition.notify_all()
        if self._is_prepared:  # else there is no run to cancel
            self._thread.join(_CANCEL_SECONDS)

    def wait_until_begun(self, pool: str) -> None:
        """Waits for the first run to begin: it may wait for a slot of a pool, which takes as long as other loads do.

        Raises:
            SourceError: Dagster, which has the limit of the pool, has refused every attempt of the policy.
        """
        if not self._begun.wait(_MAX_QUIET_SECONDS):
            self._report(f"waiting for Dagster to begin the run of the load, which needs a slot of the pool {pool!r}")
        while not self._begun.wait(_LOOK_SECONDS):
            if self._num_refused > len(self._retry.pauses) or not self._thread.is_alive():
                detail = f"has the limit of the pool {pool!r}, and its database is unavailable: nothing was run"
                raise SourceError("Dagster", f"{detail}; run the command again when it is back")

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
        self._add(_Item(line=line))

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
        while not self._given_up:
            num_stored = self._num_stored
            try:
                self._prepare()
                with self._condition:
                    if self._is_canceled:
                        return
                    self._is_prepared = True
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
            if self._given_up:
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
            if report.end is not None:
                recording.failed[report.partition] = report.end

    def _refused(self, error: BaseException) -> None:
        """Waits before the next attempt; gives up after the last one unless the load goes on and the error may pass."""
        reason, may_pass, pauses = _describe(error), self._retry.may_pass(error), self._retry.waits()
        with self._condition:
            number, is_closed = self._num_refused, self._is_closed
            self._num_refused += 1
        if not number and not is_closed and may_pass:
            self._report(f"Dagster's database is unavailable, and partitions are recorded later: {reason}")
        is_last = number >= len(pauses)
        if (is_last and (is_closed or not may_pass)) or (is_closed and not may_pass):
            self._give_up(reason)
            if not is_closed:
                self._report(f"partitions are published and not recorded, since Dagster fails each time: {reason}")
            return
        with self._condition:
            self._condition.wait_for(
                lambda: self._is_canceled or self._is_closed != is_closed, pauses[min(number, len(pauses) - 1)]
            )

    def _give_up(self, reason: str) -> None:
        with self._condition:
            self._given_up = reason
            self.unrecorded |= {item.title: reason for item in self._items if item.name or item.report is not None}
            self._items.clear()

    # -- what is stored

    def _record(self, sink: EventSink, items: Sequence[_Item]) -> list[PartitionReport]:
        """Stores the events of items; returns the reports of their partitions."""
        from mm_assets.orchestration.events import Line, PartitionEvents, manifest_events

        events: list[Event] = []
        reports: list[tuple[PartitionReport, bool]] = []
        for item in items:
            if item.state is not None:
                self._catch_up(sink, item.state)
            elif item.line:
                events.append(Line(logging.WARNING, item.line))
            elif isinstance(item.report, PartitionReport):
                reports.append((item.report, not item.was_tried))
        reports += [(report, False) for report in self._read(item.name for item in items if item.report is None)]
        events += PartitionEvents(sink, self._state, reports).events()
        made_manifest = False
        if manifests := [item for item in items if item.name == _MANIFEST]:  # the last one is the newest
            found = manifest_events(sink, self._dataset, manifests[-1].report)
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
                    store = self._dataset.store
                    results = {s.name: StageResult.of_record(record, store) for s, record in attempt.stages.items()}
                    report = PartitionReport(partition=key, results=results, failure=attempt.failure)
                    if report.end is not None:  # else the run was killed, which is not a failure
                        yield report

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
