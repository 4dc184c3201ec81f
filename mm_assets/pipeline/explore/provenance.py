"""Where a sample came from: its rows, and the shard, member and byte range of each; and back from there to samples.

Everything follows from the tables of one partition. Content is read where a row's own locator points to, or out of the
table: a caller names rows and members, never a file or a range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from crc32c import crc32c

from mm_assets.errors import LazyModule, MmAssetsError, SourceError, first_line
from mm_assets.pipeline.chain import FILTERED_ROWS, MATERIALIZED_ROWS, RAW_SHARDS
from mm_assets.pipeline.state.losses import LOCATOR_COLUMNS, Locator, Selection, losses
from mm_assets.pipeline.state.records import Partition
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.references import CHECKSUM, SIZE
from mm_assets.rows.schema import MULTIMODAL_SCHEMA
from mm_assets.rows.source_ref import build_source_ref
from mm_assets.rows.sql import parquet_relation
from mm_assets.sources.compressed import is_compressed
from mm_assets.storage.files import SourceFile

if TYPE_CHECKING:
    import pyarrow.parquet as pq
else:
    pq = LazyModule("pyarrow.parquet")

__all__ = [
    "RowOrigin",
    "StoredContent",
    "checksums",
    "member_content",
    "origins",
    "partitions_of",
    "row_content",
    "samples_at",
]

MAX_BYTES_IN_MEMORY = 64 << 20  # of content that cannot be read by ranges
_MAX_ROWS = 1000  # of a sample, or of samples at a place, that are listed
_ROWS = MATERIALIZED_ROWS.tables[0].name
_INDEX = RAW_SHARDS.tables[0].name

_TABLE = parquet_relation("$table", file_row_number="true")
_SELECT_ROWS = """
select sample_id, position, modality, content_type, {locator}, coalesce(materialize_error, '') as error,
    coalesce({size}, octet_length(encode(text_content))) as content_size, {checksum} as crc32c,
    file_row_number as number
from {table} where {condition} order by number limit {limit}
"""
_IDENTITY = "sample_id = $sample_id"
_ROW = f"{_IDENTITY} and position = $position and modality = $modality"
_PLACE = """
($shard is null or ends_with(source_ref ->> 'path', $shard))
and ($member is null or source_ref ->> 'member' = $member)
and ($byte is null or $byte between (source_ref ->> 'byte_offset')::bigint
    and (source_ref ->> 'byte_offset')::bigint + (source_ref ->> 'byte_size')::bigint - 1)
"""
_SELECT_MEMBER = f"""
select shard, member, byte_offset, case when byte_offset is not null then byte_size end as byte_size from {_TABLE}
where member = $member and (shard = $shard or ends_with(shard, '/' || $shard))
    and ($byte_offset is null or byte_offset = $byte_offset)
limit 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrigin(Locator):
    """One row of a sample and where its content is.

    Attributes:
        partition: the partition.
        sample_id: the sample.
        position: in the sample, -1 for its metadata row.
        modality: row modality.
        content_type: MIME type, if it is known.
        content_size: bytes of the media or text, if the table has them.
        crc32c: CRC-32C of the media, if the table has it.
        error: why the content could not be read; else empty.
        dropped: filter and reason that dropped the row; empty if it was kept, and before the filters have run.
        value: the measure that decided.
    """

    partition: str
    sample_id: str
    position: int
    modality: str
    content_type: str | None
    content_size: int | None
    crc32c: int | None
    error: str
    dropped: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredContent:
    """Content that can be read.

    Attributes:
        name: of the row or member.
        content_type: MIME type, if it is known.
        size: bytes.
        read: the bytes at an offset, as many as asked for.
        close: releases its file.
        bytes_in_memory: how many of its bytes are in memory.
    """

    name: str
    content_type: str | None
    size: int
    read: Callable[[int, int], bytes]
    close: Callable[[], None]
    bytes_in_memory: int = 0


def origins(state: DatasetState, partition: str, sample_id: str) -> list[RowOrigin]:
    """The rows of a sample, also those that were dropped, in their order; none if the partition does not have it.

    Raises:
        SourceError: the partition is not registered, has no rows yet, or its tables cannot be read.
    """
    return _with_drops(state, partition, _rows(state, partition, _IDENTITY, {"sample_id": sample_id}))


