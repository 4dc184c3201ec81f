"""Writing MSTR (3): one metadata table and one data region per modality.

Memory: the metadata tables, 16 bytes and the record per sample and modality, and the ids. Data regions are spooled and
spliced; with `num_samples` the first one is written in place, because only tables of known size are before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mm_assets.errors import EncodeError
from mm_assets.formats.output import JoinedFile, splice
from mm_assets.formats.records import (
    FILL,
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
    ModalitySpec,
    Payload,
    Trailer,
    align,
    crc32c,
    mstr_row,
    name_hash,
)
from mm_assets.formats.tail import TailWriter
from mm_assets.formats.writer import PackedWriter


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
