"""Header blocks and sparse maps: numbers that no archive may state are refused, and rare forms are read."""

import re
import struct
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_assets.sources.tar_header import (
    HeaderError,
    old_gnu_sparse_runs,
    parse_header,
    parse_plain,
    pax_sparse_runs,
    sparse_runs,
)


def base_256(number: int, size: int = 12) -> bytes:
    """A numeric field as GNU tar writes large and negative numbers."""
    return (b"\xff" if number < 0 else b"\x80") + (number % 256 ** (size - 1)).to_bytes(size - 1, "big")


def header(name: str = "x", **fields: bytes) -> bytes:
    """A header block with a right checksum, with the bytes of some fields replaced."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT)[:512])
    places = {"size": 124, "magic": 257, "prefix": 345}
    for field, value in fields.items():
        block[places[field] : places[field] + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def sparse_block(real_size: bytes, *pairs: tuple[int, int]) -> bytes:
    """The fields of an old GNU sparse header that its map is read from."""
    block = bytearray(512)
    for number, (position, size) in enumerate(pairs):
        struct.pack_into("12s12s", block, 386 + 24 * number, base_256(position), base_256(size))
    block[483:495] = real_size
    return bytes(block)


def test_a_long_name_continues_its_prefix() -> None:
    """A POSIX header's prefix comes before the name; of star's, only what star does not use for times."""
    read = parse_header(header("c.txt", prefix=b"a/b"))
    assert read is not None
    assert read.name == b"a/b/c.txt"


@given(
    name=st.sampled_from(["a.jpg", "b/c.json", "d" * 100, "e" * 98, "é.png", "f/"]),
    fmt=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT]),
    changes=st.lists(
        st.tuples(
            st.one_of(st.integers(124, 135), st.integers(148, 157), st.integers(257, 264), st.integers(0, 511)),
            st.one_of(st.sampled_from(b"\0 0789_+\x80\xff"), st.integers(0, 255)),
        ),
        max_size=4,
    ),
    checksum=st.sampled_from([b"%06o\0 ", b"%06o \0", b"%07o\0", b" %06o\0", None]),
)
def test_a_plain_header_is_read_the_same_by_itself(
    name: str, fmt: int, changes: list[tuple[int, int]], checksum: bytes | None
) -> None:
    """What the reader of plain headers reads of damaged and odd ones, the full parser reads too."""
    block = bytearray(tarfile.TarInfo(name).tobuf(fmt)[:512])
    for place, byte in changes:
        block[place] = byte
    if checksum is not None:
        block[148:156] = b" " * 8
        block[148:156] = checksum % sum(block)
    plain = parse_plain(bytes(block))
    if plain is not None:
        full = parse_header(bytes(block))
        assert full is not None
        assert (full.name, full.size, full.type) == (*plain, b"0")
    else:
        assert changes or checksum in (b" %06o\0", b"%07o\0"), "nearly every header is plain"


@pytest.mark.parametrize("size", [-1, 2**63, 256**10])
def test_a_size_that_no_file_has_is_refused(size: int) -> None:
    """Base 256 can state negative and huge sizes; neither is one."""
    with pytest.raises(HeaderError, match=re.escape(f"its size is {size}, expected 0 to")):
        parse_header(header(size=base_256(size)))


@pytest.mark.parametrize(
    ("numbers", "stored", "expected"),
    [
        ([0, 5, 9], 5, "half a pair"),
        ([0, 5, 4, 2], 7, "a run of 2 bytes at 4 in a file of 10"),
        ([8, 5], 5, "a run of 5 bytes at 8 in a file of 10"),
        ([0, 5], 6, "covers 5 bytes, the member stores 6"),
    ],
)
def test_a_sparse_map_that_contradicts_itself_is_refused(numbers: list[int], stored: int, expected: str) -> None:
    """Runs are in order, within the file, and together as long as what is stored."""
    with pytest.raises(HeaderError, match=expected):
        sparse_runs(numbers, 10, stored)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (sparse_block(base_256(-1)), "its real size is -1"),
        (sparse_block(base_256(10), (-4, 4)), "has the pair"),
        (sparse_block(base_256(10), (0, 2**63)), "has the pair"),
    ],
)
def test_numbers_of_an_old_sparse_map_are_checked(block: bytes, expected: str) -> None:
    """Positions and sizes of GNU's first sparse format are neither negative nor larger than a file can be."""
    with pytest.raises(HeaderError, match=expected):
        old_gnu_sparse_runs(block, [], 4)
    assert old_gnu_sparse_runs(sparse_block(base_256(10), (6, 4)), [], 4) == (10, [(6, 4)])


def test_columns_of_a_sparse_map_are_of_one_length() -> None:
    """Positions without sizes are not runs; PAX writes the two apart."""
    records = {b"GNU.sparse.size": b"10", b"GNU.sparse.offset": b"0,6", b"GNU.sparse.numbytes": b"2,4"}
    assert pax_sparse_runs(records, 6) == (10, [(0, 2), (6, 4)])
    with pytest.raises(HeaderError, match="half a pair"):
        pax_sparse_runs(records | {b"GNU.sparse.numbytes": b"2"}, 2)
