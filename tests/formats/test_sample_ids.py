"""Sample ids: look-ups, hashing in blocks, and what sequences do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.formats import sample_ids as module
from mm_assets.formats.sample_ids import NumberedIds, StoredIds, find_duplicate, hash_ids

from .examples import MemorySource


def packed(ids: list[bytes]) -> tuple[np.ndarray, bytes]:
    """Offsets and blob of ids."""
    return np.cumsum([0, *map(len, ids)], dtype=np.uint64), b"".join(ids)


def stored(ids: list[str]) -> StoredIds:
    """An ids section of these ids, behind some other bytes."""
    offsets, blob = packed([value.encode() for value in ids])
    section = offsets.astype("<u8").tobytes() + blob
    return StoredIds(MemorySource(b"before" + section), 6, len(section), len(ids))


def test_sequence() -> None:
    """Ids answer as a sequence of strings does."""
    values = ["b", "a", "", "ü", "a long one"]
    for ids, wanted in ((stored(values), values), (NumberedIds("x", 12), [str(k) for k in range(12)])):
        assert list(ids) == wanted
        assert len(ids) == len(wanted)
        assert ids[0] == wanted[0]
        assert ids[-1] == wanted[-1]
        assert ids[np.int64(1)] == wanted[1]
        assert ids[1:3] == wanted[1:3]
        assert ids[::-2] == wanted[::-2]
        assert list(reversed(ids)) == wanted[::-1]
        assert ids.index(wanted[2]) == 2
        for value in wanted:
            assert ids.find(value) == wanted.index(value)
            assert value in ids
        for value in ("zzz", "b ", "\ud800", "99", "01", "²", "-1", "12"):
            assert ids.find(value) is None
            assert value not in ids
        assert 3 not in ids
        for i in (len(wanted), -len(wanted) - 1):
            with pytest.raises(IndexError):
                ids[i]


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.binary(max_size=5), max_size=40), block=st.integers(1, 20))
def test_hashes(ids: list[bytes], block: int) -> None:
    """Equal ids have equal hashes wherever they stand, also when blocks are smaller than ids; others rarely do."""
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(module, "HASH_BLOCK", block)
        offsets, blob = packed(ids)
        hashes = hash_ids(offsets, lambda start, end: blob[start:end]).tolist()
        by_id: dict[bytes, int] = {}
        for value, found in zip(ids, hashes, strict=True):
            assert by_id.setdefault(value[:block], found) == found
        assert len(set(by_id.values())) == len(by_id)
        duplicate = find_duplicate(offsets, blob)
        if len(set(ids)) == len(ids):
            assert duplicate is None
        else:
            first, second = duplicate
            assert first < second
            assert ids[first] == ids[second]


def test_colliding_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids with one hash are distinguished by their bytes."""
    monkeypatch.setattr(module, "hash_ids", lambda offsets, read: np.zeros(len(offsets) - 1, np.uint64))
    ids = ["a", "b", "c", "b"]
    assert [stored(ids).find(value) for value in ("a", "b", "c", "d")] == [0, 1, 2, None]
    assert find_duplicate(*packed([b"a", b"b", b"c"])) is None
    assert find_duplicate(*packed([b"a", b"b", b"c", b"b"])) == (1, 3)


def test_many() -> None:
    """A quarter of a million ids, over many hashing and iteration blocks, are found at their places."""
    ids = [f"dataset/shard-{k // 1000:05}/sample-{k:09}" for k in range(250_000)]
    found = stored(ids)
    assert [found.find(ids[k]) for k in range(0, 250_000, 9973)] == list(range(0, 250_000, 9973))
    assert all(map(str.__eq__, found, ids))
    assert found.find("dataset/shard-00000/sample-00000000") is None
    assert list(itertools.islice(found, 2)) == ids[:2]
