"""The stages over storage: what a dataset is, and how it is run, recorded, checked and published. Knows no Dagster."""

from mm_assets.pipeline.partition.stages import StageResult
from mm_assets.pipeline.spec import DatasetSpec, ParquetOptions
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Partition, StageRecord

__all__ = ["DatasetSpec", "DatasetStore", "ParquetOptions", "Partition", "StageRecord", "StageResult"]
