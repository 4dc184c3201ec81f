"""Zip archives: ranges and contents of members, archives that lie, and those of other tools."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_assets.errors import ShardError, SourceError
from mm_assets.rows.base import row_sources
from mm_assets.sources import Member
from mm_assets.sources.extract import MemberExtract, Shelf
from mm_assets.sources.zip import ZipSource
from mm_assets.storage.files import SourceFile
from mm_assets.testing import SourceSuite
from mm_assets.testing.sources import Files

from .members import contents

JPEG = bytes(range(256)) * 20


def zipped(files: Files, method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive, pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # of repeated names
        archive.comment = comment
        for name, content in files:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return target.getvalue()


def source_of(folder: Path, content: bytes) -> ZipSource:
    path = folder / "x.zip"
    path.write_bytes(content)
    return ZipSource(SourceFile(str(path)))


class TestStored(SourceSuite):
    """An archive of stored members."""

    source = ZipSource

    def make(self, files: Files) -> bytes:
        return zipped(files)


class TestDeflated(SourceSuite):
    """An archive of deflated members."""

    source = ZipSource

    def make(self, files: Files) -> bytes:
        return zipped(files, zipfile.ZIP_DEFLATED)


class TestStreamed(SourceSuite):
    """An archive that was written to a pipe: the sizes follow the contents."""

    source = ZipSource

    def make(self, files: Files) -> bytes:
        class Pipe(io.RawIOBase):
            written = bytearray()

            def writable(self) -> bool:
                return True

            def write(self, data: bytes) -> int:  # type: ignore[override]  # of bytes alone
                self.written += data
                return len(data)

        pipe = Pipe()
        pipe.written = bytearray()
        with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive, pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *_, **__: None)
            for name, content in files:
                archive.writestr(name, content)
        return bytes(pipe.written)


class TestLarge(SourceSuite):
    """An archive of 64 bits, whose numbers are all in the extra fields and the end record of 64 bits."""

    source = ZipSource

    def make(self, files: Files) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            for limit in ("ZIP64_LIMIT", "ZIP_FILECOUNT_LIMIT"):
                patch.setattr(zipfile, limit, -1)
            return zipped(files)


def test_stored_members_are_ranges_and_deflated_ones_are_not(tmp_path: Path) -> None:
    """Only a content that is one range of the file has a byte offset."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a.jpg", JPEG)
        archive.writestr("a.json", b"{}" * 100, zipfile.ZIP_DEFLATED)
    jpeg, text = source_of(tmp_path, target.getvalue()).members()
    assert target.getvalue()[jpeg.byte_offset :][: len(JPEG)] == JPEG  # type: ignore[misc]  # it is not None
    assert text.byte_offset is None


def test_an_archive_is_recognized_by_its_bytes(tmp_path: Path) -> None:
    """A zip of any name is read as one, without a declaration."""
    path = tmp_path / "shard.bin"
    path.write_bytes(zipped([("a.jpg", JPEG)]))
    (found,) = row_sources([SourceFile(str(path))])
    assert [type(source) for source in found.sources] == [ZipSource]


