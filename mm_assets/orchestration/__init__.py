"""The only package that imports Dagster: declarations become assets, checks, jobs, a sensor and a schedule.

Bodies here read configuration, call one library function of `mm_assets.pipeline` and report.
"""

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.component import ShardDataset
from mm_assets.orchestration.resources import StorageRoot

__all__ = ["ShardDataset", "StorageRoot", "build_definitions"]
