"""Partitions: one dynamic partition per shard, or per named group of shards, of a dataset."""

import dagster as dg

from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["job_name", "manifest_job_name", "shard_partitions"]


def shard_partitions(spec: DatasetSpec) -> dg.DynamicPartitionsDefinition:
    """The dataset's dynamic partitions; keys are added by the sensor, the schedule and `mm-assets register`."""
    return dg.DynamicPartitionsDefinition(name=f"{spec.name}_shards")


def job_name(spec: DatasetSpec) -> str:
    """Name of the job that takes one partition from shard to marker."""
    return f"{spec.name}_pack"


def manifest_job_name(spec: DatasetSpec) -> str:
    """Name of the job that makes the dataset's next manifest."""
    return f"{spec.name}_manifest"
