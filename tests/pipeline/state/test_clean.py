"""Cleaning up: what may be deleted, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import mm_assets
from mm_assets.errors import ChangedError
from mm_assets.fields import NDArrayField
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.state.clean import clean
from mm_assets.pipeline.state.folder import NOTE, DatasetStore
from mm_assets.pipeline.state.manifests import build_manifest
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.storage.store import TEMPORARY, Snapshot, Store

from ..chain import add_stream, at_work, declare, let_a_day_go_by, record_of, run_chain, run_partition

FILTERS = ({"type": "text_length", "min_chars": 9},)  # drops a text of each shard


def test_clean_keeps_what_a_kept_manifest_needs(dataset: DatasetStore) -> None:
    """Cleaning deletes the files of forgotten versions only, a day later, and a dry run deletes nothing."""
    first = build_manifest(dataset)
    changed = DatasetStore(dataset.spec.replace(filters=FILTERS))
    for key in ("a", "b"):
        run_partition(changed, key)
    second = build_manifest(changed)
    assert first.digest != second.digest
    let_a_day_go_by(dataset)
    assert clean(changed, keep=2).files == ()
    planned = clean(changed, keep=1, dry_run=True)
    assert dataset.store.exists(f"manifests/{first.digest}.json")
    done = clean(changed, keep=1)
    assert done.files == planned.files
    assert f"manifests/{first.digest}.json" in done.files
    assert len([name for name in done.files if name.startswith("records/")]) == 2
    assert not [name for name in done.files if name.startswith("packed/")], "files are left for a day"
    let_a_day_go_by(dataset)
    done = clean(changed, keep=1)
    assert len([name for name in done.files if name.startswith("packed/")]) == 4
    with mm_assets.open(changed.store.url_of("manifest.json")) as opened:
        assert len(opened) == second.manifest["num_samples"]


def test_clean_counts_what_waits_for_its_day(dataset: DatasetStore) -> None:
    """Records of former settings, and the files that they alone name, wait from the moment that nothing needs them."""
    changed = DatasetStore(dataset.spec.replace(filters=FILTERS))
    for key in ("a", "b"):
        run_partition(changed, key)
    build_manifest(changed)
    former, present = (record_of(one, "a") for one in (dataset, changed))
    assert former is not None
    assert present is not None
    files = [{file.path for file in (*one.packed.values(), *one.tables.values())} for one in (former, present)]
    waiting = 2 * (1 + len(files[0] - files[1]))
    for dry_run in (True, False):
        report = clean(changed, keep=1, dry_run=dry_run)
        assert [name for name in report.files if not name.startswith("manifests/")] == []
        assert report.num_waiting == waiting


def test_clean_leaves_what_a_run_is_about_to_publish(inbox: Path, tmp_path: Path) -> None:
    """Files that an attempt names stay, however old they are; those of a partition that is gone are deleted."""
    dataset, _ = run_chain(declare(tmp_path / "root", inbox, pack="generic"))
    changed = DatasetStore(dataset.spec.replace(filters=FILTERS))
    at_work(stages.filtered_rows, changed, "a")
    at_work(stages.packed, changed, "a")
    let_a_day_go_by(dataset)
    clean(changed, keep=1)
    at_work(publish.publish, changed, "a")
    (inbox / "b.tar").unlink()
    register(changed)
    build_manifest(changed)
    deleted: list[str] = []
    for _ in range(2):
        let_a_day_go_by(dataset)
        deleted += clean(changed, keep=1).files
    assert any(name.startswith("packed/b.") for name in deleted)
    assert any(name.startswith("rows/b.") for name in deleted)
    record = record_of(changed, "a")
    assert record is not None
    assert not {file.path for file in (*record.packed.values(), *record.tables.values())} & {*deleted}


def test_clean_deletes_what_killed_writers_left(dataset: DatasetStore) -> None:
    """Temporary files are deleted after a day in whichever folder they are, and young ones stay."""
    folders = ("rows/", "packed/", "records/", "attempts/", "claims/", "manifests/", "")
    names = [f"{folder}.x.17-0a1b2c3d{TEMPORARY}" for folder in folders]
    for name in names:
        path = dataset.store.local_path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    assert clean(dataset).files == ()
    let_a_day_go_by(dataset)
    assert {*clean(dataset).files} == {*names}
    assert DatasetState(dataset).pending == []


def test_clean_keeps_what_the_newest_manifest_needs_without_its_copy(dataset: DatasetStore) -> None:
    """Readers open ``manifest.json``: its files stay if its copy was deleted, and settings have changed since."""
    for name in dataset.store.sizes("manifests"):
        dataset.store.delete(name)
    changed = DatasetStore(dataset.spec.replace(filters=FILTERS))
    for _ in range(3):
        clean(changed, keep=1)
        let_a_day_go_by(dataset)
    with mm_assets.open(dataset.store.url_of("manifest.json")) as opened:
        assert opened.verify().ok


def test_clean_leaves_a_day_to_readers_of_a_manifest_whose_record_is_missing(dataset: DatasetStore) -> None:
    """A slow cleaner may delete a record that the newest manifest names: its files outlive that manifest by a day."""
    clean(dataset)  # the first leaves everything for a day
    for name in (*dataset.store.sizes("records"), *dataset.store.sizes("manifests")):
        dataset.store.delete(name)
    let_a_day_go_by(dataset)
    with mm_assets.open(dataset.store.url_of("manifest.json")) as opened:
        changed = DatasetStore(dataset.spec.replace(filters=FILTERS))
        assert build_manifest(changed).manifest["num_samples"] == 0
        clean(changed, keep=1)
        assert opened.verify().ok
    let_a_day_go_by(dataset)
    assert [name for name in clean(changed, keep=1).files if name.startswith("packed/")]


def test_a_cleaner_does_not_take_the_note_of_another_one_for_its_own(
    dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleaner deletes nothing if another one writes its note right after the cleaner wrote its own."""
    replace, contents = Store.replace, iter((b"{}", b'{"losses": []}'))

    def replace_and_lose(store: Store, before: Snapshot, content: bytes) -> None:
        replace(store, before, content)
        if before.name == NOTE:
            replace(store, store.snapshot(NOTE), next(contents))

    monkeypatch.setattr(Store, "replace", replace_and_lose)
    let_a_day_go_by(dataset)
    for _ in range(2):
        with pytest.raises(ChangedError, match="another process cleans the dataset"):
            clean(dataset, keep=1)
    monkeypatch.undo()
    assert build_manifest(dataset).left_out == {}


