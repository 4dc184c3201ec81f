"""Reading MSTR (3): the metadata tables are viewed in place, so one modality touches only its own bytes.

The header page is copied at open and never read again: a stream may be added to the file meanwhile, after its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import BadMagicError, CorruptError, TruncatedError
from mm_assets.formats import batch
from mm_assets.formats.batch import Bounds, Head, Places, any_of, blocks, spans
from mm_assets.formats.byte_source import Table, gather, view_block
from mm_assets.formats.reader import PackedReader
from mm_assets.formats.records import (
    HEAD_CRC_OFFSET,
    IDS_SECTION,
    MAX_PAYLOAD_SIZE,
    MSTR_BODY_PTR,
    MSTR_DESCRIPTOR,
    MSTR_HEADER,
    MSTR_MAGIC,
    MSTR_ROW_PREFIX,
    MSTR_SHADOW_PTR,
    MSTR_TRAILER_PTR,
    PAGE,
    ROW_PREFIX,
    SCHEMA_SECTION,
    TAIL_MAGIC,
    Descriptor,
    Payload,
    Trailer,
    check_range,
    check_version,
    checksum_error,
    crc32c,
    mstr_row,
    take,
)
from mm_assets.formats.report import FileDamage
from mm_assets.formats.tail import HEAD_REQUEST, Tail, Window

_LOW_HALF = np.array(2**32 - 1, np.uint64)


class _Stream:
    """Where one stream is, within the file; `least` and `most` are for NumPy, which compares such arrays fastest."""

    __slots__ = ("data_end", "data_ptr", "is_paged_in", "is_whole", "least", "most", "rows")

    def __init__(self, rows: Table, data_ptr: int, data_size: int) -> None:
        self.rows = rows
        self.data_ptr = data_ptr
        self.data_end = data_ptr + data_size
        self.least = np.array(data_ptr, np.uint64)
        self.most = np.array(data_size, np.uint64)
        self.is_paged_in = False  # as a whole, because its data is small
        self.is_whole = False  # its rows are known to have their checksum


def page_checksums(page: bytes) -> tuple[int, int] | None:
    """What a header page's checksum is and should be, or None if it is not a whole page with a trailer."""
    if len(page) < PAGE or page[:4] != MSTR_MAGIC or page[-4:] != TAIL_MAGIC:
        return None
    at = MSTR_TRAILER_PTR + HEAD_CRC_OFFSET
    found = crc32c(page[:at], bytes(4), page[at + 4 :])
    return found, int.from_bytes(page[at : at + 4], "little")


