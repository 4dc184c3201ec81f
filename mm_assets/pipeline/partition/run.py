"""The unit of work: one partition from its shards to its record, without Dagster, in any process.

The driver of a load follows `partition_steps` in its workers; the assets of Dagster call the same stages one by one.
"""

from __future__ import annotations

import gc
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mm_assets.errors import MmAssetsError, temporary_disk_named
from mm_assets.pipeline.chain import (
    CHAIN,
    FILTERED_ROWS,
    MATERIALIZED_ROWS,
    PUBLISHED,
    RAW_SHARDS,
    Stage,
    packed_stages,
)
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.partition.publish import publish
from mm_assets.pipeline.partition.stage_run import StageResult
from mm_assets.pipeline.partition.stages import TABLE_STAGES, packed, streamed_rows
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.exports import PartitionExport, export_partition
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Earlier, Partition, Record, StageFailure, StageRecord
from mm_assets.rows.schema import DatasetSchema
from mm_assets.storage.staged import StagedStore

__all__ = ["PartitionReport", "partition_steps", "rare_collections"]

# New objects after which Python looks for reference cycles. A block of small rows is some hundred thousand objects,
# which the default of 700 visits again and again; the stages leave hardly any cycles, and none that holds media.
GC_THRESHOLD = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionReport:
    """What a run of one partition did, or why there was none; small, and can be pickled.

    Attributes:
        partition: the partition key.
        results: by the name of its stage, what each stage did that ran to its end.
        record: as published, or None.
        exports: by its asset, each export of the partition that is complete.
        failure: the error that ended the run, or None; a failed check is not one. Of a published partition, the first
            error of an export.
        is_refused: whether it was not run, since it is not registered any more; `failure` says so.
        claimed_by: host and process of the load that works on it, or has published it; "another load" if that one
            published it while this one ran it; empty if this one published it, or failed.
        seconds: wall clock.
        peak_memory: largest resident memory of this process so far, in bytes.
    """

    partition: str
    results: Mapping[str, StageResult] = field(default_factory=dict)
    record: Record | None = None
    exports: Mapping[str, PartitionExport] = field(default_factory=dict)
    failure: StageFailure | None = None
    seconds: float = 0.0
    peak_memory: int = 0
    is_refused: bool = False
    claimed_by: str = ""

    @property
    def ok(self) -> bool:
        """Whether the partition was published, or left to another load."""
        return self.record is not None or bool(self.claimed_by)

    @property
    def end(self) -> StageFailure | None:
        """What ended a partition that was not published: an error, or the checks of a stage."""
        checks = (result.record.failure for result in self.results.values())
        return self.failure or next(filter(None, checks), None)


