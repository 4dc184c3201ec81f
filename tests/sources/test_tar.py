"""Tests of the member index: archives of every tool, damage, and what is read of a shard."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import random
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_assets.errors import ShardError, SourceError
from mm_assets.sources.base import index_members
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA, Member, ShardDamage, escape_name, split_member_name
from mm_assets.sources.tar import TarSource
from mm_assets.storage.files import SourceFile
from mm_assets.testing import SourceSuite

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


class MemorySource:
    """A shard in memory that remembers what was read of it."""

    url = "memory.tar"

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.size = len(content)
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, size: int) -> bytes:
        """One range, which must lie inside."""
        assert offset >= 0
        assert size >= 0
        assert offset + size <= self.size
        self.reads.append((offset, size))
        return self.content[offset : offset + size]

    def stream(self) -> BinaryIO:
        """The whole shard."""
        return io.BytesIO(self.content)


Files = list[tuple[str, bytes]]


def build(files: Files, fmt: int = tarfile.PAX_FORMAT, **changes: object) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=fmt) as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in changes.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def found_in(content: bytes, **options: object) -> list[Member]:
    return list(TarSource(MemorySource(content)).members(**options))


def escaped(name: str) -> str:
    return escape_name(name.encode("utf-8", "surrogateescape"))


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


# -- compressed shards


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "two gzip members": lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]),
    "zstd": zstandard.compress,
    "two zstd frames": lambda data: zstandard.compress(data[:700]) + zstandard.compress(data[700:]),
    "bzip2": bz2.compress,
    "two bzip2 streams": lambda data: bz2.compress(data[:700]) + bz2.compress(data[700:]),
    "xz": lzma.compress,
    "two xz streams with padding": lambda data: lzma.compress(data[:700]) + bytes(8) + lzma.compress(data[700:]),
    "zstd with a checksum": zstandard.ZstdCompressor(write_checksum=True).compress,
    "zstd without its size": lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data),
    "zstd with a skippable frame": lambda data: b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstandard.compress(data),
}


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


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_damaged_compression(compress: Callable[[bytes], bytes]) -> None:
    """A shard truncated in its compressed stream fails, or gives the members before its end."""
    rng = random.Random(3)
    files = [(f"{k}.bin", rng.randbytes(4000)) for k in range(200)]
    cut = compress(build(files))[:500_000]
    with pytest.raises(ShardError):
        list(TarSource(MemorySource(cut)).members())
    damage: list[ShardDamage] = []
    members = list(TarSource(MemorySource(cut)).members(on_damaged_shard="salvage", damage=damage))
    assert len(damage) == 1
    assert 80 <= len([m for m in members if m.skip_reason is None]) <= 125
    assert members[-1].skip_reason is not None
    payloads = TarSource(MemorySource(cut)).payloads(wanted=lambda _: True, on_damaged_shard="salvage")
    assert all(content == dict(files)[m.member] for m, content in payloads)


def test_every_cut_of_a_compressed_shard_is_damage() -> None:
    """A compressed shard that is truncated at any byte fails; bytes after its end are damage too."""
    plain = build([(f"{k}.txt", bytes([65 + k]) * (300 * k)) for k in range(4)])
    for name, compress in COMPRESSORS.items():
        whole = compress(plain)
        for size in range(1, len(whole)):
            source = TarSource(MemorySource(whole[:size]))
            with contextlib.suppress(ShardError):
                list(source.members())
                assert name.startswith("two"), (name, size)  # truncated between two whole streams
                assert source.missing_end is not None, (name, size)
        with pytest.raises(ShardError):
            list(TarSource(MemorySource(whole + b"garbage")).members())


def test_every_cut_of_a_plain_tar_is_damage_or_noted() -> None:
    """A tar that is truncated before its two blocks of zeros fails, or says that its end is missing."""
    plain = build([(f"{k}.txt", bytes([65 + k]) * (300 * k)) for k in range(4)])
    end = len(plain.rstrip(b"\0")) // 512 * 512 + 512
    for size in (*range(1, end + 1024, 7), end, end + 512, end + 1023):
        source = TarSource(MemorySource(plain[:size]))
        with contextlib.suppress(ShardError):
            list(source.members())
            assert source.missing_end is not None, size
    source = TarSource(MemorySource(plain[: end + 1024]))
    assert len(list(source.members())) == 4
    assert source.missing_end is None


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


# -- damage


def test_salvage_yields_both_sides() -> None:
    """Salvaging yields every member before and after a damaged header, and lists the bytes between."""
    content = bytearray(build([(f"{k}.bin", bytes([65 + k]) * 3000) for k in range(6)]))
    header = 2 * (512 + 3072)
    content[header : header + 512] = os.urandom(511) + b"\1"
    with pytest.raises(ShardError) as caught:
        found_in(bytes(content))
    assert caught.value.byte_offset == header
    damage: list[ShardDamage] = []
    members = found_in(bytes(content), on_damaged_shard="salvage", damage=damage)
    assert [m.member for m in members if m.skip_reason is None] == ["0.bin", "1.bin", "3.bin", "4.bin", "5.bin"]
    assert [(d.byte_offset, d.byte_size) for d in damage] == [(header, 512 + 3072)]
    (lost,) = [m for m in members if m.skip_reason is not None]
    assert (lost.byte_offset, lost.byte_size, lost.member_type) == (header, 3584, "other")
    assert [m.ordinal for m in members] == list(range(6))


@pytest.mark.parametrize("fmt", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("at", [10, 520])
def test_salvage_takes_no_member_for_another(fmt: int, at: int) -> None:
    """When a long name is lost, its member is part of the damage and does not come under a shortened name."""
    content = bytearray(build([("a.txt", b"a"), ("n" * 150 + ".txt", b"b"), ("c.txt", b"c")], fmt))
    content[1024 + at : 1024 + at + 6] = b"\xff\xfe\xfd\xfc\xfb\xfa"
    members = found_in(bytes(content), on_damaged_shard="salvage")
    names = [m.member for m in members if m.skip_reason is None]
    # GNU long names have no checksum over their data: there the name itself is what is damaged.
    assert names in (["a.txt", "c.txt"], ["a.txt", names[1], "c.txt"])
    assert not any(name.startswith("nnn") and len(name) <= 100 for name in names)


def test_truncation_is_damage_at_every_length() -> None:
    """A shard cut anywhere gives the members that are whole, and says where the cut one starts."""
    files = [(f"{k}.bin", bytes([k + 1]) * 700) for k in range(3)]
    content = build(files)[: 3 * 1536]
    for length in range(1, len(content), 37):
        whole = [name for k, (name, _) in enumerate(files) if length >= k * 1536 + 512 + 700]
        cut = content[:length]
        inside = length % 1536 not in (0, *range(1212, 1536))
        salvaged = [m.member for m in found_in(cut, on_damaged_shard="salvage") if m.skip_reason is None]
        assert salvaged == whole
        if inside:
            with pytest.raises(ShardError) as caught:
                found_in(cut)
            assert caught.value.byte_offset == length // 1536 * 1536
        else:
            assert [m.member for m in found_in(cut)] == whole


names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=140).filter(
    lambda name: not name.endswith("/")
)


@settings(deadline=None, max_examples=80)
@given(
    files=st.lists(st.tuples(names, st.binary(max_size=1500)), max_size=8),
    fmt=st.sampled_from(FORMATS[1:]),
    pack=st.sampled_from([None, gzip.compress, zstandard.compress, bz2.compress, lzma.compress]),
)
def test_random_archives(files: Files, fmt: int, pack: Callable[[bytes], bytes] | None) -> None:
    """Any names and contents are found as they were written, plain or compressed."""
    content = build(files, fmt)
    source = MemorySource(content if pack is None else pack(content))
    payloads = [(m.member, payload) for m, payload in TarSource(source).payloads(wanted=lambda _: True)]
    assert payloads == [(escaped(name), data) for name, data in files]
    for member in TarSource(source).members():
        if pack is None:
            assert member.byte_offset is not None
            assert content[member.byte_offset : member.byte_offset + member.byte_size] == files[member.ordinal][1]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    rng = random.Random(draw(st.integers(0, 2**32)))
    files = [
        (("n" * 130 if rng.random() < 0.3 else "") + f"{k}.bin", rng.randbytes(rng.randrange(2000))) for k in range(5)
    ]
    content = bytearray(build(files, draw(st.sampled_from(FORMATS[1:]))))
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["flip", "zero", "cut", "insert", "splice"]))
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        if kind == "flip" and content:
            content[at] ^= draw(st.integers(1, 255))
        elif kind == "zero":
            content[at : at + draw(st.integers(1, 1500))] = bytes(min(512, len(content) - at))
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = rng.randbytes(rng.randrange(700))
        else:
            content[at : at + 512] = content[: min(512, len(content))]
    return bytes(content)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(content=damaged().filter(bool), pack=st.sampled_from([None, gzip.compress]))
def test_random_damage(content: bytes, pack: Callable[[bytes], bytes] | None) -> None:
    """Whatever happened to a shard, it is indexed or refused with an offset; salvaging ends and stays in bounds."""
    shard = content if pack is None else pack(content)
    offset: int | None = 0
    try:
        found_in(shard)
    except ShardError as error:
        offset = error.byte_offset
    assert offset is not None
    assert 0 <= offset <= len(content)
    damage: list[ShardDamage] = []
    members = found_in(shard, on_damaged_shard="salvage", damage=damage)
    assert [m.ordinal for m in members] == list(range(len(members)))
    for member in members:
        assert member.byte_size >= 0
        if member.byte_offset is not None:
            assert member.byte_offset + member.byte_size <= len(shard)
    for member, payload in TarSource(MemorySource(shard)).payloads(wanted=lambda _: True, on_damaged_shard="salvage"):
        assert len(payload) == member.byte_size


@settings(deadline=None, max_examples=150)
@given(content=st.binary(max_size=3000), head=st.sampled_from([b"", b"\x1f\x8b\x08\0", b"\x28\xb5\x2f\xfd"]))
def test_random_bytes(content: bytes, head: bytes) -> None:
    """Bytes that are not an archive raise `ShardError`, or give no member; salvaging them ends."""
    for policy in ("fail", "salvage"):
        with contextlib.suppress(ShardError):
            assert [m for m in found_in(head + content, on_damaged_shard=policy) if m.skip_reason is None] == []


def test_hostile_headers() -> None:
    """Extended headers that lie about their size, number or maps end the walk with an error, not the machine."""
    info = tarfile.TarInfo("x")
    info.type, info.size = b"x", 1 << 40
    with pytest.raises(ShardError, match="extended header"):
        found_in(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    for records in (b"5 a=b\n", b"999 path=x\n", b"x path=x\n", b"11 size=-1\n\n", b"13 size=1e9 \n"):
        info.size = len(records)
        shard = info.tobuf(tarfile.GNU_FORMAT) + records.ljust(512, b"\0") + build([("a", b"")])
        with pytest.raises(ShardError):
            found_in(shard)
    for pax in (
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "99"},
        {"GNU.sparse.major": "7", "GNU.sparse.minor": "0"},
        {"GNU.sparse.size": "10", "GNU.sparse.map": "0,99"},
        {"GNU.sparse.size": "10", "GNU.sparse.map": "0,4,2,1"},
        {"GNU.sparse.size": "10", "GNU.sparse.map": "1"},
        {"GNU.sparse.size": "99999999999999999999", "GNU.sparse.map": ""},
    ):
        with pytest.raises(ShardError):
            found_in(build([("a.bin", b"12345")], pax_headers=pax))


def test_endless_global_headers() -> None:
    """Thousands of global headers and empty archives in a row cost no recursion."""
    with_global = io.BytesIO()
    with tarfile.open(fileobj=with_global, mode="w", pax_headers={"comment": "x"}):
        pass
    block = with_global.getvalue()[:1024] + bytes(512)
    assert [m.member for m in found_in(block * 3000 + build([("a.txt", b"")]))] == ["a.txt"]


def test_unknown_policy() -> None:
    """A policy that does not exist is refused."""
    with pytest.raises(ValueError, match="salvage"):
        list(TarSource(MemorySource(build([]))).members(on_damaged_shard="ignore"))


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
