"""The shards in a folder: those of formats whose dataset is a folder, and files beside a shard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from mm_assets.errors import SourceError
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import Listing, ShardFile, ShardKind, description_of, expand_shards

from .web_server import serve


def put(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return folder


class Chunks:
    """A format whose folder has an index and chunks."""

    MARKS: ClassVar[tuple[str, ...]] = ("index.json", ".meta/*.yaml")

    @classmethod
    def shards_in(cls, files: Sequence[ShardFile]) -> Sequence[ShardFile] | None:
        """Returns the chunks, which the other files describe."""
        chunks = [file for file in files if file.url.endswith(".bin")]
        others = [file for file in files if not file.url.endswith(".bin")]
        return [chunk.described_by(others) for chunk in chunks] if chunks else None


def listing(place: object) -> Listing:
    return expand_shards(
        str(place), kinds=[ShardKind("tar", (".tar",)), ShardKind("chunks", (".bin",), dataset=Chunks)]
    )


def names(found: Listing, below: object) -> list[str]:
    return [shard.url.removeprefix(f"{below}/") for shard in found.shards]


# -- datasets that are folders


def test_files_below_a_marked_folder_are_of_its_format_alone(tmp_path: Path) -> None:
    """A mark in any folder claims all files below it, also those that would be shards of another format."""
    put(tmp_path, "a/index.json", "a/0.bin", "a/deep/0.bin", "a/x.tar", "b/.meta/m.yaml", "b/0.bin", "y.tar")
    put(tmp_path, "c/other/index.jsonl", "c/0.bin")
    found = listing(tmp_path)
    assert names(found, tmp_path) == ["a/0.bin", "a/deep/0.bin", "b/0.bin", "y.tar"]
    assert {Path(url).name for url in found.in_datasets} == {"0.bin"}


def test_a_folder_that_the_format_refuses_is_searched_as_any_other(tmp_path: Path) -> None:
    """A file that has a mark's name by chance hides no shard, nor a marked folder below it."""
    put(tmp_path, "in/index.json", "in/x.tar", "in/deep/index.json", "in/deep/y.tar")
    assert names(listing(tmp_path), tmp_path) == ["in/deep/y.tar", "in/x.tar"]


def test_the_outer_of_two_marked_folders_decides(tmp_path: Path) -> None:
    """A dataset whose parts are folders with marks of their own is one dataset."""
    put(tmp_path, "index.json", "a/index.json", "a/0.bin", "b/0.bin")
    by_name = {Path(shard.url).parent.name: shard for shard in listing(tmp_path).shards}
    assert by_name.keys() == {"a", "b"}
    assert len({description_of(shard.fingerprint) for shard in by_name.values()}) == 1


def test_a_change_of_what_describes_a_shard_is_one_of_the_shard(tmp_path: Path) -> None:
    """The fingerprint of a shard changes with the files that describe it, and the file is still the shard's."""
    put(tmp_path, "index.json", "0.bin")
    (before,) = listing(tmp_path).shards
    with SourceFile(before.url) as file:
        assert before.is_of(file.fingerprint)
    os.utime(tmp_path / "index.json", ns=(1, 1))
    (after,) = listing(tmp_path).shards
    assert before.fingerprint != after.fingerprint
    assert description_of(before.fingerprint) != description_of(after.fingerprint)


def test_datasets_on_a_server_are_found_by_its_pages(tmp_path: Path) -> None:
    """A server's pages show marks as a local folder does, names with escapes included."""
    put(tmp_path, "a b/index.json", "a b/0 é.bin", "y.tar")
    with serve(tmp_path) as server:
        assert names(listing(f"{server.url}/"), server.url) == ["a%20b/0%20%C3%A9.bin", "y.tar"]


# -- files beside a shard


@pytest.mark.parametrize("name", ["index.json", "./index.json", "../in/index.json", "deep/../index.json"])
def test_a_file_beside_another_is_opened(tmp_path: Path, name: str) -> None:
    """A relative name, with folders and dots, leads to the file, on a disk and on a server."""
    put(tmp_path, "in/0.bin", "in/index.json")
    with SourceFile(str(tmp_path / "in/0.bin")) as file, file.beside(name) as found:
        assert (found.url, found.read(0, found.size)) == (str(tmp_path / "in/index.json"), b"in/index.json")
    with serve(tmp_path) as server:
        found = SourceFile(f"{server.url}/in/0.bin?version=1").beside(name)
        assert (found.url, found.read(0, found.size)) == (f"{server.url}/in/index.json", b"in/index.json")


def test_a_name_beside_a_file_on_a_server_is_escaped(tmp_path: Path) -> None:
    """A name with a percent sign, a question mark or a space is that of the file and not part of the URL."""
    put(tmp_path, "0.bin", "a%20b ?.json")
    with serve(tmp_path) as server:
        found = SourceFile(f"{server.url}/0.bin").beside("a%20b ?.json")
        assert found.read(0, found.size) == b"a%20b ?.json"


