"""Whatever bytes arrive, opening and reading them works or raises `FormatError`: at every position of small files."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path

import pytest
from hypothesis import settings

from mm_assets.errors import FormatError, SchemaMismatchError
from mm_assets.formats import ModalitySpec, MstrWriter, MultWriter, Payload, VerifyReport, open_reader

from .examples import MemorySource, Writer, sections_of, without_tail, write

pytestmark = pytest.mark.fuzz
STRIDE = 61 if settings().max_examples <= 100 else 1  # within long runs of zeros, by the profile

SPECS = (
    ModalitySpec(name="i", type_id=10, metadata_size=8, type_name="ImageField", config={"q": 9}),
    ModalitySpec(name="t", type_id=2, metadata_size=8),
)
SAMPLES = [
    ("a", {"i": Payload(b"metadata", b"pixels"), "t": Payload(b"12345678", b"text")}),
    ("bc", {"t": Payload(b"abcdefgh", b"")}),
    ("d", {}),
]


def read_everything(data: bytes, *, tailless: bool = False, verify_only: bool = False) -> VerifyReport | None:
    """Opens the bytes and asks everything; None if they are refused at open. Anything but our errors passes through."""
    allowed = (FormatError, SchemaMismatchError) if tailless else FormatError
    try:
        reader = open_reader(MemorySource(data), modalities=SPECS if tailless else None)
    except allowed:
        return None
    if verify_only:
        return reader.verify()
    count = len(reader)
    calls = [lambda: list(reader.sample_ids), lambda: reader.sample_ids.find("d")]
    calls += [lambda i=i: reader.read_sample(i) for i in range(count)]
    for name in reader.names:
        for method in (reader.presence, reader.sizes, reader.checksums, reader.records):
            calls.append(lambda method=method, name=name: method(name))
        calls.append(lambda name=name: reader.read_samples(range(count), [name])[name])
    for call in calls:
        with contextlib.suppress(FormatError):
            call()
    return reader.verify()


@pytest.fixture(scope="module", params=[MultWriter, MstrWriter])
def writer(request: pytest.FixtureRequest) -> Writer:
    return request.param


@pytest.fixture(scope="module")
def data(writer: Writer, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(writer, tmp_path_factory.mktemp("small") / "x", SAMPLES, SPECS, provenance=None).read_bytes()


def positions(data: bytes) -> list[int]:
    """Every position, but of long runs of zeros (MSTR's fill) every `STRIDE`: 4095 equal bytes are one case."""
    run, result = 0, []
    for position, byte in enumerate(data):
        run = 0 if byte else run + 1
        if run < 64 or run % STRIDE == 0 or any(data[position + 1 : position + 17]):
            result.append(position)
    return result


def covered(data: bytes) -> set[int]:
    """The positions whose bytes a checksum covers, or that must be zero."""
    sections = sections_of(data)
    result = {at for ptr, size in sections.values() for at in range(ptr, ptr + size)}
    if data[:4] == b"MULT":
        table_ptr, table_size = struct.unpack_from("<QQ", data, len(data) - 32)
        result |= (
            set(range(11 + 16)) | set(range(table_ptr, table_ptr + table_size)) | set(range(len(data) - 32, len(data)))
        )
        for k in range(len(SAMPLES)):
            ptr, size = struct.unpack_from("<QI", data, 27 + 16 * k)
            result |= set(range(ptr, ptr + size))
        return result
    table_ptr, table_size = struct.unpack_from("<QQ", data, 4064)
    result |= set(range(8192)) | set(range(table_ptr, table_ptr + table_size))
    for k in range(len(SPECS)):
        ptr, stride = struct.unpack_from("<QI", data, 9 + 40 * k + 8)
        for row in range(len(SAMPLES)):
            at = ptr + stride * row
            start, size = struct.unpack_from("<QI", data, at)
            # The place of empty data does not matter, as long as it lies in the region.
            result |= set(range(at if size or not start else at + 8, at + stride)) | set(range(start, start + size))
    return result


def test_truncated(data: bytes) -> None:
    """Truncated at every length, a file is refused."""
    for size in range(len(data)):
        assert read_everything(data[:size]) is None, size


def test_flipped(data: bytes) -> None:
    """With one bit turned at every position a file is refused or read, and verify finds it wherever bytes matter."""
    must_be_found = covered(data)
    thorough = set(positions(data))
    missed = []
    for position in range(len(data)):
        for bit in range(8) if data[position] else (position % 8,):
            bent = bytearray(data)
            bent[position] ^= 1 << bit
            # In MSTR's long fill, verifying alone: it reads everything too.
            report = read_everything(bytes(bent), verify_only=position not in thorough)
            if position in must_be_found and report is not None and report.ok:
                missed.append((position, bit))
    assert missed == []


def test_inserted_and_removed(data: bytes) -> None:
    """With a byte inserted or removed at every position a file is refused or read."""
    for position in positions(data):
        read_everything(data[:position] + b"\x01" + data[position:])
        read_everything(data[:position] + data[position + 1 :])


def test_extended(data: bytes, writer: Writer) -> None:
    """Bytes after the end hide MULT's trailer, and are accepted by MSTR, where a stream may be under construction."""
    for size in range(1, 70):
        for fill in (b"\0", b"\xff"):
            report = read_everything(data + fill * size)
            if writer is MstrWriter:
                assert report is not None
                assert report.ok
            else:
                assert report is None


def test_overwritten(data: bytes) -> None:
    """Runs of extreme numbers, and random ones, over every aligned word and over random places, raise nothing else."""
    rng = random.Random(20)
    for position in positions(data):
        for value in (b"\xff" * 8, b"\xff\xff\xff\xff", b"\xff" * 7 + b"\x7f", bytes(8), rng.randbytes(4)):
            if position % 4 == rng.randrange(4):
                read_everything(data[:position] + value + data[position + len(value) :])


def test_without_tail(data: bytes) -> None:
    """The same of files without our tail, whose every number is unprotected."""
    bare = without_tail(data)
    assert read_everything(bare, tailless=True).ok
    rng = random.Random(21)
    for position in positions(bare):
        for bent in (
            bare[:position],
            bare[:position] + bytes([bare[position] ^ (1 << rng.randrange(8))]) + bare[position + 1 :],
            bare[:position] + b"\xff" * 4 + bare[position + 4 :],
            bare[:position] + b"\xff" * 8 + bare[position + 8 :],
        ):
            read_everything(bent, tailless=True)


def test_mapped_file_is_truncated(data: bytes, tmp_path: Path) -> None:
    """A mapped file that is shorter than its structures is refused at open, before a page beyond its end is touched."""
    path = tmp_path / "x"
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError):
            open_reader(path)
