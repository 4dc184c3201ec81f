"""A dataset's folder: names of records, and files of the registration that are missing or damaged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_assets.errors import MmAssetsError, SourceError
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import partition_key, register
from mm_assets.pipeline.state.staleness import pending_partitions

KEYS = st.text(min_size=1).map(partition_key)
RECIPES = st.text("0123456789abcdef", min_size=16, max_size=16)


@given(st.dictionaries(KEYS, st.lists(RECIPES, min_size=1, unique=True)), st.lists(st.text()))
def test_a_record_is_known_by_its_name(recipes: dict[str, list[str]], others: list[str]) -> None:
    """Key and recipe follow from the name of a record, in the order of the listing; no other file has them."""
    names = [DatasetStore.record_name(key, recipe) for key, listed in recipes.items() for recipe in listed]
    assert DatasetStore.recipes([*names, *(f"attempts/{name}" for name in others)]) == recipes


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"layout": 2, "partitions": {"a": [{}]}}'])
def test_a_damaged_list_of_partitions_is_repaired_as_its_error_says(dataset: DatasetStore, content: bytes) -> None:
    """The error names the file and the commands; afterwards what was published still is."""
    dataset.store.write_bytes("shards.json", content)
    other = DatasetStore(dataset.spec)
    with pytest.raises(MmAssetsError, match=r"shards\.json: ") as caught:
        register(other)
    assert "another release" in str(caught.value) or "delete it and run `mm-assets register" in str(caught.value)
    dataset.store.delete("shards.json")
    assert register(other).added == ("a", "b")
    assert pending_partitions(other) == []


def test_an_unknown_partition_is_named_with_those_that_there_are(dataset: DatasetStore) -> None:
    """The error lists the registered keys, and says with which settings to register."""
    with pytest.raises(SourceError, match=r"'c' is not registered \(found a, b\): run `mm-assets register"):
        dataset.partition("c")


def test_a_damaged_record_is_none_among_many(dataset: DatasetStore) -> None:
    """Reading many records yields each in order, without those that are missing, damaged or of another partition."""
    recipes = {key: found[0] for key, found in dataset.recipes(dataset.store.sizes("records")).items()}
    dataset.store.write_bytes(dataset.record_name("b", "0" * 16), b"{")
    content = dataset.store.read_bytes(dataset.record_name("a", recipes["a"]))
    dataset.store.write_bytes(dataset.record_name("b", "1" * 16), content)
    asked = [("a", recipes["a"]), ("b", "0" * 16), ("b", "1" * 16), ("c", "2" * 16), ("b", recipes["b"])]
    found = list(dataset.read_records(asked))
    assert [key for key, _ in found] == ["a", "b", "b", "c", "b"]
    assert [record is not None for _, record in found] == [True, False, False, False, True]
