"""Members of compressed shards, which have no byte range: one pass, and a shelf for what is asked for later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.sources.extract import MemberExtract, Shelf

from .materialize import Opener, content, make_tar, ref_of, row, run


# -- members without ranges
def squeeze(folder: Path, count: int = 12) -> tuple[Path, dict[str, bytes]]:
    members = {f"{i:02d}.jpg": content(i, 3000 + i) for i in range(count)}
    members = {name: data for pair in members.items() for name, data in (pair, (pair[0][:2] + ".json", b"{}"))}
    make_tar(folder / "a.tar.gz", members, compress=True)
    return folder / "a.tar.gz", members


@pytest.mark.parametrize("batch_bytes", [1000, 20_000, 1 << 20])
@pytest.mark.parametrize("cuts", [(), (3, 7), tuple(range(24))])
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_a_compressed_shard_is_streamed_once(
    tmp_path: Path, opener: Opener, order: str, cuts: tuple[int, ...], batch_bytes: int
) -> None:
    """Whatever order rows ask in, in one batch or in many, a compressed shard is decompressed once."""
    shard, members = squeeze(tmp_path)
    names = [name for name in members if name.endswith("jpg")] * 2
    if order == "backward":
        names.reverse()
    elif order == "shuffled":
        names = [names[i] for i in np.random.default_rng(0).permutation(len(names))]
    if len(cuts) > 3:
        names = names[:12] if order == "forward" else sorted(set(names), reverse=True)
    found, _, _ = run(
        [row(n, i, ref_of(shard, n)) for i, n in enumerate(names)], opener, cuts=cuts, batch_bytes=batch_bytes
    )
    assert [r["materialize_error"] for r in found] == [None] * len(names)
    assert [r["binary_content"] for r in found] == [members[name] for name in names]
    if not cuts or len(cuts) > 3:
        assert opener.sources[str(shard)].streams == 1


def test_a_shelf_that_forgets_costs_a_pass(tmp_path: Path, opener: Opener) -> None:
    """With no room to keep members, every one is still had, by streaming again."""
    shard, members = squeeze(tmp_path)
    source = opener(str(shard))
    shelf = Shelf(0, 0)
    extract = MemberExtract(source, shelf, max_bytes=1 << 20)
    names = [name for name in members if name.endswith("jpg")][::-1]
    extract.begin(set(names), last=True)
    assert [extract.get(name) for name in names] == [members[name] for name in names]
    assert source.streams == len(names)


def test_only_sparse_members_are_read(tmp_path: Path, opener: Opener) -> None:
    """Of a plain shard, members without a range cost headers and their own bytes, not the other members."""
    members = {f"{i}.jpg": content(i, 50_000) for i in range(10)}
    spans = make_tar(tmp_path / "a.tar", members)
    rows = [row("a", i, ref_of(tmp_path / "a.tar", f"{i}.jpg")) for i in (7, 2)]
    found, _, _ = run(rows, opener)
    assert [r["binary_content"] for r in found] == [members["7.jpg"], members["2.jpg"]]
    source = opener.sources[str(tmp_path / "a.tar")]
    assert [r for r in source.reads if r[1] >= 50_000] == [spans["2.jpg"], spans["7.jpg"]]
    assert sum(size for _, size in source.reads) < 150_000


def test_a_damaged_compressed_shard_gives_the_members_before(tmp_path: Path, opener: Opener) -> None:
    """Members in front of the damage come; those behind carry an error that says where it is."""
    shard, members = squeeze(tmp_path, count=40)
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    names = [name for name in members if name.endswith("jpg")]
    found, _, _ = run([row(n, 0, ref_of(shard, n)) for n in names], opener)
    good = [r["binary_content"] is not None for r in found]
    assert 10 < sum(good) < 30
    assert good == sorted(good, reverse=True)
    assert all(r["binary_content"] == members[r["sample_id"]] for r in found if r["binary_content"] is not None)
    assert all("it is damaged" in r["materialize_error"] for r in found if r["binary_content"] is None)
    assert opener.sources[str(shard)].streams <= 3


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["put", "get", "drop"]), st.integers(0, 5)), max_size=40),
    memory=st.sampled_from([0, 10, 25, 1000]),
    scratch=st.sampled_from([0, 30, 1000]),
)
def test_a_shelf_gives_what_was_put_or_nothing(steps: list[tuple[str, int]], memory: int, scratch: int) -> None:
    """A shelf may forget, but never gives other bytes, and with room enough it forgets nothing."""
    shelf = Shelf(memory, scratch)
    present: set[int] = set()
    for action, key in steps:
        data = bytes([key]) * (key * 4)
        if action == "put":
            shelf.put(key, memoryview(data))
            present.add(key)
        elif action == "drop":
            shelf.drop(key)
            present.discard(key)
        found = shelf.get(key)
        assert found in (None, data)
        if key not in present:
            assert found is None
        elif memory == 1000:
            assert found == data
    shelf.close()
    assert shelf.get(1) is None
