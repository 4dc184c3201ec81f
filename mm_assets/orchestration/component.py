"""`ShardDataset`: a Dagster Component. One document of a defs.yaml is one dataset with all of its definitions."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import ConfigDict, Field

from mm_assets.orchestration.build import build_definitions
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["ShardDataset", "ShardDatasetAttributes", "default_root"]

_AnyValue = Any


class ShardDatasetAttributes(dg.Model):
    """Keys of a declaration. Values are checked by `DatasetSpec.from_config`, whose messages name what is allowed."""

    model_config = ConfigDict(extra="allow")

    name: _AnyValue = Field(description="Dataset name: letters, digits and _.")
    shards: _AnyValue = Field(description="Folder, glob or file of tar shards; any fsspec URL. Relative to this file.")
    storage_options: _AnyValue = Field(None, description="File-system arguments for `shards`.")
    source: _AnyValue = Field(
        None, description="Source of the shards' rows. Default: detected from their bytes and names."
    )
    root: _AnyValue = Field(None, description="Storage root, a folder or URL. Default: $MM_ASSETS_ROOT.")
    root_options: _AnyValue = Field(None, description="File-system arguments for `root`.")
    partition_pattern: _AnyValue = Field(None, description="Regular expression with a group `partition`.")
    settle_seconds: _AnyValue = Field(None, description="Age at which a shard is taken; 30.")
    description: _AnyValue = Field(None, description="Shown in the UI.")
    owners: _AnyValue = Field(None, description="E-mail addresses or team:name.")
    samples: _AnyValue = Field(None, description="Sample layout: sample_id_field, texts_field, images_field, …")
    materialize: _AnyValue = Field(None, description="read (default) or write.")
    on_materialize_error: _AnyValue = Field(None, description="keep (default), drop_row, drop_sample or fail.")
    on_damaged_shard: _AnyValue = Field(None, description="fail (default) or salvage.")
    max_content_bytes: _AnyValue = Field(None, description="Larger items are errors on their rows; 256 MiB.")
    annotators: _AnyValue = Field(None, description="List of annotators, each with its `type` and parameters.")
    filters: _AnyValue = Field(None, description="List of filters, each with its `type` and parameters.")
    on_misaligned: _AnyValue = Field(None, description="warn (default), drop_sample or fail.")
    on_empty_sample: _AnyValue = Field(None, description="drop (default) or keep.")
    renumber: _AnyValue = Field(None, description="Count positions from 0 again after filtering.")
    parquet: _AnyValue = Field(None, description="compression and row_group_bytes.")
    pack: _AnyValue = Field(None, description="Preset name, or fields with selectors. Default: by the first shard.")
    batch_bytes: _AnyValue = Field(None, description="Content of one batch in memory; 16 MiB.")
    runs_per_tick: _AnyValue = Field(None, description="Cap of runs that one tick requests; 25.")
    cron: _AnyValue = Field(None, description="When the schedule looks for pending partitions.")
    poll_seconds: _AnyValue = Field(None, description="Pause between two looks of a sensor; 30.")
    run_sensor: _AnyValue = Field(None, description="Start the sensor of shards with the daemon; false.")
    run_schedule: _AnyValue = Field(None, description="Start the schedule with the daemon; false.")
    keep_manifests: _AnyValue = Field(None, description="Manifests that `mm-assets clean` keeps; 3.")


class ShardDataset(dg.Component):
    """A dataset of tar shards: assets, checks, jobs, sensors and a schedule from a few lines of YAML.

    Args:
        spec: the checked declaration.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec

    @classmethod
    def get_model_cls(cls) -> type[dg.Model]:
        """The keys of a declaration, for Dagster's schema tools."""
        return ShardDatasetAttributes

    @classmethod
    def load(cls, attributes: Any, context: dg.ComponentLoadContext) -> "ShardDataset":
        """Checks a declaration.

        Raises:
            ConfigError: a key or value is wrong; names the file, the key and what is allowed.
        """
        raw: Mapping[str, Any] = attributes.model_dump(exclude_unset=True)
        config = context.resolution_context.resolve_value(raw)
        where = context.path / "defs.yaml" if context.path.is_dir() else context.path
        folder = where.parent
        spec = DatasetSpec.from_config(config, where=str(where), base=folder, default_root=default_root())
        return cls(spec)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The dataset's definitions."""
        return build_definitions(self.spec)


def default_root() -> str:
    """Storage root of datasets that name none: $MM_ASSETS_ROOT, else a folder beside Dagster's own storage."""
    root = os.environ.get("MM_ASSETS_ROOT")
    if root:
        return root
    home = os.environ.get("DAGSTER_HOME")
    return str(Path(home) / "data") if home else str(Path.cwd() / "data")
