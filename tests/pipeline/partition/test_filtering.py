"""Filters, annotators and packing over whole partitions, and how often they read an image's header."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mm_assets.errors import ConfigError
from mm_assets.media.header import HeaderReader
from mm_assets.media.images import ImageInfo, probe_image
from mm_assets.pipeline.chain import FILTERED_ROWS, MATERIALIZED_ROWS, PACKED_STAGES
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.partition.stage_run import Run

from ..chain import at_work, declare, run_chain, stages_of
from ..shards import CAPTIONS, DOCUMENTS, Members, drops, make_shard, pixels, png, table, values


@pytest.mark.parametrize("members", [DOCUMENTS, CAPTIONS], ids=["sequence", "one"])
def test_packing_probes_each_image_header_once(
    tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing both formats and checking both files probe each image header once together."""
    dataset, _ = run_chain(declare(tmp_path / "store", make_shard(tmp_path / "in" / "s.tar", members)))
    probed: list[int] = []

    def probe(data: bytes) -> ImageInfo:
        probed.append(len(data))
        return probe_image(data)

    monkeypatch.setattr("mm_assets.fields.image.probe_image", probe)
    monkeypatch.setattr("mm_assets.pipeline.partition.preview.thumbnail", lambda *_: None)  # the preview's own probes
    at_work(stages.packed, dataset, "s")
    rows = table(dataset, "filtered_rows")
    assert sorted(probed) == sorted(len(row["binary_content"]) for row in rows if row["modality"] == "image")


@pytest.mark.parametrize(
    ("settings", "is_one_file"),
    [
        ({}, True),
        ({"filters": [{"type": "aspect_ratio", "min": 0.01}], "renumber": False}, True),
        ({"filters": [{"type": "text_length", "min_words": 9}]}, False),
        ({"annotators": [{"type": "image_size"}]}, False),
        ({"retain": "filtered"}, False),
        ({"materialize": "write"}, False),
    ],
)
def test_a_table_that_filters_do_not_change_is_not_written_again(
    tmp_path: Path, settings: dict[str, Any], is_one_file: bool
) -> None:
    """Filtered rows that are the materialized rows are one file with two names, with the digest of both."""
    spec = declare(tmp_path / "store", make_shard(tmp_path / "in" / "s.tar", CAPTIONS), pack="image_text", **settings)
    dataset, _ = run_chain(spec)
    before, after = (stages_of(dataset, "s")[stage].files[stage.name] for stage in (MATERIALIZED_ROWS, FILTERED_ROWS))
    assert dataset.store.local_path(before.path).samefile(dataset.store.local_path(after.path)) == is_one_file
    assert (before.sha256 == after.sha256) == is_one_file
    assert dataset.store.digest(after.path) == after.sha256


def test_selected_rows_have_the_bytes_of_filtered_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is selected from the one before has the bytes of one that is written while rows are filtered."""
    members = {f"{n:03}.txt": b"word " * (1 if n == 37 else 2_000) for n in range(40)}
    settings: dict[str, Any] = {"filters": [{"type": "text_length", "min_words": 20}], "batch_bytes": 1 << 16}
    tables = []
    for is_shared in (True, False):
        with monkeypatch.context() as patch:
            if not is_shared:
                patch.setattr(Run, "shares_rows", lambda *_: False)
            shard = make_shard(tmp_path / "in" / "s.tar", members)
            dataset, _ = run_chain(declare(tmp_path / f"store-{is_shared}", shard, **settings))
            tables.append(stages_of(dataset, "s")[FILTERED_ROWS].files)
    assert tables[0] == tables[1]
    assert len(values(dataset)) == 39


@pytest.mark.parametrize("on_misaligned", ["drop_sample", "fail"])
def test_filtering_reads_each_image_header_once(
    tmp_path: Path, on_misaligned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters, annotators and the judge of what can be packed share one probe of each image, kept or dropped."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS | {"square.png": png(9, (8, 8))})
    filters = [{"type": "aspect_ratio", "min": 1.2}, {"type": "blur"}, {"type": "near_duplicates"}]
    annotators = [{"type": "image_size"}, {"type": "blur", "min_side": 4}]
    spec = declare(
        tmp_path / "root", shard, filters=filters, annotators=annotators, pack="image_text", on_misaligned=on_misaligned
    )
    dataset, _ = run_chain(spec)
    read: list[str] = []

    def header(data: memoryview, name: str) -> HeaderReader:
        if name != "EXIF":
            read.append(hashlib.sha256(data).hexdigest())
        return HeaderReader(data, name)

    monkeypatch.setattr("mm_assets.media.images.HeaderReader", header)
    monkeypatch.setattr("mm_assets.pipeline.partition.preview.thumbnail", lambda *_: None)  # the preview's own probes
    monkeypatch.setattr(
        "mm_assets.pipeline.partition.stage_run.run_checks", lambda *_: []
    )  # they filter some samples again
    at_work(stages.filtered_rows, dataset, "s")
    assert drops(dataset)
    assert len(read) == len(set(read)) == 5


MODULE = """
import pyarrow as pa
from mm_assets.filters.base import Annotator, Filter
from mm_assets.rows.schema import Drop
from mm_assets.rows.schema import UserColumn


