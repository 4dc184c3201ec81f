"""The whole chain over tar shards: compressed, grouped, damaged, truncated and without samples."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

import mm_assets
from mm_assets.errors import ConfigError, ShardError, SourceError
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions

from ..chain import at_work, declare, run_chain, run_partition
from ..shards import CAPTIONS, DOCUMENTS, Members, broken, make_shard, pixels, png, table, values


@pytest.mark.parametrize(
    ("suffix", "mode"), [("tar.gz", "read"), ("tgz", "write"), ("tar.zst", "write"), ("tzst", "read")]
)
@pytest.mark.parametrize("members", [DOCUMENTS, CAPTIONS], ids=["documents", "captions"])
def test_compressed_shards(tmp_path: Path, suffix: str, members: Members, mode: str) -> None:
    """A gzip or zstd shard gives the rows and packed values of the plain one, in both modes, without byte ranges."""
    made = {}
    for kind in ("tar", suffix):
        shard = make_shard(tmp_path / kind / f"s.{kind}", members)
        made[kind], _ = run_chain(declare(tmp_path / f"root-{kind}", shard, materialize=mode))
    assert values(made[suffix]) == values(made["tar"])
    rows = {kind: table(dataset, "filtered_rows") for kind, dataset in made.items()}
    refs = [json.loads(row.pop("source_ref")) for row in rows[suffix]]
    assert {(ref["byte_offset"], ref["byte_size"]) for ref in refs} == {(None, None)}
    for row in (*rows[suffix], *rows["tar"]):
        for place in ("source_ref", "source", "source_member"):
            row.pop(place, None)
    assert rows[suffix] == rows["tar"]


def test_grouped_partitions(tmp_path: Path) -> None:
    """Shards of one group are one partition, their names part of the ids; a changed shard makes its group pending."""
    for name, seed in (("part-0-00.tar", 0), ("part-0-01.tar", 1), ("part-1-00.tar.gz", 2)):
        make_shard(tmp_path / "in" / name, {"x.png": png(seed), "x.txt": f"text {seed}", "x.json": {"seed": seed}})
    spec = declare(tmp_path / "root", tmp_path / "in", partition_pattern=r"(?P<partition>part-\d+)-\d+\.tar")
    dataset, results = run_chain(spec)
    assert sorted(results) == ["part-0", "part-1"]
    assert {i: v["metadata"] for i, v in values(dataset, "part-0").items()} == {
        "part-0-00/x": {"seed": 0},
        "part-0-01/x": {"seed": 1},
    }
    assert values(dataset, "part-0")["part-0-01/x"]["image"] == pixels(1).tolist()
    assert list(values(dataset, "part-1")) == ["part-1-00/x"]
    with mm_assets.open(dataset.store.url_of("manifest.json")) as opened:
        assert [opened.find(i) for i in ("part-0-00/x", "part-1-00/x", "x")] == [0, 2, None]
    make_shard(tmp_path / "in" / "part-0-01.tar", {"y.png": png(7), "y.txt": "text"})
    assert register(dataset).changed == ("part-0",)
    assert pending_partitions(dataset) == ["part-0"]
    run_partition(dataset, "part-0")
    assert list(values(dataset, "part-0")) == ["part-0-00/x", "part-0-01/y"]


def test_ids_of_groups_are_unique_and_do_not_depend_on_other_shards(tmp_path: Path) -> None:
    """Shards of one name in different folders give different ids, which stay when a shard joins their group."""
    members = {"0.png": png(1), "0.txt": "text"}
    for name in ("xxx/a/0.tar", "yyy/a/0.tar"):
        make_shard(tmp_path / "in" / name, members)
    spec = declare(tmp_path / "root", tmp_path / "in", partition_pattern="^(?P<partition>[a-z]+)/")
    dataset, _ = run_chain(spec)
    assert [list(values(dataset, key)) for key in ("xxx", "yyy")] == [["xxx/a/0/0"], ["yyy/a/0/0"]]
    make_shard(tmp_path / "in" / "xxx/b/0.tar", members)
    register(dataset)
    run_partition(dataset, "xxx")
    assert list(values(dataset, "xxx")) == ["xxx/a/0/0", "xxx/b/0/0"]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_with_roles_keys_may_have_dots(tmp_path: Path, suffix: str) -> None:
    """Names with dates are a sample each, with the listed roles, through every stage and check, compressed or not."""
    members: dict[str, object] = {}
    for day in range(1, 4):
        name = f"DCIM/IMG_2023.05.{day:02}"
        members |= {f"{name}.rgb.png": png(day), f"{name}.mask.png": png(10 + day), f"{name}.json": {"day": day}}
    make_shard(tmp_path / "in" / f"s.{suffix}", members)
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in", samples={"roles": ["rgb", "mask"]}))
    found = values(dataset, "s")
    assert list(found) == [f"DCIM/IMG_2023.05.{day:02}" for day in range(1, 4)]
    for day, sample in enumerate(found.values(), 1):
        assert sample["metadata"] == {"day": day}
        assert (sample["rgb"], sample["mask"]) == (pixels(day).tolist(), pixels(10 + day).tolist())


def test_a_text_that_names_a_member_is_the_only_image(tmp_path: Path) -> None:
    """Beside a list of texts, `images` may be the name of one member; of any other text no image comes."""
    members: dict[str, object] = {
        "a.json": {"texts": ["one"], "images": "a.png"},
        "a.png": png(1),
        "b.json": {"texts": [None, "two"], "images": "./pages/b.png"},
        "pages/b.png": png(2),
        "c.json": {"texts": ["three"], "images": ["c.png"]},
        "c.png": png(3),
        "d.json": {"texts": ["four"], "images": "a cat"},
        "d.png": png(4),
        "e.json": {"images": "e.png"},
        "e.png": png(5),
        "e.txt": "five",
    }
    make_shard(tmp_path / "in" / "s.tar", members)
    dataset, results = run_chain(
        declare(tmp_path / "root", tmp_path / "in", pack="interleaved", samples={"per_image_fields": ["alt"]})
    )
    found = values(dataset, "s")
    for seed, (key, texts) in enumerate([("a", [(0, "one")]), ("b", [(1, "two")]), ("c", [(0, "three")])], 1):
        assert list(found[key]["image"]) == [(0, pixels(seed).tolist())]
        assert list(found[key]["text"]) == texts
    assert list(found["e"]["image"]) == [(0, pixels(5).tolist())]
    assert list(found["d"]["text"]) == [(0, "four")]
    assert not found["d"]["image"]
    assert results["s"]["rows"].record.counts["rejects.unreferenced_member"] == 1
    assert results["s"]["filtered_rows"].record.counts["dropped.packable.not_materialized"] == 1


@pytest.mark.parametrize("other", ["q/s.tar", "p/s.tar.gz"])
def test_two_shards_that_take_one_key_are_refused(tmp_path: Path, other: str) -> None:
    """Without a pattern two shards of one base name are an error that names both and the way out."""
    one = make_shard(tmp_path / "in" / "p" / "s.tar", CAPTIONS)
    two = make_shard(tmp_path / "in" / other, CAPTIONS)
    with pytest.raises(ConfigError, match="partition_pattern") as caught:
        register(DatasetStore(declare(tmp_path / "root", tmp_path / "in")))
    assert str(one) in str(caught.value)
    assert str(two) in str(caught.value)


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_a_damaged_shard(tmp_path: Path, suffix: str, mode: str) -> None:
    """Damage fails the partition with its byte offset; salvaging takes all the rest and lists the lost bytes."""
    content, offset = broken(CAPTIONS, "1.txt")
    (tmp_path / "in").mkdir()
    make_shard(tmp_path / "in" / "r.tar", CAPTIONS)
    damaged = tmp_path / "in" / f"s.{suffix}"
    damaged.write_bytes(gzip.compress(content) if suffix == "tar.gz" else content)
    strict = DatasetStore(declare(tmp_path / "strict", tmp_path / "in", materialize=mode))
    register(strict)
    run_partition(strict, "r")
    with pytest.raises(ShardError, match=f"at byte {offset}") as caught:
        at_work(stages.raw_shards, strict, "s")
    assert str(damaged) in str(caught.value)
    assert manifests.build_manifest(strict).left_out == {"s": "it is not published"}

    spec = declare(tmp_path / "salvage", tmp_path / "in", materialize=mode, on_damaged_shard="salvage")
    dataset, results = run_chain(spec)
    assert results["s"]["raw_shards"].record.counts["damaged_places"] == 1
    rejects = table(dataset, "rejects")
    assert [(r["reason"], f"bytes {offset} to" in r["member"]) for r in rejects] == [("damaged", True)]
    found, whole = values(dataset), values(dataset, "r")
    assert found.pop("1") == {**whole.pop("1"), "text": None}
    assert found == whole


def test_a_truncated_shard_is_salvaged(tmp_path: Path) -> None:
    """A truncated gzip shard gives the members before its end; the member at the end is in the rejects."""
    incompressible = {f"{n}.bin": os.urandom(20_000) for n in range(8)}
    shard = make_shard(tmp_path / "s.tar.gz", incompressible)
    shard.write_bytes(shard.read_bytes()[:100_000])
    dataset, _ = run_chain(declare(tmp_path / "root", shard, on_damaged_shard="salvage"))
    held = values(dataset)
    assert 1 <= len(held) <= 4
    for sample_id, value in held.items():
        assert value["binary"] == incompressible[f"{sample_id}.bin"]
    assert len(table(dataset, "rejects")) == 1


@pytest.mark.parametrize("first", [{}, {"x.json": "{"}], ids=["empty", "damaged_json"])
def test_a_shard_without_samples(tmp_path: Path, first: Members) -> None:
    """A shard that gives no row passes every check as an empty partition, and does not decide the dataset's schema."""
    make_shard(tmp_path / "in" / "r.tar", first)
    make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in"))
    assert values(dataset, "r") == {}
    assert [r["reason"] for r in table(dataset, "rejects", "r")] == ["bad_json" if first else "empty_shard"]
    assert dataset.schema().pack["preset"] == "image_text"
    assert [c.name for c in dataset.schema().user_columns] == ["n"]
    with mm_assets.open(dataset.store.url_of("manifest.json")) as opened:
        assert len(opened) == 4
        assert opened[3]["text"] == "caption 3"


