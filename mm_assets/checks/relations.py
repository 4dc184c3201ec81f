"""The relations that checks select from: a partition's tables, and the facts of its shards and declarations.

Tables are relations without their columns of content: one of their values may be larger than DuckDB's memory. Small
ones are read once, and DuckDB reads large ones from their Parquet files. Content is read in bounded batches, and only
sizes, checksums and digests stay in memory. Only the checks of the member index walk the shards' headers again; later
checks rely on the index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mm_assets.checks.context import CheckContext, TableFile
from mm_assets.checks.items import StoredItems
from mm_assets.errors import MediaError, SchemaMismatchError, SourceError, first_line
from mm_assets.formats import crc32c
from mm_assets.media.content_types import OWN_ZIPS, sniff_content_type
from mm_assets.rows.columns import row_tuples
from mm_assets.rows.file_columns import is_stored_content
from mm_assets.rows.parquet import open_table, read_batches
from mm_assets.rows.references import FETCHED_BY
from mm_assets.rows.schema import MODALITIES, MULTIMODAL_SCHEMA, ROW_IDENTITY, SOURCE_SCHEMA
from mm_assets.rows.source_ref import SourceRef, parse_source_ref, with_parsed_source_ref_columns
from mm_assets.rows.sql import parquet_relation, sql_text
from mm_assets.sources.base import index_members
from mm_assets.sources.member import MEMBER_INDEX_SCHEMA

__all__ = [
    "BATCH_BYTES",
    "Measured",
    "TableBuilder",
    "TableRelations",
    "View",
    "digest_of",
    "row_digests",
    "schema_of",
    "table_named",
    "table_of",
    "values_digest",
]

MEDIA = "binary_content"
TEXTS = ("text_content", "metadata_json")
CONTENT = (MEDIA, *TEXTS)  # never read by DuckDB: one vector of them could be larger than its memory

MAX_SNIFFED = 512  # first bytes of an item that show its content type
MAX_REREAD = 256  # items of a partition that are read from its shard again, beside frames of TIFFs
MAX_REDRAWN = 16  # pages of PDFs, of which one takes as long as many others
MIN_REREAD = 8  # of them, where they are large
MAX_REREAD_BYTES = 4 << 20  # of about all of them: the check must not cost what the stage did
DIGEST = pa.int64()
_FAILED = (*ROW_IDENTITY, "source_ref", "materialize_error")
NOT_FETCHED = ("materialize_error", "not_materialized")  # reasons of drops
_WITH = "_with_"  # between the name of a row table and those of what is measured of its rows
BATCH_BYTES = 1 << 20  # of content that is read and measured at a time: it stays in the processor's cache
_BATCH_ROWS = 4 << 10  # rows that become Python objects at a time
_MAX_MEASURED = 64 << 20  # bytes of relations that are kept for later stages
_MAX_HELD = 1 << 16  # rows of a table that is read once; each statement reads a larger one

_TYPES = {  # of the columns that are not text
    **dict.fromkeys(("ordinal", "place", "position", "item", "page", "step"), pa.int64()),
    **dict.fromkeys(("type_id", "metadata_size", "size", "byte_offset", "byte_size"), pa.int64()),
    **dict.fromkeys(("number", "frame_index", "file_frame", "num_bad_texts", "num_bad_lists"), pa.int64()),
    **dict.fromkeys(("is_stored", "is_metadata", "is_pdf", "is_read", "is_interleaved", "is_reference"), pa.bool_()),
    **dict.fromkeys(("text_digest", "user_digest", "row_digest"), DIGEST),
    **dict.fromkeys(("content_size", "source_size"), pa.int64()),
    **dict.fromkeys(("most", "share"), pa.int64()),
    **dict.fromkeys(("crc32c", "shard_crc32c"), pa.uint32()),
    **dict.fromkeys(("nullable", "exact", "may_be_equal", "is_open", "has_inline"), pa.bool_()),
    **dict.fromkeys(("uri", "container", "file_type"), pa.dictionary(pa.int32(), pa.string())),  # few in a table
    **dict.fromkeys(("file_offset", "file_size"), pa.int64()),
    "bound": pa.float64(),
    **dict.fromkeys(("seconds", "start_seconds", "end_seconds", "previous_seconds", "tolerance_seconds"), pa.float64()),
    **dict.fromkeys(("video_seconds", "audio_seconds", "frame_seconds"), pa.float64()),
    **dict.fromkeys(("left", "top", "right", "bottom", "width", "height"), pa.float64()),
}


def schema_of(*names: str) -> pa.Schema:
    """The schema of a relation with these columns: a column of one name has one type in all relations."""
    return pa.schema([(name, _TYPES.get(name, pa.string())) for name in names])


_LOCATORS = schema_of("path", "member", "byte_offset", "byte_size", "frame_index", "problem", "is_stored")
_SOURCES = schema_of(
    *("uri", "file_offset", "file_size", "file_type", "checksum", "has_inline"),
    *("container", "file_member", "file_frame"),
)
_CONTENT = schema_of("content_size", "crc32c", "shown_type")
_TEXTS = pa.schema([(f"{name}_digest", DIGEST) for name in TEXTS])


class TableBuilder:
    """A table that is filled by rows as tuples, of which few are held at once."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []
        self._held: list[tuple[Any, ...]] = []

    def add(self, row: tuple[Any, ...]) -> None:
        """Adds one row."""
        self.extend((row,))

    def extend(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Adds rows, few at a time."""
        left = iter(rows)
        while True:
            before = len(self._held)
            self._held.extend(islice(left, _BATCH_ROWS))
            taken = len(self._held) - before
            if len(self._held) >= _BATCH_ROWS:
                self._flush()
            if taken < _BATCH_ROWS:
                return

    def extend_columns(self, *columns: Any) -> None:
        """Adds rows as columns, each a sequence or one value for all rows."""
        self._flush()
        count = max(len(column) for column in columns if isinstance(column, list | np.ndarray))
        arrays = [
            pa.array(column if isinstance(column, list | np.ndarray) else [column] * count, kind)
            for column, kind in zip(columns, self._schema.types, strict=True)
        ]
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))

    def _flush(self) -> None:
        if not self._held:
            return
        columns = map(pa.array, zip(*self._held, strict=True), self._schema.types)
        self._batches.append(pa.RecordBatch.from_arrays(list(columns), schema=self._schema))
        self._held.clear()

    def table(self) -> pa.Table:
        """The rows that were added."""
        self._flush()
        return pa.Table.from_batches(self._batches, self._schema)


def table_of(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    """A table of rows as tuples, of which few are held at once."""
    builder = TableBuilder(schema)
    builder.extend(rows)
    return builder.table()


class Measured:
    """Relations over tables of one partition, kept for the checks of later stages that read the same files.

    A file is the same as long as its inode, size and time are, which another file in its place or a write to it
    changes; two tables may be one file. Damage below that, on the disk, is found by the digest that a stage verifies
    before it reads a table.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[int, int, int]], pa.Table] = {}

    def forget_others(self, paths: Iterable[Path]) -> None:
        """Drops the relations over all other files: no stage reads the tables of one that is further back again."""
        read = {_identity(path) for path in paths if path.exists()}
        self._kept = {name: kept for name, kept in self._kept.items() if name[1] in read}

    def get(self, relation: str, path: Path, make: Callable[[], pa.Table]) -> pa.Table:
        """A relation over a local table, made where it is not kept; the oldest goes where all need too much memory."""
        name = relation, _identity(path)
        if name not in self._kept:
            self._kept[name] = make()
            while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > _MAX_MEASURED:
                del self._kept[next(iter(self._kept))]
        return self._kept[name]


