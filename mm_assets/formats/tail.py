"""The tail of both formats (4): section table, schema, and how a reader gets them in few requests.

Writing: `TailWriter` writes sections after the body and collects their table. Reading: `Tail.read` checks table and
section bounds against the file's size and parses the schema; tables that grow with the samples are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mm_assets.errors import CorruptError, EncodeError
from mm_assets.formats.batch import Head
from mm_assets.formats.byte_source import ByteSource, MappedFile
from mm_assets.formats.records import (
    SCHEMA_SECTION,
    SECTION_ALIGNMENT,
    SECTION_ENTRY,
    SECTION_TABLE_HEADER,
    VERSION,
    Buffer,
    Descriptor,
    ModalitySpec,
    Trailer,
    align,
    check_range,
    checksum_error,
    crc32c,
    name_hash,
)

HEAD_REQUEST = 8192  # MSTR's header page and its shadow; more than MULT's head ever takes
TAIL_REQUEST = 64 << 10  # section table and schema of ordinary files, and the trailer
LOCAL_TAIL_REQUEST = 8 << 10  # the same of a local file, where asking once more costs little

SECTION_NAMES = {1: "schema", 2: "sample ids", 3: "directory", 4: "index"}


def dump_schema(
    form: str,
    specs: Sequence[ModalitySpec],
    num_present: Sequence[int],
    provenance: Mapping[str, object],
    table_checksums: Sequence[int] | None = None,
) -> bytes:
    """The schema section (4.4); MSTR has a metadata table per modality, whose checksums it holds.

    Raises:
        EncodeError: a configuration or the provenance is not JSON.
    """
    checksums: Sequence[int | None] = table_checksums or [None] * len(specs)
    modalities = [modality_entry(*facts) for facts in zip(specs, num_present, checksums, strict=True)]
    return dump_json({"format": form, "version": VERSION, "modalities": modalities, "provenance": dict(provenance)})


def modality_entry(spec: ModalitySpec, num_present: int, table_crc32c: int | None) -> dict[str, Any]:
    """One modality as the schema lists it; the checksum is of its metadata table in MSTR."""
    checksum = {} if table_crc32c is None else {_TABLE_CRC32C: table_crc32c}
    return {
        "name": spec.name,
        "type": spec.type_name,
        "type_id": spec.type_id,
        "metadata_size": spec.metadata_size,
        "config": dict(spec.config),
        "num_present": num_present,
        **checksum,
    }


def dump_json(schema: Mapping[str, Any]) -> bytes:
    """A schema as its section holds it.

    Raises:
        EncodeError: it is not JSON.
    """
    try:
        text = json.dumps(schema, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EncodeError(f"a field's configuration or the provenance is not JSON: {error}") from error


class Appendable(Protocol):
    """A file that is written in order."""

    def tell(self) -> int:
        """Where the next byte goes."""

    def write(self, data: Buffer, /) -> None:
        """Appends bytes."""


class TailWriter:
    """Appends sections to a file that is positioned at the end of the body, and collects their table."""

    def __init__(self, file: Appendable) -> None:
        self._file = file
        self._entries: list[Section] = []

    def add(self, kind: int, *buffers: Buffer) -> None:
        """Writes one section, the buffers one after the other, at the next multiple of 64."""
        self.refer(kind, self._write(*buffers), sum(map(len, buffers)), crc32c(*buffers))

    def refer(self, kind: int, ptr: int, size: int, checksum: int) -> None:
        """Lists a section that is elsewhere."""
        self._entries.append(Section(kind, checksum, ptr, size))

    def finish(self) -> Trailer:
        """Writes the table; returns the trailer that finds it, without the head's checksum."""
        header = np.array((len(self._entries), 0), SECTION_TABLE_HEADER)
        table = header.tobytes() + np.array(sorted(self._entries), SECTION_ENTRY).tobytes()
        return Trailer(self._write(table), len(table), crc32c(table), 0, VERSION)

    def _write(self, *buffers: Buffer) -> int:
        end = self._file.tell()
        ptr = align(end, SECTION_ALIGNMENT)
        for buffer in (bytes(ptr - end), *buffers):
            self._file.write(buffer)
        return ptr


