"""Every kind of source: packed files, manifests, folders with partitions, tables, lists, and all sample corpora."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

import mm_assets
from mm_assets.errors import ConfigError, MmAssetsError
from mm_assets.fields import TextField
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.storage.files import SourceFile
from mm_assets.view import open_backend
from mm_assets.view.backends import folder, references
from mm_assets.view.backends.row_files import JsonLines

from ..pipeline.chain import declare, run_chain
from ..pipeline.shards import make_shard, png
from .test_containers import write_tar

Open = Callable[..., TestClient]
CORPORA = ("docai", "image-text", "mint1t-html", "mint1t-pages", "mint1t-pdf", "music", "robotics", "speech", "video")


def ids_of(client: TestClient, **query: object) -> list[str]:
    page = client.get("/api/samples", params={name: str(value) for name, value in query.items()}).json()
    return [entry["id"] for entry in page["entries"]]


@pytest.mark.parametrize("corpus", [*CORPORA, "thirdparty"])
def test_every_sample_of_the_corpora_is_shown(shared_data: Path, view: Open, corpus: str) -> None:
    """Each sample of each corpus has a card and items, none is unreadable, and ranges of its media are answered."""
    for shard in sorted((shared_data / corpus).iterdir()):
        client = view(shard)
        for entry in client.get("/api/samples").json()["entries"][:12]:
            if entry["picture"]:
                assert client.get(entry["picture"]).status_code in (200, 204)
            for item in client.get(f"/api/sample/{entry['index']}").json()["items"]:
                assert item["kind"] != "unreadable", (shard.name, entry["id"], item)
                for media in item["media"][:1]:
                    assert client.get(media["url"], headers={"range": "bytes=0-1"}).status_code == 206


def write_packed(path: Path, first: int, count: int) -> Path:
    with mm_assets.create(path, {"text": TextField()}) as writer:
        for n in range(first, first + count):
            writer.write(f"id-{n}", {"text": f"words {n}"})
    return path


@pytest.mark.parametrize("suffix", ["mult", "mstr"])
def test_packed_files_are_one_row_of_samples(tmp_path: Path, view: Open, suffix: str) -> None:
    """One file, several, a glob and a folder of packed files are samples in their order; ids are found in all."""
    one = write_packed(tmp_path / f"a.{suffix}", 0, 5)
    two = write_packed(tmp_path / f"b.{suffix}", 5, 5)
    everything = [f"id-{n}" for n in range(10)]
    assert ids_of(view(one)) == everything[:5]
    for locations in ([one, two], [f"{tmp_path}/*.{suffix}"], [tmp_path]):
        client = view(*locations)
        assert ids_of(client) == everything
        assert [e["id"] for e in client.get("/api/find", params={"q": "d-7"}).json()["entries"]] == ["id-7"]
        assert client.get("/api/sample/9").json()["items"][0]["data"]["text"] == "words 9"


def test_a_damaged_packed_file_is_a_message(tmp_path: Path, view: Open) -> None:
    """A payload whose bytes changed is shown with a note; a truncated file is refused when it is opened."""
    path = write_packed(tmp_path / "a.mult", 0, 3)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"words 1", b"wXrds 1"))
    items = view(path).get("/api/sample/1").json()["items"]
    assert "checksum" in items[0]["note"]
    assert items[0]["data"]["text"] == "wXrds 1"
    path.write_bytes(content[:-40])
    with pytest.raises(MmAssetsError, match="truncated"):
        view(path)


def test_a_packed_file_that_is_damaged_in_its_directory_is_never_a_500(tmp_path: Path, view: Open) -> None:
    """Whatever byte of the body changes, pages and samples are answered with what is whole and a message."""
    path = write_packed(tmp_path / "a.mult", 0, 8)
    content = path.read_bytes()
    for at in range(80, len(content) - 200, 61):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        try:
            client = view(path)
        except MmAssetsError:
            continue  # refused as a whole
        for url in ("/api/samples", "/api/find?q=id", *(f"/api/sample/{n}" for n in range(8))):
            answer = client.get(url)
            assert answer.status_code in (200, 422), (at, url, answer.text)


def test_several_tables_are_one_row_of_samples(tmp_path: Path, view: Open) -> None:
    """Tables and lists follow each other, each is a partition too, and an empty one has no samples."""
    for name, rows in {"a": range(3), "b": range(0), "c": range(3, 6)}.items():
        table = pa.table({"sample_id": [f"id-{n}" for n in rows], "text": [f"words {n}" for n in rows]})
        pq.write_table(
            table.cast(pa.schema({"sample_id": pa.string(), "text": pa.string()})), tmp_path / f"{name}.parquet"
        )
    (tmp_path / "d.jsonl").write_text('{"sample_id": "id-6", "text": "words 6"}\n{"sample_id": "id-7"}\n')
    locations = [*sorted(tmp_path.glob("*.parquet")), tmp_path / "d.jsonl"]
    client = view(*locations)
    assert client.get("/api/about").json()["kind"] == "4 tables"
    assert ids_of(client) == [f"id-{n}" for n in range(8)]
    assert ids_of(client, offset=2, limit=3) == ["id-2", "id-3", "id-4"]
    assert client.get("/api/sample/4").json()["items"][0]["data"]["text"] == "words 4"
    assert [e["index"] for e in client.get("/api/find", params={"q": "d-6"}).json()["entries"]] == [6]
    parts = client.get("/api/partitions").json()["partitions"]
    assert [part["samples"] for part in parts] == [3, 0, 3, 2]
    assert ids_of(client, part=parts[2]["key"]) == ["id-3", "id-4", "id-5"]
    assert client.get("/api/samples", params={"part": "e"}).status_code == 404
    assert client.get("/api/sample/8").status_code == 404
    for several in (f"{tmp_path}/*.parquet", tmp_path):
        assert ids_of(view(several))[:6] == [f"id-{n}" for n in range(6)]


def test_a_damaged_table_does_not_hide_the_others(tmp_path: Path, view: Open) -> None:
    """Of several tables one that cannot be read is named, and so is a file of another kind."""
    for name in ("a", "c"):
        pq.write_table(pa.table({"sample_id": [name]}), tmp_path / f"{name}.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing else")
    write_tar(tmp_path / "d.tar", {"x.txt": b"x"})
    client = view(*(tmp_path / name for name in ("a.parquet", "b.parquet", "c.parquet", "d.tar")))
    page = client.get("/api/samples").json()
    assert [entry["id"] for entry in page["entries"]] == ["a", "c"]
    assert "b.parquet" in page["note"]
    assert "d.tar" in page["note"]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """The folder of a dataset with one partition published and one that is only registered since."""
    shards = tmp_path / "in"
    shards.mkdir()
    write_tar(shards / "a.tar", {"x.txt": b"from a", "x.json": b'{"lang": "en"}'})
    store, _ = run_chain(declare(tmp_path / "root", f"{shards}/*.tar"))
    write_tar(shards / "b.tar", {"y.txt": b"from b", "y.json": b'{"lang": "fr"}'})
    register(store)
    return tmp_path / "root" / "data"


def test_a_folder_follows_its_newest_manifest(dataset: Path, view: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at stays when a version is published; its key shows the newest, and the older one goes on."""
    monkeypatch.setattr(folder, "LISTING_SECONDS", -1.0)
    client = view(dataset)
    assert client.get("/api/newest").json() == {"part": None}
    run_chain(declare(dataset.parent, f"{dataset.parent.parent}/in/*.tar"))
    newest = client.get("/api/newest").json()["part"]
    assert ids_of(client) == ["x"]
    assert ids_of(client, part=newest) == ["x", "y"]
    assert client.get("/api/about", params={"part": newest}).json()["kind"] == f"version {newest[1:13]}"
    item = client.get("/api/sample/1", params={"part": newest}).json()["items"][0]
    assert client.get("/api/newest", params={"part": newest}).json() == {"part": None}
    assert item["name"]
    found = client.get("/api/explore/origin", params={"part": newest, "n": "1", "sample_id": "y"}).json()
    assert found["partition"] == "b"
    assert client.get("/api/samples", params={"part": f"@{64 * '0'}"}).status_code == 404


