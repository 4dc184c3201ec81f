"""Settings of a dataset that Dagster acts on: conditions, freshness, pools and tags."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mm_assets.errors import ConfigError
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset
from mm_assets.pipeline.chain import CHAIN
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.shards import CAPTIONS, make_shard

STAGES = [stage.name for stage in CHAIN if stage.name != "manifest"]


def declared(**settings: Any) -> DatasetSpec:
    return DatasetSpec.from_config({"name": "web", "root": "r", "shards": "s", **settings}, where="test")


def nodes(**settings: Any) -> dict[str, Any]:
    """The dataset's assets by the name of their stage."""
    graph = build_definitions(declared(**settings)).resolve_asset_graph()
    return {key.path[-1]: graph.get(key) for key in graph.get_all_asset_keys()}


@pytest.mark.parametrize(
    ("automation", "condition"),
    [
        ("none", None),
        ("eager", dg.AutomationCondition.eager()),
        ("on_cron", dg.AutomationCondition.on_cron("0 3 * * *")),
    ],
)
def test_conditions_are_of_all_stages_of_a_partition(automation: str, condition: object) -> None:
    """Every asset that a partition has gets the condition; the manifest and the shards have none."""
    found = nodes(automation=automation, cron="0 3 * * *")
    for name, node in found.items():
        given = node.automation_condition
        if name == "raw_shards" and condition is not None:
            assert type(given) is type(condition)
            assert given != condition, "the first stage does not wait for the shards"
        else:
            assert given == (None if name in ("manifest", "shards") else condition), name


def test_a_new_partition_is_requested(tmp_path: Path, instance: dg.DagsterInstance, demo_shards: Path) -> None:
    """Dagster's automation asks for a partition that was added once."""
    spec = declared(root=str(tmp_path), shards=str(demo_shards / "captions-*.tar"), automation="eager")
    definitions = build_definitions(spec)
    first = dg.evaluate_automation_conditions(definitions, instance)
    instance.add_dynamic_partitions("web_shards", ["captions-00000"])
    second = dg.evaluate_automation_conditions(definitions, instance, cursor=first.cursor)
    raw = dg.AssetKey(["web", "raw_shards"])
    assert first.get_requested_partitions(raw) == set()
    assert second.get_requested_partitions(raw) == {"captions-00000"}
    third = dg.evaluate_automation_conditions(definitions, instance, cursor=second.cursor)
    assert third.get_requested_partitions(raw) == set()


def test_a_changed_shard_is_requested_again(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """Once other bytes of a shard are registered, Dagster's automation asks for its partition, once, and no other."""
    names = ("captions-00000", "captions-00001")
    for name in names:
        make_shard(tmp_path / f"{name}.tar", CAPTIONS)
    shards = str(tmp_path / "captions-*.tar")
    spec = declared(root=str(tmp_path / "root"), shards=shards, automation="eager", settle_seconds=0)
    definitions, dataset, first_stage = build_definitions(spec), DatasetStore(spec), dg.AssetKey(["web", "raw_shards"])
    cursor = None

    def requested() -> dict[str, set[str]]:
        """What a tick of the automation requests, by stage; the runs that it requests are carried out."""
        nonlocal cursor
        found = dg.evaluate_automation_conditions(definitions, instance, cursor=cursor)
        cursor = found.cursor
        by_stage = {
            key.path[-1]: keys
            for key in definitions.resolve_asset_graph().get_all_asset_keys()
            if (keys := {str(name) for name in found.get_requested_partitions(key)})
        }
        for name in sorted(by_stage.get(first_stage.path[-1], ())):
            job = definitions.resolve_job_def("web_pack")
            assert job.execute_in_process(instance=instance, partition_key=name).success
        return by_stage

    assert requested() == {}
    register_dataset(instance, dataset)
    assert requested() == {stage: set(names) for stage in STAGES}
    assert requested() == {}
    register_dataset(instance, dataset)
    assert requested() == {}, "nothing changed"
    make_shard(tmp_path / "captions-00001.tar", {**CAPTIONS, "2.txt": b"another text"})
    register_dataset(instance, dataset)
    assert requested() == {stage: {"captions-00001"} for stage in STAGES}
    assert requested() == {}


def test_freshness_is_of_the_manifest() -> None:
    """The manifest is overdue after as many hours as declared; nothing else has a policy."""
    found = nodes(freshness_hours=36.5)
    policies = {name: node.freshness_policy for name, node in found.items() if node.freshness_policy is not None}
    assert list(policies) == ["manifest"]
    assert policies["manifest"].fail_window.to_timedelta().total_seconds() == 36.5 * 3600


def test_a_pool_limits_every_step() -> None:
    """All steps that work on a dataset are in its pool, those of loads and checks too."""
    definitions = build_definitions(declared(pool="disks"))
    for job in ("web_pack", "web_load", "web_manifest", "web_check"):
        graph = definitions.resolve_job_def(job)
        assert {node.definition.pool for node in graph.nodes} == {"disks"}, job
    assert {node.definition.pool for node in build_definitions(declared()).resolve_job_def("web_pack").nodes} == {None}


def test_tags_are_on_every_asset() -> None:
    """Tags of the declaration are beside those of the project."""
    for node in nodes(tags={"domain": "web", "team/unit": "a.b"}).values():
        assert node.tags.items() >= {"domain": "web", "team/unit": "a.b"}.items()
        assert "dagster/storage_kind" in node.tags


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"automation": "always"}, "automation: is 'always', allowed: none, eager, on_cron"),
        ({"freshness_hours": 0}, "freshness_hours: is int 0, expected a number of at least 1"),
        ({"pool": "a b"}, "pool: is 'a b', expected letters, digits"),
        ({"tags": {"dagster/x": "1"}}, "tags: has 'dagster/x', expected letters"),
        ({"tags": {"x": "a b"}}, "tags: has 'a b' for 'x', expected letters"),
    ],
)
def test_wrong_values_are_refused(settings: dict[str, Any], says: str) -> None:
    """A value that Dagster would refuse when it loads the definitions is an error of the declaration."""
    with pytest.raises(ConfigError) as caught:
        declared(**settings)
    assert says in str(caught.value)


def test_none_of_them_makes_anything_stale() -> None:
    """No digest of a stage depends on these settings."""
    given = {"automation": "eager", "freshness_hours": 3.0, "pool": "p", "tags": {"a": "b"}}
    assert [s.digest(declared(**given)) for s in CHAIN] == [s.digest(declared()) for s in CHAIN]