def _identity(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def table_named(relation: str) -> str:
    """Returns the table that a relation has the rows of; the relation itself if it is of no table."""
    return relation.partition(_WITH)[0]


class View(NamedTuple):
    """A table that is too large to be held: a statement for DuckDB, and the Arrow tables that it selects from."""

    statement: str
    columns: Mapping[str, pa.Table]


class TableRelations:
    """The relations over one partition's tables and shards.

    Args:
        context: the partition.
        measured: where relations over local tables are kept; by default they are not, beyond these relations.
    """

    def __init__(self, context: CheckContext, measured: Measured | None = None) -> None:
        self.context = context
        self._open: dict[str, pq.ParquetFile] = {}
        self._measured = measured or Measured()
        store = context.store
        self._measured.forget_others(Path(store.path_of(file.path)) for file in context.tables.values())
        self._remote: dict[tuple[str, str], pa.Table] = {}

    def close(self) -> None:
        """Closes the files."""
        for file in self._open.values():
            file.close(force=True)

    def relation(self, name: str) -> View | pa.Table:
        """A relation by its name.

        `rows_with_texts_user` is the table `rows` with what the methods `_texts` and `_user` measure of each row as
        further columns; other names are those of a table, or of a method.

        Raises:
            SourceError: a file is missing or cannot be read.
            SchemaMismatchError: a table lacks a column.
        """
        table, _, measures = name.partition(_WITH)
        if table in self.context.tables:
            return self._select(table, measures.split("_") if measures else ())
        if name.endswith("_reread"):
            return self.derived("reread", name.removesuffix("_reread"))
        return getattr(self, name)()

    def derived(self, relation: str, table: str) -> pa.Table:
        """What the method `relation` makes of a table, once."""
        self.parquet(table)
        store, make = self.context.store, partial(getattr(self, f"_{relation}"), table)
        if store.is_local:
            return self._measured.get(relation, Path(store.path_of(self._file(table).path)), make)
        if (relation, table) not in self._remote:
            self._remote[relation, table] = make()
        return self._remote[relation, table]

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

    def _select(self, table: str, measures: Sequence[str]) -> View | pa.Table:
        """All columns of a table but content, and measures of its rows; in row tables `ordinal` counts the rows.

        A view if the table is large and local, so that it need not be held.
        """
        self._check_columns(table)
        store, file = self.context.store, self.parquet(table)
        measured = {f"{table}_{measure}": self.derived(measure, table) for measure in measures}
        if store.is_local and file.metadata.num_rows > _MAX_HELD:
            columns = ", ".join(f'"{name}"' for name in self._held_columns(table))
            ordinal = ", row_number() over () - 1 as ordinal" if _is_row_table(self._file(table).schema) else ""
            path = sql_text(store.path_of(self._file(table).path))
            parts = (f"(select {columns}{ordinal} from {parquet_relation(path)})", *measured)
            return View(f"select * from {' positional join '.join(parts)}", measured)
        held = self.derived("held", table)
        for measure in measured.values():
            for column in measure.schema.names:
                held = held.append_column(column, measure[column])
        return held

    def _held_columns(self, table: str) -> list[str]:
        """The columns of a table that checks select from: in place of structs and content there are measures."""
        return [
            name for name in _read_columns(self._file(table).schema) if name not in (*CONTENT, *SOURCE_SCHEMA.names)
        ]

    def _held(self, table: str) -> pa.Table:
        """The columns of a small table."""
        held = self.read(table, self._held_columns(table))
        if _is_row_table(self._file(table).schema):
            held = held.append_column("ordinal", pa.array(np.arange(held.num_rows), pa.int64()))
        return held

    def read(self, table: str, columns: Sequence[str]) -> pa.Table:
        """Some columns of a table as a whole; threads would cost more than they save.

        Raises:
            SourceError: the table cannot be read.
        """
        try:
            return self.parquet(table).read(list(columns), use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(self.url(table), f"cannot be read: {first_line(error)}") from error

    def _check_columns(self, table: str) -> None:
        """Refuses, with `SchemaMismatchError`, a table that lacks a column that relations over it select."""
        names = self.parquet(table).schema_arrow.names
        missing = [name for name in _read_columns(self._file(table).schema) if name not in names]
        if missing:
            raise SchemaMismatchError(f"{self.url(table)}: no column {', '.join(missing)}: make {table} again")

    def batches(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """A row table in bounded batches, content included; `columns` are those to read, all by default.

        Media that are not in the table are read from the shards.

        Raises:
            SchemaMismatchError: a column is missing.
            SourceError: while iterating, media in the shards are not what the table says.
        """
        self._check_columns(table)
        file, fetch = self.parquet(table), self.context.with_media.get(table)
        size = min(self.context.batch_bytes, BATCH_BYTES)
        if fetch is None or (columns is not None and MEDIA not in columns):
            return read_batches(file, batch_bytes=size, columns=columns, name=self.url(table))
        names = None if columns is None else list(dict.fromkeys((*columns, *FETCHED_BY)))
        batches = fetch(read_batches(file, batch_bytes=size, columns=names, name=self.url(table)))
        return batches if columns is None else (batch.select(list(columns)) for batch in batches)

    # -- columns

    def expected_columns(self) -> pa.Table:
        """The expected columns of the asset's tables."""
        return _columns_table({table: self._file(table).schema for table in self.context.own_tables})

    def actual_columns(self) -> pa.Table:
        """The columns of the asset's files; nullable is as in Parquet's own schema."""
        return _columns_table({table: self.parquet(table).schema_arrow for table in self.context.own_tables})

    def expected_samples(self) -> pa.Table:
        """The samples of the rows that are packed, in the order of their first rows."""
        ids = pc.unique(self.read(self.context.packed_from, ["sample_id"])["sample_id"])
        return pa.table([np.arange(len(ids)), ids], schema_of("ordinal", "sample_id"))

    # -- shards

    def shards(self) -> pa.Table:
        """The partition's shards and their sizes, in order."""
        shards = ((shard.file.url, shard.file.size, place) for place, shard in enumerate(self.context.shards))
        return table_of(shards, schema_of("shard", "size", "place"))

    def shard_members(self) -> pa.Table:
        """Every entry of the shards, from a new walk that continues after damage, as the index may have done."""
        batches = [
            batch
            for shard in self.context.shards
            for batch in index_members(shard, on_damaged_shard="salvage", roles=self.context.layout.roles)
        ]
        return pa.Table.from_batches(batches, MEMBER_INDEX_SCHEMA)

    # -- measures of rows: columns as long as their table

    def _locators(self, table: str) -> pa.Table:
        """Path, member and range of each row's locator, and its error; all are null without one.

        `is_stored` is whether the bytes there are the content as it is stored.
        """
        return self._measure(table, ["source_ref"], _LOCATORS, _parsed_locators)

    def _sources(self, table: str) -> pa.Table:
        """The fields of each row's `source` and `source_member`, by names that no other relation has."""
        return self._measure(table, SOURCE_SCHEMA.names, _SOURCES, _source_fields)

    def _content(self, table: str) -> pa.Table:
        """For each row of a row table the size and CRC-32C of its media bytes, null where it has none.

        `source_size` is the size that its locator gives, null where it gives none, or names one frame or a compressed
        member, or where the row has no media; `shown_type` the content type that its bytes show, null where its name
        says more.
        """
        found = self._measure(table, (MEDIA, "content_type"), _CONTENT, _sizes_and_sums)
        sizes = pa.nulls(found.num_rows, pa.int64())
        has_media = found["content_size"].is_valid()
        if pc.any(has_media).as_py():
            locators = self.derived("locators", table)
            sizes = pc.if_else(pc.and_(has_media, locators["is_stored"]), locators["byte_size"], None)
        return found.append_column("source_size", sizes)

    def _texts(self, table: str) -> pa.Table:
        """For each row of a row table digests of its text and its sample JSON, null where it has none."""
        return self._measure(table, TEXTS, _TEXTS, lambda batch: map(_digests, map(batch.column, TEXTS)))

    def _user(self, table: str) -> pa.Table:
        """For each row of a row table the digest of its user columns, null where all are."""
        names, schema = [column.name for column in self.context.schema.user_columns], schema_of("user_digest")
        if not names:
            return pa.table([pa.nulls(self.parquet(table).metadata.num_rows, kind) for kind in schema.types], schema)
        return self._measure(table, names, schema, lambda batch: [row_digests(batch)])

    def _digests(self, table: str) -> pa.Table:
        """For each row of a table the digest of all its columns."""
        return self._measure(table, None, schema_of("row_digest"), lambda batch: [row_digests(batch)])

    def _measure(
        self,
        table: str,
        columns: Sequence[str] | None,
        schema: pa.Schema,
        measure: Callable[[pa.RecordBatch], Iterable[pa.Array]],
    ) -> pa.Table:
        """What `measure` finds in columns of content, batch by batch."""
        batches = self.batches(table, columns)
        found = [pa.record_batch(list(measure(batch)), schema=schema) for batch in batches]
        return pa.Table.from_batches(found, schema).combine_chunks()

    def _reread(self, table: str) -> pa.Table:
        """Items that are read again from local shards and files, with the CRC-32C of what is there.

        Every frame of a TIFF, at most 16 pages of PDFs, and of other items about 4 MiB, spread over the partition: at
        least 8, at most 256.
        `shard_crc32c` is null where the item cannot be read again.
        """
        return table_of(self._items(table), schema_of("ordinal", "crc32c", "shard_crc32c"))

    def readable_items(self) -> pa.Table:
        """The rows that the asset's tables give up with an error, and that are read again without one.

        A row that was dropped with its sample counts if all of the sample's items are read.
        """
        return table_of(self._readable(), schema_of(*_FAILED))

    def _items(self, table: str) -> Iterator[tuple[Any, ...]]:
        content, locators = self.derived("content", table), self.derived("locators", table)
        sizes = content["content_size"]
        is_whole = pc.fill_null(pc.equal(content["source_size"], sizes), False)
        small = pc.and_(is_whole, pc.less_equal(sizes, MAX_REREAD_BYTES // MIN_REREAD))
        rows = pc.indices_nonzero(small).to_numpy()
        chosen: list[int] = []
        if len(rows):
            mean = max(1, pc.sum(sizes.filter(small)).as_py() // len(rows))
            count = min(len(rows), MAX_REREAD, max(MIN_REREAD, MAX_REREAD_BYTES // mean))
            chosen = rows[np.linspace(0, len(rows) - 1, count).astype(int)].tolist()
        wanted = np.zeros(locators.num_rows, np.bool_)
        wanted[chosen] = True
        # A frame is compared where it first appears: later stages have what this one has, by its checksum.
        if self.context.materialize_mode == "write" or len(self.context.own_tables) == 1:
            is_page = _are_pages(locators).to_numpy()
            wanted |= locators["frame_index"].is_valid().to_numpy() & ~is_page
            pages = np.flatnonzero(is_page)
            wanted[pages[np.linspace(0, len(pages) - 1, min(len(pages), MAX_REDRAWN)).astype(int)]] = True
        items = StoredItems(self.context)
        rows = np.flatnonzero(wanted)
        for start in range(0, len(rows), _BATCH_ROWS):
            some = rows[start : start + _BATCH_ROWS].tolist()
            for row, ref in zip(some, locators.take(some).to_pylist(), strict=True):
                checksum = content["crc32c"][row].as_py()
                if checksum is not None:
                    try:
                        again = items.read(SourceRef(*(ref[name] for name in SourceRef._fields)))
                    except (SourceError, MediaError):
                        yield row, checksum, None
                    else:
                        if again is not None:
                            yield row, checksum, crc32c(again)

    def _readable(self) -> Iterator[tuple[Any, ...]]:
        own, store, items = self.context.own_tables[0], self.context.store, StoredItems(self.context)
        made_ns = os.stat(store.path_of(self._file(own).path)).st_mtime_ns if store.is_local else 0

        def reads(source_ref: str | None) -> bool:
            """Whether a locator gives content now; False where that is not tried."""
            try:
                return items.read(parse_source_ref(source_ref), changed_before_ns=made_ns) is not None
            except (SourceError, MediaError):
                return False

        for batch in self.batches(own, _FAILED):
            failed = pc.and_(batch.column("materialize_error").is_valid(), batch.column("source_ref").is_valid())
            for row in row_tuples(batch.filter(failed)):
                if reads(row[3]):
                    yield row
        if len(self.context.own_tables) > 1 and self.context.materialize_mode == "write":
            yield from self._readable_drops(reads)

    def _readable_drops(self, reads: Callable[[str | None], bool]) -> Iterator[tuple[Any, ...]]:
        """Of the rows that are dropped since their content could not be fetched those whose content is there."""
        columns = self.read(self.context.own_tables[1], (*ROW_IDENTITY, "reason", "detail"))
        lost = columns.filter(pc.is_in(columns["reason"], pa.array(NOT_FETCHED)))
        details = dict(zip(row_tuples(lost, *ROW_IDENTITY), lost["detail"].to_pylist(), strict=True))
        whole = {sample_id for sample_id, _, modality in details if modality == "metadata"}
        found: dict[str, list[tuple[Any, ...]]] = {}
        kept_out: set[str] = set()  # samples that went as a whole, of which an item is not read
        for batch in self.batches(self.context.source_table, (*ROW_IDENTITY, "source_ref")):
            for row in row_tuples(batch):
                sample_id, _, modality = key = row[:3]
                if key not in details or modality in ("metadata", "text"):
                    continue
                if reads(row[3]):
                    found.setdefault(sample_id, []).append((*row, details[key]))
                elif sample_id in whole:
                    kept_out.add(sample_id)
        for sample_id, rows in found.items():
            if sample_id not in kept_out:
                yield from rows

    # -- declarations

    def user_columns(self) -> pa.Table:
        """The names of the user columns."""
        return table_of(((column.name,) for column in self.context.schema.user_columns), schema_of("column_name"))

    def known_modalities(self) -> pa.Table:
        """The row modalities that there may be."""
        return table_of(zip(sorted(MODALITIES | self.context.known_modalities), strict=True), schema_of("modality"))

    def materialize_mode(self) -> pa.Table:
        """The mode, in one row."""
        return table_of([(self.context.materialize_mode,)], schema_of("mode"))

    def on_undecodable(self) -> pa.Table:
        """What becomes of undecodable media, in one row."""
        return table_of([(self.context.on_undecodable,)], schema_of("policy"))

    def loss_limit(self) -> pa.Table:
        """What the asset may lose, in one row; no row where nothing limits it."""
        limit, names = self.context.loss_limit, ("setting", "allowed", "most", "share", "command")
        rows = [] if limit is None else [(limit.setting, str(limit.allowed), limit.most, limit.share, limit.command)]
        return table_of(rows, schema_of(*names))

    def harmless_reasons(self) -> pa.Table:
        """The reasons of what the asset lists that is not a loss."""
        limit = self.context.loss_limit
        return table_of(zip(sorted(limit.harmless if limit else ()), strict=True), schema_of("reason"))


def _values(column: Any) -> Iterator[memoryview | None]:
    """The bytes of each value of a column of text or bytes, not copied."""
    wide = column.cast(pa.large_binary())
    _, positions, content = wide.buffers()
    view = memoryview(b"" if content is None else content).cast("B")
    starts = np.frombuffer(positions, np.int64)[wide.offset : wide.offset + len(wide) + 1].tolist()
    for row, present in enumerate(wide.is_valid().to_pylist()):
        yield view[starts[row] : starts[row + 1]] if present else None


def digest_of(content: bytes) -> int:
    """The digest by which checks compare texts: 64 bits, with a key of this process that no data can know."""
    return hash(content)


def values_digest(values: Sequence[object]) -> int | None:
    """The digest of the values of one row; None where all are null."""
    return None if values.count(None) == len(values) else digest_of(repr(values).encode())


def _digests(column: Any) -> pa.Array:
    if column.null_count == len(column):
        return pa.nulls(len(column), DIGEST)
    return pa.array(
        [None if value is None else digest_of(value) for value in column.cast(pa.large_binary()).to_pylist()], DIGEST
    )


def row_digests(batch: pa.RecordBatch) -> pa.Array:
    """The digest of each row's values, null where all of them are."""
    if not batch.num_columns or all(column.null_count == batch.num_rows for column in batch.columns):
        return pa.nulls(batch.num_rows, DIGEST)
    return pa.array(map(values_digest, row_tuples(batch)), DIGEST)


def _sizes_and_sums(batch: pa.RecordBatch) -> tuple[pa.Array, ...]:
    media = batch.column(MEDIA)
    if media.null_count == batch.num_rows:
        return tuple(pa.nulls(batch.num_rows, kind) for kind in _CONTENT.types)
    sizes = pc.cast(pc.binary_length(media), pa.int64())
    sums: list[int | None] = []
    types: list[str | None] = []
    for value, known in zip(_values(media), batch.column("content_type").to_pylist(), strict=True):
        sums.append(None if value is None else crc32c(value))
        shown = None if value is None else sniff_content_type(value[:MAX_SNIFFED])
        types.append(None if shown == "application/zip" and known in OWN_ZIPS else shown)
    return sizes, pa.array(sums, pa.uint32()), pa.array(types, pa.string())


def _parsed_locators(batch: pa.RecordBatch) -> list[pa.Array]:
    """The parts of each locator, what is wrong with it, and whether it is of stored content."""
    refs = batch.column("source_ref")
    try:
        parsed = with_parsed_source_ref_columns(pa.table({"source_ref": refs}), prefix="").combine_chunks()
        columns = [parsed[name].combine_chunks() for name in SourceRef._fields]
        columns[4] = columns[4].cast(pa.int64())
        problems = pa.nulls(batch.num_rows, pa.string())
    except SourceError:  # one of them is wrong: the others count
        found = [_ref_or_problem(text) for text in refs.to_pylist()]
        *columns, problems = map(pa.array, zip(*found, strict=True), _LOCATORS.types[:6])
    path, member, *_, frame = columns
    is_stored = pc.if_else(refs.is_valid(), is_stored_content(pc.coalesce(member, path), frame), None)
    return [*columns, problems, is_stored]


def _source_fields(batch: pa.RecordBatch) -> list[pa.Array]:
    """The fields of both structs, and whether there are bytes in place of `inline`, which are not held."""
    fields = [field for name in SOURCE_SCHEMA.names for field in batch.column(name).flatten()]
    fields[5] = fields[5].is_valid()
    return [field.cast(kind) for field, kind in zip(fields, _SOURCES.types, strict=True)]


def _ref_or_problem(text: str | None) -> tuple[Any, ...]:
    try:
        ref = parse_source_ref(text)
    except SourceError as error:
        return None, None, None, None, None, error.detail
    return ref.path, ref.member, ref.byte_offset, ref.byte_size, ref.frame_index, None


def _are_pages(locators: pa.Table) -> Any:
    """Which locators are, by the name of their file, of a page of a PDF."""
    is_pdf = pc.ends_with(pc.coalesce(locators["member"], locators["path"]), ".pdf", ignore_case=True)
    return pc.and_(locators["frame_index"].is_valid(), pc.fill_null(is_pdf, False))


def _is_row_table(schema: pa.Schema) -> bool:
    return bool(schema.names[: len(MULTIMODAL_SCHEMA)] == MULTIMODAL_SCHEMA.names)


def _read_columns(schema: pa.Schema) -> Sequence[str]:
    """The columns that relations over a table read: of a row table the reserved ones, as others may have any name."""
    names: list[str] = MULTIMODAL_SCHEMA.names if _is_row_table(schema) else schema.names
    return names


def _columns_table(schemas: Mapping[str, pa.Schema]) -> pa.Table:
    names = schema_of("table_name", "ordinal", "column_name", "column_type", "nullable")
    return table_of(
        (
            (table, place, column.name, _type_name(column.type), column.nullable)
            for table, schema in schemas.items()
            for place, column in enumerate(schema)
        ),
        names,
    )


def _type_name(kind: pa.DataType) -> str:
    # Parquet calls a list's items "element", Arrow "item": the name is not part of the type.
    return f"list<{_type_name(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)
