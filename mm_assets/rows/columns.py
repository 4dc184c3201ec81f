"""Rows as growing Arrow columns, and the list of what did not become a row.

A row costs a few list appends and never a dictionary. Batches are bounded by the bytes that are in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mm_assets.rows.file_columns import with_source_columns
from mm_assets.rows.schema import KEPT, MULTIMODAL_SCHEMA, REJECTS_SCHEMA, DatasetSchema, MemberRules, UserColumn
from mm_assets.rows.user_columns import UNFIT, Converter, converter
from mm_assets.sources.text_members import ParsedObject
from mm_assets.summaries import counted, summarize

__all__ = [
    "Kept",
    "MemberIndex",
    "Origin",
    "Rejects",
    "RowBuilder",
    "RowStream",
    "content_views",
    "row_tuples",
    "sample_id_of",
    "views",
]

MemberIndex = Callable[[], Iterator[pa.RecordBatch]]
"""Reads the member index of a partition's containers from its start, shard by shard."""

ROW_BYTES = 64  # rough cost of a row in addition to its text: identities, offsets, validity
MAX_ROWS = 64 << 10  # rows of one batch
MAX_BATCH = 512 << 20  # a string column of one batch must stay below 2 GiB for any sample
MAX_UNKNOWN = 1000  # different keys without a column that are counted by name
MAX_KEPT = 100  # of them, and of columns, that are named: a stage's record lists them
MAX_NAMED = 5  # of them in a note
FLUSH_REJECTS = 8 << 10

NO_COLUMN, NULL_CAST, REPAIRED_JSON = f"{KEPT}.no_column", f"{KEPT}.null_cast", f"{KEPT}.repaired_json"


def row_tuples(table: pa.Table | pa.RecordBatch, *names: str) -> Iterator[tuple[Any, ...]]:
    """Yields the values of some columns, or of all columns if none is named, row by row."""
    columns = [table.column(name) for name in names] if names else table.columns
    return zip(*(column.to_pylist() for column in columns), strict=True)


def sample_id_of(value: object) -> str | None:
    """Returns the sample's id that a JSON value is: a text that is not empty, or a whole number; None of any other."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value else None


class Origin(NamedTuple):
    """Where a sample comes from: its shard, its id, and its JSON, if that is a member."""

    shard: str
    sample_id: str | None = None
    member: str | None = None
    byte_offset: int | None = None
    byte_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Faults of one kind that keep nothing from being packed, and the first item that has one.

    Attributes:
        reason: what is wrong; starts with `KEPT` and a dot.
        count: how many items have it.
        detail: what was found.
        origin: the first of these items.
    """

    reason: str
    count: int
    detail: str
    origin: Origin


_FILLED = [name for name in MULTIMODAL_SCHEMA.names if name != "binary_content"]


