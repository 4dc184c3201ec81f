"""Markers, manifests and cleaning up: what a training job may open, and what may go."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import mm_assets
from mm_assets.pipeline.chain import PACKED_STAGES, RAW_SHARDS, ROWS
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import clean, manifests, sql_views
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import Present, pending_partitions, pending_reasons
from mm_assets.storage.store import Store

from ..pipeline.chain import at_work, marker_of

SpecOf = Callable[..., DatasetSpec]


def run_stages(dataset: DatasetStore, key: str) -> None:
    """The pack job without Dagster."""
    for stage in (stages.raw_shards, stages.rows, stages.materialized_rows, stages.filtered_rows):
        assert at_work(stage, dataset, key).passed
    assert all(result.passed for result in at_work(stages.packed, dataset, key).values())
    at_work(publish.publish, dataset, key)


@pytest.fixture
def dataset(demo_spec: SpecOf, inbox: Callable[..., Path]) -> DatasetStore:
    """Two published partitions of documents."""
    store = DatasetStore(demo_spec("docs", shards=str(inbox("docs-00000.tar", "docs-00001.tar"))))
    for partition in register(store).partitions:
        run_stages(store, partition.key)
    return store


def partitions_of(report: manifests.ManifestReport) -> list[str]:
    return [shard["partition"] for shard in report.manifest["shards"]]


def test_a_manifest_names_files_that_open(dataset: DatasetStore) -> None:
    """The manifest's files are there with the digests it says, and its digest is its name."""
    import hashlib

    report = manifests.build_manifest(dataset)
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
    assert manifests.build_manifest(dataset).digest == manifests.build_manifest(dataset).digest


def test_a_partition_whose_files_went_astray_is_left_out(dataset: DatasetStore) -> None:
    """A packed file that is gone or cut keeps its partition out of the manifest, with the reason."""
    marker = marker_of(dataset, "docs-00001")
    assert marker is not None
    Path(dataset.store.path_of(marker["files"]["mult"]["path"])).unlink()
    report = manifests.build_manifest(dataset)
    assert partitions_of(report) == ["docs-00000"]
    assert "is gone" in report.left_out["docs-00001"]


def test_a_partition_made_again_and_not_published_is_left_out(dataset: DatasetStore) -> None:
    """When a stage has written other rows since publication, the marker no longer stands for them."""
    other = DatasetStore(dataset.spec.replace(filters=({"type": "text_length", "min_chars": 50},)))
    assert at_work(stages.filtered_rows, other, "docs-00000").passed
    report = manifests.build_manifest(dataset)
    assert partitions_of(report) == ["docs-00001"]
    assert "docs-00000" in report.left_out


def test_a_removed_shard_leaves_the_next_manifest(dataset: DatasetStore) -> None:
    """A shard that is gone is reported at registration and its partition is not in the next manifest."""
    Path(dataset.spec.shards, "docs-00001.tar").unlink()
    assert register(dataset).removed == ("docs-00001",)
    report = manifests.build_manifest(dataset)
    assert partitions_of(report) == ["docs-00000"]
    assert report.left_out["docs-00001"] == "its shards are gone"


def test_a_changed_shard_is_pending_again(dataset: DatasetStore, demo_shards: Path) -> None:
    """A replaced shard makes its partition pending and keeps the old version out of the next manifest."""
    shutil.copyfile(demo_shards / "docs-00000.tar", Path(dataset.spec.shards, "docs-00001.tar"))
    assert pending_partitions(dataset) == []
    assert register(dataset).changed == ("docs-00001",)
    assert pending_partitions(dataset) == ["docs-00001"]
    report = manifests.build_manifest(dataset)
    assert partitions_of(report) == ["docs-00000"]
    assert report.left_out == {"docs-00001": "it is not published with its present shards, settings, code and schema"}
    assert pending_reasons(Present(dataset)) == {"docs-00001": "its shards changed"}


def test_publishing_out_of_order_is_refused(dataset: DatasetStore) -> None:
    """Files that were not made from one another are not published together."""
    from mm_assets.errors import SourceError

    other = DatasetStore(dataset.spec.replace(filters=()))
    at_work(stages.filtered_rows, other, "docs-00000")
    with pytest.raises(SourceError, match="`filters` changed"):
        at_work(publish.publish, dataset, "docs-00000")


