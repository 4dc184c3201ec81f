"""Shards that are not packed: what is shown of a tar as it is read, of damage, of compressed and odd members."""

import gzip
import io
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from mm_assets.display import Item
from mm_assets.rows import base as rows_base
from mm_assets.rows.columns import MemberIndex, RowBuilder, RowStream
from mm_assets.rows.schema import DatasetSchema, MemberRules
from mm_assets.sources import base as sources_base
from mm_assets.sources.member import Member, named_member
from mm_assets.storage import files
from mm_assets.storage.files import SourceFile
from mm_assets.view import open_backend
from mm_assets.view.app import bounded
from mm_assets.view.backends import joined, source_rows

from ..pipeline.shards import png

Open = Callable[..., TestClient]


def write_tar(path: Path, members: Mapping[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def samples_of(client: TestClient, **query: object) -> dict[str, list[str]]:
    page = client.get("/api/samples", params={name: str(value) for name, value in query.items()}).json()
    return {entry["id"]: entry["names"] for entry in page["entries"]}


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_members_of_a_key_are_a_sample(tmp_path: Path, view: Open, suffix: str) -> None:
    """Plain and compressed tars give the same samples, members and texts."""
    mode = "w:" + suffix.removeprefix("tar").removeprefix(".")
    path = write_tar(tmp_path / f"x.{suffix}", {"a.txt": b"first", "a.left.json": b"{}", "d/b.txt": b"second"}, mode)
    client = view(path)
    assert samples_of(client) == {"a": ["txt", "left.json"], "d/b": ["txt"]}
    items = client.get("/api/sample/1").json()["items"]
    assert [(item["name"], item["data"]["text"]) for item in items] == [("txt", "second")]


def test_members_that_do_not_follow_each_other_are_one_sample(tmp_path: Path, view: Open) -> None:
    """A tar that is sorted by extension has the same samples once it has been read."""
    members = {f"{key}.{extension}": b"x" for extension in ("txt", "cls") for key in "abc"}
    client = view(write_tar(tmp_path / "x.tar", members))
    assert client.get("/api/find", params={"q": "zzz"}).json()["next"] is None  # which reads to the end
    assert samples_of(client) == {key: ["txt", "cls"] for key in "abc"}


NAMES = [f"{key}.{extension}" for key in ("a", "b", "d/c") for extension in ("txt", "json", "cls", "bin")]


@settings(max_examples=25, deadline=None)
@given(names=st.permutations(NAMES).flatmap(lambda names: st.integers(1, 12).map(lambda size: names[:size])), mode=...)
def test_parts_change_nothing(names: list[str], mode: Literal["w", "w:gz"]) -> None:
    """However a shard is read in parts, it has the samples, in the order, that it has when it is read as a whole."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        path = write_tar(Path(folder) / "x.tar", dict.fromkeys(names, b"{}"), mode)
        found = []
        for size in (1, 4096):
            patched.setattr(source_rows, "FIRST_SAMPLES", size)
            patched.setattr(source_rows, "MAX_SAMPLES", size)
            backend = open_backend([str(path)])
            backend.reach(100, 60)
            page = backend.page(0, 50)
            assert page.total == len({name.partition(".")[0] for name in names})
            items = [sorted(item.name for item in backend.items(entry.index)) for entry in page.entries]
            found.append(
                [(entry.id, sorted(entry.names), names) for entry, names in zip(page.entries, items, strict=True)]
            )
            backend.close()
        assert found[0] == found[1]


def test_the_words_of_a_card_are_a_documents_texts(tmp_path: Path, view: Open) -> None:
    """The card of an interleaved document shows its first text, not the name of its first picture."""
    document = b'{"images": ["page_0_image_7", null], "texts": [null, "Once upon a time"], "url": "x"}'
    client = view(write_tar(tmp_path / "x.tar", {"a.json": document}))
    assert [entry["text"] for entry in client.get("/api/samples").json()["entries"]] == ["Once upon a time"]


def test_only_what_a_page_needs_is_read(tmp_path: Path) -> None:
    """The first page of a compressed tar is there before the rest of it has been read."""
    path = write_tar(tmp_path / "x.tar.gz", {f"{n:05}.txt": b"x" * 200 for n in range(2000)}, "w:gz")
    backend = open_backend([str(path)])
    page = backend.page(0, 50)
    assert (len(page.entries), page.total, page.next) == (50, None, 50)
    assert 50 < backend.known() < 500
    assert "mm-assets run" in page.note
    backend.reach(10_000, 60)
    assert (backend.known(), backend.count()) == (2000, 2000)
    backend.close()


def test_the_number_of_samples_becomes_known(tmp_path: Path) -> None:
    """A plain local tar is read to its end in the background, without a request."""
    path = write_tar(tmp_path / "x.tar", {f"{n:05}.txt": b"x" for n in range(3000)})
    backend = open_backend([str(path)])
    assert len(backend.page(0, 10).entries) == 10
    ends = time.monotonic() + 60
    while backend.page(0, 10).total is None and time.monotonic() < ends:
        time.sleep(0.01)
    assert backend.count() == 3000
    backend.close()


def test_several_shards_are_one_row_of_samples_and_partitions(tmp_path: Path, view: Open) -> None:
    """A glob of shards shows the samples of all, with the shard's name, and each shard as a partition."""
    for name in ("one", "two"):
        write_tar(tmp_path / f"{name}.tar", {"a.txt": name.encode(), "b.txt": b"x"})
    client = view(f"{tmp_path}/*.tar")
    assert list(samples_of(client)) == ["one/a", "one/b", "two/a", "two/b"]
    assert [part["key"] for part in client.get("/api/partitions").json()["partitions"]] == ["one", "two"]
    assert list(samples_of(client, part="two")) == ["a", "b"]
    assert client.get("/api/sample/2").json()["items"][0]["data"]["text"] == "two"
    assert client.get("/api/samples", params={"part": "three"}).status_code == 404


def test_damage_is_named_and_the_rest_is_shown(tmp_path: Path, view: Open) -> None:
    """After a damaged header the other samples are there, and the page says where it is damaged."""
    path = write_tar(tmp_path / "x.tar", {f"{n}.txt": b"words" for n in range(10)})
    content = bytearray(path.read_bytes())
    content[3 * 1024 : 3 * 1024 + 300] = b"\xff" * 300
    path.write_bytes(content)
    client = view(path)
    assert client.get("/api/find", params={"q": "zzz"}).json()["entries"] == []
    page = client.get("/api/samples").json()
    assert [entry["id"] for entry in page["entries"]] == [str(n) for n in range(10) if n != 3]
    assert "at byte 3,072: damaged" in page["note"]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
def test_a_truncated_shard_shows_what_is_left(tmp_path: Path, view: Open, suffix: str, kept: float) -> None:
    """A shard that ends early shows the samples before, and says that it is damaged."""
    mode = "w:gz" if suffix == "tar.gz" else "w"
    path = write_tar(tmp_path / f"x.{suffix}", {f"{n}.bin": os.urandom(2000) for n in range(41)}, mode)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    client = view(path)
    client.get("/api/find", params={"q": "zzz"})
    page = client.get("/api/samples").json()
    assert 0 < len(page["entries"]) < 41
    assert "damaged" in page["note"] or "truncated" in page["note"]
    for entry in page["entries"]:
        assert client.get(f"/api/sample/{entry['index']}").status_code == 200


def test_compressed_members_links_and_skipped_entries(tmp_path: Path, view: Open) -> None:
    """A compressed text is shown as its text, a hard link as its target, and other entries are counted."""
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in (("a.txt.gz", gzip.compress(b"inside")), ("b.txt", b"target"), ("._b.txt", b"fork")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("c.txt")
        link.type, link.linkname = tarfile.LNKTYPE, "b.txt"
        archive.addfile(link)
    client = view(path)
    texts = [client.get(f"/api/sample/{n}").json()["items"][0]["data"]["text"] for n in range(3)]
    assert texts == ["inside", "target", "target"]
    assert "1 resource fork" in client.get("/api/samples").json()["note"]


def test_a_member_that_is_not_compressed_as_named_says_so(tmp_path: Path, view: Open) -> None:
    """A member whose compression is damaged is unreadable with the reason, and the page is whole."""
    client = view(write_tar(tmp_path / "x.tar", {"a.txt.gz": b"not gzip", "a.cls": b"1"}))
    items = client.get("/api/sample/0").json()["items"]
    assert [(item["name"], item["kind"]) for item in items] == [("cls", "text"), ("txt.gz", "unreadable")]
    assert "does not begin as gzip" in items[1]["note"]


def test_members_that_become_no_row_are_listed(tmp_path: Path, view: Open) -> None:
    """The page counts them by reason, with an example of each, and a sample's page has those of the sample."""
    members = {"a.json": b"{broken", "a.txt": b"words", "b.txt": b"\xff\xfe\xfd", "c.txt": b"c", ".hidden": b""}
    client = view(write_tar(tmp_path / "x.tar", members))
    page = client.get("/api/samples").json()
    assert [entry["id"] for entry in page["entries"]] == ["a", "c"]
    for reason in ("1 bad json (a.json: ", "1 not utf8 (b.txt: ", "1 hidden file (.hidden)"):
        assert reason in page["note"]
    items = client.get("/api/sample/0").json()["items"]
    assert [(item["name"], item["kind"]) for item in items] == [("txt", "text"), ("json", "text")]
    assert items[1]["note"].startswith("It becomes no row: bad_json: ")
    assert items[1]["data"]["text"] == "{broken"


def test_an_interleaved_document_is_one_item_with_its_pictures(tmp_path: Path, view: Open) -> None:
    """Its texts are shown in their places and not again, and its pictures are found by their members' names."""
    document = b'{"images": ["a.0.png", null, "a.1.png"], "texts": [null, "between", null]}'
    pictures = {f"a.{n}.png": png(n, (20, 20)) for n in range(2)}
    client = view(write_tar(tmp_path / "x.tar", {"a.json": document, **pictures}))
    assert samples_of(client) == {"a": ["json", "0.png", "text", "1.png"]}
    items = client.get("/api/sample/0").json()["items"]
    assert [(item["name"], item["kind"]) for item in items] == [
        ("json", "document"),
        ("0.png", "image"),
        ("1.png", "image"),
    ]
    blocks = items[0]["data"]["blocks"]
    assert [block.get("picture", {}).get("item") for block in blocks] == ["0.png", None, "1.png"]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_a_document_has_pictures_of_other_keys(tmp_path: Path, view: Open, suffix: str) -> None:
    """Members without a JSON that a document names are shown in it and have no card of their own."""
    pictures = {f"picture{n}.png": png(n, (20, 20)) for n in range(100)}
    document = b'{"images": ["picture0.png", null, "picture99.png"], "texts": [null, "between", null]}'
    mode = "w:gz" if suffix == "tar.gz" else "w"
    members = {"a.json": document, **pictures, "z.txt": b"words"}
    client = view(write_tar(tmp_path / f"x.{suffix}", members, mode))
    client.get("/api/find", params={"q": "none"})
    assert list(samples_of(client, limit=200))[:2] == ["a", "picture1"]
    assert len(samples_of(client, limit=200)) == 100
    items = client.get("/api/sample/0").json()["items"]
    assert [item["name"] for item in items] == ["json", "picture0.png", "picture99.png"]
    assert [block.get("picture", {}).get("item") for block in items[0]["data"]["blocks"]] == [
        "picture0.png",
        None,
        "picture99.png",
    ]


def test_the_contents_of_a_stream_wait_up_to_a_limit(
    tmp_path: Path, view: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit nothing is shown, the page says so and how to see more, and what is before stays readable."""
    monkeypatch.setattr(source_rows, "SHELF_BYTES", 150_000)  # the first part, with the rows of any path
    client = view(write_tar(tmp_path / "x.tar.gz", {f"{n:04}.bin": os.urandom(1000) for n in range(500)}, "w:gz"))
    page = client.get("/api/samples", params={"offset": 400}).json()
    assert page["entries"] == []
    assert "What follows is not shown" in page["note"]
    assert "mm-assets run" in page["note"]
    known = page["total"]
    assert 30 < known < 100
    media = [client.get(f"/api/sample/{n}").json()["items"][0] for n in (known - 1, 0)]
    assert [item["facts"]["bytes"] for item in media] == ["1 kB", "1 kB"]


passes: list[str] = []


class Words:
    """A container of a format of its own: each line is a member, and none is one range of the file."""

    SUFFIXES = (".words",)
    seekable = True

    def __init__(self, file: SourceFile) -> None:
        self.file = file

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        return head.startswith(b"words\n")

    def _lines(self) -> Iterator[tuple[Member, bytes]]:
        for number, line in enumerate(self.file.read(0, self.file.size).splitlines()[1:]):
            name, _, content = line.partition(b" ")
            yield named_member(self.file.url, name, ordinal=number, byte_size=len(content)), content

    def members(self, **_: object) -> Iterator[Member]:
        return (member for member, _ in self._lines())

    def payloads(self, *, wanted: Callable[[Member], bool], **_: object) -> Iterator[tuple[Member, bytes]]:
        passes.append(self.file.url)
        return ((member, content) for member, content in self._lines() if wanted(member))


class Pairs:
    """A table of a format of its own: each line is a sample with a text."""

    SUFFIXES = (".pairs",)
    sources = folders = ()

    def __init__(self, file: SourceFile) -> None:
        self.file = file

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        return head.startswith(b"pairs\n")

    def objects(self, *, layout: MemberRules) -> Iterator[Mapping[str, Any]]:
        return iter(())

    def rows(
        self, index: MemberIndex, *, layout: MemberRules, schema: DatasetSchema, grouped: bool, batch_bytes: int
    ) -> RowStream:
        builder = RowBuilder(layout, schema, batch_bytes)

        def batches() -> Iterator[pa.RecordBatch]:
            for line in self.file.read(0, self.file.size).decode().splitlines()[1:]:
                sample_id, _, text = line.partition(" ")
                builder.append(sample_id, 0, "text", content_type="text/plain", text=text)
            yield from builder.take()

        return RowStream(batches(), builder.rejects, builder.counts)


def test_a_new_source_is_shown(tmp_path: Path, view: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is added to the table of sources has pages, pictures and partitions; a page takes one pass."""
    for name, found in (("words", Words), ("pairs", Pairs)):
        monkeypatch.setitem(rows_base._FORMATS, name, found)
    monkeypatch.setitem(sources_base.SOURCES, "words", Words)
    lines = b"".join(b"%d.txt text %d\n%d.npy %b\n" % (n, n, n, b"not an array") for n in range(60))
    (tmp_path / "a.words").write_bytes(b"words\n" + lines)
    (tmp_path / "b.pairs").write_bytes(b"pairs\none first\ntwo second\n")
    client = view(tmp_path / "a.words")
    page = client.get("/api/samples").json()
    assert [(entry["id"], entry["text"], entry["names"]) for entry in page["entries"][:2]] == [
        ("0", "text 0", ["txt", "npy"]),
        ("1", "text 1", ["txt", "npy"]),
    ]
    passes.clear()
    assert {client.get(entry["picture"]).status_code for entry in page["entries"]} == {204}
    assert len(passes) <= 2
    items = client.get("/api/sample/59").json()["items"]
    assert [(item["name"], item["kind"]) for item in items] == [("txt", "text"), ("npy", "unreadable")]
    assert samples_of(view(tmp_path / "b.pairs")) == {"one": ["text"], "two": ["text"]}


def test_hostile_names_and_texts_are_data(tmp_path: Path, view: Open) -> None:
    """Markup in names, keys, texts, JSON and SVG comes back as text in JSON, and nothing is served as markup."""
    script = "<script>alert(1)</script>"
    members = {
        f"{script}.txt": script.encode(),
        f"{script}.json": b'{"caption": "<img src=x onerror=alert(1)>", "__proto__": {"x": 1}}',
        f"{script}.svg": b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(1)</script></svg>',
        f"{script}.html": b"<!doctype html><script>alert(1)</script>",
        "../../etc/passwd.txt": b"climbs",
        "\x01\x1b[31m.txt": b"controls",
    }
    client = view(write_tar(tmp_path / "x.tar", members))
    page = client.get("/api/samples")
    assert page.headers["content-type"] == "application/json"
    for entry in page.json()["entries"]:
        for item in client.get(f"/api/sample/{entry['index']}").json()["items"]:
            assert item["kind"] in ("text", "json", "document")
            for media in item["media"]:
                answer = client.get(media["url"])
                assert answer.headers["content-type"].partition(";")[0] not in ("text/html", "image/svg+xml")
                assert "sandbox" in answer.headers["content-security-policy"]


def test_a_file_that_is_nothing_known_is_refused(tmp_path: Path, view: Open) -> None:
    """A file of another kind is an error that says what was expected."""
    from mm_assets.errors import ShardError

    (tmp_path / "x.bin").write_bytes(b"something else entirely")
    with pytest.raises(ShardError, match="expected tar"):
        view(tmp_path / "x.bin")


def test_a_sample_of_very_many_members_is_bounded(tmp_path: Path, view: Open) -> None:
    """Of a key with thousands of members the first ones are shown, and how many more there are."""
    client = view(write_tar(tmp_path / "x.tar", {f"a.{n:04}.txt": b"x" for n in range(3000)}))
    entry = client.get("/api/samples").json()["entries"][0]
    assert len(entry["names"]) == 39
    items = client.get("/api/sample/0").json()["items"]
    assert len(items) == 400
    assert items[-1]["note"] == "2,601 more rows."


def test_what_is_shown_of_a_sample_at_once_is_bounded() -> None:
    """Items of which each is within its bound are at most 16 MiB together; those left out say so."""
    items = [Item(name=str(n), kind="text", data={"text": "x" * 200_000}, facts={"bytes": "200 kB"}) for n in range(99)]
    shown = bounded(items)
    assert sum(len(item.data.get("text", "")) for item in shown) <= 16 << 20
    assert shown[:50] == tuple(items[:50])
    assert [item.name for item in shown] == [item.name for item in items]
    assert shown[-1].kind == "unreadable"
    assert "not shown" in shown[-1].note


def test_samples_are_read_by_several_threads_at_once(tmp_path: Path) -> None:
    """While the shard is still being read, every page that another thread sees is whole."""
    from concurrent.futures import ThreadPoolExecutor

    members = {f"{n:05}.{extension}": b"words" for n in range(2000) for extension in ("txt", "cls")}
    path = write_tar(tmp_path / "x.tar.gz", members, "w:gz")
    backend = open_backend([str(path)])

    def look(offset: int) -> None:
        for entry in backend.page(offset, 20).entries:
            assert entry.id == f"{entry.index:05}"
            assert entry.names == ("txt", "cls")
            assert entry.text == "words"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(look, [n * 37 % 1980 for n in range(200)]))
    backend.close()


def test_of_very_many_shards_only_those_are_opened_that_are_looked_at(
    tmp_path: Path, view: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first page opens the first shard; the others follow in their order, and one that is none is named."""
    monkeypatch.setattr(joined, "MAX_SHARDS_READ_AHEAD", 3)
    opened: list[str] = []

    class Noted(SourceFile):
        def __init__(self, url: str, *options: Any) -> None:
            super().__init__(url, *options)
            opened.append(Path(url).stem)

    monkeypatch.setattr(files, "SourceFile", Noted)
    for n in range(5):
        write_tar(tmp_path / f"s{n}.tar", {f"k{n}-{one}.txt": b"x" for one in range(3)})
    (tmp_path / "s3.tar").write_bytes(b'{"a": 1}\n')
    client = view(tmp_path)
    assert client.get("/api/about").json()["kind"] == "5 shards"
    assert set(opened) == {"s0"}
    page = client.get("/api/samples").json()
    assert [entry["id"] for entry in page["entries"]] == [f"s{n}/k{n}-{one}" for n in (0, 1, 2, 4) for one in range(3)]
    assert "s3.tar, at byte 0: is JSON text, not a tar" in page["note"]
    keys = [part["key"] for part in client.get("/api/partitions").json()["partitions"]]
    assert keys == [f"s{n}" for n in range(5)]
    assert client.get("/api/samples", params={"part": "s4"}).json()["total"] == 3
