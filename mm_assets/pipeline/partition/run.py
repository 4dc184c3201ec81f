"""The unit of work: one partition from its shards to its marker, without Dagster, in any process.

The driver of a load follows `partition_steps` in its workers; the assets of Dagster call the same stages one by one.
"""

from __future__ import annotations

import gc
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_assets.errors import MmAssetsError, SchemaMismatchError, temporary_disk_named
from mm_assets.pipeline.chain import (
    CHAIN,
    MATERIALIZED_ROWS,
    PUBLISHED,
    RAW_SHARDS,
    Stage,
    packed_stages,
    recorded_stages,
)
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.partition.publish import publish
from mm_assets.pipeline.partition.stage_run import StageResult
from mm_assets.pipeline.partition.stages import TABLE_STAGES, packed, streamed_rows
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Partition, StageFailure
from mm_assets.pipeline.state.staleness import first_stale, stage_fault
from mm_assets.rows.schema import DatasetSchema
from mm_assets.storage.staged import StagedStore

__all__ = ["PartitionReport", "failed_report", "partition_steps", "rare_collections", "run_partition"]

# New objects after which Python looks for reference cycles. A block of small rows is some hundred thousand objects,
# which the default of 700 visits again and again; the stages leave hardly any cycles, and none that holds media.
GC_THRESHOLD = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionReport:
    """What a run of one partition did; small, and can be pickled.

    Attributes:
        partition: the partition key.
        results: by the name of its stage, what each stage did that ran to its end.
        marker: as published, or None.
        failure: the error that ended the run, or None; a failed check is not one.
        is_refused: whether it was not run: another process works on it, or it is not registered any more. `failure`
            says why, and nothing of the partition's own state.
        retry_after: of one that was refused, seconds after which the right of the other process ends unless it is
            renewed; None where that process is known to work on.
        seconds: wall clock.
        peak_memory: largest resident memory of this process so far, in bytes.
    """

    partition: str
    results: Mapping[str, StageResult]
    marker: Mapping[str, Any] | None
    failure: StageFailure | None
    seconds: float
    peak_memory: int
    is_refused: bool = False
    retry_after: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the partition was published."""
        return self.marker is not None


@contextmanager
def rare_collections() -> Iterator[None]:
    """Lets Python look for reference cycles less often in the block; the process may be a user's, so only there."""
    before = gc.get_threshold()
    if before[0]:  # 0 is never
        gc.set_threshold(max(before[0], GC_THRESHOLD), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run_partition(
    spec: DatasetSpec,
    partition: Partition,
    schema: DatasetSchema,
    *,
    first: Stage | None = None,
    markers: Sequence[str] | None = None,
    scratch: Path | None = None,
) -> PartitionReport:
    """Runs a partition as `partition_steps`, to its end; the report."""
    *_, report = partition_steps(spec, partition, schema, first=first, markers=markers, scratch=scratch)
    assert isinstance(report, PartitionReport)
    return report


def partition_steps(
    spec: DatasetSpec,
    partition: Partition,
    schema: DatasetSchema,
    *,
    first: Stage | None = None,
    markers: Sequence[str] | None = None,
    scratch: Path | None = None,
) -> Iterator[Stage | PartitionReport]:
    """Runs the stages of a partition with their checks, and publishes it if all of them passed.

    What is registered is handed over, so that the cost does not depend on the number of partitions. A shard in an
    object store is fetched once, whole; files for an object store are made in local scratch and uploaded together, the
    records after them and the marker last. An error, also one of a user's code, ends the run and is stored as the
    partition's failure; it is not raised.

    Args:
        spec: the declaration.
        partition: as registered.
        schema: the dataset's.
        first: the stage to start at, or an earlier one whose files are not what they would be now; by default the
            first of these. Records and files of the stages before it are used as they are. `PUBLISHED` only writes the
            marker.
        markers: names of its markers, as `DatasetStore.marker_names` gives them; None lists the markers of all.
        scratch: where a folder for remote shards and files is made, and removed at the end; by default the system's
            place for temporary files.

    Yields:
        Each stage before its work, of the packed ones the first for all of them; then the report.
    """
    began = time.perf_counter()
    failure: StageFailure | None = None
    run = _PartitionRun(DatasetStore(spec), partition, schema, first, markers)
    try:
        with temporary_disk_named() if scratch is None else nullcontext():
            made = tempfile.TemporaryDirectory(prefix="mm-assets-", dir=scratch)
        with rare_collections(), made as folder:
            yield from run.steps(Path(folder))
    except Exception as error:  # noqa: BLE001 - whatever fails the partition is stored, and the others go on
        failure = StageFailure.of(error, stage=run.stage.name, partition=partition.key)
        with suppress(MmAssetsError, OSError):  # the storage may be what failed
            run.dataset.write_failure(failure)
    yield PartitionReport(
        partition=partition.key,
        results=run.results,
        marker=run.marker,
        failure=failure,
        seconds=time.perf_counter() - began,
        peak_memory=_peak_memory(),
    )


class _PartitionRun:
    """A run of one partition: `stage` is at work, `results` are of those that ended, `marker` is what was published."""

    def __init__(
        self,
        dataset: DatasetStore,
        partition: Partition,
        schema: DatasetSchema,
        first: Stage | None,
        markers: Sequence[str] | None,
    ) -> None:
        self.dataset = dataset
        self.partition = partition
        self.schema = schema
        self.stage = first or RAW_SHARDS
        self.results: dict[str, StageResult] = {}
        self.marker: Mapping[str, Any] | None = None
        self._first = first
        self._markers = markers

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results.values())

    def steps(self, folder: Path) -> Iterator[Stage]:
        """Publishes the partition unless a check fails; errors are raised."""
        store = self.dataset.store
        staged = None if store.is_local else StagedStore(store, folder / "files")
        dataset = self.dataset if staged is None else self.dataset.over(staged)
        with PartitionWork(dataset, self.partition, self.schema, markers=self._markers, scratch=folder) as work:
            self.stage = _start(work, self._first)
            try:
                yield from self._make(work)
            except Exception:  # of any kind, a user's code among them; raised again below
                with suppress(MmAssetsError, OSError):  # what was made is not needed, but says what was lost
                    self._upload(work, staged)
                raise
            self._upload(work, staged)
            if self.passed:
                yield self._at(PUBLISHED)
                self.marker = publish(work)

    def _at(self, stage: Stage) -> Stage:
        self.stage = stage
        return stage

    def _make(self, work: PartitionWork) -> Iterator[Stage]:
        left = CHAIN[CHAIN.index(self.stage) :]
        for stage in (stage for stage in TABLE_STAGES if stage in left):
            if not self.passed or stage.name in self.results:
                continue
            yield self._at(stage)
            if stage is MATERIALIZED_ROWS and stage.tables[0].has_references(work.spec):
                made = streamed_rows(work, self._at)
                self.results |= {done.name: result for done, result in made.items()}
            else:
                self.results[stage.name] = TABLE_STAGES[stage](work)
        stages = packed_stages(work.spec)
        formats = [form for form, stage in stages.items() if stage in left]
        if self._first is None and self.stage.packed_format is not None:  # a format may have been added alone
            formats = [form for form in formats if not _is_present(work, stages[form])]
        if formats and self.passed:
            yield self._at(stages[formats[0]])
            results = packed(work, formats=formats)
            self.results |= {stages[form].name: result for form, result in results.items()}

    def _upload(self, work: PartitionWork, staged: StagedStore | None) -> None:
        if staged is not None:
            records = self.dataset.records_name(self.partition.key)
            if work.has_replaced:  # the records in the object store are of tables that are replaced now
                staged.delete(records)
            staged.upload(last=[records])


