"""Tests of files that are not shards, by their first bytes."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mm_assets.errors import ShardError
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.rows.base import row_sources
from mm_assets.sources.head import foreign_file
from mm_assets.sources.tar import TarSource
from mm_assets.storage.files import SourceFile

from ..pipeline.chain import at_work, table_name
from .tars import build


def _png() -> bytes:
    target = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(target, "PNG")
    return target.getvalue()


def _zip() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a.txt", "a")
    return target.getvalue()


def _parquet() -> bytes:
    target = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), target)
    return target.getvalue()


FOREIGN = {
    "html": (b"\n<!DOCTYPE html>\n<html><title>Sign in</title>", "an HTML page"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"),
    "git-annex": (b"/annex/objects/SHA256E-s1048576--0abc.tar\n", "git annex get"),
    "git-annex link": (b"../../.git/annex/objects/J9/x1/SHA256E-s1--0.tar/SHA256E-s1--0.tar", "git annex get"),
    "cpio": (b"070701" + b"0" * 104, "a cpio archive"),
    "zip": (_zip(), "a zip archive"),
    "rar": (b"Rar!\x1a\x07\x01\0" + bytes(100), "a RAR archive"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\4" + bytes(100), "a 7z archive"),
    "parquet": (_parquet(), "a Parquet file"),
    "json": (b'{"error": "not authorized"}', "JSON text"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF file"),
    "s3 error": (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>NoSuchKey</Code><Message>gone</Message></Error>',
        r"object store \(NoSuchKey\)",
    ),
    "xml": (b'<?xml version="1.0"?><feed/>', "an XML document"),
    "lz4": (b"\x04\x22\x4d\x18" + bytes(100), "compressed with LZ4"),
    "text": (b"see https://example.org for the shards\n", "a text file"),
    "image": (_png(), "one file of image/png"),
    "empty": (b"", r"empty \(0 bytes\)"),
}


@pytest.mark.parametrize("policy", ["fail", "salvage"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_named(tmp_path: Path, name: str, policy: str) -> None:
    """What is not a tar is refused by its name with what to do, plain and in gzip, and salvaging does not pass it."""
    content, says = FOREIGN[name]
    stored_as = {".tar": content, ".tar.gz": gzip.compress(content)}
    if name == "text":  # a damaged stream may look like text: in it this is damage
        del stored_as[".tar.gz"]
    for suffix, stored in stored_as.items():
        path = tmp_path / f"shard{suffix}"
        path.write_bytes(stored)
        with SourceFile(str(path)) as file, pytest.raises(ShardError, match=says) as caught:
            list(TarSource(file).members(on_damaged_shard=policy))
        assert "not a tar: " in caught.value.detail
        assert caught.value.byte_offset == 0
        with SourceFile(str(path)) as file, pytest.raises(ShardError, match=says):
            list(TarSource(file).payloads(wanted=lambda _: True, on_damaged_shard=policy))


@pytest.mark.parametrize("name", ["html", "git lfs", "s3 error"])
def test_a_foreign_list_is_named(tmp_path: Path, name: str) -> None:
    """A list of files that is something else is refused by its name, whatever its own name is."""
    content, says = FOREIGN[name]
    for suffix in (".jsonl", ".parquet"):
        path = tmp_path / f"list{suffix}"
        path.write_bytes(content)
        spec = DatasetSpec.from_config(
            {"name": "d", "shards": str(path), "root": str(tmp_path), "settle_seconds": 0}, where="defs.yaml"
        )
        with pytest.raises(ShardError, match=says):
            register(DatasetStore(spec))


def test_a_foreign_file_without_a_known_name_is_named(tmp_path: Path) -> None:
    """A file that no source accepts is named in the message that lists the sources."""
    path = tmp_path / "shard.bin"
    path.write_bytes(FOREIGN["7z"][0])
    with SourceFile(str(path)) as file, pytest.raises(ShardError, match=r"a 7z archive.*expected tar \("):
        row_sources([file])


@given(
    head=st.binary(max_size=600), start=st.sampled_from([b"", b"<", b"{", b"<?xml <Error", b"\xef\xbb\xbf", b"\xe5"])
)
def test_no_bytes_make_it_raise(head: bytes, start: bytes) -> None:
    """Any bytes give a name or none."""
    found = foreign_file(start + head)
    assert found is None or found.as_not("a tar").startswith("is ")


def test_a_damaged_tar_is_not_foreign() -> None:
    """A tar whose first header is damaged stays a tar, which can be salvaged."""
    content = bytearray(build([("a.txt", b"a" * 600), ("b.txt", b"b")]))
    content[:4] = b"<htm"
    assert foreign_file(bytes(content[:512])) is None


def chain(tmp_path: Path, name: str, content: bytes, **settings: object) -> DatasetStore:
    """A dataset over a good shard and one with this content, registered."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good.tar").write_bytes(build([("a.txt", b"a"), ("b.txt", b"b")]))
    (folder / name).write_bytes(content)
    config = {"name": "d", "shards": str(folder), "root": str(tmp_path / "root"), "settle_seconds": 0, **settings}
    dataset = DatasetStore(DatasetSpec.from_config(config, where="defs.yaml"))
    register(dataset)
    return dataset