class RowBuilder:
    """Collects rows as batches of the dataset's row schema, what did not become a row, and the numbers of both.

    Args:
        layout: how members become rows.
        schema: the dataset's schema.
        batch_bytes: content of one batch.

    Attributes:
        user: the user columns that JSON fills, with their converters.
        notes: what a person should know about how the rows were made.
        kept: keys without a column, values that do not fit theirs and repaired JSON, complete once all rows are made.
        origin: where the sample comes from whose rows are being made.
    """

    def __init__(self, layout: MemberRules, schema: DatasetSchema, batch_bytes: int) -> None:
        self.layout = layout
        self.rejects = Rejects()
        self.notes: list[str] = []
        self.kept: list[Kept] = []
        self.origin = Origin("")
        self._fitted: set[str] = set()  # columns that have a value in the batches before
        self._num_unfit: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()  # samples by key
        self._examples: dict[tuple[str, str], tuple[Origin, str]] = {}  # by reason and name: the first, in words
        self.counts: Counter[str] = Counter(dict.fromkeys(("members", "samples", "rows", "rejects"), 0))
        self.user = [(column, converter(column.type)) for column in schema.user_columns if column.source]
        self._schema = schema.row_schema()
        self._user_names = [column.name for column in schema.user_columns]
        self._batch_bytes = batch_bytes
        self._done: list[pa.RecordBatch] = []
        self._clear()

    def _clear(self) -> None:
        self._rows: list[tuple[Any, ...]] = []  # the values of `_FILLED`
        self._cells: dict[str, dict[int, Any]] = {name: {} for name in self._user_names}  # of user columns, by row
        self._size = 0

    def append(
        self,
        sample_id: str,
        position: int,
        modality: str,
        *,
        content_type: str | None = None,
        text: str | None = None,
        source_ref: str | None = None,
        metadata_json: str | None = None,
        error: str | None = None,
    ) -> None:
        """Adds one row; its user columns are null until `fill` sets them."""
        if self._size >= MAX_BATCH:
            self._flush()
        self._rows.append((sample_id, position, modality, content_type, text, source_ref, metadata_json, error))
        size = self._size + ROW_BYTES + len(sample_id)
        if text is not None:
            size += len(text)
        if source_ref is not None:
            size += len(source_ref)
        if metadata_json is not None:
            size += len(metadata_json)
        if error is not None:
            size += len(error)
        self._size = size

    def fill(self, column: UserColumn, fit: Converter, value: object) -> None:
        """Fills a user column of the last row, unless the value is null or does not fit."""
        self.fill_all(((column, fit),), {column.source: value})

    def fill_all(self, columns: Iterable[tuple[UserColumn, Converter]], values: Mapping[str, Any]) -> None:
        """Fills user columns of the last row with the values of their keys, as `fill`."""
        row = len(self._rows) - 1
        for column, fit in columns:
            value = values.get(column.source)
            if value is None:
                continue
            fitted = fit(value)
            if fitted is UNFIT:
                self.note_unfit(column, value)
                continue
            self._cells[column.name][row] = fitted
            if isinstance(fitted, str | list):
                self._size += len(fitted)

    def note_unfit(self, column: UserColumn, value: object) -> None:
        """Counts a value that does not fit its column."""
        self.counts[NULL_CAST] += 1
        if column.name not in self._num_unfit:
            self._examples[NULL_CAST, column.name] = self.origin, f"is {column.type}, found {summarize(value)}"
        self._num_unfit[column.name] += 1

    def note_unknown(self, keys: Iterable[str]) -> None:
        """Counts keys of a sample's JSON that are not columns, unless the declaration names the columns."""
        if self.layout.user_columns is not None:
            return
        for key in sorted(keys):
            self.counts[NO_COLUMN] += 1
            if key not in self._unknown:
                if len(self._unknown) >= MAX_UNKNOWN:
                    continue
                self._examples[NO_COLUMN, key] = self.origin, "is not a column"
            self._unknown[key] += 1

    def note_repairs(self, parsed: ParsedObject) -> None:
        """Counts what was replaced in the JSON of a sample."""
        nulls, surrogates = parsed.num_nulls, parsed.num_surrogates
        if not nulls and not surrogates:
            return
        self.counts["nonstandard_numbers"] += nulls
        self.counts["repaired_texts"] += surrogates > 0
        self.counts[REPAIRED_JSON] += 1
        parts = [f"null for {counted(nulls, 'number')} that JSON does not have"] if nulls else []
        parts += [f"U+FFFD for {counted(surrogates, 'lone surrogate')}"] if surrogates else []
        self._examples.setdefault((REPAIRED_JSON, ""), (self.origin, f"the JSON has {' and '.join(parts)}"))

    def note_columns(self) -> None:
        """Lists what is in no column or was repaired, once all rows are made, and notes columns that no value fits."""
        misfits = sorted(self._num_unfit.keys() - self._fitted)
        if misfits:
            self.counts["misfit_columns"] += len(misfits)
            self.notes.append(f"no value fits its column: {_some_counts({n: self._num_unfit[n] for n in misfits})}")
        for reason, noun, found in ((NO_COLUMN, "key", self._unknown), (NULL_CAST, "column", self._num_unfit)):
            for name, count in _most_first(found)[:MAX_KEPT]:
                origin, detail = self._examples[reason, name]
                detail = f"{noun} {summarize(name)!r} {detail}"
                self.kept.append(Kept(reason=reason, count=count, detail=detail, origin=origin))
            rest = self.counts[reason] - sum(count for _, count in _most_first(found)[:MAX_KEPT])
            if rest:
                self.kept.append(Kept(reason=reason, count=rest, detail=f"further {noun}s", origin=Origin("")))
        if self.counts[REPAIRED_JSON]:
            origin, detail = self._examples[REPAIRED_JSON, ""]
            self.kept.append(Kept(reason=REPAIRED_JSON, count=self.counts[REPAIRED_JSON], detail=detail, origin=origin))

    @property
    def full(self) -> bool:
        """Whether the rows should be yielded now."""
        return bool(self._done) or self._size >= self._batch_bytes or len(self._rows) >= MAX_ROWS

    def take(self) -> Iterator[pa.RecordBatch]:
        """The rows so far as a batch; none if there are none, several only for a sample that one batch cannot hold."""
        if self._rows:
            self._flush()
        done, self._done = self._done, []
        yield from done

    def _flush(self) -> None:
        num_rows = len(self._rows)
        places = {name: place for place, name in enumerate(_FILLED)}
        arrays = []
        for field in self._schema:
            if field.name in self._cells:
                cells = self._cells[field.name]
                arrays.append(pa.array(list(map(cells.get, range(num_rows))), field.type))
            elif field.name in places:
                arrays.append(pa.array(list(map(itemgetter(places[field.name]), self._rows)), field.type))
            else:
                arrays.append(pa.nulls(num_rows, field.type))
        self._fitted.update(name for name, cells in self._cells.items() if cells)
        self._clear()
        self._done.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))


