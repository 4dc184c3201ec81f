"""The columns of rows: those declared, those of the first shard, and values that do not fit them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mm_assets
from mm_assets.errors import MmAssetsError, SourceError
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import losses
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState

from ..chain import at_work, declare, run_chain, run_partition
from ..shards import CAPTIONS, drops, make_shard, png, table, tiff, values


def test_a_column_that_a_whole_shard_lacks(tmp_path: Path) -> None:
    """A declared column that no sample of a shard has fails that partition alone, also if it is the first shard."""
    make_shard(tmp_path / "in" / "r.tar", {"0.json": {"other": 1}, "0.txt": "a"})
    make_shard(tmp_path / "in" / "s.tar", {"0.json": {"score": 0.5}, "0.txt": "a", "1.json": {}, "1.txt": "b"})
    make_shard(tmp_path / "in" / "t.tar", {"0.txt": "no JSON at all"})
    spec = declare(tmp_path / "root", tmp_path / "in", samples={"user_columns": ["score"]})
    dataset = DatasetStore(spec)
    register(dataset)
    for key in ("r", "t"):
        at_work(stages.raw_shards, dataset, key)
        with pytest.raises(SourceError, match=rf"{key}\.tar: .*'score'"):
            at_work(stages.rows, dataset, key)
    results = run_partition(dataset, "s")
    heads = [(r["sample_id"], r["score"]) for r in table(dataset, "rows") if r["modality"] == "metadata"]
    assert heads == [("0", 0.5), ("1", None)]
    assert results["rows"].record.counts["missing_values"] == 1


def test_a_column_that_no_shard_has(tmp_path: Path) -> None:
    """A declared column that is nowhere is reported at registration, with the key."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    with pytest.raises(MmAssetsError, match=r"s\.tar: .*'score', which samples\.user_columns asks for"):
        register(DatasetStore(declare(tmp_path / "root", shard, samples={"user_columns": ["score"]})))


def test_later_shards_conform_to_the_schema(tmp_path: Path) -> None:
    """Further keys and values of another type stay in the JSON, are counted, and change no column."""
    make_shard(tmp_path / "in" / "r.tar", {"0.json": {"n": 1, "tags": ["x"], "ok": True}, "0.txt": "a"})
    register(DatasetStore(declare(tmp_path / "root", tmp_path / "in")))
    later = {"0.json": {"n": "many", "tags": 3, "ok": 1, "new": 1}, "0.txt": "a", "1.json": {"n": 2}, "1.txt": "b"}
    make_shard(tmp_path / "in" / "s.tar", {**later, "0.png": png(1)})
    dataset, results = run_chain(declare(tmp_path / "root", tmp_path / "in"))
    assert results["s"]["rows"].schema == results["r"]["rows"].schema
    head, *_ = table(dataset, "filtered_rows")
    assert (head["n"], head["tags"], head["ok"]) == (None, None, None)
    assert json.loads(head["metadata_json"]) == {"n": "many", "tags": 3, "ok": 1, "new": 1}
    counts = results["s"]["rows"].record.counts
    assert (counts["kept.null_cast"], counts["kept.no_column"], counts["misfit_columns"]) == (3, 1, 2)
    notes = results["s"]["rows"].record.notes
    assert notes[0] == "no value fits its column: 'ok' 1, 'tags' 1"
    assert "`mm-assets register --dataset data --new-schema` decides it again" in notes[1]
    assert values(dataset)["0"]["metadata"]["new"] == 1
    with mm_assets.open(dataset.store.url_of("manifest.json")) as opened:
        assert len(opened) == 3


def test_reserved_names(tmp_path: Path) -> None:
    """Keys that have the names of reserved columns become user_<name>, also where they are asked for."""
    members = {"0.json": {"position": 7, "modality": "x", "user_modality": "y", "sample_id": "z"}, "0.txt": "a"}
    shard = make_shard(tmp_path / "s.tar", members)
    dataset, _ = run_chain(declare(tmp_path / "root", shard))
    head, row = table(dataset, "filtered_rows")
    assert (head["position"], head["modality"], head["sample_id"]) == (-1, "metadata", "0")
    assert (head["user_position"], head["user_sample_id"]) == (7, "z")
    assert {head["user_modality"], head["user_user_modality"]} == {"x", "y"}
    assert row["user_position"] is None
    asked, _ = run_chain(declare(tmp_path / "asked", shard, samples={"user_columns": ["sample_id", "position"]}))
    head, _ = table(asked, "filtered_rows")
    assert list(head)[-2:] == ["user_sample_id", "user_position"]
    assert (head["user_sample_id"], head["user_position"]) == ("z", 7)


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    """NaN and infinities, as Python writes them, cost no sample: they are null in JSON and columns, and reported."""
    members = {
        "0.json": '{"score": NaN, "box": {"x": -Infinity}, "n": 1, "tags": [1, NaN], "far": 1e400}',
        "0.txt": "a",
        "1.json": '{"score": 0.5, "box": {"x": 2}, "tags": [], "far": 1.5}',
        "1.txt": "b",
    }
    dataset, results = run_chain(declare(tmp_path / "root", make_shard(tmp_path / "s.tar", members)))
    assert drops(dataset) == []
    head, _, other, _ = table(dataset, "filtered_rows")
    stored = members["0.json"].replace("NaN", "null").replace("-Infinity", "null")
    assert (head["metadata_json"], other["metadata_json"]) == (stored, members["1.json"])
    assert values(dataset)["0"]["metadata"] == json.loads(stored)
    assert (head["score"], head["tags"], head["far"]) == (None, [1, None], float("inf"))
    assert (head["box"], head["n"], other["box"]) == ('{"x":null}', 1, '{"x":2}')
    counts = results["s"]["rows"].record.counts
    assert (counts["nonstandard_numbers"], counts["kept.repaired_json"]) == (3, 1)
    (fault,) = (loss for loss in losses(DatasetState(dataset), ["s"]) if loss.reason == "kept.repaired_json")
    assert (fault.member, fault.kind) == ("0.json", "kept")
    assert fault.advice.startswith("write null")


def test_fields_of_items(tmp_path: Path) -> None:
    """Lists of `per_image_fields` go to the image rows, item by item, through to the filtered rows."""
    members = {
        "a.json": {"texts": ["t", None, None], "images": [None, "x", "y"], "alt": ["first", "second"]},
        "a.tiff": tiff(1, 2),
    }
    shard = make_shard(tmp_path / "s.tar", members)
    dataset, _ = run_chain(declare(tmp_path / "root", shard, samples={"per_image_fields": ["alt"]}))
    assert [(r["position"], r["alt"]) for r in table(dataset, "filtered_rows")] == [
        (-1, None),
        (0, None),
        (1, "first"),
        (2, "second"),
    ]