def test_clean_keeps_indexes_of_kept_manifests(dataset: DatasetStore) -> None:
    """The index of a kept manifest stays; that of another goes after a day, then its files, unless they are shared."""
    field = NDArrayField("float32", (2,))
    with mm_assets.open(dataset.store.url_of("manifest.json")) as data:
        values = {sample_id: np.array([1, number], np.float32) for number, sample_id in enumerate(data.sample_ids)}
    add_stream(dataset, "vector", field, values)

    def build(metric: Literal["cosine", "l2"] = "cosine") -> str:
        with mm_assets.open(dataset.store.url_of("manifest.json")) as data:
            assert data.build_index("vector", metric=metric).num_vectors == len(values)
            return data.search([1.0, 1.0], "vector", exact=False, metric=metric).ids[0]

    def left() -> tuple[int, int]:
        names = [*dataset.store.sizes("indexes")]
        return sum(name.endswith(".json") for name in names), sum(name.endswith(".vectors") for name in names)

    assert build() == build("l2")
    deleted: list[str] = []
    for _ in range(3):
        let_a_day_go_by(dataset)
        deleted += clean(dataset, keep=1).files
    assert [name for name in deleted if name.startswith("indexes/")] == []
    assert left() == (2, 2)
    add_stream(dataset, "other", field, values)
    assert build() == build("l2")
    assert left() == (2, 2), "another stream changes nothing"
    path = dataset.store.local_path("indexes/x.vectors")
    path.write_bytes(b"of a killed writer")
    assert clean(dataset, keep=1).num_waiting >= 1
    let_a_day_go_by(dataset)
    assert clean(dataset, keep=1).files == ("indexes/x.vectors",)
    for name in dataset.store.sizes("streams"):
        dataset.store.delete(name)
    build_manifest(dataset)
    let_a_day_go_by(dataset)
    clean(dataset, keep=1)
    assert left() == (0, 2)
    clean(dataset, keep=1)
    assert left() == (0, 0)