def samples_at(
    state: DatasetState,
    partition: str,
    *,
    shard: str | None = None,
    member: str | None = None,
    byte: int | None = None,
) -> list[RowOrigin]:
    """The rows whose content is in a member of a shard, or at a byte of it; at most 1,000.

    Args:
        state: the dataset as it was listed.
        partition: the partition, see `partitions_of`.
        shard: the end of the shard's path or URL; None: any of the partition.
        member: the member; None: any.
        byte: position in the shard; None: any.

    Raises:
        SourceError: as `origins`.
    """
    at = {"shard": shard, "member": member, "byte": byte}
    return _with_drops(state, partition, _rows(state, partition, _PLACE, at))


def partitions_of(state: DatasetState, shard: str) -> list[str]:
    """The registered partitions with a shard whose path or URL ends with this text."""
    partitions = state.partitions.values()
    return sorted(p.key for p in partitions if any(file.url.endswith(shard) for file in p.shards))


def _with_drops(state: DatasetState, key: str, rows: list[dict[str, Any]]) -> list[RowOrigin]:
    """The rows with what dropped them."""
    selection = Selection(stage=FILTERED_ROWS.name, sample_ids={row["sample_id"] for row in rows})
    dropped: dict[tuple[Any, ...], dict[str, Any]] = {
        (loss.sample_id, loss.position, loss.modality): {"dropped": loss.reason, "value": loss.value}
        for loss in (losses(state, [key], selection) if rows else ())
        if loss.kind in ("lost", "dropped")
    }
    found = []
    for row in rows:
        lost = dropped.get((row["sample_id"], row["position"], row["modality"]), {})
        facts = {name: value for name, value in row.items() if name != "number"}
        found.append(RowOrigin(partition=key, **facts, **lost))
    return found


