"""Tar shards: archives of real tools, names, what is read, and compression."""

import bz2
import gzip
import io
import lzma
import os
import random
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import ShardError, SourceError
from mm_assets.sources.base import index_members
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, Member, escape_name, split_member_name
from mm_assets.sources.tar import TarSource
from mm_assets.storage.files import SourceFile
from mm_assets.testing import SourceSuite

from .tars import COMPRESSORS, FORMATS, MemorySource, build, escaped, found_in


def compare_with_tarfile(path: Path) -> list[Member]:
    """Asserts that index and payloads of a shard are what Python's tarfile finds; answers with the index."""
    with SourceFile(str(path)) as source, tarfile.open(path, ignore_zeros=True) as archive:
        members = list(TarSource(source).members())
        theirs = archive.getmembers()
        assert [m.member for m in members] == [escaped(t.name) for t in theirs]
        assert [m.ordinal for m in members] == list(range(len(theirs)))
        packed = path.suffix in (".gz", ".tgz")
        for mine, their in zip(members, theirs, strict=True):
            assert (
                mine.member_type in ("file", "sparse")
                if their.isreg()
                else ("hardlink", "symlink", "directory", "device")
            )
            if their.isreg():
                assert mine.byte_size == their.size
                sparse = their.sparse is not None
                assert mine.byte_offset == (None if packed or sparse else their.offset_data)
        payloads = {m.ordinal: content for m, content in TarSource(source).payloads(wanted=lambda _: True)}
        for number, their in enumerate(theirs):
            if their.isreg() or their.islnk():
                file = archive.extractfile(their)
                assert file is not None
                assert payloads.pop(number) == file.read()
        assert payloads == {}
    return members


