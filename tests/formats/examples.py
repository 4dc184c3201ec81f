"""Small packed files for the tests of formats, and ways to bend them while keeping their checksums right."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import crc32c

from mm_assets.formats import (
    ByteSource,
    ModalitySpec,
    MstrReader,
    MstrWriter,
    MultReader,
    MultWriter,
    Payload,
)

Writer = type[MultWriter] | type[MstrWriter]
Reader = type[MultReader] | type[MstrReader]
Samples = Sequence[tuple[str, Mapping[str, Payload | None]]]

IMAGE = ModalitySpec(name="image", type_id=10, metadata_size=16, type_name="ImageField", config={"quality": 95})
TEXT = ModalitySpec(name="text", type_id=2, metadata_size=8, type_name="TextField")
SPECS = (IMAGE, TEXT)
PROVENANCE = {"dataset": "küche", "partition": "p-0"}

SAMPLES: Samples = (
    ("a", {"image": Payload(bytes(range(16)), b"\xff\xd8pixels"), "text": Payload(b"12345678", b"hello")}),
    ("b", {"image": None, "text": Payload(b"abcdefgh", b"")}),
    ("c", {}),
    ("ü-4", {"image": Payload(b"\x01" * 16, b"\x02" * 40)}),
)


def write(
    writer: Writer,
    path: Path,
    samples: Samples = SAMPLES,
    specs: Sequence[ModalitySpec] = SPECS,
    *,
    num_samples: int | None = None,
    provenance: Mapping[str, object] | None = PROVENANCE,
) -> Path:
    """Writes samples to `path`."""
    with writer(path, specs, num_samples=num_samples, provenance=provenance, fsync=False) as file:
        for sample_id, payloads in samples:
            file.write(sample_id, payloads)
    return path


def plain(payload: Payload | None) -> tuple[bytes, bytes] | None:
    """A payload as bytes, to compare."""
    return None if payload is None else (bytes(payload.metadata), bytes(payload.data))


class MemorySource:
    """A file in memory that copies every range, as a remote one does, and counts what is asked of it."""

    def __init__(self, data: bytes, name: str = "memory") -> None:
        self.data = data
        self.name = name
        self.size = len(data)
        self.requests: list[tuple[int, int]] = []
        self.closed = False

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of one range."""
        return self.view_many([(offset, size)])[0]

    def view_many(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each range."""
        self.requests += ranges
        for offset, size in ranges:
            # What readers promise: they never ask for what is not there.
            if not 0 <= offset <= offset + size <= self.size:
                raise AssertionError(f"asked for {size} bytes at {offset} of {self.size}")
        return [memoryview(self.data[offset : offset + size]) for offset, size in ranges]

    def close(self) -> None:
        """Notes that it was closed."""
        self.closed = True


def source_of(data: bytes) -> ByteSource:
    """The bytes as a source that is not mapped."""
    return MemorySource(data)


def sections_of(data: bytes) -> dict[int, tuple[int, int]]:
    """(ptr, size) of the sections, by kind."""
    at = 4064 if data[:4] == b"MSTR" else len(data) - 32
    table_ptr = struct.unpack_from("<Q", data, at)[0]
    count = struct.unpack_from("<I", data, table_ptr)[0]
    entries = [struct.unpack_from("<IIQQ", data, table_ptr + 8 + 24 * k) for k in range(count)]
    return {kind: (ptr, size) for kind, _, ptr, size in entries}


def with_table(data: bytes, table: bytes, *, version: int = 1, table_ptr: int | None = None) -> bytes:
    """The file with another section table, its checksums right."""
    is_mstr = data[:4] == b"MSTR"
    bent = bytearray(data)
    bent += bytes(-len(bent) % 64)
    ptr = len(bent) if table_ptr is None else table_ptr
    bent += table
    trailer = (
        struct.pack("<QQI", ptr, len(table), crc32c.crc32c(table)) + bytes(4) + struct.pack("<I4s", version, b"MMT1")
    )
    if not is_mstr:
        head_crc = struct.pack("<I", crc32c.crc32c(bytes(bent[: 11 + 8 * bent[10]])))
        return bytes(bent) + trailer[:20] + head_crc + trailer[24:]
    bent[4064:4096] = trailer
    return sealed(bytes(bent))


def sealed(data: bytes) -> bytes:
    """An MSTR file whose header page was changed, with the page's checksum and the shadow made right."""
    page = bytearray(data[:4096])
    page[4084:4088] = bytes(4)
    page[4084:4088] = struct.pack("<I", crc32c.crc32c(bytes(page)))
    return bytes(page) * 2 + data[8192:]


def table_of(entries: Sequence[tuple[int, int, int, int]], count: int | None = None) -> bytes:
    """A section table of (kind, crc32c, ptr, size)."""
    body = b"".join(struct.pack("<IIQQ", *entry) for entry in entries)
    return struct.pack("<II", len(entries) if count is None else count, 0) + body


def with_section(data: bytes, kind: int, content: bytes | None) -> bytes:
    """The file with one section replaced, or with None removed from the table; all checksums right."""
    sections = sections_of(data)
    sections.pop(kind, None)
    bent = data if content is None else data + bytes(-len(data) % 64) + content
    entries = [(k, crc32c.crc32c(data[p : p + n]), p, n) for k, (p, n) in sections.items()]
    if content is not None:
        entries.append((kind, crc32c.crc32c(content), len(bent) - len(content), len(content)))
    return with_table(bent, table_of(sorted(entries)))


def without_tail(data: bytes) -> bytes:
    """The file as a writer that knows nothing of tail and checksums would have left it."""
    bent = bytearray(data)
    if data[:4] == b"MULT":
        count, num_samples = bent[10], struct.unpack_from("<I", data, 6)[0]
        index = 11 + 8 * count
        end = index + 16 * num_samples
        for k in range(num_samples):
            ptr, size = struct.unpack_from("<QI", data, index + 16 * k)
            bent[index + 16 * k + 12 : index + 16 * k + 16] = bytes(4)
            end = max(end, ptr + size)
        return bytes(bent[:end])
    bent[4064:4096] = bytes(32)
    bent[8160:8192] = bytes(32)
    streams = [struct.unpack_from("<QQ", data, 9 + 40 * k + 24) for k in range(bent[8])]
    end = max(ptr + size for ptr, size in streams)
    return bytes(bent[:end])
