"""What both readers share: opening, checking what the caller gives, batches, and the walk of `verify`.

For any bytes, opening and reading them works or raises `FormatError`. Opening costs the same for any number of samples:
head, section table and schema are checked; tables that grow with the samples are viewed in place, and every pointer
and size is checked when it is used, for a batch in one NumPy expression.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from operator import eq
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mm_assets.errors import CorruptError, FormatError, LimitError, SchemaMismatchError, TruncatedError
from mm_assets.formats import batch
from mm_assets.formats.batch import (
    Bounds,
    Chunk,
    Column,
    Head,
    Indices,
    Places,
    blocks,
    check_index,
    check_indices,
    spans,
)
from mm_assets.formats.byte_source import WHOLE_LIMIT, ByteSource, MappedFile, Region, Table, drop_pages
from mm_assets.formats.records import (
    IDS_SECTION,
    MAX_MODALITIES,
    Descriptor,
    ModalitySpec,
    Payload,
    check_range,
    checksum_error,
    crc32c,
    crc32c_each,
    name_hash,
)
from mm_assets.formats.report import FileDamage, VerifyReport
from mm_assets.formats.sample_ids import NumberedIds, SampleIds, StoredIds
from mm_assets.formats.stored import StoredPayload
from mm_assets.formats.tail import SECTION_NAMES, Section, Tail, Window, check_descriptor

T = TypeVar("T")

RangeReader: TypeAlias = Callable[[int, bytes | memoryview, int], Generator[tuple[int, int], memoryview, T]]
"""Reads a payload by ranges: see `PackedReader.read_ranges`."""


class PackedReader(ABC):
    """Reads one packed file; see `MultReader` and `MstrReader`, and `open_reader` for either.

    Payloads are `memoryview`s into the mapping, valid as long as someone holds them, also after `close`. A reader may
    be used by several threads; it pickles by path, and opens the file again.

    Args:
        source: a local path, or a source of byte ranges; the reader closes it.
        modalities: needed for a file without our tail; for any other, checked against it.
        verify: check the CRC-32C of every payload that is read, and that what is absent was so when it was written.
        window: what `open_reader` has fetched of the source already.

    Attributes:
        path: path or URL of the file.
        names: of the modalities, in the file's order.
        modalities: the specification of each.
        schema: the schema section; empty in a file without our tail.
        sample_ids: the samples' ids, in order.
        has_checksums: whether the file has our tail, and so checksums, ids and a schema.
        mapped: the mapping of a local file; None of any other.
        verifies: whether every payload that is read has its checksum checked.
        block_bytes: payload bytes that `verify` and `scan` hold at a time; one payload may be larger. If these are
            copied, fewer are faster, since they stay in the processor's cache; by requests, more are.
        raw_cache: what `fast_path` caches of this file, a type of its own; None until it does.

    Raises:
        FormatError: the file is not of this format, truncated, damaged, or of a later version.
        SchemaMismatchError: the file does not have the given modalities.
        OSError: the file cannot be read.
    """

    format: ClassVar[str]
    _sections_needed: ClassVar[tuple[int, ...]]  # without which a file of the format is damaged

    def __init__(
        self,
        source: str | os.PathLike[str] | ByteSource,
        *,
        modalities: Sequence[ModalitySpec] | None = None,
        verify: bool = False,
        window: Window | None = None,
    ) -> None:
        opened = isinstance(source, str | os.PathLike)
        self._source: ByteSource = MappedFile(source) if isinstance(source, str | os.PathLike) else source
        self.mapped = self._source if isinstance(self._source, MappedFile) else None
        self.verifies = verify
        self.block_bytes: int | None = None  # `batch.BLOCK_BYTES`
        self.raw_cache: Any = None
        self._intact: dict[int, npt.NDArray[np.bool_]] = {}  # payloads read in parts whose checksums were verified
        self._tables: list[Table] = []
        try:
            self._open(modalities, window)
        except BaseException:
            if opened:
                self._source.close()
            raise

    def _open(self, modalities: Sequence[ModalitySpec] | None, window: Window | None) -> None:
        self.path = self._source.name
        self._size = self._source.size
        window = window or Window(self._source)
        try:
            head = self._read_head(window)
        except TruncatedError:
            # A stream may have been added between reading the size and reading the head.
            if not (isinstance(self._source, MappedFile) and self._source.reopened()):
                raise
            self._size = self._source.size
            window = Window(self._source)
            head = self._read_head(window)
        self._num_samples = head.num_samples
        self.has_checksums = head.trailer is not None
        self._sections: Mapping[int, Section] = {}
        self._tail: Tail | None = None
        self.schema: dict[str, Any] = {}
        if head.trailer is None:
            self.modalities = self._given_modalities(modalities, head)
        else:
            self._tail = tail = Tail.read(
                self._source, window, head, head.trailer, form=self.format, kinds=self._sections_needed
            )
            self.modalities = tail.modalities
            self.schema = tail.schema
            self._sections = tail.sections
            if modalities is not None:
                self._match(modalities, head.descriptors)
        self.names = tuple(spec.name for spec in self.modalities)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self.sample_ids = self._open_ids()
        self._bind()

    # What a format adds.

    @abstractmethod
    def _read_head(self, window: Window) -> Head:
        """Checks the head, and that what it points to lies within the file."""

    @abstractmethod
    def _bind(self) -> None:
        """Makes the tables over what grows with the samples, by `_table`."""

    @abstractmethod
    def _read_one(self, i: int, number: int) -> tuple[Payload, int] | None:
        """One payload of a mapped file and its checksum, or None where absent."""

    @abstractmethod
    def _check_absent(self, absent: npt.NDArray[np.int64], number: int) -> None:
        """Raises `CorruptError` if one or more samples without a modality, of a file with checksums, had it once."""

    @abstractmethod
    def _locate(self, indices: npt.NDArray[np.int64], numbers: Sequence[int]) -> dict[int, Places]:
        """Where the payloads of samples are, by modality, checked; `CorruptError` where one is out of place."""

    @abstractmethod
    def data_bounds(self, indices: npt.NDArray[np.int64], numbers: Sequence[int]) -> Bounds:
        """Where the data of one or more samples of a mapped file is, without records; checked as by `_locate`.

        `indices` are as `check_indices` returns them; `numbers` are of the modalities.
        """

    @abstractmethod
    def _misplaced(self, i: int, number: int, ptr: int, size: int) -> CorruptError:
        """The error for a payload that is not where it may be."""

    @abstractmethod
    def fetch_data(self, numbers: Sequence[int], bounds: Bounds) -> None:
        """Has the data of a batch of a mapped file paged in where it is not."""

    def is_paged_in(self, number: int) -> bool:
        """Whether the data of a modality is small, and was paged in whole."""
        return False

    @abstractmethod
    def presence(self, name: str) -> npt.NDArray[np.bool_]:
        """Which samples have a modality: (N,) bool."""

    @abstractmethod
    def sizes(self, name: str) -> npt.NDArray[np.uint32]:
        """Bytes of record and data of every sample: (N,) uint32, 0 where absent."""

    @abstractmethod
    def records(self, name: str) -> npt.NDArray[np.uint8]:
        """Every metadata record of a modality: (N, metadata_size) uint8, zeros where absent; read-only."""

    @abstractmethod
    def _stored_checksums(self, number: int) -> npt.NDArray[np.uint32]:
        """The checksums that the file has, (N,)."""

    @abstractmethod
    def _verify_body(self, damage: list[FileDamage]) -> int:
        """Checks everything between head and tail; returns the number of payloads checked."""

    def _refuse(
        self,
        bad: npt.NDArray[np.bool_],
        indices: npt.NDArray[np.int64],
        number: int,
        ptrs: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
    ) -> None:
        """Raises the error of the first row of a batch that is bad, if any is."""
        if bad.any():
            k = int(bad.argmax())
            raise self._misplaced(int(indices[k]), number, int(ptrs[k]), int(sizes[k]))

    def _table(self, ptr: int, count: int, dtype: npt.DTypeLike, region: Region | None = None) -> Table:
        table = Table(self._source, ptr, count, dtype, region)
        self._tables.append(table)
        return table

    def _open_ids(self) -> SampleIds:
        section = self._sections.get(IDS_SECTION)
        if section is None:
            return NumberedIds(self.path, self._num_samples)
        least = 8 * (self._num_samples + 1)
        if section.size < least:
            raise CorruptError(self.path, "the sample ids section is short", found=section.size, expected=least)
        return StoredIds(self._source, section.ptr, section.size, self._num_samples)

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= MAX_MODALITIES:
            raise CorruptError(self.path, "the number of modalities", found=count, expected=f"1..{MAX_MODALITIES}")

    def _check_distinct(self, descriptors: Sequence[Descriptor]) -> None:
        hashes = [descriptor.name_hash for descriptor in descriptors]
        if len(set(hashes)) != len(hashes):
            raise CorruptError(self.path, "two modalities have the same name hash")

    def _given_modalities(self, given: Sequence[ModalitySpec] | None, head: Head) -> tuple[ModalitySpec, ...]:
        if given is None:
            raise TruncatedError(
                self.path,
                "no tail: the file is truncated, or another writer made it; then its modalities must be given",
            )
        if self.verifies:
            detail = "has no tail, and so no checksums: another writer made it; open it without verify=True"
            raise SchemaMismatchError(f"{self.path}: {detail}")
        self._match(given, head.descriptors)
        by_hash = {name_hash(spec.name): spec for spec in given}
        return tuple(by_hash[descriptor.name_hash] for descriptor in head.descriptors)

    def _match(self, given: Sequence[ModalitySpec], descriptors: Sequence[Descriptor]) -> None:
        """Refuses given modalities that are not the file's; their order does not matter."""
        by_hash = {descriptor.name_hash: descriptor for descriptor in descriptors}
        for spec in given:
            descriptor = by_hash.pop(name_hash(spec.name), None)
            if descriptor is None:
                raise SchemaMismatchError(f"{self.path}: no modality {spec.name!r} in the file, or it is given twice")
            try:
                check_descriptor(self.path, spec, descriptor)
            except CorruptError as error:
                raise SchemaMismatchError(f"{error}; the given modality is another") from error
        if by_hash:
            unnamed = ", ".join(f"{key:#010x}" for key in by_hash)
            raise SchemaMismatchError(f"{self.path}: the file has modalities that were not given (hashes {unnamed})")

    # Facts about the file.

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the samples come from, as it was given to the writer."""
        provenance: dict[str, Any] = self.schema.get("provenance", {})
        return provenance

    @property
    def parts(self) -> tuple[PackedReader, ...]:
        """The files that hold the samples: this one; of a `JoinedReader` several."""
        return (self,)

    def part_of(self, name: str) -> PackedReader:
        """Returns the file that holds a modality: this one. See `JoinedReader.part_of`."""
        return self

    def has_ids_of(self, other: PackedReader) -> bool:
        """Whether both files have the same ids in the same order.

        Compares the checksums of their ids sections, which opening has read; if one has no such section, the ids.
        """
        mine, its = self._sections.get(IDS_SECTION), other._sections.get(IDS_SECTION)
        if mine is None or its is None:
            return len(self) == len(other) and all(map(eq, self.sample_ids, other.sample_ids))
        return (mine.size, mine.crc32c) == (its.size, its.crc32c)

    def __len__(self) -> int:
        return self._num_samples

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {self._num_samples} samples, {', '.join(self.names)})"

    # Reading.

    def _checks(self, verify: bool | None) -> bool:
        return self.verifies if verify is None else verify and self.has_checksums

    def number_of(self, name: str) -> int:
        """The number of a modality in the file; `KeyError` where there is none of that name."""
        try:
            return self._numbers[name]
        except KeyError:
            raise KeyError(f"{self.path}: no modality {name!r}; it has {', '.join(self.names)}") from None

    def read_payload(self, i: int, name: str, *, verify: bool | None = None) -> Payload | None:
        """One payload, or None where the modality is absent.

        Args:
            i: index of the sample; negative counts from the end.
            name: the modality.
            verify: check the payload's checksum, where the file has it, or else that it was absent when the file was
                written; by default as the reader was opened.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            CorruptError: the bytes are out of place or, with `verify`, not those that were written, or lost.
        """
        number = self.number_of(name)
        i = check_index(i, self._num_samples, self.path)
        if self.mapped is None:  # there are requests to save
            return self.read_samples([i], (name,), verify=verify)[name][0]
        check, found = self._checks(verify), self._read_one(i, number)
        if found is None:
            if check:
                self._check_absent(np.array([i], np.int64), number)
            return None
        payload, expected = found
        if check and (actual := crc32c(*payload)) != expected:
            raise self._wrong_payload(i, number, actual, expected)
        return payload

    def read_samples(
        self, indices: Indices, names: Sequence[str] | None = None, *, verify: bool | None = None
    ) -> dict[str, list[Payload | None]]:
        """The payloads of many samples by modality, each list in the order of `indices`; one request to the source.

        Args:
            indices: of the samples, repeats allowed; negative count from the end.
            names: modalities to read; all by default.
            verify: as for `read_payload`.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            CorruptError: as for `read_payload`; nothing is returned then.
        """
        columns = self.read_columns(indices, names, verify=verify)
        return {name: column.payloads() for name, column in columns.items()}

    def _numbers_of(self, names: Sequence[str] | None) -> list[int]:
        return [self.number_of(name) for name in (self.names if names is None else names)]

    def read_columns(
        self,
        indices: Indices,
        names: Sequence[str] | None = None,
        *,
        verify: bool | None = None,
        in_parts: Collection[str] = (),
    ) -> dict[str, Column]:
        """The same as `read_samples`, records and data apart: for decoders of batches, and quicker.

        The payloads of modalities in `in_parts` are not read whole. In a mapped file the checksum of each is verified
        when it is first read so, and after that no page is read before it is used. Of any other file, payloads up to
        `WHOLE_LIMIT` are fetched and verified, and the data of larger ones are `StoredPayload`, not verified.
        """
        numbers = list(dict.fromkeys(self._numbers_of(names)))
        checked = check_indices(indices, self._num_samples, self.path)
        found = self._locate(checked, numbers)
        check = self._checks(verify)
        fetch_part = self._fetch_small if self.mapped is None else self._fetch_new
        columns: dict[str, Column] = {}
        for number in [number for number in numbers if self.names[number] in in_parts]:
            if self.mapped is not None or (found[number].sizes > WHOLE_LIMIT).any():
                columns |= fetch_part(checked, number, found.pop(number), check)
        columns |= self._fetch(checked, found, check)
        return {self.names[number]: columns[self.names[number]] for number in numbers}

    def _fetch_new(
        self, indices: npt.NDArray[np.int64], number: int, places: Places, verify: bool
    ) -> dict[str, Column]:
        """The payloads of one modality in a mapped file, of which only those not verified before are read."""
        intact = self._intact.get(number)
        if intact is None:
            intact = self._intact[number] = np.zeros(self._num_samples, np.bool_)
        is_new = places.present & ~intact[indices]
        if verify and is_new.any():
            rows = np.flatnonzero(is_new)
            self._fetch(indices[rows], {number: places.take(rows)}, verify=True)
            intact[indices[rows]] = True
        if verify and not places.present.all():
            self._check_absent(indices[~places.present], number)
        which = places.present
        ranges = zip(places.ptrs[which].tolist(), places.sizes[which].tolist(), strict=True)
        views = iter([self._source.view(*where) for where in ranges])
        return {self.names[number]: self._column(indices, number, places, places.rows(), views, verify=False)}

    def _fetch_small(
        self, indices: npt.NDArray[np.int64], number: int, places: Places, verify: bool
    ) -> dict[str, Column]:
        """The payloads of one modality in a file that is not mapped, of which large ones are not fetched."""
        name, is_large = self.names[number], places.sizes > WHOLE_LIMIT
        large, small = np.flatnonzero(is_large), np.flatnonzero(~is_large)
        fetched = self._fetch(indices[small], {number: places.take(small)}, verify)[name]
        records = np.zeros((len(indices), self.modalities[number].metadata_size), np.uint8)
        records[small], records[large] = fetched.records, self.read_records(indices[large], [name])[name][1]
        datas: list[Any] = [None] * len(indices)
        for rows, some in ((small, fetched.datas), (large, self.stored(indices[large], [name])[name])):
            for row, data in zip(rows.tolist(), some, strict=True):
                datas[row] = data
        return {name: Column(records, datas)}

    def read_records(
        self, indices: Indices, names: Sequence[str] | None = None
    ) -> dict[str, tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]]:
        """Which samples have a modality, (n,) bool, and their metadata records, (n, metadata_size) uint8; no data.

        Args:
            indices: of the samples, repeats allowed; negative count from the end.
            names: modalities; all by default.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            CorruptError: a payload is out of place.
        """
        numbers = list(dict.fromkeys(self._numbers_of(names)))
        checked = check_indices(indices, self._num_samples, self.path)
        places = self._locate(checked, numbers)
        sizes = {number: self.modalities[number].metadata_size for number in numbers}
        beside = [number for number in numbers if places[number].records is None]
        ranges = [
            (ptr, sizes[number]) for number in beside for ptr in places[number].ptrs[places[number].present].tolist()
        ]
        views = iter(self._source.view_many(ranges))
        result = {}
        for number in numbers:
            present, records = places[number].present, places[number].records
            if records is None:
                records = np.zeros((len(checked), sizes[number]), np.uint8)
                taken = b"".join(islice(views, int(present.sum())))
                records[present] = np.frombuffer(taken, np.uint8).reshape(-1, sizes[number])
            result[self.names[number]] = (present, records)
        return result

    def read_columns_each(self, indices: Mapping[str, Indices], *, verify: bool | None = None) -> dict[str, Column]:
        """As `read_columns`, with samples of its own for each modality; one request to the source."""
        own = {
            self.number_of(name): check_indices(rows, self._num_samples, self.path) for name, rows in indices.items()
        }
        places = {number: self._locate(rows, [number])[number] for number, rows in own.items()}
        return self._fetch(own, places, self._checks(verify))

    def _fetch(
        self,
        indices: npt.NDArray[np.int64] | Mapping[int, npt.NDArray[np.int64]],
        places: Mapping[int, Places],
        verify: bool,
    ) -> dict[str, Column]:
        """The payloads of a batch, of the same samples or by modality; one request to the source."""
        own = indices if isinstance(indices, Mapping) else dict.fromkeys(places, indices)
        if not places:
            return {}
        rows = {number: found.rows() for number, found in places.items()}
        starts = np.concatenate([found.ptrs[rows[number]] for number, found in places.items()])
        sizes = np.concatenate([found.sizes[rows[number]] for number, found in places.items()])
        if self.mapped is not None:
            views = iter(self.mapped.slices(starts, starts + sizes))
        else:
            views = iter(self._source.view_many(list(zip(starts.tolist(), sizes.tolist(), strict=True))))
        return {
            self.names[number]: self._column(own[number], number, found, rows[number], views, verify)
            for number, found in places.items()
        }

    def _column(
        self,
        indices: npt.NDArray[np.int64],
        number: int,
        found: Places,
        rows: slice | npt.NDArray[np.intp],
        views: Iterator[memoryview],
        verify: bool,
    ) -> Column:
        """One modality of a batch; takes as many views as rows are present."""
        local = indices[rows]
        taken = list(islice(views, len(local)))
        records = None if found.records is None else found.records[rows]
        if verify:  # first: it has what is not in memory yet brought there without the interpreter's lock
            before = repeat(0) if records is None else crc32c_each(_bytes_of_rows(records))
            checked, expected = crc32c_each(taken, before), found.crcs[rows].tolist()
            if checked != expected:
                k = next(k for k, (one, two) in enumerate(zip(checked, expected, strict=True)) if one != two)
                raise self._wrong_payload(int(local[k]), number, checked[k], expected[k])
            if len(local) < len(indices):
                self._check_absent(indices[~found.present], number)
        if records is None:
            size = self.modalities[number].metadata_size
            if self.mapped is not None:
                records = self.mapped.gather(found.ptrs[rows], size)
            else:
                table = np.frombuffer(bytearray().join([view[:size] for view in taken]), np.uint8)
                records = table.reshape(len(local), size)
            taken = [view[size:] for view in taken]
        if len(local) == len(indices):
            return Column(records, [*taken])
        all_records = np.zeros((len(indices), records.shape[1]), np.uint8)
        all_records[rows] = records
        scattered: list[memoryview | None] = [None] * len(indices)
        for row, data in zip(np.flatnonzero(found.present).tolist(), taken, strict=True):
            scattered[row] = data
        return Column(all_records, scattered)

    def read_sample(
        self, i: int, names: Sequence[str] | None = None, *, verify: bool | None = None
    ) -> dict[str, Payload | None]:
        """The payloads of one sample by name, None where absent.

        Args:
            i: index of the sample; negative counts from the end.
            names: modalities to read; all by default.
            verify: as for `read_payload`.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            CorruptError: as for `read_payload`.
        """
        if self.mapped is not None:
            wanted = self.names if names is None else names
            return {name: self.read_payload(i, name, verify=verify) for name in wanted}
        return {name: payloads[0] for name, payloads in self.read_samples([i], names, verify=verify).items()}

    def stored(self, indices: Indices, names: Sequence[str] | None = None) -> dict[str, list[StoredPayload | None]]:
        """Where the payloads of samples are, to be read in parts, by modality; None where absent. Reads no data.

        Args:
            indices: of the samples, repeats allowed; negative count from the end.
            names: modalities; all by default.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            CorruptError: a payload is out of place.
        """
        numbers = list(dict.fromkeys(self._numbers_of(names)))
        checked = check_indices(indices, self._num_samples, self.path)
        # Views of a mapping would stay in this process' resident memory, and there are none after `close`.
        source = self._source.file if isinstance(self._source, MappedFile) else self._source
        found: dict[str, list[StoredPayload | None]] = {}
        for number, places in self._locate(checked, numbers).items():
            record_size = self.modalities[number].metadata_size
            records = [None] * len(checked) if places.records is None else [row.tobytes() for row in places.records]
            before = record_size if places.records is None else 0  # of `ptrs`, bytes that are not data
            facts = (places.present.tolist(), places.ptrs.tolist(), places.sizes.tolist(), places.crcs.tolist())
            found[self.names[number]] = [
                StoredPayload(
                    source=source,
                    offset=ptr + before,
                    size=size - before,
                    record_size=record_size,
                    record=record,
                    crc32c=crc if self.has_checksums else None,
                )
                if present
                else None
                for present, ptr, size, crc, record in zip(*facts, records, strict=True)
            ]
        return found

    def read_ranges(self, indices: Indices, name: str, read: RangeReader[T]) -> list[T | None]:
        """What is read of the payloads of many samples by ranges, None where absent.

        What the readers of all payloads ask for at a time is one request to the source. Checksums are not verified.

        Args:
            indices: of the samples, repeats allowed; negative count from the end.
            name: the modality.
            read: takes a sample's index, its metadata record and the size of its data. A generator: it yields
                (offset, size) of the data, gets their bytes, and returns the result.

        Raises:
            IndexError: no such sample.
            KeyError: no such modality.
            CorruptError: a payload is out of place.
            FormatError: what `read` raises of the first payload that it refuses; likewise LimitError.
        """
        number = self.number_of(name)
        checked = check_indices(indices, self._num_samples, self.path)
        places = self._locate(checked, [number])[number]
        rows, record_size = np.flatnonzero(places.present), self.modalities[number].metadata_size
        starts, sizes = places.ptrs[rows].tolist(), places.sizes[rows].tolist()
        if places.records is None:
            records: list[Any] = self._views([(start, record_size) for start in starts])
            starts, sizes = [start + record_size for start in starts], [size - record_size for size in sizes]
        else:
            records = _bytes_of_rows(places.records[rows])
        results: list[T | None] = [None] * len(checked)
        failed: tuple[int, FormatError | LimitError] | None = None
        waiting: list[tuple[int, int, Generator[tuple[int, int], memoryview, T], Any]] = [
            (row, start, read(int(checked[row]), record, size), None)
            for row, start, record, size in zip(rows.tolist(), starts, records, sizes, strict=True)
        ]
        while waiting:
            asked = []
            for row, start, reading, answer in waiting:
                if failed is not None and row > failed[0]:
                    break  # an earlier row may still fail
                try:
                    offset, size = reading.send(answer)
                except StopIteration as end:
                    results[row] = end.value
                except (FormatError, LimitError) as error:
                    failed = (row, error)
                else:
                    asked.append((row, start, reading, (start + offset, size)))
            views = self._views([place for *_, place in asked])
            waiting = [(*one[:3], view) for one, view in zip(asked, views, strict=True)]
        if failed is not None:
            raise failed[1]
        return results

    def _views(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of ranges; one request to the source for those that are not empty."""
        views = iter(self._source.view_many([place for place in ranges if place[1]]) if ranges else ())
        return [next(views) if size else memoryview(b"") for _, size in ranges]

    def checksums(self, name: str) -> npt.NDArray[np.uint32]:
        """CRC-32C of every payload: (N,) uint32, 0 where absent; computed where the file has none.

        Raises:
            KeyError: no such modality.
            CorruptError: a payload that must be read is out of place.
        """
        number = self.number_of(name)
        if self.has_checksums:
            return self._stored_checksums(number)
        result = np.zeros(self._num_samples, np.uint32)
        for block in self.scan((name,)):
            payloads = block.payloads[name]
            result[block.indices] = [0 if payload is None else crc32c(*payload) for payload in payloads]
        return result

    def scan(self, names: Sequence[str] | None = None, *, verify: bool | None = None) -> Iterator[Chunk]:
        """All samples in order, in blocks of bounded size.

        Pages of a block leave this process' resident memory when the next is asked for (its views stay valid).

        Args:
            names: modalities to read; all by default.
            verify: check every payload's checksum; by default as the reader was opened.

        Raises:
            KeyError: no such modality.
            CorruptError: a payload is out of place or, with `verify`, damaged.
        """
        return scan_files([(self, self.names if names is None else names)], verify=verify)

    def _drop(self, ptrs: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> None:
        """Releases the pages of checked ranges, from their lowest byte to their highest."""
        which = sizes > 0
        if which.any():
            start = int(ptrs[which].min())
            drop_pages(self._source, start, int((ptrs + sizes)[which].max()) - start)

    def _wrong_payload(self, i: int, number: int, found: int, expected: int) -> CorruptError:
        name = self.names[number]
        return checksum_error(self.path, "the payload", found=found, expected=expected, sample=i, modality=name)

    # Verifying.

    def verify(self) -> VerifyReport:
        """Reads everything and reports what is damaged; memory is bounded by blocks.

        Checks the head's copies, every section's and payload's checksum, every pointer, the ids, MULT's directory
        against its sample headers, and presence against the schema. Of a file without a tail only structure.
        """
        damage: list[FileDamage] = []
        self._verify_sections(damage)
        ids = self.sample_ids
        if isinstance(ids, StoredIds):
            try:
                ids.check()
            except FormatError as error:
                self._report(damage, error)
        num_payloads = self._verify_body(damage)
        if self._tail is not None:
            for name, expected in zip(self.names, self._tail.num_present, strict=True):
                found = int(self.presence(name).sum())
                if found != expected:
                    detail = "present rows differ from the schema"
                    self._report(damage, CorruptError(self.path, detail, modality=name, found=found, expected=expected))
        return VerifyReport(
            path=self.path, num_samples=self._num_samples, num_payloads=num_payloads, damage=tuple(damage)
        )

    def _verify_sections(self, damage: list[FileDamage]) -> None:
        size_left = (
            self._source.size
        )  # of unknown sections: if they overlapped, a table could ask for any amount of work
        entries = self._tail.entries if self._tail is not None else ()
        for section in sorted(entries, key=lambda section: (section.kind not in SECTION_NAMES, section)):
            name = SECTION_NAMES.get(section.kind)
            what = f"the section of unknown kind {section.kind}" if name is None else f"the {name} section"
            if name is None:  # the others were checked when the file was opened
                try:
                    check_range(self.path, section.ptr, section.size, self._source.size, what)
                except FormatError as error:
                    self._report(damage, error)
                    continue
                size_left -= section.size
                if size_left < 0:
                    self._report(damage, CorruptError(self.path, "sections of unknown kinds are larger than the file"))
                    break
            found = 0
            for start in range(section.ptr, section.ptr + section.size, batch.BLOCK_BYTES):
                view = self._source.view_many([(start, min(batch.BLOCK_BYTES, section.ptr + section.size - start))])[0]
                found = crc32c(view, start=found)
                drop_pages(self._source, start, len(view))
            if found != section.crc32c:
                self._report(damage, checksum_error(self.path, what, found=found, expected=section.crc32c))

    def _report(self, damage: list[FileDamage], error: FormatError) -> None:
        """Notes one error, with the sample's id where that can still be read."""
        sample_id = None
        if error.sample is not None:
            try:
                sample_id = self.sample_ids[error.sample]
            except FormatError:
                sample_id = None  # the ids are damaged too, and reported so
        message = error.detail
        if error.found is not None or error.expected is not None:
            message += f" (found {error.found}, expected {error.expected})"
        damage.append(FileDamage(sample=error.sample, sample_id=sample_id, modality=error.modality, message=message))

    # Life time.

    def close(self) -> None:
        """Closes the file; closing twice is fine, and reading afterwards raises `ValueError`.

        Views and arrays that were returned stay valid: they keep the mapping, and with it the file's disk space,
        until the last of them is gone.
        """
        for table in self._tables:
            table.forget()
        if isinstance(self.sample_ids, StoredIds):
            self.sample_ids.forget()
        self.raw_cache = None
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        source = self._source.path if isinstance(self._source, MappedFile) else self._source
        modalities = None if self.has_checksums else self.modalities
        return _reopen, (type(self), source, modalities, self.verifies)


def scan_files(files: Sequence[tuple[PackedReader, Sequence[str]]], *, verify: bool | None = None) -> Iterator[Chunk]:
    """Yields all samples of files that hold the same samples, in order; see `PackedReader.scan`.

    Args:
        files: each with the modalities to read of it; one or more.
        verify: as for `PackedReader.scan`.
    """
    parts = [(reader, reader._numbers_of(names), reader._checks(verify)) for reader, names in files]
    return _scan_parts(len(files[0][0]), parts)


def _scan_parts(count: int, parts: Sequence[tuple[PackedReader, Sequence[int], bool]]) -> Iterator[Chunk]:
    for first, last in spans(count, batch.BLOCK_ROWS):
        indices = np.arange(first, last)
        located = [reader._locate(indices, numbers) for reader, numbers, _ in parts]
        sizes = np.zeros(len(indices), np.uint64)
        for found in chain.from_iterable(one.values() for one in located):
            sizes += found.sizes
        for start, stop in blocks(sizes, parts[0][0].block_bytes):
            runs = [{number: found.run(start, stop) for number, found in one.items()} for one in located]
            payloads: dict[str, list[Payload | None]] = {}
            for (reader, _, check), run in zip(parts, runs, strict=True):
                columns = reader._fetch(indices[start:stop], run, check)
                payloads.update((name, column.payloads()) for name, column in columns.items())
            yield Chunk(indices=indices[start:stop], payloads=payloads)
            for (reader, _, _), run in zip(parts, runs, strict=True):
                for found in run.values():
                    reader._drop(found.ptrs, found.sizes)


def _bytes_of_rows(records: npt.NDArray[np.uint8]) -> list[bytes]:
    """Each of the metadata records (n, metadata_size) as bytes."""
    rows: list[bytes] = np.ascontiguousarray(records).view(f"V{records.shape[1]}").ravel().tolist()
    return rows


def _reopen(
    cls: type[PackedReader], source: str | ByteSource, modalities: Sequence[ModalitySpec] | None, verify: bool
) -> PackedReader:
    return cls(source, modalities=modalities, verify=verify)
