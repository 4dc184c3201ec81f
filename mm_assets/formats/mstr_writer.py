"""Writing MSTR (3): one metadata table and one data region per modality.

Memory: the metadata tables, 16 bytes and the record per sample and modality, and the ids. Data regions are spooled and
spliced; with `num_samples` the first one is written in place, because only tables of known size are before it.
`write_mstr` needs neither, since it knows all sizes from the MULT file of the same samples: it writes in order.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np

from mm_assets.errors import EncodeError
from mm_assets.formats.batch import Places
from mm_assets.formats.mult_writer import MultWriter
from mm_assets.formats.output import AtomicFile, JoinedFile, splice
from mm_assets.formats.records import (
    FILL,
    IDS_SECTION,
    MAX_PAYLOAD_SIZE,
    MSTR_BODY_PTR,
    MSTR_DESCRIPTOR,
    MSTR_HEADER,
    MSTR_MAGIC,
    MSTR_ROW_PREFIX,
    MSTR_TRAILER_PTR,
    PAGE,
    PAYLOAD_ALIGNMENT,
    ROW_PREFIX,
    SCHEMA_SECTION,
    Buffer,
    ModalitySpec,
    Payload,
    Trailer,
    align,
    crc32c,
    mstr_row,
    name_hash,
)
from mm_assets.formats.report import WriteSummary
from mm_assets.formats.tail import TailWriter, dump_schema
from mm_assets.formats.writer import PackedWriter

_NEAR = 8 << 10  # bytes between two payloads that are read with them, since another read takes longer
_READ = 1 << 20  # bytes of payloads that are read together


class _Stream:
    """One modality under construction: its rows in memory, its data in a file that is positioned where it goes."""

    def __init__(self, spec: ModalitySpec, file: JoinedFile) -> None:
        self.spec = spec
        self.file = file
        self.stride = MSTR_ROW_PREFIX.itemsize + spec.metadata_size
        self.rows = bytearray()
        self.size = 0  # of the data region so far, a multiple of 8

    def append(self, payload: Payload | None) -> None:
        if payload is None:
            self.rows += bytes(self.stride)
            return
        size = len(payload.data)
        # Positions count from the region's start, plus 8 until that is known: 0 stays for absent.
        self.rows += ROW_PREFIX.pack(self.size + PAYLOAD_ALIGNMENT, size, crc32c(*payload))
        self.rows += payload.metadata
        self.file.write(payload.data)
        fill = -size % PAYLOAD_ALIGNMENT
        self.file.write(FILL[:fill])
        self.size += size + fill

    def place(self, data_ptr: int) -> None:
        """Makes the rows' positions absolute."""
        ptrs = np.frombuffer(self.rows, mstr_row(self.spec.metadata_size))["data_ptr"]
        np.add(ptrs, np.uint64(data_ptr - PAYLOAD_ALIGNMENT), out=ptrs, where=ptrs != 0)


class MstrWriter(PackedWriter):
    """Writes an MSTR file; arguments as `PackedWriter`. The bytes are the same with and without `num_samples`."""

    format: ClassVar[str] = "MSTR"

    def _begin(self) -> None:
        self._streams: list[_Stream] = []
        self._table: list[tuple[int, ...]] = []
        for number, spec in enumerate(self.modalities):
            if number == 0 and self._announced is not None:
                stream = _Stream(spec, self._target.file)
                stream.file.seek(align(MSTR_BODY_PTR + stream.stride * self._announced, PAGE))
            else:
                stream = _Stream(spec, self._target.open_spool())
            self._streams.append(stream)

    def _check_size(self, payloads: Sequence[Payload | None]) -> None:
        for spec, payload in zip(self.modalities, payloads, strict=True):
            if payload is not None:
                check_payload_size(spec, payload)

    def _append(self, payloads: Sequence[Payload | None]) -> None:
        for stream, payload in zip(self._streams, payloads, strict=True):
            stream.append(payload)

    def _finish_body(self) -> None:
        file = self._target.file
        position = MSTR_BODY_PTR
        for stream in self._streams:
            metadata_ptr = align(position, PAGE)
            data_ptr = align(metadata_ptr + len(stream.rows), PAGE)
            stream.place(data_ptr)
            file.seek(metadata_ptr)
            file.write(stream.rows)
            file.seek(data_ptr)
            if stream.file is file:
                file.seek(data_ptr + stream.size)
            else:
                splice(stream.file, file, stream.size)
            position = data_ptr + stream.size
            spec = stream.spec
            self._table.append(
                (name_hash(spec.name), spec.type_id, 0, metadata_ptr, stream.stride, 0, data_ptr, stream.size)
            )

    def _table_checksums(self) -> Sequence[int]:
        return [crc32c(stream.rows) for stream in self._streams]

    def _finish_head(self, tail: TailWriter) -> None:
        page = header_page(self.num_samples, self._table, tail.finish())
        file = self._target.file
        file.seek(0)
        file.write(page + page)  # the page and its shadow


