"""The stages over storage: what a dataset is, and how it is run, recorded, checked and published. Knows no Dagster."""

from mm_assets.pipeline.records import Partition, StageRecord
from mm_assets.pipeline.spec import DatasetSpec, ParquetOptions
from mm_assets.pipeline.stages import StageResult
from mm_assets.pipeline.store import DatasetStore

__all__ = ["DatasetSpec", "DatasetStore", "ParquetOptions", "Partition", "StageRecord", "StageResult"]
