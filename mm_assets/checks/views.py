"""The views that checks select from: a partition's tables, and what its shards and declarations say of them.

Tables come from their Parquet files as DuckDB reads them, without the media column; which rows hold bytes, and how
many, is found by reading that column in bounded batches. Members come from a fresh walk over the shards' headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mm_assets.checks.context import CheckContext
from mm_assets.errors import SchemaMismatchError, SourceError
from mm_assets.etl.parquet import open_table, read_batches
from mm_assets.etl.schema import (
    DROPPED_SCHEMA,
    MEMBER_INDEX_SCHEMA,
    MODALITIES,
    MULTIMODAL_SCHEMA,
    REJECTS_SCHEMA,
)
from mm_assets.etl.source_ref import parse_source_ref
from mm_assets.etl.tar_index import iter_members

__all__ = ["OWN_TABLES", "TABLE_VIEWS", "Tables"]

OWN_TABLES: Mapping[str, tuple[str, ...]] = {
    "raw_shards": ("raw_shards",),
    "rows": ("rows", "rejects"),
    "materialized_rows": ("materialized_rows",),
    "filtered_rows": ("filtered_rows", "dropped"),
    "packed_mult": (),
    "packed_mstr": (),
}
"""The tables that each asset makes, by the names of their views."""

MEDIA = "binary_content"  # never read by DuckDB: one vector of it could be larger than its memory

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
        ("has_error", pa.bool_()),
    ]
)
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


class Tables:
    """Makes the views over one partition's tables and shards.

    Args:
        context: the partition.
        asset: whose checks are run.
    """

    def __init__(self, context: CheckContext, asset: str) -> None:
        self.context = context
        self.asset = asset
        self._open: dict[str, pq.ParquetFile] = {}

    def close(self) -> None:
        """Closes the files."""
        for file in self._open.values():
            file.close(force=True)

    def parquet(self, table: str) -> pq.ParquetFile:
        """A table's file, opened once.

        Raises:
            SourceError: it is not among the partition's files, cannot be read, or is no Parquet file.
        """
        if table not in self._open:
            name = self.context.files.get(table)
            if name is None:
                raise SourceError(self.context.store.url, f"the checks of {self.asset} need the table {table}")
            self._open[table] = open_table(self.context.store, name)
        return self._open[table]

    def check_columns(self, table: str) -> None:
        """Makes sure that a table has the columns that views over it select.

        Raises:
            SchemaMismatchError: one is missing.
        """
        names = self.parquet(table).schema_arrow.names
        missing = [name for name in _SCHEMAS[table].names if name not in names]
        if missing:
            where = self.context.store.url_of(self.context.files[table])
            raise SchemaMismatchError(f"{where}: no column {', '.join(missing)}: make {table} again")

    def select(self, table: str) -> str:
        """The statement that reads a table's file, all columns but media; `ordinal` counts the rows of row tables."""
        self.check_columns(table)
        schema = _SCHEMAS[table]
        columns = ", ".join(f'"{name}"' for name in schema.names if name != MEDIA)
        # Counted and not read from the file: a user column may be called file_row_number.
        ordinal = ", row_number() over () - 1 as ordinal" if schema is MULTIMODAL_SCHEMA else ""
        return f"select {columns}{ordinal} from read_parquet({_quoted(self._url(table))})"

    def _url(self, table: str) -> str:
        store, name = self.context.store, self.context.files[table]
        return store.path_of(name) if store.is_local else store.url_of(name)

    # -- columns

    def expected_columns(self) -> pa.Table:
        """What the columns of the asset's tables should be."""
        declared = self.context.schema
        schemas = {
            **_SCHEMAS,
            "rows": declared.row_schema(),
            "materialized_rows": declared.row_schema(),
            "filtered_rows": declared.filtered_schema(),
        }
        return table_of(
            (
                (table, place, column.name, _type_name(column.type), column.nullable)
                for table in OWN_TABLES[self.asset]
                for place, column in enumerate(schemas[table])
            ),
            _EXPECTED,
        )

    def actual_columns(self) -> pa.Table:
        """What the columns of the asset's files are; nullable is what Parquet's own schema says."""
        return table_of((row for table in OWN_TABLES[self.asset] for row in self._columns(table)), _EXPECTED)

    def _columns(self, table: str) -> Iterator[tuple[Any, ...]]:
        for place, column in enumerate(self.parquet(table).schema_arrow):
            yield table, place, column.name, _type_name(column.type), column.nullable

    # -- shards

    def shards(self) -> pa.Table:
        """The partition's shards and their sizes."""
        sizes = [(shard.url, shard.size) for shard in self.context.shards]
        return table_of(iter(sizes), pa.schema([("shard", pa.string()), ("size", pa.int64())]))

    def shard_members(self) -> pa.Table:
        """Every entry of the shards, from a fresh walk; damage is walked around, as the index may have done."""
        return table_of(
            (
                (m.shard, m.ordinal, m.member, m.byte_offset, m.byte_size, m.member_type, m.skip_reason)
                for shard in self.context.shards
                for m in iter_members(shard, on_damaged_shard="salvage")
            ),
            _MEMBERS,
        )

    def parsed_source_refs(self) -> pa.Table:
        """Path, member and range of each row's locator, and what is wrong with it; rows without one are left out."""
        return table_of(self._refs(), _REFS)

    def _refs(self) -> Iterator[tuple[Any, ...]]:
        ordinal = 0
        for batch in self._batches("rows", ["source_ref"]):
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
        """Each row of a row table with the number of its media bytes, null where it has none."""
        self.check_columns(table)
        batches = []
        ordinal = 0
        columns = ["sample_id", "position", "modality", MEDIA, "materialize_error"]
        for batch in self._batches(table, columns):
            sizes = pc.cast(pc.binary_length(batch.column(MEDIA)), pa.int64())
            place = pa.array(range(ordinal, ordinal + batch.num_rows), pa.int64())
            known = [batch.column(name) for name in columns[:3]]
            error = batch.column("materialize_error").is_valid()
            batches.append(pa.RecordBatch.from_arrays([place, *known, sizes, error], schema=_CONTENT))
            ordinal += batch.num_rows
        return pa.Table.from_batches(batches, _CONTENT)

    def _batches(self, table: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        where = self.context.store.url_of(self.context.files[table])
        file = self.parquet(table)
        return read_batches(file, batch_bytes=self.context.batch_bytes, columns=columns, name=where)

    # -- declarations

    def known_modalities(self) -> pa.Table:
        """The row modalities that there may be."""
        names = sorted(MODALITIES | self.context.known_modalities)
        return pa.table({"modality": pa.array(names, pa.string())})

    def materialize_mode(self) -> pa.Table:
        """The mode, in one row."""
        return pa.table({"mode": pa.array([self.context.materialize_mode], pa.string())})


def _type_name(kind: pa.DataType) -> str:
    # Parquet calls a list's items "element", Arrow "item": the name is no part of the type.
    return f"list<{_type_name(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def _quoted(url: str) -> str:
    """A file as a literal; what DuckDB would take for a pattern stands for itself."""
    literal = "".join(f"[{c}]" if c in "*?[" else c for c in url)
    return "'" + literal.replace("'", "''") + "'"


_SCHEMAS: Mapping[str, pa.Schema] = {
    "raw_shards": MEMBER_INDEX_SCHEMA,
    "rows": MULTIMODAL_SCHEMA,
    "rejects": REJECTS_SCHEMA,
    "materialized_rows": MULTIMODAL_SCHEMA,
    "filtered_rows": MULTIMODAL_SCHEMA,
    "dropped": DROPPED_SCHEMA,
}

TABLE_VIEWS: Mapping[str, Callable[[Tables], str | pa.Table]] = {
    "raw_shards": lambda tables: tables.select("raw_shards"),
    "rows": lambda tables: tables.select("rows"),
    "rejects": lambda tables: tables.select("rejects"),
    "materialized_rows": lambda tables: tables.select("materialized_rows"),
    "filtered_rows": lambda tables: tables.select("filtered_rows"),
    "dropped": lambda tables: tables.select("dropped"),
    "rows_content": lambda tables: tables.content("rows"),
    "materialized_content": lambda tables: tables.content("materialized_rows"),
    "filtered_content": lambda tables: tables.content("filtered_rows"),
    "expected_columns": Tables.expected_columns,
    "actual_columns": Tables.actual_columns,
    "shards": Tables.shards,
    "shard_members": Tables.shard_members,
    "parsed_source_refs": Tables.parsed_source_refs,
    "known_modalities": Tables.known_modalities,
    "materialize_mode": Tables.materialize_mode,
}
"""View name to what makes it: a statement for DuckDB, or an Arrow table."""