@pytest.mark.parametrize("members", [{}, {"x.json": "{"}], ids=["empty", "damaged_json"])
def test_a_dataset_without_samples(tmp_path: Path, members: Members) -> None:
    """A dataset whose only shard gives no row can be made, and opened."""
    dataset, _ = run_chain(declare(tmp_path / "root", make_shard(tmp_path / "s.tar", members)))
    assert values(dataset) == {}
    with mm_assets.open(dataset.store.url_of("manifest.json")) as opened:
        assert len(opened) == 0


def test_a_damaged_first_shard_does_not_stop_the_others(tmp_path: Path) -> None:
    """The schema is decided by the first shard that can be read; the damaged one fails its own partition alone."""
    make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    (tmp_path / "in" / "r.tar").write_bytes(broken(CAPTIONS, "0.txt")[0])
    dataset = DatasetStore(declare(tmp_path / "root", tmp_path / "in"))
    register(dataset)
    run_partition(dataset, "s")
    with pytest.raises(ShardError, match=r"r\.tar"):
        at_work(stages.raw_shards, dataset, "r")
    assert len(values(dataset)) == 4


def test_no_readable_shard(tmp_path: Path) -> None:
    """Where no shard can be read, registration says what is wrong with the first."""
    (tmp_path / "in").mkdir()
    for name in ("r.tar", "s.tar"):
        (tmp_path / "in" / name).write_bytes(broken(CAPTIONS, "0.txt")[0])
    with pytest.raises(SourceError, match=r"r\.tar, at byte .*none of the other 1 shards .* can be read"):
        register(DatasetStore(declare(tmp_path / "root", tmp_path / "in")))