def test_clean_keeps_what_a_kept_manifest_needs(dataset: DatasetStore) -> None:
    """Cleaning removes packed files of forgotten versions only, and a dry run removes nothing."""
    first = manifests.build_manifest(dataset)
    changed = DatasetStore(dataset.spec.replace(filters=({"type": "text_length", "min_chars": 50},)))
    for key in ("docs-00000", "docs-00001"):
        run_stages(changed, key)
    second = manifests.build_manifest(changed)
    assert first.digest != second.digest
    assert clean.clean(changed, keep=2).files == ()
    planned = clean.clean(changed, keep=1, dry_run=True)
    assert dataset.store.exists(f"manifests/{first.digest}.json")
    done = clean.clean(changed, keep=1)
    assert done.files == planned.files
    assert f"manifests/{first.digest}.json" in done.files
    assert len([name for name in done.files if name.startswith("packed/")]) == 4
    with mm_assets.open(changed.store.url_of("manifest.json")) as opened:
        assert opened[0]["metadata"] is not None


def test_the_catalog_opens_in_duckdb(dataset: DatasetStore) -> None:
    """catalog.sql gives views over all partitions, and `sql_connection` has them open."""
    manifests.build_manifest(dataset)
    connection = sql_views.sql_connection(dataset)
    counted = connection.execute("select partition, count(*) from rows group by 1 order by 1").fetchall()
    expected = [(key, dataset.records(key)[ROWS].counts["rows"]) for key in ("docs-00000", "docs-00001")]
    assert counted == expected
    assert b"create or replace view filtered_rows" in dataset.store.read_bytes("catalog.sql")


def test_a_record_of_another_shape_is_refused(dataset: DatasetStore) -> None:
    """A record that was edited is an error that names the file."""
    from mm_assets.errors import SchemaMismatchError

    path = Path(dataset.store.path_of("records/docs-00000.json"))
    value = json.loads(path.read_text())
    del value["stages"]["rows"]["files"]
    path.write_text(json.dumps(value))
    with pytest.raises(SchemaMismatchError, match=r"records/docs-00000\.json: rows: not a stage record"):
        dataset.records("docs-00000")[ROWS]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"version": 0}'])
def test_damaged_records_are_replaced_by_the_first_stage_only(dataset: DatasetStore, content: bytes) -> None:
    """A stage that needs the records names the file and the command; indexing the shards begins them again."""
    from mm_assets.errors import SchemaMismatchError

    dataset.store.write_bytes(dataset.records_name("docs-00000"), content)
    for make in (stages.rows, publish.publish):
        with pytest.raises(
            SchemaMismatchError, match=r"docs-00000\.json: not the records .* `mm-assets run --dataset docs"
        ):
            at_work(make, dataset, "docs-00000")
    at_work(stages.raw_shards, dataset, "docs-00000")
    assert list(dataset.records("docs-00000")) == [RAW_SHARDS]