class _RareCollections:
    """The blocks of `rare_collections` that have not ended, of all threads.

    Attributes:
        lock: for the others.
        num_blocks: how many there are.
        before: the threshold as the first of them found it.
    """

    lock = threading.Lock()
    num_blocks = 0
    before = (0, 0, 0)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Lets Python look for reference cycles less often in the block; the process may be a user's, so only there.

    Blocks of several threads, or of generators that are not finished, end in any order.
    """
    with _RareCollections.lock:
        if not _RareCollections.num_blocks:
            _RareCollections.before = first, *others = gc.get_threshold()
            if first:  # 0 is never
                gc.set_threshold(max(first, GC_THRESHOLD), *others)
        _RareCollections.num_blocks += 1
    try:
        yield
    finally:
        with _RareCollections.lock:
            _RareCollections.num_blocks -= 1
            if not _RareCollections.num_blocks:
                gc.set_threshold(*_RareCollections.before)


def partition_steps(
    spec: DatasetSpec,
    partition: Partition,
    schema: DatasetSchema,
    *,
    first: Stage | None = None,
    earlier: Earlier | None = None,
) -> Iterator[str | PartitionReport]:
    """Runs the stages of a partition with their checks, publishes it if all of them passed, and exports it.

    What is registered is handed over, so that the cost does not depend on the number of partitions. A shard in an
    object store is fetched once, whole, to the system's place for temporary files; files for an object store are made
    there, and uploaded together, the record last. An error, also one of a user's code, ends the run and is stored in
    the partition's attempt; it is not raised.

    Args:
        spec: the declaration.
        partition: as registered.
        schema: the dataset's.
        first: the stage to start at, or an earlier one that is stale; by default the first stale one. The stages before
            it are reused. `PUBLISHED` only creates the record.
        earlier: what earlier runs left; None lists that.

    Yields:
        The name of each stage before its work; of those that one pass makes the first: of the packed ones, and
        `materialized_rows` for its filters too. Then the report.
    """
    began = time.perf_counter()
    failure: StageFailure | None = None
    run = _PartitionRun(DatasetStore(spec), partition, schema, first, earlier, stage=first or RAW_SHARDS)
    try:
        with temporary_disk_named():
            folder = tempfile.TemporaryDirectory(prefix="mm-assets-")
        with rare_collections(), folder as path:
            for stage in run.steps(Path(path)):
                yield stage.name
    except Exception as error:  # noqa: BLE001 - whatever fails the partition is stored, and the others go on
        failure = StageFailure.of(error, stage=run.stage.name, partition=partition.key)
        run.dataset.write_failure(failure, run.completed)
    exports: dict[str, PartitionExport] = {}
    if (record := run.record) is not None:
        for options in spec.exports:
            yield options.asset
            try:
                exports[options.asset] = export_partition(run.dataset, options, record.listed)
            except Exception as error:  # noqa: BLE001  # whatever fails an export is reported, and the other exports still run
                failure = failure or StageFailure.of(error, stage=options.asset, partition=partition.key)
    yield PartitionReport(
        partition=partition.key,
        results=run.results,
        record=run.record,
        exports=exports,
        failure=failure,
        claimed_by="another load" if run.is_second else "",
        seconds=time.perf_counter() - began,
        peak_memory=_peak_memory(),
    )


@dataclass(slots=True)
class _PartitionRun:
    """A run of one partition.

    Attributes:
        dataset: the dataset's folder.
        partition: as registered.
        schema: the dataset's.
        first: as of `partition_steps`.
        earlier: likewise.
        stage: the one that runs.
        results: of the stages that ended.
        completed: the records of the stages whose files are in the dataset's folder; None until they are uploaded.
        record: as published.
        is_second: whether another load published the partition while this run made the same.
    """

    dataset: DatasetStore
    partition: Partition
    schema: DatasetSchema
    first: Stage | None
    earlier: Earlier | None
    stage: Stage = RAW_SHARDS
    results: dict[str, StageResult] = field(default_factory=dict)
    completed: Mapping[Stage, StageRecord] | None = None
    record: Record | None = None
    is_second: bool = False

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results.values())

    def steps(self, folder: Path) -> Iterator[Stage]:
        """Publishes the partition unless a check fails; errors are raised."""
        store = self.dataset.store
        staged = None if store.is_local else StagedStore(store, folder / "files")
        dataset = self.dataset if staged is None else self.dataset.over(staged)
        with PartitionWork(dataset, self.partition, self.schema, earlier=self.earlier, scratch=folder) as work:
            self.stage = work.stale.first
            if self.first is not None and CHAIN.index(self.first) < CHAIN.index(self.stage):
                self.stage = self.first
                work.restart(self.first)
            if work.stages and not work.earlier.has_attempt:
                # From now on it names the files that are reused: `clean` leaves them.
                work.write_attempt()
            try:
                yield from self._run_stages(work)
            except Exception:  # a filter may raise anything: what was completed is kept, and the error raised
                with suppress(MmAssetsError, OSError):
                    self._keep(work, staged)
                raise
            self._keep(work, staged)
            if not self.passed:
                work.write_attempt()
                return
            yield self._at(PUBLISHED)
            self.record, is_first = publish(work)
            self.is_second = not is_first and work.recipe not in work.earlier.recipes

    def _keep(self, work: PartitionWork, staged: StagedStore | None) -> None:
        """Uploads what was made, also by a run that failed: its next one reuses that, and it says what was lost."""
        if staged is not None:
            staged.upload()
        self.completed = work.stages

    def _at(self, stage: Stage) -> Stage:
        self.stage = stage
        return stage

    def _run_stages(self, work: PartitionWork) -> Iterator[Stage]:
        remaining = CHAIN[CHAIN.index(self.stage) :]
        for stage in (stage for stage in TABLE_STAGES if stage in remaining):
            if not self.passed or stage.name in self.results:
                continue
            yield self._at(stage)
            if stage is MATERIALIZED_ROWS and work.spec.materialize == "read":
                for done, result in streamed_rows(work, self._at):
                    self.results[done.name] = result
                    if done is MATERIALIZED_ROWS and result.passed:
                        yield self._at(FILTERED_ROWS)
            else:
                self.results[stage.name] = TABLE_STAGES[stage](work)
        stages = packed_stages(work.spec)
        formats = [form for form, stage in stages.items() if stage in remaining and stage not in work.stages]
        if formats and self.passed:
            yield self._at(stages[formats[0]])
            results = packed(work, formats=formats)
            self.results |= {stages[form].name: result for form, result in results.items()}


def _peak_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
