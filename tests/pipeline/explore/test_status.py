"""The state of a dataset by listings: what is published, pending, failed, new, and in the manifest."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from mm_assets.pipeline.explore.status import dataset_status
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.claims import Claims
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions
from mm_assets.storage.store import Store

from ..chain import declare, run_chain, run_once
from ..shards import CAPTIONS, make_shard


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a dataset of three partitions in a manifest, in `root`, and its shards, in `in`; and a copy."""
    folder, copy = tmp_path_factory.mktemp("status"), tmp_path_factory.mktemp("copy")
    for name in "abc":
        make_shard(folder / "in" / f"{name}.tar", {f"{name}{member}": value for member, value in CAPTIONS.items()})
    run_chain(declare(folder / "root", folder / "in"))
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    return folder, copy


@pytest.fixture
def dataset(made: tuple[Path, Path]) -> DatasetStore:
    """The dataset, whatever a test before has done to it and to its shards."""
    folder, copy = made
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    found = DatasetStore(declare(folder / "root", folder / "in"))
    register(found)
    assert pending_partitions(found) == []
    return found


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_a_dataset_that_is_not_registered(tmp_path: Path) -> None:
    """Before the first run there are new shards, and looking at them makes no file; without a shard, it is refused."""
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    dataset = DatasetStore(declare(tmp_path / "root", tmp_path / "in"))
    status = dataset_status(dataset)
    assert (status.registered, status.pending, status.manifest, status.refused) == ((), {}, None, None)
    assert status.shards is not None
    assert status.shards.new == ("a",)
    assert not (tmp_path / "root").exists()
    (tmp_path / "in" / "a.tar").unlink()
    assert "no shard was found there" in str(dataset_status(dataset).refused)


