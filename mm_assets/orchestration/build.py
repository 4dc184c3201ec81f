"""All definitions of one dataset, by a plain function call."""

import os
from contextlib import suppress
from pathlib import Path

import dagster as dg

from mm_assets.orchestration.assets import build_assets
from mm_assets.orchestration.check_job import build_check_job
from mm_assets.orchestration.checks import settled_checks
from mm_assets.orchestration.jobs import build_jobs
from mm_assets.orchestration.load import build_load_job
from mm_assets.orchestration.observed_shards import build_shards_asset
from mm_assets.orchestration.resources import StorageRoot, resource_key
from mm_assets.orchestration.schedules import build_schedules
from mm_assets.orchestration.sensors import build_sensors
from mm_assets.pipeline.dagster_home import missing_databases
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["build_definitions"]


def build_definitions(spec: DatasetSpec) -> dg.Definitions:
    """Assets, checks, jobs, sensors, schedules and the storage resource of a dataset."""
    spec = _with_settled_checks(spec)
    assets = build_assets(spec)
    pack, manifest = build_jobs(spec, assets)
    load = build_load_job(spec)
    return dg.Definitions(
        assets=[build_shards_asset(spec), *assets],
        jobs=[pack, load, manifest, build_check_job(spec)],
        sensors=build_sensors(spec, [pack, load]),
        schedules=build_schedules(spec),
        resources={resource_key(spec): StorageRoot(root=spec.root)},
    )


def _with_settled_checks(spec: DatasetSpec) -> DatasetSpec:
    """Returns the declaration with the checks that the instance of $DAGSTER_HOME has settled on."""
    home = os.environ.get("DAGSTER_HOME")
    if spec.checks == "auto" and home:
        with suppress(Exception):  # whatever a database that is unavailable raises: definitions load without it
            if not missing_databases(Path(home)):
                with dg.DagsterInstance.get() as instance:
                    return settled_checks(instance, spec)[0]
    return spec
