"""The routes of the exploring pages over a dataset's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.view import open_backend

from ..pipeline.chain import declare, run_chain
from ..pipeline.explore.test_diff import again
from ..pipeline.shards import make_shard, png
from .conftest import client_of

WIDTHS = {"a": (4, 16, 6, 20), "b": (24, 28)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetStore:
    """Two versions: the second drops images narrower than 10, with their samples."""
    folder = tmp_path_factory.mktemp("explore")
    for key, widths in WIDTHS.items():
        members: dict[str, object] = {".hidden": b"not a sample"}
        for n, width in enumerate(widths):
            members |= {f"{key}{n}.png": png(width, (8, width)), f"{key}{n}.txt": f"caption {key}{n}"}
        make_shard(folder / "in" / f"{key}.tar", members)
    rule = {"type": "image_size", "scope": "sample"}
    spec = declare(
        folder / "root",
        folder / "in",
        annotators=[{"type": "image_size"}],
        filters=[{**rule, "min_width": 2}],
    )
    run_chain(spec)
    stricter = DatasetStore(spec.replace(filters=({**rule, "min_width": 10},)))
    again(stricter)
    return stricter


@pytest.fixture(scope="module")
def client(dataset: DatasetStore) -> Iterator[TestClient]:
    backend = open_backend([dataset.store.url])
    yield client_of(backend)
    backend.close()


def get(client: TestClient, path: str, **params: Any) -> Any:
    answer = client.get(f"/api/explore/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(f"/api/explore/{path}", json=body, headers={"origin": "http://127.0.0.1:8000"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_dataset_can_be_explored_and_a_packed_file_cannot(client: TestClient, tmp_path: Path, packed: Path) -> None:
    """The folder and its manifest have the exploring pages; a lone packed file has columns only."""
    assert client.get("/api/explore").json() == {"available": True, "has_columns": True}
    assert client.get("/static/explore.js").status_code == 200
    backend = open_backend([str(packed)])
    other = client_of(backend)
    assert other.get("/api/explore").json() == {"available": False, "has_columns": True}
    assert other.get("/api/explore/versions").status_code == 404
    backend.close()


def test_a_manifest_in_a_dataset_can_be_explored(dataset: DatasetStore) -> None:
    """The manifest of a dataset leads to the tables beside it."""
    backend = open_backend([dataset.store.url_of("manifest.json")])
    client = client_of(backend)
    assert client.get("/api/explore").json() == {"available": True, "has_columns": True}
    assert get(client, "locate", partition="b", sample_id="b1") == {"part": "", "n": 3}
    assert get(client, "origin", n=3, sample_id="b1")["partition"] == "b"
    backend.close()


def test_a_query_gives_rows(client: TestClient) -> None:
    """A result has columns with types, rows, and whether there are more."""
    found = post(
        client, "sql", sql="select sample_id, image_width from filtered_rows where image_width > 20 order by 2"
    )
    assert found["columns"] == [{"name": "sample_id", "type": "VARCHAR"}, {"name": "image_width", "type": "BIGINT"}]
    assert (found["rows"], found["truncated"]) == ([["b0", 24], ["b1", 28]], False)
    assert {"rows", "filtered_rows"} <= {relation["name"] for relation in get(client, "relations")["relations"]}


def test_a_wrong_query_says_where(client: TestClient) -> None:
    """An error is an answer with its line and column, and no file is read."""
    found = post(client, "sql", sql="select *\nfrom '/etc/passwd'")
    assert (found["line"], found["column"]) == (2, 6)
    assert "there is no relation" in found["error"]
    assert post(client, "cancel", id="nobody") == {"cancelled": False}


def test_a_query_that_was_cancelled_before_it_began_is_not_run(client: TestClient) -> None:
    """A cancel that arrives before its query, which may wait for others, is not lost."""
    assert post(client, "cancel", id="early") == {"cancelled": False}
    assert post(client, "sql", sql="select 1", id="early") == {"error": "cancelled", "line": None, "column": None}


def test_a_query_needs_the_origin_of_the_page(client: TestClient) -> None:
    """A form of another site cannot send a query, and a request without a query's shape is refused."""
    for origin in ("http://evil.example", None):
        headers = {} if origin is None else {"origin": origin}
        assert client.post("/api/explore/sql", json={"sql": "select 1"}, headers=headers).status_code == 403
    headers = {"origin": "http://127.0.0.1:8000"}
    for body in (b"{", b"[]", b'{"sql": 1}'):
        assert client.post("/api/explore/sql", content=body, headers=headers).status_code == 400
    without_length = client.post("/api/explore/sql", content=iter([b" " * (2 << 20)]), headers=headers)
    assert without_length.status_code == 413


