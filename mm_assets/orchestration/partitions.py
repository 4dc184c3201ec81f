"""Partitions: one dynamic partition per shard, or per named group of shards, of a dataset."""

from collections.abc import Iterable

import dagster as dg

from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import Partition

__all__ = ["add_partitions", "job_name", "manifest_job_name", "shard_partitions"]


def shard_partitions(spec: DatasetSpec) -> dg.DynamicPartitionsDefinition:
    """The dataset's dynamic partitions; keys are added by the sensor, the schedule and `mm-assets register`."""
    return dg.DynamicPartitionsDefinition(name=f"{spec.name}_shards")


def add_partitions(instance: dg.DagsterInstance, spec: DatasetSpec, partitions: Iterable[Partition]) -> None:
    """Adds registered partitions to the instance's dynamic partitions."""
    name = shard_partitions(spec).name or ""
    known = set(instance.get_dynamic_partitions(name))  # asked for first: a statement takes a limited number of keys
    if new := [partition.key for partition in partitions if partition.key not in known]:
        instance.add_dynamic_partitions(name, new)


def job_name(spec: DatasetSpec) -> str:
    """Name of the job that takes one partition from shard to marker."""
    return f"{spec.name}_pack"


def manifest_job_name(spec: DatasetSpec) -> str:
    """Name of the job that makes the dataset's next manifest."""
    return f"{spec.name}_manifest"
