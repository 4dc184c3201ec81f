"""Reading MSTR (3): the metadata tables are viewed in place, so one modality touches only its own bytes.

The header page is copied at open and never read again: a stream may be added to the file meanwhile, after its end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import BadMagicError, CorruptError, TruncatedError
from mm_assets.formats import batch
from mm_assets.formats.batch import Bounds, Head, Places, any_of, blocks
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
from mm_assets.formats.tail import HEAD_REQUEST, Window

_PREFIX = struct.Struct("<QII")
_LOW_HALF = np.array(2**32 - 1, np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """Where one stream is; both ranges lie within the file."""

    metadata_ptr: int
    stride: int
    data_ptr: int
    data_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What rows of one stream are checked against, as arrays without dimensions, which NumPy compares fastest."""

    data_ptr: npt.NDArray[np.uint64]
    data_size: npt.NDArray[np.uint64]
    starts_at_zero: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What a file's header page leads to, which is needed to add a stream.

    Attributes:
        streams: the stream table, one tuple of a descriptor's numbers (3.2) per stream.
        sections: the section table: kind, crc32c, ptr, size; also of kinds that are not known here.
        num_present: present rows per stream, by the schema.
        end: the position after everything; bytes from there on belong to nothing.
    """

    streams: tuple[tuple[int, ...], ...]
    sections: tuple[tuple[int, int, int, int], ...]
    num_present: tuple[int, ...]
    end: int


def page_checksums(page: bytes) -> tuple[int, int] | None:
    """What a header page's checksum is and should be, or None if it is not a whole page with a trailer."""
    if len(page) < PAGE or page[:4] != MSTR_MAGIC or page[-4:] != TAIL_MAGIC:
        return None
    at = MSTR_TRAILER_PTR + HEAD_CRC_OFFSET
    found = crc32c(page[:at], bytes(4), page[at + 4 :])
    return found, int.from_bytes(page[at : at + 4], "little")


