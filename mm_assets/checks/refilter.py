"""A few samples filtered and annotated again, from media that are read again: what the tables of the filters must say.

Built-in filters and annotators judge these samples again, except filters that compare samples. Those, and filters and
annotators of the user's own, which may be expensive or depend on chance, are not run: in their place, what they dropped
is taken from the table, and their columns are not compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mm_assets.checks.context import CheckContext, Filtering
from mm_assets.checks.items import StoredItems
from mm_assets.checks.relations import MEDIA, NOT_FETCHED, TableRelations, schema_of, table_of
from mm_assets.errors import MediaError, SourceError
from mm_assets.fields.user_code import is_own
from mm_assets.filters.base import Annotator, Block, Filter
from mm_assets.packing.judge import Judge, Mode
from mm_assets.rows.columns import row_tuples
from mm_assets.rows.schema import DECODABLE, MISALIGNED, PACKABLE, PIPELINE_FILTERS, ROW_IDENTITY, Drop
from mm_assets.rows.source_ref import parse_source_ref

__all__ = ["drop_reasons", "filter_mismatches", "known_filters"]

MAX_SPREAD, MAX_DROPPED = 16, 48  # samples of a partition: of all, and of those of which a row was dropped
MIN_BYTES, MAX_BYTES = 256 << 10, 4 << 20  # of the media of these samples, and between them
SHARE = 32  # one of so many bytes of the partition
TOLERANCE = 1e-6  # relative: another processor may round the last digits of a measure in another way

_FOUND = schema_of(*ROW_IDENTITY, "problem", "recorded", "expected")
_FAULT = (*ROW_IDENTITY, "field", "reason")

_Key = tuple[str, int, str]  # of `ROW_IDENTITY`
_Fault = tuple[str, int, str, str, str]  # of `_FAULT`
_Cause = tuple[str, str, float | None]  # filter, reason and value of a drop


def known_filters(context: CheckContext) -> pa.Table:
    """The filters that may drop rows, and whether for any reason; none where they are not known."""
    filters = () if context.filtering is None else context.filtering.filters()
    names = [*PIPELINE_FILTERS, *(each.name for each in filters)] if context.filtering is not None else []
    are_open = {each.name for each in filters if not is_own(type(each))}
    rows = ((name, name in are_open) for name in sorted(set(names)))
    return table_of(rows, schema_of("filter", "is_open"))


def drop_reasons(context: CheckContext) -> pa.Table:
    """The reasons of the other filters, each with the side of its limit that is kept, if it has one."""
    rows: set[tuple[str, str, str | None, float | None]] = set()
    for each in () if context.filtering is None else context.filtering.filters():
        rows.update((each.name, reason, None, None) for reason in each.reasons)
        rows.update((each.name, limit.reason, limit.keeps, limit.value) for limit in each.thresholds())
    return table_of(sorted(rows, key=repr), schema_of("filter", "reason", "keeps", "bound"))


def filter_mismatches(context: CheckContext, tables: TableRelations) -> pa.Table:
    """Differences between the tables of the filters and what a few samples give when they are filtered again."""
    found = () if context.filtering is None else _Again(context, context.filtering, tables).mismatches()
    return table_of(found, _FOUND)


class _Again:
    def __init__(self, context: CheckContext, filtering: Filtering, tables: TableRelations) -> None:
        self._context = context
        self._filtering = filtering
        self._tables = tables
        self._source = context.source_table
        self._kept, self._losses, faults = context.own_tables
        self._dropped = tables.read(self._losses, (*ROW_IDENTITY, "filter", "reason", "value"))
        self._faults: set[Any] = set(row_tuples(tables.read(faults, _FAULT), *_FAULT))

    def mismatches(self) -> Iterator[tuple[Any, ...]]:
        samples = self._samples()
        with_fault = {sample_id for sample_id, *_ in self._faults}
        # Only samples of which media did not decode are decoded again: it takes the longest of all.
        for is_faulty in (False, True):
            some = {name: rows for name, rows in samples.items() if (name in with_fault) == is_faulty}
            if some:
                yield from self._compare(some, self._filtering.decodable if is_faulty else "headers")

    # -- the samples

    def _samples(self) -> dict[str, pa.Table]:
        """The chosen samples, each with its media."""
        batches = list(self._tables.batches(self._source, ["sample_id"]))
        ids = [sample_id for batch in batches for sample_id in batch.column(0).to_pylist()]
        if not ids:
            return {}
        starts = [0, *(row for row in range(1, len(ids)) if ids[row] != ids[row - 1])]
        chosen = self._chosen([ids[start] for start in starts], np.array(starts))
        wanted = np.zeros(len(ids), np.bool_)
        for number in chosen:
            wanted[starts[number] : starts[number + 1] if number + 1 < len(starts) else len(ids)] = True
        names = [name for name in self._context.schema.row_schema().names if name != MEDIA]
        parts, first = [], 0
        for batch in self._tables.batches(self._source, names):
            parts.append(batch.filter(pa.array(wanted[first : first + batch.num_rows])))
            first += batch.num_rows
        return self._with_media(pa.Table.from_batches(parts), np.flatnonzero(wanted).tolist())

    def _chosen(self, ids: Sequence[str], starts: Any) -> list[int]:
        """Numbers of samples, ascending: spread over all, and over those with dropped rows for each of the reasons."""
        if self._context.materialize_mode == "read":
            content = self._tables.derived("content", self._source)
            sizes = pc.fill_null(content["content_size"], 0).to_numpy()
        else:
            sizes = pc.fill_null(self._tables.derived("locators", self._source)["byte_size"], 0).to_numpy()
        of_sample = np.add.reduceat(sizes, starts)
        most = min(MAX_BYTES, max(MIN_BYTES, int(sizes.sum()) // SHARE))
        number_of = {sample_id: number for number, sample_id in enumerate(ids)}
        causes: dict[tuple[str, str], list[int]] = defaultdict(list)
        for sample_id, name, reason in row_tuples(self._dropped, "sample_id", "filter", "reason"):
            number = number_of.get(sample_id)
            if number is not None and number not in causes[name, reason][-1:]:
                causes[name, reason].append(number)
        of_each = max(1, MAX_DROPPED // max(1, len(causes)))
        dropped = [number for numbers in causes.values() for number in _spread(numbers, of_each)][:MAX_DROPPED]
        chosen: set[int] = set()
        for numbers in (dropped, _spread(range(len(ids)), MAX_SPREAD)):
            smallest = sorted(numbers, key=lambda number: of_sample[number])
            held = 0
            for number in smallest:
                if held + of_sample[number] > (most if held else MAX_BYTES):
                    break
                held += int(of_sample[number])
                chosen.add(number)
        return sorted(chosen)

    def _with_media(self, rows: pa.Table, ordinals: Sequence[int]) -> dict[str, pa.Table]:
        """The samples of these rows with the media of each, without those that have one that is not read again.

        What is not read from a shard, since that is remote, compressed or closed, comes from the table if it is there.
        """
        lost = self._dropped.filter(pc.is_in(self._dropped["reason"], pa.array(NOT_FETCHED)))
        failed = set(row_tuples(lost, *ROW_IDENTITY)) if self._context.materialize_mode == "write" else set()
        items, left_out = StoredItems(self._context), set[str]()
        media: list[Any] = []
        missing: dict[int, int] = {}  # ordinal to row
        errors, refs = rows["materialize_error"].to_pylist(), rows["source_ref"].to_pylist()
        for row, key in enumerate(row_tuples(rows, *ROW_IDENTITY)):
            media.append(None)
            if key[2] in ("text", "metadata") or errors[row] is not None:
                continue
            if key in failed:
                errors[row] = "its content was not fetched"
                continue
            try:
                media[-1] = items.read(parse_source_ref(refs[row]))
            except (SourceError, MediaError):  # the check `shard_bytes` reports it
                left_out.add(key[0])
            if media[-1] is None:
                missing[ordinals[row]] = row
        for ordinal, content in self._stored(missing):
            media[missing.pop(ordinal)] = content
        left_out.update(rows["sample_id"][row].as_py() for row in missing.values())
        schema = self._context.schema.row_schema()
        columns = {name: rows[name] for name in rows.schema.names}
        columns |= {MEDIA: pa.array(media, pa.large_binary()), "materialize_error": pa.array(errors, pa.string())}
        whole = pa.table([columns[name] for name in schema.names], schema).combine_chunks()
        ids = rows["sample_id"].to_pylist()
        found: dict[str, pa.Table] = {}
        start = 0
        for row in range(1, len(ids) + 1):
            if row == len(ids) or ids[row] != ids[start]:
                if ids[start] not in left_out:
                    found[ids[start]] = whole.slice(start, row - start)
                start = row
        return found

    def _stored(self, ordinals: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """The media of rows as the table has them; none if it has references."""
        wanted = sorted(ordinals)
        if not wanted or self._source in self._context.with_media:
            return
        first = 0
        for batch in self._tables.batches(self._source, [MEDIA]):
            here = [ordinal for ordinal in wanted if first <= ordinal < first + batch.num_rows]
            for ordinal in here:
                content = batch.column(0)[ordinal - first].as_py()
                if content is not None:
                    yield ordinal, content
            first += batch.num_rows
            if first > wanted[-1]:
                return

    # -- filtering

    def _compare(self, samples: Mapping[str, pa.Table], mode: Mode) -> Iterator[tuple[Any, ...]]:
        filtering = self._filtering
        annotators = filtering.annotators()
        compared = [column.name for each in annotators if is_own(type(each)) for column in each.columns]
        annotators = [each if is_own(type(each)) else _Unfilled(each) for each in annotators]
        declared = filtering.filters()
        others = {each.name for each in declared if each.compares_samples or not is_own(type(each))}
        filters = [_Recorded(each.name, self._causes, each) if each.name in others else each for each in declared]
        faulty: list[_Fault] = []
        block = pa.concat_tables(samples.values()).combine_chunks()
        with Judge(filtering.plan, policy=filtering.on_undecodable, mode=mode) as judge:
            # A column that is not filled again may be packed, and decide what can be.
            packed_alike = len(compared) == sum(len(each.columns) for each in annotators)
            if not packed_alike:
                filters += [_Recorded(name, self._causes) for name in (DECODABLE, PACKABLE, MISALIGNED)]
            stream = filtering.stream([block], annotators, filters, judge if packed_alike else None)
            kept, dropped = list(stream), stream.take_dropped()
            for batch in (*judge.take_undecodable(), *judge.take_faulty()):
                faulty += row_tuples(batch, *_FAULT)
        names = [*ROW_IDENTITY, *compared]
        ids = pa.array(list(samples), pa.string())
        recorded = (batch.filter(pc.is_in(batch.column(0), ids)) for batch in self._tables.batches(self._kept, names))
        yield from _kept_mismatches(_by_sample(recorded, names), _by_sample(kept, names), names)
        again = {key: cause for batch in dropped for key, cause in _causes(batch)}
        recorded_causes = {key: cause for key, cause in self._causes.items() if key[0] in samples}
        for key in sorted(recorded_causes.keys() | again.keys()):
            before, now = recorded_causes.get(key), again.get(key)
            if before is None or now is None or before[:2] != now[:2] or not _equal(before[2], now[2]):
                yield *key, "the drop is another", _shown(before), _shown(now)
        if mode == "full" and packed_alike:
            for fault in sorted({fault for fault in self._faults if fault[0] in samples}.symmetric_difference(faulty)):
                is_recorded = fault in self._faults
                yield *fault[:3], f"{fault[4]} as {fault[3]!r}", str(is_recorded), str(not is_recorded)

    @cached_property
    def _causes(self) -> Mapping[_Key, _Cause]:
        return dict(_causes(self._dropped))


class _Recorded(Filter):
    """Drops what the table says that a filter of this name dropped, in its place: a step of the pipeline comes last."""

    def __init__(self, name: str, causes: Mapping[_Key, _Cause], other: Filter | None = None) -> None:
        self.name = name
        self.needs_content, self.after_content = (
            (False, True) if other is None else (other.needs_content, other.after_content)
        )
        self._causes = causes

    def judge(self, block: Block) -> Iterator[Drop]:
        for row, key in enumerate(row_tuples(block.table, *ROW_IDENTITY)):
            name, reason, value = self._causes.get(key, ("", "", None))
            if name == self.name:
                yield Drop(row, reason, value)


class _Unfilled(Annotator):
    """Leaves the columns of another annotator empty."""

    def __init__(self, other: Annotator) -> None:
        self.name, self.columns, self.needs_content = other.name, other.columns, other.needs_content

    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        return {column.name: pa.nulls(block.num_rows, column.arrow_type) for column in self.columns}


def _kept_mismatches(
    recorded: Mapping[str, Sequence[tuple[Any, ...]]],
    again: Mapping[str, Sequence[tuple[Any, ...]]],
    names: Sequence[str],
) -> Iterator[tuple[Any, ...]]:
    """How the rows of each sample that were kept differ from those that are kept now."""
    for sample_id in sorted(recorded.keys() | again.keys()):
        before, now = recorded.get(sample_id, ()), again.get(sample_id, ())
        if [row[:3] for row in before] != [row[:3] for row in now]:
            yield sample_id, None, None, "other rows are kept", str(len(before)), str(len(now))
            continue
        for one, other in zip(before, now, strict=True):
            for name, value, expected in zip(names[3:], one[3:], other[3:], strict=True):
                if not _equal(value, expected):
                    yield *one[:3], f"{name!r} is another", str(value), str(expected)


def _by_sample(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of each sample, in order, as tuples of these columns."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for batch in batches:
        for row in row_tuples(batch, *names):
            found.setdefault(row[0], []).append(row)
    return found


def _causes(table: pa.Table | pa.RecordBatch) -> Iterator[tuple[_Key, _Cause]]:
    return ((row[:3], row[3:]) for row in row_tuples(table, *ROW_IDENTITY, "filter", "reason", "value"))


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    places = np.linspace(0, len(numbers) - 1, min(count, len(numbers))).astype(int)
    return [numbers[place] for place in np.unique(places).tolist()]


def _equal(one: object, other: object) -> bool:
    """Whether two values are the same, numbers up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other


def _shown(cause: _Cause | None) -> str | None:
    return None if cause is None else f"{cause[0]}.{cause[1]}, value {cause[2]}"
