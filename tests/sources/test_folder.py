"""Folders of plain files as shards: members, fingerprints, and the same samples as from a tar and a zip."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import ShardError, SourceError
from mm_assets.rows.base import row_sources, shard_kinds
from mm_assets.rows.from_members import MemberRows
from mm_assets.rows.schema import DatasetSchema, MemberRules
from mm_assets.sources import index_members
from mm_assets.sources.folder import FolderSource
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import FOLDER_MAGIC, expand_shards

from ..pipeline.chain import declare, run_chain
from ..storage.web_server import serve


def put(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def shards_of(place: object) -> list[str]:
    return [shard.url for shard in expand_shards(str(place), kinds=shard_kinds(None, where="x")).shards]


def source_of(folder: object) -> FolderSource:
    return FolderSource(SourceFile(f"{folder}/"))


FILES = {"b.jpg": b"jpeg", "a.json": b'{"n": 1}', "a.jpg": b"", "a.state.npy": b"\x93NUMPY", ".x.jpg": b"x"}


# -- members


def test_members_are_the_files_of_the_folder_alone(tmp_path: Path) -> None:
    """Files are sorted by name, hidden and documenting ones skipped with the reason, and folders are none of them."""
    put(tmp_path, {**FILES, "README.md": b"x", "deep/c.jpg": b"c"})
    members = list(source_of(tmp_path).members())
    assert [(m.member, m.byte_size, m.skip_reason) for m in members] == [
        (".x.jpg", 1, "hidden file"),
        ("README.md", 1, "documentation"),
        ("a.jpg", 0, None),
        ("a.json", 8, None),
        ("a.state.npy", 6, None),
        ("b.jpg", 4, None),
    ]
    assert (members[4].sample_key, members[4].role, members[4].extension) == ("a", "state", "npy")
    assert {(m.shard, m.byte_offset) for m in members} == {(f"{tmp_path}/", None)}


def test_contents_are_those_of_the_files(tmp_path: Path) -> None:
    """Each chosen file is read, a large one is an error of its own, and `wanted` is asked once for each."""
    source = source_of(put(tmp_path, {**FILES, "c.jpg": b"large" * 9}))
    asked: list[str] = []
    errors: list[str] = []
    found = source.payloads(
        wanted=lambda m: asked.append(m.member) is None and m.skip_reason is None,
        max_bytes=10,
        on_error=lambda m, _: errors.append(m.member),
    )
    assert {m.member: content for m, content in found} == {k: v for k, v in FILES.items() if k != ".x.jpg"}
    assert (errors, sorted(asked)) == (["c.jpg"], sorted([*FILES, "c.jpg"]))
    with pytest.raises(SourceError) as caught:
        list(source.payloads(wanted=lambda _: True, max_bytes=10))
    assert caught.value.member == "c.jpg"


def test_a_file_that_changed_since_the_listing_is_an_error(tmp_path: Path) -> None:
    """Another size than that of the listing, and a file that is missing, are errors and never other bytes."""
    source = source_of(put(tmp_path, FILES))
    (tmp_path / "b.jpg").write_bytes(b"longer")
    (tmp_path / "a.json").unlink()
    for name in ("b.jpg", "a.json"):
        with pytest.raises(SourceError, match=r"listed|No such file"):
            list(source.payloads(wanted=lambda m, name=name: m.member == name, max_bytes=10))  # type: ignore[misc]  # bound


def test_the_index_is_that_of_any_source(tmp_path: Path) -> None:
    """The members of a folder fit the table of the member index."""
    (batch,) = index_members(source_of(put(tmp_path, FILES)))
    batch.validate(full=True)
    assert batch.num_rows == len(FILES)


def test_an_empty_folder_and_a_missing_one_differ(tmp_path: Path) -> None:
    """A folder without files has no members; one that does not exist is an error with its place."""
    assert list(source_of(tmp_path).members()) == []
    with pytest.raises(SourceError, match="gone"):
        source_of(tmp_path / "gone")


def test_a_file_cannot_claim_to_be_a_folder(tmp_path: Path) -> None:
    """A file with the bytes of a listing names no other files: it is refused."""
    path = tmp_path / "x.bin"
    path.write_bytes(FOLDER_MAGIC + b'["../../etc/passwd", 1, ""]\n')
    (rows,) = row_sources([SourceFile(str(path))])
    with pytest.raises(ShardError, match="expected a folder"):
        list(rows.sources[0].members())


def test_a_folder_of_many_files_takes_little_memory(tmp_path: Path) -> None:
    """Opening a folder takes a few hundred bytes per file, whose members are read one by one."""
    for number in range(1000):
        (tmp_path / f"{number:06d}.jpg").touch()
    tracemalloc.start()
    source = source_of(tmp_path)
    for _ in source.members():
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1000 * 1500 + (1 << 20)


# -- which folders are shards


def test_each_folder_of_files_is_a_shard_where_nothing_else_is(tmp_path: Path) -> None:
    """Folders at any depth are found; those without media or texts are reported, and hidden ones are not shards."""
    put(tmp_path, {"a/x.jpg": b"", "a/deep/y.wav": b"", "json/z.json": b"{}", ".git/z.jpg": b"", "docs/README.md": b""})
    assert shards_of(tmp_path) == [f"{tmp_path}/a/", f"{tmp_path}/a/deep/"]
    (message,) = expand_shards(str(tmp_path), kinds=shard_kinds(None, where="x")).skipped
    assert "2 folders skipped" in message
    put(tmp_path, {"t.jsonl": b""})
    assert shards_of(tmp_path) == [f"{tmp_path}/t.jsonl"]


def test_the_fingerprint_follows_from_the_files(tmp_path: Path) -> None:
    """Opened and listed, a folder has one fingerprint, which changes with the name, size and time of each file."""
    put(tmp_path, {"a.jpg": b"one", "b.jpg": b"two", "deep/c.jpg": b""})
    seen = set()

    def check() -> None:
        shard = expand_shards(str(tmp_path), kinds=shard_kinds(None, where="x")).shards[0]
        with SourceFile(shard.url) as file:
            assert (file.url, file.size, file.fingerprint) == (shard.url, shard.size, shard.fingerprint)
        seen.add(shard.fingerprint)

    check()
    put(tmp_path, {"deep/d.jpg": b"elsewhere"})
    check()
    assert len(seen) == 1
    for change in (
        lambda: (tmp_path / "a.jpg").rename(tmp_path / "z.jpg"),
        lambda: put(tmp_path, {"b.jpg": b"other"}),
        lambda: os.utime(tmp_path / "b.jpg", ns=(1, 1)),
        lambda: (tmp_path / "b.jpg").unlink(),
    ):
        change()
        check()
    assert len(seen) == 5


def test_folders_of_a_server_are_shards(tmp_path: Path) -> None:
    """Pages with links are listed, names with escapes read, and the fingerprint is that of the listing."""
    put(tmp_path, {"a b/x %20?.jpg": b"jpeg", "a b/x %20?.json": b"{}"})
    with serve(tmp_path) as server:
        (shard,) = expand_shards(f"{server.url}/", kinds=shard_kinds(None, where="x")).shards
        assert shard.url == f"{server.url}/a%20b/"
        source = FolderSource(SourceFile(shard.url))
        assert source.file.fingerprint == shard.fingerprint
        found = {m.member: content for m, content in source.payloads(wanted=lambda _: True, max_bytes=9)}
        assert found == {"x %20?.jpg": b"jpeg", "x %20?.json": b"{}"}


# -- the same as from a tar and a zip

NAMES = st.builds(
    "{}{}.{}".format,
    st.sampled_from(["", "in/", "in/deep/", "é/"]),
    st.text("ab .é-", min_size=1, max_size=4).filter(lambda text: text.strip(".") and text[0] not in ". "),
    st.sampled_from(["jpg", "json", "txt", "state.npy", "JPG"]),
)
TREES = st.dictionaries(NAMES, st.sampled_from([b"", b"text", b'{"n": 1}', b"\xff"]), max_size=8)


def tar_of(files: Mapping[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def zip_of(files: Mapping[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, (name, content) in enumerate(files.items()):
            archive.writestr(name, content, zipfile.ZIP_STORED if number % 2 else None)
    return target.getvalue()


def samples(urls: list[str], declared: str) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of each sample, without their places."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for url in urls:
        with SourceFile(url) as file:
            (rows,) = row_sources([file], shards=declared)
            assert isinstance(rows, MemberRows)
            index = [batch for source in rows.sources for batch in index_members(source)]
            stream = rows.rows(lambda index=index: iter(index), layout=MemberRules(), schema=DatasetSchema())
            for row in pa.Table.from_batches(list(stream), DatasetSchema().row_schema()).to_pylist():
                for place in ("source_ref", "source", "source_member"):
                    row.pop(place)
                found.setdefault(row.pop("sample_id"), []).append(tuple(row.values()))
    return found


@pytest.mark.nightly_examples(10_000)
@settings(deadline=None)
@given(TREES)
def test_a_tree_gives_the_samples_of_its_tar_and_its_zip(files: dict[str, bytes]) -> None:
    """Whatever files a tree has, its folders give the ids, rows and texts that its archives give."""
    files = dict(sorted(files.items()))
    with tempfile.TemporaryDirectory() as name:
        tree = put(Path(name, "tree"), files)
        archives = put(Path(name, "archives"), {"x.tar": tar_of(files), "x.zip": zip_of(files)})
        from_tar = samples([str(archives / "x.tar")], str(archives))
        assert samples([str(archives / "x.zip")], str(archives)) == from_tar
        shards = shards_of(tree) if files else []
        assert samples(shards, str(tree)) == {
            key: rows for key, rows in from_tar.items() if f"{tree}/{key}".rpartition("/")[0] + "/" in shards
        }


def png(seed: int) -> bytes:
    target = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


def test_a_dataset_packs_to_the_same_payloads(tmp_path: Path) -> None:
    """The same samples as a tar, a zip, a folder and a folder with odd names are packed alike, with all checks."""
    files = {}
    for number in range(6):
        files |= {
            f"{number}.json": json.dumps({"score": number / 2}).encode(),
            f"{number}.png": png(number),
            f"{number}.txt": f"picture {number}".encode(),
        }
    files = dict(sorted(files.items()))
    put(tmp_path / "folder" / "in", files)
    put(tmp_path / "tar" / "in", {"in.tar": tar_of(files)})
    put(tmp_path / "zip" / "in", {"in.zip": zip_of(files)})
    put(tmp_path / "back" / "in", {**files, "b\\.txt": b"a name that no locator may have"})
    packed: dict[str, list[bytes]] = {}
    for name in ("tar", "zip", "folder", "back"):
        dataset, results = run_chain(declare(tmp_path / "out" / name, tmp_path / name / "in", pack="image_text"))
        assert all(outcome.passed for result in results["in"].values() for outcome in result.outcomes)
        packed[name] = [path.read_bytes() for path in sorted(Path(dataset.store.path_of("packed")).iterdir())]
    assert packed["zip"] == packed["tar"]
    assert packed["folder"] == packed["tar"]
    assert len(packed["back"][0]) > len(packed["tar"][0])
