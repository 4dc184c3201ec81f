"""Sources behind URLs: an S3 server that counts what is asked of it."""

import io
import tarfile
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import pytest

import mm_assets
from mm_assets.fields import BytesField, ImageField, TextField
from mm_assets.view import open_backend

from ..pipeline.chain import declare, run_chain
from ..s3_server import serve
from .conftest import client_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

BLOB = 2 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Any]]:
    """An S3 server with a tar, a packed file and a dataset: its arguments, and the record of requests."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    pytest.importorskip("moto", reason="moto's server is not installed")
    folder = tmp_path_factory.mktemp("view")
    rng = np.random.default_rng(1)
    with tarfile.open(folder / "x.tar", "w") as archive:
        for n in range(100):
            for name, content in ((f"{n:03}.txt", b"words"), (f"{n:03}.bin", rng.bytes(20_000))):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    fields = {"image": ImageField(encoding="png"), "caption": TextField(), "blob": BytesField()}
    with mm_assets.create(folder / "x.mult", fields) as writer:
        for n in range(60):
            image = rng.integers(0, 255, (20, 30, 3), np.uint8)
            writer.write(f"id-{n}", {"image": image, "caption": f"caption {n}", "blob": rng.bytes(BLOB // 20)})
        writer.write("large", {"blob": rng.bytes(BLOB)})
    (folder / "in").mkdir()
    with tarfile.open(folder / "in" / "a.tar", "w") as archive:
        for name, content in (("x.txt", b"from a"), ("x.json", b"{}")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    run_chain(declare(folder / "root", folder / "in"))
    with serve() as (url, record):
        options = {"key": "test", "secret": "test", "endpoint_url": url}
        s3 = fsspec.filesystem("s3", **options)
        s3.mkdir("view")
        for name in ("x.tar", "x.mult"):
            s3.put(str(folder / name), f"view/{name}")
        s3.put(str(folder / "root" / "data"), "view/data", recursive=True)
        yield options, record


def test_the_first_page_of_a_remote_tar_reads_its_start(server: tuple[dict[str, Any], Any]) -> None:
    """A page of a tar on S3 reads headers and texts near its start, not the tar."""
    options, record = server
    backend = open_backend(["s3://view/x.tar"], storage_options=options)
    client = client_of(backend)
    before = len(record.requests)
    page = client.get("/api/samples", params={"limit": 20}).json()
    assert [entry["text"] for entry in page["entries"]] == ["words"] * 20
    assert (page["total"], page["next"]) == (None, 20)
    assert sum(request.sent for request in record.requests[before:]) < 2 << 20
    items = client.get("/api/sample/99").json()["items"]
    assert items[0]["data"]["text"] == "words"
    backend.close()


def test_remote_packed_files_and_folders_are_shown(server: tuple[dict[str, Any], Any]) -> None:
    """A packed file and a dataset's folder on S3 have pages, thumbnails, partitions and ranges."""
    options, record = server
    backend = open_backend(["s3://view/x.mult"], storage_options=options)
    client = client_of(backend)
    entries = client.get("/api/samples").json()["entries"]
    assert entries[7]["text"] == "caption 7"
    assert client.get(entries[7]["picture"]).content.startswith(b"\xff\xd8")
    media = client.get("/api/sample/7").json()["items"][0]["media"][0]
    before = len(record.requests)
    assert len(client.get(media["url"], headers={"range": "bytes=3-12"}).content) == 10
    assert sum(request.sent for request in record.requests[before:]) < 600_000
    backend.close()
    folder = open_backend(["s3://view/data"], storage_options=options)
    client = client_of(folder)
    assert [entry["id"] for entry in client.get("/api/samples").json()["entries"]] == ["x"]
    assert [one["key"] for one in client.get("/api/partitions").json()["partitions"]] == ["a"]
    assert client.get("/api/samples", params={"part": "a/rows"}).json()["entries"][0]["text"] == "from a"
    folder.close()


def test_a_remote_file_that_is_gone_is_a_message(server: tuple[dict[str, Any], Any]) -> None:
    """An object that was removed while people look is 422 with its URL, and never a 500."""
    options, _ = server
    s3 = fsspec.filesystem("s3", **options)
    s3.copy("view/x.tar", "view/gone.tar")
    backend = open_backend(["s3://view/gone.tar"], storage_options=options)
    client = client_of(backend)
    assert client.get("/api/samples", params={"limit": 1}).status_code == 200
    s3.rm("view/gone.tar")
    answer = client.get("/api/sample/90")
    assert answer.status_code in (404, 422)
    assert "gone.tar" in answer.json()["detail"]
    backend.close()
