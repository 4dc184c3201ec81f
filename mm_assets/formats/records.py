"""The byte layout of MULT and MSTR: record dtypes, limits, names' hashes, checksums and the bounds-checked slice.

Section numbers are those of docs/spec/format.md, which is normative; a test compares the two. Every dtype is packed and
little-endian, with its pads spelled out. Nothing here reads or writes a file.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from crc32c import crc32c as _crc32c

from mm_assets.errors import CorruptError, EncodeError, TruncatedError, UnsupportedVersionError

if sys.byteorder != "little":  # pragma: no cover - no such machine in CI
    # Single look-ups go through `memoryview.cast`, which knows native numbers only.
    raise ImportError("mm_assets.formats needs a little-endian machine")

Buffer: TypeAlias = bytes | bytearray | memoryview

MULT_MAGIC = b"MULT"
MSTR_MAGIC = b"MSTR"
TAIL_MAGIC = b"MMT1"
VERSION = 1

MAX_MODALITIES = 32  # MULT's presence mask is one uint32
MAX_SAMPLES = 2**32 - 1  # num_samples is uint32
MAX_SAMPLE_SIZE = 2**32 - 1  # MULT: sample_size is uint32
MAX_PAYLOAD_SIZE = 2**32 - 1  # MSTR: data_size is uint32, and so is a payload's size everywhere in the API
MAX_RECORD_SIZE = 65528  # metadata_size is uint16 in MULT's descriptor, and a multiple of 8
MAX_TYPE_ID = 2**16 - 1  # type_id is uint16

PAYLOAD_ALIGNMENT = 8  # samples, payloads and data start at its multiples
SECTION_ALIGNMENT = 64  # a cache line: MULT's first sample and all tail sections
PAGE = 4096  # MSTR's header page, its shadow, tables and data regions

# 2.1
MULT_HEADER = np.dtype([("magic", "S4"), ("version", "<u2"), ("num_samples", "<u4"), ("num_modalities", "u1")])
# 2.2
MULT_DESCRIPTOR = np.dtype([("name_hash", "<u4"), ("type_id", "<u2"), ("metadata_size", "<u2")])
# 2.3
MULT_INDEX_ENTRY = np.dtype([("sample_ptr", "<u8"), ("sample_size", "<u4"), ("crc32c", "<u4")])
# 3.1
MSTR_HEADER = np.dtype([("magic", "S4"), ("num_samples", "<u4"), ("num_streams", "u1")])
# 3.2
MSTR_DESCRIPTOR = np.dtype(
    [
        ("name_hash", "<u4"),
        ("type_id", "<u2"),
        ("_pad", "<u2"),
        ("metadata_ptr", "<u8"),
        ("metadata_size", "<u4"),
        ("_pad2", "<u4"),
        ("data_ptr", "<u8"),
        ("data_size", "<u8"),
    ]
)
# 3.3
MSTR_ROW_PREFIX = np.dtype([("data_ptr", "<u8"), ("data_size", "<u4"), ("crc32c", "<u4")])
ROW_PREFIX = struct.Struct("<QII")  # the same for one row
# 4.1
TRAILER = np.dtype(
    [
        ("table_ptr", "<u8"),
        ("table_size", "<u8"),
        ("table_crc32c", "<u4"),
        ("head_crc32c", "<u4"),
        ("version", "<u4"),
        ("magic", "S4"),
    ]
)
# 4.2
SECTION_TABLE_HEADER = np.dtype([("num_sections", "<u4"), ("_pad", "<u4")])
# 4.3
SECTION_ENTRY = np.dtype([("kind", "<u4"), ("crc32c", "<u4"), ("ptr", "<u8"), ("size", "<u8")])

SCHEMA_SECTION = 1
IDS_SECTION = 2
DIRECTORY_SECTION = 3
INDEX_SECTION = 4

MSTR_TRAILER_PTR = PAGE - TRAILER.itemsize  # 4064
MSTR_SHADOW_PTR = PAGE
MSTR_BODY_PTR = 2 * PAGE
HEAD_CRC_OFFSET = 20  # of head_crc32c within the trailer
FILL = bytes(PAYLOAD_ALIGNMENT)
_LONG = 4096  # bytes; the sum of shorter ones is done before another thread would have begun


def sample_header(num_modalities: int) -> np.dtype[np.void]:
    """The header of one MULT sample (2.4): mask, then an offset and a size per modality."""
    return np.dtype([("mask", "<u4"), ("offsets", "<u4", (num_modalities,)), ("sizes", "<u4", (num_modalities,))])


def mstr_row(record_size: int) -> np.dtype[np.void]:
    """One row of an MSTR metadata table (3.3): the stream prefix, then the field's metadata record."""
    return np.dtype(
        [*((name, MSTR_ROW_PREFIX[name]) for name in MSTR_ROW_PREFIX.names or ()), ("record", f"V{record_size}")]
    )


