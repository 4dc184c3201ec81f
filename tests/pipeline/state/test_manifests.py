"""Manifests: what a training job may open, and which partitions are in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import mm_assets
from mm_assets.dataset.manifest import file_path, manifest_partitions
from mm_assets.pipeline.chain import PACKED_STAGES, ROWS
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.state import manifests, sql_views
from mm_assets.pipeline.state.clean import clean
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState, pending_partitions, pending_reasons
from mm_assets.storage.store import Store

from ..chain import at_work, declare, record_of, run_chain, run_partition, stages_of
from ..shards import make_shard


def partitions_of(report: manifests.ManifestReport) -> list[str]:
    return list(report.manifest["partitions"]["key"])


def test_a_manifest_names_files_that_open(dataset: DatasetStore) -> None:
    """The manifest's files are there with the digests it states, and its digest is its name."""
    report = manifests.build_manifest(dataset)
    assert partitions_of(report) == ["a", "b"]
    content = dataset.store.read_bytes(f"manifests/{report.digest}.json")
    assert hashlib.sha256(content).hexdigest() == report.digest
    assert dataset.store.read_bytes("manifest.json") == content
    for key, entry in manifest_partitions(report.manifest, name="").items():
        assert entry.packed.keys() == {"mult", "mstr"}
        for kind, (size, sha256) in (*entry.packed.items(), *entry.tables.items()):
            file = dataset.store.read_bytes(file_path(kind, key, sha256))
            assert len(file) == size
            assert hashlib.sha256(file).hexdigest().startswith(sha256)
    with mm_assets.open(dataset.store.url_of(f"manifests/{report.digest}.json")) as opened:
        assert len(opened) == report.manifest["num_samples"]


def test_the_same_partitions_give_the_same_manifest(dataset: DatasetStore) -> None:
    """A manifest is a function of what it lists."""
    assert manifests.build_manifest(dataset).digest == manifests.build_manifest(dataset).digest


def test_a_partition_without_its_file_is_left_out_and_pending(dataset: DatasetStore) -> None:
    """A missing packed file keeps its partition out of the manifest, with the reason, and the next run packs it."""
    record = record_of(dataset, "b")
    assert record is not None
    dataset.store.delete(record.packed["mult"].path)
    report = manifests.build_manifest(dataset)
    assert partitions_of(report) == ["a"]
    assert record.packed["mult"].path in report.left_out["b"]
    assert report.withdrawn == report.left_out
    assert pending_partitions(dataset) == ["b"]
    run_partition(dataset, "b")
    assert partitions_of(manifests.build_manifest(dataset)) == ["a", "b"]


def test_a_run_with_other_settings_changes_nothing_published(dataset: DatasetStore) -> None:
    """A stage that wrote other rows wrote another file: what is published stays as it is."""
    before = manifests.build_manifest(dataset)
    other = DatasetStore(dataset.spec.replace(filters=({"type": "text_length", "min_chars": 9},)))
    assert at_work(stages.filtered_rows, other, "a").passed
    report = manifests.build_manifest(dataset)
    assert report.digest == before.digest
    assert report.left_out == {}


def test_other_shards_leave_the_next_manifest(inbox: Path, tmp_path: Path) -> None:
    """Partitions of a replaced and of a removed shard are reported at registration, and in no manifest after it."""
    dataset, _ = run_chain(declare(tmp_path / "root", inbox, pack="generic"))
    make_shard(inbox / "a.tar", {"0.txt": "a dog"})
    (inbox / "b.tar").unlink()
    assert pending_partitions(dataset) == []
    found = register(dataset)
    assert (found.changed, found.removed) == (("a",), ("b",))
    assert pending_partitions(dataset) == ["a"]
    report = manifests.build_manifest(dataset)
    assert partitions_of(report) == []
    assert report.left_out == {
        "a": "it is not published with its present shards, settings, code and schema",
        "b": "its shards are missing",
    }
    assert pending_reasons(DatasetState(dataset)) == {"a": "its shards changed"}


def test_the_catalog_opens_in_duckdb(dataset: DatasetStore) -> None:
    """catalog.sql gives views over all partitions, and `sql_connection` has them open."""
    manifests.build_manifest(dataset)
    connection = sql_views.sql_connection(DatasetState(dataset))
    counted = connection.execute("select partition, count(*) from rows group by 1 order by 1").fetchall()
    assert counted == [(key, stages_of(dataset, key)[ROWS].counts["rows"]) for key in ("a", "b")]
    assert b"create or replace view filtered_rows" in dataset.store.read_bytes("catalog.sql")


def test_a_manifest_reads_no_record_that_the_last_one_names(
    dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest before has what the next one and cleaning need."""
    manifests.build_manifest(dataset)
    read: list[str] = []
    found_bytes = Store.found_bytes
    monkeypatch.setattr(Store, "found_bytes", lambda self, name: (read.append(name), found_bytes(self, name))[1])
    manifests.build_manifest(dataset)
    clean(dataset)
    assert "manifest.json" in read
    assert not [name for name in read if name.startswith("records/")]


def test_a_file_found_damaged_is_no_longer_published(dataset: DatasetStore) -> None:
    """When a check of a published file fails afterwards, its partition leaves the next manifest."""
    file = stages_of(dataset, "a")[PACKED_STAGES["mult"]].files["mult"]
    path = Path(dataset.store.path_of(file.path))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert not at_work(stages.recheck, dataset, "a", PACKED_STAGES["mult"]).passed
    assert partitions_of(manifests.build_manifest(dataset)) == ["b"]
    assert pending_partitions(dataset) == ["a"]
