"""The whole chain over what lists and image tokens name: files, members and frames, and what they may not."""

from __future__ import annotations

import json
import os
import resource
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_assets.errors import SourceError
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register

from ...http_server import Reply, answer
from ..chain import at_work, declare, run_chain
from ..shards import Members, drops, make_shard, pixels, png, table, tiff, values

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
        at_work(made, dataset, "s")
    with pytest.raises(SourceError, match=r"'a', position 2.*gone\.png"):
        at_work(getattr(stages, stage), dataset, "s")
    assert not dataset.store.sizes(stage)


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


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_leads_only_where_references_may(tmp_path: Path, status: int) -> None:
    """A server that redirects an allowed URL reaches no other server: no request goes there, and the row says where."""

    def secret(_method: str, _path: str) -> Reply:
        return 200, {"Content-Type": "image/png"}, png(9)

    with answer(secret) as (inside, inner_requests):

        def images(_method: str, path: str) -> Reply:
            target = {"/img/moved.png": "../img/here.png", "/img/away.png": f"{inside}/img/x.png?token=1"}.get(path)
            redirect: Reply = (status, {"Location": target or "/other/x.png"}, b"")
            return (200, {}, png(5)) if path == "/img/here.png" else redirect

        with answer(images) as (url, requests):
            tokens = [f"{url}/img/{name}.png" for name in ("here", "moved", "away", "up")]
            texts = [None] * (len(tokens) + 1)
            shard = make_shard(tmp_path / "in" / "s.tar", {"a.json": {"texts": texts, "images": [None, *tokens]}})
            samples = {"allow_references": True, "allowed_references": [f"{url}/img/"]}
            dataset, _ = run_chain(declare(tmp_path / "root", shard, samples=samples))
    assert values(dataset)["a"]["image"] == [(n, pixels(5).tolist()) for n in (1, 2)]
    assert inner_requests == []
    assert not [path for _, path in requests if path.startswith("/other")]
    errors = [r["materialize_error"] for r in table(dataset, "materialized_rows") if r["materialize_error"]]
    assert len(errors) == 2
    for error, target in zip(errors, (f"{inside}/img/x.png", f"{url}/other/x.png"), strict=True):
        assert f"redirects to {target}, which `samples.allowed_references` does not cover" in error