# -- archives of real tools
@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that a file system can hold."""
    root = tmp_path_factory.mktemp("tree")
    rng = random.Random(7)
    (root / "a.jpg").write_bytes(rng.randbytes(3000))
    (root / "b.txt").write_text("hi")
    (root / "empty.txt").write_text("")
    os.link(root / "a.jpg", root / "c.jpg")
    (root / "l.txt").symlink_to("b.txt")
    (root / "sub").mkdir()
    (root / "sub" / ("n" * 150 + ".json")).write_text("{}")
    (root / ("x" * 220 + ".png")).write_bytes(b"p" * 513)
    (root / "caf\u00e9.txt").write_text("x")
    with open(os.path.join(os.fsencode(root), b"bad\xff.txt"), "wb") as file:
        file.write(b"bad name")
    with open(root / "holes.bin", "wb") as file:
        for k in range(60):
            file.seek(k * 65536)
            file.write(rng.randbytes(4096))
        file.truncate(70 * 65536)
    with open(root / "hole.bin", "wb") as file:
        file.truncate(1 << 20)
    os.mkfifo(root / "pipe")
    return root


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar on this machine")
@pytest.mark.parametrize("options", [[], ["-S"], ["-b", "1"]], ids=["whole", "sparse", "unblocked"])
@pytest.mark.parametrize("form", ["gnu", "oldgnu", "posix", "ustar", "v7"])
def test_gnu_tar(tree: Path, tmp_path: Path, form: str, options: list[str]) -> None:
    """Every format of GNU tar, sparse members and hard links included, is indexed as tarfile indexes it."""
    path = tmp_path / "shard.tar"
    done = subprocess.run(["tar", f"--format={form}", *options, "-cf", path, "."], cwd=tree, capture_output=True)
    if not path.exists() or b"usage" in done.stderr:
        pytest.skip("not GNU tar, or a format that holds no sparse files")
    members = compare_with_tarfile(path)
    kinds = {m.member_type for m in members}
    assert {"file", "hardlink", "symlink", "directory"} <= kinds
    assert ("sparse" in kinds) == (options == ["-S"] and form not in ("ustar", "v7"))
    by_name = {m.member: m for m in members}
    pair = by_name["./a.jpg"], by_name["./c.jpg"]
    assert pair[0].byte_offset == pair[1].byte_offset
    assert {m.skip_reason for m in pair} == {None}
    assert "./bad\\xff.txt" in by_name


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar on this machine")
@pytest.mark.parametrize("version", ["0.0", "0.1", "1.0"])
def test_pax_sparse_versions(tree: Path, tmp_path: Path, version: str) -> None:
    """The three PAX encodings of sparse files give size and content that tarfile gives."""
    path = tmp_path / "shard.tar"
    command = ["tar", "--format=posix", f"--sparse-version={version}", "-S", "-cf", path, "."]
    if subprocess.run(command, cwd=tree, capture_output=True).returncode:
        pytest.skip("not GNU tar")
    sparse = [m for m in compare_with_tarfile(path) if m.member_type == "sparse"]
    assert {m.member for m in sparse} == {"./holes.bin", "./hole.bin"}
    assert all(m.byte_offset is None for m in sparse)


@pytest.mark.parametrize("fmt", FORMATS)
def test_python_tar_with_links_and_devices(tmp_path: Path, fmt: int) -> None:
    """All member types that tarfile writes are listed, with targets and reasons, and take the space they take."""
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w", format=fmt, pax_headers={"comment": "global"}) as archive:
        for kind, name, link in [
            (tarfile.DIRTYPE, "d/", ""),
            (tarfile.REGTYPE, "d/x.jpg", ""),
            (tarfile.LNKTYPE, "d/y.jpg", "d/x.jpg"),
            (tarfile.LNKTYPE, "d/z.jpg", "nowhere.jpg"),
            (tarfile.SYMTYPE, "d/s.jpg", "/etc/passwd"),
            (tarfile.CHRTYPE, "null", ""),
            (tarfile.FIFOTYPE, "pipe", ""),
            (tarfile.CONTTYPE, "c.txt", ""),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            content = b"abc" if kind in (tarfile.REGTYPE, tarfile.CONTTYPE) else b""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    members = [*TarSource(SourceFile(str(path))).members()]
    assert [(m.member_type, m.skip_reason, m.link_target) for m in members] == [
        ("directory", "directory", None),
        ("file", None, None),
        ("hardlink", None, "d/x.jpg"),
        ("hardlink", "link outside", "nowhere.jpg"),
        ("symlink", "symbolic link", "/etc/passwd"),
        ("device", "device", None),
        ("device", "device", None),
        ("file", None, None),
    ]
    assert members[2].byte_offset == members[1].byte_offset
    assert members[2].byte_size == 3


def test_shared_corpora(shared_data: Path) -> None:
    """Every shard of the sample corpora is indexed as tarfile indexes it."""
    paths = sorted(p for p in shared_data.glob("*/*") if p.suffix in (".tar", ".tgz"))
    assert len(paths) > 10
    for path in paths:
        compare_with_tarfile(path)


def test_demo_shards(demo_shards: Path) -> None:
    """The shards that ship with the project are indexed as tarfile indexes them."""
    for path in demo_shards.glob("*.tar"):
        assert compare_with_tarfile(path)


def test_sizes_beyond_octal() -> None:
    """A size in base 256 counts; a shard that ends before it is reported as truncated, not read."""
    content = build([("big.bin", b"")], tarfile.GNU_FORMAT)
    info = tarfile.TarInfo("big.bin")
    info.size = 9 << 30
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(ShardError, match=str((9 << 30) + 512)) as caught:
        found_in(header + content[512:])
    assert caught.value.byte_offset == 0


def test_signed_checksums_and_star_prefixes() -> None:
    """Headers of old tools, with a checksum over signed bytes, are headers."""
    block = bytearray(build([("\u00e9\u00e9.txt", b"")], tarfile.USTAR_FORMAT)[:512])
    block[148:156] = b" " * 8
    signed = sum(struct.unpack("512b", block))
    block[148:156] = b"%06o\0 " % signed
    assert [m.member for m in found_in(bytes(block))] == ["éé.txt"]


def test_hard_link_with_data() -> None:
    """A hard link that carries its data, as POSIX allows, is a member with that data."""
    first = build([("a.txt", b"abc"), ("b.txt", b"abc")], tarfile.USTAR_FORMAT)
    block = bytearray(first[1024:1536])
    block[156:157], block[157:162] = b"1", b"a.txt"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    content = first[:1024] + bytes(block) + first[1536:]
    assert [(m.member, m.byte_offset, m.byte_size) for m in found_in(content)] == [
        ("a.txt", 512, 3),
        ("b.txt", 1536, 3),
    ]


def test_ends_of_archives() -> None:
    """No end blocks, one, many, a second archive after them, and other bytes after them are all distinguished."""
    body = build([("a.txt", b"a")])[:1024]
    for tail in (b"", bytes(512), bytes(10240), bytes(100)):
        assert [m.member for m in found_in(body + tail)] == ["a.txt"]
    assert [m.member for m in found_in(body[:513])] == ["a.txt"]  # the fill of the last block is missing
    second = build([("b.txt", b"b")])
    assert [m.member for m in found_in(body + bytes(1024) + second)] == ["a.txt", "b.txt"]
    odd = found_in(body + bytes(1024) + b"garbage")
    assert [(m.skip_reason, m.byte_offset, m.byte_size) for m in odd] == [(None, 512, 1), ("trailing bytes", 2048, 7)]
    with pytest.raises(ShardError, match="after zeros"):
        found_in(body + bytes(512) + b"\1" * 512)  # one zeroed header, then a payload


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"BZh91AY&SY" + bytes(600), "decompression failed"),
        (b"\xfd7zXZ\0" + bytes(600), "decompression failed"),
        (b"\1" * 600, "does not begin with a tar header"),
    ],
)
def test_what_is_not_a_shard(content: bytes, says: str) -> None:
    """Empty files, other archives and web pages are refused by name at byte 0, and the message says why."""
    with pytest.raises(ShardError, match=says) as caught:
        found_in(content)
    assert caught.value.byte_offset == 0
    assert "memory.tar" in str(caught.value)


# -- names
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("x.jpg", ("x", "", "jpg")),
        ("x.state.npy", ("x", "state", "npy")),
        ("a.b/x.y.z.JPG", ("a.b/x", "y.z", "jpg")),
        ("./x.json", ("x", "", "json")),
        ("/abs/x.json", ("/abs/x", "", "json")),
        ("../x.json", ("../x", "", "json")),
        ("README", ("README", "", "")),
        ("d.e/README", ("d.e/README", "", "")),
        ("x.", ("x", "", "")),
        ("x..jpg", ("x", "", "jpg")),
        ("d/.hidden.jpg", ("d/", "hidden", "jpg")),
        ("", ("", "", "")),
    ],
)
def test_split_member_name(name: str, parts: tuple[str, str, str]) -> None:
    """Names are split into key, role and extension where the design says."""
    assert split_member_name(name) == parts


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a/._x.jpg", "resource fork"),
        ("__MACOSX/a/x.jpg", "resource fork"),
        ("a/.DS_Store", "system file"),
        ("a/.x.jpg", "hidden file"),
        ("../../etc/passwd", None),
        ("/etc/passwd", None),
        ("a b.jpg", None),
    ],
)
def test_skipped_names(name: str, reason: str | None) -> None:
    """Hidden files and resource forks are listed with a reason; names that point elsewhere are just names."""
    (member,) = found_in(build([(name, b"x")]))
    assert member.skip_reason == reason


@settings(deadline=None, max_examples=300)
@given(one=st.binary(max_size=12), other=st.binary(max_size=12))
def test_names_stay_distinct_text(one: bytes, other: bytes) -> None:
    """Any bytes become text that Arrow holds, and no two names become one."""
    assert pa.array([escape_name(one)], pa.string())[0].as_py() == escape_name(one)
    assert (escape_name(one) == escape_name(other)) == (one == other)


def test_escapes_that_look_alike() -> None:
    """A name that already looks like an escape is escaped itself; other backslashes stay."""
    assert escape_name(b"a\\b.jpg") == "a\\b.jpg"
    assert escape_name(b"a\xff") == "a\\xff"
    assert escape_name(b"a\\xff") == "a\\\\xff"
    assert escape_name("日本.jpg".encode()) == "日本.jpg"


# -- what is read
@pytest.mark.parametrize("fmt", FORMATS)
def test_large_payloads_are_not_read(fmt: int) -> None:
    """Among large members only headers are read, a few hundred bytes each, none twice."""
    names = [("n" * 120 if fmt == tarfile.PAX_FORMAT else "n") + f"{k}.jpg" for k in range(30)]
    source = MemorySource(build([(name, bytes(200_000)) for name in names], fmt))
    assert len(list(TarSource(source).members())) == 30
    assert sum(size for _, size in source.reads) < 200_000
    assert len(source.reads) < 100


def test_small_members_share_reads() -> None:
    """A thousand small members take few requests."""
    source = MemorySource(build([(f"{k:04d}.cls", b"7") for k in range(1000)]))
    assert len(list(TarSource(source).members())) == 1000
    assert len(source.reads) < 40


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_compressed_shards(compressor: str) -> None:
    """A compressed shard, detected by its bytes, has the plain one's members and payloads, and no offsets."""
    rng = random.Random(1)
    files = [(f"{k}.bin", rng.randbytes(rng.randrange(5000))) for k in range(40)]
    plain = build(files)
    source = MemorySource(COMPRESSORS[compressor](plain))
    expected = [(m.member, m.byte_size) for m in found_in(plain)]
    assert [(m.member, m.byte_size) for m in TarSource(source).members()] == expected
    assert {m.byte_offset for m in TarSource(source).members()} == {None}
    assert [(m.member, c) for m, c in TarSource(source).payloads(wanted=lambda m: m.ordinal % 2 == 0)] == files[::2]


