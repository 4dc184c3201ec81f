"""The relations that checks select from: a partition's tables, and the facts of its shards and declarations.

DuckDB reads the tables from their Parquet files, without the columns of content: one of their values may be larger than
DuckDB's memory. Content is read in bounded batches, and only sizes, checksums and digests stay in memory. Only the
checks of the member index walk the shards' headers again; later checks rely on the index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mm_assets.checks.context import CheckContext, TableFile
from mm_assets.errors import SchemaMismatchError, SourceError
from mm_assets.formats import crc32c
from mm_assets.rows.parquet import open_table, read_batches
from mm_assets.rows.schema import MODALITIES, MULTIMODAL_SCHEMA
from mm_assets.rows.source_ref import parse_source_ref, with_parsed_source_ref_columns

__all__ = ["DERIVED", "RELATIONS", "TableRelations"]

MEDIA = "binary_content"
TEXTS = ("text_content", "metadata_json")
CONTENT = (MEDIA, *TEXTS)  # never read by DuckDB: one vector of them could be larger than its memory

_EXPECTED = pa.schema(
    [("table_name", pa.string()), ("ordinal", pa.int32()), ("column_name", pa.string()), ("column_type", pa.string())]
).append(pa.field("nullable", pa.bool_()))
_MEMBERS = pa.schema(
    [
        ("shard", pa.string()),
        ("ordinal", pa.int32()),
        ("member", pa.string()),
        ("byte_offset", pa.int64()),
        ("byte_size", pa.int64()),
        ("member_type", pa.string()),
        ("skip_reason", pa.string()),
    ]
)
_REFS = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("path", pa.string()),
        ("member", pa.string()),
        ("byte_offset", pa.int64()),
        ("byte_size", pa.int64()),
        ("problem", pa.string()),
    ]
)
_CONTENT = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("sample_id", pa.string()),
        ("position", pa.int32()),
        ("modality", pa.string()),
        ("content_size", pa.int64()),
        ("crc32c", pa.uint32()),
        ("source_size", pa.int64()),
        ("has_error", pa.bool_()),
    ]
)
_DIGEST = 16  # bytes
_REREAD = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("sample_id", pa.string()),
        ("position", pa.int32()),
        ("modality", pa.string()),
        ("source_ref", pa.string()),
        ("crc32c", pa.uint32()),
        ("shard_crc32c", pa.uint32()),
    ]
)
MAX_REREAD = 8  # items of a partition whose range is read from its shard again
MAX_REREAD_BYTES = 4 << 20  # of all of them: the check must not cost what the stage did
_TEXTS = pa.schema([("ordinal", pa.int64()), *((f"{name}_digest", pa.binary(_DIGEST)) for name in TEXTS)])
_BATCH_ROWS = 4 << 10  # rows that become Python objects at a time


def table_of(rows: Iterator[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    """A table of tuples, built in batches so that few of them live at once."""
    batches: list[pa.RecordBatch] = []
    held: list[tuple[Any, ...]] = []

    def flush() -> None:
        columns = [pa.array(values, kind) for values, kind in zip(zip(*held, strict=True), schema.types, strict=True)]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
        held.clear()

    for row in rows:
        held.append(row)
        if len(held) >= _BATCH_ROWS:
            flush()
    if held:
        flush()
    return pa.Table.from_batches(batches, schema)


class TableRelations:
    """The relations over one partition's tables and shards."""

    def __init__(self, context: CheckContext) -> None:
        self.context = context
        self._open: dict[str, pq.ParquetFile] = {}
        self._content: dict[str, pa.Table] = {}

    def close(self) -> None:
        """Closes the files."""
        for file in self._open.values():
            file.close(force=True)

    def relation(self, name: str) -> str | pa.Table:
        """A relation by its name: a statement for DuckDB where it is a table itself, else an Arrow table.

        Raises:
            KeyError: there is no such relation.
            SourceError: a file is missing or cannot be read.
            SchemaMismatchError: a table lacks a column.
        """
        if name in self.context.tables:
            return self._select(name)
        for suffix, derive in DERIVED.items():
            if name.endswith(suffix):
                return derive(self, name.removesuffix(suffix))
        return RELATIONS[name](self)

    def parquet(self, table: str) -> pq.ParquetFile:
        """A table's file, opened once.

        Raises:
            SourceError: it is not among the partition's files, cannot be read, or is not a Parquet file.
        """
        if table not in self._open:
            self._open[table] = open_table(self.context.store, self._file(table).path)
        return self._open[table]

    def _file(self, table: str) -> TableFile:
        file = self.context.tables.get(table)
        if file is None:
            raise SourceError(self.context.store.url, f"the checks of {self.context.asset} need the table {table}")
        return file

    def url(self, table: str) -> str:
        """Where a table's file is."""
        return self.context.store.url_of(self._file(table).path)

    def check_columns(self, table: str) -> None:
        """Refuses, with `SchemaMismatchError`, a table that lacks a column that relations over it select."""
        names = self.parquet(table).schema_arrow.names
        missing = [name for name in _read_columns(self._file(table).schema) if name not in names]
        if missing:
            raise SchemaMismatchError(f"{self.url(table)}: no column {', '.join(missing)}: make {table} again")

    def _select(self, table: str) -> str:
        """The statement that reads a table's file, all columns but content; `ordinal` counts the rows of row tables."""
        self.check_columns(table)
        schema = self._file(table).schema
        columns = ", ".join(f'"{name}"' for name in _read_columns(schema) if name not in CONTENT)
        # Counted and not read from the file: a user column may be called file_row_number.
        ordinal = ", row_number() over () - 1 as ordinal" if _is_row_table(schema) else ""
        store = self.context.store
        where = store.path_of(self._file(table).path) if store.is_local else self.url(table)
        return f"select {columns}{ordinal} from read_parquet({_quoted(where)})"

    # -- columns

    def expected_columns(self) -> pa.Table:
        """The expected columns of the asset's tables."""
        return table_of(
            (row for table in self.context.own_tables for row in _columns(table, self._file(table).schema)), _EXPECTED
        )

    def actual_columns(self) -> pa.Table:
        """The columns of the asset's files; nullable is as in Parquet's own schema."""
        return table_of(
            (row for table in self.context.own_tables for row in _columns(table, self.parquet(table).schema_arrow)),
            _EXPECTED,
        )

    # -- shards

    def shards(self) -> pa.Table:
        """The partition's shards and their sizes."""
        sizes = [(shard.file.url, shard.file.size) for shard in self.context.shards]
        return table_of(iter(sizes), pa.schema([("shard", pa.string()), ("size", pa.int64())]))

    def shard_members(self) -> pa.Table:
        """Every entry of the shards, from a new walk that continues after damage, as the index may have done."""
        return table_of(
            (
                (m.shard, m.ordinal, m.member, m.byte_offset, m.byte_size, m.member_type, m.skip_reason)
                for shard in self.context.shards
                for m in shard.members(on_damaged_shard="salvage")
            ),
            _MEMBERS,
        )

    def source_refs(self, table: str) -> pa.Table:
        """Path, member and range of each row's locator, and its error; rows without one are left out."""
        return table_of(self._refs(table), _REFS)

    def _refs(self, table: str) -> Iterator[tuple[Any, ...]]:
        ordinal = 0
        for batch in self._batches(table, ["source_ref"]):
            for text in batch.column("source_ref").to_pylist():
                if text is not None:
                    try:
                        ref = parse_source_ref(text)
                    except SourceError as error:
                        yield ordinal, None, None, None, None, error.detail
                    else:
                        yield ordinal, ref.path, ref.member, ref.byte_offset, ref.byte_size, None
                ordinal += 1

    # -- content

    def content(self, table: str) -> pa.Table:
        """Each row of a row table with size and CRC-32C of its media bytes, null where it has none.

        `source_size` is the size that its locator gives, null where it gives none or names one frame.
        """
        if table not in self._content:
            self._content[table] = self._read_content(table)
        return self._content[table]

    def _read_content(self, table: str) -> pa.Table:
        self.check_columns(table)
        batches = []
        ordinal = 0
        columns = ["sample_id", "position", "modality", MEDIA, "source_ref", "materialize_error"]
        for batch in self._batches(table, columns):
            sizes = pc.cast(pc.binary_length(batch.column(MEDIA)), pa.int64())
            place = pa.array(range(ordinal, ordinal + batch.num_rows), pa.int64())
            known = [batch.column(name) for name in columns[:3]]
            sums = [None if value is None else crc32c(value) for value in _values(batch.column(MEDIA))]
            told = _source_sizes(batch.column("source_ref"))
            error = batch.column("materialize_error").is_valid()
            batches.append(
                pa.RecordBatch.from_arrays(
                    [place, *known, sizes, pa.array(sums, pa.uint32()), told, error], schema=_CONTENT
                )
            )
            ordinal += batch.num_rows
        return pa.Table.from_batches(batches, _CONTENT)

    def reread(self, table: str) -> pa.Table:
        """Up to 8 items of at most 4 MiB, spread over the partition, with the CRC-32C of their ranges in local shards.

        A remote shard is not read again: each request costs money.
        """
        return table_of(self._reread(table), _REREAD)

    def _reread(self, table: str) -> Iterator[tuple[Any, ...]]:
        shards = {shard.file.url: shard.file for shard in self.context.shards if shard.file.is_local}
        content = self.content(table)
        whole = pc.and_(content.column("content_size").is_valid(), content.column("source_size").is_valid())
        small = pc.less_equal(content.column("content_size"), MAX_REREAD_BYTES // MAX_REREAD)
        rows = pc.indices_nonzero(pc.and_(whole, small)).to_numpy()
        if not shards or not len(rows):
            return
        spread = np.linspace(0, len(rows) - 1, min(MAX_REREAD, len(rows))).astype(int)
        chosen = [int(rows[k]) for k in spread]
        known = iter(content.take(chosen).to_pylist())
        first = 0
        for batch in self._batches(table, ["source_ref"]):
            for row in chosen:
                if not first <= row < first + batch.num_rows:
                    continue
                item, text = next(known), batch.column("source_ref")[row - first].as_py()
                ref = parse_source_ref(text)
                shard = shards.get(ref.path or "")
                size = item["content_size"]
                if shard is None or ref.byte_offset is None or ref.byte_size != size:
                    continue
                if ref.byte_offset + size <= shard.size:  # the checks of locators report a range that leaves the shard
                    names = ("ordinal", "sample_id", "position", "modality")
                    found = crc32c(shard.read(ref.byte_offset, size))
                    yield (*(item[name] for name in names), text, item["crc32c"], found)
            first += batch.num_rows

    def texts(self, table: str) -> pa.Table:
        """Each row of a row table with digests of its text and its sample JSON, null where it has none."""
        self.check_columns(table)
        batches = []
        ordinal = 0
        for batch in self._batches(table, TEXTS):
            place = pa.array(range(ordinal, ordinal + batch.num_rows), pa.int64())
            digests = [
                pa.array([None if v is None else _digest(v) for v in _values(batch.column(name))], pa.binary(_DIGEST))
                for name in TEXTS
            ]
            batches.append(pa.RecordBatch.from_arrays([place, *digests], schema=_TEXTS))
            ordinal += batch.num_rows
        return pa.Table.from_batches(batches, _TEXTS)

    def batches(self, table: str) -> Iterator[pa.RecordBatch]:
        """A row table with its content, in batches.

        Raises:
            SchemaMismatchError: a column is missing.
        """
        self.check_columns(table)
        return self._batches(table)

    def _batches(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        file = self.parquet(table)
        return read_batches(file, batch_bytes=self.context.batch_bytes, columns=columns, name=self.url(table))

    # -- declarations

    def known_modalities(self) -> pa.Table:
        """The row modalities that there may be."""
        names = sorted(MODALITIES | self.context.known_modalities)
        return pa.table({"modality": pa.array(names, pa.string())})

    def materialize_mode(self) -> pa.Table:
        """The mode, in one row."""
        return pa.table({"mode": pa.array([self.context.materialize_mode], pa.string())})


def _values(column: Any) -> Iterator[memoryview | None]:
    """The bytes of each value of a column of text or bytes, not copied."""
    wide = column.cast(pa.large_binary())
    _, positions, content = wide.buffers()
    view = memoryview(b"" if content is None else content).cast("B")
    starts = np.frombuffer(positions, np.int64)[wide.offset : wide.offset + len(wide) + 1].tolist()
    for row, present in enumerate(wide.is_valid().to_pylist()):
        yield view[starts[row] : starts[row + 1]] if present else None


def _digest(value: memoryview) -> bytes:
    return hashlib.blake2b(value, digest_size=_DIGEST).digest()


def _source_sizes(refs: Any) -> Any:
    """The size of the whole content as each locator tells it, int64."""
    try:
        parsed = with_parsed_source_ref_columns(pa.table({"source_ref": refs}), prefix="")
    except SourceError:  # one of them is wrong, which the check of locators reports: the others count
        return pa.array([_source_size(text) for text in refs.to_pylist()], pa.int64())
    sizes = pc.if_else(pc.is_null(parsed.column("frame_index")), parsed.column("byte_size"), None)
    return sizes.combine_chunks() if isinstance(sizes, pa.ChunkedArray) else sizes


def _source_size(text: str | None) -> int | None:
    try:
        ref = parse_source_ref(text)
    except SourceError:
        return None
    return ref.byte_size if ref.frame_index is None else None


def _is_row_table(schema: pa.Schema) -> bool:
    return bool(schema.names[: len(MULTIMODAL_SCHEMA)] == MULTIMODAL_SCHEMA.names)


def _read_columns(schema: pa.Schema) -> Sequence[str]:
    """The columns that relations over a table read: of a row table the reserved ones, as others may have any name."""
    names: list[str] = MULTIMODAL_SCHEMA.names if _is_row_table(schema) else schema.names
    return names


def _columns(table: str, schema: pa.Schema) -> Iterator[tuple[Any, ...]]:
    for place, column in enumerate(schema):
        yield table, place, column.name, _type_name(column.type), column.nullable


def _type_name(kind: pa.DataType) -> str:
    # Parquet calls a list's items "element", Arrow "item": the name is not part of the type.
    return f"list<{_type_name(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def _quoted(url: str) -> str:
    """A file as a literal, with DuckDB's wildcards escaped."""
    literal = "".join(f"[{c}]" if c in "*?[" else c for c in url)
    return "'" + literal.replace("'", "''") + "'"


DERIVED: Mapping[str, Callable[[TableRelations, str], pa.Table]] = {
    "_content": TableRelations.content,
    "_reread": TableRelations.reread,
    "_texts": TableRelations.texts,
    "_source_refs": TableRelations.source_refs,
}
"""Suffix of a relation that is computed from the table whose name is before it."""

RELATIONS: Mapping[str, Callable[[TableRelations], pa.Table]] = {
    "expected_columns": TableRelations.expected_columns,
    "actual_columns": TableRelations.actual_columns,
    "shards": TableRelations.shards,
    "shard_members": TableRelations.shard_members,
    "known_modalities": TableRelations.known_modalities,
    "materialize_mode": TableRelations.materialize_mode,
}
"""The relations that belong to no one table."""
