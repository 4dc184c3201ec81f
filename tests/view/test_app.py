"""The routes over packed files: pages, samples, thumbnails, errors."""

from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mm_assets.errors import SourceError
from mm_assets.storage.files import SourceFile
from mm_assets.view import byte_ranges

from ..pipeline.shards import png
from .conftest import viewer_of
from .test_containers import write_tar

Open = Callable[..., TestClient]


def test_a_page_has_the_samples_of_its_positions(view: Open, packed: Path) -> None:
    """A page has as many samples as were asked for, in order, and says where the next one starts."""
    page = view(packed).get("/api/samples", params={"offset": 60, "limit": 50}).json()
    assert [entry["index"] for entry in page["entries"]] == list(range(60, 110))
    assert [entry["id"] for entry in page["entries"]][:2] == ["id-0060", "id-0061"]
    assert (page["total"], page["next"]) == (120, 110)


def test_the_last_page_ends(view: Open, packed: Path) -> None:
    """After the last sample there is no next page, and an offset beyond it is an empty page."""
    client = view(packed)
    assert client.get("/api/samples", params={"offset": 100}).json()["next"] is None
    assert client.get("/api/samples", params={"offset": 4000}).json()["entries"] == []


def test_a_sample_has_an_item_for_each_modality(view: Open, packed: Path) -> None:
    """A sample's items are its modalities in order; one that it lacks says so."""
    sample = view(packed).get("/api/sample/1").json()
    assert (sample["id"], sample["count"]) == ("id-0001", 120)
    assert [(item["name"], item["kind"]) for item in sample["items"]] == [("image", "absent"), ("caption", "text")]


def test_media_of_a_sample_are_its_stored_bytes(view: Open, packed: Path) -> None:
    """The URL of an image gives the picture that was packed."""
    client = view(packed)
    media = client.get("/api/sample/3").json()["items"][0]["media"][0]
    answer = client.get(media["url"])
    assert answer.status_code == 200
    assert answer.content.startswith(b"\x89PNG")
    assert answer.headers["content-type"] == "image/png"


def test_a_thumbnail_is_a_jpeg_that_is_cached_by_its_content(view: Open, packed: Path) -> None:
    """A card's picture is a JPEG whose URL names its content; asked for again by its tag it is unchanged."""
    client = view(packed)
    entries = client.get("/api/samples").json()["entries"]
    assert entries[1]["picture"] is None
    first = client.get(entries[0]["picture"])
    assert first.content.startswith(b"\xff\xd8")
    assert "immutable" in first.headers["cache-control"]
    again = client.get(entries[0]["picture"], headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304


def test_a_search_finds_parts_of_ids(view: Open, packed: Path) -> None:
    """Samples are found by a part of their id, page by page."""
    client = view(packed)
    first = client.get("/api/find", params={"q": "id-00", "limit": 50}).json()
    assert [entry["index"] for entry in first["entries"]] == list(range(50))
    rest = client.get("/api/find", params={"q": "id-00", "start": first["next"]}).json()
    assert [entry["index"] for entry in rest["entries"]] == list(range(50, 100))
    assert client.get("/api/find", params={"q": "nowhere"}).json()["entries"] == []


def test_what_does_not_exist_is_said_in_a_sentence(view: Open, packed: Path) -> None:
    """An unknown sample, media, file or path is a 404 with a sentence, and a page for a browser."""
    client = view(packed)
    paths = (
        "/api/sample/120",
        "/media/0/9/stored",
        "/media/0/0/nothing",
        "/static/secret",
        "/thumbnail/1",
        "/etc/passwd",
    )
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 404, path
        assert answer.json()["detail"], path
    page = client.get("/nothing", headers={"accept": "text/html"})
    assert page.status_code == 404
    assert page.text.startswith("<!doctype html>")


def test_wrong_numbers_are_refused(view: Open, packed: Path) -> None:
    """An offset that is not a number, and a page that is too large, are 400."""
    client = view(packed)
    for query in ("offset=x", "offset=-1", "limit=100000", f"offset={'9' * 30}"):
        assert client.get(f"/api/samples?{query}").status_code == 400, query


@pytest.mark.parametrize("kind", ["tar", "jsonl"])
def test_a_storage_that_fails_once_leaves_no_empty_card(
    view: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A thumbnail that could not be read is an empty answer which no browser stores, and is made the next time."""
    write_tar(tmp_path / "x.tar", {"a.png": png(1, (20, 20))})
    (tmp_path / "a.png").write_bytes(png(1, (20, 20)))
    (tmp_path / "x.jsonl").write_text('{"sample_id": "a", "path": "a.png"}')
    client = view(tmp_path / f"x.{kind}")
    (entry,) = client.get("/api/samples").json()["entries"]
    assert client.get(entry["picture"]).status_code == 200  # which began with the page
    viewer_of(client).thumbnails._cached.clear()

    def failing(_self: SourceFile, _offset: int, _size: int) -> bytes:
        raise SourceError("s3://bucket/x", "the connection was reset")

    with monkeypatch.context() as broken:
        broken.setattr(SourceFile, "read", failing)
        answer = client.get(entry["picture"])
    assert (answer.status_code, answer.headers["cache-control"]) == (204, "no-store")
    assert client.get(entry["picture"]).content.startswith(b"\xff\xd8")


def test_media_that_cannot_be_read_are_an_error_that_says_why(
    view: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that was truncated since it was opened is 422 with a message; an answer that had begun breaks off.

    Neither is a bug in the terminal.
    """
    path = write_tar(tmp_path / "x.tar", {"a.png": png(1, (200, 200)), "a.txt": b"words"})
    client = view(path)
    media = client.get("/api/sample/0").json()["items"][0]["media"][0]
    path.write_bytes(path.read_bytes()[:600])
    answer = client.get(media["url"])
    assert answer.status_code == 422
    assert "truncated" in answer.json()["detail"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(byte_ranges, "CHUNK", 50)
    client.get(media["url"])
    (said,) = capsys.readouterr().err.splitlines()
    assert "truncated while being read" in said