def test_the_grid_is_filtered_and_ordered(client: TestClient) -> None:
    """A condition and an order give cards of samples page by page, the largest first."""
    wide = {"where": "image_width >= 16", "order": "image_width", "direction": "desc", "limit": 3}
    first = get(client, "select", **wide)
    assert [(row["sample_id"], row["value"]) for row in first["rows"]] == [("b1", 28), ("b0", 24), ("a3", 20)]
    assert [(entry["id"], entry["part"]) for entry in first["entries"]] == [("b1", "b"), ("b0", "b"), ("a3", "a")]
    assert first["next"] == 3
    second = get(client, "select", **wide, offset=3)
    assert ([row["sample_id"] for row in second["rows"]], second["next"]) == (["a1"], None)
    picture = client.get(first["entries"][0]["picture"])
    assert picture.headers["content-type"] == "image/jpeg"


def test_a_partition_is_filtered_alone(client: TestClient) -> None:
    """The page of a partition has samples of it only, whichever of its stages is looked at."""
    for part in ("b", "b/filtered_rows"):
        found = get(client, "select", part=part)
        assert found["entries"]
        assert {row["partition"] for row in found["rows"]} == {"b"}


def test_a_sample_with_several_rows_is_one_card(client: TestClient) -> None:
    """Rows of one sample are one card of a page, in the order of the first of them; without a condition each is one."""
    found = get(client, "select", where="modality <> 'image'", order="modality", direction="desc")
    ids = [entry["id"] for entry in found["entries"]]
    assert ids == sorted(ids) == ["a1", "a3", "b0", "b1"]
    assert [row["value"] for row in found["rows"]] == ["text"] * 4
    assert [entry["id"] for entry in get(client, "select")["entries"]] == ids


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("no_such_column > 1", "no_such_column"),
        ("true) union select '/etc', (select content from read_text('/etc/passwd'), 1 --", ""),
        ("sample_id in (select content from read_text('/etc/passwd'))", "read_text"),
        ("exists (from '/etc/passwd')", "there is no relation"),
        ("1 = 1; drop view rows", ""),
        ("image_width >", "syntax error"),
    ],
)
def test_a_condition_is_checked_like_a_query(client: TestClient, where: str, says: str) -> None:
    """What is not a condition over the relation gives an error in words, and nothing else."""
    found = get(client, "select", where=where)
    assert says in found["error"]
    assert found["entries"] == []


def test_an_error_in_a_condition_is_located_in_it(client: TestClient) -> None:
    """The line and column are those of the condition, not of the query around it."""
    found = get(client, "select", where="true and\n  no_such_column > 1")
    assert (found["line"], found["column"]) == (2, 3)


def test_wrong_parameters_are_refused(client: TestClient) -> None:
    """Numbers, relations, versions and partitions that are not there are refused in a sentence, and never a 500."""
    wrong = [
        ("select", {"relation": "no_such"}),
        ("select", {"direction": "sideways"}),
        ("select", {"offset": "-1"}),
        ("diff", {"old": "../../etc/passwd", "new": "newest"}),
        ("diff", {"old": "/etc/passwd.json", "new": "newest"}),
        ("diff/samples", {"old": "previous", "new": "newest", "partition": "zz"}),
        ("histogram", {"score": "no_such"}),
        ("kept", {"score": "image_width", "at_least": "many"}),
        ("losses", {"after": "nonsense"}),
        ("origin", {"part": "zz", "sample_id": "a0"}),
        ("item", {"partition": "zz", "sample_id": "a0", "position": "0", "modality": "image"}),
        ("item", {"partition": "a", "sample_id": "nobody", "position": "0", "modality": "image"}),
        ("item", {"partition": "a", "sample_id": "a0", "position": "x", "modality": "image"}),
        ("item", {"partition": "a", "shard": "/etc", "member": "passwd"}),
        ("item", {"partition": "../..", "shard": "a.tar", "member": ".hidden"}),
    ]
    for path, params in wrong:
        answer = client.get(f"/api/explore/{path}", params=params)
        assert 400 <= answer.status_code < 500, (path, params, answer.text)
        assert "bug" not in answer.text


def test_drops_have_their_picture_from_the_shard(client: TestClient) -> None:
    """A dropped row has its filter, limit and measure, and its picture is that of its member."""
    totals = {(t["stage"], t["reason"]): t["count"] for t in get(client, "totals")["totals"]}
    assert totals["filtered_rows", "image_size.width_below_min"] == 6
    found = get(client, "losses", stage="filtered_rows", reason="image_size.width_below_min")
    (image, *_) = [loss for loss in found["losses"] if loss["modality"] == "image"]
    assert (image["value"], image["limit"], image["setting"], found["after"]) == (4.0, 10.0, "min_width", None)
    place = {name: image[name] for name in ("partition", "sample_id", "position", "modality")}
    thumbnail = client.get("/explore/thumbnail", params=place)
    assert thumbnail.content.startswith(b"\xff\xd8")
    item = get(client, "item", **place)
    assert item["kind"] == "image"
    media = client.get(item["media"][0]["url"])
    assert media.content == png(4, (8, 4))
    part = client.get(item["media"][0]["url"], headers={"range": "bytes=1-3"})
    assert (part.status_code, part.content) == (206, b"PNG")
    sums = get(client, "checksum", **place)
    assert sums["size"] == len(png(4, (8, 4)))


