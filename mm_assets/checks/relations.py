"""The relations that checks select from: a partition's tables, and the facts of its shards and declarations.

Tables are relations without their columns of content: one of their values may be larger than DuckDB's memory. Small
ones are read once, and DuckDB reads large ones from their Parquet files. Content is read in bounded batches, and only
sizes, checksums and digests stay in memory. Only the checks of the member index walk the shards' headers again; later
checks rely on the index.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mm_assets.checks.context import CheckContext, TableFile
from mm_assets.errors import SchemaMismatchError, SourceError, first_line
from mm_assets.formats import crc32c
from mm_assets.media.content_types import OWN_ZIPS, sniff_content_type
from mm_assets.rows.parquet import open_table, read_batches
from mm_assets.rows.schema import MODALITIES, MULTIMODAL_SCHEMA
from mm_assets.rows.source_ref import parse_source_ref, with_parsed_source_ref_columns
from mm_assets.sources.compressed import is_compressed

__all__ = [
    "DIGEST",
    "TableBuilder",
    "TableRelations",
    "digest_of",
    "row_digests",
    "schema_of",
    "table_of",
    "values_digest",
]

MEDIA = "binary_content"
TEXTS = ("text_content", "metadata_json")
CONTENT = (MEDIA, *TEXTS)  # never read by DuckDB: one vector of them could be larger than its memory

MAX_SNIFFED = 512  # first bytes of an item that show its content type
MAX_REREAD = 8  # items of a partition whose range is read from its shard again
MAX_REREAD_BYTES = 4 << 20  # of all of them: the check must not cost what the stage did
DIGEST = 16  # bytes
_DERIVED = ("content", "reread", "texts", "source_refs", "user", "digests")  # from the table whose name is before it
_BATCH_ROWS = 4 << 10  # rows that become Python objects at a time
_MAX_HELD = 1 << 16  # rows of a table that is read once; each statement reads a larger one

_TYPES = {  # of the columns that are not text
    **dict.fromkeys(("ordinal", "place", "position", "item", "page", "step"), pa.int64()),
    **dict.fromkeys(("type_id", "metadata_size", "size", "byte_offset", "byte_size"), pa.int64()),
    **dict.fromkeys(("number", "frame_index", "num_refused"), pa.int64()),
    **dict.fromkeys(("is_metadata", "is_read", "is_interleaved", "is_reference"), pa.bool_()),
    **dict.fromkeys(("text_digest", "user_digest", "row_digest"), pa.binary(DIGEST)),
    **dict.fromkeys(("content_size", "source_size"), pa.int64()),
    **dict.fromkeys(("most", "share"), pa.int64()),
    **dict.fromkeys(("crc32c", "shard_crc32c"), pa.uint32()),
    **dict.fromkeys(("nullable", "exact", "may_be_equal"), pa.bool_()),
    **dict.fromkeys(("seconds", "start_seconds", "end_seconds", "previous_seconds", "tolerance_seconds"), pa.float64()),
    **dict.fromkeys(("video_seconds", "audio_seconds", "frame_seconds"), pa.float64()),
    **dict.fromkeys(("left", "top", "right", "bottom", "width", "height"), pa.float64()),
}


def schema_of(*names: str) -> pa.Schema:
    """The schema of a relation with these columns: a column of one name has one type in all relations."""
    return pa.schema([(name, _TYPES.get(name, pa.string())) for name in names])


_MEMBERS = schema_of(
    *("shard", "ordinal", "member", "byte_offset", "byte_size", "member_type", "skip_reason"),
    *("sample_key", "role", "extension"),
)
_REFS = schema_of("ordinal", "path", "member", "byte_offset", "byte_size", "frame_index", "problem")
_CONTENT = schema_of("content_size", "crc32c", "source_size", "shown_type")
_TEXTS = pa.schema([(f"{name}_digest", pa.binary(DIGEST)) for name in TEXTS])


class TableBuilder:
    """A table that is filled by rows as tuples, of which few are held at once."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []
        self._held: list[tuple[Any, ...]] = []

    def add(self, row: tuple[Any, ...]) -> None:
        """Adds one row."""
        self._held.append(row)
        if len(self._held) >= _BATCH_ROWS:
            self._flush()

    def extend(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Adds rows, each as it comes."""
        for row in rows:
            self.add(row)

    def _flush(self) -> None:
        columns = map(pa.array, zip(*self._held, strict=True), self._schema.types)
        self._batches.append(pa.RecordBatch.from_arrays(list(columns), schema=self._schema))
        self._held.clear()

    def table(self) -> pa.Table:
        """The rows that were added."""
        if self._held:
            self._flush()
        return pa.Table.from_batches(self._batches, self._schema)


def table_of(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    """A table of rows as tuples, of which few are held at once."""
    builder = TableBuilder(schema)
    builder.extend(rows)
    return builder.table()


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

        `rows_content` is what the method `content` makes of the table `rows`; others are the method of their name.

        Raises:
            SourceError: a file is missing or cannot be read.
            SchemaMismatchError: a table lacks a column.
        """
        if name in self.context.tables:
            return self._select(name)
        for derived in _DERIVED:
            if name.endswith(f"_{derived}"):
                return getattr(self, derived)(name.removesuffix(f"_{derived}"))
        return getattr(self, name)()

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

    def _select(self, table: str) -> str | pa.Table:
        """All columns of a table but content; in row tables `ordinal` counts the rows.

        A statement where the table is large and local, so that it need not be held.
        """
        self._check_columns(table)
        schema, store, file = self._file(table).schema, self.context.store, self.parquet(table)
        names = [name for name in _read_columns(schema) if name not in CONTENT]
        if store.is_local and file.metadata.num_rows > _MAX_HELD:
            columns = ", ".join(f'"{name}"' for name in names)
            # Counted and not read from the file: a user column may be called file_row_number.
            ordinal = ", row_number() over () - 1 as ordinal" if _is_row_table(schema) else ""
            return f"select {columns}{ordinal} from read_parquet({_quoted(store.path_of(self._file(table).path))})"
        try:
            held = file.read(names, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(self.url(table), f"cannot be read: {first_line(error)}") from error
        if _is_row_table(schema):
            held = held.append_column("ordinal", pa.array(np.arange(held.num_rows), pa.int64()))
        return held

    def _check_columns(self, table: str) -> None:
        """Refuses, with `SchemaMismatchError`, a table that lacks a column that relations over it select."""
        names = self.parquet(table).schema_arrow.names
        missing = [name for name in _read_columns(self._file(table).schema) if name not in names]
        if missing:
            raise SchemaMismatchError(f"{self.url(table)}: no column {', '.join(missing)}: make {table} again")

    def batches(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """A row table in bounded batches, content included; `columns` are those to read, all by default.

        Raises:
            SchemaMismatchError: a column is missing.
        """
        self._check_columns(table)
        file, size = self.parquet(table), self.context.batch_bytes
        return read_batches(file, batch_bytes=size, columns=columns, name=self.url(table))

    # -- columns

    def expected_columns(self) -> pa.Table:
        """The expected columns of the asset's tables."""
        return _columns_table({table: self._file(table).schema for table in self.context.own_tables})

    def actual_columns(self) -> pa.Table:
        """The columns of the asset's files; nullable is as in Parquet's own schema."""
        return _columns_table({table: self.parquet(table).schema_arrow for table in self.context.own_tables})

    # -- shards

    def shards(self) -> pa.Table:
        """The partition's shards and their sizes."""
        return table_of(
            ((shard.file.url, shard.file.size) for shard in self.context.shards), schema_of("shard", "size")
        )

    def shard_members(self) -> pa.Table:
        """Every entry of the shards, from a new walk that continues after damage, as the index may have done."""
        members = (member for shard in self.context.shards for member in shard.members(on_damaged_shard="salvage"))
        return table_of(map(attrgetter(*_MEMBERS.names), members), _MEMBERS)

    def source_refs(self, table: str) -> pa.Table:
        """Path, member and range of each row's locator, and its error; rows without one are left out."""
        return table_of(self._refs(table), _REFS)

    def _refs(self, table: str) -> Iterator[tuple[Any, ...]]:
        texts = (text for batch in self.batches(table, ["source_ref"]) for text in batch.column(0).to_pylist())
        for ordinal, text in enumerate(texts):
            if text is not None:
                try:
                    ref = parse_source_ref(text)
                except SourceError as error:
                    yield ordinal, None, None, None, None, None, error.detail
                else:
                    yield ordinal, ref.path, ref.member, ref.byte_offset, ref.byte_size, ref.frame_index, None

    # -- content

    def content(self, table: str) -> pa.Table:
        """For each row of a row table the size and CRC-32C of its media bytes, null where it has none.

        `source_size` is the size that its locator gives, null where it gives none, or names one frame or a compressed
        member; `shown_type` the content type that its bytes show, null where its name says more.
        """
        if table not in self._content:
            self._content[table] = self._measured(
                table, (MEDIA, "source_ref", "content_type"), _CONTENT, _sizes_and_sums
            )
        return self._content[table]

    def texts(self, table: str) -> pa.Table:
        """For each row of a row table digests of its text and its sample JSON, null where it has none."""
        return self._measured(table, TEXTS, _TEXTS, lambda batch: map(_digests, map(batch.column, TEXTS)))

    def user(self, table: str) -> pa.Table:
        """For each row of a row table the digest of its user columns, null where all of them are."""
        names = [column.name for column in self.context.schema.user_columns]
        if not names:
            num_rows = self.parquet(table).metadata.num_rows
            return pa.table([np.arange(num_rows), pa.nulls(num_rows, pa.binary(DIGEST))], ["ordinal", "user_digest"])
        return self._measured(table, names, schema_of("user_digest"), lambda batch: [row_digests(batch)])

    def digests(self, table: str) -> pa.Table:
        """For each row of a table the digest of all its columns."""
        return self._measured(table, None, schema_of("row_digest"), lambda batch: [row_digests(batch)])

    def _measured(
        self,
        table: str,
        columns: Sequence[str] | None,
        schema: pa.Schema,
        measure: Callable[[pa.RecordBatch], Iterable[pa.Array]],
    ) -> pa.Table:
        """What `measure` finds in columns of content, batch by batch, numbered by `ordinal`."""
        batches = self.batches(table, columns)
        found = pa.Table.from_batches(
            [pa.record_batch(list(measure(batch)), schema=schema) for batch in batches], schema
        )
        return found.add_column(0, "ordinal", pa.array(np.arange(found.num_rows), pa.int64()))

    def reread(self, table: str) -> pa.Table:
        """Up to 8 items of at most 4 MiB, spread over the partition, with the CRC-32C of their ranges in local shards.

        A remote shard is not read again: each request costs money.
        """
        return table_of(self._reread(table), schema_of("ordinal", "crc32c", "shard_crc32c"))

    def _reread(self, table: str) -> Iterator[tuple[Any, ...]]:
        shards = {shard.file.url: shard.file for shard in self.context.shards if shard.file.is_local}
        _, sizes, sums, source_sizes, _ = self.content(table).columns
        small = pc.less_equal(sizes, MAX_REREAD_BYTES // MAX_REREAD)
        rows = pc.indices_nonzero(pc.and_(source_sizes.is_valid(), small)).to_numpy()
        if not shards or not len(rows):
            return
        chosen = rows[np.linspace(0, len(rows) - 1, min(MAX_REREAD, len(rows))).astype(int)]
        first = 0
        for batch in self.batches(table, ["source_ref"]):
            for row in chosen[(chosen >= first) & (chosen < first + batch.num_rows)].tolist():
                ref, size = parse_source_ref(batch.column(0)[row - first].as_py()), sizes[row].as_py()
                shard = shards.get(ref.path or "")
                if shard is None or ref.byte_offset is None or ref.byte_size != size:
                    continue
                if ref.byte_offset + size <= shard.size:  # the checks of locators report a range that leaves the shard
                    yield row, sums[row].as_py(), crc32c(shard.read(ref.byte_offset, size))
            first += batch.num_rows

    # -- declarations

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


def digest_of(content: Any) -> bytes:
    """The digest by which checks compare texts."""
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def values_digest(values: Sequence[object]) -> bytes | None:
    """The digest of the values of one row; None where all are null.

    Numbers that are not finite count as null: JSON has none, so that `metadata_json` has null in their place.
    """
    if values.count(None) == len(values):
        return None
    text = repr(values)
    if "nan" in text or "inf" in text:
        finite = [_finite(value) for value in values]
        return None if finite.count(None) == len(finite) else digest_of(repr(tuple(finite)).encode())
    return digest_of(text.encode())


def _finite(value: object) -> object:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _digests(column: Any) -> pa.Array:
    return pa.array((None if v is None else digest_of(v) for v in _values(column)), pa.binary(DIGEST))


def row_digests(batch: pa.RecordBatch) -> pa.Array:
    """The digest of each row's values, null where all of them are."""
    if not batch.num_columns or all(column.null_count == batch.num_rows for column in batch.columns):
        return pa.nulls(batch.num_rows, pa.binary(DIGEST))
    rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
    return pa.array(map(values_digest, rows), pa.binary(DIGEST))


def _sizes_and_sums(batch: pa.RecordBatch) -> tuple[pa.Array, ...]:
    media = batch.column(MEDIA)
    sizes = pc.cast(pc.binary_length(media), pa.int64())
    sums: list[int | None] = []
    types: list[str | None] = []
    for value, known in zip(_values(media), batch.column("content_type").to_pylist(), strict=True):
        sums.append(None if value is None else crc32c(value))
        shown = None if value is None else sniff_content_type(value[:MAX_SNIFFED])
        types.append(None if shown == "application/zip" and known in OWN_ZIPS else shown)
    return sizes, pa.array(sums, pa.uint32()), _source_sizes(batch.column("source_ref")), pa.array(types, pa.string())


def _source_sizes(refs: Any) -> pa.Array:
    """The size of the whole content that each locator gives, int64."""
    try:
        parsed = with_parsed_source_ref_columns(pa.table({"source_ref": refs}), prefix="")
    except SourceError:  # one of them is wrong, which the check of locators reports: the others count
        return pa.array([_source_size(text) for text in refs.to_pylist()], pa.int64())
    whole = pc.is_null(parsed["frame_index"])
    names = pc.coalesce(parsed["member"], parsed["path"]).to_pylist()
    stored_as_is = pa.array([not is_compressed(name) for name in names], pa.bool_())
    return pc.if_else(pc.and_(whole, stored_as_is), parsed["byte_size"], None).combine_chunks()


def _source_size(text: str | None) -> int | None:
    try:
        ref = parse_source_ref(text)
    except SourceError:
        return None
    return None if ref.frame_index is not None or is_compressed(ref.member or ref.path) else ref.byte_size


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


def _quoted(url: str) -> str:
    """A file as a literal, with DuckDB's wildcards escaped."""
    literal = "".join(f"[{c}]" if c in "*?[" else c for c in url)
    return "'" + literal.replace("'", "''") + "'"
