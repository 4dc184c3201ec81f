"""The whole chain over small shards that are made here: what a declaration asks for, and what bad input does."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import resource
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mm_assets
from mm_assets.errors import ConfigError, MmAssetsError, ShardError, SourceError
from mm_assets.media.header import HeaderReader
from mm_assets.media.images import ImageInfo, probe_image
from mm_assets.pipeline import publish, stages
from mm_assets.pipeline.chain import FILTERED_ROWS, PACKED_STAGES
from mm_assets.pipeline.register import register
from mm_assets.pipeline.store import DatasetStore

from .chain import declare, run_chain, run_partition

Members = Mapping[str, object]


def pixels(seed: int, size: tuple[int, int] = (8, 12)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def png(seed: int, size: tuple[int, int] = (8, 12)) -> bytes:
    target = io.BytesIO()
    Image.fromarray(pixels(seed, size)).save(target, format="PNG")
    return target.getvalue()


def tiff(*seeds: int) -> bytes:
    target = io.BytesIO()
    first, *others = (Image.fromarray(pixels(seed)) for seed in seeds)
    first.save(target, format="TIFF", save_all=True, append_images=others, compression="tiff_deflate")
    return target.getvalue()


def content_of(value: object) -> bytes:
    return (
        value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else json.dumps(value).encode()
    )


def tar_bytes(members: Members) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, value in members.items():
            content = content_of(value)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return target.getvalue()


def make_shard(path: Path, members: Members) -> Path:
    """A shard, compressed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tar_bytes(members)
    if path.name.endswith((".gz", ".tgz")):
        content = gzip.compress(content)
    elif path.name.endswith((".zst", ".tzst")):
        content = pa.Codec("zstd").compress(content, asbytes=True)
    path.write_bytes(content)
    return path


DOCUMENTS: Members = {
    "a.json": {"texts": ["one", None, "two", None], "images": [None, "t0", None, "t1"], "score": 1},
    "a.tiff": tiff(1, 2),
    "b.json": {"texts": [None, "drei"], "images": ["b.0.png", None], "score": 2},
    "b.0.png": png(3),
    "c.json": {"texts": ["no image at all"], "images": [None], "score": 3},
}
CAPTIONS: Members = {
    name: value
    for n in range(4)
    for name, value in {f"{n}.png": png(n), f"{n}.txt": f"caption {n}", f"{n}.json": {"n": n}}.items()
}


def table(dataset: DatasetStore, name: str, key: str = "s") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(dataset.store.path_of(dataset.table(name, key))).to_pylist()
    return rows


def packed(dataset: DatasetStore, key: str = "s", form: str = "mult") -> mm_assets.Dataset:
    return mm_assets.open(dataset.store.path_of(dataset.record(PACKED_STAGES[form], key).files[form].path))


def values(dataset: DatasetStore, key: str = "s") -> dict[str, dict[str, Any]]:
    """What the packed files hold by sample id, the same in both; arrays as nested lists."""
    found = []
    for form in PACKED_STAGES:
        with packed(dataset, key, form) as opened:
            found.append({i: plain(opened[n]) for n, i in enumerate(opened.sample_ids)})
    assert found[0] == found[1]
    return found[0]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value.tolist() if isinstance(value, np.ndarray) else value


def drops(dataset: DatasetStore, key: str = "s") -> list[tuple[str, int, str, str]]:
    return [(d["sample_id"], d["position"], d["filter"], d["reason"]) for d in table(dataset, "dropped", key)]


# --- shards --------------------------------------------------------------------------------------------------------


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
    for row in rows["tar"]:
        del row["source_ref"]
    assert rows[suffix] == rows["tar"]


