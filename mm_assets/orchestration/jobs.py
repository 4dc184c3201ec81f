"""Jobs: `<dataset>_pack` takes one partition from shard to marker, `<dataset>_manifest` makes the next version."""

from typing import Any

import dagster as dg

from mm_assets.orchestration.partitions import job_name, manifest_job_name
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["build_jobs"]


def build_jobs(spec: DatasetSpec) -> list[Any]:  # the type of an unresolved job is not public
    """Both jobs, run in one process: a subprocess per step costs seconds and the steps are a chain anyway."""
    manifest = dg.AssetSelection.assets(dg.AssetKey([spec.name, "manifest"]))
    return [
        dg.define_asset_job(
            job_name(spec),
            selection=dg.AssetSelection.groups(spec.name) - manifest,
            executor_def=dg.in_process_executor,
            description=f"One partition of {spec.name}, from shard to publication marker.",
        ),
        dg.define_asset_job(
            manifest_job_name(spec),
            selection=manifest,
            executor_def=dg.in_process_executor,
            description=f"The next dataset version of {spec.name}: lists the published partitions.",
        ),
    ]
