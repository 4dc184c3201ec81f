"""Names in Dagster: a dataset's assets, jobs and partitions, one per shard or per named group of shards."""

from collections.abc import Iterable, Mapping

import dagster as dg
from sqlalchemy.exc import IntegrityError

from mm_assets.pipeline.chain import MANIFEST, Stage
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.records import Partition

__all__ = [
    "add_partitions",
    "asset_key",
    "check_job_name",
    "code_version",
    "job_name",
    "load_job_name",
    "load_op_name",
    "manifest_job_name",
    "shard_partitions",
    "shards_key",
]


def asset_key(spec: DatasetSpec, stage: Stage) -> dg.AssetKey:
    """The asset of a stage."""
    return dg.AssetKey([spec.name, stage.name])


def shards_key(spec: DatasetSpec) -> dg.AssetKey:
    """The asset of the shards, which Dagster does not make."""
    return dg.AssetKey([spec.name, "shards"])


def code_version(
    spec: DatasetSpec, stage: Stage, made_with: Mapping[Stage, Mapping[str, str]] | None = None
) -> str | None:
    """What Dagster compares to tell whether an asset is stale; None for the manifest, which follows from records.

    Args:
        spec: the declaration.
        stage: the asset's.
        made_with: of the stages, as recorded; None takes what they would be made with now.
    """
    if stage is MANIFEST:
        return None
    return (stage.digest(spec) if made_with is None else stage.recorded_digest(made_with))[:16]


def shard_partitions(spec: DatasetSpec) -> dg.DynamicPartitionsDefinition:
    """The dataset's dynamic partitions; keys are added by the sensor, the schedule and `mm-assets register`."""
    return dg.DynamicPartitionsDefinition(name=f"{spec.name}_shards")


def add_partitions(instance: dg.DagsterInstance, spec: DatasetSpec, partitions: Iterable[Partition]) -> list[str]:
    """Adds registered partitions to the instance's dynamic partitions; returns the keys of the new ones."""
    name, keys = shard_partitions(spec).name or "", [partition.key for partition in partitions]
    while True:
        known = set(instance.get_dynamic_partitions(name))  # asked first: a statement takes a limited number of keys
        new = [key for key in keys if key not in known]
        try:
            if new:
                instance.add_dynamic_partitions(name, new)
        except IntegrityError:  # another command added some of them since, and none of these was added
            if known.issuperset(instance.get_dynamic_partitions(name)):
                raise
        else:
            return new


def job_name(spec: DatasetSpec) -> str:
    """Name of the job that takes one partition from its shards to its record."""
    return f"{spec.name}_pack"


def check_job_name(spec: DatasetSpec) -> str:
    """Name of the job that runs the checks of one partition again."""
    return f"{spec.name}_check"


def load_job_name(spec: DatasetSpec) -> str:
    """Name of the job that takes many partitions from their shards to their records, and builds the manifest."""
    return f"{spec.name}_load"


def load_op_name(spec: DatasetSpec) -> str:
    """Name of the only step of that job."""
    return f"{spec.name}__load_partitions"


def manifest_job_name(spec: DatasetSpec) -> str:
    """Name of the job that makes the dataset's next manifest."""
    return f"{spec.name}_manifest"
