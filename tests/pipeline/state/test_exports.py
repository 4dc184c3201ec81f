"""Exports as a part of a dataset: what is exported again, and what remains."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_assets.errors import ConfigError, SchemaMismatchError, SourceError
from mm_assets.exports.base import ExportColumn
from mm_assets.exports.webdataset import TarShardWriter, WebDatasetExport
from mm_assets.pipeline.explore.status import dataset_status
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.load.tasks import load_partitions
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import Claims
from mm_assets.pipeline.state.clean import clean
from mm_assets.pipeline.state.exports import write_indexes
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.manifests import build_manifest
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState, chosen_partitions, planned_runs

from ..chain import declare, let_a_day_go_by, run_chain
from ..shards import make_shard
from .conftest import TEXTS


@pytest.fixture
def exported(dataset: DatasetStore, tmp_path: Path) -> DatasetStore:
    """The dataset of two partitions, which declares an export and has not run since."""
    return declaring(dataset.spec, out=str(tmp_path / "out"))


def declaring(spec: DatasetSpec, **options: Any) -> DatasetStore:
    """The dataset with one export to WebDataset."""
    return DatasetStore(spec.replace(exports=[{"format": "webdataset", **options}]))


def load(dataset: DatasetStore) -> dict[str, PartitionReport]:
    """Runs what is pending, as `mm-assets run`; returns the reports by partition."""
    state, reports = DatasetState(dataset), list[PartitionReport]()
    with Processes(0) as processes, Claims(dataset, "load") as claims:
        keys = chosen_partitions(state)
        load_partitions(state, keys, claims=claims, engine=processes, ended=reports.append, built=lambda _: None)
    return {report.partition: report for report in reports}


def out_of(dataset: DatasetStore) -> Path:
    return Path(dataset.spec.exports[0].out or dataset.store.path_of("exports/webdataset"))


def indexed(dataset: DatasetStore) -> dict[str, str]:
    """The folder of the export of each partition, by the index."""
    partitions = json.loads((out_of(dataset) / "exports.json").read_bytes())["partitions"]
    return {key: entry["folder"] for key, entry in partitions.items()}


def folders(dataset: DatasetStore) -> set[str]:
    return {path.name for path in out_of(dataset).iterdir() if path.is_dir()}


def test_a_load_exports_what_is_published_once(exported: DatasetStore) -> None:
    """An export that is declared later is made without a stage of the chain, and the index lists its shards."""
    state = DatasetState(exported)
    assert (state.pending, state.incomplete) == ([], ["a", "b"])
    assert dataset_status(exported).exports == {"export_webdataset": ("a", "b")}
    planned = planned_runs(state, state.incomplete)
    assert {stale.reason for stale in planned.values()} == {"export_webdataset is pending"}
    reports = load(exported)
    ended = {key: (report.results, report.failure) for key, report in reports.items()}
    assert ended == {"a": ({}, None), "b": ({}, None)}
    index = json.loads((out_of(exported) / "exports.json").read_bytes())
    assert (index["dataset"], index["format"], [*index["partitions"]]) == ("data", "webdataset", ["a", "b"])
    for key, entry in index["partitions"].items():
        with tarfile.open(out_of(exported) / entry["files"][0]) as tar:
            names = [name for name in tar.getnames() if name.endswith(".txt")]
        assert names == [f"{key}{name}" for name in TEXTS]
    assert load(exported) == {}
    assert dataset_status(exported).exports == {"export_webdataset": ()}


def test_only_what_changed_is_exported_again(tmp_path: Path) -> None:
    """A load of a changed shard exports its partition beside the former export, which `clean` deletes a day later."""
    for key in "ab":
        make_shard(tmp_path / "in" / f"{key}.tar", {f"{key}{name}": text for name, text in TEXTS.items()})
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in", pack="generic"))
    dataset = declaring(dataset.spec)
    load(dataset)
    before = indexed(dataset)
    make_shard(tmp_path / "in" / "b.tar", {"b0.txt": "something else"})
    register(dataset)
    assert [*load(dataset)] == ["b"]
    after = indexed(dataset)
    assert after["a"] == before["a"]
    assert folders(dataset) == {*before.values(), after["b"]}
    assert clean(dataset).files == ()
    let_a_day_go_by(dataset)
    deleted = clean(dataset).files
    assert [name for name in deleted if "exports" in name] == [str(out_of(dataset) / before["b"])]
    assert folders(dataset) == {*after.values()}
    assert DatasetState(dataset).incomplete == []


def test_exports_of_missing_partitions_remain_as_long_as_a_manifest_lists_them(tmp_path: Path) -> None:
    """The export of a partition whose shard is gone leaves the index, and is deleted a day after its manifest."""
    for key in "ab":
        make_shard(tmp_path / "in" / f"{key}.tar", {f"{key}{name}": text for name, text in TEXTS.items()})
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in", pack="generic"))
    dataset = declaring(dataset.spec)
    load(dataset)
    before = folders(dataset)
    (tmp_path / "in" / "b.tar").unlink()
    register(dataset)
    build_manifest(dataset)
    load(dataset)
    assert [*indexed(dataset)] == ["a"]
    let_a_day_go_by(dataset)
    clean(dataset, keep=2)
    assert folders(dataset) == before
    clean(dataset, keep=1)
    assert folders(dataset) == before
    let_a_day_go_by(dataset)
    clean(dataset, keep=1)
    assert folders(dataset) == {*indexed(dataset).values()}


@pytest.mark.parametrize("format_name", ["mds", "litdata", "energon", "hf"])
def test_the_exports_of_partitions_are_read_as_one(dataset: DatasetStore, tmp_path: Path, format_name: str) -> None:
    """A format with an index has one of all partitions, which names the files of each in its folder, in order."""
    dataset = DatasetStore(dataset.spec.replace(exports=[{"format": format_name, "out": str(tmp_path / "out")}]))
    assert [report.failure for report in load(dataset).values()] == [None, None]
    out = tmp_path / "out"
    if format_name == "mds":
        named = [shard["raw_data"]["basename"] for shard in json.loads((out / "index.json").read_bytes())["shards"]]
    elif format_name == "litdata":
        named = [chunk["filename"] for chunk in json.loads((out / "index.json").read_bytes())["chunks"]]
    elif format_name == "energon":
        named = yaml.safe_load((out / ".nv-meta/split.yaml").read_bytes())["split_parts"]["train"]
    else:
        card = yaml.safe_load((out / "README.md").read_text().split("---")[1])
        named = [
            str(path.relative_to(out))
            for glob in card["configs"][0]["data_files"][0]["path"]
            for path in out.glob(glob)
        ]
    entries = json.loads((out / "exports.json").read_bytes())["partitions"].values()
    assert named == [name for entry in entries for name in entry["files"] if not name.endswith(".idx")]
    assert len(named) == 2


def test_other_settings_are_another_export(exported: DatasetStore, tmp_path: Path) -> None:
    """A setting of the export makes all partitions pending, and no stage of the chain; its credentials do not."""
    load(exported)
    state = DatasetState(declaring(exported.spec, out=str(tmp_path / "out"), out_options={"auto_mkdir": True}))
    assert state.incomplete == []
    changed = declaring(exported.spec, out=str(tmp_path / "out"), shard_samples=1)
    assert DatasetState(changed).pending == []
    assert [*load(changed)] == ["a", "b"]
    assert len(folders(changed)) == 4
    entries = json.loads((tmp_path / "out" / "exports.json").read_bytes())["partitions"].values()
    assert [len(entry["files"]) for entry in entries] == [3, 3]
    assert DatasetState(exported).incomplete == [], "the former export is up to date until it is deleted"


def test_an_export_that_is_not_declared_any_more_remains(exported: DatasetStore) -> None:
    """Without the setting nothing lists, deletes or changes what was exported."""
    load(exported)
    before = {path: path.stat().st_mtime_ns for path in out_of(exported).rglob("*")}
    dataset = DatasetStore(exported.spec.replace(exports=[]))
    let_a_day_go_by(dataset)
    load(dataset)
    clean(dataset)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_failed_export_is_resumed(exported: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition stays published if its export fails; the next load writes the missing shards, and no other."""
    exported = declaring(exported.spec, out=str(tmp_path / "out"), shard_samples=1)
    open_shard, opened, is_full = WebDatasetExport.writer, list[str](), True

    def writer(folder: Path, name: str, columns: Sequence[ExportColumn], num_samples: int) -> TarShardWriter:
        opened.append(name)
        if is_full and len(opened) == 5:
            raise SourceError("disk", "is full")
        return open_shard(folder, name, columns, num_samples)

    monkeypatch.setattr(WebDatasetExport, "writer", staticmethod(writer))
    report = load(exported)["b"]
    assert report.failure is not None
    assert (report.ok, report.failure.stage, report.failure.detail) == (True, "export_webdataset", "is full")
    assert [*indexed(exported)] == ["a"]
    assert DatasetState(exported).incomplete == ["b"]
    is_full, opened = False, []
    assert load(exported)["b"].failure is None
    assert opened == ["shard-000001.tar", "shard-000002.tar"]
    assert [*indexed(exported)] == ["a", "b"]