def test_hard_links_in_compressed_shards() -> None:
    """A wanted link gets its target's bytes, also where the target was not wanted."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        info = tarfile.TarInfo("a.jpg")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
        link = tarfile.TarInfo("b.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
        archive.addfile(link)
    for content in (target.getvalue(), gzip.compress(target.getvalue())):
        wanted = TarSource(MemorySource(content)).payloads(wanted=lambda m: m.member == "b.jpg")
        assert [(m.member, c) for m, c in wanted] == [("b.jpg", b"abc")]


def test_a_large_dictionary_of_xz_is_refused() -> None:
    """An xz stream that asks for more memory than the limit is an error, and not that much memory."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 29}]
    content = bytearray(lzma.compress(build([("a.txt", b"a")]), check=lzma.CHECK_NONE, filters=filters))
    with pytest.raises(ShardError, match="emory"):
        list(TarSource(MemorySource(bytes(content))).members())


def test_members_beyond_the_limit() -> None:
    """A member over the limit is an error of that member alone; the others are yielded."""
    content = build([("a.bin", b"a"), ("b.bin", bytes(5000)), ("c.bin", b"c")])
    errors: list[tuple[str, SourceError]] = []
    for shard in (content, gzip.compress(content)):
        found = TarSource(MemorySource(shard)).payloads(
            wanted=lambda _: True,
            max_bytes=4000,
            on_error=lambda m, e: errors.append((m.member, e)),
        )
        assert [m.member for m, _ in found] == ["a.bin", "c.bin"]
    assert [name for name, _ in errors] == ["b.bin", "b.bin"]
    with pytest.raises(SourceError, match="5000"):
        list(TarSource(MemorySource(content)).payloads(wanted=lambda _: True, max_bytes=4000))


