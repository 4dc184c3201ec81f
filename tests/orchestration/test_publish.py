"""Markers, manifests and cleaning up: what a training job may open, and what may go."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import mm_assets
from mm_assets.etl import publish, stages
from mm_assets.etl.dataset_store import DatasetStore
from mm_assets.etl.register import register
from mm_assets.spec import DatasetSpec

SpecOf = Callable[..., DatasetSpec]


def run_stages(dataset: DatasetStore, key: str) -> None:
    """The pack job without Dagster."""
    for stage in (stages.raw_shards, stages.rows, stages.materialized_rows, stages.filtered_rows):
        assert stage(dataset, key).passed
    assert all(result.passed for result in stages.packed(dataset, key).values())
    publish.publish(dataset, key)


@pytest.fixture
def dataset(demo_spec: SpecOf, inbox: Callable[..., Path]) -> DatasetStore:
    """Two published partitions of documents."""
    store = DatasetStore(demo_spec("docs", shards=str(inbox("docs-00000.tar", "docs-00001.tar"))))
    for partition in register(store).partitions:
        run_stages(store, partition.key)
    return store


def partitions_of(report: publish.ManifestReport) -> list[str]:
    return [shard["partition"] for shard in report.manifest["shards"]]


def test_a_manifest_names_files_that_open(dataset: DatasetStore) -> None:
    """The manifest's files are there with the digests it says, and its digest is its name."""
    import hashlib

    report = publish.build_manifest(dataset)
    assert partitions_of(report) == ["docs-00000", "docs-00001"]
    content = dataset.store.read_bytes(f"manifests/{report.digest}.json")
    assert hashlib.sha256(content).hexdigest() == report.digest
    assert dataset.store.read_bytes("manifest.json") == content
    for shard in report.manifest["shards"]:
        for file in shard["files"].values():
            assert hashlib.sha256(dataset.store.read_bytes(file["path"])).hexdigest() == file["sha256"]
    with mm_assets.open(dataset.store.url_of(f"manifests/{report.digest}.json")) as opened:
        assert len(opened) == report.manifest["num_samples"]


def test_the_same_partitions_give_the_same_manifest(dataset: DatasetStore) -> None:
    """A manifest is a function of what it lists."""
    assert publish.build_manifest(dataset).digest == publish.build_manifest(dataset).digest


def test_a_partition_whose_files_went_astray_is_left_out(dataset: DatasetStore) -> None:
    """A packed file that is gone or cut keeps its partition out of the manifest, with the reason."""
    marker = dataset.marker("docs-00001")
    assert marker is not None
    Path(dataset.store.path_of(marker["files"]["mult"]["path"])).unlink()
    report = publish.build_manifest(dataset)
    assert partitions_of(report) == ["docs-00000"]
    assert "is gone" in report.left_out["docs-00001"]


def test_a_partition_made_again_and_not_published_is_left_out(dataset: DatasetStore) -> None:
    """When a stage has written other rows since publication, the marker no longer stands for them."""
    from dataclasses import replace

    other = DatasetStore(replace(dataset.spec, filters=({"type": "text_length", "min_chars": 50},)))
    assert stages.filtered_rows(other, "docs-00000").passed
    report = publish.build_manifest(dataset)
    assert partitions_of(report) == ["docs-00001"]
    assert "docs-00000" in report.left_out


def test_a_removed_shard_leaves_the_next_manifest(dataset: DatasetStore) -> None:
    """A shard that is gone is reported at registration and its partition is not in the next manifest."""
    Path(dataset.spec.shards, "docs-00001.tar").unlink()
    assert register(dataset).removed == ("docs-00001",)
    report = publish.build_manifest(dataset)
    assert partitions_of(report) == ["docs-00000"]
    assert report.left_out["docs-00001"] == "its shards are gone"


def test_a_changed_shard_is_pending_again(dataset: DatasetStore, demo_shards: Path) -> None:
    """A replaced shard makes its partition pending and keeps the old version out of the next manifest."""
    shutil.copyfile(demo_shards / "docs-00000.tar", Path(dataset.spec.shards, "docs-00001.tar"))
    assert publish.pending_partitions(dataset) == []
    assert register(dataset).changed == ("docs-00001",)
    assert publish.pending_partitions(dataset) == ["docs-00001"]


def test_publishing_out_of_order_is_refused(dataset: DatasetStore) -> None:
    """Files that were not made from one another are not published together."""
    from dataclasses import replace

    from mm_assets.errors import SourceError

    other = DatasetStore(replace(dataset.spec, filters=()))
    stages.filtered_rows(other, "docs-00000")
    with pytest.raises(SourceError, match="made with another configuration"):
        publish.publish(dataset, "docs-00000")


def test_clean_keeps_what_a_kept_manifest_needs(dataset: DatasetStore) -> None:
    """Cleaning removes packed files of forgotten versions only, and a dry run removes nothing."""
    from dataclasses import replace

    first = publish.build_manifest(dataset)
    changed = DatasetStore(replace(dataset.spec, filters=({"type": "text_length", "min_chars": 50},)))
    for key in ("docs-00000", "docs-00001"):
        run_stages(changed, key)
    second = publish.build_manifest(changed)
    assert first.digest != second.digest
    assert publish.clean(changed, keep=2).files == ()
    planned = publish.clean(changed, keep=1, dry_run=True)
    assert dataset.store.exists(f"manifests/{first.digest}.json")
    done = publish.clean(changed, keep=1)
    assert done.files == planned.files
    assert f"manifests/{first.digest}.json" in done.files
    assert len([name for name in done.files if name.startswith("packed/")]) == 4
    with mm_assets.open(changed.store.url_of("manifest.json")) as opened:
        assert opened[0]["metadata"] is not None


def test_the_catalog_opens_in_duckdb(dataset: DatasetStore) -> None:
    """catalog.sql gives views over all partitions, and `sql_connection` has them open."""
    publish.build_manifest(dataset)
    connection = publish.sql_connection(dataset)
    counted = connection.execute("select partition, count(*) from rows group by 1 order by 1").fetchall()
    expected = [(key, dataset.record("rows", key).counts["rows"]) for key in ("docs-00000", "docs-00001")]
    assert counted == expected
    assert b"create or replace view filtered_rows" in dataset.store.read_bytes("catalog.sql")


def test_a_record_of_another_shape_is_refused(dataset: DatasetStore) -> None:
    """A record that somebody edited is an error that names the file."""
    from mm_assets.errors import SchemaMismatchError

    path = Path(dataset.store.path_of("records/docs-00000/rows.json"))
    value = json.loads(path.read_text())
    del value["files"]
    path.write_text(json.dumps(value))
    with pytest.raises(SchemaMismatchError, match=r"rows\.json: not a stage record"):
        dataset.record("rows", "docs-00000")
