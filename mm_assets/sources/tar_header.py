"""One 512-byte tar header at a time: its fields, its extended records, its sparse map.

Nothing here reads files. Every number is checked before it is used; errors are a `HeaderError` with a clause that says
what was found, and the caller adds the place. Formats: V7, ustar, GNU (long names, sparse, base-256 numbers) and PAX
(extended and global records, the three sparse encodings).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from zlib import adler32

import numpy as np

__all__ = [
    "BLOCK",
    "MAX_EXTENDED",
    "MAX_SPARSE_RUNS",
    "Header",
    "HeaderError",
    "PaxRecords",
    "find_header",
    "old_gnu_sparse_runs",
    "parse_header",
    "parse_pax",
    "parse_plain",
    "pax_number",
    "pax_sparse_runs",
    "sparse_runs",
    "terminated",
    "whole_blocks",
]

BLOCK = 512
MAX_EXTENDED = 1 << 20  # bytes of one extended header; tools write a few hundred, and it is held in memory
MAX_SPARSE_RUNS = 1 << 18  # data runs of one sparse member; its map is held in memory
MAX_SIZE = 2**62  # sums of two sizes stay inside int64

_ZEROS = bytes(BLOCK)
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*", re.DOTALL)
_PLAIN = struct.Struct("100s24x12s12x8sc100x6s82x1s166x")  # name, size, checksum, type, magic, start of the prefix
_NUL, _PLAIN_TYPE, _POSIX = b"\0", b"0", b"ustar\0"
_DECIMAL = re.compile(rb"[0-9]{1,19}")

PaxRecords = dict[bytes, bytes]
Runs = list[tuple[int, int]]


class HeaderError(ValueError):
    """A header or its extension is not what a tar tool writes. Never leaves this package's tar modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The fields of a header block that are used.

    Attributes:
        name: path, with the ustar prefix, as bytes.
        type: type flag, one byte.
        size: bytes that the header announces.
        link: link target as bytes.
        long_name_field: the name field is full, so that a longer name may be in an extended header.
        pax: the block is of the POSIX kind, where a hard link may carry data.
    """

    name: bytes
    type: bytes
    size: int
    link: bytes
    long_name_field: bool
    pax: bool


def whole_blocks(size: int) -> int:
    """Bytes that `size` bytes take up in the archive."""
    return -(-size // BLOCK) * BLOCK


def _number(field: bytes, name: str) -> int:
    """A numeric field: octal digits, or base 256 after a first byte of 0x80 or 0xff."""
    first = field[0]
    if first in (0x80, 0xFF):
        value = int.from_bytes(field[1:], "big")
        if first == 0xFF:
            value -= 256 ** (len(field) - 1)
        return value
    match = _OCTAL.match(field)
    if match is None or match.end() != len(field):
        # Some tools leave bytes after the terminator; what is before it counts.
        head = field.split(b"\0", 1)[0].strip()
        if not head or head.strip(b"01234567"):
            raise HeaderError(f"its {name} field holds {field!r}, expected octal digits")
        return int(head, 8)
    return int(match[1] or b"0", 8)


def terminated(field: bytes) -> bytes:
    """The text of a field, which ends at its first zero byte."""
    return field.split(b"\0", 1)[0]


def parse_header(block: bytes) -> Header | None:
    """Reads one header block of 512 bytes; returns None for a block of zeros, which ends an archive.

    Raises:
        HeaderError: the checksum does not hold, or a number field holds something else.
    """
    if block == _ZEROS:
        return None
    stated = _number(block[148:156], "checksum")
    total = _sum(block) - sum(block[148:156]) + 256
    if stated != total:
        # Some old tools added the bytes up as signed numbers.
        signed = total - 256 * (sum(b > 127 for b in block) - sum(b > 127 for b in block[148:156]))
        if stated != signed:
            raise HeaderError(f"no tar header (checksum found {stated}, expected {total})")
    size = _number(block[124:136], "size")
    if not 0 <= size <= MAX_SIZE:
        raise HeaderError(f"its size is {size}, expected 0 to {MAX_SIZE}")
    name_field = block[:100]
    name = terminated(name_field)
    posix = block[257:263] == _POSIX
    kind = block[156:157]
    if posix:
        # star keeps access and change times in the last bytes of the prefix, and marks it.
        prefix = terminated(block[345 : 476 if block[508:512] == b"tar\0" else 500])
        if prefix:
            name = prefix + b"/" + name
    if kind == b"\0":
        kind = b"5" if name.endswith(b"/") else b"0"  # V7 knew directories by their slash
    return Header(
        name=name,
        type=kind,
        size=size,
        link=terminated(block[157:257]),
        long_name_field=name_field[98:99] != b"\0",
        pax=posix,
    )


def _sum(block: bytes) -> int:
    """The sum of the bytes of a header block: of 256 bytes Adler-32 has it, as one more in its lower half."""
    return (adler32(block[:256]) & 0xFFFF) + (adler32(block[256:]) & 0xFFFF) - 2


def parse_plain(block: bytes) -> tuple[bytes, int] | None:
    """Name and size of a header block of 512 bytes as nearly every one is: a file, in octal digits, without a prefix.

    None for every other block, which `parse_header` reads; it gives the same of those that this function reads.
    """
    name, size_field, stated, kind, magic, prefix = _PLAIN.unpack(block)
    digits = size_field[:11]
    if kind != _PLAIN_TYPE or not digits.isdigit() or not stated[:6].isdigit() or (magic == _POSIX and prefix != _NUL):
        return None
    if size_field[11] not in b"\0 " or stated[6] not in b"\0 " or stated[7] not in b"\0 ":
        return None
    try:
        if int(stated[:6], 8) != _sum(block) - sum(stated) + 256:
            return None
        size = int(digits, 8)
    except ValueError:  # a digit that is not octal
        return None
    end = name.find(_NUL)
    return name if end < 0 else name[:end], size


def find_header(chunk: bytes) -> int | None:
    """Position of the first block of `chunk` that is a header with a name, or None."""
    blocks = np.frombuffer(chunk, np.uint8, len(chunk) // BLOCK * BLOCK).reshape(-1, BLOCK)
    field = blocks[:, 148:156]
    digits = (field >= 0x30) & (field <= 0x37)
    # Payload bytes hardly ever pass this, so that the exact test in Python rarely runs.
    plausible = (digits | (field == 0x20) | (field == 0)).all(axis=1) & digits.any(axis=1)
    for row in np.flatnonzero(plausible).tolist():
        try:
            header = parse_header(chunk[row * BLOCK : (row + 1) * BLOCK])
        except HeaderError:
            continue
        if header is not None and header.name:
            return int(row) * BLOCK
    return None


def parse_pax(data: bytes) -> PaxRecords:
    """The records of an extended header, ``length key=value newline``; repeated keys, as GNU sparse maps have, joined.

    Raises:
        HeaderError: a record's length does not fit.
    """
    records: PaxRecords = {}
    at = 0
    while at < len(data) and data[at] != 0:
        space = data.find(b" ", at, at + 20)
        digits = data[at:space] if space > at else b""
        if not _DECIMAL.fullmatch(digits):
            raise HeaderError(f"its extended record starts with {data[at : at + 16]!r}, expected a length")
        end = at + int(digits)
        if end > len(data) or end <= space + 1 or data[end - 1] != 0x0A:
            raise HeaderError(f"its extended record states {int(digits)} bytes, which does not end in a new line")
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not equals or not key:
            raise HeaderError("its extended record has no key")
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes") and key in records:
            value = records[key] + b"," + value
        records[key] = value
        at = end
    return records


def pax_number(value: bytes, name: str) -> int:
    """A whole number of an extended record.

    Raises:
        HeaderError: the value is not a number, or is too large.
    """
    if not _DECIMAL.fullmatch(value) or int(value) > MAX_SIZE:
        raise HeaderError(f"its {name} is {value[:24]!r}, expected a whole number up to {MAX_SIZE}")
    return int(value)


def sparse_runs(numbers: list[int], real_size: int, stored_size: int) -> Runs:
    """The data runs of a sparse map: pairs of (position, size) in order, which do not overlap.

    Args:
        numbers: the numbers of the map, one pair after the other.
        real_size: bytes of the file.
        stored_size: bytes that the archive holds of it, all of them in the runs.

    Raises:
        HeaderError: the map contradicts itself.
    """
    if len(numbers) % 2:
        raise HeaderError("its sparse map holds half a pair")
    if len(numbers) // 2 > MAX_SPARSE_RUNS:
        raise HeaderError(f"its sparse map holds {len(numbers) // 2} runs, expected at most {MAX_SPARSE_RUNS}")
    runs = [(numbers[i], numbers[i + 1]) for i in range(0, len(numbers), 2)]
    runs = [run for run in runs if run[1]]  # a closing run of no bytes marks a hole at the end
    last = stored = 0
    for position, size in runs:
        if position < last or position + size > real_size:
            raise HeaderError(f"its sparse map has a run of {size} bytes at {position} in a file of {real_size}")
        last = position + size
        stored += size
    if stored != stored_size:
        raise HeaderError(f"its sparse map covers {stored} bytes, the member stores {stored_size}")
    return runs


def _old_gnu_numbers(block: bytes, at: int, count: int) -> list[int]:
    numbers: list[int] = []
    for i in range(count):
        entry = block[at + 24 * i : at + 24 * (i + 1)]
        if entry[:1] == b"\0" and entry[12:13] == b"\0":
            break
        pair = [_number(entry[:12], "sparse map"), _number(entry[12:], "sparse map")]
        if min(pair) < 0 or max(pair) > MAX_SIZE:
            raise HeaderError(f"its sparse map has the pair {pair}")
        numbers += pair
    return numbers


def old_gnu_sparse_runs(block: bytes, extensions: list[bytes], stored_size: int) -> tuple[int, Runs]:
    """Real size and data runs of an old GNU sparse member.

    Args:
        block: its header block, type ``S``.
        extensions: the extension blocks that follow it.
        stored_size: bytes that the archive holds.

    Raises:
        HeaderError: the map contradicts itself.
    """
    real_size = _number(block[483:495], "real size")
    if not 0 <= real_size <= MAX_SIZE:
        raise HeaderError(f"its real size is {real_size}")
    numbers = _old_gnu_numbers(block, 386, 4)
    for extension in extensions:
        numbers += _old_gnu_numbers(extension, 0, 21)
    return real_size, sparse_runs(numbers, real_size, stored_size)


def pax_sparse_runs(records: PaxRecords, stored_size: int) -> tuple[int, Runs] | None:
    """Real size and data runs out of PAX sparse records 0.0 or 0.1, or None where the map is in the data (1.0).

    Raises:
        HeaderError: the map contradicts itself.
    """
    if b"GNU.sparse.major" in records:
        version = records[b"GNU.sparse.major"], records.get(b"GNU.sparse.minor", b"")
        if version != (b"1", b"0"):
            raise HeaderError(f"its sparse map is of version {version}, expected 1.0")
        return None
    real_size = pax_number(records.get(b"GNU.sparse.size", records.get(b"GNU.sparse.realsize", b"")), "real size")
    if b"GNU.sparse.map" in records:
        parts = records[b"GNU.sparse.map"].split(b",") if records[b"GNU.sparse.map"] else []
        numbers = [pax_number(part, "sparse map") for part in parts]
    else:
        columns = [records.get(key, b"").split(b",") for key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes")]
        if len(columns[0]) != len(columns[1]):
            raise HeaderError("its sparse map holds half a pair")
        pairs = zip(*columns, strict=True) if columns[0] != [b""] else ()
        numbers = [pax_number(part, "sparse map") for pair in pairs for part in pair]
    return real_size, sparse_runs(numbers, real_size, stored_size)