def test_index_batches() -> None:
    """The index comes as batches of its schema, with required columns filled."""
    content = build([("a.jpg", b"1"), (".b", b"2")])
    (batch,) = index_members(TarSource(MemorySource(content)))
    assert batch.schema.equals(MEMBER_INDEX_SCHEMA)
    batch.validate(full=True)
    assert batch.column("skip_reason").to_pylist() == [None, "hidden file"]


class TestPlainTar(SourceSuite):
    """A plain tar keeps the promises of a source."""

    source = TarSource

    def make(self, files: Sequence[tuple[str, bytes]]) -> bytes:
        """The files as a tar."""
        return build(list(files))


class TestGzipTar(TestPlainTar):
    """A tar in gzip keeps the promises of a source."""

    def make(self, files: Sequence[tuple[str, bytes]]) -> bytes:
        """The files as a tar in gzip."""
        return gzip.compress(super().make(files))


class TestZstdTar(TestPlainTar):
    """A tar in zstd keeps the promises of a source."""

    def make(self, files: Sequence[tuple[str, bytes]]) -> bytes:
        """The files as a tar in zstd."""
        return zstandard.compress(super().make(files))


class TestBzip2Tar(TestPlainTar):
    """A tar in bzip2 keeps the promises of a source."""

    def make(self, files: Sequence[tuple[str, bytes]]) -> bytes:
        """The files as a tar in bzip2."""
        return bz2.compress(super().make(files))


class TestXzTar(TestPlainTar):
    """A tar in xz keeps the promises of a source."""

    def make(self, files: Sequence[tuple[str, bytes]]) -> bytes:
        """The files as a tar in xz."""
        return lzma.compress(super().make(files), preset=0)
