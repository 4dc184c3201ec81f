"""Jobs: `<dataset>_pack` takes one partition from shard to marker, `<dataset>_manifest` makes the next version."""

from collections.abc import Iterable
from typing import Any

import dagster as dg

from mm_assets.orchestration.partitions import job_name, manifest_job_name
from mm_assets.pipeline.chain import MANIFEST
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["build_jobs"]


def build_jobs(spec: DatasetSpec, assets: Iterable[dg.AssetsDefinition]) -> list[Any]:  # the type is not public
    """Both jobs, run in one process: a subprocess per step costs seconds and the steps are a chain anyway.

    Assets are selected by key, the only attribute that a declaration's `post_processing` cannot change. Dagster refuses
    a selected key that is missing, so neither job is ever without steps.
    """
    manifest = dg.AssetKey([spec.name, MANIFEST.name])
    partitioned = [key for asset in assets for key in asset.keys if key != manifest]
    about = f" {spec.description}" if spec.description else ""
    jobs = (
        (job_name(spec), partitioned, f"One partition of {spec.name}, from shard to publication marker."),
        (manifest_job_name(spec), [manifest], f"The next version of {spec.name}: lists the published partitions."),
    )
    return [
        dg.define_asset_job(
            name,
            selection=dg.AssetSelection.assets(*keys),
            executor_def=dg.in_process_executor,
            description=description + about,
        )
        for name, keys, description in jobs
    ]
