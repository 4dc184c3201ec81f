"""Conditions by which Dagster's automation sensor requests assets, and the age at which they are overdue."""

import datetime
import warnings

import dagster as dg

from mm_assets.orchestration.partitions import shards_key
from mm_assets.pipeline.chain import MANIFEST, Stage
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["automation_condition", "freshness_policy"]


def automation_condition(
    spec: DatasetSpec, stage: Stage
) -> "dg.AutomationCondition[dg.AssetKey | dg.AssetCheckKey] | None":
    """As `automation` says; None for the manifest, which has a sensor of its own and waits for no partition."""
    if stage is MANIFEST or spec.automation == "none":
        return None
    shards = dg.AssetSelection.assets(shards_key(spec))
    # Dagster takes what it does not make to be missing, observed or not, and the first stage would wait for it.
    if spec.automation == "on_cron":
        condition = dg.AutomationCondition.on_cron(spec.cron)
        return condition if stage.upstream else condition.ignore(shards)
    eager = dg.AutomationCondition.eager()
    if stage.upstream:
        return eager
    missing = dg.AutomationCondition.any_deps_missing()
    return eager.replace(missing, missing.ignore(shards))


def freshness_policy(spec: DatasetSpec, stage: Stage) -> dg.FreshnessPolicy | None:
    """As `freshness_hours` says, of the manifest, which shows that something was published."""
    if stage is not MANIFEST or spec.freshness_hours is None:
        return None
    with warnings.catch_warnings():
        for category in (dg.BetaWarning, dg.PreviewWarning):  # policies of assets may change in a later Dagster
            warnings.simplefilter("ignore", category)
        return dg.FreshnessPolicy.time_window(fail_window=datetime.timedelta(hours=spec.freshness_hours))