class Shout(Annotator):
    columns = (UserColumn(name="loud", source="", type="string", rows="text"),)

    def __init__(self, *, mark: str) -> None:
        self.mark = mark

    def annotate(self, block):
        texts = block.column("text_content").to_pylist()
        return {"loud": pa.array([None if text is None else text + self.mark for text in texts], pa.string())}


class NoTwo(Filter):
    def judge(self, block):
        for row, text in enumerate(block.column("loud").to_pylist()):
            if text == "two!":
                yield Drop(row, "is_two", 2.0)
"""


@pytest.mark.parametrize("mode", ["read", "write"])
def test_filters_and_annotators_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """An annotator and a filter by import path add a column and drop rows; a wrong parameter is refused at once."""
    (tmp_path / "chain_plugins.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    shard = make_shard(tmp_path / "s.tar", DOCUMENTS)
    plugins = {
        "annotators": [{"type": "chain_plugins:Shout", "mark": "!"}, {"type": "image_size"}],
        "filters": [{"type": "chain_plugins:NoTwo", "name": "my_filter"}],
    }
    dataset, results = run_chain(declare(tmp_path / "root", shard, materialize=mode, **plugins))
    assert drops(dataset) == [("a", 2, "my_filter", "is_two")]
    kept = [(r["sample_id"], r["position"], r["loud"], r["image_width"]) for r in table(dataset, "filtered_rows")]
    assert ("a", 0, "one!", None) in kept
    assert ("a", 1, None, 12) in kept
    assert results["s"]["filtered_rows"].record.counts["dropped.my_filter.is_two"] == 1
    assert [at for at, _ in values(dataset)["a"]["text"]] == [0]
    with pytest.raises(ConfigError, match=r"defs\.yaml: annotators\[0\]\.mrak"):
        declare(tmp_path / "root", shard, annotators=[{"type": "chain_plugins:Shout", "mrak": "!"}])


def test_packed_columns(tmp_path: Path) -> None:
    """User and annotator columns pass the checks of packed files and are read as any modality; no item's are."""
    members = {
        "a.json": {"score": 0.5, "tags": ["x"], "url": "u"},
        "a.png": png(1),
        "a.txt": "two words",
        "b.json": {"score": None, "tags": ["y", "z"]},
        "b.png": png(2),
        "b.txt": "one",
    }
    shard = make_shard(tmp_path / "s.tar", members)
    annotators = [{"type": "image_to_text_ratio"}, {"type": "image_size"}]
    spec = declare(tmp_path / "root", shard, annotators=annotators, pack={"columns": "all"})
    dataset, _ = run_chain(spec)
    found = values(dataset)
    names = ("score", "tags", "url", "num_words", "num_images")
    assert [found["a"][name] for name in names] == [0.5, ["x"], "u", 2, 1]
    assert [found["b"][name] for name in names] == [None, ["y", "z"], None, 1, 1]
    assert "image_width" not in found["a"]


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize(("renumber", "image"), [(False, [1, 3]), (True, [0, 1])])
def test_renumbering(tmp_path: Path, mode: str, renumber: bool, image: list[int]) -> None:
    """Positions stay as they were, or count from 0 again where that is asked for, in tables and packed files."""
    shard = make_shard(tmp_path / "s.tar", DOCUMENTS)
    filters = [{"type": "text_length", "min_chars": 4}]
    spec = declare(tmp_path / "root", shard, filters=filters, renumber=renumber, materialize=mode)
    dataset, _ = run_chain(spec)
    found = values(dataset)
    assert found["a"]["image"] == [(at, pixels(n + 1).tolist()) for n, at in enumerate(image)]
    assert found["a"]["text"] is None
    assert [at for at, _ in found["b"]["text"]] == [1]
    assert [r["position"] for r in table(dataset, "filtered_rows") if r["sample_id"] == "a"] == [-1, *image]


