"""Damaged, truncated and hostile tar shards: an error with its place, or everything around the damage."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import random
import tarfile
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_assets.errors import ShardError
from mm_assets.sources.member import ShardDamage
from mm_assets.sources.tar import TarSource

from .tars import COMPRESSORS, FORMATS, Files, MemorySource, build, escaped, found_in, names


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


@pytest.mark.nightly_examples(10_000)
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