class Section(NamedTuple):
    """One entry of the section table."""

    kind: int
    crc32c: int
    ptr: int
    size: int


class Window:
    """Ranges near the head and the end of a file, fetched together and cached.

    Of a local file they are read, not touched in the mapping: a cold file is open after two small reads.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._tail_request = LOCAL_TAIL_REQUEST if isinstance(source, MappedFile) else TAIL_REQUEST
        size = source.size
        ranges = [(0, min(size, HEAD_REQUEST))]
        if size > HEAD_REQUEST:
            start = max(HEAD_REQUEST, size - self._tail_request)
            ranges.append((start, size - start))
        self._views = [(start, view) for (start, _), view in zip(ranges, self._read(ranges), strict=True)]

    def _read(self, ranges: list[tuple[int, int]]) -> list[memoryview]:
        if isinstance(self._source, MappedFile):
            return [self._source.read(start, size) for start, size in ranges]
        return self._source.view_many(ranges)

    def get(self, ptr: int, size: int) -> memoryview:
        """The bytes of a range that lies within the file, with what is before it if they must be fetched."""
        for start, view in self._views:
            if start <= ptr and ptr + size <= start + len(view):
                return view[ptr - start : ptr - start + size]
        # The schema is before the table: one request for both.
        start = max(0, min(ptr, ptr + size - self._tail_request))
        view = self._read([(start, ptr + size - start)])[0]
        self._views.append((start, view))
        return view[ptr - start :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What is after the body.

    Attributes:
        sections: those of the kinds that are known here, by kind; they lie within the file.
        entries: the section table as it is.
        table_end: the position after the section table.
        schema: the schema section, parsed.
        modalities: of each, what is in the schema.
        num_present: present rows per modality.
        table_checksums: CRC-32C per modality of its metadata table; empty in MULT, which has none.
    """

    sections: Mapping[int, Section]
    entries: tuple[Section, ...]
    table_end: int
    schema: dict[str, Any]
    modalities: tuple[ModalitySpec, ...]
    num_present: tuple[int, ...]
    table_checksums: tuple[int, ...]

    @classmethod
    def read(
        cls, source: ByteSource, window: Window, head: Head, trailer: Trailer, *, form: str, kinds: Sequence[int]
    ) -> Tail:
        """Reads and checks table and schema.

        Args:
            source: the file.
            window: bytes fetched so far.
            head: which the schema is compared with.
            trailer: where the table is.
            form: ``MULT`` or ``MSTR``.
            kinds: sections that must be there.

        Raises:
            FormatError: the tail is damaged.
        """
        path = source.name
        sections, entries = _read_table(source, window, trailer)
        for kind in kinds:
            if kind not in sections:
                found = ", ".join(SECTION_NAMES[known] for known in sorted(sections)) or "none"
                raise CorruptError(path, "a section is missing", found=found, expected=SECTION_NAMES[kind])
        section = sections[SCHEMA_SECTION]
        data = window.get(section.ptr, section.size)
        actual = crc32c(data)
        if actual != section.crc32c:
            raise checksum_error(path, "the schema section", found=actual, expected=section.crc32c)
        schema = _parse(path, data)
        modalities, num_present, table_checksums = _check_schema(path, schema, form, head)
        return cls(
            sections=sections,
            entries=entries,
            table_end=trailer.table_ptr + trailer.table_size,
            schema=schema,
            modalities=modalities,
            num_present=num_present,
            table_checksums=table_checksums,
        )


def _read_table(source: ByteSource, window: Window, trailer: Trailer) -> tuple[dict[int, Section], tuple[Section, ...]]:
    path = source.name
    ptr, size = trailer.table_ptr, trailer.table_size
    check_range(path, ptr, size, source.size, "the section table")
    if size < SECTION_TABLE_HEADER.itemsize:
        raise CorruptError(path, "the section table is too short", found=size, expected=SECTION_TABLE_HEADER.itemsize)
    table = window.get(ptr, size)
    actual = crc32c(table)
    if actual != trailer.table_crc32c:
        raise checksum_error(path, "the section table", found=actual, expected=trailer.table_crc32c)
    count = int(np.frombuffer(table, "<u4", 1)[0])
    expected = SECTION_TABLE_HEADER.itemsize + SECTION_ENTRY.itemsize * count
    if size != expected:
        raise CorruptError(path, f"the size of a section table of {count} sections", found=size, expected=expected)
    entries = np.frombuffer(table, SECTION_ENTRY, count, SECTION_TABLE_HEADER.itemsize).tolist()
    sections: dict[int, Section] = {}
    for section in map(Section._make, entries):
        name = SECTION_NAMES.get(section.kind)
        if name is None:
            continue  # of a later writer
        if section.kind in sections:
            raise CorruptError(path, f"the {name} section is listed twice")
        check_range(path, section.ptr, section.size, source.size, f"the {name} section")
        sections[section.kind] = section
    return sections, tuple(map(Section._make, entries))