def _most_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _some_counts(counts: Mapping[str, int]) -> str:
    """The most frequent names with their numbers: ``'price' 12, 'size' 3 and 2 more``."""
    ordered = _most_first(counts)
    shown = ", ".join(f"{summarize(name)!r} {count:,}" for name, count in ordered[:MAX_NAMED])
    return shown + (f" and {len(ordered) - MAX_NAMED:,} more" if len(ordered) > MAX_NAMED else "")


class Rejects:
    """The list of what was not turned into a row."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, str | None, str | None, str, str, str]] = []
        self._batches: list[pa.RecordBatch] = []
        self.count = 0

    def add(
        self,
        shard: str,
        *,
        reason: str,
        detail: str,
        sample_id: str | None = None,
        member: str | None = None,
        stage: str = "rows",
    ) -> None:
        """Adds one entry."""
        self._pending.append((shard, sample_id, member, stage, reason, detail))
        self.count += 1
        if len(self._pending) >= FLUSH_REJECTS:
            self._flush()

    def _flush(self) -> None:
        columns = zip(*self._pending, strict=True)
        arrays = [pa.array(c, f.type) for c, f in zip(columns, REJECTS_SCHEMA, strict=True)]
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=REJECTS_SCHEMA))
        self._pending = []

    def table(self) -> pa.Table:
        """The entries so far as a table of `REJECTS_SCHEMA`."""
        if self._pending:
            self._flush()
        return pa.Table.from_batches(self._batches, schema=REJECTS_SCHEMA)


class RowStream:
    """Row batches of one partition, with the columns of `SOURCE_SCHEMA`; iterate once, then ask for the rejects.

    Attributes:
        counts: numbers of members, samples, rows, rejects and of each kind of repair, complete once iterated.
        notes: what a person should know about how the rows were made, complete once iterated.
        kept: faults that kept nothing from becoming a row, complete once iterated.
    """

    def __init__(
        self,
        batches: Iterator[pa.RecordBatch],
        rejects: Rejects,
        counts: Counter[str],
        notes: Sequence[str] = (),
        kept: Sequence[Kept] = (),
    ) -> None:
        self.notes = notes
        self.kept = kept
        self._batches = batches
        self._rejects = rejects
        self.counts: dict[str, int] = counts
        self._done = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.counts["rows"] += batch.num_rows
            yield with_source_columns(batch)
        self.counts["rejects"] = self._rejects.count
        self._done = True

    def rejects(self, *, so_far: bool = False) -> pa.Table:
        """Whatever was not turned into a row, of `REJECTS_SCHEMA`.

        Raises:
            RuntimeError: the stream has not been read to its end, and `so_far` does not allow that.
        """
        if not self._done and not so_far:
            raise RuntimeError("the rows have not been read to their end yet")
        return self._rejects.table()


def views(column: pa.ChunkedArray) -> list[memoryview | None]:
    """The values of a string or binary column as read-only views of Arrow's own memory; None for null."""
    found: list[memoryview | None] = []
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        if offsets is None:
            found += [None] * len(chunk)
            continue
        kind = np.dtype(np.int64 if pa.types.is_large_binary(chunk.type) else np.int32)
        ends = np.frombuffer(offsets, kind, offset=chunk.offset * kind.itemsize)[: len(chunk) + 1].tolist()
        memory = memoryview(b"" if data is None else data).cast("B").toreadonly()
        valid = chunk.is_valid().to_pylist()
        found += [
            memory[start:end] if is_valid else None for is_valid, start, end in zip(valid, ends, ends[1:], strict=False)
        ]
    return found


def content_views(table: pa.Table) -> list[memoryview | None]:
    """The content of each row: its bytes, or its text as UTF-8; None where it has neither."""
    texts, contents = views(table.column("text_content")), views(table.column("binary_content"))
    return [text if content is None else content for text, content in zip(texts, contents, strict=True)]
