"""Indexes in Dagster: their assets, checks and failures."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import numpy as np
import pytest

import mm_assets
from mm_assets.errors import ConfigError
from mm_assets.fields import NDArrayField
from mm_assets.orchestration.assets import build_assets
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.resources import StorageRoot, resource_key
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.chain import add_stream, declare, run_chain
from ..pipeline.shards import make_shard

ASSET = dg.AssetKey(["data", "index_vector"])


@pytest.fixture
def spec(tmp_path: Path) -> DatasetSpec:
    """A dataset of two partitions with two samples each, and the index of a stream that is not there yet."""
    for key in "ab":
        make_shard(tmp_path / "in" / f"{key}.tar", {f"{key}{number}.txt": "text" for number in range(2)})
    spec = declare(tmp_path / "root", tmp_path / "in", formats=["mult"], indexes=[{"modality": "vector"}])
    run_chain(spec)
    return spec


def add_vectors(spec: DatasetSpec) -> None:
    """Adds the stream to all samples but one; one of the vectors is zero."""
    values = {"a0": [1, 2], "a1": [0, 0], "b0": [2, 1]}
    field = NDArrayField("float32", (2,))
    add_stream(DatasetStore(spec), "vector", field, {key: np.array(one, np.float32) for key, one in values.items()})


def materialize(spec: DatasetSpec, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    resources = {resource_key(spec): StorageRoot(root=spec.root)}
    (asset,) = (one for one in build_assets(spec) if ASSET in one.keys)
    return dg.materialize([asset], instance=instance, resources=resources, raise_on_error=False)


def test_the_asset_builds_the_index_of_the_newest_version(spec: DatasetSpec) -> None:
    """It reports vectors and recall, its checks pass, a second run writes nothing, and searches use the index."""
    add_vectors(spec)
    with dg.DagsterInstance.ephemeral() as instance:
        for written in (2, 0):
            result = materialize(spec, instance)
            assert result.success
            (made,) = result.asset_materializations_for_node("data__index_vector")
            values = {name: value.value for name, value in made.metadata.items()}
            assert (values["count/vectors"], values["count/excluded"], values["count/written"]) == (2, 1, written)
            checks = {check.check_name: check.passed for check in result.get_asset_check_evaluations()}
            assert checks == {"all_vectors": True, "recall": True}
    with mm_assets.open(DatasetStore(spec).store.url_of("manifest.json")) as data:
        assert data.search([2, 1], exact=False).ids.tolist() == ["b0", "a0"]


def test_an_index_with_too_low_a_recall_fails_its_check(spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks compare the recall with the setting, and the number of vectors with that of samples that have one."""
    add_vectors(spec)
    monkeypatch.setattr("mm_assets.dataset.vector_file._measured", lambda _: (1, 0.85))
    monkeypatch.setattr("mm_assets.dataset.dataset.Dataset.presence", lambda *_: np.ones(4, np.bool_))
    with dg.DagsterInstance.ephemeral() as instance:
        result = materialize(spec, instance)
        assert not result.success
        assert {check.check_name: check.passed for check in result.get_asset_check_evaluations()} == {
            "all_vectors": False,
            "recall": False,
        }


def test_an_index_without_its_modality_fails(spec: DatasetSpec) -> None:
    """The failure names the modality and those that there are."""
    with dg.DagsterInstance.ephemeral() as instance:
        result = materialize(spec, instance)
        (step,) = instance.all_logs(result.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        failure = step.get_dagster_event().step_failure_data.user_failure_data
        assert "no modality 'vector', there are" in (failure.description or "")


def test_assets_of_indexes(spec: DatasetSpec) -> None:
    """An index is an asset without partitions after the manifest, in no job of partitions; two need two names."""
    definitions = build_definitions(spec)
    node = definitions.resolve_asset_graph().get(ASSET)
    assert [key.path[-1] for key in node.parent_keys] == ["manifest"]
    assert not node.is_partitioned
    assert node.metadata["dagster/uri"] == f"{spec.root}/data/indexes"
    assert {key.name for key in node.check_keys} == {"all_vectors", "recall"}
    assert ASSET not in definitions.resolve_job_def("data_pack").asset_layer.selected_asset_keys
    for metric, asset in (("l2", "index_a_b_l2"), ("cosine", "index_a_b")):
        assert spec.replace(indexes=[{"modality": "a.b", "metric": metric}]).indexes[0].asset == asset
    with pytest.raises(ConfigError, match="two indexes with the asset 'index_a_b'"):
        spec.replace(indexes=[{"modality": "a.b"}, {"modality": "a-b"}])