def failed_report(
    failure: StageFailure, *, is_refused: bool = False, retry_after: float | None = None
) -> PartitionReport:
    """The report of a partition that failed without one: its process died, or it could not be started."""
    return PartitionReport(
        partition=failure.partition,
        results={},
        marker=None,
        failure=failure,
        seconds=0.0,
        peak_memory=0,
        is_refused=is_refused,
        retry_after=retry_after,
    )


def _start(work: PartitionWork, wanted: Stage | None) -> Stage:
    """The stage to start at: as wanted, or an earlier one whose files are not what they would be now."""
    if wanted is RAW_SHARDS:
        return RAW_SHARDS
    try:
        records = work.records
    except SchemaMismatchError:
        return RAW_SHARDS
    if not records:
        return RAW_SHARDS
    made_with = {stage: stage.made_with(work.spec, work.schema) for stage in recorded_stages(work.spec)}
    failure, size = work.dataset.failure(work.key), work.dataset.store.size
    found = first_stale(work.dataset, work.partition, records, made_with, size=size, failure=failure)
    return found.first if wanted is None else min(found.first, wanted, key=CHAIN.index)


def _is_present(work: PartitionWork, stage: Stage) -> bool:
    """Whether the files of a stage are what they would be now, its upstream aside."""
    made_with, size = stage.made_with(work.spec, work.schema), work.dataset.store.size
    return stage_fault(stage, work.partition, work.records, made_with, size=size) is None


def _peak_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
