"""The job `<dataset>_check`: runs the checks of the files of a partition again, and makes nothing.

It is a job of one step, since Dagster gives no partitions to a job that has checks alone.
"""

import dagster as dg

from mm_assets.errors import MmAssetsError
from mm_assets.orchestration.event_log import RunEvents
from mm_assets.orchestration.events import Checked, Event
from mm_assets.orchestration.jobs import partition_executor
from mm_assets.orchestration.partitions import check_job_name, shard_partitions
from mm_assets.orchestration.report import check_results, failed_observation, failed_said
from mm_assets.orchestration.resources import open_dataset, resource_key
from mm_assets.orchestration.rollup import rollup_of_records
from mm_assets.orchestration.runs import exclusive_step, tag_process
from mm_assets.pipeline.chain import recorded_stages
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import StageFailure

__all__ = ["build_check_job"]


def build_check_job(spec: DatasetSpec) -> dg.JobDefinition:
    """The job; with `checks: rollup` it has no partitions, and sums up what their records say."""

    @dg.op(name=f"{spec.name}__check_partition", pool=spec.pool, required_resource_keys={resource_key(spec)})
    def check_partition(context: dg.OpExecutionContext) -> None:
        dataset = open_dataset(context, spec)
        if spec.checks == "rollup":
            tag_process(context)
            results = rollup_of_records(dataset, recorded_stages(spec))
            RunEvents.of(context, spec).store([Checked(result, None) for result in results])
            return
        with exclusive_step(context, dataset):
            _check(context, dataset)

    about = f" {spec.description}" if spec.description else ""
    scope = "the partitions" if spec.checks == "rollup" else "one partition"

    @dg.job(
        name=check_job_name(spec),
        description=f"The checks of {scope} of {spec.name}, on the files that are there.{about}",
        partitions_def=None if spec.checks == "rollup" else shard_partitions(spec),
        executor_def=dg.in_process_executor if spec.checks == "rollup" else partition_executor(spec),
    )
    def job() -> None:
        check_partition()

    return job


def _check(context: dg.OpExecutionContext, dataset: DatasetStore) -> None:
    """Checks every stage of the run's partition, also after one that failed.

    Raises:
        dg.Failure: a check failed that stops a partition, or a stage could not be checked.
    """
    spec, key = dataset.spec, context.partition_key
    events: list[Event] = []
    failed: list[StageFailure] = []
    for stage in recorded_stages(spec):
        try:
            with PartitionWork.registered(dataset, key) as work:
                result = stages.recheck(work, stage)
        except MmAssetsError as error:
            failed.append(StageFailure.of(error, stage=stage.name, partition=key))
            continue
        events += [Checked(found, key) for found in check_results(spec, result)]
        if (failure := result.record.failure) is not None:
            failed.append(failure)
    RunEvents.of(context, spec).store([*events, *(failed_observation(spec, failure) for failure in failed)])
    if failed:
        description = "\n".join(failed_said(spec, failure) for failure in failed)
        raise dg.Failure(description=description, allow_retries=False)