@pytest.mark.parametrize("remains", ["complete", "deleted in part"])
def test_what_a_kill_left_is_used_or_replaced(exported: DatasetStore, remains: str) -> None:
    """A complete export without a record is taken as it is; what a deletion left is deleted and exported again."""
    load(exported)
    folder = indexed(exported)["a"]
    exported.store.delete(f"exports/webdataset/{folder}.json")
    shard = next((out_of(exported) / folder).glob("*.tar"))
    content, written = shard.read_bytes(), shard.stat().st_mtime_ns
    if remains != "complete":
        (out_of(exported) / folder / "export.json").unlink()
        shard.write_bytes(b"half of it")
    assert [*load(exported)] == ["a"]
    assert shard.read_bytes() == content
    assert (shard.stat().st_mtime_ns == written) == (remains == "complete")


def test_the_folder_of_another_dataset_is_refused(exported: DatasetStore) -> None:
    """Two datasets with one `out` would replace each other's index: the message names the first of them."""
    load(exported)
    other = DatasetStore(exported.spec.replace(name="other"))
    with pytest.raises(ConfigError, match="has the exports of the dataset data: give each dataset's exports an `out`"):
        write_indexes(other, {})


def test_a_damaged_record_is_reported(exported: DatasetStore) -> None:
    """The message names the file and what to do; after that the partition is exported again."""
    load(exported)
    name = f"exports/webdataset/{indexed(exported)['a']}.json"
    exported.store.write_bytes(name, json.dumps({"folder": 1}).encode())
    (out_of(exported) / "exports.json").unlink()
    with pytest.raises(SchemaMismatchError, match=r"is not the record of an export .* delete it"):
        load(exported)
    exported.store.delete(name)
    load(exported)
    assert [*indexed(exported)] == ["a", "b"]


@pytest.mark.parametrize(
    ("exports", "message"),
    [
        ([{"format": "webdatset"}], r"exports\[0\].format: is 'webdatset', allowed: .*did you mean webdataset"),
        ([{"format": "webdataset"}] * 2, "exports: has two exports called 'webdataset': give each a `name` of its own"),
        (
            [{"format": "webdataset", "out": "/x"}, {"format": "webdataset", "name": "other", "out": "/x"}],
            "exports: has two exports called '/x': give each a `out` of its own",
        ),
        ([{"format": "webdataset", "shard_samples": 0}], r"exports\[0\].shard_samples: .*at least 1"),
        ([{"format": "webdataset", "shards": 3}], r"exports\[0\].shards: is not a setting"),
    ],
)
def test_a_wrong_declaration_is_refused(exports: list[Mapping[str, Any]], message: str, tmp_path: Path) -> None:
    """The error names the export, the setting and what is allowed."""
    with pytest.raises(ConfigError, match=message):
        declare(tmp_path, tmp_path, exports=exports)
