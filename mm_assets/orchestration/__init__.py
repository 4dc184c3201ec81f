"""The one package that knows Dagster: declarations become assets, checks, jobs, a sensor and a schedule.

Bodies here read configuration, call one library function and report. The functions are in `mm_assets.pipeline`.
"""

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.component import ShardDataset
from mm_assets.orchestration.resources import StorageRoot

__all__ = ["ShardDataset", "StorageRoot", "build_definitions"]
