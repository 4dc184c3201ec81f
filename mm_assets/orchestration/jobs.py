"""Jobs: `<dataset>_pack` runs one partition, from its shards to its record; `<dataset>_manifest` builds a version."""

from collections.abc import Iterable, Iterator
from typing import Any

import dagster as dg

from mm_assets.orchestration.partitions import asset_key, job_name, manifest_job_name
from mm_assets.orchestration.runs import expect_partition
from mm_assets.pipeline.chain import MANIFEST, index_stage
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["build_jobs", "partition_executor"]


def build_jobs(spec: DatasetSpec, assets: Iterable[dg.AssetsDefinition]) -> list[Any]:  # the type is not public
    """Both jobs, run in one process: a subprocess per step costs seconds and the steps are a chain anyway.

    Assets are selected by key, the only attribute that a declaration's `post_processing` cannot change. Dagster refuses
    a selected key that is missing, so neither job is ever without steps.
    """
    executors = {job_name(spec): partition_executor(spec), manifest_job_name(spec): dg.in_process_executor}
    manifest = dg.AssetKey([spec.name, MANIFEST.name])
    of_dataset = {manifest, *(asset_key(spec, index_stage(options)) for options in spec.indexes)}
    partitioned = [key for asset in assets for key in asset.keys if key not in of_dataset]
    about = f" {spec.description}" if spec.description else ""
    jobs = (
        (job_name(spec), partitioned, f"One partition of {spec.name}, from shards to record."),
        (manifest_job_name(spec), [manifest], f"The next version of {spec.name}: lists the published partitions."),
    )
    return [
        dg.define_asset_job(
            name,
            selection=dg.AssetSelection.assets(*keys),
            executor_def=executors[name],
            description=description + about,
        )
        for name, keys, description in jobs
    ]


def partition_executor(spec: DatasetSpec) -> dg.ExecutorDefinition:
    """The executor of Dagster for one process, which begins no step of a run without a registered partition.

    Dagster itself looks up the partition before a step begins, and fails with an error that does not say what to do.
    """

    def create(context: dg.InitExecutorContext) -> dg.Executor:
        create_executor: Any = dg.in_process_executor.executor_creation_fn
        executor: dg.Executor = create_executor(context)
        execute = executor.execute

        def checked(plan_context: Any, plan: Any) -> Iterator[dg.DagsterEvent]:
            expect_partition(plan_context.dagster_run, plan_context.instance, spec)
            yield from execute(plan_context, plan)

        vars(executor)["execute"] = checked
        return executor

    in_process: Any = dg.in_process_executor
    return dg.ExecutorDefinition(in_process.name, in_process.config_schema, executor_creation_fn=create)
