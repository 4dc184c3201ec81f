"""Where a sample came from: its rows, and the shard, member and byte range of each; and back from there to samples.

Everything follows from the tables of one partition. Content is read where a row's own locator points to, or out of the
table: a caller names rows and members, never a file or a range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from mm_assets.errors import MmAssetsError, SourceError, first_line
from mm_assets.pipeline.chain import DROPPED, MATERIALIZED_ROWS, RAW_SHARDS
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Partition
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.references import CHECKSUM, SIZE
from mm_assets.rows.schema import MULTIMODAL_SCHEMA
from mm_assets.rows.source_ref import build_source_ref, parse_source_ref
from mm_assets.rows.sql import parquet_relation
from mm_assets.sources.compressed import is_compressed
from mm_assets.storage.files import SourceFile

__all__ = ["Found", "RowOrigin", "checksums", "member_content", "origins", "partitions_of", "row_content", "samples_at"]

MAX_HELD = 64 << 20  # bytes of content that cannot be read by ranges
_MAX_ROWS = 1000  # of a sample, or of samples at a place, that are listed

_ROWS = """
select r.sample_id, r.position, r.modality, r.content_type, r.source_ref, r.materialize_error,
    {size} as content_size, {checksum} as crc32c, octet_length(encode(r.text_content)) as text_size,
    lost.filter, lost.reason, lost.value, r.file_row_number as number
from {rows} as r
left join {dropped} using (sample_id, position, modality)
where {condition}
order by r.file_row_number
limit {limit}
"""
_ROWS_TABLE = parquet_relation("$rows", file_row_number="true")
_DROPPED = f"{parquet_relation('$dropped')} as lost"
_NONE_DROPPED = """
(select * from (values ('', 0, '', '', '', 0.0)) limit 0)
    as lost(sample_id, position, modality, filter, reason, value)
"""
_IDENTITY = "r.sample_id = $sample_id"
_ROW = f"{_IDENTITY} and r.position = $position and r.modality = $modality"
_PLACE = """
($shard is null or ends_with(r.source_ref ->> 'path', $shard))
and ($member is null or r.source_ref ->> 'member' = $member)
and ($byte is null or $byte between (r.source_ref ->> 'byte_offset')::bigint
    and (r.source_ref ->> 'byte_offset')::bigint + (r.source_ref ->> 'byte_size')::bigint - 1)
"""
_MEMBER = f"""
select shard, member, byte_offset, byte_size from {parquet_relation("$index")}
where member = $member and (shard = $shard or ends_with(shard, '/' || $shard))
    and ($byte_offset is null or byte_offset = $byte_offset)
limit 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrigin:
    """One row of a sample and where its content is.

    Attributes:
        partition: the partition.
        sample_id: the sample.
        position: in the sample, -1 for its metadata row.
        modality: row modality.
        content_type: MIME type, where it is known.
        shard: path or URL of the shard, or of another file that the locator names.
        member: the member.
        byte_offset: first byte in the shard, where the content is one range.
        byte_size: bytes of it there.
        frame_index: of an image with several frames.
        content_size: bytes of the media or text, where the table knows them.
        crc32c: CRC-32C of the media, where the table has it.
        error: why the content could not be read; else empty.
        dropped: filter and reason that dropped the row; empty where it was kept, and before the filters have run.
        value: the measure that decided.
    """

    partition: str
    sample_id: str
    position: int
    modality: str
    content_type: str | None
    shard: str | None
    member: str | None
    byte_offset: int | None
    byte_size: int | None
    frame_index: int | None
    content_size: int | None
    crc32c: int | None
    error: str
    dropped: str
    value: float | None

    def to_json(self) -> dict[str, Any]:
        """The row for a browser."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Content that can be read.

    Attributes:
        name: of the row or member.
        content_type: MIME type, where it is known.
        size: bytes.
        read: the bytes at an offset, as many as asked for.
        close: releases its file.
        num_held: bytes of it in memory.
    """

    name: str
    content_type: str | None
    size: int
    read: Callable[[int, int], bytes]
    close: Callable[[], None]
    num_held: int = 0


def origins(dataset: DatasetStore, partition: str, sample_id: str) -> list[RowOrigin]:
    """The rows of a sample, also those that were dropped, in their order; none if the partition does not have it.

    Raises:
        SourceError: the partition is not registered, has no rows yet, or its tables cannot be read.
    """
    dataset.partition(partition)
    return [row for row, _, _ in _rows(dataset, partition, _IDENTITY, {"sample_id": sample_id})]


