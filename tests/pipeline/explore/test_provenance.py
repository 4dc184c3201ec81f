"""Where samples come from, and where the content of rows and members is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from crc32c import crc32c

from mm_assets.errors import SourceError
from mm_assets.pipeline.explore.provenance import (
    checksums,
    member_content,
    origins,
    partitions_of,
    row_content,
    samples_at,
)
from mm_assets.pipeline.state.staleness import DatasetState

from ..chain import declare, run_chain
from ..shards import make_shard, png

WIDTHS = {"a": (4, 16, 6, 20), "b": (5, 24, 28, 7)}


def members_of(key: str) -> dict[str, object]:
    found: dict[str, object] = {".hidden": b"not a sample"}
    for n, width in enumerate(WIDTHS[key]):
        found[f"{key}{n}.png"] = png(width, (8, width))
        found[f"{key}{n}.txt"] = f"caption {key}{n}"
    return found


@pytest.fixture(scope="module", params=["all", "none"])
def state(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DatasetState:
    """Two partitions of which images narrower than 10 are dropped; media in the tables, and in the shards only."""
    folder = tmp_path_factory.mktemp("drops")
    for key in WIDTHS:
        make_shard(folder / "in" / f"{key}.tar", members_of(key))
    filters = [{"type": "image_size", "min_width": 10}]
    spec = declare(folder / "root", folder / "in", filters=filters, retain=request.param, pack="image_text")
    return DatasetState(run_chain(spec)[0])


def test_content_of_a_dropped_row_is_its_member(state: DatasetState) -> None:
    """The bytes of the row are those of the member, read at any place, with their checksums."""
    found = row_content(state, "a", "a0", 0, "image")
    assert found is not None
    content = png(4, (8, 4))
    assert (found.size, found.content_type) == (len(content), "image/png")
    assert found.read(0, found.size) == content
    assert found.read(5, 7) == content[5:12]
    assert found.read(found.size - 2, 100) == content[-2:]
    sums = checksums(found)
    assert sums == {"size": len(content), "crc32c": crc32c(content), "sha256": hashlib.sha256(content).hexdigest()}
    found.close()
    assert row_content(state, "a", "a0", 7, "image") is None
    text = row_content(state, "a", "a0", 1, "text")
    assert text is not None
    assert text.read(0, 100) == b"caption a0"


def test_origins_name_every_row_of_a_sample(state: DatasetState) -> None:
    """Each row has its member and range, and whether a filter dropped it with which value."""
    rows = {row.modality: row for row in origins(state, "a", "a0")}
    assert set(rows) == {"metadata", "image", "text"}
    assert (rows["image"].dropped, rows["image"].value) == ("image_size.width_below_min", 4.0)
    assert rows["text"].dropped == ""
    assert rows["image"].member == "a0.png"
    stored = rows["image"].crc32c
    assert stored in (None, crc32c(png(4, (8, 4))))
    assert origins(state, "a", "nobody") == []
    with pytest.raises(SourceError, match="not registered"):
        origins(state, "c", "a0")


def test_from_a_place_back_to_the_sample(state: DatasetState) -> None:
    """A member, or a byte within one, leads to the row that it became; the shard's name leads to its partition."""
    image = next(row for row in origins(state, "b", "b1") if row.modality == "image")
    assert partitions_of(state, "b.tar") == ["b"]
    assert [row.sample_id for row in samples_at(state, "b", member="b1.png")] == ["b1"]
    start, size = image.byte_offset or 0, image.byte_size or 0
    for byte, ids in ((start, ["b1"]), (start + size - 1, ["b1"]), (start + size, [])):
        found = samples_at(state, "b", shard="b.tar", byte=byte)
        assert [row.sample_id for row in found if row.modality == "image"] == ids


def test_a_member_that_became_no_row_can_be_read(state: DatasetState) -> None:
    """A reject is read by its name in the index; a name that is not there gives nothing."""
    found = member_content(state, "a", shard="a.tar", member=".hidden")
    assert found is not None
    assert found.read(0, 100) == b"not a sample"
    found.close()
    assert member_content(state, "a", shard="a.tar", member="../b.tar") is None
    assert member_content(state, "a", shard="b.tar", member=".hidden") is None


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.zst"])
def test_content_of_a_compressed_shard(tmp_path: Path, suffix: str) -> None:
    """Where a shard is compressed, the member is taken out of it."""
    make_shard(tmp_path / "in" / f"a.{suffix}", members_of("a"))
    filters = [{"type": "image_size", "min_width": 10}]
    state = DatasetState(run_chain(declare(tmp_path / "root", tmp_path / "in", filters=filters, retain="none"))[0])
    found = row_content(state, "a", "a0", 0, "image")
    assert found is not None
    assert found.read(0, found.size) == png(4, (8, 4))


@pytest.mark.parametrize(("retain", "is_there"), [("all", True), ("none", False)])
def test_a_shard_that_changed_is_not_believed(tmp_path: Path, retain: str, is_there: bool) -> None:
    """Another shard in the place of the registered one: the table's bytes are shown if it has them, else an error."""
    shard = make_shard(tmp_path / "in" / "a.tar", members_of("a"))
    filters = [{"type": "image_size", "min_width": 10}]
    state = DatasetState(run_chain(declare(tmp_path / "root", tmp_path / "in", filters=filters, retain=retain))[0])
    make_shard(shard, {**members_of("a"), "zz.txt": "another"})
    os.utime(shard, ns=(1, 1))
    if not is_there:
        with pytest.raises(SourceError, match="changed since it was registered"):
            row_content(state, "a", "a0", 0, "image")
        return
    found = row_content(state, "a", "a0", 0, "image")
    assert found is not None
    assert found.read(0, found.size) == png(4, (8, 4))
