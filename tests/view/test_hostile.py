"""Hostile sources: what would take memory or time without end is bounded, and what is shown says so."""

import gzip
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from mm_assets.display import Item
from mm_assets.errors import SourceError
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.source_ref import parse_source_ref
from mm_assets.sources.member import Member
from mm_assets.storage.files import SourceFile
from mm_assets.view import Backend, open_backend
from mm_assets.view.backends import base, references, rows, source_rows
from mm_assets.view.backends.row_files import MAX_PARSED_BYTES, ParquetRows

from .conftest import client_of, viewer_of
from .test_containers import write_tar

Open = Callable[..., TestClient]


class Stream:
    """A container that can only be read from its start, with the payloads of a test."""

    SUFFIXES = ()
    seekable = False

    def __init__(self, file: SourceFile, payloads: Callable[[], Any]) -> None:
        self.file = file
        self._payloads = payloads

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        return False

    def members(self, **_: object) -> Iterator[Member]:
        return iter(())

    def payloads(self, **_: object) -> Iterator[tuple[Member, bytes]]:
        return iter(self._payloads())


def open_stream(path: Path, monkeypatch: pytest.MonkeyPatch, payloads: Callable[[], Any]) -> Backend:
    """The backend of a file that is read by a pass of the test."""
    monkeypatch.setattr(source_rows, "row_sources", lambda files: [MemberRows([Stream(files[0], payloads)])])
    return open_backend([str(write_tar(path, {"a.txt": b"x"}))])


def test_no_request_waits_for_a_member_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a compressed shard passes a member that never ends, its page says so and others are answered."""
    passed = threading.Event()

    def endless() -> object:
        passed.wait(60)
        return iter(())

    monkeypatch.setattr(base, "PAGE_SECONDS", 0.1)
    backend = open_stream(tmp_path / "x.tar", monkeypatch, endless)
    client = client_of(backend)
    begun = time.monotonic()
    assert "The first 0 samples have been read so far" in client.get("/api/samples").json()["note"]
    assert client.get("/api/partitions").status_code == 200
    assert client.get("/api/sample/0").status_code == 404
    assert time.monotonic() - begun < 30
    passed.set()
    backend.close()


def test_a_bug_of_a_source_is_an_error_of_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of the thread that reads reaches the request, which does not wait for samples that never come."""

    def broken() -> object:
        raise ZeroDivisionError

    backend = open_stream(tmp_path / "x.tar", monkeypatch, broken)
    with pytest.raises(ZeroDivisionError):
        backend.page(0, 10)
    backend.close()