@pytest.mark.parametrize("members", [DOCUMENTS, CAPTIONS], ids=["sequence", "one"])
def test_packing_probes_each_image_header_once(
    tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing both formats probes each image header once, and the checks of both files together once more."""
    dataset, _ = run_chain(declare(tmp_path / "store", make_shard(tmp_path / "in" / "s.tar", members)))
    probed: list[int] = []

    def probe(data: bytes) -> ImageInfo:
        probed.append(len(data))
        return probe_image(data)

    monkeypatch.setattr("mm_assets.fields.image.probe_image", probe)
    stages.packed(dataset, "s")
    rows = table(dataset, "filtered_rows")
    assert sorted(probed) == sorted(2 * [len(row["binary_content"]) for row in rows if row["modality"] == "image"])


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
    stages.filtered_rows(dataset, "s")
    assert drops(dataset)
    assert len(read) == len(set(read)) == 5


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
    assert publish.pending_partitions(dataset) == ["part-0"]
    run_partition(dataset, "part-0")
    assert list(values(dataset, "part-0")) == ["part-0-00/x", "part-0-01/y"]


@pytest.mark.parametrize("other", ["q/s.tar", "p/s.tar.gz"])
def test_two_shards_that_take_one_key_are_refused(tmp_path: Path, other: str) -> None:
    """Without a pattern two shards of one base name are an error that names both and the way out."""
    one = make_shard(tmp_path / "in" / "p" / "s.tar", CAPTIONS)
    two = make_shard(tmp_path / "in" / other, CAPTIONS)
    with pytest.raises(ConfigError, match="partition_pattern") as caught:
        register(DatasetStore(declare(tmp_path / "root", tmp_path / "in")))
    assert str(one) in str(caught.value)
    assert str(two) in str(caught.value)


def broken(members: Members, at: str) -> tuple[bytes, int]:
    """A shard whose header of the member `at` is overwritten, and where that header stands."""
    content = bytearray(tar_bytes(members))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        offset = tar.getmember(at).offset
    content[offset : offset + 512] = b"\xa5" * 512
    return bytes(content), offset


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
        stages.raw_shards(strict, "s")
    assert str(damaged) in str(caught.value)
    assert publish.build_manifest(strict).left_out == {"s": "it is not published"}

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
        stages.raw_shards(dataset, "r")
    assert len(values(dataset)) == 4


def test_no_readable_shard(tmp_path: Path) -> None:
    """Where no shard can be read, registration says what is wrong with the first."""
    (tmp_path / "in").mkdir()
    for name in ("r.tar", "s.tar"):
        (tmp_path / "in" / name).write_bytes(broken(CAPTIONS, "0.txt")[0])
    with pytest.raises(ShardError, match=r"r\.tar, at byte"):
        register(DatasetStore(declare(tmp_path / "root", tmp_path / "in")))


# --- lists of files ------------------------------------------------------------------------------------------------

LIST_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("path", pa.string()),
        ("source_ref", pa.string()),
        ("text_content", pa.string()),
        ("metadata_json", pa.string()),
        ("rating", pa.float64()),
    ]
)


def make_list(folder: Path, kind: str, lines: Sequence[Mapping[str, object]]) -> Path:
    path = folder / f"s.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([dict(line) for line in lines], schema=LIST_SCHEMA), path)
    else:
        path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_list_of_files(tmp_path: Path, kind: str, mode: str) -> None:
    """A list of files, of members and of frames beside it goes through the chain; what it may not name is not read."""
    folder = tmp_path / "in"
    (folder / "img").mkdir(parents=True)
    (folder / "img" / "a.png").write_bytes(png(1))
    (folder / "pages.tiff").write_bytes(tiff(2, 3))
    shard = make_shard(folder / "more.tar", {"m.png": png(4), "n.png": png(5)})
    with tarfile.open(shard) as tar:
        member = tar.getmember("n.png")
    (tmp_path / "secret.png").write_bytes(png(9))
    ranged = {"path": "more.tar", "member": "n.png", "byte_offset": member.offset_data, "byte_size": member.size}
    lines = [
        {"sample_id": "a", "path": "img/a.png", "rating": 0.5, "metadata_json": '{"k": 1}'},
        {"sample_id": "a", "text_content": "hello"},
        {"sample_id": "b", "source_ref": json.dumps({"path": "pages.tiff", "frame_index": 1})},
        {"sample_id": "c", "source_ref": json.dumps({"path": "more.tar", "member": "m.png"})},
        {"sample_id": "d", "source_ref": json.dumps(ranged)},
        {"sample_id": "e", "path": "img/gone.png"},
        {"sample_id": "f", "path": "../secret.png"},
        {"sample_id": "f", "path": str(tmp_path / "secret.png")},
    ]
    listed = make_list(folder, kind, lines)
    dataset, results = run_chain(declare(tmp_path / "root", listed, materialize=mode))
    (key,) = results
    assert key == "s"
    found = values(dataset)
    assert {i: v["image"] for i, v in found.items()} == {
        sample_id: [(0, pixels(seed).tolist())] for sample_id, seed in (("a", 1), ("b", 3), ("c", 4), ("d", 5))
    }
    assert found["a"]["metadata"] == {"k": 1}
    assert found["a"]["text"] == [(1, "hello")]
    assert {r["reason"] for r in table(dataset, "rejects")} == {"outside"}
    assert ("e", 0, "packable", "not_materialized") in drops(dataset)
    assert [r["rating"] for r in table(dataset, "filtered_rows") if r["rating"]] == [0.5]


def test_a_list_of_more_files_than_a_process_may_hold_open(tmp_path: Path) -> None:
    """Files and archives that a list names are not all held open at a time, and each gives its own bytes."""
    lines: list[dict[str, object]] = []
    for n in range(90):
        (tmp_path / f"{n}.png").write_bytes(png(n % 5))
        shard = make_shard(tmp_path / f"{n}.tar", {"x.png": png(n % 7), "y.png": png(n % 3)})
        with tarfile.open(shard) as tar:
            places = [{"member": m.name, "byte_offset": m.offset_data, "byte_size": m.size} for m in tar]
        refs = [{"path": shard.name, **place} for place in places]
        lines += [{"sample_id": f"{n}-x", "source_ref": refs[0]}, {"sample_id": f"{n}-png", "path": f"{n}.png"}]
        lines.insert(n, {"sample_id": f"{n}-y", "source_ref": refs[1]})
    spec = declare(tmp_path / "root", make_list(tmp_path, "jsonl", lines), pack="generic")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 85, limits[1]))
    try:
        dataset, _ = run_chain(spec)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert drops(dataset) == []
    seeds = {"x": 7, "y": 3, "png": 5}
    for sample_id, value in values(dataset).items():
        n, kind = sample_id.split("-")
        assert value["image"] == pixels(int(n) % seeds[kind]).tolist(), sample_id


# --- errors of single items ------------------------------------------------------------------------------------------

HALF_GONE: Members = {
    "a.json": {"texts": ["one"], "images": [None, "a.0.png", "gone.png"]},
    "a.0.png": png(0),
    "b.json": {"texts": ["two"], "images": [None, "b.0.png"]},
    "b.0.png": png(1),
}


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("keep", [("a", 2, "packable", "not_materialized")]),
        ("drop_row", [("a", 2, "materialize", "materialize_error")]),
        ("drop_sample", [("a", n, "materialize", "materialize_error") for n in (-1, 0, 1, 2)]),
    ],
)
def test_an_image_token_that_names_nothing(
    tmp_path: Path, mode: str, policy: str, expected: list[tuple[str, int, str, str]]
) -> None:
    """The row has an error and never another image; the policy says what goes, and the rest is packed."""
    shard = make_shard(tmp_path / "s.tar", HALF_GONE)
    dataset, _ = run_chain(declare(tmp_path / "root", shard, materialize=mode, on_materialize_error=policy))
    (error,) = [r for r in table(dataset, "materialized_rows") if r["materialize_error"]]
    assert (error["sample_id"], error["position"], error["binary_content"]) == ("a", 2, None)
    assert "gone.png" in error["materialize_error"]
    assert drops(dataset) == expected
    found = values(dataset)
    assert found["b"]["image"] == [(1, pixels(1).tolist())]
    assert set(found) == ({"b"} if policy == "drop_sample" else {"a", "b"})
    if "a" in found:
        assert found["a"]["image"] == [(1, pixels(0).tolist())]
        assert found["a"]["text"] == [(0, "one")]


@pytest.mark.parametrize(("mode", "stage"), [("read", "materialized_rows"), ("write", "filtered_rows")])
def test_an_error_can_fail_the_partition(tmp_path: Path, mode: str, stage: str) -> None:
    """With the policy `fail` the stage that fetches raises, naming sample, position and token."""
    shard = make_shard(tmp_path / "s.tar", HALF_GONE)
    dataset = DatasetStore(declare(tmp_path / "root", shard, materialize=mode, on_materialize_error="fail"))
    register(dataset)
    for made in (stages.raw_shards, stages.rows, stages.materialized_rows, stages.filtered_rows):
        if made.__name__ == stage:
            break
        made(dataset, "s")
    with pytest.raises(SourceError, match=r"'a', position 2.*gone\.png"):
        getattr(stages, stage)(dataset, "s")
    assert not dataset.store.exists(dataset.table(stage, "s"))


def test_hostile_tokens_read_nothing(tmp_path: Path) -> None:
    """A token that points out of the shard, in any spelling, is an error on its row; no other file's bytes get in."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(99))
    tokens: list[object] = [
        str(secret),
        f"file://{secret}",
        f"local://{secret}",
        f"simplecache::file://{secret}",
        f"tar://s.tar::file://{secret}",
        "../secret.png",
        "in/../../secret.png",
        "memory://x.png",
        "http://127.0.0.1:9/x.png",
        "s3://bucket/x.png",
        "~/x.png",
        "s.tar",
        "a.json",
        "",
        "b.0.png\x00",
        {"path": str(secret)},
        [str(secret)],
        7,
    ]
    members = {
        "a.json": {"images": tokens, "source_ref": {"path": str(secret)}, "path": str(secret)},
        "b.json": {"texts": ["two"], "images": [None, "b.0.png"]},
        "b.0.png": png(1),
    }
    dataset, _ = run_chain(declare(tmp_path / "root", make_shard(tmp_path / "in" / "s.tar", members)))
    errors = [r for r in table(dataset, "materialized_rows") if r["materialize_error"]]
    assert [(r["sample_id"], r["position"]) for r in errors] == [("a", at) for at in range(len(tokens))]
    assert {(r["binary_content"], r["source_ref"]) for r in errors} == {(None, None)}
    assert list(values(dataset)) == ["b"]
    assert values(dataset)["b"]["image"] == [(1, pixels(1).tolist())]
    for path in Path(dataset.store.path_of("")).rglob("*"):
        assert path.is_dir() or png(99) not in path.read_bytes()


def test_allowed_references_are_followed(tmp_path: Path) -> None:
    """Tokens that are paths or URLs are read below `allowed_references` and nowhere else."""
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "x.png").write_bytes(png(5))
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "x.png").write_bytes(png(6))
    tokens = [f"{tmp_path}/media/x.png", f"{tmp_path}/media2/x.png", f"{tmp_path}/media/../media2/x.png"]
    shard = make_shard(
        tmp_path / "in" / "s.tar", {"a.json": {"texts": ["one", None, None, None], "images": [None, *tokens]}}
    )
    samples = {"allow_references": True, "allowed_references": [f"{tmp_path}/media"]}
    dataset, _ = run_chain(declare(tmp_path / "root", shard, samples=samples))
    assert values(dataset)["a"]["image"] == [(1, pixels(5).tolist())]
    assert [d[:2] for d in drops(dataset)] == [("a", 2), ("a", 3)]