@pytest.mark.parametrize("content", [FOREIGN["html"][0], b"", b"\1" * 2000], ids=["html", "empty", "noise"])
def test_a_partition_without_a_member_is_not_done(tmp_path: Path, content: bytes) -> None:
    """Nothing of a foreign, empty or wholly damaged shard is salvaged, and its partition fails."""
    dataset = chain(tmp_path, "other.tar", content, on_damaged_shard="salvage")
    with pytest.raises(ShardError):
        at_work(stages.raw_shards, dataset, "other")


def test_an_archive_without_files_is_a_reject(tmp_path: Path) -> None:
    """A tar of no members is named in the rejects and counted."""
    dataset = chain(tmp_path, "none.tar", build([]))
    assert all(outcome.passed for outcome in at_work(stages.raw_shards, dataset, "none").outcomes)
    result = at_work(stages.rows, dataset, "none")
    assert all(outcome.passed for outcome in result.outcomes)
    assert result.record.counts["rejects.empty_shard"] == 1
    (reject,) = pq.read_table(dataset.store.path_of(table_name(dataset, "rejects", "none"))).to_pylist()
    assert (reject["reason"], reject["stage"], reject["member"]) == ("empty_shard", "index", None)


def test_a_missing_end_is_listed_or_fails(tmp_path: Path) -> None:
    """A tar without end-of-archive blocks is counted and listed, or fails its partition if the setting says so."""
    cut = build([("a.txt", b"a"), ("b.txt", b"b")])[:2048]
    dataset = chain(tmp_path, "cut.tar", cut)
    record = at_work(stages.raw_shards, dataset, "cut").record
    assert record.counts["kept.missing_end"] == 1
    (found,) = record.kept
    assert (found.reason, found.count, found.origin.byte_offset) == ("kept.missing_end", 1, 2048)
    assert "ends at byte 2048 without the two blocks of zeros that end a tar (found none)" in found.detail
    strict = DatasetStore(dataset.spec.replace(on_missing_end="fail"))
    with pytest.raises(ShardError, match="on_missing_end: fail"):
        at_work(stages.raw_shards, strict, "cut")
    assert at_work(stages.raw_shards, strict, "good").record.kept == ()


def test_shards_and_root_in_memory() -> None:
    """Shards and a root on `memory://` work within one process: a listing and a file give one fingerprint."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/sources-test/in/a.tar", build([("a.txt", b"a"), ("b.txt", b"b")]))
    config = {"name": "d", "shards": "memory://sources-test/in/*.tar", "root": "memory://sources-test/root"}
    try:
        dataset = DatasetStore(DatasetSpec.from_config({**config, "settle_seconds": 0}, where="defs.yaml"))
        assert [partition.key for partition in register(dataset).partitions] == ["a"]
        results = [at_work(make, dataset, "a") for make in stages.TABLE_STAGES.values()]
        assert all(outcome.passed for result in results for outcome in result.outcomes)
        assert results[-1].record.counts["kept_samples"] == 2
        assert register(dataset).changed == ()
    finally:
        memory.rm("/sources-test", recursive=True)