def check_payload_size(spec: ModalitySpec, payload: Payload) -> None:
    """Refuses, with `EncodeError`, a payload whose size the format cannot count."""
    size = len(payload.metadata) + len(payload.data)
    if size > MAX_PAYLOAD_SIZE:
        found = f"the payload takes {size} bytes"
        raise EncodeError(f"modality {spec.name!r}: {found}, an MSTR file allows {MAX_PAYLOAD_SIZE}")


def header_page(num_samples: int, stream_table: Sequence[tuple[int, ...]], trailer: Trailer) -> bytes:
    """Page 0 (3.1, 3.2 and the trailer, which gets the page's checksum)."""
    page = bytearray(PAGE)
    header = np.array((MSTR_MAGIC, num_samples, len(stream_table)), MSTR_HEADER).tobytes()
    head = header + np.array(list(stream_table), MSTR_DESCRIPTOR).tobytes()
    page[: len(head)] = head
    page[MSTR_TRAILER_PTR:] = trailer.to_bytes()  # whose checksum counts as zero
    page[MSTR_TRAILER_PTR:] = trailer._replace(head_crc32c=crc32c(page)).to_bytes()
    return bytes(page)


def write_mstr(
    mult: MultWriter,
    path: Path,
    blocks: Iterable[tuple[int, Buffer]],
    *,
    fsync: bool = True,
    observe: Callable[[Buffer], object] = lambda _: None,
) -> WriteSummary:
    """Writes the samples of a finished MULT file as MSTR, in order: the bytes that an `MstrWriter` writes.

    Args:
        mult: the writer of the MULT file, closed.
        path: the target; replaced when everything is written.
        blocks: position and bytes of each block of the MULT file, from its start to its end, for the largest modality.
            The payloads of the others are read one by one.
        fsync: wait for the disk before the file takes its place.
        observe: called with each part of the file, in order.

    Raises:
        OSError: the disk did not take all of it, or the MULT file was truncated; the target is untouched.
    """
    target = AtomicFile(path)
    try:
        for part in _parts(mult, blocks):
            target.file.write(part)
            observe(part)
        size = target.commit(fsync=fsync)
    except BaseException:
        target.abort()
        raise
    return WriteSummary(path=path, num_samples=mult.num_samples, num_bytes=size, num_present=mult.num_present)