def test_what_is_up_to_date_is_known_without_its_records(
    dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing to do, the same three files are read for any number of partitions, and none is written."""
    read: list[str] = []
    for method in ("read_bytes", "found_bytes"):
        real = getattr(Store, method)
        monkeypatch.setattr(Store, method, lambda self, name, real=real: (read.append(name), real(self, name))[1])
    before = files(Path(dataset.spec.root))
    status = dataset_status(DatasetStore(dataset.spec))
    assert (status.num_published, status.pending, status.failures, status.unknown) == (3, {}, {}, ())
    assert status.manifest is not None
    assert (status.manifest.num_partitions, status.manifest.left_out, status.manifest.outdated) == (3, {}, {})
    assert sorted(read) == ["manifest.json", "schema.json", "shards.json"]
    assert files(Path(dataset.spec.root)) == before


def test_shards_since_the_registration(dataset: DatasetStore) -> None:
    """New, changed, touched, gone and young shards are distinguished by their listing, and none is opened."""
    folder = Path(dataset.spec.shards)
    make_shard(folder / "new.tar", CAPTIONS)
    make_shard(folder / "a.tar", {"x.txt": "another", "x.png": CAPTIONS["0.png"]})
    (folder / "b.tar").chmod(0o600)
    os.utime(folder / "b.tar")
    (folder / "c.tar").unlink()
    for path in folder.iterdir():
        path.chmod(0)
    shards = dataset_status(dataset).shards
    assert shards is not None
    assert (shards.new, shards.changed, shards.touched, shards.gone) == (("new",), ("a",), ("b",), ("c",))
    waiting = dataset_status(DatasetStore(dataset.spec.replace(settle_seconds=3600.0))).shards
    assert waiting is not None
    assert (waiting.unsettled, waiting.new, waiting.gone) == (("a", "b", "new"), (), ("c",))


@pytest.mark.parametrize(
    ("shards", "says"), [("gone/*.tar", "there is no folder .*/gone$"), ("gone", "there is no such file or folder$")]
)
def test_a_missing_folder_is_named(tmp_path: Path, shards: str, says: str) -> None:
    """A glob in a folder that does not exist says so, with the declaration's file and key."""
    refused = str(dataset_status(DatasetStore(declare(tmp_path / "root", tmp_path / shards))).refused)
    assert re.search(rf"no shard was found there \(`shards` of defs\.yaml\): {says}", refused)


def test_a_place_without_shards_is_refused(dataset: DatasetStore) -> None:
    """A folder that is not mounted looks like one without shards: what a run would say is said."""
    shutil.rmtree(dataset.spec.shards)
    status = dataset_status(dataset)
    assert "though it held 3 partitions before" in str(status.refused)
    assert status.num_published == 3


def test_settings_that_decide_the_schema_are_refused(dataset: DatasetStore) -> None:
    """A declaration with another `pack` says what a run would say, and what is pending by it is shown as well."""
    status = dataset_status(DatasetStore(dataset.spec.replace(pack="generic")))
    assert "--new-schema" in str(status.refused)
    assert set(status.pending) == {"a", "b", "c"}


@pytest.mark.parametrize("broken", ["tar", "check"])
def test_failures_have_their_error(dataset: DatasetStore, broken: str) -> None:
    """A partition whose last run failed has the error, one that a check stopped the check's words, as its reason."""
    settings: dict[str, Any] = {"filters": [{"type": "text_length", "min_chars": 99}], "max_dropped": 0}
    if broken == "tar":
        shard = Path(dataset.spec.shards) / "a.tar"
        shard.write_bytes(shard.read_bytes()[:700])
        settings = {}
    changed = DatasetStore(dataset.spec.replace(**settings))
    register(changed)
    assert not run_once(changed.spec, changed.partition("a"), changed.schema()).ok
    status = dataset_status(changed)
    stale, failure = status.pending["a"], status.failures["a"]
    if broken == "tar":
        assert (failure.stage, stale.reason) == ("raw_shards", "its shards changed")
    else:
        assert (failure.stage, stale.reason) == ("filtered_rows", "filtered_rows failed its check losses")
        assert "max_dropped" in stale.detail
        assert failure.detail.startswith("check losses: ")


def test_the_manifest_and_what_is_published_differ(dataset: DatasetStore) -> None:
    """Partitions that were published, changed or removed since the manifest was made are listed with the reason."""
    folder = Path(dataset.spec.shards)
    make_shard(folder / "new.tar", CAPTIONS)
    make_shard(folder / "a.tar", {**CAPTIONS, "x.txt": "another"})
    make_shard(folder / "b.tar", {**CAPTIONS, "y.txt": "another"})
    (folder / "c.tar").unlink()
    register(dataset)
    for key in ("new", "b"):
        assert run_once(dataset.spec, dataset.partition(key), dataset.schema()).ok
    manifest = dataset_status(dataset).manifest
    assert manifest is not None
    assert manifest.left_out == {"new": "published since"}
    assert manifest.outdated == {
        "a": "its shards changed",
        "b": "listed with former shards or settings",
        "c": "its shards are missing",
    }
    manifests.build_manifest(dataset)
    manifest = dataset_status(dataset).manifest
    assert manifest is not None
    assert (manifest.left_out, manifest.outdated) == ({"a": "its shards changed"}, {})
    dataset.store.write_bytes("manifest.json", b"[")
    assert "is not a manifest" in dataset_status(dataset).unknown[0]
    assert pending_partitions(dataset) == ["a"]


def test_what_live_claims_cover_is_running(dataset: DatasetStore) -> None:
    """Of what a load has claimed the pending partitions run, or all that it names; a released claim covers none."""
    make_shard(Path(dataset.spec.shards) / "a.tar", {**CAPTIONS, "x.txt": "another"})
    register(dataset)
    for keys, running in ((None, ["a"]), (["a", "b"], ["a"]), (["b"], ["b"])):
        with Claims(dataset, "a-load") as claims:
            claims.take(keys)
            found = dataset_status(dataset).running
        assert list(found) == running
        assert {claim.load for claim in found.values()} == {"a-load"}
        assert all(claim.host.startswith(socket.gethostname()) for claim in found.values())
    assert dataset_status(dataset).running == {}