@pytest.mark.parametrize("pack", [None, "generic", "image_text", "interleaved"])
def test_samples_that_filters_leave_without_content(tmp_path: Path, pack: str | None) -> None:
    """They are dropped and listed, or kept: then they are packed with their metadata, or with nothing at all."""
    members = {"a.json": {"k": 1}, "a.txt": "long enough", "b.json": {"k": 2}, "b.txt": "no", "c.txt": "no"}
    shard = make_shard(tmp_path / "s.tar", members)
    filters = [{"type": "text_length", "min_chars": 5}]
    dataset, _ = run_chain(declare(tmp_path / "drop", shard, filters=filters, pack=pack))
    assert list(values(dataset)) == ["a"]
    assert {("b", -1, "empty_sample", "all_filtered"), ("b", 0, "text_length", "chars_below_min")} < set(drops(dataset))
    kept, _ = run_chain(declare(tmp_path / "keep", shard, filters=filters, pack=pack, on_empty_sample="keep"))
    found = values(kept)
    assert {i: v["metadata"] for i, v in found.items()} == {"a": {"k": 1}, "b": {"k": 2}, "c": None}
    assert {name for name, value in found["c"].items() if value is not None} <= {"rows"}
    assert found["a"] == values(dataset)["a"]
    assert [d[:2] for d in drops(kept)] == [("b", 0), ("c", 0)]


def test_late_fetching_fetches_what_is_left(tmp_path: Path) -> None:
    """With `materialize: write` filtered and packed files are those of `read`, and dropped content is never fetched."""
    members = {f"{n}.png": png(n) for n in range(6)} | {f"{n}.txt": "x" * n for n in range(6)}
    shard = make_shard(tmp_path / "s.tar", members)
    filters = [{"type": "text_length", "min_chars": 3, "scope": "sample"}, {"type": "aspect_ratio"}]
    annotators = [{"type": "image_size"}, {"type": "text_length"}]
    made = {}
    for mode in ("read", "write"):
        spec = declare(tmp_path / mode, shard, materialize=mode, filters=filters, annotators=annotators)
        made[mode], results = run_chain(spec)
        fetched = results["s"]["materialized_rows"].record.counts["content_bytes"]
        assert fetched == (0 if mode == "write" else sum(len(png(n)) for n in range(6)))
    for stage in (FILTERED_ROWS, *PACKED_STAGES.values()):
        assert stages_of(made["read"], "s")[stage].files == stages_of(made["write"], "s")[stage].files
    assert list(values(made["write"])) == ["3", "4", "5"]


