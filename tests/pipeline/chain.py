"""Drives the library's stages over shards, in the order of the assets and without Dagster."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from mm_assets.dataset.add_stream import Values
from mm_assets.fields import Field
from mm_assets.pipeline.chain import STAGE_OF_FILE, Stage
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.partition.run import PartitionReport, partition_steps
from mm_assets.pipeline.partition.stages import StageResult
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.added_streams import NewStream, PartitionAdded, add_to_dataset
from mm_assets.pipeline.state.folder import MIN_AGE_SECONDS, DatasetStore
from mm_assets.pipeline.state.records import Partition, Record, StageRecord
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState, pending_partitions
from mm_assets.rows.schema import DatasetSchema

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


def record_of(dataset: DatasetStore, key: str) -> Record | None:
    """The record of a partition with its present settings, or None."""
    return dataset.record(key, DatasetState(dataset).recipes[key])


def record_name(dataset: DatasetStore, key: str) -> str:
    """Name of the record that a registered partition has now, or would have."""
    return dataset.record_name(key, DatasetState(dataset).recipes[key])


def stages_of(dataset: DatasetStore, key: str) -> Mapping[Stage, StageRecord]:
    """What the stages of a partition recorded last: of its attempt, or of its record."""
    attempt = dataset.attempt(key)
    if attempt is not None:
        return attempt.stages
    record = record_of(dataset, key)
    return {} if record is None else record.stages


def table_name(dataset: DatasetStore, table: str, key: str) -> str:
    """Name of a partition's file of a table."""
    return stages_of(dataset, key)[STAGE_OF_FILE[table]].files[table].path


def run_partition(dataset: DatasetStore, key: str) -> dict[str, StageResult]:
    """Every stage of one partition, each of whose checks has to pass or to warn; then its record."""
    results = {stage.name: at_work(make, dataset, key) for stage, make in stages.TABLE_STAGES.items()}
    results |= at_work(stages.packed, dataset, key)
    for name, result in results.items():
        failed = [(o.name, o.violations) for o in result.outcomes if o.stops]
        assert not failed, f"{key}, {name}: {failed}"
        assert result.outcomes
    at_work(publish.publish, dataset, key)
    return results


def run_once(spec: DatasetSpec, partition: Partition, schema: DatasetSchema, **options: Any) -> PartitionReport:
    """Runs a partition as a worker of a load does, and returns its report."""
    *_, report = partition_steps(spec, partition, schema, **options)
    assert isinstance(report, PartitionReport)
    return report


def run_chain(spec: DatasetSpec) -> tuple[DatasetStore, dict[str, dict[str, StageResult]]]:
    """Registers, runs every partition and makes the manifest, in which all of them are."""
    dataset = DatasetStore(spec)
    register(dataset)
    results = {key: run_partition(dataset, key) for key in dataset.partitions()}
    report = manifests.build_manifest(dataset)
    assert not report.left_out
    assert pending_partitions(dataset) == []
    return dataset, results


def let_a_day_go_by(dataset: DatasetStore) -> None:
    """Makes the files of a dataset in a local folder a day older, and what `clean` noted."""
    seconds = MIN_AGE_SECONDS + 1
    note = Path(dataset.store.path_of("clean.json"))
    if note.exists():
        noted = json.loads(note.read_text())
        for loss in noted["losses"]:
            loss["at"] = (note.stat().st_mtime if loss["at"] is None else loss["at"]) - seconds
        note.write_text(json.dumps(noted))
    for path in Path(dataset.store.path_of("")).rglob("*.*"):
        before = path.stat().st_mtime - seconds
        os.utime(path, (before, before))


def values_of(numbers: Mapping[str, Any]) -> Values:
    """Values by sample id, as a table of them would be."""
    return Values("table", {key: row for row, key in enumerate(numbers)}, list(numbers.values()), lambda item: item)


def add_stream(
    dataset: DatasetStore, name: str, field: Field, numbers: Mapping[str, Any], **options: Any
) -> tuple[list[PartitionAdded], manifests.ManifestReport]:
    """Adds a stream as the command does: its files, and the manifest that lists them."""
    done = list(add_to_dataset(dataset, name, field, values_of(numbers), **options))
    return done, manifests.build_manifest(dataset, stream=NewStream(name=name, field=field, partitions=done))
