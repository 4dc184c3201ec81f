"""The shards as an asset: what is observed of them, and when Dagster takes what is made of them to be stale."""

from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore

from .loads import pack, run_partitions

SpecOf = Callable[..., DatasetSpec]
Inbox = Callable[..., Path]
SHARDS = dg.AssetKey(["docs", "shards"])


def observed(instance: dg.DagsterInstance) -> list[str]:
    """The partitions of the observations of the shards, the oldest first."""
    records = instance.fetch_observations(SHARDS, limit=1000, ascending=True).records
    return [record.partition_key or "" for record in records]


def status(instance: dg.DagsterInstance, spec: DatasetSpec, stage: str, key: str) -> str:
    """Whether Dagster takes a partition of a stage to be fresh."""
    graph = build_definitions(spec).resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    return str(resolver.get_status(dg.AssetKey([spec.name, stage]), key).value)


def test_new_and_changed_shards_are_observed(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """Each registration observes the partitions that are new or have changed, and no other."""
    folder = inbox("docs-00000.tar")
    spec = demo_spec("docs", shards=str(folder))
    register_dataset(instance, DatasetStore(spec))
    assert observed(instance) == ["docs-00000"]
    register_dataset(instance, DatasetStore(spec))
    assert observed(instance) == ["docs-00000"]
    inbox("docs-00001.tar")
    register_dataset(instance, DatasetStore(spec))
    assert observed(instance) == ["docs-00000", "docs-00001"]
    with (folder / "docs-00001.tar").open("ab") as shard:
        shard.write(bytes(512))
    register_dataset(instance, DatasetStore(spec))
    assert observed(instance) == ["docs-00000", "docs-00001", "docs-00001"]
    (record, *_) = instance.fetch_observations(SHARDS, limit=1).records
    observation = record.asset_observation
    assert observation is not None
    size = (folder / "docs-00001.tar").stat().st_size
    assert observation.metadata["bytes/shards"].value == size
    assert observation.metadata["first_shard"].value == str(folder / "docs-00001.tar")


def test_observe_registers_the_shards(instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox) -> None:
    """A run that observes the asset, without a partition, registers and observes what is new, or fails."""
    folder = inbox("docs-00000.tar")
    definitions = build_definitions(demo_spec("docs", shards=str(folder)))
    job = definitions.resolve_implicit_global_asset_job_def().get_subset(asset_selection={SHARDS})
    for _ in range(2):
        assert job.execute_in_process(instance=instance).success
        assert instance.get_dynamic_partitions("docs_shards") == ["docs-00000"]
        assert observed(instance) == ["docs-00000"]
    with pytest.raises(dg.Failure, match=r"^/.*nowhere"):
        build_definitions(
            demo_spec("docs", shards=str(folder / "nowhere" / "docs-*.tar"))
        ).resolve_implicit_global_asset_job_def().get_subset(asset_selection={SHARDS}).execute_in_process(
            instance=instance
        )


@pytest.mark.parametrize("is_load", [True, False])
def test_a_changed_shard_makes_its_partition_stale(
    instance: dg.DagsterInstance, demo_spec: SpecOf, inbox: Inbox, is_load: bool
) -> None:
    """After a shard changed, Dagster shows what was made of it as stale until it is made again; no other."""
    folder = inbox("docs-00000.tar", "docs-00001.tar")
    spec = demo_spec("docs", shards=str(folder))
    keys = ("docs-00000", "docs-00001")

    def run(*wanted: str) -> None:
        register_dataset(instance, DatasetStore(spec))
        if is_load:
            assert all(run.ok for run in run_partitions([(spec, key) for key in wanted]))
        else:
            assert all(pack(instance, spec, key).success for key in wanted)

    run(*keys)
    assert [status(instance, spec, "raw_shards", key) for key in keys] == ["FRESH", "FRESH"]
    with (folder / "docs-00001.tar").open("ab") as shard:
        shard.write(bytes(512))
    register_dataset(instance, DatasetStore(spec))
    assert [status(instance, spec, "raw_shards", key) for key in keys] == ["FRESH", "STALE"]
    run("docs-00001")
    assert [status(instance, spec, "raw_shards", key) for key in keys] == ["FRESH", "FRESH"]
