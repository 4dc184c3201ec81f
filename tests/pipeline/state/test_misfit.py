"""Partitions that do not fit the dataset's layout: noted with numbers and the command, or failed where nothing fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mm_assets.errors import SchemaMismatchError
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions

from ..chain import at_work, declare, run_partition
from ..shards import CAPTIONS, make_shard, png

COMMAND = "`mm-assets register --dataset data --new-schema` decides it again"


def registered(folder: Path, later: Mapping[str, object], **settings: Any) -> DatasetStore:
    """A dataset of pairs whose layout was decided before the shard `later` came."""
    make_shard(folder / "in" / "a.tar", CAPTIONS)
    dataset = DatasetStore(declare(folder / "root", folder / "in", **settings))
    register(dataset)
    make_shard(folder / "in" / "later.tar", later)
    register(dataset)
    return dataset


def notes_of(dataset: DatasetStore) -> list[str]:
    """Notes of the later shard's stages."""
    return [note for result in run_partition(dataset, "later").values() for note in result.record.notes]


def make_tables(dataset: DatasetStore) -> None:
    """The tables of the later shard."""
    for make in stages.TABLE_STAGES.values():
        at_work(make, dataset, "later")


@pytest.mark.parametrize("pack", [None, "image_text"])
def test_a_partition_of_which_nothing_fits_fails(tmp_path: Path, pack: str | None) -> None:
    """The error says how many samples, what they have and the command; nothing is published, and no table is left."""
    dataset = registered(tmp_path, {f"{n}.{end}": b"MThd" for n in range(3) for end in ("mid", "left.npy")}, pack=pack)
    said = (
        r"partition 'later': none of its 3 samples fits: their content cannot be packed by preset 'image_text': "
        r"(midi 3, array \(role: left\) 3|array \(role: left\) 3, midi 3); "
    )
    with pytest.raises(SchemaMismatchError, match=said + ".*" + COMMAND):
        make_tables(dataset)
    assert "later" in pending_partitions(dataset)
    assert not list((tmp_path / "root").rglob("filtered_rows/later*"))


def test_a_partition_without_content_fails(tmp_path: Path) -> None:
    """Samples of metadata alone would give an empty packed file; with on_empty_sample they are packed."""
    metadata = {f"{n}.json": {"n": n} for n in range(3)}
    with pytest.raises(SchemaMismatchError, match=r"none of its 3 samples has content, only metadata.*on_empty_sample"):
        make_tables(registered(tmp_path / "drop", metadata))
    kept = registered(tmp_path / "keep", metadata, on_empty_sample="keep")
    assert run_partition(kept, "later")["mult"].record.counts["samples"] == 3


def test_what_filters_drop_does_not_fail_a_partition(tmp_path: Path) -> None:
    """An empty result that the declaration asks for is one, and so is an empty shard."""
    filters = [{"type": "text_length", "min_chars": 99}, {"type": "image_size", "min_width": 99}]
    dataset = registered(tmp_path / "filters", CAPTIONS, filters=filters)
    assert run_partition(dataset, "later")["mult"].record.counts["samples"] == 0
    assert run_partition(registered(tmp_path / "empty", {}), "later")["mult"].record.counts["samples"] == 0


def test_content_without_a_place_is_noted(tmp_path: Path) -> None:
    """From 20 % of the samples on a note has their number, the kinds of content and the command."""
    left = {f"{n}.left.png": png(n) for n in range(1)}
    (note,) = notes_of(registered(tmp_path / "some", {**CAPTIONS, **left}))
    said = "1 of 4 samples have content that cannot be packed by preset 'image_text': image (role: left) 1; "
    assert note.startswith(said)
    assert COMMAND in note
    assert "`pack: generic` keeps every kind of content" in note
    usual = {f"{n}{name[1:]}": value for n in range(6) for name, value in CAPTIONS.items() if name.startswith("0.")}
    assert notes_of(registered(tmp_path / "odd", {**usual, **left})) == []


def test_a_modality_that_no_sample_has_is_noted(tmp_path: Path) -> None:
    """A shard without the images that all samples had is packed, and both formats say what is missing."""
    notes = notes_of(registered(tmp_path, {f"{n}.txt": "words" for n in range(3)}))
    assert len(set(notes)) == 1
    said = "none of 3 packed samples has 'image', which 4 of 4 had when the schema was decided; "
    assert notes[0].startswith(said)
    assert COMMAND in notes[0]


def test_a_kind_of_sample_that_decided_too_is_not_noted(tmp_path: Path) -> None:
    """A shard without texts fits a layout that samples without them decided together with the others."""
    images = {f"{n}.png": png(n) for n in range(4, 6)}
    make_shard(tmp_path / "in" / "before.tar", images)
    assert notes_of(registered(tmp_path, images)) == []