def test_a_manifest_reads_no_records(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The markers hold what a manifest and cleaning need: no file of records is opened for either."""
    read: list[str] = []
    found_bytes = Store.found_bytes
    monkeypatch.setattr(Store, "found_bytes", lambda self, name: (read.append(name), found_bytes(self, name))[1])
    manifests.build_manifest(dataset)
    clean.clean(dataset)
    assert "cache/markers.json" in read
    assert not [name for name in read if name.startswith("records/")]
    marker = marker_of(dataset, "docs-00000")
    assert marker is not None
    assert marker["record"]["sha256"] == dataset.store.digest("records/docs-00000.json")


def test_what_is_indexed_is_what_was_registered(dataset: DatasetStore, demo_shards: Path) -> None:
    """A shard that is being replaced after its registration is not indexed half, but refused with what to do."""
    from mm_assets.errors import SourceError

    shutil.copyfile(demo_shards / "docs-00000.tar", Path(dataset.spec.shards, "docs-00001.tar"))
    with pytest.raises(SourceError, match=r"changed since it was registered .*mm-assets register"):
        at_work(stages.raw_shards, dataset, "docs-00001")


def test_shards_that_are_all_gone_change_nothing(dataset: DatasetStore) -> None:
    """A place that looks empty, as an unmounted folder does, is an error and unregisters nothing."""
    from mm_assets.errors import SourceError

    for shard in Path(dataset.spec.shards).iterdir():
        shard.unlink()
    with pytest.raises(SourceError, match="no shard was found there, though it held 2 partitions before"):
        register(dataset, allow_empty=True)
    assert sorted(dataset.partitions()) == ["docs-00000", "docs-00001"]


def test_other_shards_do_not_take_over_a_dataset(dataset: DatasetStore, demo_shards: Path) -> None:
    """Shards of another place under the same name are refused, because they would be packed by the first one's plan."""
    from mm_assets.errors import ConfigError

    other = DatasetStore(dataset.spec.replace(shards=str(demo_shards / "speech-*.tar")))
    with pytest.raises(ConfigError, match="use another dataset name or root"):
        register(other)
    assert register(other, new_schema=True).added == ("speech-00000",)


def test_a_group_stays_registered_while_a_shard_joins_it(demo_spec: SpecOf, inbox: Callable[..., Path]) -> None:
    """A young shard makes its group wait; what is registered of the group stands until then."""
    spec = demo_spec("docs", shards=str(inbox("docs-00000.tar")), partition_pattern=r"(docs)-\d+")
    assert [p.key for p in register(DatasetStore(spec)).partitions] == ["docs"]
    inbox("docs-00001.tar")
    found = register(DatasetStore(spec.replace(settle_seconds=3600.0)))
    assert (found.removed, found.changed, len(found.unsettled)) == ((), (), 2)
    (partition,) = found.partitions
    assert len(partition.shards) == 1


def test_clean_leaves_what_a_run_is_about_to_publish(dataset: DatasetStore) -> None:
    """Packed files that are recorded and not yet published stay; those of a partition that is gone go."""
    manifests.build_manifest(dataset)
    changed = DatasetStore(dataset.spec.replace(filters=({"type": "text_length", "min_chars": 50},)))
    at_work(stages.filtered_rows, changed, "docs-00000")
    at_work(stages.packed, changed, "docs-00000")
    clean.clean(changed, keep=1)
    at_work(publish.publish, changed, "docs-00000")
    Path(dataset.spec.shards, "docs-00001.tar").unlink()
    register(changed)
    manifests.build_manifest(changed)
    gone = clean.clean(changed, keep=1).files
    assert any(name.startswith("packed/docs-00001.") for name in gone)
    assert "rows/docs-00001.parquet" in gone
    assert not [name for name in gone if "docs-00000." in name and "filtered_rows" in name]


def test_a_lost_packed_file_is_made_again(dataset: DatasetStore) -> None:
    """A published partition whose packed file is gone is pending, and is not published without it."""
    from mm_assets.errors import SourceError

    marker = marker_of(dataset, "docs-00000")
    assert marker is not None
    Path(dataset.store.path_of(marker["files"]["mstr"]["path"])).unlink()
    assert pending_partitions(dataset) == ["docs-00000"]
    with pytest.raises(SourceError, match=r"\.mstr is gone"):
        at_work(publish.publish, dataset, "docs-00000")


def test_a_table_that_is_not_its_record_is_refused(dataset: DatasetStore) -> None:
    """A file that was replaced without its record, as by a kill between the two, is not read on."""
    from mm_assets.errors import SourceError

    path = Path(dataset.store.path_of("rows/docs-00000.parquet"))
    path.write_bytes(Path(dataset.store.path_of("rows/docs-00001.parquet")).read_bytes())
    with pytest.raises(SourceError, match=r"expected \d+ bytes as recorded: materialize rows again"):
        at_work(stages.materialized_rows, dataset, "docs-00000")


def test_a_file_found_damaged_is_no_longer_published(dataset: DatasetStore) -> None:
    """When a check of a published file fails afterwards, its partition leaves the next manifest."""
    file = dataset.records("docs-00000")[PACKED_STAGES["mult"]].files["mult"]
    path = Path(dataset.store.path_of(file.path))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert not at_work(stages.recheck, dataset, "docs-00000", PACKED_STAGES["mult"]).passed
    assert partitions_of(manifests.build_manifest(dataset)) == ["docs-00001"]
    assert pending_partitions(dataset) == ["docs-00000"]
