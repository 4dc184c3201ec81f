"""Filters and annotators at work on a partition.

Every row is either kept, in its order, or listed once among the dropped with the filter and the reason (rows that
`fetch` omits are reported by `fetch`). A metadata row is dropped only with its whole sample. Memory is bounded by a few
blocks for a partition of any size. `base` defines filters and annotators, `registry` their names in declarations.

The order is the same whether content is present or fetched late, so both give the same rows:

1. annotators that need no content, then filters that need none, each in the order given;
2. `fetch`, where content is not present yet, and then the policy for rows whose content could not be read;
3. annotators that need content, then filters that do (or ask to run among them), each in the order given;
4. `decodable` and `packable`; then samples without content are dropped, and positions renumbered if configured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mm_assets.errors import FilterError, LazyModule, MmAssetsError, SchemaMismatchError, first_line
from mm_assets.filters.base import Annotator, Block, Filter, Scope
from mm_assets.filters.parameters import check_choice
from mm_assets.rows.columns import row_tuples
from mm_assets.rows.parquet import sample_groups
from mm_assets.rows.schema import (
    ALL_FILTERED,
    DECODABLE,
    DROPPED_SCHEMA,
    EMPTY_SAMPLE,
    MATERIALIZE,
    MISALIGNED,
    PACKABLE,
    PIPELINE_FILTERS,
    ROW_IDENTITY,
    DatasetSchema,
    Drop,
)
from mm_assets.rows.source_ref import with_parsed_source_ref_columns
from mm_assets.summaries import counted

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

__all__ = ["FilterStream"]

_T = TypeVar("_T")

Fetch = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]
JudgeTable = Callable[[pa.Table, Sequence[memoryview | None]], Iterable[Drop]]  # of whole samples, with their contents


class FilterStream:
    """The kept rows of one partition, annotated and filtered while they are read; iterate once.

    They are batches of whole samples with `schema.filtered_schema()`.

    Args:
        blocks: tables with `schema.row_schema()`, each of whole samples with contiguous rows.
        annotators: fresh instances; together they fill `schema.annotator_columns`.
        filters: fresh instances.
        schema: the dataset's schema.
        decodable: names rows whose media cannot be decoded; it sees the rows that all filters kept.
        packable: names rows that cannot be packed; it sees the rows that `decodable` kept.
        misaligned: names samples whose parts contradict each other; it sees the rows that `packable` kept.
        fetch: materializes the rows that need content while they stream past, in order, keeping all columns; it pulls
            its input in the thread that iterates it. None where `blocks` hold their content.
        on_materialize_error: what happens to rows with a `materialize_error`: "keep", "drop_row" or "drop_sample".
        on_empty_sample: what happens to samples without content rows: "drop" or "keep" (their metadata rows).
        renumber: number the kept positions of each sample from 0 without gaps; equal positions stay equal.
        batch_bytes: content of one block after `fetch`, in bytes.
        threads: threads that decode and hash.

    Attributes:
        only_selects: whether the kept rows are some of those that come in, with the same values.
        selected: (n,) int64, the number of each row of the last batch among those that came in.

    Raises:
        SchemaMismatchError: the annotators and the schema disagree, or, while iterating, a block and the schema do.
        FilterError: while iterating, a filter or annotator broke its contract or raised an error of its own, which is
            the cause.
    """

    def __init__(
        self,
        blocks: Iterable[pa.Table],
        *,
        annotators: Sequence[Annotator],
        filters: Sequence[Filter],
        schema: DatasetSchema,
        decodable: JudgeTable | None = None,
        packable: JudgeTable | None = None,
        misaligned: JudgeTable | None = None,
        fetch: Fetch | None = None,
        on_materialize_error: str = "keep",
        on_empty_sample: str = "drop",
        renumber: bool = False,
        batch_bytes: int = 16 << 20,
        threads: int = 2,
    ) -> None:
        check_choice("on_materialize_error", on_materialize_error, ("keep", "drop_row", "drop_sample"))
        check_choice("on_empty_sample", on_empty_sample, ("drop", "keep"))
        self._blocks = blocks
        self._fetch = fetch
        self._batch_bytes = batch_bytes
        self._threads = threads
        self._renumber = renumber
        self._early = [a for a in annotators if not a.needs_content]
        self._late = [a for a in annotators if a.needs_content]
        self._early_filters = [f for f in filters if not (f.needs_content or f.after_content)]
        self._late_filters = [f for f in filters if f.needs_content or f.after_content]
        if on_materialize_error != "keep":
            scope: Scope = "sample" if on_materialize_error == "drop_sample" else "row"
            self._late_filters.insert(0, _Step(MATERIALIZE, scope, _not_materialized))
        if decodable is not None:
            self._late_filters.append(_Step(DECODABLE, "row", lambda block: decodable(block.table, block.contents)))
        if packable is not None:
            self._late_filters.append(_Step(PACKABLE, "row", lambda block: packable(block.table, block.contents)))
        if misaligned is not None:
            self._late_filters.append(
                _Step(MISALIGNED, "sample", lambda block: misaligned(block.table, block.contents))
            )
        if on_empty_sample == "drop":
            self._late_filters.append(_Step(EMPTY_SAMPLE, "sample", self._without_content))
        self._row_schema = schema.row_schema()
        self._filtered_schema = schema.filtered_schema()
        _check_annotators(annotators, schema)
        self.only_selects = fetch is None and not annotators and not renumber
        self.selected: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._counts: Counter[str] = Counter({"rows": 0, "samples": 0, "kept": 0, "kept_samples": 0, "dropped": 0})
        self._first_details: dict[tuple[str, str], str] = {}
        self._dropped: list[pa.RecordBatch] = []  # of rows that every step has judged
        self._waiting: list[tuple[npt.NDArray[np.int64], pa.RecordBatch]] = []  # the others, with their rows' numbers
        self._passed: list[npt.NDArray[np.int64]] = []  # numbers of the rows that content may be fetched of, in order
        self._last_sample: str | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._started = False

    @property
    def counts(self) -> dict[str, int]:
        """Rows and samples that came in (``rows``, ``samples``), those kept (``kept``, ``kept_samples``), rows dropped.

        ``dropped`` is the sum of the counts ``dropped.<filter>.<reason>``, one for each that occurred, sorted.
        """
        head = {name: self._counts[name] for name in ("rows", "samples", "kept", "kept_samples", "dropped")}
        return head | {name: count for name, count in sorted(self._counts.items()) if name not in head}

    @property
    def notes(self) -> tuple[str, ...]:
        """For each filter and reason whose drops have a detail: how many rows went, and the first detail."""
        return tuple(
            f"{name}: {reason}, {counted(self._counts[f'dropped.{name}.{reason}'], 'row')}; the first is of {detail}"
            for (name, reason), detail in sorted(self._first_details.items())
        )

    def take_dropped(self) -> list[pa.RecordBatch]:
        """The rows dropped since the last call, with `DROPPED_SCHEMA`: call it after each batch, and at the end.

        They are in the order of the rows that came in, however these were divided into blocks.
        """
        taken, self._dropped = self._dropped, []
        return taken

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._started:
            raise FilterError("FilterStream", "a stream of filtered rows can be iterated once")
        self._started = True
        with ThreadPoolExecutor(self._threads, thread_name_prefix="filters") as self._pool:
            tables: Iterable[pa.Table] = map(self._judge_without_content, self._blocks)
            if self._fetch is not None:
                bare = (batch for table in tables for batch in table.to_batches())
                tables = sample_groups(self._checked_fetch(self._fetch(bare)), batch_bytes=self._batch_bytes)
            for table in tables:
                kept = self._judge_with_content(table)
                if kept.num_rows:
                    yield self._finish(kept)
            self._release(self._counts["rows"])

    def _judge_without_content(self, table: pa.Table) -> pa.Table:
        first = self._counts["rows"]
        self._check_block(table)
        numbers = np.arange(first, first + table.num_rows)
        if not (self._early or self._early_filters):
            self._passed.append(numbers)
            return table
        # The steps before content see none even if it is there: they return the same in both modes, and selecting rows
        # copies no media.
        content = table.schema.get_field_index("binary_content")
        bare = table.set_column(content, table.schema.field(content), pa.nulls(table.num_rows, pa.large_binary()))
        block = self._annotate(Block(bare, pool=self._pool), self._early)
        block = self._judge(block, self._early_filters, numbers)
        self._passed.append(numbers[block.origin])
        if block.num_rows < table.num_rows:
            keep = np.zeros(table.num_rows, dtype=np.bool_)
            keep[block.origin] = True
            table = table.filter(pa.array(keep))
        for name in block.schema.names[len(self._row_schema) :]:  # what the annotators added
            table = table.append_column(name, block.column(name))
        return table

    def _checked_fetch(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        added = [pa.field(c.name, c.arrow_type) for annotator in self._early for c in annotator.columns]
        expected = pa.schema([*self._row_schema, *added])
        for batch in batches:
            if not batch.schema.equals(expected):
                detail = _difference(batch.schema, expected)
                raise SchemaMismatchError(f"fetched rows do not have the columns that were to be fetched: {detail}")
            yield batch

    def _judge_with_content(self, table: pa.Table) -> Block:
        passed = np.concatenate(self._passed)
        numbers, self._passed = passed[: table.num_rows], [passed[table.num_rows :]]
        block = self._judge(self._annotate(Block(table, pool=self._pool), self._late), self._late_filters, numbers)
        self.selected = numbers[block.origin]
        if len(numbers):
            self._release(int(numbers[-1]))
        return block

    def _release(self, last: int) -> None:
        """Hands over what was dropped up to a row, sorted: no step will drop another of these rows."""
        if not self._waiting:
            return
        numbers = np.concatenate([found for found, _ in self._waiting])
        dropped = pa.Table.from_batches([batch for _, batch in self._waiting])
        order = np.argsort(numbers)
        done = int(np.searchsorted(numbers[order], last, side="right"))
        self._dropped += dropped.take(order[:done]).combine_chunks().to_batches()
        left = dropped.take(order[done:]).combine_chunks().to_batches()
        self._waiting = [(numbers[order[done:]], batch) for batch in left]

    def _check_block(self, table: pa.Table) -> None:
        if not table.schema.equals(self._row_schema):
            detail = _difference(table.schema, self._row_schema)
            raise SchemaMismatchError(f"rows to filter do not have the dataset's columns: {detail}")
        if table.num_rows == 0:
            return
        ids = table.column("sample_id")
        if ids[0].as_py() == self._last_sample:
            raise SchemaMismatchError(f"sample {self._last_sample!r} is split over two blocks of rows to filter")
        self._last_sample = ids[table.num_rows - 1].as_py()
        self._counts["rows"] += table.num_rows
        self._counts["samples"] += Block(table).num_samples

    def _annotate(self, block: Block, annotators: Sequence[Annotator]) -> Block:
        for annotator in annotators:
            found = _called(annotator.name or type(annotator).__name__, annotator.annotate, block)
            table = block.table
            for column in annotator.columns:
                values = found.get(column.name)
                if values is None:
                    raise FilterError(annotator.name, f"annotator returned no column {column.name!r}")
                if isinstance(values, pa.ChunkedArray):
                    values = values.combine_chunks()
                if not isinstance(values, pa.Array) or len(values) != block.num_rows:
                    size = len(values) if isinstance(values, pa.Array) else type(values).__name__
                    detail = f"column {column.name!r} has {size}, expected an Arrow array of {block.num_rows} values"
                    raise FilterError(annotator.name, detail)
                if values.type != column.arrow_type:
                    detail = f"column {column.name!r} is {values.type}, expected {column.arrow_type}"
                    raise FilterError(annotator.name, detail)
                table = table.append_column(column.name, values)
            block = block.with_table(table)
        return block

    def _judge(self, block: Block, filters: Sequence[Filter], numbers: npt.NDArray[np.int64]) -> Block:
        for judge in filters:
            if not block.num_rows:
                break
            verdicts = _verdicts(block, judge)
            if verdicts:
                self._record(block, judge.name, verdicts, numbers[block.origin])
                keep = np.ones(block.num_rows, dtype=np.bool_)
                keep[list(verdicts)] = False
                block = block.select(keep)
        return block

    def _record(self, block: Block, name: str, verdicts: Mapping[int, Drop], numbers: npt.NDArray[np.int64]) -> None:
        rows = sorted(verdicts)
        identity = [block.column(c).take(rows).combine_chunks() for c in ROW_IDENTITY]
        columns = zip(*((name, *verdicts[row][1:]) for row in rows), strict=True)
        why = [pa.array(c, field.type) for c, field in zip(columns, list(DROPPED_SCHEMA)[3:], strict=True)]
        dropped = pa.RecordBatch.from_arrays([*identity, *why], schema=DROPPED_SCHEMA)
        self._waiting.append((numbers[rows], dropped))
        self._counts["dropped"] += len(rows)
        for sample_id, row in zip(identity[0], rows, strict=True):
            _, reason, _, detail = verdicts[row]
            self._counts[f"dropped.{name}.{reason}"] += 1
            if detail is not None and (name, reason) not in self._first_details:
                self._first_details[name, reason] = f"sample {sample_id.as_py()!r}: {detail}"

    def _without_content(self, block: Block) -> Iterable[Drop]:
        """Returns the samples that have no content row, and whether declared filters alone dropped all they had."""
        content = np.bincount(block.sample_index[~block.is_metadata], minlength=block.num_samples)
        starts = block.sample_starts[content == 0]
        ids = block.column("sample_id").take(starts)
        dropped_by: dict[str, set[str]] = {sample_id: set() for sample_id in ids.to_pylist()}
        for _, batch in self._waiting if dropped_by else ():  # the drops of a sample are released after its block
            of_these = batch.filter(pc.is_in(batch.column("sample_id"), value_set=ids.combine_chunks()))
            for sample_id, name in row_tuples(of_these, "sample_id", "filter"):
                dropped_by[sample_id].add(name)
        for row, names in zip(starts.tolist(), dropped_by.values(), strict=True):
            yield Drop(row, ALL_FILTERED if names and not names & PIPELINE_FILTERS else "no_content_rows", None)

    def _finish(self, block: Block) -> pa.RecordBatch:
        self._counts["kept"] += block.num_rows
        self._counts["kept_samples"] += block.num_samples
        table = block.table.select(self._filtered_schema.names)
        if self._renumber:
            place = table.schema.get_field_index("position")
            table = table.set_column(place, table.schema.field(place), pa.array(_renumbered(block), pa.int32()))
        columns = [column.combine_chunks() for column in table.columns]
        return pa.RecordBatch.from_arrays(columns, schema=self._filtered_schema)


class _Step(Filter):
    """A step of the pipeline that drops rows as a filter does."""

    def __init__(self, name: str, scope: Scope, judge: Callable[[Block], Iterable[Drop]]) -> None:
        self.name = name
        self.scope = scope
        self._judge = judge

    def judge(self, block: Block) -> Iterable[Drop]:
        return self._judge(block)


def _not_materialized(block: Block) -> Iterable[Drop]:
    """The rows whose content could not be read."""
    errors = block.column("materialize_error")
    for row in pc.indices_nonzero(errors.is_valid()).to_pylist():
        yield Drop(row, "materialize_error", None, errors[row].as_py())


def _verdicts(block: Block, judge: Filter) -> dict[int, Drop]:
    """Why each row that is dropped goes: for a sample, every one of its rows."""
    verdicts: dict[int, Drop] = {}
    samples: dict[int, Drop] = {}
    for found in _dropped_by(judge, block):
        drop = _checked(found, block, judge.name)
        if judge.scope == "sample" or block.is_metadata[drop.row]:
            samples.setdefault(int(block.sample_index[drop.row]), drop)
        else:
            verdicts.setdefault(drop.row, drop)
    for row in np.flatnonzero(np.isin(block.sample_index, list(samples))).tolist() if samples else ():
        verdicts[row] = samples[int(block.sample_index[row])]
    return verdicts


def _dropped_by(judge: Filter, block: Block) -> Iterable[Drop]:
    if isinstance(judge, _Step):
        return judge.judge(block)
    return _called(judge.name or type(judge).__name__, lambda judged: list(judge.judge(judged)), block)


def _called(name: str, call: Callable[[Block], _T], block: Block) -> _T:
    """The result of a filter's or annotator's own code; what it raises is named with its sample and file."""
    try:
        return call(block)
    except MmAssetsError:
        raise
    except Exception as error:  # a filter or annotator is its author's code and may raise anything
        place = _place_of(call, block, type(error))
        said = first_line(error)
        detail = f"raised {type(error).__name__}" + (f": {said}" if said else "")
        raise FilterError(name, f"{detail} on {place}") from error


def _place_of(call: Callable[[Block], object], block: Block, kind: type[Exception]) -> str:
    """The first sample that raises the same error when it is judged alone, with its file; else the block's samples."""
    for number in range(block.num_samples if block.num_samples > 1 else 0):
        alone = block.select(block.sample_index == number)
        try:
            call(alone)
        except Exception as error:  # noqa: BLE001 - the author's code may raise anything, and this is about one kind
            if isinstance(error, kind):
                return _shown_samples(alone)
    return _shown_samples(block)