@pytest.mark.parametrize("change", [lambda c: b"#!/bin/sh\n" * 9 + c, lambda c: c + b"\0" * 99])
def test_bytes_around_an_archive_are_no_damage(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    """A program before an archive, and bytes after it, which are listed, leave its members as they are."""
    source = source_of(tmp_path, change(zipped([("a.jpg", JPEG), ("b.jpg", b"x")], comment=b"PK\5\6 said")))
    assert contents(source) == {"a.jpg": JPEG, "b.jpg": b"x"}
    assert [m.skip_reason for m in source.members()][2:] in ([], ["trailing bytes"])


def test_members_that_cannot_be_read_are_skipped_with_the_reason(tmp_path: Path) -> None:
    """Encrypted members, other methods, links and folders are entries, and the others are read."""
    content = bytearray(zipped([("a.jpg", JPEG), ("b.jpg", b"x"), ("c/", b""), ("link", b"a.jpg"), ("d.jpg", b"y")]))
    set_in_both(content, 0, flags=1)
    set_in_both(content, 1, method=93)
    record = records(content)[3]
    content[record + 5] = 3
    content[record + 38 : record + 42] = struct.pack("<L", 0o120777 << 16)
    source = source_of(tmp_path, bytes(content))
    assert [(m.member, m.skip_reason) for m in source.members()] == [
        ("a.jpg", "encrypted"),
        ("b.jpg", "compression method: 93 is not read, expected stored or deflated"),
        ("c", "directory"),
        ("link", "symbolic link"),
        ("d.jpg", None),
    ]
    assert contents(source) == {"d.jpg": b"y"}


@pytest.mark.parametrize(("name", "expected"), [(b"\x82.jpg", "é.jpg"), ("é.jpg".encode(), "é.jpg")])
def test_names_without_the_flag_of_utf8_are_read(tmp_path: Path, name: bytes, expected: str) -> None:
    """A name is UTF-8 if it is valid there, else in the code page that the format has."""
    content = zipped([("x" * len(name), JPEG)]).replace(b"x" * len(name), name)
    assert list(contents(source_of(tmp_path, content))) == [expected]


# -- archives that lie


def records(content: bytes) -> list[int]:
    """Where the records of the directory start."""
    return [at for at in range(len(content)) if content.startswith(b"PK\1\2", at)]


def headers(content: bytes) -> list[int]:
    return [at for at in range(len(content)) if content.startswith(b"PK\3\4", at)]


def set_in_both(content: bytearray, number: int, **fields: int) -> None:
    """Changes flags or method of a member in its header and in its record."""
    header, record = headers(bytes(content))[number], records(bytes(content))[number]
    for name, value in fields.items():
        at = {"flags": 6, "method": 8}[name]
        content[header + at : header + at + 2] = content[record + at + 2 : record + at + 4] = struct.pack("<H", value)


FILES = [("a.jpg", JPEG), ("b.jpg", b"second"), ("c.jpg", b"third")]


def with_record(number: int, at: int, value: bytes) -> bytes:
    content = bytearray(zipped(FILES))
    place = records(bytes(content))[number] + at
    content[place : place + len(value)] = value
    return bytes(content)


LIES = {
    "another name": with_record(1, 46, b"x.jpg"),
    "another method": with_record(1, 10, b"\x08"),
    "another size": with_record(1, 24, b"\x05"),
    "more stored bytes": with_record(1, 20, b"\x09"),
    "another checksum": with_record(1, 16, b"\0\0\0\0"),
    "the place of another": with_record(1, 42, bytes(4)),
    "a place beyond the end": with_record(1, 42, b"\xff\xff\xff\x7f"),
    "no sizes of 64 bits": with_record(1, 42, b"\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_directory_that_lies_is_damage(tmp_path: Path, lie: str) -> None:
    """A record that contradicts the member's header raises; salvaged, the other members are read."""
    source = source_of(tmp_path, LIES[lie])
    with pytest.raises(ShardError) as caught:
        list(source.members())
    assert caught.value.byte_offset is not None
    found = contents(source, on_damaged_shard="salvage")
    assert found.items() <= dict(FILES).items()
    assert "a.jpg" in found
    assert "b.jpg" not in found


def test_overlapping_members_are_refused(tmp_path: Path) -> None:
    """Members that share compressed bytes, by which an archive expands without bound, are damage."""
    kernel = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = kernel.compress(bytes(1 << 16)) + kernel.flush()
    members, directory = b"", b""
    for number in range(100):  # each header is content of the member before it
        name = b"%03d.bin" % number
        sizes = zlib.crc32(bytes(1 << 16)), len(body), 1 << 16
        members += struct.pack("<4sHHHHHLLLHH", b"PK\3\4", 20, 0, 8, 0, 0, *sizes, len(name), 0) + name
        numbers = 0, 20, 20, 0, 8, 0, 0, *sizes, len(name), 0, 0, 0, 0, 0, 0
        directory += struct.pack("<4sHHHHHHLLLHHHHHLL", b"PK\1\2", *numbers[1:]) + name
    content = members + body + directory
    content += struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 100, 100, len(directory), len(members + body), 0)
    source = source_of(tmp_path, content)
    with pytest.raises(ShardError, match="shares bytes"):
        list(source.members())
    assert contents(source, on_damaged_shard="salvage", on_error=lambda *_: None) == {}


def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    """A member that expands beyond what its directory says is an error, of which no more is decompressed."""
    content = bytearray(zipped([("a.txt", bytes(64 << 20))], zipfile.ZIP_DEFLATED))
    for at in (headers(bytes(content))[0] + 22, records(bytes(content))[0] + 24):
        content[at : at + 4] = struct.pack("<L", 1000)
    source = source_of(tmp_path, bytes(content))
    tracemalloc.start()
    with pytest.raises(SourceError, match="more than 1000 bytes") as caught:
        contents(source)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert caught.value.member == "a.txt"


def test_a_flipped_bit_of_a_content_is_an_error_of_its_member(tmp_path: Path) -> None:
    """The checksum finds it, and the other members are read."""
    content = bytearray(zipped(FILES))
    content[headers(bytes(content))[1] + 35] ^= 1
    errors: list[str] = []
    source = source_of(tmp_path, bytes(content))
    found = contents(source, on_error=lambda member, _: errors.append(member.member))
    assert (sorted(found), errors) == (["a.jpg", "c.jpg"], ["b.jpg"])


def test_a_truncated_archive_is_salvaged_from_its_start(tmp_path: Path) -> None:
    """Without a directory, whole members are read by their own headers, and the rest is one entry."""
    whole = zipped(FILES)
    source = source_of(tmp_path, whole[: headers(whole)[2] + 10])
    with pytest.raises(ShardError, match="truncated"):
        list(source.members())
    assert contents(source, on_damaged_shard="salvage") == dict(FILES[:2])
    assert list(source.members(on_damaged_shard="salvage"))[2].byte_offset == headers(whole)[2]


def test_one_part_of_a_split_archive_is_named(tmp_path: Path) -> None:
    """The last of several files of an archive says what it is."""
    content = bytearray(zipped(FILES))
    content[-18:-16] = b"\1\0"
    with pytest.raises(ShardError, match="split into several files"):
        list(source_of(tmp_path, bytes(content)).members())


@pytest.mark.nightly_examples(10_000)
@given(st.data(), st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
def test_any_change_of_bytes_ends_in_members_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, method: int
) -> None:
    """Whatever bytes an archive has, it is read or refused, and every content has the size of its member."""
    content = bytearray(zipped([("a.json", b'{"n": 1}'), ("a.txt", b"text" * 30)], method))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        if not content:
            return
    source = source_of(tmp_path_factory.getbasetemp(), bytes(content))
    members: Sequence[Member] = ()
    try:
        members = list(source.members(on_damaged_shard="salvage"))
        for member, payload in source.payloads(
            wanted=lambda _: True, max_bytes=1 << 16, on_error=lambda *_: None, on_damaged_shard="salvage"
        ):
            assert member in members
            assert len(payload) == member.byte_size
    except ShardError:
        assert not members, "salvaged, what could be listed can be read"
    finally:
        source.file.close()


def test_requests_in_order_are_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deflated members that are requested batch by batch take one pass, and another one for earlier names."""
    names = [f"{number}.jpg" for number in range(20)]
    path = tmp_path / "x.zip"
    path.write_bytes(zipped([(name, name.encode()) for name in names], zipfile.ZIP_DEFLATED))
    passes = 0
    whole = ZipSource._entries

    def counted(self: ZipSource, *arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return whole(self, *arguments)

    monkeypatch.setattr(ZipSource, "_entries", counted)
    extract = MemberExtract(SourceFile(str(path)), Shelf(1 << 10), max_bytes=100)
    for name in names:
        extract.begin({name}, last=name == names[-1])
        assert extract.get(name) == name.encode()
    assert passes == 1
    extract.begin({"0.jpg"}, last=True)
    assert (extract.get("0.jpg"), passes) == (b"0.jpg", 2)