def test_rejects_have_their_content_too(client: TestClient) -> None:
    """A member that became no row is listed with what to do, and can be looked at."""
    (first, _) = get(client, "losses", stage="rows", reason="hidden file")["losses"]
    assert (first["member"], bool(first["advice"])) == (".hidden", True)
    item = get(client, "item", partition="a", shard=first["shard"], member=first["member"])
    assert (item["kind"], item["data"]["text"]) == ("text", "not a sample")


def test_a_histogram_and_another_limit(client: TestClient) -> None:
    """The histogram has the limit, and another limit says what it would keep."""
    names = [score["name"] for score in get(client, "scores")["scores"]]
    assert names[0] == "image_width"
    found = get(client, "histogram", score="image_width", bins=12)
    assert (found["num_kept"], found["num_dropped"]) == (4, 2)
    assert [limit["value"] for limit in found["score"]["limits"]] == [10]
    kept = get(client, "kept", score="image_width", at_least=18)
    assert (kept["kept"], kept["total"], kept["is_exact"]) == (3, 6, True)


def test_two_versions_side_by_side(client: TestClient) -> None:
    """The newest and the previous version differ in the dropped samples, with the filter and its value."""
    listed = get(client, "versions")["versions"]
    assert [version["is_newest"] for version in listed] == [True, False]
    found = get(client, "diff", old="previous", new=listed[0]["digest"])
    (partition,) = found["partitions"]
    assert (partition["partition"], partition["counts"]) == ("a", {"added": 0, "removed": 2, "changed": 0})
    assert "min_width: 2 -> 10" in found["settings"][0]
    samples = get(client, "diff/samples", old="previous", new="newest", partition="a")
    assert [(s["sample_id"], s["filter"], s["value"]) for s in samples["samples"]] == [
        ("a0", "image_size", 4.0),
        ("a2", "image_size", 6.0),
    ]


def test_a_sample_of_two_versions_is_compared(tmp_path: Path) -> None:
    """Each modality is the same, differs, or is in one version only, and both samples are shown by their version."""
    members = {"s0.txt": "first", "s0.png": png(1), "s1.txt": "second", "s1.png": png(2)}
    make_shard(tmp_path / "in" / "a.tar", members)
    spec = declare(tmp_path / "root", tmp_path / "in")
    run_chain(spec)
    make_shard(tmp_path / "in" / "a.tar", {**members, "s1.txt": "changed", "s2.txt": "third"})
    dataset = DatasetStore(spec)
    again(dataset)
    backend = open_backend([dataset.store.url])
    client = client_of(backend)
    found = get(client, "compare", old="previous", new="newest", partition="a", sample_id="s1")
    states = found["states"]
    assert states.pop("text") == "differs"
    assert states["image"] == "same"
    texts = []
    for side in (found["old"], found["new"]):
        items = client.get(f"/api/sample/{side['n']}", params={"part": side["part"]}).json()["items"]
        texts.append(next(str(item["data"]) for item in items if item["name"] == "text"))
    assert "second" in texts[0]
    assert "changed" in texts[1]
    added = get(client, "compare", old="previous", new="newest", partition="a", sample_id="s2")
    assert added["old"]["n"] is None
    assert set(added["states"].values()) == {"new"}
    wrong = {"old": "previous", "new": "newest", "partition": "a", "sample_id": "s9"}
    assert client.get("/api/explore/compare", params=wrong).status_code == 404
    backend.close()


def test_origin_and_back(client: TestClient) -> None:
    """A sample leads to its members, also by its number, and a member back to its sample."""
    by_number = get(client, "origin", n=0, sample_id="a1")
    assert by_number == get(client, "origin", part="a", sample_id="a1")
    image = next(row for row in by_number["rows"] if row["modality"] == "image")
    assert image["member"] == "a1.png"
    assert by_number["packed"]["mult"]["sha256"]
    back = get(client, "at", shard="a.tar", member="a1.png")
    assert {row["sample_id"] for row in back["rows"]} == {"a1"}
    assert get(client, "at", shard="a.tar", byte=image["byte_offset"])["rows"][0]["sample_id"] == "a1"
    assert get(client, "at", shard="z.tar", member="a1.png")["rows"] == []


def test_a_dropped_sample_has_no_number(client: TestClient) -> None:
    """A packed sample is located by partition and number; one that was dropped is not."""
    assert get(client, "locate", partition="b", sample_id="b1") == {"part": "b", "n": 1}
    assert get(client, "locate", partition="a", sample_id="a0")["n"] is None