def _parse(path: str, data: Buffer) -> dict[str, Any]:
    try:
        schema = json.loads(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number or a nesting beyond Python's limits
        raise CorruptError(path, f"the schema section is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise CorruptError(path, "the schema section", found=type(schema).__name__, expected="an object")
    return schema


def _check_schema(
    path: str, schema: Mapping[str, Any], form: str, head: Head
) -> tuple[tuple[ModalitySpec, ...], tuple[int, ...], tuple[int, ...]]:
    for key, expected in (("format", form), ("version", VERSION)):
        if schema.get(key) != expected:
            raise CorruptError(path, f"the schema's {key!r}", found=repr(schema.get(key)), expected=repr(expected))
    if not isinstance(schema.get("provenance"), dict):
        raise CorruptError(
            path, "the schema's 'provenance'", found=repr(schema.get("provenance")), expected="an object"
        )
    entries = schema.get("modalities")
    if not isinstance(entries, list) or len(entries) != len(head.descriptors):
        found = len(entries) if isinstance(entries, list) else type(entries).__name__
        raise CorruptError(path, "the schema's 'modalities'", found=found, expected=len(head.descriptors))
    specs, counts, checksums = [], [], []
    for entry, descriptor in zip(entries, head.descriptors, strict=True):
        spec, present, checksum = _check_modality(path, entry, descriptor, form)
        if not 0 <= present <= head.num_samples:
            expected = f"0..{head.num_samples}"
            raise CorruptError(path, "num_present", modality=spec.name, found=present, expected=expected)
        specs.append(spec)
        counts.append(present)
        checksums += [] if checksum is None else [checksum]
    return tuple(specs), tuple(counts), tuple(checksums)


_TABLE_CRC32C = "table_crc32c"
_KEYS: dict[str, type] = {
    "name": str,
    "type": str,
    "type_id": int,
    "metadata_size": int,
    "config": dict,
    "num_present": int,
}


def _check_modality(
    path: str, entry: object, descriptor: Descriptor, form: str
) -> tuple[ModalitySpec, int, int | None]:
    if not isinstance(entry, dict):
        raise CorruptError(path, "a modality of the schema", found=type(entry).__name__, expected="an object")
    keys = {**_KEYS, _TABLE_CRC32C: int} if form == "MSTR" else _KEYS
    for key, kind in keys.items():
        if type(entry.get(key)) is not kind:  # a bool is an int to isinstance
            found = repr(entry.get(key))
            raise CorruptError(path, f"{key!r} of a modality of the schema", found=found, expected=kind.__name__)
    try:
        spec = ModalitySpec(
            name=entry["name"],
            type_id=entry["type_id"],
            metadata_size=entry["metadata_size"],
            type_name=entry["type"],
            config=entry["config"],
        )
    except EncodeError as error:
        raise CorruptError(path, f"a modality of the schema: {error}") from error
    check_descriptor(path, spec, descriptor)
    return spec, entry["num_present"], entry.get(_TABLE_CRC32C)


def check_descriptor(path: str, spec: ModalitySpec, descriptor: Descriptor) -> None:
    """Refuses, with `CorruptError`, a head that describes another modality."""
    for what, found, expected in (
        ("name's hash", descriptor.name_hash, name_hash(spec.name)),
        ("type_id", descriptor.type_id, spec.type_id),
        ("metadata_size", descriptor.metadata_size, spec.metadata_size),
    ):
        if found != expected:
            detail = f"the {what} in the head"
            raise CorruptError(path, detail, modality=spec.name, found=found, expected=expected)
