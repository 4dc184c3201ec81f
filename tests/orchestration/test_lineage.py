"""What the definitions of a dataset's assets say: columns, their origin, and where the files are."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.launch import register_dataset
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register


def declared(root: str, shards: str, **settings: Any) -> DatasetSpec:
    return DatasetSpec.from_config(
        {"name": "web", "root": root, "shards": shards, "settle_seconds": 0, **settings}, where="test"
    )


def node(spec: DatasetSpec, name: str) -> Any:
    return build_definitions(spec).resolve_asset_graph().get(dg.AssetKey(["web", name]))


def origin(spec: DatasetSpec, name: str, column: str) -> list[tuple[str, str]]:
    """Asset and column that a column is made of."""
    lineage: dg.TableColumnLineage = node(spec, name).metadata["dagster/column_lineage"]
    return [(dep.asset_key.path[-1], dep.column_name) for dep in lineage.deps_by_column[column]]


def columns(spec: DatasetSpec, name: str) -> dict[str, str]:
    return {column.name: column.type for column in node(spec, name).metadata["dagster/column_schema"].columns}


def test_columns_lead_to_where_they_come_from() -> None:
    """A user's column leads to its JSON key, fetched bytes to their locator, and a measure to the bytes."""
    spec = declared(
        "s3://bucket/out",
        "s3://bucket/in/*.tar",
        samples={"user_columns": ["caption"]},
        annotators=[{"type": "image_size"}, {"type": "text_length"}],
    )
    assert origin(spec, "rows", "caption") == [("shards", "caption")]
    assert origin(spec, "rows", "sample_id") == [("raw_shards", "sample_key")]
    assert origin(spec, "materialized_rows", "binary_content") == [("rows", "source_ref")]
    assert origin(spec, "filtered_rows", "binary_content") == [("materialized_rows", "binary_content")]
    assert origin(spec, "filtered_rows", "image_width") == [("materialized_rows", "binary_content")]
    assert origin(spec, "filtered_rows", "text_words") == [("materialized_rows", "text_content")]
    assert origin(spec, "filtered_rows", "caption") == [("materialized_rows", "caption")]
    assert {"caption", "image_width", "text_words", "sample_id"} <= columns(spec, "filtered_rows").keys()
    assert columns(spec, "shards") == {"caption": "string"}


def test_partitioned_assets_name_the_job_for_many_partitions() -> None:
    """The description of each asset with partitions names the load, and that of the manifest does not."""
    graph = build_definitions(declared("s3://bucket/out", "s3://bucket/in/*.tar", description="Of the web."))
    for asset in graph.resolve_asset_graph().asset_nodes:
        if asset.is_materializable:
            said = asset.description or ""
            assert ("the job `web_load`" in said) == asset.is_partitioned, asset.key
            assert said.endswith("\n\nOf the web.")


def test_descriptions_of_columns_say_what_they_are_made_of(tmp_path: Path, demo_shards: Path) -> None:
    """What the open-source pages do not draw is in the columns' descriptions, of measures and packed modalities."""
    spec = declared(str(tmp_path), str(demo_shards / "captions-*.tar"), annotators=[{"type": "image_size"}])
    register(DatasetStore(spec))

    def about(name: str, column: str) -> str:
        return next(
            c.description for c in node(spec, name).metadata["dagster/column_schema"].columns if c.name == column
        )

    assert about("rows", "width") == "key `width` of the sample's JSON, on its metadata rows"
    assert about("filtered_rows", "image_width") == "measured by an annotator in `binary_content`, on image rows"
    assert about("packed_mult", "text") == "packed from `text_content` of the filtered rows"


def test_every_column_that_lineage_names_exists() -> None:
    """Each column that another is made of is one of the asset that it names."""
    spec = declared("r", "s", samples={"user_columns": ["caption"]}, annotators=[{"type": "image_size"}])
    for name in ("rows", "materialized_rows", "filtered_rows"):
        for deps in node(spec, name).metadata["dagster/column_lineage"].deps_by_column.values():
            for dep in deps:
                assert dep.column_name in columns(spec, dep.asset_key.path[-1])


def test_what_registration_decided_is_known(tmp_path: Path, demo_shards: Path) -> None:
    """With a registered dataset of this machine, undeclared columns and packed modalities are in the definitions."""
    spec = declared(str(tmp_path), str(demo_shards / "captions-*.tar"))
    assert "width" not in columns(spec, "rows")
    register(DatasetStore(spec))
    assert columns(spec, "rows")["width"] == "int64"
    assert origin(spec, "rows", "width") == [("shards", "width")]
    assert columns(spec, "packed_mult")["image"] == "ImageField"
    assert ("filtered_rows", "binary_content") in origin(spec, "packed_mult", "image")
    assert origin(spec, "packed_mult", "metadata") == [("filtered_rows", "metadata_json")]
    assert ("packed_mstr", "image") in origin(spec, "manifest", "image")
    (tmp_path / "web" / "schema.json").write_text("[]")
    assert "width" not in columns(spec, "rows")


def test_what_was_decided_is_known_of_a_remote_root(
    tmp_path: Path, instance: dg.DagsterInstance, demo_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns that nothing declares are known once a remote dataset is registered; loading makes no request."""
    spec = declared(f"memory://{tmp_path.name}", str(demo_shards / "captions-*.tar"))
    assert "caption" not in columns(spec, "rows")
    register_dataset(instance, DatasetStore(spec))
    made = []
    monkeypatch.setattr(MemoryFileSystem, "_open", lambda _, path, *rest, **more: made.append(path))
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda _, path, *rest, **more: made.append(path))
    assert origin(spec, "rows", "caption") == [("shards", "caption")]
    assert columns(spec, "shards")["caption"] == "string"
    assert "caption" not in columns(declared("memory://elsewhere", spec.shards), "rows")
    assert made == []


def test_the_place_of_the_data_is_shown() -> None:
    """Each asset has the folder of its files, the name of its table in SQL, and the kind of its store."""
    spec = declared("s3://bucket/out/", "s3://bucket/in/*.tar")
    rows = node(spec, "rows")
    assert rows.metadata["dagster/uri"] == "s3://bucket/out/web/rows"
    assert rows.metadata["dagster/table_name"] == "web.rows"
    assert rows.tags["dagster/storage_kind"] == "s3"
    assert node(spec, "packed_mstr").metadata["dagster/uri"] == "s3://bucket/out/web/packed"
    assert node(spec, "published").metadata["dagster/uri"] == "s3://bucket/out/web/records"
    assert node(spec, "manifest").metadata["dagster/uri"] == "s3://bucket/out/web/manifest.json"
    shards = node(spec, "shards")
    assert (shards.metadata["dagster/uri"], shards.is_external) == ("s3://bucket/in/*.tar", True)
    assert node(declared("/data", "/in"), "rows").tags["dagster/storage_kind"] == "local"