# --- columns -------------------------------------------------------------------------------------------------------


def test_a_column_that_a_whole_shard_lacks(tmp_path: Path) -> None:
    """A declared column that no sample of a shard has fails that partition alone, also if it is the first shard."""
    make_shard(tmp_path / "in" / "r.tar", {"0.json": {"other": 1}, "0.txt": "a"})
    make_shard(tmp_path / "in" / "s.tar", {"0.json": {"score": 0.5}, "0.txt": "a", "1.json": {}, "1.txt": "b"})
    make_shard(tmp_path / "in" / "t.tar", {"0.txt": "no JSON at all"})
    spec = declare(tmp_path / "root", tmp_path / "in", samples={"user_columns": ["score"]})
    dataset = DatasetStore(spec)
    register(dataset)
    for key in ("r", "t"):
        stages.raw_shards(dataset, key)
        with pytest.raises(SourceError, match=rf"{key}\.tar: .*'score'"):
            stages.rows(dataset, key)
    results = run_partition(dataset, "s")
    heads = [(r["sample_id"], r["score"]) for r in table(dataset, "rows") if r["modality"] == "metadata"]
    assert heads == [("0", 0.5), ("1", None)]
    assert results["rows"].record.counts["missing_values"] == 1


def test_a_column_that_no_shard_has(tmp_path: Path) -> None:
    """A declared column that is nowhere is reported at registration, with the key."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    with pytest.raises(MmAssetsError, match=r"s\.tar: .*'score', which samples\.user_columns asks for"):
        register(DatasetStore(declare(tmp_path / "root", shard, samples={"user_columns": ["score"]})))


def test_an_unusable_root_is_named_by_its_key(tmp_path: Path) -> None:
    """A root of an unknown scheme, or one that is a file, is a wrong setting of the declaration."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    with pytest.raises(ConfigError, match=r": root: 's4://bucket' cannot be used: .* s4:// is not known"):
        DatasetStore(declare(tmp_path, shard).replace(root="s4://bucket"))
    with pytest.raises(ConfigError, match=r": root: '.*s\.tar' cannot be written: .*Not a directory"):
        register(DatasetStore(declare(shard, shard)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nope": 1}, "unexpected keyword argument 'nope'"),
        ({"client_kwargs": {"nope": 1}}, "unexpected keyword argument 'nope'"),
        ({"key": "me"}, "Partial credentials found"),
    ],
)
def test_wrong_root_options_are_named_by_their_key(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    """Options that the client of the root's storage does not take are a wrong setting, before any request."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    spec = declare(tmp_path, tmp_path, root_options=options).replace(root="s3://bucket")
    with pytest.raises(ConfigError, match=rf"defs\.yaml: root_options: are wrong for 's3://bucket': .*{says}"):
        DatasetStore(spec)


def test_a_registration_that_fails_elsewhere_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root without its bucket is a wrong setting; another process at work, or a broken transfer, is not."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    dataset = DatasetStore(declare(tmp_path / "root", shard))
    with dataset.store.draft("schema.json") as draft:
        draft.path.write_bytes(b"{}")
        with pytest.raises(SourceError, match=r"schema\.json: another process is writing this file"):
            register(dataset)
    remote = DatasetStore(declare(tmp_path, shard).replace(root="memory://bucket"))
    broken: list[Exception] = [ConnectionError("reset by peer"), FileNotFoundError("bucket")]
    monkeypatch.setattr(type(remote.store.fs), "put_file", lambda *_: (_ for _ in ()).throw(broken.pop(0)))
    with pytest.raises(SourceError, match=r"memory://bucket/data/schema\.json: cannot be written: reset by peer"):
        register(remote)
    with pytest.raises(ConfigError, match=r": root: 'memory://bucket' cannot be written: .*not found"):
        register(remote)


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("stage", ["rows", "materialized_rows", "filtered_rows", "packed"])
def test_a_changed_shard_replaces_nothing(tmp_path: Path, mode: str, stage: str) -> None:
    """A shard that changed after it was indexed is refused before a stage publishes anything over its last files."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    dataset, _ = run_chain(declare(tmp_path / "root", shard, materialize=mode))
    before = {path: path.stat().st_mtime_ns for path in Path(dataset.store.url).rglob("*") if path.is_file()}
    make_shard(shard, DOCUMENTS)
    with pytest.raises(SourceError, match=r"s\.tar: changed since it was indexed .*: materialize raw_shards again"):
        getattr(stages, stage)(dataset, "s")
    after = {path: path.stat().st_mtime_ns for path in Path(dataset.store.url).rglob("*") if path.is_file()}
    assert after == before


def test_an_unregistered_partition_names_the_command(tmp_path: Path) -> None:
    """A stage of an unknown partition says which ones are registered and how to register it."""
    dataset = DatasetStore(declare(tmp_path / "root", make_shard(tmp_path / "in" / "s.tar", CAPTIONS)))
    with pytest.raises(SourceError, match=r"'s' is not registered \(found none\): run `mm-assets register --dataset "):
        stages.raw_shards(dataset, "s")
    register(dataset)
    with pytest.raises(SourceError, match=r"'r' is not registered \(found s\)"):
        stages.raw_shards(dataset, "r")


def test_later_shards_conform_to_the_schema(tmp_path: Path) -> None:
    """Further keys and values of another type stay in the JSON, are counted, and change no column."""
    make_shard(tmp_path / "in" / "r.tar", {"0.json": {"n": 1, "tags": ["x"], "ok": True}, "0.txt": "a"})
    register(DatasetStore(declare(tmp_path / "root", tmp_path / "in")))
    later = {"0.json": {"n": "many", "tags": 3, "ok": 1, "new": 1}, "0.txt": "a", "1.json": {"n": 2}, "1.txt": "b"}
    make_shard(tmp_path / "in" / "s.tar", {**later, "0.png": png(1)})
    dataset, results = run_chain(declare(tmp_path / "root", tmp_path / "in"))
    assert results["s"]["rows"].schema == results["r"]["rows"].schema
    head, *_ = table(dataset, "filtered_rows")
    assert (head["n"], head["tags"], head["ok"]) == (None, None, None)
    assert json.loads(head["metadata_json"]) == {"n": "many", "tags": 3, "ok": 1, "new": 1}
    counts = results["s"]["rows"].record.counts
    assert (counts["kept.null_cast"], counts["kept.no_column"], counts["misfit_columns"]) == (3, 1, 2)
    notes = results["s"]["rows"].record.notes
    assert notes[0] == "no value fits its column: 'ok' 1, 'tags' 1"
    assert "`mm-assets register --dataset data --new-schema` decides it again" in notes[1]
    assert values(dataset)["0"]["metadata"]["new"] == 1
    with mm_assets.open(dataset.store.url_of("manifest.json")) as opened:
        assert len(opened) == 3


def test_reserved_names(tmp_path: Path) -> None:
    """Keys that have the names of reserved columns become user_<name>; asking for one is refused at once."""
    members = {"0.json": {"position": 7, "modality": "x", "user_modality": "y", "sample_id": "z"}, "0.txt": "a"}
    shard = make_shard(tmp_path / "s.tar", members)
    dataset, _ = run_chain(declare(tmp_path / "root", shard))
    head, row = table(dataset, "filtered_rows")
    assert (head["position"], head["modality"], head["sample_id"]) == (-1, "metadata", "0")
    assert (head["user_position"], head["user_sample_id"]) == (7, "z")
    assert {head["user_modality"], head["user_user_modality"]} == {"x", "y"}
    assert row["user_position"] is None
    with pytest.raises(ConfigError, match=r"defs\.yaml: samples\.user_columns: 'position' is a reserved column"):
        declare(tmp_path / "root", shard, samples={"user_columns": ["position"]})


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    """NaN and infinities, as Python writes them, cost no sample: null in JSON, themselves in columns of numbers."""
    members = {
        "0.json": '{"score": NaN, "box": {"x": -Infinity}, "n": 1}',
        "0.txt": "a",
        "1.json": '{"score": 0.5, "box": {"x": 2}}',
        "1.txt": "b",
    }
    dataset, results = run_chain(declare(tmp_path / "root", make_shard(tmp_path / "s.tar", members)))
    assert drops(dataset) == []
    assert values(dataset)["0"]["metadata"] == {"score": None, "box": {"x": None}, "n": 1}
    head, _, other, _ = table(dataset, "filtered_rows")
    assert np.isnan(head["score"])
    assert (head["box"], head["n"], other["box"]) == ('{"x":null}', 1, '{"x":2}')
    assert other["metadata_json"] == members["1.json"]
    assert results["s"]["rows"].record.counts["nonstandard_numbers"] == 2


def test_fields_of_items(tmp_path: Path) -> None:
    """Lists of `per_image_fields` go to the image rows, item by item, through to the filtered rows."""
    members = {
        "a.json": {"texts": ["t", None, None], "images": [None, "x", "y"], "alt": ["first", "second"]},
        "a.tiff": tiff(1, 2),
    }
    shard = make_shard(tmp_path / "s.tar", members)
    dataset, _ = run_chain(declare(tmp_path / "root", shard, samples={"per_image_fields": ["alt"]}))
    assert [(r["position"], r["alt"]) for r in table(dataset, "filtered_rows")] == [
        (-1, None),
        (0, None),
        (1, "first"),
        (2, "second"),
    ]


# --- filters and annotators ----------------------------------------------------------------------------------------

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
    assert {("b", -1, "empty_sample", "no_content_rows"), ("b", 0, "text_length", "chars_below_min")} < set(
        drops(dataset)
    )
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
        assert made["read"].record(stage, "s").files == made["write"].record(stage, "s").files
    assert list(values(made["write"])) == ["3", "4", "5"]


# --- packing -------------------------------------------------------------------------------------------------------


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


# --- damaged tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_a_flipped_bit_in_a_table_stops_the_next_stage(tmp_path: Path, remote: bool) -> None:
    """One bit of a table that changed after it was recorded is refused by what reads the table, and nothing is made."""
    shard = make_shard(tmp_path / "s.tar", CAPTIONS)
    root = f"memory://{tmp_path.name}-flipped" if remote else tmp_path / "root"
    dataset, _ = run_chain(declare(root, shard))
    readers = [*stages.TABLE_STAGES.values(), stages.packed]
    for stage, read in zip(stages.TABLE_STAGES, readers[1:], strict=True):
        record = dataset.record(stage, "s").files[stage.tables[0].name]
        whole = dataset.store.read_bytes(record.path)
        for place in (7, len(whole) // 2, len(whole) - 9):
            flipped = bytearray(whole)
            flipped[place] ^= 1
            dataset.store.write_bytes(record.path, bytes(flipped))
            again = f"materialize {stage.name} again, or run `mm-assets run --dataset data --partition s`"
            wrong = rf"{record.path}.*its SHA-256 is \w{{64}}, expected {record.sha256} as recorded: {again}"
            with pytest.raises(SourceError, match=wrong):
                read(dataset, "s")
        dataset.store.write_bytes(record.path, whole)
    stages.packed(dataset, "s")