class _Section(list[Buffer]):
    """Bytes from a position on, before they are written."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self._position = position

    def tell(self) -> int:
        return self._position

    def write(self, data: Buffer, /) -> None:
        self.append(data)
        self._position += len(data)


def _parts(mult: MultWriter, blocks: Iterable[tuple[int, Buffer]]) -> Iterator[Buffer]:
    """Yields the bytes of the MSTR file of a MULT file in order."""
    streams = [_CopiedStream(spec, mult.places(number)) for number, spec in enumerate(mult.modalities)]
    table = []
    position = MSTR_BODY_PTR
    for stream in streams:
        stream.place(align(position, PAGE))
        table.append(stream.descriptor)
        position = stream.data_ptr + stream.size
    tail = _Section(position)
    writer = TailWriter(tail)
    writer.add(IDS_SECTION, *mult.ids)
    present = list(mult.num_present.values())
    checksums = [crc32c(stream.rows) for stream in streams]
    writer.add(SCHEMA_SECTION, dump_schema("MSTR", mult.modalities, present, mult.provenance, checksums))
    page = header_page(mult.num_samples, table, writer.finish())
    yield page + page  # the page and its shadow
    largest = max(streams, key=lambda stream: stream.size)
    position = MSTR_BODY_PTR
    with mult.path.open("rb", buffering=0) as file:
        for stream in streams:
            yield bytes(stream.metadata_ptr - position)
            yield stream.rows
            yield bytes(stream.data_ptr - stream.metadata_ptr - len(stream.rows))
            yield from stream.data(blocks if stream is largest else stream.ranges(file.fileno()))
            position = stream.data_ptr + stream.size
    yield from tail


class _CopiedStream:
    """One modality, whose payloads are in a MULT file."""

    def __init__(self, spec: ModalitySpec, places: Places) -> None:
        self._spec = spec
        self._places = places
        starts = (places.ptrs + np.uint64(spec.metadata_size))[places.present]
        self._ends = places.ptrs[places.present] + places.sizes[places.present]
        self._starts = starts
        fills = (starts - self._ends) % np.uint64(PAYLOAD_ALIGNMENT)  # wraps, which is what a remainder needs
        self._sizes = self._ends - starts + fills
        self.size = int(self._sizes.sum())

    def place(self, metadata_ptr: int) -> None:
        """Makes the rows of a stream whose table is at a position."""
        places, size = self._places, self._spec.metadata_size
        rows = np.zeros(len(places.ptrs), mstr_row(size))
        self.metadata_ptr, self.data_ptr = metadata_ptr, align(metadata_ptr + rows.nbytes, PAGE)
        rows["data_ptr"][places.present] = np.cumsum(self._sizes) - self._sizes + np.uint64(self.data_ptr)
        rows["data_size"][places.present] = self._ends - self._starts
        rows["crc32c"] = places.crcs
        assert places.records is not None
        rows["record"] = places.records.view(f"V{size}").ravel()
        self.rows = rows.tobytes()
        stride = rows.dtype.itemsize
        name, type_id = name_hash(self._spec.name), self._spec.type_id
        self.descriptor = name, type_id, 0, metadata_ptr, stride, 0, self.data_ptr, self.size

    def ranges(self, fd: int) -> Iterator[tuple[int, Buffer]]:
        """Yields position and bytes of payloads, those that are near each other in one read."""
        starts, ends = self._starts.astype(np.int64), self._ends.astype(np.int64)
        breaks = np.flatnonzero(starts[1:] - ends[:-1] > _NEAR) + 1
        for first, last in pairwise([0, *breaks.tolist(), len(starts)] if len(starts) else []):
            end = int(ends[last - 1])
            for position in range(int(starts[first]), max(end, int(starts[first]) + 1), _READ):
                yield position, os.pread(fd, min(_READ, end - position), position)

    def data(self, blocks: Iterable[tuple[int, Buffer]]) -> Iterator[bytes]:
        """Yields the data region in parts of about `_READ` bytes; all blocks are taken."""
        starts, ends = self._starts.tolist(), self._ends.tolist()
        number, count = 0, len(starts)
        parts: list[Buffer] = []
        size = 0
        for position, block in blocks:
            view, stop = memoryview(block), position + len(block)
            while number < count and min(starts[number], ends[number] - 1) < stop:  # an empty one may be at the end
                start, end = starts[number], ends[number]
                parts.append(view[max(start - position, 0) : end - position])
                if end > stop:
                    break
                parts.append(FILL[: (start - end) % PAYLOAD_ALIGNMENT])
                number += 1
            size += len(block)
            if size >= _READ:
                yield b"".join(parts)
                parts, size = [], 0
        yield b"".join(parts)
        if number < count:
            raise OSError(errno.EIO, f"a MULT file ends before the payload at byte {starts[number]}")
