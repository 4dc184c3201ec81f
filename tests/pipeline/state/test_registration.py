"""Registration: every name of a shard gives a key, and what shards that changed or are missing do to a dataset."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mm_assets
from mm_assets.errors import ConfigError, SourceError
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import MAX_KEY, group_shards, partition_key, register
from mm_assets.storage.listing import Listing, ShardFile

from ...storage.web_server import serve
from ..chain import at_work, declare, run_chain
from ..shards import CAPTIONS, make_shard, values

names = st.one_of(st.text(max_size=80), st.text("ab.%-_ ", max_size=10), st.text("aé", min_size=60, max_size=300))
ODD = ("100%", "it's (1), é=#+", 'q"*[1]{a,b}?', "train...1", "a\nb\\c", "n" * 240)


@pytest.mark.nightly_examples(10_000)
@given(names, names)
def test_a_key_belongs_to_one_name(one: str, other: str) -> None:
    """Two names never have one key; unless it is too long a key decodes to its name; a plain name is its own key."""
    one, other = (text.encode("utf-8", "replace").decode() for text in (one, other))
    keys = partition_key(one), partition_key(other)
    assert (keys[0] == keys[1]) == (one == other)
    assert re.fullmatch(r"[A-Za-z0-9._%-]*", keys[0])
    assert len(keys[0]) <= MAX_KEY
    assert "..." not in keys[0]
    assert not keys[0].startswith(".")
    assert "%-" in keys[0] or unquote(keys[0]) == one
    if re.fullmatch(r"[A-Za-z0-9_-]{0,200}", one):
        assert keys[0] == one


def test_shards_with_unusual_names_are_packed(tmp_path: Path) -> None:
    """Whatever name a file has, it gives a partition that is packed, published, and read from a folder and by HTTP."""
    for number, name in enumerate(ODD):
        make_shard(tmp_path / "in" / f"{name}.tar", {f"{number}.txt": f"text {number}"})
    dataset, results = run_chain(declare(tmp_path / "root", tmp_path / "in"))
    assert len(results) == len(ODD)
    assert {unquote(key) for key in results if "%-" not in key} == {name for name in ODD if len(name) < 100}
    with mm_assets.open(dataset.store.url_of("manifest.json"), format="mult") as opened:
        assert sorted(sample["text"] for sample in opened) == sorted(f"text {number}" for number in range(len(ODD)))
    with serve(tmp_path / "root" / "data") as web, mm_assets.open(f"{web.url}/manifest.json", format="mult") as opened:
        assert len(opened.sample_ids) == len(ODD)
    with serve(tmp_path / "root" / "data") as web, mm_assets.open(f"{web.url}/packed", format="mult") as opened:
        assert len(opened.sample_ids) == len(ODD)


def test_equal_names_are_skipped_but_for_the_registered_one(tmp_path: Path) -> None:
    """Shards of one name are left out by name with a setting that takes both; one that is registered stays."""
    make_shard(tmp_path / "in" / "p" / "s.tar", CAPTIONS)
    make_shard(tmp_path / "in" / "p" / "t.tar", CAPTIONS)
    dataset = DatasetStore(declare(tmp_path / "root", tmp_path / "in"))
    before = register(dataset).partitions
    make_shard(tmp_path / "in" / "a" / "s.tar", CAPTIONS)
    make_shard(tmp_path / "in" / "q" / "u.tar", CAPTIONS)
    make_shard(tmp_path / "in" / "r" / "u.tar.gz", CAPTIONS)
    found = register(dataset)
    assert (found.partitions, found.added, found.changed, found.removed) == (before, (), (), ())
    assert [re.findall(r"/in/(\S+) is skipped: \S+/in/(\S+) would", line) for line in found.skipped] == [
        [("a/s.tar", "p/s.tar")],
        [("q/u.tar", "r/u.tar.gz")],
        [("r/u.tar.gz", "q/u.tar")],
    ]
    (pattern,) = {line.partition("set partition_pattern: ")[2].strip("'") for line in found.skipped}
    spec = declare(tmp_path / "all", tmp_path / "in", partition_pattern=pattern)
    keys = [partition.key for partition in register(DatasetStore(spec)).partitions]
    assert keys == ["a%2Fs", "p%2Fs", "p%2Ft", "q%2Fu", "r%2Fu.tar"]


def test_a_shard_without_a_key_is_skipped(tmp_path: Path) -> None:
    """A shard that the pattern does not match keeps no other from being registered; if none matches it is an error."""
    make_shard(tmp_path / "in" / "part-1.tar", CAPTIONS)
    make_shard(tmp_path / "in" / "notes.tar", CAPTIONS)
    found = register(DatasetStore(declare(tmp_path / "root", tmp_path / "in", partition_pattern=r"part-(\d)")))
    assert [partition.key for partition in found.partitions] == ["1"]
    assert ["partition_pattern" in line and "'notes.tar'" in line for line in found.skipped] == [True]
    with pytest.raises(ConfigError, match=r"partition_pattern 'x\(.\)' gives no key") as caught:
        register(DatasetStore(declare(tmp_path / "none", tmp_path / "in", partition_pattern="x(.)")))
    assert caught.value.key == "shards"


@pytest.mark.nightly_examples(10_000)
@given(st.lists(st.text("ab %.", min_size=1, max_size=4), unique=True, max_size=6), st.integers(0, 6))
def test_no_shard_changes_the_key_of_another(drawn: list[str], number: int) -> None:
    """The keys of some shards are the same among more of them."""
    spec = declare("root", "in")
    shards = [
        ShardFile(url=f"/in/{name}.tar", size=1, fingerprint="1", modified=None) for name in drawn if name[0] != "."
    ]

    def keys(some: list[ShardFile]) -> dict[str, str]:
        grouped = group_shards(spec, Listing(shards=tuple(some), folder="/in/"))
        return {shard.url: partition.key for partition in grouped.partitions for shard in partition.shards}

    assert keys(shards[:number]).items() <= keys(shards).items()
    assert len(keys(shards)) == len(shards)


def test_another_spelling_of_the_shards_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that was registered with another spelling of its shards is neither refused nor changed."""
    make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    os.utime(tmp_path / "in" / "s.tar", (1, 1))
    monkeypatch.chdir(tmp_path)
    place = f"{tmp_path}/in"
    dataset, _ = run_chain(declare("root", place))
    for spelling in ("in", "./in/", "root/../in", f"file://{place}/", f"{place}/"):
        other = DatasetStore(declare("root", spelling))
        assert other.spec.shards == place
        found = register(other)
        assert (found.added, found.changed, found.removed) == ((), (), ())
    stored = json.loads(dataset.store.read_bytes("shards.json"))
    assert stored["shards"] == place


