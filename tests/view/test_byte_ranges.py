"""Ranges of media: every range of a payload is that slice of it, whatever holds the payload."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

import mm_assets
from mm_assets.fields import ImageField, TextField
from mm_assets.view.byte_ranges import RangeError, wanted_range

Open = Callable[..., TestClient]


@given(st.integers(0, 2**70), st.integers(0, 2**70), st.integers(0, 300))
def test_a_range_is_that_slice_of_the_content(first: int, last: int, size: int) -> None:
    """First and last byte are inclusive, the last is at most the end, and a range after the end is an error."""
    content = bytes(range(256)) * 2
    content = content[:size]
    header = f"bytes={first}-{last}"
    if last < first or max(len(str(first)), len(str(last))) > 19:
        assert wanted_range(header, size) is None
    elif first >= size:
        with pytest.raises(RangeError):
            wanted_range(header, size)
    else:
        start, stop = wanted_range(header, size) or (-1, -1)
        assert content[start:stop] == content[first : last + 1]


@given(st.integers(0, 400), st.integers(0, 300))
def test_a_suffix_is_the_end_of_the_content(count: int, size: int) -> None:
    """``bytes=-n`` is the last n bytes, all of a shorter content, and an error where that is nothing."""
    if min(count, size) == 0:
        with pytest.raises(RangeError):
            wanted_range(f"bytes=-{count}", size)
    else:
        assert wanted_range(f"bytes=-{count}", size) == (size - min(count, size), size)


@pytest.mark.parametrize("header", ["bytes=0-1,3-4", "items=0-1", "bytes=", "bytes=a-b", "bytes=--1", "bytes=٣-٤", ""])
def test_what_is_not_one_range_is_ignored(header: str) -> None:
    """Several ranges, other units and nonsense give the whole content, as the standard allows."""
    assert wanted_range(header, 100) is None


@pytest.fixture(params=["mult", "mstr", "tar", "tgz"])
def stored(request: pytest.FixtureRequest, tmp_path: Path, view: Open) -> tuple[TestClient, str, bytes]:
    """A client, the URL of a picture's stored bytes, and those bytes, out of each kind of container."""
    import numpy as np

    pixels = np.random.default_rng(1).integers(0, 255, (40, 60, 3), np.uint8)
    field = ImageField(encoding="png")
    content = bytes(field.encode(pixels)[1])
    path = tmp_path / f"x.{request.param}"
    if request.param in ("mult", "mstr"):
        with mm_assets.create(path, {"image": field, "text": TextField()}) as writer:
            writer.write("one", {"image": pixels, "text": "words"})
        with mm_assets.open(path) as dataset:
            content = bytes(dataset.read_raw([0], ["image"])["image"][0] or b"")
    else:
        with tarfile.open(path, "w:gz" if request.param == "tgz" else "w") as archive:
            for name, data in (("one.txt", b"words"), ("one.png", content)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    client = view(path)
    items = client.get("/api/sample/0").json()["items"]
    media = next(item for item in items if item["kind"] == "image")["media"][0]
    return client, media["url"], content


def test_ranges_of_media_are_slices_of_the_stored_bytes(stored: tuple[TestClient, str, bytes]) -> None:
    """200 gives all bytes, 206 the slice with its place, 416 the size, from every kind of container."""
    client, url, content = stored
    whole = client.get(url)
    assert (whole.status_code, whole.content) == (200, content)
    assert whole.headers["accept-ranges"] == "bytes"
    size = len(content)
    for first, last in ((0, 0), (0, size - 1), (1, 1), (7, 4000), (size - 1, size + 100), (100, 2**40)):
        part = client.get(url, headers={"range": f"bytes={first}-{last}"})
        assert part.status_code == 206
        assert part.content == content[first : last + 1]
        assert part.headers["content-range"] == f"bytes {first}-{min(last, size - 1)}/{size}"
        assert part.headers["content-length"] == str(len(part.content))
    assert client.get(url, headers={"range": "bytes=-5"}).content == content[-5:]
    assert client.get(url, headers={"range": "bytes=5-"}).content == content[5:]
    after = client.get(url, headers={"range": f"bytes={size}-"})
    assert (after.status_code, after.headers["content-range"]) == (416, f"bytes */{size}")


def test_conditions_compare_the_tag(stored: tuple[TestClient, str, bytes]) -> None:
    """If-None-Match answers 304, If-Range a range only of the same content, and HEAD no bytes."""
    client, url, content = stored
    tag = client.get(url).headers["etag"]
    assert client.get(url, headers={"if-none-match": f'"x", W/{tag}'}).status_code == 304
    assert client.get(url, headers={"range": "bytes=0-1", "if-range": tag}).status_code == 206
    other = client.get(url, headers={"range": "bytes=0-1", "if-range": '"other"'})
    assert (other.status_code, other.content) == (200, content)
    head = client.head(url, headers={"range": "bytes=2-5"})
    assert (head.status_code, head.content, head.headers["content-length"]) == (206, b"", "4")


def test_a_large_member_is_read_in_parts(tmp_path: Path, view: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of a film of 4 GB reads that range, and opening its sample a few hundred kilobytes."""
    from mm_assets.storage.files import SourceFile

    size, path = 4 << 30, tmp_path / "film.tar"
    member = tarfile.TarInfo("film.mp4")
    member.size = size
    header = member.tobuf(tarfile.GNU_FORMAT)
    with path.open("wb") as file:
        file.write(header)
        file.write(b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom")
        file.truncate(len(header) + size + 1024)  # a hole, which takes no disk space
    read: list[int] = []
    plain = SourceFile.read

    def counting(self: SourceFile, offset: int, length: int) -> bytes:
        read.append(length)
        return plain(self, offset, length)

    monkeypatch.setattr(SourceFile, "read", counting)
    client = view(path)
    assert client.get("/api/samples").json()["entries"][0]["id"] == "film"
    sample = client.get("/api/sample/0").json()
    assert sample["items"][0]["note"]
    assert sum(read) < 80 << 20
    assert max(read) <= 64 << 20