def _shown_samples(block: Block) -> str:
    ids = block.column("sample_id")
    first, last = ids[0].as_py(), ids[block.num_rows - 1].as_py()
    shown = f"sample {first!r}" if first == last else f"one of the samples {first!r} to {last!r}"
    refs = with_parsed_source_ref_columns(pa.table({"source_ref": block.column("source_ref")}))
    files = [path for path in dict.fromkeys(refs.column("_src_path").to_pylist()) if path is not None]
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return shown + (f" of {files[0]}{more}" if files else "")


def _checked(drop: Drop, block: Block, name: str) -> Drop:
    row, reason, value, detail = Drop(*drop)
    if isinstance(row, bool) or not isinstance(row, (int, np.integer)) or not 0 <= row < block.num_rows:
        raise FilterError(name, f"dropped row {row!r}, expected an index below {block.num_rows}")
    if not isinstance(reason, str) or not reason:
        raise FilterError(name, f"dropped row {row} with the reason {reason!r}, expected text")
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float, np.number))):
        raise FilterError(name, f"dropped row {row} with the value {value!r}, expected a number or None")
    if detail is not None and not isinstance(detail, str):
        raise FilterError(name, f"dropped row {row} with the detail {detail!r}, expected text or None")
    return Drop(int(row), reason, None if value is None else float(value), detail)