def test_a_renewed_signature_is_the_same_dataset(tmp_path: Path) -> None:
    """A presigned shard is packed; signed again it has not changed, and no file of the dataset has a signature."""
    make_shard(tmp_path / "in" / "part 7.tar", CAPTIONS)
    with serve(tmp_path / "in", signature="X-Amz-Signature") as web:

        def spec(secret: str) -> object:
            signed = f"{web.url}/part%207.tar?X-Amz-Date=1&X-Amz-Signature={secret}"
            return declare(tmp_path / "root", signed, settle_seconds=0)

        dataset, results = run_chain(spec("5ec2e7a"))
        assert list(results) == ["part%207"]
        assert len(values(dataset, "part%207")) == 4
        found = register(DatasetStore(spec("b0b1b2b")))
        assert (found.added, found.changed, found.removed) == ((), (), ())
        assert dataset.registered().source == f"{web.url}/part%207.tar"
    for file in (tmp_path / "root").rglob("*"):
        assert not file.is_file() or b"5ec2e7a" not in file.read_bytes(), file


def test_what_is_indexed_is_what_was_registered(inbox: Path, tmp_path: Path) -> None:
    """A shard that is being replaced after its registration is not indexed half, but refused with what to do."""
    dataset, _ = run_chain(declare(tmp_path / "root", inbox, pack="generic"))
    make_shard(inbox / "b.tar", CAPTIONS)
    with pytest.raises(SourceError, match=r"changed since it was registered .*mm-assets register"):
        at_work(stages.raw_shards, dataset, "b")


def test_shards_that_are_all_gone_change_nothing(inbox: Path, tmp_path: Path) -> None:
    """A place that looks empty, as an unmounted folder does, is an error and unregisters nothing."""
    dataset = DatasetStore(declare(tmp_path / "root", inbox, pack="generic"))
    register(dataset)
    for shard in inbox.iterdir():
        shard.unlink()
    with pytest.raises(SourceError, match="no shard was found there, though it held 2 partitions before"):
        register(dataset, allow_empty=True)
    assert sorted(dataset.partitions()) == ["a", "b"]


def test_other_shards_do_not_take_over_a_dataset(dataset: DatasetStore, tmp_path: Path) -> None:
    """Shards of another place under the same name are refused, because they would be packed by the first one's plan."""
    other = DatasetStore(dataset.spec.replace(shards=str(make_shard(tmp_path / "other" / "c.tar", CAPTIONS))))
    with pytest.raises(ConfigError, match="use another dataset name or root"):
        register(other)
    assert register(other, new_schema=True).added == ("c",)


def test_a_group_stays_registered_while_a_shard_joins_it(inbox: Path, tmp_path: Path) -> None:
    """A young shard makes its group wait; what is registered of the group stands until then."""
    (inbox / "b.tar").unlink()
    (inbox / "a.tar").rename(inbox / "group-1.tar")
    spec = declare(tmp_path / "root", inbox, pack="generic", partition_pattern=r"(group)-\d+")
    assert [p.key for p in register(DatasetStore(spec)).partitions] == ["group"]
    make_shard(inbox / "group-2.tar", CAPTIONS)
    found = register(DatasetStore(spec.replace(settle_seconds=3600.0)))
    assert (found.removed, found.changed, len(found.unsettled)) == ((), (), 2)
    (partition,) = found.partitions
    assert len(partition.shards) == 1
