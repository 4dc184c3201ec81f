"""What runs of a dataset there are: runs of one partition must not overlap."""

import hashlib

import dagster as dg

from mm_assets.etl.dataset_store import Partition
from mm_assets.orchestration.partitions import job_name
from mm_assets.spec import DatasetSpec

__all__ = ["PARTITION_TAG", "busy_partitions", "is_running", "partition_mark"]

PARTITION_TAG = "dagster/partition"
_UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def busy_partitions(instance: dg.DagsterInstance, spec: DatasetSpec) -> set[str]:
    """Keys that a run of the dataset's pack job is working on or waiting for."""
    runs = instance.get_runs(dg.RunsFilter(job_name=job_name(spec), statuses=_UNFINISHED))
    return {run.tags[PARTITION_TAG] for run in runs if PARTITION_TAG in run.tags}


def is_running(instance: dg.DagsterInstance, job: str) -> bool:
    """Whether a run of the job has not finished."""
    return bool(instance.get_runs(dg.RunsFilter(job_name=job, statuses=_UNFINISHED), limit=1))


def partition_mark(spec: DatasetSpec, partition: Partition) -> str:
    """Changes whenever a shard of the partition, or the configuration, does; a run key must, because it is used up."""
    return hashlib.sha256(f"{partition.mark}|{spec.digest('packed')}".encode()).hexdigest()[:16]