def test_a_folder_without_a_manifest_says_when_there_is_one(
    tmp_path: Path, view: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first version there is nothing newer; then its key shows it."""
    monkeypatch.setattr(folder, "LISTING_SECONDS", -1.0)
    shards = tmp_path / "in"
    shards.mkdir()
    write_tar(shards / "a.tar", {"x.txt": b"from a"})
    spec = declare(tmp_path / "root", f"{shards}/*.tar")
    register(DatasetStore(spec))
    client = view(tmp_path / "root" / "data")
    assert client.get("/api/newest").json() == {"part": None}
    run_chain(spec)
    assert ids_of(client, part=client.get("/api/newest").json()["part"]) == ["x"]
    assert client.get("/api/about").json()["has_manifest"] is False


def test_a_folder_shows_its_manifest_and_each_partition(dataset: Path, view: Open) -> None:
    """The whole is the manifest; a published partition has its stages, a pending one its shards."""
    client = view(dataset)
    assert ids_of(client) == ["x"]
    partitions = client.get("/api/partitions").json()["partitions"]
    assert [(one["key"], one["state"], one["samples"]) for one in partitions] == [
        ("a", "published", 1),
        ("b", "pending", None),
    ]
    about = client.get("/api/about", params={"part": "a"}).json()
    assert about["stages"] == ["packed", "filtered_rows", "materialized_rows", "rows", "shards"]
    for stage in about["stages"]:
        assert ids_of(client, part=f"a/{stage}") == ["x"], stage
    assert ids_of(client, part="b") == ["y"]
    assert client.get("/api/about", params={"part": "b"}).json()["stage"] == "shards"
    for wrong in ("c", "b/rows", "../data", "a/../../x"):
        assert client.get("/api/samples", params={"part": wrong}).status_code == 404, wrong


def test_media_of_a_row_come_out_of_its_shard(tmp_path: Path, view: Open, shared_data: Path) -> None:
    """A row table without bytes shows its pictures from the registered shards, by range."""
    shards = tmp_path / "in"
    shards.mkdir()
    shutil.copy(shared_data / "image-text" / "image-text-00000.tar", shards)
    run_chain(declare(tmp_path / "root", shards))
    table = next((tmp_path / "root" / "data" / "rows").iterdir())
    client = view(table)
    entry = client.get("/api/samples").json()["entries"][0]
    assert client.get(entry["picture"]).content.startswith(b"\xff\xd8")
    items = client.get("/api/sample/0").json()["items"]
    assert "image" in [item["kind"] for item in items]
    assert {"source", "source_member"}.isdisjoint(item["name"].split()[-1] for item in items)


def test_an_older_manifest_opens_by_its_digest(dataset: Path, view: Open) -> None:
    """``manifests/<digest>.json`` is a dataset too."""
    assert ids_of(view(next((dataset / "manifests").iterdir()))) == ["x"]


def test_a_storage_root_names_its_datasets(dataset: Path) -> None:
    """The folder above a dataset's is refused with the name of one."""
    with pytest.raises(ConfigError, match=r"holds datasets.*data"):
        open_backend([str(dataset.parent)])


def test_a_plain_parquet_table_shows_a_row_per_sample(tmp_path: Path, view: Open) -> None:
    """Any table opens: each row is a sample, each column an item, over several row groups."""
    table = pa.table({"n": list(range(500)), "title": [f"row {n}" for n in range(500)], "tags": [["a"]] * 500})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=70)
    client = view(tmp_path / "t.parquet")
    page = client.get("/api/samples", params={"offset": 65, "limit": 10}).json()
    assert [entry["text"] for entry in page["entries"]] == [f"row {n}" for n in range(65, 75)]
    assert page["next"] == 75
    items = client.get("/api/sample/499").json()["items"]
    assert [(item["name"], item["kind"]) for item in items] == [("n", "scalar"), ("title", "text"), ("tags", "json")]


