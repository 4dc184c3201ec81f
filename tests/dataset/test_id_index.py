from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.dataset import files as packed_files
from mm_assets.dataset import id_index
from mm_assets.fields import TextField

from .shards import COUNT


def test_ids_are_found_over_many_files(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every id leads to its sample, unknown ones to None, also with hashes that collide and few files open."""
    monkeypatch.setattr(packed_files, "MAX_OPEN", 1)
    monkeypatch.setattr("mm_assets.dataset.open_files.MAX_OPEN", 1)
    for collide in (False, True):
        if collide:
            monkeypatch.setattr(id_index, "hash_ids", lambda offsets, _: np.zeros(len(offsets) - 1, np.uint64))
        with mm_assets.open(paths) as data:
            for i in range(COUNT):
                assert data.find(f"id{i:03d}") == i
            for other in ("", "id1000", "ü", "\ud800"):
                assert data.find(other) is None
            assert "id003" in data.sample_ids
            assert 3 not in data.sample_ids


def test_an_id_of_two_files_is_found_at_its_first_sample(tmp_path: Path) -> None:
    """Of an id in several files the first sample is found; in a view, the first that the view has."""
    for k in range(3):
        with mm_assets.create(str(tmp_path / f"{k}.mstr"), {"t": TextField()}) as writer:
            for i in range(4):
                writer.write(f"{i}", {"t": f"{k}/{i}"})
    with mm_assets.open(str(tmp_path)) as data:
        assert data.find("2") == 2
        view = data.select([11, 10, 6, 1, 10])
        assert view.find("2") == 1
        assert view.find("3") == 0
        assert view.find("0") is None
        train = data.split({"train": 0.5, "val": 0.5})["train"]
        assert {len([i for i in train.sample_ids if i == k]) for k in "0123"} <= {0, 3}


def test_the_lookup_is_made_once_for_all_views(paths: list[str]) -> None:
    """Views of one dataset share the sorted hashes; closing the last of them drops these."""
    with mock.patch.object(id_index, "SortedIndex", side_effect=id_index.SortedIndex) as sort:
        with mm_assets.open(paths) as data, data.select([5, 2]) as view, view.select([1]) as inner:
            assert (data.find("id002"), view.find("id002"), inner.find("id002")) == (2, 1, 0)
        assert sort.call_count == 1
    assert data._files._shared.lookup._index is None
    with pytest.raises(ValueError, match="closed"):
        data.find("id002")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=50), st.integers(1, 7))
def test_texts_are_hashed_as_one_by_one(texts: list[str], block: int) -> None:
    """The hash of a text does not depend on its neighbours nor on blocks; it is that of its UTF-8."""
    with mock.patch.object(id_index, "_BLOCK", block):
        together = id_index.hash_texts(iter(texts), len(texts))
    assert together.tolist() == [int(id_index.hash_texts([text], 1)[0]) for text in texts]
    assert len(set(texts)) == len(set(together.tolist()))
