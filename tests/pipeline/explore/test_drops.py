"""Dropped rows page by page, and where the content of rows and members is."""

from __future__ import annotations

import hashlib
import os
import tarfile
from pathlib import Path

import pytest
from crc32c import crc32c

from mm_assets.errors import ConfigError, SourceError
from mm_assets.pipeline.explore.drops import Drop, drops, other_losses, totals
from mm_assets.pipeline.explore.provenance import (
    checksums,
    member_content,
    origins,
    partitions_of,
    row_content,
    samples_at,
)
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register

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
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    """Two partitions of which images narrower than 10 are dropped; media in the tables, and in the shards only."""
    folder = tmp_path_factory.mktemp("drops")
    for key in WIDTHS:
        make_shard(folder / "in" / f"{key}.tar", members_of(key))
    filters = [{"type": "image_size", "min_width": 10}]
    spec = declare(folder / "root", folder / "in", filters=filters, retain=request.param, pack="image_text")
    return run_chain(spec)[0]


def collected(dataset: DatasetStore, limit: int, reason: str | None = None) -> list[Drop]:
    found: list[Drop] = []
    after = ""
    while True:
        page = drops(dataset, after=after, limit=limit, reason=reason)
        assert len(page.items) <= limit
        found += [item for item in page.items if isinstance(item, Drop)]
        if page.after is None:
            return found
        after = page.after


@pytest.mark.parametrize("limit", [1, 2, 3, 50])
def test_pages_have_every_drop_once(dataset: DatasetStore, limit: int) -> None:
    """Pages of any size give the same drops in the order of partitions and rows, with value, limit and place."""
    found = collected(dataset, limit)
    assert [(d.partition, d.sample_id, d.value) for d in found] == [
        ("a", "a0", 4.0),
        ("a", "a2", 6.0),
        ("b", "b0", 5.0),
        ("b", "b3", 7.0),
    ]
    assert {(d.filter, d.reason, d.setting, d.limit) for d in found} == {
        ("image_size", "width_below_min", "min_width", 10.0)
    }
    first = found[0]
    with tarfile.open(first.shard or "") as tar:
        info = tar.getmember(first.member or "")
    assert (first.byte_offset, first.byte_size) == (info.offset_data, info.size)
    assert first.content_type == "image/png"


def test_drops_of_a_reason_and_of_a_partition(dataset: DatasetStore) -> None:
    """A reason or a partition selects; one that nothing has gives none, and a wrong one is refused."""
    assert len(collected(dataset, 3, "image_size.width_below_min")) == 4
    assert collected(dataset, 3, "image_size.height_below_min") == []
    assert [d.sample_id for d in drops(dataset, partition="b").items if isinstance(d, Drop)] == ["b0", "b3"]
    for wrong in ({"reason": "nonsense"}, {"after": "nonsense"}, {"partition": "c"}):
        with pytest.raises(ConfigError):
            drops(dataset, **wrong)


def test_totals_and_other_losses(dataset: DatasetStore) -> None:
    """Rejects are listed beside drops, with the same totals as everywhere, page by page."""
    counts = {(t.example.stage, t.example.reason): t.count for t in totals(dataset)}
    assert counts["filtered_rows", "image_size.width_below_min"] == 4
    assert counts["rows", "hidden file"] == 2
    first = other_losses(dataset, stage="rows", reason="hidden file", limit=1)
    second = other_losses(dataset, stage="rows", reason="hidden file", limit=1, after=first.after or "")
    assert [item.partition for page in (first, second) for item in page.items] == ["a", "b"]
    assert second.after is None


def test_content_of_a_dropped_row_is_its_member(dataset: DatasetStore) -> None:
    """The bytes of the row are those of the member, read at any place, with their checksums."""
    found = row_content(dataset, "a", "a0", 0, "image")
    assert found is not None
    content = png(4, (8, 4))
    assert (found.size, found.content_type) == (len(content), "image/png")
    assert found.read(0, found.size) == content
    assert found.read(5, 7) == content[5:12]
    assert found.read(found.size - 2, 100) == content[-2:]
    sums = checksums(found)
    assert sums == {"size": len(content), "crc32c": crc32c(content), "sha256": hashlib.sha256(content).hexdigest()}
    found.close()
    assert row_content(dataset, "a", "a0", 7, "image") is None
    text = row_content(dataset, "a", "a0", 1, "text")
    assert text is not None
    assert text.read(0, 100) == b"caption a0"