def test_a_sample_of_many_slow_members_is_there_in_time(
    tmp_path: Path, view: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members for which there is no time left are counted, and those before them are shown."""
    monkeypatch.setattr(rows, "SAMPLE_SECONDS", 0.2)
    show = rows.content_item

    def slow(name: str, *rest: Any) -> Item:
        time.sleep(0.15)
        return show(name, *rest)

    client = view(write_tar(tmp_path / "x.tar", {f"a.{n}.cls": b"7" for n in range(100)}))
    monkeypatch.setattr(rows, "content_item", slow)
    items = client.get("/api/sample/0").json()["items"]
    assert items[0]["kind"] == "json" or items[0]["kind"] == "text"
    assert len(items) < 10
    assert items[-1]["note"] == f"{101 - len(items)} more rows are not shown: the rows before them took 0.2 s."


def test_links_in_a_compressed_shard_are_shown(tmp_path: Path, view: Open) -> None:
    """A hard link, whose content comes when the shard has been read to its end, costs no pass for each item."""
    path = tmp_path / "x.tar.gz"
    with gzip.open(path, "wb") as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        member = tarfile.TarInfo("t.txt")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"words"))
        for number in range(300):
            link = tarfile.TarInfo(f"s.{number}.txt")
            link.type, link.linkname = tarfile.LNKTYPE, "t.txt"
            archive.addfile(link)
    client = view(path)
    items = client.get("/api/sample/1").json()["items"]
    assert [item["data"].get("text") for item in items] == ["words"] * 300


def test_a_pipe_is_refused(tmp_path: Path, view: Open) -> None:
    """A pipe without a writer, as a shard or named by a row, is an error and does not block."""
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(SourceError, match="is a pipe or a device"):
        SourceFile(str(tmp_path / "pipe.tar"))
    (tmp_path / "list.jsonl").write_text('{"path": "pipe.tar"}\n')
    (item, *_) = view(tmp_path / "list.jsonl").get("/api/sample/0").json()["items"]
    assert "is a pipe or a device" in item["note"]


def test_a_value_that_repeats_is_in_memory_once(tmp_path: Path, view: Open) -> None:
    """A table of kilobytes with a value of 20 MB in each of 500 rows: all rows have the same object."""
    index = pa.array([0, None, *[0] * 498], pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(index, pa.array(["x" * 20_000_000]))})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd")
    assert (tmp_path / "x.parquet").stat().st_size < 10_000
    rows = ParquetRows(SourceFile(str(tmp_path / "x.parquet"))).rows(0, 60)
    assert len({id(row["text"]) for row in rows if row["text"] is not None}) == 1
    assert [place for place, row in enumerate(rows) if row["text"] is None] == [1]
    entries = view(tmp_path / "x.parquet").get("/api/samples").json()["entries"]
    assert [len(entry["text"]) for entry in entries] == [280, 0, *[280] * 48]


def test_ids_are_decoded_once(tmp_path: Path) -> None:
    """Scanning the ids of one large row group decodes its column once, and ids out of order are still right."""
    ids = [f"{n // 3:06}" for n in range(50_000)]
    pq.write_table(pa.table({"sample_id": ids}), tmp_path / "x.parquet", row_group_size=50_000)
    table = ParquetRows(SourceFile(str(tmp_path / "x.parquet")))
    calls = []
    decode = table._table.iter_batches
    table._table = type("Counting", (), {"iter_batches": lambda _, *a, **k: (calls.append(a), decode(*a, **k))[1]})()
    found = [one for start in range(0, 50_000, 16_384) for one in table.ids(start, min(start + 16_384, 50_000))]
    assert found == ids
    assert len(calls) == 1
    assert list(table.ids(40_000, 40_010)) == ids[40_000:40_010]
    assert list(table.ids(10, 20)) == ids[10:20]


def test_rows_are_said_to_be_missing(tmp_path: Path, view: Open) -> None:
    """A line of JSON that is too large to be parsed is shown by its start, and an endless error by its first part."""
    lines = [{"a": "x" * MAX_PARSED_BYTES}, {"sample_id": "b", "materialize_error": "E" * 1_000_000}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    client = view(tmp_path / "x.jsonl")
    page = client.get("/api/samples")
    assert len(page.content) < 20_000
    assert page.json()["entries"][1]["note"].startswith("EEEE")
    texts = [item["data"].get("text", "") for item in client.get("/api/sample/0").json()["items"]]
    assert any("are parsed to be shown" in text for text in texts)


def test_contents_of_hundreds_of_items_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a content is read again when it is asked for, and has the same bytes."""
    monkeypatch.setattr(references, "MAX_CACHED_BYTES", 250)
    members = {f"{n}.jpg.gz": gzip.compress(bytes([n]) * 100) for n in range(5)}
    table = source_rows.SourceRows(SourceFile(str(write_tar(tmp_path / "x.tar", members))))
    while not table.is_complete:
        table.reach()
    refs = [parse_source_ref(row["source_ref"]) for row in table.rows(0, table.num_rows) if row["source_ref"]]
    reader = references.References(table, lambda _path: True)
    contents = [reader.content(ref) for ref in refs]
    assert sum(map(len, reader._cached.values())) <= 250
    assert contents[4].read(10, 3) == b"\4\4\4"
    assert contents[0].read(98, 2) == b"\0\0"
    table.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process takes of its own")
def test_the_server_has_a_limit_of_memory() -> None:
    """What takes more than the limit fails in the process, and what is mapped or smaller does not."""
    text = (
        "from mm_assets.view.server import limit_memory\n"
        "limit_memory(300 << 20)\n"
        "small = bytearray(100 << 20)\n"
        "try: bytearray(600 << 20)\n"
        "except MemoryError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr


def test_memory_that_is_refused_is_said(packed: Path, view: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that takes more memory than there is has an answer of one sentence, and the next one is answered."""
    client = view(packed)
    backend = viewer_of(client).backend
    with monkeypatch.context() as patched:
        patched.setattr(backend, "items", lambda _index: (_ for _ in ()).throw(MemoryError()))
        answer = client.get("/api/sample/0")
    assert (answer.status_code, answer.json()["detail"]) == (
        422,
        "It needs more memory than the viewer may take.",
    )
    assert client.get("/api/sample/0").status_code == 200


def test_a_bug_does_not_write_control_characters_of_the_data(
    packed: Path, view: Open, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traceback of a bug has the control characters of what it quotes escaped: a terminal would obey them."""
    client = view(packed)
    backend = viewer_of(client).backend
    monkeypatch.setattr(backend, "items", lambda _index: {}["\x1b]0;title\x07\x9b\u202e"])
    assert client.get("/api/sample/0").status_code == 500
    said = capsys.readouterr().err
    assert "title" in said
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(said)


def test_members_of_one_name_are_items_of_their_own(tmp_path: Path, view: Open) -> None:
    """The second member of one name is listed; names that are longer than the page shows are of different items."""
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, text in (("a.txt", b"first"), ("a.txt", b"second")):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    client = view(tmp_path / "x.tar")
    items = client.get("/api/sample/0").json()["items"]
    assert {item["name"]: item["data"]["text"] for item in items} == {"txt": "first"}
    assert "1 repeated member (a.txt: " in client.get("/api/samples").json()["note"]
    long = [Item(name="n" * 5000 + str(n), kind="text") for n in range(3)]
    assert len({item.name for item in base.distinct(long)}) == 3
    assert max(len(item.name) for item in base.distinct(long)) < 1100


def test_reading_rests_when_no_request_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed shard is not read while no request waits, also in the middle of a member, and is read on for one."""
    archive = write_tar(tmp_path / "x.tar", {"a.bin": os.urandom(8 << 20), "b.txt": b"words"})
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(archive.read_bytes(), 1))
    read, reads = SourceFile.read, list[int]()

    def slow(self: SourceFile, offset: int, size: int) -> bytes:
        reads.append(offset)
        time.sleep(0.05)
        return read(self, offset, size)

    monkeypatch.setattr(SourceFile, "read", slow)
    backend = open_backend([str(tmp_path / "x.tar.gz")])
    backend.reach(2, 0.4)
    time.sleep(0.3)
    before = len(reads)
    time.sleep(0.5)
    assert len(reads) == before
    assert max(reads) < 6 << 20
    backend.reach(2, 60)
    assert backend.is_complete
    assert list(backend.ids(0, 2)) == ["a", "b"]
    backend.close()

    left = open_backend([str(tmp_path / "x.tar.gz")])
    left.reach(2, 0.4)
    time.sleep(0.3)
    before = len(reads)
    left.end_reading()  # as of a partition that others took the place of
    assert isinstance(left, rows.RowsBackend)
    reader = left._table._reader
    reader.join(20)
    assert not reader.is_alive()
    assert len(reads) == before


def test_a_compressed_shard_after_a_plain_one_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    """A plain shard is read on while people look; the compressed one after it waits for a request."""
    plain = write_tar(tmp_path / "a.tar", {"a.txt": b"x"})
    members = {f"{n:03}.bin": os.urandom(32 << 10) for n in range(200)}
    packed = tmp_path / "b.tar.gz"
    packed.write_bytes(gzip.compress(write_tar(tmp_path / "b.tar", members).read_bytes(), 1))
    backend = open_backend([str(plain), str(packed)])
    backend.reach(0, 20)
    time.sleep(1)
    assert backend.known() < 100  # a first part of it
    backend.reach(200, 60)
    assert backend.known() >= 200
    backend.close()


def test_a_connection_without_a_request_is_closed(packed: Path) -> None:
    """One that sends half a request is closed, first or not; one that waits after its request is not."""
    begin = (
        "from mm_assets.view import server; server.REQUEST_SECONDS = 0.5; from mm_assets.cli.main import main; main()"
    )
    command = [sys.executable, "-c", begin, "view", str(packed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        try:
            url = next(line.split()[-1] for line in viewer.stdout if "http://" in line)
            port = urlsplit(url).port
            assert port is not None
            request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
            with socket.create_connection(("127.0.0.1", port), 20) as half, half.makefile("rb") as answer:
                half.sendall(request[:20])
                assert answer.read() == b""
            with socket.create_connection(("127.0.0.1", port), 20) as slow, slow.makefile("rb") as answer:
                for _ in range(2):
                    slow.sendall(request)
                    assert b" 403 " in answer.readline()
                    headers = dict(line.lower().split(b": ") for line in iter(answer.readline, b"\r\n"))
                    answer.read(int(headers[b"content-length"]))
                    time.sleep(0.8)
                slow.sendall(request[:20])
                assert answer.read() == b""
        finally:
            viewer.kill()
