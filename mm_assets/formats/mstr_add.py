"""Adding a stream to an MSTR file in place (3, "Adding a stream"): no byte of what is there moves or changes.

New bytes are written after the live end and synced first; then the shadow of the header page is written, then the page
itself, with a sync in between. A failure at any point leaves a file that reads as before or as after, and to which the
stream can be added again. Memory does not grow with the file or the payloads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence

from mm_assets.errors import EncodeError
from mm_assets.formats.mstr_reader import MstrReader, page_checksums
from mm_assets.formats.mstr_writer import check_payload_size, header_page
from mm_assets.formats.output import GrowingFile, JoinedFile
from mm_assets.formats.records import (
    FILL,
    MSTR_ROW_PREFIX,
    MSTR_SHADOW_PTR,
    PAGE,
    PAYLOAD_ALIGNMENT,
    ROW_PREFIX,
    SCHEMA_SECTION,
    ModalitySpec,
    Payload,
    align,
    crc32c,
    name_hash,
)
from mm_assets.formats.report import WriteSummary
from mm_assets.formats.tail import Section, TailWriter, dump_json, modality_entry
from mm_assets.formats.writer import check_modalities, checked_payload


def add_stream(
    path: str | os.PathLike[str],
    spec: ModalitySpec,
    payloads: Iterable[Payload | None],
    *,
    fsync: bool = True,
) -> WriteSummary:
    """Adds a modality to an MSTR file, in place. Readers that have the file open continue; new ones see the stream.

    Args:
        path: a local MSTR file.
        spec: the new modality.
        payloads: one per sample in the file's order, None where absent; taken one at a time.
        fsync: wait for the disk between the steps. Without it a crash of the machine may damage the file.

    Returns:
        The file as it is now.

    Raises:
        EncodeError: the modality conflicts with those of the file, there are not as many payloads as samples, or
            a payload does not fit. The file is as before.
        FormatError: the file is not a whole MSTR file with a tail.
        BlockingIOError: another process is adding to the file; it is not waited for.
        OSError: the file cannot be read or written, or a writer replaced it meanwhile.
    """
    file = GrowingFile(path, fsync=fsync)
    try:
        summary = grow(file, spec, payloads)
        file.check_at_place()
        return summary
    finally:
        file.close()


def grow(file: GrowingFile, spec: ModalitySpec, payloads: Iterable[Payload | None]) -> WriteSummary:
    """Adds a modality to a file that is locked and stays open; see `add_stream`."""
    reader = MstrReader(file)  # refuses a file that is not whole before anything is written
    tail, end = reader.live()
    check_modalities(file.path, (*reader.modalities, spec))
    dump_json(modality_entry(spec, 0, 0))  # refused now rather than after all payloads
    _make_pages_equal(file)
    if file.size > end:
        file.truncate(end)  # what a failed attempt left
    try:
        page, num_present = _append(file, reader, tail.entries, end, spec, payloads)
        file.sync()
    except BaseException:
        # If even this fails, the bytes stay after the end, where no reader reads.
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise
    # From here on nothing may be truncated: as soon as one page is on the disk, it leads to the new bytes.
    for position in (MSTR_SHADOW_PTR, 0):
        file.write(page, position)
        file.sync()
    present = dict(zip(reader.names, tail.num_present, strict=True)) | {spec.name: num_present}
    return WriteSummary(path=file.path, num_samples=len(reader), num_bytes=file.size, num_present=present)


def _make_pages_equal(file: GrowingFile) -> None:
    """Restores a damaged header page from its shadow, or else the shadow from the page."""
    start = bytes(file.view(0, MSTR_SHADOW_PTR + PAGE))
    page, shadow = start[:PAGE], start[MSTR_SHADOW_PTR:]
    if page == shadow:
        return
    sums = page_checksums(page)
    if sums is not None and sums[0] == sums[1]:
        file.write(page, MSTR_SHADOW_PTR)  # of a failed attempt
    else:
        file.write(shadow, 0)  # the reader, which opened the file, has checked it
    file.sync()


def _append(
    file: GrowingFile,
    reader: MstrReader,
    sections: Sequence[Section],
    end: int,
    spec: ModalitySpec,
    payloads: Iterable[Payload | None],
) -> tuple[bytes, int]:
    """Writes everything new after the end; returns the header page that leads to it, and the present rows."""
    stride = MSTR_ROW_PREFIX.itemsize + spec.metadata_size
    metadata_ptr = align(end, PAGE)
    data_ptr = align(metadata_ptr + stride * len(reader), PAGE)
    # The number of rows is known, so table and data are written side by side.
    rows, data = JoinedFile(file), JoinedFile(file)
    rows.seek(metadata_ptr)
    data.seek(data_ptr)
    num_present, table_crc32c = _write_rows(rows, data, reader, spec, payloads)
    rows.flush()
    data_size = data.tell() - data_ptr
    tail = TailWriter(data)
    for kind, checksum, ptr, size in sections:
        if kind != SCHEMA_SECTION:
            tail.refer(kind, ptr, size, checksum)
    modalities = [*reader.schema["modalities"], modality_entry(spec, num_present, table_crc32c)]
    tail.add(SCHEMA_SECTION, dump_json({**reader.schema, "modalities": modalities}))
    trailer = tail.finish()
    data.flush()
    stream = (name_hash(spec.name), spec.type_id, 0, metadata_ptr, stride, 0, data_ptr, data_size)
    return header_page(len(reader), (*reader.stream_table, stream), trailer), num_present


def _write_rows(
    rows: JoinedFile, data: JoinedFile, reader: MstrReader, spec: ModalitySpec, payloads: Iterable[Payload | None]
) -> tuple[int, int]:
    """Writes table and data; returns the present rows and the table's checksum."""
    stride = MSTR_ROW_PREFIX.itemsize + spec.metadata_size
    absent = bytes(stride)
    count = num_present = checksum = 0
    for i, payload in enumerate(payloads):
        count = i + 1
        if count > len(reader):
            raise EncodeError(f"{reader.path}: more than {len(reader)} payloads for {len(reader)} samples")
        if payload is None:
            rows.write(absent)
            checksum = crc32c(absent, start=checksum)
            continue
        try:
            checked = checked_payload(spec, payload)
            check_payload_size(spec, checked)
        except EncodeError as error:
            raise EncodeError(f"{reader.path}, sample {i} ({reader.sample_ids[i]!r}), {error}") from error
        prefix = ROW_PREFIX.pack(data.tell(), len(checked.data), crc32c(*checked))
        rows.write_all((prefix, checked.metadata))
        checksum = crc32c(prefix, checked.metadata, start=checksum)
        data.write_all((checked.data, FILL[: -len(checked.data) % PAYLOAD_ALIGNMENT]))
        num_present += 1
    if count < len(reader):
        raise EncodeError(f"{reader.path}: {count} payloads for {len(reader)} samples")
    return num_present, checksum