def align(position: int, alignment: int) -> int:
    """The first multiple of `alignment` that is not below `position`."""
    return -(-position // alignment) * alignment


def mult_body_ptr(num_modalities: int, num_samples: int) -> int:
    """Where MULT's first sample starts: after header, descriptors and index."""
    return align(mult_index_ptr(num_modalities) + MULT_INDEX_ENTRY.itemsize * num_samples, SECTION_ALIGNMENT)


def mult_index_ptr(num_modalities: int) -> int:
    """Where MULT's index starts, which is also the size of its checksummed head."""
    return MULT_HEADER.itemsize + MULT_DESCRIPTOR.itemsize * num_modalities


def name_hash(name: str) -> int:
    """CRC-32 (IEEE) of the UTF-8 name.

    Raises:
        UnicodeEncodeError: the name holds a lone surrogate.
    """
    return zlib.crc32(name.encode())


def crc32c(*buffers: Buffer, start: int = 0) -> int:
    """CRC-32C (Castagnoli) over the buffers, one after the other; `start` is the checksum of what came before."""
    value = start
    for buffer in buffers:
        # Without the interpreter's lock, except for what takes no longer than releasing the lock: what is read from a
        # mapping may have to come from the disk first, and other threads run meanwhile.
        value = _crc32c(buffer, value, len(buffer) >= _LONG)
    return value


def crc32c_each(buffers: Sequence[Buffer], starts: Iterable[int] = repeat(0)) -> list[int]:
    """Returns the CRC-32C of each buffer, continued from its start; for a batch faster than `crc32c` in a loop."""
    return list(map(_crc32c, buffers, starts, map(_LONG.__le__, map(len, buffers))))


def check_range(path: str, ptr: int, size: int, file_size: int, what: str) -> None:
    """Refuses a range that does not lie within the file. Python integers: nothing overflows.

    Raises:
        TruncatedError: the range ends after the file.
    """
    if ptr + size > file_size:
        found = f"{file_size} bytes"
        raise TruncatedError(path, f"{what} ends after the file", found=found, expected=f"at least {ptr + size}")


def take(view: memoryview, offset: int, size: int, *, path: str, what: str) -> memoryview:
    """`view[offset : offset + size]`, refused where a plain slice would be silently short.

    Raises:
        TruncatedError: the range ends after the view.
    """
    check_range(path, offset, size, len(view), what)
    return view[offset : offset + size]


class Payload(NamedTuple):
    """One encoded value of one modality.

    Attributes:
        metadata: the field's metadata record, exactly as many bytes as the modality declares.
        data: the bytes after it; may be empty.
    """

    metadata: Buffer
    data: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalitySpec:
    """What a container knows of one modality.

    Attributes:
        name: unique in the file; UTF-8 encodable, not empty.
        type_id: the field's number, 0..65535.
        metadata_size: bytes of the field's metadata record: a multiple of 8, 8..65528.
        type_name: the field's class, such as ``ImageField``; "" where it is not known.
        config: the field's configuration, JSON.
    """

    name: str
    type_id: int
    metadata_size: int
    type_name: str = ""
    config: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"modality {self.name!r}"
        try:
            name_hash(self.name)
        except UnicodeEncodeError as error:
            raise EncodeError(f"{where}: the name cannot be written as UTF-8 ({error.reason})") from error
        if not self.name:
            raise EncodeError("a modality's name is empty")
        if not 0 <= self.type_id <= MAX_TYPE_ID:
            raise EncodeError(f"{where}: type_id is {self.type_id}, expected 0..{MAX_TYPE_ID}")
        if not 8 <= self.metadata_size <= MAX_RECORD_SIZE or self.metadata_size % 8:
            found = f"metadata_size is {self.metadata_size}"
            raise EncodeError(f"{where}: {found}, expected a multiple of 8 from 8 to {MAX_RECORD_SIZE}")
        # Specs are shared between readers, writers and threads.
        object.__setattr__(self, "config", MappingProxyType(dict(self.config)))

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy does not pickle.
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return _rebuild_spec, ({**values, "config": dict(self.config)},)

    def __hash__(self) -> int:
        # The configuration may hold lists; equal specs have equal names.
        return hash((self.name, self.type_id, self.metadata_size))


def _rebuild_spec(values: dict[str, Any]) -> ModalitySpec:
    return ModalitySpec(**values)


class Descriptor(NamedTuple):
    """One modality as the head of a file describes it.

    Attributes:
        name_hash: CRC-32 of the name.
        type_id: the field's number.
        metadata_size: bytes of the field's metadata record.
    """

    name_hash: int
    type_id: int
    metadata_size: int


class Trailer(NamedTuple):
    """The 32 bytes that find the section table (4.1), without their magic."""

    table_ptr: int
    table_size: int
    table_crc32c: int
    head_crc32c: int
    version: int

    def to_bytes(self) -> bytes:
        """The trailer as it is in the file."""
        return np.array((*self, TAIL_MAGIC), TRAILER).tobytes()

    @classmethod
    def from_bytes(cls, data: Buffer) -> Trailer | None:
        """The trailer in these 32 bytes, or None if they hold none."""
        *fields, magic = np.frombuffer(data, TRAILER)[0].item()
        return cls(*fields) if magic == TAIL_MAGIC else None


def check_version(path: str, trailer: Trailer) -> None:
    """Refuses a tail of a later version.

    Raises:
        UnsupportedVersionError: it is not version 1.
    """
    if trailer.version != VERSION:
        raise UnsupportedVersionError(path, "the tail's version", found=trailer.version, expected=VERSION)


def checksum_error(
    path: str, what: str, *, found: int, expected: int, sample: int | None = None, modality: str | None = None
) -> CorruptError:
    """The error for bytes that do not have their checksum."""
    return CorruptError(
        path,
        f"{what} does not have its checksum",
        sample=sample,
        modality=modality,
        found=f"{found:#010x}",
        expected=f"{expected:#010x}",
    )