def test_a_parquet_file_of_cells_shows_its_pictures(tmp_path: Path, view: Open, shared_data: Path) -> None:
    """Media in cells, as Hugging Face stores them, are members of their rows."""
    import io
    import tarfile

    with tarfile.open(shared_data / "image-text" / "image-text-00000.tar") as archive:
        names = [name for name in archive.getnames() if name.endswith(".jpg")][:3]
        pictures = [archive.extractfile(name) or io.BytesIO() for name in names]
        cells = [{"bytes": picture.read(), "path": name} for picture, name in zip(pictures, names, strict=True)]
    pq.write_table(pa.table({"image": cells, "caption": ["a", "b", "c"]}), tmp_path / "hf.parquet")
    client = view(tmp_path / "hf.parquet")
    entries = client.get("/api/samples").json()["entries"]
    assert [entry["text"] for entry in entries] == ["a", "b", "c"]
    assert client.get(entries[2]["picture"]).content.startswith(b"\xff\xd8")


def test_a_list_of_json_shows_lines_and_the_files_beside_it(tmp_path: Path, view: Open) -> None:
    """Lines of one sample id are one sample; a path names a file below the list's folder and no other."""
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "data" / "a.txt").write_text("beside")
    (tmp_path / "data" / "link.txt").symlink_to(tmp_path / "secret.txt")
    lines = [
        {"sample_id": "one", "path": "a.txt"},
        {"sample_id": "one", "text_content": "words"},
        {"sample_id": "two", "path": "../secret.txt"},
        {"sample_id": "three", "path": str(tmp_path / "secret.txt")},
        {"sample_id": "four", "path": "link.txt"},
        {"sample_id": "five", "path": "file:///etc/passwd"},
    ]
    path = tmp_path / "data" / "list.jsonl"
    path.write_text("\n".join([*map(json.dumps, lines), "{broken", "\n\n[1]"]))
    client = view(path)
    assert ids_of(client) == ["one", "two", "three", "four", "five", "row 6", "row 7"]
    first = client.get("/api/sample/0").json()["items"]
    assert "beside" in str(first)
    assert "words" in str(first)
    for n in range(1, 5):
        items = client.get(f"/api/sample/{n}").json()["items"]
        assert "secret" not in str([item["data"] for item in items if item["name"] == "content"]), n
        assert any(item["kind"] == "unreadable" for item in items), n
    assert "is not JSON" in str(client.get("/api/sample/5").json())


