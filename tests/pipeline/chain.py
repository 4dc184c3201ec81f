"""Drives the library's stages over shards, in the order of the assets and without Dagster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.partition.stages import StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import Present, pending_partitions

P = ParamSpec("P")
R = TypeVar("R")


def declare(root: Path | str, shards: object, **settings: Any) -> DatasetSpec:
    """A dataset as YAML would declare it."""
    config = {"name": "data", "shards": str(shards), "root": str(root), "settle_seconds": 0, **settings}
    return DatasetSpec.from_config(config, where="defs.yaml")


def at_work(
    make: Callable[Concatenate[PartitionWork, P], R],
    dataset: DatasetStore,
    key: str,
    *args: P.args,
    **options: P.kwargs,
) -> R:
    """What one stage's function returns of a registered partition."""
    with PartitionWork.registered(dataset, key) as work:
        return make(work, *args, **options)


def marker_of(dataset: DatasetStore, key: str) -> Any:
    """The marker of a partition, or None."""
    return Present(dataset).markers().get(key)


def marker_name(dataset: DatasetStore, key: str) -> str:
    """Name of the marker that a registered partition has now, or would have."""
    with PartitionWork.registered(dataset, key) as work:
        return work.marker_name


def run_partition(dataset: DatasetStore, key: str) -> dict[str, StageResult]:
    """Every stage of one partition, each of whose checks has to pass or to warn; then its marker."""
    results = {stage.name: at_work(make, dataset, key) for stage, make in stages.TABLE_STAGES.items()}
    results |= at_work(stages.packed, dataset, key)
    for name, result in results.items():
        failed = [(o.name, o.violations) for o in result.outcomes if o.stops]
        assert not failed, f"{key}, {name}: {failed}"
        assert result.outcomes
    at_work(publish.publish, dataset, key)
    return results


def run_chain(spec: DatasetSpec) -> tuple[DatasetStore, dict[str, dict[str, StageResult]]]:
    """Registers, runs every partition and makes the manifest, in which all of them are."""
    dataset = DatasetStore(spec)
    register(dataset)
    results = {key: run_partition(dataset, key) for key in dataset.partitions()}
    report = manifests.build_manifest(dataset)
    assert not report.left_out
    assert pending_partitions(dataset) == []
    return dataset, results
