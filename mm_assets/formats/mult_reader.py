"""Reading MULT (2): by the directory in a file with our tail, else by the sample headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import BadMagicError, CorruptError, TruncatedError, UnsupportedVersionError
from mm_assets.formats import batch
from mm_assets.formats.batch import Bounds, Head, Places, any_of, blocks, spans
from mm_assets.formats.byte_source import Region, Table, gather, view_block
from mm_assets.formats.reader import PackedReader
from mm_assets.formats.records import (
    DIRECTORY_SECTION,
    IDS_SECTION,
    INDEX_SECTION,
    MULT_DESCRIPTOR,
    MULT_HEADER,
    MULT_INDEX_ENTRY,
    MULT_MAGIC,
    SCHEMA_SECTION,
    TRAILER,
    VERSION,
    Descriptor,
    Payload,
    Trailer,
    check_range,
    check_version,
    checksum_error,
    crc32c,
    mult_index_ptr,
    sample_header,
    take,
)
from mm_assets.formats.report import FileDamage
from mm_assets.formats.tail import HEAD_REQUEST, Window


class _Plan(NamedTuple):
    """How to find and check the directory's cells of some modalities.

    Attributes:
        first_cells: (modalities, 1) or () int64, where a modality's positions begin, counted in uint64.
        to_sizes: the same shape, int64, from there to where its sizes begin, counted in uint32.
        record_sizes: the same shape, uint64, bytes of a metadata record.
    """

    first_cells: npt.NDArray[np.int64]
    to_sizes: npt.NDArray[np.int64]
    record_sizes: npt.NDArray[np.uint64]


class MultReader(PackedReader):
    """Reads a MULT file; arguments as `PackedReader`."""

    format: ClassVar[str] = "MULT"
    _sections_needed = (SCHEMA_SECTION, IDS_SECTION, DIRECTORY_SECTION, INDEX_SECTION)

    def _read_head(self, window: Window) -> Head:
        path, size = self.path, self._size
        start = window.get(0, min(size, HEAD_REQUEST))
        if start[:4] != MULT_MAGIC[: len(start)]:
            raise BadMagicError(path, "not a MULT file", found=bytes(start[:4]), expected=MULT_MAGIC)
        header = take(start, 0, MULT_HEADER.itemsize, path=path, what="the header")
        _, version, num_samples, count = np.frombuffer(header, MULT_HEADER)[0].item()
        if version != VERSION:
            raise UnsupportedVersionError(path, "the version", found=version, expected=VERSION)
        self._check_count(count)
        index_ptr = mult_index_ptr(count)
        self._body_ptr = index_ptr + MULT_INDEX_ENTRY.itemsize * num_samples
        check_range(path, 0, self._body_ptr, size, f"the index of {num_samples} samples")
        head = start[:index_ptr]
        entries = np.frombuffer(head, MULT_DESCRIPTOR, count, MULT_HEADER.itemsize)
        descriptors = tuple(map(Descriptor._make, entries.tolist()))
        self._check_distinct(descriptors)
        trailer = None
        if size >= self._body_ptr + TRAILER.itemsize:
            trailer = Trailer.from_bytes(window.get(size - TRAILER.itemsize, TRAILER.itemsize))
        if trailer is not None:
            check_version(path, trailer)
            found = crc32c(head)
            if found != trailer.head_crc32c:
                raise checksum_error(path, "the head", found=found, expected=trailer.head_crc32c)
        elif num_samples and any(window.get(index_ptr, MULT_INDEX_ENTRY.itemsize)[-4:]):
            # Writers without our tail leave this word zero.
            raise TruncatedError(path, "truncated: the index has checksums, but the last 32 bytes are not a trailer")
        return Head(num_samples=num_samples, descriptors=descriptors, trailer=trailer)

    def _bind(self) -> None:
        count, num_samples = len(self.modalities), self._num_samples
        index_ptr = mult_index_ptr(count)
        self._header_type = sample_header(count)
        self._index_table = self._table(index_ptr, num_samples, MULT_INDEX_ENTRY)
        self._columns: list[tuple[Table, Table, Table]] = []  # per modality: ptr, size, crc32c
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._is_directory_whole: bool | None = None  # whether it has its checksum; None before it is needed
        # The least position of a payload, and the bytes from there to the end of the file, as NumPy compares fastest.
        self._least = np.array(self._body_ptr, np.uint64)
        self._most = np.array(self._size - self._body_ptr, np.uint64)
        if not self.has_checksums:
            return
        index = self._sections[INDEX_SECTION]
        if (index.ptr, index.size) != (index_ptr, self._index_table.nbytes):
            found, expected = f"{index.ptr}, {index.size}", f"{index_ptr}, {self._index_table.nbytes}"
            raise CorruptError(self.path, "the index section is out of place", found=found, expected=expected)
        directory = self._sections[DIRECTORY_SECTION]
        if directory.size != 16 * num_samples * count:
            expected = str(16 * num_samples * count)
            raise CorruptError(self.path, "the size of the directory", found=directory.size, expected=expected)
        whole = Region(self._source, directory.ptr, directory.size)
        # The same bytes as the columns below, so that one look-up finds several modalities (`data_bounds`).
        self._words = self._table(directory.ptr, 2 * num_samples * count, "<u8", whole)
        self._halves = self._table(directory.ptr, 4 * num_samples * count, "<u4", whole)
        for number in range(count):
            ptr = directory.ptr + 16 * num_samples * number
            region = whole if whole.in_reach else Region(self._source, ptr, 16 * num_samples)
            self._columns.append(
                (
                    self._table(ptr, num_samples, "<u8", region),
                    self._table(ptr + 8 * num_samples, num_samples, "<u4", region),
                    self._table(ptr + 12 * num_samples, num_samples, "<u4", region),
                )
            )

    def _read_one(self, i: int, number: int) -> tuple[Payload, int] | None:
        record_size = self.modalities[number].metadata_size
        if self.has_checksums:
            ptrs, sizes, crcs = self._columns[number]
            ptr, size = ptrs.cell(i), sizes.cell(i)
            if not ptr and not size:
                return None
            if size < record_size or ptr < self._body_ptr or ptr + size > self._size:
                raise self._misplaced(i, number, ptr, size)
            expected = crcs.cell(i)
        else:
            places = self._locate(np.array([i], np.int64), (number,))[number]
            if not places.present[0]:
                return None
            ptr, size, expected = int(places.ptrs[0]), int(places.sizes[0]), 0
        view = view_block(self._source, ptr, size)
        return Payload(view[:record_size], view[record_size:]), expected

    def _misplaced(self, i: int, number: int | None, ptr: int, size: int) -> CorruptError:
        """The error for a payload that is not where it may be; without a number, for the sample."""
        least = self._header_type.itemsize if number is None else self.modalities[number].metadata_size
        return CorruptError(
            self.path,
            f"{'the sample' if number is None else 'a payload'} is out of place",
            sample=i,
            modality=None if number is None else self.names[number],
            found=f"{size} bytes at {ptr}",
            expected=f"at least {least} bytes within {self._body_ptr}..{self._size}",
        )

    def _locate(self, indices: npt.NDArray[np.int64], numbers: Sequence[int]) -> dict[int, Places]:
        if not self.has_checksums:
            return {number: self._locate_by_headers(indices, number) for number in numbers}
        found = iter(gather([table for number in numbers for table in self._columns[number]], indices))
        return {number: self._places(indices, number, next(found), next(found), next(found)) for number in numbers}

    def _places(
        self,
        indices: npt.NDArray[np.int64],
        number: int,
        ptrs: npt.NDArray[np.uint64],
        sizes: npt.NDArray[Any],
        crcs: npt.NDArray[np.uint32],
    ) -> Places:
        sizes = sizes.astype(np.uint64)
        # Unsigned numbers wrap where something is below its least, and are far too large then.
        offsets = ptrs - self._least
        most = np.maximum(offsets, sizes - np.uint64(self.modalities[number].metadata_size))
        if not any_of(np.maximum(most, offsets + sizes) > self._most):
            return Places(present=np.ones(len(ptrs), np.bool_), ptrs=ptrs, sizes=sizes, crcs=crcs)
        present = ptrs != 0
        end = np.uint64(self._size)
        # `end - ptrs` wraps where `ptrs > end`, which is bad already.
        bad = (ptrs > end) | (sizes > end - ptrs)
        bad |= np.where(present, (sizes < self.modalities[number].metadata_size) | (ptrs < self._body_ptr), sizes != 0)
        self._refuse(bad, indices, number, ptrs, sizes)
        return Places(present=present, ptrs=ptrs, sizes=sizes, crcs=crcs)

    def _check_absent(self, absent: npt.NDArray[np.int64], number: int) -> None:
        # The sum of the directory where it is read anyway. What is too large for that, or damaged, is compared with the
        # sample's own header: a lost value is named, and those that were never there are still read.
        if self._is_directory_whole is None and self._words.in_reach:
            found = crc32c(self._words.column().data.cast("B"))
            self._is_directory_whole = found == self._sections[DIRECTORY_SECTION].crc32c
        if self._is_directory_whole:
            return
        present = self._locate_by_headers(absent, number).present
        if present.any():
            raise CorruptError(
                self.path,
                "the directory lists no payload, but the sample's header does: the directory is damaged",
                sample=int(absent[present.argmax()]),
                modality=self.names[number],
            )

    def data_bounds(self, indices: npt.NDArray[np.int64], numbers: Sequence[int]) -> Bounds:
        """Where the data of one or more samples of a mapped file is, without records, checked."""
        if not self.has_checksums:
            return self._bounds_by_headers(indices, numbers)
        for number in numbers:
            self._columns[number][0].fetch(indices)
            self._columns[number][1].fetch(indices)
        plan = self._plan(numbers)
        cells = indices + plan.first_cells
        ptrs = self._words.array().take(cells)
        cells += plan.to_sizes
        sizes = self._halves.array().take(cells).astype(np.uint64)
        # Unsigned numbers wrap where something is below its least, and are far too large then.
        offsets = ptrs - self._least
        most = np.maximum(offsets, sizes - plan.record_sizes)
        outside = np.maximum(most, np.add(offsets, sizes, out=offsets), out=most) > self._most
        shape = len(numbers), len(indices)
        ends = (ptrs + sizes).reshape(shape)
        if not any_of(outside):
            return Bounds((ptrs + plan.record_sizes).reshape(shape), ends, (None,) * len(numbers))
        present = ptrs != 0
        bad = np.where(present, outside, sizes != 0).reshape(shape)
        if bad.any():
            m, k = (int(place[0]) for place in np.nonzero(bad))
            place, size = ptrs.reshape(shape)[m, k], sizes.reshape(shape)[m, k]
            raise self._misplaced(int(indices[k]), numbers[m], int(place), int(size))
        starts = np.where(present, ptrs + plan.record_sizes, ptrs)
        return Bounds(starts.reshape(shape), ends, present.reshape(shape))

    def fetch_data(self, numbers: Sequence[int], bounds: Bounds) -> None:
        """Has the data of a batch of a mapped file paged in where it is not."""
        # The payloads of a sample are neighbours, so a batch is probed, and requested, as a whole.
        if self.mapped is not None:
            self.mapped.pages.fetch(np.asarray(bounds.starts), np.asarray(bounds.ends))

    def _plan(self, numbers: Sequence[int]) -> _Plan:
        key = tuple(numbers)
        plan = self._plans.get(key)
        if plan is None:
            # For one modality without dimensions: NumPy takes half the time for such.
            shape = (len(numbers), 1) if len(numbers) > 1 else ()
            column = np.array(numbers, np.int64).reshape(shape)
            records = [self.modalities[number].metadata_size for number in numbers]
            plan = self._plans[key] = _Plan(
                first_cells=np.asarray(2 * self._num_samples * column),
                to_sizes=np.asarray(2 * self._num_samples * (column + 1)),
                record_sizes=np.array(records, np.uint64).reshape(shape),
            )
        return plan

    def _bounds_by_headers(self, indices: npt.NDArray[np.int64], numbers: Sequence[int]) -> Bounds:
        places = [self._locate_by_headers(indices, number) for number in numbers]
        present = np.array([found.present for found in places])
        ptrs, sizes = np.array([found.ptrs for found in places]), np.array([found.sizes for found in places])
        records = self._plan(numbers).record_sizes.reshape(-1, 1)
        return Bounds(np.where(present, ptrs + records, ptrs), ptrs + sizes, present)

    def _locate_by_headers(self, indices: npt.NDArray[np.int64], number: int) -> Places:
        starts, lengths, bad = self._sample_places(gather([self._index_table], indices)[0])
        if bad.any():
            k = int(bad.argmax())
            raise self._misplaced(int(indices[k]), None, int(starts[k]), int(lengths[k]))
        header_size = self._header_type.itemsize
        views = self._source.view_many([(ptr, header_size) for ptr in starts.tolist()])
        headers = np.frombuffer(b"".join(views), self._header_type)
        present = (headers["mask"] >> np.uint32(number)) & np.uint32(1) == 1
        offsets, sizes = (headers[key][:, number].astype(np.uint64) for key in ("offsets", "sizes"))
        bad = (offsets > lengths) | (sizes > lengths - offsets) | (offsets < header_size)
        bad |= sizes < self.modalities[number].metadata_size
        ptrs = starts + offsets
        self._refuse(np.where(present, bad, (offsets | sizes) != 0), indices, number, ptrs, sizes)
        ptrs[~present] = 0
        return Places(present=present, ptrs=ptrs, sizes=sizes, crcs=np.zeros(len(indices), np.uint32))

    def _sample_places(
        self, entries: npt.NDArray[np.void]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Position and size of the samples of index entries, and which do not lie within the file."""
        starts, lengths = entries["sample_ptr"], entries["sample_size"].astype(np.uint64)
        end = np.uint64(self._size)
        bad = (starts < self._body_ptr) | (starts > end) | (lengths > end - starts)
        return starts, lengths, bad | (lengths < self._header_type.itemsize)

    def _all_places(self, number: int) -> Iterator[tuple[int, Places]]:
        for first, last in spans(self._num_samples, batch.BLOCK_ROWS):
            yield first, self._locate(np.arange(first, last), (number,))[number]

    def presence(self, name: str) -> npt.NDArray[np.bool_]:
        """Which samples have a modality: (N,) bool."""
        number = self.number_of(name)
        if self.has_checksums:
            present: npt.NDArray[np.bool_] = self._columns[number][0].column() != 0
            return present
        return np.concatenate([np.zeros(0, np.bool_), *(places.present for _, places in self._all_places(number))])

    def sizes(self, name: str) -> npt.NDArray[np.uint32]:
        """Bytes of record and data of every sample: (N,) uint32, 0 where absent."""
        number = self.number_of(name)
        if self.has_checksums:
            return self._columns[number][1].column().copy()
        sizes = [places.sizes.astype(np.uint32) for _, places in self._all_places(number)]
        return np.concatenate([np.zeros(0, np.uint32), *sizes])

    def _stored_checksums(self, number: int) -> npt.NDArray[np.uint32]:
        return self._columns[number][2].column().copy()

    def records(self, name: str) -> npt.NDArray[np.uint8]:
        """Every metadata record: (N, metadata_size) uint8, gathered; see `PackedReader.records`."""
        number = self.number_of(name)
        size = self.modalities[number].metadata_size
        result = np.zeros((self._num_samples, size), np.uint8)
        for first, places in self._all_places(number):
            which = np.flatnonzero(places.present)
            views = self._source.view_many([(ptr, size) for ptr in places.ptrs[which].tolist()])
            result[first + which] = np.frombuffer(b"".join(views), np.uint8).reshape(-1, size)
        result.flags.writeable = False
        return result

    # Verifying.

    def _verify_body(self, damage: list[FileDamage]) -> int:
        num_payloads = 0
        for first, last in spans(self._num_samples, batch.BLOCK_ROWS):
            entries = self._index_table.span(first, last)
            starts, lengths, bad = self._sample_places(entries)
            for k in np.flatnonzero(bad).tolist():
                self._report(damage, self._misplaced(first + k, None, int(starts[k]), int(lengths[k])))
            directory = [[table.span(first, last) for table in tables] for tables in self._columns]
            for start, stop in blocks(np.where(bad, np.uint64(0), lengths), self.block_bytes):
                which = start + np.flatnonzero(~bad[start:stop])
                places = list(zip(starts[which].tolist(), lengths[which].tolist(), strict=True))
                checksums = entries["crc32c"][which].tolist()
                # By modality (position, size, checksum) of each sample: lists, as scalars of NumPy are slow.
                listed = [list(zip(*(c[which].tolist() for c in columns), strict=True)) for columns in directory]
                for n, view in enumerate(self._source.view_many(places)):
                    one = [each[n] for each in listed]
                    i = first + int(which[n])
                    num_payloads += self._verify_sample(damage, i, places[n][0], view, checksums[n], one)
                self._drop(starts[which], lengths[which])
        return num_payloads

    def _verify_sample(
        self,
        damage: list[FileDamage],
        i: int,
        start: int,
        view: memoryview,
        checksum: int,
        listed: list[tuple[int, ...]],
    ) -> int:
        """Checks one sample against its header, and the directory's (ptr, size, crc32c) against both."""
        header = np.frombuffer(view, self._header_type, 1)[0]
        mask, before, num_payloads = int(header["mask"]), len(damage), 0
        places = zip(header["offsets"].tolist(), header["sizes"].tolist(), strict=True)
        for number, (spec, (offset, size)) in enumerate(zip(self.modalities, places, strict=True)):
            present = bool(mask >> number & 1)
            num_payloads += present
            if present:
                wrong = size < spec.metadata_size or offset < self._header_type.itemsize or offset + size > len(view)
            else:
                wrong = bool(offset or size)
            if wrong:
                self._report(damage, self._misplaced(i, number, start + offset, size))
                continue
            if not self.has_checksums:
                continue
            place = (start + offset, size) if present else (0, 0)
            found = crc32c(view[offset : offset + size])
            *listed_place, expected = listed[number]
            if tuple(listed_place) != place:
                error = CorruptError(
                    self.path,
                    "the directory and the sample's header differ in (position, size)",
                    sample=i,
                    modality=spec.name,
                    found=tuple(listed_place),
                    expected=place,
                )
                self._report(damage, error)
            elif found != expected:
                self._report(damage, self._wrong_payload(i, number, found, expected))
        if mask >> len(self.modalities):
            limit = f"below {1 << len(self.modalities):#x}"
            self._report(damage, CorruptError(self.path, "the mask", sample=i, found=f"{mask:#x}", expected=limit))
        if self.has_checksums and len(damage) == before:
            found = crc32c(view)
            if found != checksum:
                what = "the sample's header or fill"
                self._report(damage, checksum_error(self.path, what, found=found, expected=checksum, sample=i))
        return num_payloads
