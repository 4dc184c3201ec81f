"""Dagster's staleness of assets is what `status` says: by code versions, and by data versions of inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset
from mm_assets.pipeline.chain import CHAIN
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.status import dataset_status
from mm_assets.pipeline.store import DatasetStore

from .loads import run_partitions

SpecOf = Callable[..., DatasetSpec]
Inbox = Callable[..., Path]
KEY = "captions-00000"
STAGES = [stage.name for stage in CHAIN[:-1]]


def stale_in_dagster(instance: dg.DagsterInstance, spec: DatasetSpec) -> list[str]:
    """The stages of the partition whose assets Dagster does not show as up to date."""
    graph = build_definitions(spec).resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    return [name for name in STAGES if resolver.get_status(dg.AssetKey([spec.name, name]), KEY).value != "FRESH"]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_rejected": 9},
        {"max_content_bytes": 1000000},
        {"filters": [{"type": "text_length", "min_chars": 2}]},
        {"on_misaligned": "fail"},
        {"batch_bytes": 100000, "on_misaligned": "warn", "keep_manifests": 9},
    ],
    ids=["rows", "content", "filter", "packing", "neutral"],
)
def test_dagster_and_status_agree(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, settings: dict[str, Any]
) -> None:
    """After a changed setting the stale assets are those from the announced stage on, and after its run none."""
    shards = str(inbox(f"{KEY}.tar"))
    before = demo_spec("captions", shards=shards)
    register_dataset(instance, DatasetStore(before))
    assert run_partitions([(before, KEY)])[0].ok
    assert stale_in_dagster(instance, before) == []
    spec = demo_spec("captions", shards=shards, **settings)
    register_dataset(instance, DatasetStore(spec))
    pending = dataset_status(DatasetStore(spec)).pending
    first = STAGES.index(pending[KEY].first.name) if pending else len(STAGES)
    assert stale_in_dagster(instance, spec) == STAGES[first:]
    if pending:
        assert run_partitions([(spec, KEY)])[0].ok
    assert stale_in_dagster(instance, spec) == []