def samples_at(
    dataset: DatasetStore,
    partition: str,
    *,
    shard: str | None = None,
    member: str | None = None,
    byte: int | None = None,
) -> list[RowOrigin]:
    """The rows whose content is in a member of a shard, or at a byte of it; at most 1,000.

    Args:
        dataset: the dataset's folder.
        partition: the partition, see `partitions_of`.
        shard: the end of the shard's path or URL; None: any of the partition.
        member: the member; None: any.
        byte: position in the shard; None: any.

    Raises:
        SourceError: as `origins`.
    """
    dataset.partition(partition)
    given = {"shard": shard, "member": member, "byte": byte}
    return [row for row, _, _ in _rows(dataset, partition, _PLACE, given)]


def partitions_of(dataset: DatasetStore, shard: str) -> list[str]:
    """The registered partitions with a shard whose path or URL ends with this text."""
    partitions = dataset.partitions().values()
    return sorted(p.key for p in partitions if any(file.url.endswith(shard) for file in p.shards))


def _rows(
    dataset: DatasetStore, key: str, condition: str, given: Mapping[str, Any]
) -> Iterator[tuple[RowOrigin, str | None, int]]:
    """The rows that meet a condition, with their locators and their numbers in the table."""
    import duckdb

    table = MATERIALIZED_ROWS.tables[0].name
    rows = dataset.duckdb_path(dataset.table(table, key))
    has_dropped = dataset.store.size(dataset.table(DROPPED.name, key)) is not None
    with closing(dataset.duckdb()) as connection:
        try:
            described = connection.execute(f"describe from {_ROWS_TABLE}", {"rows": rows}).fetchall()
            names = {name for name, *_ in described}
            statement = _ROWS.format(
                rows=_ROWS_TABLE,
                dropped=_DROPPED if has_dropped else _NONE_DROPPED,
                condition=condition,
                limit=_MAX_ROWS,
                size=f"r.{SIZE}" if SIZE in names else "null",
                checksum=f"r.{CHECKSUM}" if CHECKSUM in names else "null",
            )
            files = {"rows": rows}
            if has_dropped:
                files["dropped"] = dataset.duckdb_path(dataset.table(DROPPED.name, key))
            found = connection.execute(statement, {**files, **given}).fetchall()
        except duckdb.Error as error:
            raise SourceError(rows, f"the rows cannot be read: {first_line(error)}") from error
    for row in found:
        sample_id, position, modality, content_type, source_ref, fault, size, checksum, text_size, *lost, number = row
        judge, reason, value = lost
        ref = None if source_ref is None else parse_source_ref(source_ref)
        yield (
            RowOrigin(
                partition=key,
                sample_id=sample_id,
                position=position,
                modality=modality,
                content_type=content_type,
                shard=None if ref is None else ref.path,
                member=None if ref is None else ref.member,
                byte_offset=None if ref is None else ref.byte_offset,
                byte_size=None if ref is None else ref.byte_size,
                frame_index=None if ref is None else ref.frame_index,
                content_size=text_size if size is None else size,
                crc32c=checksum,
                error=fault or "",
                dropped="" if judge is None else f"{judge}.{reason}",
                value=value,
            ),
            source_ref,
            number,
        )


def row_content(dataset: DatasetStore, partition: str, sample_id: str, position: int, modality: str) -> Found | None:
    """The content of a row, out of its shard or, where that is gone or another, the table; None without such a row.

    Raises:
        SourceError: it cannot be read.
    """
    registered = dataset.partition(partition)
    given = {"sample_id": sample_id, "position": position, "modality": modality}
    row = next(_rows(dataset, partition, _ROW, given), None)
    if row is None:
        return None
    origin, source_ref, number = row
    name = f"{sample_id}, {modality} {position}"
    if modality in ("text", "metadata"):
        column = "text_content" if modality == "text" else "metadata_json"
        text = _value(dataset, partition, column, number)
        return None if text is None else _held(name, "text/plain", str(text).encode())
    try:
        return _content(dataset, registered, origin, source_ref, name)
    except MmAssetsError:
        stored = _value(dataset, partition, "binary_content", number)
        if stored is None:
            raise
        return _held(name, origin.content_type, stored)