@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_a_csv_table_has_its_rows(tmp_path: Path, view: Open, suffix: str, delimiter: str) -> None:
    """A CSV table is shown as the pipeline reads it: ids and texts by their columns, quoted lines, other columns."""
    lines = [("id", "text", "score"), ("a", "words", "1.5"), ("b", '"two\nlines"', "2")]
    (tmp_path / f"x.{suffix}").write_text("".join(f"{delimiter.join(line)}\n" for line in lines))
    client = view(tmp_path / f"x.{suffix}")
    assert ids_of(client) == ["a", "b"]
    items = client.get("/api/sample/1").json()["items"]
    assert [item["data"]["text"] for item in items] == ["two\nlines", "2"]


def test_a_damaged_table_is_a_message(tmp_path: Path, view: Open) -> None:
    """A table whose pages are damaged is 422 or a note with the row group, and never a 500."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"sample_id": [str(n) for n in range(100)], "text": ["x" * 50] * 100}), path)
    content = bytearray(path.read_bytes())
    content[10:200] = b"\xff" * 190
    path.write_bytes(content)
    client = view(path)
    for url in ("/api/samples", "/api/sample/0", "/api/find?q=1"):
        answer = client.get(url)
        assert answer.status_code in (200, 404, 422), answer.text
        assert answer.status_code != 200 or "cannot be read" in answer.text


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    """An empty folder, a glob without matches and a missing file are errors that name it."""
    for location in (tmp_path, f"{tmp_path}/*.tar", tmp_path / "no.tar"):
        with pytest.raises((MmAssetsError, OSError), match=str(tmp_path)):
            open_backend([str(location)])


def test_texts_and_numbers_that_json_lacks_are_answered(tmp_path: Path, view: Open) -> None:
    """Lone surrogates, NaN and infinities of a list are sent as JSON that a browser reads."""
    line = '{"sample_id": "\\ud800", "text": "\\udfff words", "n": NaN, "m": [Infinity, {"k": -Infinity}]}'
    (tmp_path / "x.jsonl").write_text(line)
    client = view(tmp_path / "x.jsonl")
    page = client.get("/api/samples")
    assert page.status_code == 200
    assert "words" in page.json()["entries"][0]["text"]
    sample = client.get("/api/sample/0")
    assert sample.status_code == 200
    json.loads(sample.text, parse_constant=pytest.fail)


def test_a_shard_of_several_is_opened_once(tmp_path: Path) -> None:
    """The partition of a shard is the same for all requests, so that it is read once."""
    for name in ("one", "two"):
        write_tar(tmp_path / f"{name}.tar", {"a.txt": b"x"})
    backend = open_backend([f"{tmp_path}/*.tar"])
    assert backend.partition("one") is backend.partition("one")
    backend.close()


def test_a_long_list_of_partitions_holds_up_nothing_and_is_used_again(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While partitions are listed one of them can be read; a list that took longer than it is used for is used."""
    monkeypatch.setattr(folder, "LISTING_SECONDS", 0.4)
    backend = open_backend([str(dataset)])
    assert isinstance(backend, folder.FolderBackend)
    real, begun, read = backend._list, list[float](), threading.Event()

    def slow() -> list[Mapping[str, Any]]:
        begun.append(time.monotonic())
        assert read.wait(20)
        time.sleep(0.5)
        return real()

    monkeypatch.setattr(backend, "_list", slow)
    with ThreadPoolExecutor(1) as pool:
        listing = pool.submit(backend.partitions)
        key = real()[0]["key"]
        assert backend.partition(key).known() > 0
        read.set()
        assert [one["key"] for one in listing.result(20)] == [one["key"] for one in real()]
    backend.partitions()
    assert len(begun) == 1
    backend.close()


