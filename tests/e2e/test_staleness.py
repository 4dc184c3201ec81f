"""Dagster's staleness of assets is what `status` says: by code versions, and by data versions of inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset, sync
from mm_assets.pipeline.chain import CHAIN
from mm_assets.pipeline.explore.status import dataset_status
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.chain import record_of, run_once
from .loads import run_partitions

SpecOf = Callable[..., DatasetSpec]
Inbox = Callable[..., Path]
KEY = "captions-00000"
STAGES = [stage.name for stage in CHAIN[:-1]]
CHANGES: tuple[dict[str, Any], ...] = (
    {"max_rejected": 9},
    {"max_content_bytes": 1000000},
    {"filters": [{"type": "text_length", "min_chars": 2}]},
    {"on_misaligned": "fail"},
    {"batch_bytes": 100000, "on_misaligned": "warn", "keep_manifests": 9},
)
"""Settings of one stage each, and of none."""


def stale_in_dagster(instance: dg.DagsterInstance, spec: DatasetSpec) -> list[str]:
    """The stages of the partition whose assets Dagster does not show as up to date."""
    graph = build_definitions(spec).resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    return [name for name in STAGES if resolver.get_status(dg.AssetKey([spec.name, name]), KEY).value != "FRESH"]


def test_dagster_and_status_agree(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """After a changed setting the stale assets are those from the announced stage on, and after its run none."""
    shards = str(inbox(f"{KEY}.tar"))
    before = demo_spec("captions", shards=shards)
    register_dataset(instance, DatasetStore(before))
    assert run_partitions([(before, KEY)])[0].ok
    assert stale_in_dagster(instance, before) == []
    firsts = set()
    for settings in CHANGES:
        spec = demo_spec("captions", shards=shards, **settings)
        register_dataset(instance, DatasetStore(spec))
        pending = dataset_status(DatasetStore(spec)).pending
        first = STAGES.index(pending[KEY].first.name) if pending else len(STAGES)
        assert stale_in_dagster(instance, spec) == STAGES[first:], settings
        firsts.add(first)
    assert len(firsts) == len(CHANGES)
    spec = demo_spec("captions", shards=shards, **CHANGES[0])
    assert run_partitions([(spec, KEY)])[0].ok
    assert stale_in_dagster(instance, spec) == []


def test_a_killed_load_leaves_nothing_outdated(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """What a killed load made of other settings is recorded as such, even where its bytes are the same."""
    shards = str(inbox(f"{KEY}.tar"))
    specs = [
        demo_spec("captions", shards=shards, **settings)
        for settings in ({}, {"max_rejected": 9, "filters": [{"type": "text_length", "min_chars": 1}]})
    ]
    dataset = DatasetStore(specs[0])
    register_dataset(instance, dataset)
    assert run_partitions([(specs[0], KEY)])[0].ok
    before = record_of(dataset, KEY)
    partition, schema = dataset.partitions()[KEY], dataset.schema()
    assert run_once(specs[1], partition, schema).ok  # as a load that was killed then
    record = record_of(DatasetStore(specs[1]), KEY)
    assert before is not None
    assert record is not None
    assert record.packed == before.packed
    assert stale_in_dagster(instance, specs[1]) == STAGES[1:]
    assert [sync(DatasetStore(specs[1])).num_partitions for _ in range(2)] == [1, 0]
    assert stale_in_dagster(instance, specs[1]) == []
    assert stale_in_dagster(instance, specs[0]) == STAGES[1:]


def test_what_former_settings_made_is_outdated(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """With other settings a partition is recorded by none, and stale from the stage on that `status` says."""
    shards = str(inbox(f"{KEY}.tar"))
    before = demo_spec("captions", shards=shards)
    dataset = DatasetStore(before)
    register_dataset(instance, dataset)
    assert run_once(before, dataset.partitions()[KEY], dataset.schema()).ok  # as a load that was killed then
    spec = demo_spec("captions", shards=shards, filters=[{"type": "text_length", "min_chars": 2}])
    assert [sync(DatasetStore(one)).num_partitions for one in (spec, before)] == [0, 1]
    first = dataset_status(DatasetStore(spec)).pending[KEY].first.name
    assert stale_in_dagster(instance, spec) == STAGES[STAGES.index(first) :]
    assert stale_in_dagster(instance, before) == []
    assert sync(DatasetStore(before)).num_partitions == 0