def member_content(
    dataset: DatasetStore, partition: str, *, shard: str, member: str, byte_offset: int | None = None
) -> Found | None:
    """The content of a member that need not have become a row, as the partition's index has it; None without one.

    Raises:
        SourceError: the partition has no index, or the member cannot be read.
    """
    import duckdb

    registered = dataset.partition(partition)
    index = dataset.duckdb_path(dataset.table(RAW_SHARDS.tables[0].name, partition))
    given = {"index": index, "shard": shard, "member": member, "byte_offset": byte_offset}
    with closing(dataset.duckdb()) as connection:
        try:
            found = connection.execute(_MEMBER, given).fetchone()
        except duckdb.Error as error:
            raise SourceError(index, f"the index cannot be read: {first_line(error)}") from error
    if found is None:
        return None
    path, name, offset, size = found
    ref = build_source_ref(path=path, member=name, byte_offset=offset, byte_size=size if offset is not None else None)
    origin = RowOrigin(
        partition=partition,
        sample_id="",
        position=0,
        modality="binary",
        content_type=None,
        shard=path,
        member=name,
        byte_offset=offset,
        byte_size=size,
        frame_index=None,
        content_size=None,
        crc32c=None,
        error="",
        dropped="",
        value=None,
    )
    return _content(dataset, registered, origin, ref, name)


def _content(
    dataset: DatasetStore, registered: Partition, origin: RowOrigin, source_ref: str | None, name: str
) -> Found:
    """The content that a locator points to, in one of the partition's shards."""
    known = {shard.url: shard for shard in registered.shards}
    where = dataset.store.url_of(dataset.table(MATERIALIZED_ROWS.tables[0].name, registered.key))
    if origin.shard not in known:
        raise SourceError(where, f"{name}: {origin.shard!r} is not a shard of the partition, and only those are read")
    file = SourceFile(origin.shard, dataset.spec.storage_options)
    try:
        if not known[origin.shard].is_of(file.fingerprint) and file.fingerprint != known[origin.shard].fingerprint:
            raise SourceError(
                origin.shard, "changed since it was registered, so the ranges in the table are not true now"
            )
        plain = origin.byte_offset is not None and origin.frame_index is None
        if plain and not is_compressed(origin.member or ""):
            start, size = origin.byte_offset or 0, origin.byte_size or 0
            file.check(start, size)

            def read(offset: int, count: int) -> bytes:
                return file.read(start + offset, max(min(count, size - offset), 0))

            return Found(name=name, content_type=origin.content_type, size=size, read=read, close=file.close)
        content, kind = _extracted(file, origin, source_ref)
    except BaseException:
        file.close()
        raise
    file.close()
    return _held(name, kind, content)


def _extracted(file: SourceFile, origin: RowOrigin, source_ref: str | None) -> tuple[bytes, str | None]:
    """A frame, a compressed member, or a member of a compressed shard, as the pipeline takes it out."""
    columns = {"sample_id": origin.sample_id, "position": 0, "modality": "binary", "source_ref": source_ref}
    row = pa.RecordBatch.from_pylist([columns], schema=MULTIMODAL_SCHEMA)
    stream = MaterializeStream(
        [row], open_file=lambda _: file, allowed=lambda url: url == origin.shard, max_content_bytes=MAX_HELD
    )
    ((found,),) = (batch.to_pylist() for batch in stream)
    if found["materialize_error"] is not None:
        raise SourceError(origin.shard or "", found["materialize_error"], member=origin.member)
    return found["binary_content"] or b"", found["content_type"]


def _held(name: str, content_type: str | None, content: bytes) -> Found:
    def read(offset: int, count: int) -> bytes:
        return content[offset : offset + count]

    size = len(content)
    return Found(name=name, content_type=content_type, size=size, read=read, close=lambda: None, num_held=size)


def _value(dataset: DatasetStore, key: str, column: str, number: int) -> Any:
    """One value of the table of rows, of which a row group is read."""
    name = dataset.table(MATERIALIZED_ROWS.tables[0].name, key)
    with dataset.store.open(name) as opened, closing(pq.ParquetFile(opened)) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if number < rows:
                return file.read_row_group(group, [column]).column(0)[number].as_py()
            number -= rows
    return None


def checksums(found: Found, *, most: int = 1 << 30) -> dict[str, Any]:
    """CRC-32C and SHA-256 of content, read a piece at a time.

    Raises:
        SourceError: it is larger than `most` bytes, or cannot be read.
    """
    if found.size > most:
        raise SourceError(found.name, f"has {found.size:,} bytes, more than the {most:,} that are read for a checksum")
    crc, sha = 0, hashlib.sha256()
    for start in range(0, found.size, 1 << 20):
        piece = found.read(start, min(1 << 20, found.size - start))
        crc = crc32c(piece, crc)
        sha.update(piece)
    return {"size": found.size, "crc32c": crc, "sha256": sha.hexdigest()}