def test_origins_name_every_row_of_a_sample(dataset: DatasetStore) -> None:
    """Each row has its member and range, and whether a filter dropped it with which value."""
    rows = {row.modality: row for row in origins(dataset, "a", "a0")}
    assert set(rows) == {"metadata", "image", "text"}
    assert (rows["image"].dropped, rows["image"].value) == ("image_size.width_below_min", 4.0)
    assert rows["text"].dropped == ""
    assert rows["image"].member == "a0.png"
    stored = rows["image"].crc32c
    assert stored in (None, crc32c(png(4, (8, 4))))
    assert origins(dataset, "a", "nobody") == []
    with pytest.raises(SourceError, match="not registered"):
        origins(dataset, "c", "a0")


def test_from_a_place_back_to_the_sample(dataset: DatasetStore) -> None:
    """A member, or a byte within one, leads to the row that it became; the shard's name leads to its partition."""
    image = next(row for row in origins(dataset, "b", "b1") if row.modality == "image")
    assert partitions_of(dataset, "b.tar") == ["b"]
    assert [row.sample_id for row in samples_at(dataset, "b", member="b1.png")] == ["b1"]
    start, size = image.byte_offset or 0, image.byte_size or 0
    for byte, ids in ((start, ["b1"]), (start + size - 1, ["b1"]), (start + size, [])):
        found = samples_at(dataset, "b", shard="b.tar", byte=byte)
        assert [row.sample_id for row in found if row.modality == "image"] == ids


def test_a_member_that_became_no_row_can_be_read(dataset: DatasetStore) -> None:
    """A reject is read by its name in the index; a name that is not there gives nothing."""
    found = member_content(dataset, "a", shard="a.tar", member=".hidden")
    assert found is not None
    assert found.read(0, 100) == b"not a sample"
    found.close()
    assert member_content(dataset, "a", shard="a.tar", member="../b.tar") is None
    assert member_content(dataset, "a", shard="b.tar", member=".hidden") is None


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.zst"])
def test_content_of_a_compressed_shard(tmp_path: Path, suffix: str) -> None:
    """Where a shard is compressed, the member is taken out of it."""
    make_shard(tmp_path / "in" / f"a.{suffix}", members_of("a"))
    filters = [{"type": "image_size", "min_width": 10}]
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in", filters=filters, retain="none"))
    found = row_content(dataset, "a", "a0", 0, "image")
    assert found is not None
    assert found.read(0, found.size) == png(4, (8, 4))


@pytest.mark.parametrize(("retain", "is_there"), [("all", True), ("none", False)])
def test_a_shard_that_changed_is_not_believed(tmp_path: Path, retain: str, is_there: bool) -> None:
    """Another shard in the place of the registered one: the table's bytes are shown if it has them, else an error."""
    shard = make_shard(tmp_path / "in" / "a.tar", members_of("a"))
    filters = [{"type": "image_size", "min_width": 10}]
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in", filters=filters, retain=retain))
    make_shard(shard, {**members_of("a"), "zz.txt": "another"})
    os.utime(shard, ns=(1, 1))
    if not is_there:
        with pytest.raises(SourceError, match="changed since it was registered"):
            row_content(dataset, "a", "a0", 0, "image")
        return
    found = row_content(dataset, "a", "a0", 0, "image")
    assert found is not None
    assert found.read(0, found.size) == png(4, (8, 4))


def test_a_dataset_without_runs_has_no_drops(tmp_path: Path) -> None:
    """Before the first run there is nothing to list."""
    make_shard(tmp_path / "in" / "a.tar", members_of("a"))
    dataset = DatasetStore(declare(tmp_path / "root", tmp_path / "in"))
    register(dataset)
    assert drops(dataset).items == []
    assert totals(dataset) == []


def test_totals_are_those_of_markers_whatever_the_settings(
    dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened without its declaration, with which no marker is up to date, a dataset has the same totals, unread."""
    from mm_assets.pipeline.state import losses
    from mm_assets.view.backends.folder import open_dataset_store

    expected = totals(dataset)
    monkeypatch.setattr(losses, "_of_partition", lambda *_: pytest.fail("the tables of a partition are read"))
    found = totals(open_dataset_store(dataset.store.url))
    assert [(total.count, total.example.reason) for total in found] == [(t.count, t.example.reason) for t in expected]
    assert expected


def test_a_page_that_finds_nothing_ends_in_time(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time each page looks into one partition and says where the next one starts, until all were looked at."""
    from mm_assets.pipeline.explore import drops as module

    monkeypatch.setattr(module, "_PAGE_SECONDS", -1.0)
    first = drops(dataset, reason="no.such")
    assert (list(first.items), first.after) == ([], "0:b")
    last = drops(dataset, reason="no.such", after=first.after or "")
    assert (list(last.items), last.after) == ([], None)
    others = other_losses(dataset, stage="rows", reason="no such")
    assert (list(others.items), others.after) == ([], "0:b")
