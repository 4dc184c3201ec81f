"""Writing MULT (2): one record per sample, all its modalities together.

Memory: 24 + 16 * M bytes, the records and the id, per sample; of the samples at most 16 MiB wait to be written.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mm_assets.errors import EncodeError
from mm_assets.formats.batch import Places
from mm_assets.formats.output import JoinedFile, splice
from mm_assets.formats.records import (
    DIRECTORY_SECTION,
    FILL,
    INDEX_SECTION,
    MAX_SAMPLE_SIZE,
    MULT_DESCRIPTOR,
    MULT_HEADER,
    MULT_INDEX_ENTRY,
    MULT_MAGIC,
    PAYLOAD_ALIGNMENT,
    VERSION,
    Buffer,
    Payload,
    align,
    crc32c,
    mult_body_ptr,
    mult_index_ptr,
    name_hash,
)
from mm_assets.formats.tail import TailWriter
from mm_assets.formats.writer import PackedWriter

_LARGE = 4096  # bytes of a payload from which on it is not copied


class MultWriter(PackedWriter):
    """Writes a MULT file; arguments as `PackedWriter`.

    With `num_samples` the body is written in place. Without, the size of the index in front of it is not known before
    the end: the body is spooled beside the target and spliced. The bytes are the same.
    """

    format: ClassVar[str] = "MULT"

    def _begin(self) -> None:
        count = len(self.modalities)
        self._spool: JoinedFile | None = None
        self._header = struct.Struct(f"<{1 + 2 * count}I")
        self._sample_ptrs = array("Q")  # all positions count from the body's start until it is known
        self._sample_sizes = array("I")
        self._sample_crcs = array("I")
        self._ptrs = [array("Q") for _ in range(count)]  # 0 = absent: a payload never is at 0, a header is
        self._sizes = [array("I") for _ in range(count)]
        self._crcs = [array("I") for _ in range(count)]
        self._records = [bytearray() for _ in range(count)]  # of the samples that have the modality
        self._position = 0
        if self._announced is None:
            self._spool = self._target.open_spool()
            self._body: JoinedFile = self._spool
        else:
            self._body = self._target.file
            self._body.seek(mult_body_ptr(count, self._announced))

    def _check_size(self, payloads: Sequence[Payload | None]) -> None:
        size = self._header.size
        for payload in payloads:
            if payload is not None:
                size = align(size, PAYLOAD_ALIGNMENT) + len(payload.metadata) + len(payload.data)
        if size > MAX_SAMPLE_SIZE:
            raise EncodeError(f"the sample takes {size} bytes, a MULT file allows {MAX_SAMPLE_SIZE}")

    def _append(self, payloads: Sequence[Payload | None]) -> None:
        count = len(payloads)
        numbers = [0] * (1 + 2 * count)  # the mask, offsets, sizes
        # What is small is gathered, because each buffer is a call of the checksum: runs of it, large ones in between.
        runs: list[list[Buffer]] = [[b""]]
        large: list[Buffer] = []
        start, size = self._position, self._header.size
        for i, payload in enumerate(payloads):
            if payload is None:
                self._ptrs[i].append(0)
                self._sizes[i].append(0)
                self._crcs[i].append(0)
                continue
            metadata, data = payload
            offset = align(size, PAYLOAD_ALIGNMENT)
            length = len(metadata) + len(data)
            runs[-1] += (FILL[: offset - size], metadata)
            if length < _LARGE:
                runs[-1].append(data)
            else:
                large.append(data)
                runs.append([])
            numbers[0] |= 1 << i
            numbers[1 + i] = offset
            numbers[1 + count + i] = length
            self._ptrs[i].append(start + offset)
            self._sizes[i].append(length)
            self._crcs[i].append(crc32c(metadata, data))
            self._records[i] += metadata
            size = offset + length
        runs[0][0] = self._header.pack(*numbers)
        parts: list[Buffer] = [b"".join(runs[0])]
        for data, run in zip(large, runs[1:], strict=True):
            parts.append(data)
            if run:
                parts.append(b"".join(run))
        self._sample_ptrs.append(start)
        self._sample_sizes.append(size)
        self._sample_crcs.append(crc32c(*parts))
        end = align(size, PAYLOAD_ALIGNMENT)
        parts.append(FILL[: end - size])
        self._body.write_all(parts)
        self._position = start + end

    def _finish_body(self) -> None:
        file = self._target.file
        body_ptr = mult_body_ptr(len(self.modalities), self.num_samples)
        index = np.zeros(self.num_samples, MULT_INDEX_ENTRY)
        index["sample_ptr"] = np.frombuffer(self._sample_ptrs, "<u8") + np.uint64(body_ptr)
        index["sample_size"] = np.frombuffer(self._sample_sizes, "<u4")
        index["crc32c"] = np.frombuffer(self._sample_crcs, "<u4")
        self._index = index.tobytes()
        header = np.array((MULT_MAGIC, VERSION, self.num_samples, len(self.modalities)), MULT_HEADER)
        descriptors = [(name_hash(spec.name), spec.type_id, spec.metadata_size) for spec in self.modalities]
        self._head = header.tobytes() + np.array(descriptors, MULT_DESCRIPTOR).tobytes()
        file.seek(0)
        file.write(self._head)
        file.write(self._index)
        file.write(bytes(body_ptr - len(self._head) - len(self._index)))
        if self._spool is not None:
            splice(self._spool, file, self._position)
        else:
            file.seek(body_ptr + self._position)

    def _add_sections(self, tail: TailWriter) -> None:
        body_ptr = np.uint64(mult_body_ptr(len(self.modalities), self.num_samples))
        columns: list[Buffer] = []
        for ptrs, sizes, crcs in zip(self._ptrs, self._sizes, self._crcs, strict=True):
            cells = np.frombuffer(ptrs, np.uint64)  # the array's own memory
            np.add(cells, body_ptr, out=cells, where=cells != 0)
            columns += (memoryview(ptrs).cast("B"), memoryview(sizes).cast("B"), memoryview(crcs).cast("B"))
        tail.add(DIRECTORY_SECTION, *columns)
        index_ptr = mult_index_ptr(len(self.modalities))
        tail.refer(INDEX_SECTION, index_ptr, len(self._index), crc32c(self._index))

    def places(self, number: int) -> Places:
        """Returns where the payloads of a modality are in the finished file, with their records."""
        ptrs = np.frombuffer(self._ptrs[number], np.uint64)
        sizes = np.frombuffer(self._sizes[number], np.uint32).astype(np.uint64)
        present = ptrs != 0
        records = np.zeros((len(ptrs), self.modalities[number].metadata_size), np.uint8)
        records[present] = np.frombuffer(self._records[number], np.uint8).reshape(-1, records.shape[1])
        return Places(present, ptrs, sizes, np.frombuffer(self._crcs[number], np.uint32), records)

    def _finish_head(self, tail: TailWriter) -> None:
        trailer = tail.finish()
        self._target.file.write(trailer._replace(head_crc32c=crc32c(self._head)).to_bytes())