def test_partitions_that_are_no_longer_open_can_still_be_read(
    tmp_path: Path, view: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more partitions than are open at a time all are answered at once, and samples that were shown keep media."""
    for n in range(5):
        make_shard(tmp_path / "in" / f"p{n}.tar", {"x.png": png(n, (20, 20)), "x.txt": f"caption {n}"})
    run_chain(declare(tmp_path / "root", tmp_path / "in"))
    monkeypatch.setattr(folder, "MAX_OPEN", 1)
    client = view(tmp_path / "root" / "data")
    stages = ("shards", "filtered_rows", "packed")
    shown = [client.get("/api/sample/0", params={"part": f"p0/{stage}"}).json()["items"] for stage in stages]
    with ThreadPoolExecutor(8) as pool:
        parts = [f"p{n % 5}/{stage}" for n in range(40) for stage in stages]
        answers = list(pool.map(lambda part: client.get("/thumbnail/0", params={"part": part}), parts))
    assert {answer.status_code for answer in answers} == {200}
    media = [one for items in shown for item in items for one in item["media"]]
    assert len(media) == 3
    for one in media:
        assert len(client.get(one["url"]).content) == one["size"]


def test_a_sample_may_name_more_files_than_are_open(
    tmp_path: Path, view: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that a sample's rows name is read after all of them were shown, whichever was opened first."""
    monkeypatch.setattr(references, "MAX_OPEN", 2)
    contents = [png(n, (20, 20)) for n in range(5)]
    for n, content in enumerate(contents):
        (tmp_path / f"{n}.png").write_bytes(content)
    (tmp_path / "x.jsonl").write_text("".join(f'{{"sample_id": "x", "path": "{n}.png"}}\n' for n in range(5)))
    client = view(tmp_path / "x.jsonl")
    media = [one["media"][0]["url"] for one in client.get("/api/sample/0").json()["items"] if one["media"]]
    assert [client.get(url).content for url in media] == contents


def test_a_list_is_not_complete_before_its_last_line_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that asks while lines are found does not hear that these are all."""
    (tmp_path / "x.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}')
    lines = JsonLines(SourceFile(str(tmp_path / "x.jsonl")))
    add, said = lines._add, list[bool]()

    def asked(*given: Any) -> None:
        said.append(lines.is_complete)
        add(*given)

    monkeypatch.setattr(lines, "_add", asked)
    lines.reach()
    assert said == [False, False, False]
    assert lines.is_complete
    assert lines.num_rows == 3