def _rows(state: DatasetState, key: str, condition: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that meet a condition, each by the names of its columns, with its number in the table."""
    table = _table(state, key, _ROWS)
    with state.dataset.store.open(table) as opened, closing(pq.ParquetFile(opened)) as file:
        names = set(file.schema_arrow.names)
    statement = _SELECT_ROWS.format(
        locator=LOCATOR_COLUMNS,
        table=_TABLE,
        condition=condition,
        limit=_MAX_ROWS,
        size=SIZE if SIZE in names else "null",
        checksum=CHECKSUM if CHECKSUM in names else "null",
    )
    return _select(state, table, statement, parameters)


def _select(state: DatasetState, table: str, statement: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    import duckdb

    path = state.dataset.duckdb_path(table)
    with closing(state.dataset.duckdb()) as connection:
        try:
            cursor = connection.execute(statement, {"table": path, **parameters})
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        except duckdb.Error as error:
            raise SourceError(path, f"cannot be read: {first_line(error)}") from error


def _table(state: DatasetState, key: str, table: str) -> str:
    """The path of a table of a registered partition; `SourceError` if no run has made it."""
    _registered(state, key)
    path = state.tables([key]).get(key, {}).get(table)
    if path is None:
        raise SourceError(state.dataset.store.url_of(table), f"partition {key!r} has no {table} yet: run it first")
    return path


def _registered(state: DatasetState, key: str) -> Partition:
    return state.partitions.get(key) or state.dataset.partition(key)


def row_content(
    state: DatasetState, partition: str, sample_id: str, position: int, modality: str
) -> StoredContent | None:
    """Returns the content of a row, from its shard or, if the shard is missing or has changed, from the table.

    Returns None if there is no such row.

    Raises:
        SourceError: it cannot be read.
    """
    identity = {"sample_id": sample_id, "position": position, "modality": modality}
    row = next(iter(_rows(state, partition, _ROW, identity)), None)
    if row is None:
        return None
    name = f"{sample_id}, {modality} {position}"
    if modality in ("text", "metadata"):
        column = "text_content" if modality == "text" else "metadata_json"
        text = _value(state, partition, column, row["number"])
        return None if text is None else _in_memory(name, "text/plain", str(text).encode())
    try:
        return _content(state, partition, _locator(row), name, row["content_type"])
    except MmAssetsError:
        stored = _value(state, partition, "binary_content", row["number"])
        if stored is None:
            raise
        return _in_memory(name, row["content_type"], stored)


def member_content(
    state: DatasetState, partition: str, *, shard: str, member: str, byte_offset: int | None = None
) -> StoredContent | None:
    """Returns the content of a member that need not have become a row, as the partition's index has it; None if none.

    Raises:
        SourceError: the partition has no index, or the member cannot be read.
    """
    place = {"shard": shard, "member": member, "byte_offset": byte_offset}
    found = _select(state, _table(state, partition, _INDEX), _SELECT_MEMBER, place)
    return _content(state, partition, _locator(found[0]), found[0]["member"], None) if found else None


def _locator(row: Mapping[str, Any]) -> Locator:
    return Locator(**{column.name: row.get(column.name) for column in fields(Locator)})


def _content(state: DatasetState, key: str, place: Locator, name: str, content_type: str | None) -> StoredContent:
    """The content that a locator points to, in one of the partition's shards."""
    shards = {shard.url: shard for shard in _registered(state, key).shards}
    if place.shard not in shards:
        where = state.dataset.store.url_of(_table(state, key, _INDEX))
        raise SourceError(where, f"{name}: {place.shard!r} is not a shard of the partition, and only those are read")
    registered = shards[place.shard]
    file = SourceFile(place.shard, state.dataset.spec.storage_options)
    try:
        if not registered.is_of(file.fingerprint) and file.fingerprint != registered.fingerprint:
            detail = "changed since it was registered, so the ranges in the table are not true now"
            raise SourceError(place.shard, detail)
        if place.byte_offset is not None and place.frame_index is None and not is_compressed(place.member or ""):
            start, size = place.byte_offset, place.byte_size or 0
            file.check(start, size)

            def read(offset: int, count: int) -> bytes:
                return file.read(start + offset, max(min(count, size - offset), 0))

            return StoredContent(name=name, content_type=content_type, size=size, read=read, close=file.close)
        content, kind = _extracted(file, place, state.dataset.spec.samples.pdf_dpi)
    except BaseException:
        file.close()
        raise
    file.close()
    return _in_memory(name, kind, content)


def _extracted(file: SourceFile, place: Locator, pdf_dpi: int) -> tuple[bytes, str | None]:
    """A frame or page, a compressed member, or a member of a compressed shard, as the pipeline takes it out."""
    ref = build_source_ref(
        path=place.shard,
        member=place.member,
        byte_offset=place.byte_offset,
        byte_size=place.byte_size,
        frame_index=place.frame_index,
    )
    columns = {"sample_id": "", "position": 0, "modality": "binary", "source_ref": ref}
    row = pa.RecordBatch.from_pylist([columns], schema=MULTIMODAL_SCHEMA)
    stream = MaterializeStream(
        [row],
        open_file=lambda _: file,
        allowed=lambda url: url == place.shard,
        max_content_bytes=MAX_BYTES_IN_MEMORY,
        pdf_dpi=pdf_dpi,
    )
    ((found,),) = (batch.to_pylist() for batch in stream)
    if found["materialize_error"] is not None:
        raise SourceError(place.shard or "", found["materialize_error"], member=place.member)
    return found["binary_content"] or b"", found["content_type"]


def _in_memory(name: str, content_type: str | None, content: bytes) -> StoredContent:
    def read(offset: int, count: int) -> bytes:
        return content[offset : offset + count]

    size = len(content)
    return StoredContent(
        name=name, content_type=content_type, size=size, read=read, close=lambda: None, bytes_in_memory=size
    )


def _value(state: DatasetState, key: str, column: str, number: int) -> Any:
    """One value of the table of rows, of which a row group is read."""
    with state.dataset.store.open(_table(state, key, _ROWS)) as opened, closing(pq.ParquetFile(opened)) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if number < rows:
                return file.read_row_group(group, [column]).column(0)[number].as_py()
            number -= rows
    return None


def checksums(found: StoredContent, *, most: int = 1 << 30) -> dict[str, Any]:
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