def test_fields_and_selectors(tmp_path: Path) -> None:
    """Declared fields take the rows that their selectors name, by preference; the rest is dropped and listed."""
    array = io.BytesIO()
    np.save(array, np.arange(6, dtype=np.float32).reshape(2, 3))
    members = {
        "a.rgb.png": png(1),
        "a.depth.png": png(2),
        "a.state.npy": array.getvalue(),
        "a.txt": "plain",
        "a.caption": "preferred",
        "a.label.cls": "3",
        "a.0.png": png(4),
        "a.1.png": png(5),
        "a.blob": b"\x00\x01",
        "a.json": {"k": 1},
    }
    pack = {
        "fields": [
            {"name": "view", "field": "ImageField", "modality": "image", "role": "rgb", "config": {"channels": 3}},
            {"name": "state", "field": "NDArrayField", "modality": "array", "role": "state"},
            {"name": "caption", "field": "TextField", "modality": "text", "role": "", "extension": ["caption", "txt"]},
            {"name": "label", "field": "ScalarField", "modality": "text", "role": "lab*", "config": {"dtype": "int64"}},
            {"name": "pages", "field": "ImageField", "modality": "image", "role": "#", "take": "sequence"},
        ]
    }
    dataset, _ = run_chain(declare(tmp_path / "root", make_shard(tmp_path / "s.tar", members), pack=pack))
    found = values(dataset)["a"]
    assert list(found) == ["view", "state", "caption", "label", "pages", "metadata"]
    assert found["view"] == pixels(1).tolist()
    assert found["state"] == [[0, 1, 2], [3, 4, 5]]
    assert (found["caption"], found["label"], found["metadata"]) == ("preferred", 3, {"k": 1})
    assert [image for _, image in found["pages"]] == [pixels(4).tolist(), pixels(5).tolist()]
    by_position = {r["position"]: json.loads(r["source_ref"])["member"] for r in table(dataset, "rows")}
    assert {(by_position[d[1]], d[2], d[3]) for d in drops(dataset)} == {
        ("a.depth.png", "packable", "not_selected"),
        ("a.txt", "packable", "not_selected"),
        ("a.blob", "packable", "not_selected"),
    }


def test_content_that_is_not_what_its_name_says(tmp_path: Path) -> None:
    """A .png that is not an image is dropped with a reason; `generic` packs its bytes by `keep`. Its sample stays."""
    members = {"a.png": b"no image", "a.txt": "a", "b.png": png(1), "b.txt": "b", "c.png": b"", "c.txt": "c"}
    shard = make_shard(tmp_path / "s.tar", members)
    dataset, _ = run_chain(declare(tmp_path / "fixed", shard, pack="image_text"))
    assert drops(dataset) == [("a", 0, "decodable", "undecodable"), ("c", 0, "packable", "not_materialized")]
    assert [v["image"] is None for v in values(dataset).values()] == [True, False, True]
    dataset, _ = run_chain(declare(tmp_path / "generic", shard, pack="generic", on_undecodable="keep"))
    assert values(dataset)["a"]["rest"] == [(0, b"no image")]
    assert drops(dataset) == [("c", 0, "packable", "not_materialized")]


@pytest.mark.parametrize("materialize", ["read", "write"])
def test_no_byte_depends_on_the_size_of_batches(tmp_path: Path, materialize: str) -> None:
    """With small, medium and large batches every table and packed file is the same, dropped rows and rejects too."""
    members: dict[str, object] = {}
    for number in range(60):
        key = f"{number:02d}"
        members[f"{key}.png"] = png(number, (20 + number, 60))
        members[f"{key}.txt"] = f"number {number} " * (1 + 40 * number % 97)
        members |= {f"{key}.json": {"n": number}} if number % 7 else {f"{key}.json": b"{"}
        members |= {f"{key}.png": png(number, (90, 60))[:-90]} if number % 11 == 5 else {}
    shard = make_shard(tmp_path / "in" / "s.tar", members)
    filters = [
        {"type": "image_size", "min_height": 24},
        {"type": "exact_duplicates"},
        {"type": "text_length", "max_chars": 700, "scope": "sample"},
    ]
    found = []
    for batch_bytes in (1 << 16, 150_000, 64 << 20):
        spec = declare(
            tmp_path / str(batch_bytes),
            shard,
            batch_bytes=batch_bytes,
            materialize=materialize,
            filters=filters,
            annotators=[{"type": "text_length"}, {"type": "perceptual_hash"}],
        )
        dataset, _ = run_chain(spec)
        files = [file for record in stages_of(dataset, "s").values() for file in record.files.values()]
        found.append({file.path.split(".")[0] + file.path[-5:]: file.sha256 for file in files})
    assert found[0] == found[1] == found[2]
    assert len(table(dataset, "dropped")) > 20
    assert len(table(dataset, "rejects")) > 5
    assert table(dataset, "undecodable")
