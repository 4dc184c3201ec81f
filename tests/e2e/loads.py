"""Loads and jobs in this process, on the instance that $DAGSTER_HOME names."""

import itertools
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import dagster as dg

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import run_load
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.load.tasks import PartitionRun
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.leases import Leases


def run_partitions(work: Iterable[tuple[DatasetSpec, str]], *, num_processes: int = 1) -> list[PartitionRun]:
    """Loads of (spec, partition key) pairs, those of one spec together: each partition that ended."""
    ended: list[PartitionRun] = []
    for spec, pairs in itertools.groupby(work, operator.itemgetter(0)):
        with Processes(num_processes) as processes:
            run_load(spec, [key for _, key in pairs], engine=processes, observed=ended.append)
    return ended


def make_manifest(spec: DatasetSpec) -> PartitionRun:
    """A load of no partition."""
    with Processes() as processes:
        return run_load(spec, [], engine=processes)


@contextmanager
def leased(spec: DatasetSpec, partition: str) -> Iterator[None]:
    """Another run, of this process, works on a partition."""
    with Leases(DatasetStore(spec), "another") as leases, leases.held(partition):
        yield


def pack(instance: dg.DagsterInstance, spec: DatasetSpec, partition: str) -> dg.ExecuteInProcessResult:
    """A run of the job of one partition, as the UI starts it."""
    job = build_definitions(spec).resolve_job_def(f"{spec.name}_pack")
    return job.execute_in_process(instance=instance, partition_key=partition, raise_on_error=False)