def _renumbered(block: Block) -> npt.NDArray[np.int32]:
    """Dense rank of each content row's position in its sample, from 0; metadata rows stay as they are."""
    positions: npt.NDArray[np.int32] = np.array(block.column("position").to_numpy(), dtype=np.int32)
    content = np.flatnonzero(~block.is_metadata)
    if not len(content):
        return positions
    content = content[np.lexsort((positions[content], block.sample_index[content]))]
    samples, old = block.sample_index[content], positions[content]
    starts = np.concatenate([[True], samples[1:] != samples[:-1]])
    steps = np.cumsum(np.concatenate([[True], old[1:] != old[:-1]]) | starts)
    first = np.repeat(steps[starts], np.diff(np.append(np.flatnonzero(starts), len(content))))
    positions[content] = steps - first
    return positions


def _check_annotators(annotators: Sequence[Annotator], schema: DatasetSchema) -> None:
    produced = sorted((c.name, c.type) for a in annotators for c in a.columns)
    declared = sorted((c.name, c.type) for c in schema.annotator_columns)
    if produced != declared:
        detail = f"annotators make {produced}, the dataset's schema has {declared}"
        raise SchemaMismatchError(f"annotator columns: {detail}")


def _difference(found: pa.Schema, expected: pa.Schema) -> str:
    for place, wanted in enumerate(expected):
        if place >= len(found) or not found.field(place).equals(wanted):
            have = found.field(place) if place < len(found) else "nothing"
            return f"column {place} is {have}, expected {wanted}"
    return f"further columns {found.names[len(expected) :]}"
