"""The unit of work: one partition from its shards to its marker, without Dagster, in any process.

The driver of a load calls `run_partition` in its workers; the assets of Dagster call the same stages one by one.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mm_assets.errors import MmAssetsError
from mm_assets.pipeline.chain import CHAIN, PACKED_STAGES, PUBLISHED, RAW_SHARDS, Stage
from mm_assets.pipeline.publish import publish
from mm_assets.pipeline.run import StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.stages import TABLE_STAGES, packed
from mm_assets.pipeline.store import DatasetStore, Partition, StageFailure
from mm_assets.pipeline.work import PartitionWork
from mm_assets.rows.schema import DatasetSchema

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


def run_partition(
    spec: DatasetSpec, partition: Partition, schema: DatasetSchema, *, first: Stage = RAW_SHARDS
) -> PartitionReport:
    """Runs the stages of a partition with their checks, and publishes it if all of them passed.

    What is registered is handed over, so that the cost does not depend on the number of partitions. An error, also one
    of a user's code, ends the run and is stored as the partition's failure; it is not raised.

    Args:
        spec: the declaration.
        partition: as registered.
        schema: the dataset's.
        first: the stage to start at: records and files of the stages before it are used as they are. `PUBLISHED` only
            writes the marker.
    """
    began = time.perf_counter()
    results: dict[str, StageResult] = {}
    marker: Mapping[str, Any] | None = None
    failure: StageFailure | None = None
    dataset, stage, left = DatasetStore(spec), first, CHAIN[CHAIN.index(first) :]
    try:
        with PartitionWork(dataset, partition, schema) as work:
            for stage in (stage for stage in TABLE_STAGES if stage in left):
                results[stage.name] = TABLE_STAGES[stage](work)
                if not results[stage.name].passed:
                    break
            else:
                formats = [form for form, packing in PACKED_STAGES.items() if packing in left]
                if formats:
                    stage = PACKED_STAGES[formats[0]]
                    results |= {PACKED_STAGES[form].name: made for form, made in packed(work, formats=formats).items()}
            if all(result.passed for result in results.values()):
                stage = PUBLISHED
                marker = publish(work)
    except Exception as error:  # noqa: BLE001 - whatever fails the partition is stored, and the others go on
        failure = StageFailure.of(error, stage=stage.name, partition=partition.key)
        with suppress(MmAssetsError, OSError):  # the storage may be what failed
            dataset.write_failure(failure)
    return PartitionReport(
        partition=partition.key,
        results=results,
        marker=marker,
        failure=failure,
        seconds=time.perf_counter() - began,
        peak_memory=_peak_memory(),
    )


def _peak_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
