"""A load, which knows nothing of Dagster: the partitions to run, how each ended, and the manifest of what is published.

Manifests are built in a thread of their own while the driver goes on, and the last one when every partition has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from mm_assets.dataset.manifest import ManifestPartition
from mm_assets.errors import ChangedError, CredentialsError, MmAssetsError, SourceError, first_line, masked_urls
from mm_assets.pipeline.chain import RAW_SHARDS, STAGE_OF_FILE, Stage
from mm_assets.pipeline.load.driver import run_tasks
from mm_assets.pipeline.load.engine import Engine, EngineLostError, Task
from mm_assets.pipeline.partition.run import PartitionReport, rare_collections
from mm_assets.pipeline.state.claims import Claim, Claims, Slice
from mm_assets.pipeline.state.clean import clean
from mm_assets.pipeline.state.exports import write_indexes
from mm_assets.pipeline.state.folder import MIN_AGE_SECONDS, NOTE, RECORDS, DatasetStore
from mm_assets.pipeline.state.losses import Losses
from mm_assets.pipeline.state.manifests import ManifestReport, build_manifest, current_manifest
from mm_assets.pipeline.state.records import StageFailure, StageRecord
from mm_assets.pipeline.state.staleness import DatasetState, given_start
from mm_assets.storage.retry import STORAGE
from mm_assets.storage.urls import storage_fault
from mm_assets.summaries import bytes_said, counted

__all__ = ["STATUSES", "ClaimedWork", "LoadEnd", "PartitionRun", "load_partitions"]

STATUSES = ("done", "FAILED", "published elsewhere", "in progress elsewhere")
"""How the run of a partition may end."""
_LOOK_SECONDS = 2.0  # between looks at what other loads have published, at least
_MAX_LISTED_PER_SECOND = 5000  # records, by a load that waits
_FEW = 16  # partitions whose records are asked for one by one; of more all records are listed
MANIFEST_SECONDS = 900.0  # after which a long load makes what it has published available


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRun:
    """How the run of one partition ended.

    Attributes:
        dataset: dataset name.
        partition: partition key.
        failures: what went wrong, one line each; empty on success.
        warnings: violations of checks that do not stop a partition, and notes of its stages, one line each.
        records: what the stages recorded: of a published partition all, else those that ran.
        losses: what the record lists as lost; empty unless the partition is published.
        other_load: "published" or "in progress" if another load has the partition, else empty.
    """

    dataset: str
    partition: str
    failures: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    records: Mapping[Stage, StageRecord] = field(default_factory=dict)
    losses: Losses = field(default_factory=dict)
    other_load: str = ""

    @property
    def ok(self) -> bool:
        """Whether the run succeeded and every check that stops a partition passed."""
        return not self.failures

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        if self.failures:
            return "FAILED"
        return f"{self.other_load} elsewhere" if self.other_load else "done"

    @classmethod
    def of(cls, dataset: str, report: PartitionReport) -> PartitionRun:
        """Returns the end of a partition, by its report."""
        failures: list[str] = []
        warnings: dict[str, str] = {note: note for result in report.results.values() for note in result.record.notes}
        for name, result in report.results.items():
            for outcome in result.outcomes:
                if outcome.stops:
                    failures.append(f"{name}: check {outcome.name}: {outcome.said}")
                elif not outcome.passed:  # MULT and MSTR hold the same samples: one line for both
                    line = f"check {outcome.name}: {outcome.said}"
                    warnings.setdefault(line, f"{name}: {line}")
        if report.failure is not None:
            failures.append(f"{report.failure.stage}: {report.failure.said}")
        records = {STAGE_OF_FILE[next(iter(r.record.files))]: r.record for r in report.results.values()}
        if report.record is not None:
            published = dict(report.record.stages)
            other = [stage.name for stage, made in records.items() if made.files != published[stage].files]
            if other:
                line = (
                    f"{other[0]}: the files that this run made differ from the published ones, which remain: settings "
                    "and code are the same; to replace them, raise the `version` of the class whose output changed"
                )
                warnings[line] = line
            records = published
        return cls(
            dataset=dataset,
            partition=report.partition,
            failures=tuple(failures),
            warnings=tuple(warnings.values()),
            other_load="" if not report.claimed_by else "published" if report.record is not None else "in progress",
            records=records,
            losses={} if report.record is None else report.record.losses,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEnd:
    """How a load ended, its partitions aside.

    Attributes:
        manifest: the last one; None if none was built.
        rebuilt: partitions that were published and ran again because of a missing file, with the file.
        refusal: why the remaining partitions were not run; empty if none was left out.
    """

    manifest: ManifestReport | None = None
    rebuilt: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class ClaimedWork:
    """The partitions of a load: those that it runs, and those that other loads have claimed, which it waits for.

    Attributes:
        state: the dataset as it was listed.
        keys: the partitions.
        claims: of the load, which has claimed no partition yet.
        first: the stage to start at, or an earlier one that is stale; None for the first stale one of what is pending.
        part: the slice of the partitions that `keys` are, to be claimed as such.
        waits: whether it waits for what others have claimed: else that is reported as claimed.
        report: is called with a line on what it waits for.
        sleep: waits some seconds.
    """

    state: DatasetState
    keys: Collection[str]
    claims: Claims
    first: Stage | None = None
    part: Slice | None = None
    waits: bool = True
    report: Callable[[str], object] = lambda _: None
    sleep: Callable[[float], None] = time.sleep

    def run(self, tasks: Callable[[list[Task]], Iterator[PartitionReport]]) -> Generator[PartitionReport, None, None]:
        """Runs the partitions, and yields the report of each as it ends, also of those that other loads published.

        Args:
            tasks: runs tasks, as `run_tasks`.

        Raises:
            SourceError: the storage cannot be read or written.
        """
        known = [key for key in self.keys if key in self.state.partitions]
        for key in self.keys:
            if key not in self.state.partitions:
                detail = "it is not registered any more"
                failure = StageFailure(partition=key, stage=RAW_SHARDS.name, detail=detail)
                yield PartitionReport(partition=key, failure=failure, is_refused=True)
        waiting = yield from self._take(known, tasks)
        if not self.waits:
            for key, claim in waiting.items():
                yield PartitionReport(partition=key, claimed_by=claim.place)
            return
        reported: dict[str, Claim] = {}
        pauses = [*STORAGE.waits()]
        while waiting:
            for claim in {claim.load: claim for claim in waiting.values()}.values():
                if claim.load not in reported:
                    reported[claim.load] = claim
                    number = sum(one.load == claim.load for one in waiting.values())
                    self.report(f"{counted(number, 'partition')} claimed by a load on {claim.place}: waiting for it")
            num_listed = 0 if len(waiting) <= _FEW else len(self.state.partitions)
            self.sleep(max(_LOOK_SECONDS, num_listed / _MAX_LISTED_PER_SECOND))
            try:
                live = self.claims.others()  # first: a load publishes a partition before it ends its claim
                published = self._published(waiting)
            except SourceError as error:
                if not STORAGE.may_pass(storage_fault(error)) or not pauses:
                    raise
                self.sleep(pauses.pop(0))
                continue
            pauses = [*STORAGE.waits()]
            for key, record in self.state.dataset.read_records((key, self.state.recipes[key]) for key in published):
                if record is not None:
                    yield PartitionReport(partition=key, record=record, claimed_by=waiting.pop(key).place)
            free = [key for key in waiting if not any(key in claim for claim in live)]
            for key in free:
                del waiting[key]
            if free:
                waiting |= yield from self._take(free, tasks, is_takeover=True)

    def _take(
        self, keys: list[str], tasks: Callable[[list[Task]], Iterator[PartitionReport]], *, is_takeover: bool = False
    ) -> Generator[PartitionReport, None, dict[str, Claim]]:
        """Claims partitions and runs those that no other load has claimed before; returns the others."""
        if not keys:
            return {}
        is_all = self.part is None and len(keys) == len(self.state.pending) and set(keys) == set(self.state.pending)
        before = self.claims.take(None if is_all or self.part is not None else keys, self.part)
        waiting = {key: claim for key in keys for claim in before if key in claim}
        try:
            yield from tasks(self._tasks([key for key in keys if key not in waiting], is_takeover))
        finally:
            self.claims.keep(())  # what it waits for is not its own
        return waiting

    def _tasks(self, keys: Iterable[str], is_takeover: bool) -> list[Task]:
        pending = {*self.state.pending, *self.state.pending_exports}
        return [
            Task(
                spec=self.state.dataset.spec,
                schema=self.state.schema,
                partition=self.state.partitions[key],
                first=given_start(self.first, is_pending=key in pending),
                earlier=None if is_takeover else self.state.earlier(key),  # the other load left an attempt
            )
            for key in keys
        ]

    def _published(self, keys: Iterable[str]) -> list[str]:
        """Returns those of some partitions that other loads have published."""
        store = self.state.dataset.store
        names = {key: self.state.dataset.record_name(key, self.state.recipes[key]) for key in keys}
        is_published = store.exists if len(names) <= _FEW else store.sizes(RECORDS).__contains__
        return [key for key, name in names.items() if is_published(name)]


class _Manifests:
    """Builds manifests of a long load in a thread, one at a time, while the load goes on.

    Args:
        dataset: the dataset's folder.
        built: called with each manifest, in that thread.
        report: called with the reason if one could not be built: another one follows.
        clock: seconds that pass.
    """

    def __init__(
        self,
        dataset: DatasetStore,
        built: Callable[[ManifestReport], object],
        report: Callable[[str], object],
        clock: Callable[[], float],
    ) -> None:
        self._dataset = DatasetStore(dataset.spec)  # it remembers files, and is not made for two threads
        self._built = built
        self._report = report
        self._clock = clock
        self.withdrawn: dict[str, str] = {}  # of the manifests, as of a `ManifestReport`
        self._last = clock()
        self._thread: threading.Thread | None = None
        self._read: dict[str, ManifestPartition] = {}

    def add(self, report: PartitionReport) -> None:
        """Takes what the record of a partition says, so that the next manifest does not read it."""
        if report.record is not None:
            self._read[report.partition] = report.record.listed

    def take(self) -> dict[str, ManifestPartition]:
        """Returns what was taken since the last time."""
        taken, self._read = self._read, {}
        return taken

    def build_if_due(self) -> None:
        """Begins a manifest if the last one is old."""
        is_building = self._thread is not None and self._thread.is_alive()
        if not is_building and self._clock() - self._last >= MANIFEST_SECONDS:
            self._last = self._clock()
            self._thread = threading.Thread(target=self._build, args=(self.take(),), name="manifest", daemon=True)
            self._thread.start()

    def _build(self, read: Mapping[str, ManifestPartition]) -> None:
        try:
            manifest = build_manifest(self._dataset, counts_duplicates=False, read=read)
            self.withdrawn |= manifest.withdrawn
            self._built(manifest)
        except (MmAssetsError, OSError) as error:
            self._report(f"the manifest is as before: {error}")

    def wait(self) -> None:
        """Waits for the manifest that is being built, if any."""
        if self._thread is not None:
            self._thread.join()


def load_partitions(
    state: DatasetState,
    keys: Iterable[str],
    *,
    claims: Claims,
    engine: Engine,
    first: Stage | None = None,
    part: Slice | None = None,
    waits: bool = True,
    ended: Callable[[PartitionReport], object] = lambda _: None,
    built: Callable[[ManifestReport], object] | None = None,
    report: Callable[[str], object] = lambda _: None,
    warned: Callable[[str], object] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> LoadEnd:
    """Runs partitions, builds the manifest of what is published and the indexes of its exports, and cleans up.

    Partitions that turn out to lack a published file run again, once, before the last manifest.

    Args:
        state: the dataset as it was listed.
        keys: the partitions; without any, only the manifest is built.
        claims: of the load, which has claimed no partition yet; its caller releases them.
        engine: where they run.
        first: the stage to start at, or an earlier one that is stale; None for the first stale one of what is pending.
        part: as of `ClaimedWork`.
        waits: likewise.
        ended: called with the report of each partition as it ends.
        built: called with each manifest, also in another thread; None builds none, and cleans nothing.
        report: called with a line on what the load waits for, or what it could not do for lack of which nothing failed.
        warned: called with each line about a partition that takes long.
        clock: seconds that pass.

    Raises:
        MmAssetsError: the dataset is not registered, its schema is damaged, or the storage cannot be read or written.
    """
    keys, dataset = list(keys), state.dataset
    timeout = dataset.spec.engine.timeout_seconds
    manifests = None if built is None else _Manifests(dataset, built, report, clock)

    def run(work: ClaimedWork) -> str:
        """Runs partitions; returns why the remaining ones were not run."""
        running = work.run(lambda tasks: run_tasks(engine, tasks, timeout=timeout, warned=warned))
        try:
            with closing(running) as reports:
                for one in reports:
                    ended(one)
                    if manifests is not None:
                        manifests.add(one)
                        manifests.build_if_due()
        except (CredentialsError, EngineLostError) as error:
            return masked_urls(str(error))
        return ""

    with rare_collections():
        refusal = ""
        if keys:
            refusal = run(ClaimedWork(state, keys, claims, first=first, part=part, waits=waits, report=report))
        if manifests is None or built is None:
            return LoadEnd(refusal=refusal)
        manifests.wait()
        manifest = None if keys else current_manifest(state)
        is_new = manifest is None
        manifest = manifest or build_manifest(dataset, read=manifests.take())
        if manifest.was_damaged:
            report("manifest.json was damaged: it was written again")
        pending = set(manifest.state.pending)
        withdrawn = {**manifests.withdrawn, **manifest.withdrawn}
        lost = sorted(key for key in withdrawn if key in pending and (part is None or key in part))
        rebuilt = {} if refusal else {key: withdrawn[key] for key in lost}
        if rebuilt:
            number, fault = counted(len(rebuilt), "published partition"), next(iter(rebuilt.values()))
            report(f"files of {number} are missing or damaged and are rebuilt: {fault}")
            refusal = run(ClaimedWork(manifest.state, rebuilt, claims, waits=waits, report=report))
            manifests.wait()
            manifest = build_manifest(dataset, read=manifests.take())
        built(manifest)
        if dataset.spec.exports:
            write_indexes(dataset, manifest.state.published())
        if is_new:
            _clean_if_due(dataset, manifest, report)
    return LoadEnd(manifest=manifest, rebuilt=rebuilt, refusal=refusal)


def _clean_if_due(dataset: DatasetStore, manifest: ManifestReport, report: Callable[[str], object]) -> None:
    """Deletes what nothing needs, unless that was done within a day; that it cannot is reported, and fails no load."""
    last = manifest.top.get(NOTE)
    # It lists every file, and those of a record that it deletes go a day later. A wrong clock only shifts that.
    if last is not None and time.time() - (last.modified or 0.0) < MIN_AGE_SECONDS:
        return
    try:
        found = clean(dataset)
    except ChangedError:  # another load cleans at this moment
        return
    except (MmAssetsError, OSError) as error:
        report(f"nothing was cleaned up: {first_line(error)}: `mm-assets clean` does")
        return
    if found.files:
        report(f"cleaned up {counted(len(found.files), 'file')} that nothing needs, {bytes_said(found.num_bytes)}")