class MstrReader(PackedReader):
    """Reads an MSTR file; arguments as `PackedReader`.

    Attributes:
        stream_table: of each stream the numbers of its descriptor (3.2).
    """

    format: ClassVar[str] = "MSTR"
    _sections_needed = (SCHEMA_SECTION, IDS_SECTION)

    def _read_head(self, window: Window) -> Head:
        path = self.path
        start = bytes(window.get(0, min(self._size, HEAD_REQUEST)))
        page, trailer = self._choose_page(start)
        if trailer is not None:
            check_version(path, trailer)
        view = memoryview(page)
        header = take(view, 0, MSTR_HEADER.itemsize, path=path, what="the header")
        _, num_samples, count = np.frombuffer(header, MSTR_HEADER)[0].item()
        self._check_count(count)
        size = MSTR_DESCRIPTOR.itemsize * count
        table = take(view, MSTR_HEADER.itemsize, size, path=path, what="the stream table")
        self.stream_table: tuple[tuple[int, ...], ...] = tuple(np.frombuffer(table, MSTR_DESCRIPTOR).tolist())
        descriptors = []
        for number, entry in enumerate(self.stream_table):
            name_hash, type_id, _, metadata_ptr, stride, _, data_ptr, data_size = entry
            if stride < MSTR_ROW_PREFIX.itemsize:
                detail = f"the row size of stream {number}"
                raise CorruptError(path, detail, found=stride, expected=f"at least {MSTR_ROW_PREFIX.itemsize}")
            rows = f"the metadata table of stream {number}"
            check_range(path, metadata_ptr, stride * num_samples, self._size, rows)
            check_range(path, data_ptr, data_size, self._size, f"the data region of stream {number}")
            descriptors.append(Descriptor(name_hash, type_id, stride - MSTR_ROW_PREFIX.itemsize))
        self._check_distinct(descriptors)
        return Head(num_samples=num_samples, descriptors=tuple(descriptors), trailer=trailer)

    def _choose_page(self, start: bytes) -> tuple[bytes, Trailer | None]:
        """The header page if its checksum holds, else the shadow; without a trailer in a file that has no tail."""
        page, shadow = start[:PAGE], start[MSTR_SHADOW_PTR : MSTR_SHADOW_PTR + PAGE]
        wrong = None
        for candidate in (page, shadow):
            sums = page_checksums(candidate)
            if sums is not None:
                if sums[0] == sums[1]:
                    return candidate, Trailer.from_bytes(candidate[MSTR_TRAILER_PTR:])
                wrong = wrong or sums
        if start[:4] != MSTR_MAGIC[: len(start)]:
            raise BadMagicError(self.path, "not an MSTR file", found=start[:4], expected=MSTR_MAGIC)
        if wrong is not None:
            what = "neither the header page nor its shadow is whole: the page"
            raise checksum_error(self.path, what, found=wrong[0], expected=wrong[1])
        return page, None

    def _bind(self) -> None:
        self._streams = [
            _Stream(self._table(metadata_ptr, self._num_samples, mstr_row(spec.metadata_size)), data_ptr, data_size)
            for (_, _, _, metadata_ptr, _, _, data_ptr, data_size), spec in zip(
                self.stream_table, self.modalities, strict=True
            )
        ]

    def _read_one(self, i: int, number: int) -> tuple[Payload, int] | None:
        stream = self._streams[number]
        row = stream.rows.row(i)
        ptr, size, checksum = ROW_PREFIX.unpack_from(row)
        if not ptr and not size and not checksum:
            return None
        if ptr < stream.data_ptr or ptr + size > stream.data_end:
            raise self._misplaced(i, number, ptr, size)
        return Payload(row[MSTR_ROW_PREFIX.itemsize :], view_block(self._source, ptr, size)), checksum

    def _check_absent(self, absent: npt.NDArray[np.int64], number: int) -> None:
        # A row that became zero is like any absent one: only the checksum of the whole table tells them apart.
        stream = self._streams[number]
        if self._tail is None or stream.is_whole:
            return
        found, expected = 0, self._tail.table_checksums[number]
        for first, last in spans(self._num_samples, max(batch.BLOCK_BYTES // stream.rows.itemsize, 1)):
            found = crc32c(stream.rows.span(first, last).view(np.uint8).data, start=found)
        stream.is_whole = found == expected
        if not stream.is_whole:
            what = "the metadata table is damaged, and an absent value may be one that was lost: it"
            name = self.names[number]
            raise checksum_error(self.path, what, found=found, expected=expected, sample=int(absent[0]), modality=name)

    def _misplaced(self, i: int, number: int, ptr: int, size: int) -> CorruptError:
        stream = self._streams[number]
        return CorruptError(
            self.path,
            "a row points outside its stream's data region",
            sample=i,
            modality=self.names[number],
            found=f"{size} bytes at {ptr}",
            expected=f"all zero, or within {stream.data_ptr}..{stream.data_end}",
        )

    def _check_rows(self, rows: npt.NDArray[Any], number: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Sizes of the rows' data, and which rows point outside the data region."""
        stream = self._streams[number]
        ptrs, sizes = rows["data_ptr"], rows["data_size"].astype(np.uint64)
        end = np.uint64(stream.data_end)
        # `end - ptrs` wraps where `ptrs > end`, which is bad already.
        bad = (ptrs < stream.data_ptr) | (ptrs > end) | (sizes > end - ptrs)
        return sizes, np.where(ptrs != 0, bad, (sizes != 0) | (rows["crc32c"] != 0))

    def _locate(self, indices: npt.NDArray[np.int64], numbers: Sequence[int]) -> dict[int, Places]:
        found = gather([self._streams[number].rows for number in numbers], indices)
        return {number: self._places(indices, number, rows) for number, rows in zip(numbers, found, strict=True)}

    def _places(self, indices: npt.NDArray[np.int64], number: int, rows: npt.NDArray[Any]) -> Places:
        sizes, bad = self._check_rows(rows, number)
        ptrs = np.ascontiguousarray(rows["data_ptr"])
        self._refuse(bad, indices, number, ptrs, sizes)
        cells = rows.view(np.uint8).reshape(len(indices), rows.dtype.itemsize)
        return Places(
            present=ptrs != 0,
            ptrs=ptrs,
            sizes=sizes,
            crcs=rows["crc32c"],
            records=np.ascontiguousarray(cells[:, MSTR_ROW_PREFIX.itemsize :]),
        )

    def data_bounds(self, indices: npt.NDArray[np.int64], numbers: Sequence[int]) -> Bounds:
        """Where the data of one or more samples of a mapped file is, without records, checked."""
        streams = [self._stream_bounds(indices, number) for number in numbers]
        return Bounds(*zip(*streams, strict=True))

    def _stream_bounds(
        self, indices: npt.NDArray[np.int64], number: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_] | None]:
        """Starts, ends and presence of one stream's data."""
        stream = self._streams[number]
        stream.rows.fetch(indices)
        # The first two numbers of a row are position, and size with checksum above it.
        words = stream.rows.words().take(indices, 0)
        ptrs, sizes = words[:, 0], words[:, 1] & _LOW_HALF
        # Unsigned numbers wrap where a position is below the region, and are far too large then.
        offsets = ptrs - stream.least
        outside = np.maximum(offsets, offsets + sizes) > stream.most
        ends = ptrs + sizes
        if stream.data_ptr and not any_of(outside):
            return ptrs, ends, None
        present = ptrs != 0
        self._refuse(np.where(present, outside, words[:, 1] != 0), indices, number, ptrs, sizes)
        return ptrs, ends, present

    def is_paged_in(self, number: int) -> bool:
        """Whether a stream is small, and was paged in whole."""
        return self._streams[number].is_paged_in

    def fetch_data(self, numbers: Sequence[int], bounds: Bounds) -> None:
        """Has the data of a batch of a mapped file paged in where it is not."""
        source = self.mapped
        for m, number in enumerate(numbers):
            stream = self._streams[number]
            if source is not None and not stream.is_paged_in:
                stream.is_paged_in = source.page_in(stream.data_ptr, stream.data_end - stream.data_ptr)
                if not stream.is_paged_in:
                    source.pages.fetch(bounds.starts[m], bounds.ends[m])

    def presence(self, name: str) -> npt.NDArray[np.bool_]:
        """Which samples have a modality: (N,) bool."""
        present: npt.NDArray[np.bool_] = self._streams[self.number_of(name)].rows.column()["data_ptr"] != 0
        return present

    def sizes(self, name: str) -> npt.NDArray[np.uint32]:
        """Bytes of record and data of every sample, 0 where absent; see `PackedReader.sizes`."""
        number = self.number_of(name)
        rows = self._streams[number].rows.column()
        sizes = rows["data_size"].astype(np.uint64)
        sizes[rows["data_ptr"] != 0] += np.uint64(self.modalities[number].metadata_size)
        if len(sizes) and sizes.max() > MAX_PAYLOAD_SIZE:
            i = int(sizes.argmax())
            raise CorruptError(
                self.path,
                "a payload is too large",
                sample=i,
                modality=name,
                found=int(sizes[i]),
                expected=f"at most {MAX_PAYLOAD_SIZE}",
            )
        return sizes.astype(np.uint32)

    def _stored_checksums(self, number: int) -> npt.NDArray[np.uint32]:
        checksums: npt.NDArray[np.uint32] = self._streams[number].rows.column()["crc32c"].copy()
        return checksums

    def records(self, name: str) -> npt.NDArray[np.uint8]:
        """Every metadata record: (N, metadata_size) uint8, a strided view, no copy; zeros where absent; read-only."""
        table = self._streams[self.number_of(name)].rows
        cells = table.column().view(np.uint8).reshape(self._num_samples, table.itemsize)
        return cells[:, MSTR_ROW_PREFIX.itemsize :]

    def live(self) -> tuple[Tail, int]:
        """The tail, and the position after all that the header page leads to: bytes from there on belong to nothing.

        Raises:
            TruncatedError: a section does not lie within the file, or the file has no tail.
        """
        if self._tail is None:
            raise TruncatedError(self.path, "no tail: a stream can be added only to a file that has one")
        ends = [MSTR_BODY_PTR, self._tail.table_end]
        for stream in self._streams:
            ends += (stream.rows.ptr + stream.rows.nbytes, stream.data_end)
        for kind, _, ptr, size in self._tail.entries:
            check_range(self.path, ptr, size, self._size, f"the section of kind {kind}")
            ends.append(ptr + size)
        return self._tail, max(ends)

    # Verifying.

    def _verify_body(self, damage: list[FileDamage]) -> int:
        if self.has_checksums:
            self._verify_pages(damage)
        return sum(self._verify_stream(damage, number) for number in range(len(self.modalities)))

    def _verify_pages(self, damage: list[FileDamage]) -> None:
        start = bytes(self._source.view_many([(0, min(HEAD_REQUEST, self._size))])[0])
        for what, at in (("header page", 0), ("shadow of the header page", MSTR_SHADOW_PTR)):
            sums = page_checksums(start[at : at + PAGE])
            if sums is None:
                self._report(damage, CorruptError(self.path, f"the {what} is not one"))
            elif sums[0] != sums[1]:
                self._report(damage, checksum_error(self.path, f"the {what}", found=sums[0], expected=sums[1]))

    def _verify_stream(self, damage: list[FileDamage], number: int) -> int:
        table, num_payloads, checksum = self._streams[number].rows, 0, 0
        for first, last in spans(self._num_samples, batch.BLOCK_ROWS):
            rows = table.span(first, last)
            checksum = crc32c(rows.view(np.uint8).data, start=checksum)
            sizes, bad = self._check_rows(rows, number)
            ptrs, checksums = rows["data_ptr"], rows["crc32c"]
            cells = rows.view(np.uint8).reshape(last - first, table.itemsize)[:, MSTR_ROW_PREFIX.itemsize :]
            absent = (ptrs == 0) & ~bad
            num_payloads += int((ptrs != 0).sum())
            for k in np.flatnonzero(bad).tolist():
                self._report(damage, self._misplaced(first + k, number, int(ptrs[k]), int(sizes[k])))
            for k in np.flatnonzero(absent & cells.any(axis=1)).tolist():
                detail, name = "the record of an absent row is not zero", self.names[number]
                self._report(damage, CorruptError(self.path, detail, sample=first + k, modality=name))
            good = ~(bad | absent)
            for start, stop in blocks(np.where(good, sizes, np.uint64(0)), self.block_bytes):
                which = (start + np.flatnonzero(good[start:stop])).tolist()
                ranges = [(int(ptrs[k]), int(sizes[k])) for k in which]
                for k, view in zip(which, self._source.view_many(ranges), strict=True):
                    found, expected = crc32c(cells[k].tobytes(), view), int(checksums[k])
                    if self.has_checksums and found != expected:
                        self._report(damage, self._wrong_payload(first + k, number, found, expected))
                self._drop(ptrs[which], sizes[which])
        if self._tail is not None and checksum != (expected := self._tail.table_checksums[number]):
            name = self.names[number]
            error = checksum_error(self.path, "the metadata table", found=checksum, expected=expected, modality=name)
            self._report(damage, error)
        return num_payloads
