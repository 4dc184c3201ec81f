"""Check specs of each asset, from the library's catalog; every check is a gate."""

import warnings

import dagster as dg

from mm_assets.checks.catalog import CATALOG
from mm_assets.orchestration.partitions import shard_partitions
from mm_assets.pipeline.chain import MANIFEST, Stage
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["UNIQUE_IDS", "check_specs"]

UNIQUE_IDS = "unique_ids"
_MANIFEST_RULE = "No two partitions have a sample id in common."


def check_specs(spec: DatasetSpec, stage: Stage) -> list[dg.AssetCheckSpec]:
    """The checks of one asset: per partition, and blocking because `dagster job execute` ignores the others.

    That of the manifest warns.
    """
    if stage is MANIFEST:
        key = dg.AssetKey([spec.name, stage.name])
        return [dg.AssetCheckSpec(name=UNIQUE_IDS, asset=key, description=_MANIFEST_RULE)]
    with warnings.catch_warnings():
        # `partitions_def` of a check is a preview; without it results do not belong to a partition.
        warnings.filterwarnings("ignore", category=dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(
                name=check.name,
                asset=dg.AssetKey([spec.name, stage.name]),
                description=check.description,
                blocking=True,
                partitions_def=shard_partitions(spec),
            )
            for check in CATALOG
            if check.asset == stage.name
        ]