@pytest.mark.parametrize("name", ["", "/etc/hosts", "../" * 40 + "x", "a\0b"])
def test_a_name_that_leaves_the_storage_is_refused(tmp_path: Path, name: str) -> None:
    """Absolute and empty names, and more `..` than there are folders, are errors that name the file."""
    with SourceFile(str(put(tmp_path, "0.bin") / "0.bin")) as file, pytest.raises(SourceError, match="expected a path"):
        file.beside(name)


# -- the kind of the shards in a folder

KINDS = [
    ShardKind("tar", (".tar", ".tgz")),
    ShardKind("zip", (".zip",)),
    ShardKind("parquet", (".parquet",), is_table=True),
    ShardKind("list", (".jsonl", ".csv", ".parquet"), is_table=True),
]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("a.tar b.tgz", "a.tar b.tgz"),
        ("in/a.zip README.md", "in/a.zip"),
        ("a.parquet in/b.parquet LICENSE", "a.parquet in/b.parquet"),
        ("a.jsonl", "a.jsonl"),
        ("a.tar a.parquet a_stats.json b.tar b.parquet", "a.tar b.tar"),
        (".cache/a.parquet .b.parquet c.parquet", "c.parquet"),
        ("notes.txt", ""),
    ],
)
def test_a_folder_of_one_kind_needs_no_pattern(tmp_path: Path, files: str, expected: str) -> None:
    """Shards of any format are found, without hidden files and tables that describe the shard beside them."""
    found = expand_shards(str(put(tmp_path, *files.split())), kinds=KINDS)
    assert (names(found, tmp_path), found.skipped) == (expected.split(), ())


@pytest.mark.parametrize(
    ("files", "expected", "skipped"),
    [
        ("a.tar b.parquet c.parquet", "a.tar", "2 parquet files"),
        ("a.tar b.tar c.zip", "a.tar b.tar", "1 zip file"),
        ("a.tar c.zip", "a.tar", "1 zip file"),
        ("a.parquet b.jsonl c.csv", "b.jsonl c.csv", "1 parquet file"),
    ],
)
def test_of_several_kinds_the_others_are_reported(tmp_path: Path, files: str, expected: str, skipped: str) -> None:
    """Containers go before tables and the most files before others; what is left out is named with its number."""
    found = expand_shards(str(put(tmp_path, *files.split())), kinds=KINDS)
    assert names(found, tmp_path) == expected.split()
    (message,) = found.skipped
    assert skipped in message


def test_known_shards_decide_the_kind(tmp_path: Path) -> None:
    """Files of another kind that are added to a folder, however many, do not replace its shards."""
    put(tmp_path, "a.tar", "b.zip", "c.zip")
    assert names(expand_shards(str(tmp_path), kinds=KINDS), tmp_path) == ["b.zip", "c.zip"]
    found = expand_shards(str(tmp_path), kinds=KINDS, known=[str(tmp_path / "a.tar")])
    assert names(found, tmp_path) == ["a.tar"]


# -- folders of plain files

WITH_FOLDERS = [*KINDS, ShardKind("folder", ("/",), files=(".jpg", ".txt"))]


def test_tables_that_describe_folders_of_files_are_no_shards(tmp_path: Path) -> None:
    """Folders with a Parquet of the same name beside them, as img2dataset writes files, are the shards."""
    for shard in ("00000", "00001"):
        put(tmp_path, f"{shard}.parquet", f"{shard}_stats.json", f"{shard}/0.jpg", f"{shard}/0.txt", f"{shard}/0.json")
    found = expand_shards(str(tmp_path), kinds=WITH_FOLDERS)
    assert names(found, tmp_path) == ["00000/", "00001/"]
    assert any("2 tables skipped" in line and "00000.parquet" in line for line in found.skipped)


@pytest.mark.parametrize(
    ("files", "known", "expected"),
    [
        ("a.parquet a/0.jpg b.parquet", "", "a.parquet b.parquet"),
        ("a.parquet a/0.json", "", "a.parquet"),
        ("a.parquet a/0.jpg", "a.parquet", "a.parquet"),
        ("a.parquet a/0.jpg b.tar", "", "b.tar"),
    ],
)
def test_a_table_beside_a_folder_is_a_shard_if_others_are(
    tmp_path: Path, files: str, known: str, expected: str
) -> None:
    """A table remains a shard if it is registered, another one describes nothing, or its folder has no media."""
    put(tmp_path, *files.split())
    found = expand_shards(str(tmp_path), kinds=WITH_FOLDERS, known=[str(tmp_path / known)] if known else ())
    assert names(found, tmp_path) == expected.split()