class MstrReader(PackedReader):
    """Reads an MSTR file; arguments as `PackedReader`."""

    format: ClassVar[str] = "MSTR"

    def _read_head(self, window: Window) -> Head:
        path = self._path
        start = bytes(window.get(0, min(self._size, HEAD_REQUEST)))
        page, trailer = self._choose_page(start)
        if trailer is not None:
            check_version(path, trailer)
        view = memoryview(page)
        header = np.frombuffer(take(view, 0, MSTR_HEADER.itemsize, path=path, what="the header"), MSTR_HEADER)[0]
        num_samples, count = int(header["num_samples"]), int(header["num_streams"])
        self._check_count(count)
        size = MSTR_DESCRIPTOR.itemsize * count
        entries = np.frombuffer(
            take(view, MSTR_HEADER.itemsize, size, path=path, what="the stream table"), MSTR_DESCRIPTOR
        )
        self._stream_table: tuple[tuple[int, ...], ...] = tuple(entries.tolist())
        self._regions: list[_Region] = []
        descriptors = []
        for number, entry in enumerate(entries):
            stride = int(entry["metadata_size"])
            if stride < MSTR_ROW_PREFIX.itemsize:
                detail = f"the row size of stream {number}"
                raise CorruptError(path, detail, found=stride, expected=f"at least {MSTR_ROW_PREFIX.itemsize}")
            region = _Region(
                metadata_ptr=int(entry["metadata_ptr"]),
                stride=stride,
                data_ptr=int(entry["data_ptr"]),
                data_size=int(entry["data_size"]),
            )
            rows = f"the metadata table of stream {number}"
            check_range(path, region.metadata_ptr, stride * num_samples, self._size, rows)
            check_range(path, region.data_ptr, region.data_size, self._size, f"the data region of stream {number}")
            self._regions.append(region)
            descriptors.append(
                Descriptor(
                    name_hash=int(entry["name_hash"]),
                    type_id=int(entry["type_id"]),
                    metadata_size=stride - MSTR_ROW_PREFIX.itemsize,
                )
            )
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
            raise BadMagicError(self._path, "not an MSTR file", found=start[:4], expected=MSTR_MAGIC)
        if wrong is not None:
            what = "neither the header page nor its shadow is whole: the page"
            raise checksum_error(self._path, what, found=wrong[0], expected=wrong[1])
        return page, None

    def _required_sections(self) -> tuple[int, ...]:
        return SCHEMA_SECTION, IDS_SECTION

    def _bind(self) -> None:
        self._limits = [
            _Limits(
                data_ptr=np.array(region.data_ptr, np.uint64),
                data_size=np.array(region.data_size, np.uint64),
                starts_at_zero=not region.data_ptr,
            )
            for region in self._regions
        ]
        self._paged_in: set[int] = set()  # streams that are small, and were paged in whole
        self._rows: list[Table] = [
            self._table(region.metadata_ptr, self._num_samples, mstr_row(spec.metadata_size))
            for region, spec in zip(self._regions, self.modalities, strict=True)
        ]

    def _read_one(self, i: int, number: int) -> tuple[Payload, int] | None:
        table, region = self._rows[number], self._regions[number]
        row = table.row(i)
        ptr, size, checksum = _PREFIX.unpack_from(row)
        if not ptr and not size and not checksum:
            return None
        if ptr < region.data_ptr or ptr + size > region.data_ptr + region.data_size:
            raise self._misplaced(i, number, ptr, size)
        return Payload(row[MSTR_ROW_PREFIX.itemsize :], view_block(self._source, ptr, size)), checksum

    def _misplaced(self, i: int, number: int, ptr: int, size: int) -> CorruptError:
        region = self._regions[number]
        return CorruptError(
            self._path,
            "a row points outside its stream's data region",
            sample=i,
            modality=self.names[number],
            found=f"{size} bytes at {ptr}",
            expected=f"all zero, or within {region.data_ptr}..{region.data_ptr + region.data_size}",
        )

    def _check_rows(self, rows: npt.NDArray[Any], number: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Sizes of the rows' data, and which rows point outside the data region."""
        region = self._regions[number]
        ptrs, sizes = rows["data_ptr"], rows["data_size"].astype(np.uint64)
        end = np.uint64(region.data_ptr + region.data_size)
        # `end - ptrs` wraps where `ptrs > end`, which is bad already.
        bad = (ptrs < region.data_ptr) | (ptrs > end) | (sizes > end - ptrs)
        return sizes, np.where(ptrs != 0, bad, (sizes != 0) | (rows["crc32c"] != 0))

    def _locate(self, indices: npt.NDArray[np.int64], numbers: Sequence[int]) -> dict[int, Places]:
        found = gather([self._rows[number] for number in numbers], indices)
        return {number: self._places(indices, number, rows) for number, rows in zip(numbers, found, strict=True)}

    def _places(self, indices: npt.NDArray[np.int64], number: int, rows: npt.NDArray[Any]) -> Places:
        sizes, bad = self._check_rows(rows, number)
        if bad.any():
            k = int(bad.argmax())
            raise self._misplaced(int(indices[k]), number, int(rows["data_ptr"][k]), int(sizes[k]))
        ptrs = np.ascontiguousarray(rows["data_ptr"])
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
        table, limits = self._rows[number], self._limits[number]
        table.fetch(indices)
        # The first two numbers of a row are position, and size with checksum above it.
        words = table.words().take(indices, 0)
        ptrs, sizes = words[:, 0], words[:, 1] & _LOW_HALF
        # Unsigned numbers wrap where a position is below the region, and are far too large then.
        offsets = ptrs - limits.data_ptr
        outside = np.maximum(offsets, offsets + sizes) > limits.data_size
        ends = ptrs + sizes
        if not limits.starts_at_zero and not any_of(outside):
            return ptrs, ends, None
        present = ptrs != 0
        bad = np.where(present, outside, words[:, 1] != 0)
        if bad.any():
            k = int(bad.argmax())
            raise self._misplaced(int(indices[k]), number, int(ptrs[k]), int(sizes[k]))
        return ptrs, ends, present

    def is_paged_in(self, number: int) -> bool:
        """Whether a stream is small, and was paged in whole."""
        return number in self._paged_in

    def fetch_data(self, numbers: Sequence[int], bounds: Bounds) -> None:
        """Has the data of a batch of a mapped file paged in where it is not."""
        source = self.mapped
        for m, number in enumerate(numbers):
            if source is not None and number not in self._paged_in:
                region = self._regions[number]
                if source.page_in(region.data_ptr, region.data_size):
                    self._paged_in.add(number)
                else:
                    source.fetch(bounds.starts[m], bounds.ends[m])

    def presence(self, name: str) -> npt.NDArray[np.bool_]:
        """Which samples have a modality: (N,) bool."""
        present: npt.NDArray[np.bool_] = self._rows[self.number_of(name)].column()["data_ptr"] != 0
        return present

    def sizes(self, name: str) -> npt.NDArray[np.uint32]:
        """Bytes of record and data of every sample, 0 where absent; see `PackedReader.sizes`."""
        number = self.number_of(name)
        rows = self._rows[number].column()
        sizes = rows["data_size"].astype(np.uint64)
        sizes[rows["data_ptr"] != 0] += np.uint64(self.modalities[number].metadata_size)
        if len(sizes) and sizes.max() > MAX_PAYLOAD_SIZE:
            i = int(sizes.argmax())
            raise CorruptError(
                self._path,
                "a payload is too large",
                sample=i,
                modality=name,
                found=int(sizes[i]),
                expected=f"at most {MAX_PAYLOAD_SIZE}",
            )
        return sizes.astype(np.uint32)

    def _stored_checksums(self, number: int) -> npt.NDArray[np.uint32]:
        checksums: npt.NDArray[np.uint32] = self._rows[number].column()["crc32c"].copy()
        return checksums

    def records(self, name: str) -> npt.NDArray[np.uint8]:
        """Every metadata record: (N, metadata_size) uint8, a strided view, no copy; zeros where absent; read-only."""
        table = self._rows[self.number_of(name)]
        cells = table.column().view(np.uint8).reshape(self._num_samples, table.itemsize)
        return cells[:, MSTR_ROW_PREFIX.itemsize :]

    def live(self) -> Live:
        """What the header page leads to.

        Raises:
            TruncatedError: a section does not lie within the file, or the file has no tail.
        """
        if self._tail is None or self._num_present is None:
            raise TruncatedError(self._path, "no tail: a stream can be added only to a file that has one")
        ends = [MSTR_BODY_PTR, self._tail.table_end]
        ends += [region.metadata_ptr + region.stride * self._num_samples for region in self._regions]
        ends += [region.data_ptr + region.data_size for region in self._regions]
        for kind, _, ptr, size in self._tail.entries:
            check_range(self._path, ptr, size, self._size, f"the section of kind {kind}")
            ends.append(ptr + size)
        return Live(
            streams=self._stream_table, sections=self._tail.entries, num_present=self._num_present, end=max(ends)
        )

    # Verifying.

    def _verify_body(self, damage: list[FileDamage]) -> int:
        if self._has_tail:
            self._verify_pages(damage)
        return sum(self._verify_stream(damage, number) for number in range(len(self.modalities)))

    def _verify_pages(self, damage: list[FileDamage]) -> None:
        start = bytes(self._source.view_many([(0, min(HEAD_REQUEST, self._size))])[0])
        for what, at in (("header page", 0), ("shadow of the header page", MSTR_SHADOW_PTR)):
            sums = page_checksums(start[at : at + PAGE])
            if sums is None:
                self._report(damage, CorruptError(self._path, f"the {what} is not one"), None)
            elif sums[0] != sums[1]:
                self._report(damage, checksum_error(self._path, f"the {what}", found=sums[0], expected=sums[1]), None)

    def _verify_stream(self, damage: list[FileDamage], number: int) -> int:
        table, num_payloads = self._rows[number], 0
        for first in range(0, self._num_samples, batch.BLOCK_ROWS):
            last = min(first + batch.BLOCK_ROWS, self._num_samples)
            rows = table.span(first, last)
            sizes, bad = self._check_rows(rows, number)
            ptrs, checksums = rows["data_ptr"], rows["crc32c"]
            cells = rows.view(np.uint8).reshape(last - first, table.itemsize)[:, MSTR_ROW_PREFIX.itemsize :]
            absent = (ptrs == 0) & ~bad
            num_payloads += int((ptrs != 0).sum())
            for k in np.flatnonzero(bad).tolist():
                self._report(damage, self._misplaced(first + k, number, int(ptrs[k]), int(sizes[k])), number)
            for k in np.flatnonzero(absent & cells.any(axis=1)).tolist():
                error = CorruptError(self._path, "the record of an absent row is not zero", sample=first + k)
                self._report(damage, error, number)
            good = ~(bad | absent)
            for start, stop in blocks(np.where(good, sizes, np.uint64(0))):
                which = (start + np.flatnonzero(good[start:stop])).tolist()
                ranges = [(int(ptrs[k]), int(sizes[k])) for k in which]
                for k, view in zip(which, self._source.view_many(ranges), strict=True):
                    found, expected = crc32c(cells[k].tobytes(), view), int(checksums[k])
                    if self._has_tail and found != expected:
                        error = checksum_error(
                            self._path, "the payload", found=found, expected=expected, sample=first + k
                        )
                        self._report(damage, error, number)
                self._drop(ptrs[which], sizes[which])
        return num_payloads
