"""The unit of work: one partition from its shards to its marker, without Dagster, in any process.

The driver of a load calls `run_partition` in its workers; the assets of Dagster call the same stages one by one.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mm_assets.errors import MmAssetsError
from mm_assets.pipeline.chain import PACKED_STAGES, PUBLISHED, Stage
from mm_assets.pipeline.publish import publish
from mm_assets.pipeline.run import StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.stages import TABLE_STAGES, packed
from mm_assets.pipeline.store import DatasetStore, StageFailure

__all__ = ["PartitionReport", "run_partition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionReport:
    """What a run of one partition did; small, and can be pickled.

    Attributes:
        partition: the partition key.
        results: by the name of its stage, what each stage did that ran to its end.
        marker: as published, or None.
        failure: the error that ended the run, or None; a failed check is not one.
        seconds: wall clock.
        peak_memory: largest resident memory of this process so far, in bytes.
    """

    partition: str
    results: Mapping[str, StageResult]
    marker: Mapping[str, Any] | None
    failure: StageFailure | None
    seconds: float
    peak_memory: int

    @property
    def ok(self) -> bool:
        """Whether the partition was published."""
        return self.marker is not None


def run_partition(spec: DatasetSpec, key: str) -> PartitionReport:
    """Runs every stage of a registered partition with its checks, and publishes it if all of them passed.

    An error, also one of a user's code, ends the run and is stored as the partition's failure; it is not raised.
    """
    began = time.perf_counter()
    results: dict[str, StageResult] = {}
    marker: Mapping[str, Any] | None = None
    failure: StageFailure | None = None
    dataset = DatasetStore(spec)
    stage = next(iter(TABLE_STAGES))
    try:
        for stage, result in _made(dataset, key):
            results[stage.name] = result
        if all(result.passed for result in results.values()):
            stage = PUBLISHED
            marker = publish(dataset, key)
    except Exception as error:  # noqa: BLE001 - whatever fails the partition is stored, and the others go on
        failure = StageFailure.of(error, stage=_next_stage(results, stage).name, partition=key)
        with suppress(MmAssetsError, OSError):  # the storage may be what failed
            dataset.write_failure(failure)
    return PartitionReport(
        partition=key,
        results=results,
        marker=marker,
        failure=failure,
        seconds=time.perf_counter() - began,
        peak_memory=_peak_memory(),
    )


def _made(dataset: DatasetStore, key: str) -> Iterator[tuple[Stage, StageResult]]:
    """Each stage with its result as it ends, up to the first whose checks failed."""
    for stage, make in TABLE_STAGES.items():
        result = make(dataset, key)
        yield stage, result
        if not result.passed:
            return
    for form, result in packed(dataset, key).items():
        yield PACKED_STAGES[form], result


def _next_stage(results: Mapping[str, StageResult], last: Stage) -> Stage:
    """The stage that was at work when an error came."""
    stages = (*TABLE_STAGES, *PACKED_STAGES.values())
    return last if last is PUBLISHED else next((stage for stage in stages if stage.name not in results), last)


def _peak_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
