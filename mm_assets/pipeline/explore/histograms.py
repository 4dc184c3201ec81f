"""Scores of a dataset: histograms of its measures with the limits of its filters, and what other limits would keep.

A measure is a numeric column of the filtered rows, or what a filter measured of the rows that it dropped. DuckDB reads
these columns from Parquet, and never a column of content.

A count is exact where a limit becomes stricter: the values of the rows that are kept are all there. Where it becomes
looser, rows come back that this filter dropped; the filters after it have not seen them and may drop some.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mm_assets.errors import ConfigError, LazyModule, SourceError, first_line
from mm_assets.pipeline.chain import DROPPED, FILTERED_ROWS
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.schema import FILE_COLUMN, RESERVED_COLUMNS
from mm_assets.rows.sql import parquet_relation, sql_name, sql_text

if TYPE_CHECKING:
    import pyarrow.parquet as pq
else:
    pq = LazyModule("pyarrow.parquet")

__all__ = ["Bin", "Histogram", "Kept", "Limit", "Score", "histogram", "kept_by", "scores"]

_KEPT_ROWS = FILTERED_ROWS.tables[0].name
_BINS = 60
_MAX_BINS = 400
_MEMORY = "256MiB"
_TOGETHER = 500  # partitions that are read by one query
_RECORDS = 16  # partitions whose records are asked which limits were applied
_NUMERIC = ("int64", "double")
CONTENT_BYTES, TEXT_CHARS = "content_bytes", "text_chars"  # measures that every dataset has
# Of content that stays in its shard, and of texts, which have no range where they are entries of a JSON.
_DERIVED = {
    CONTENT_BYTES: "case when modality <> 'metadata' then coalesce((source_ref ->> 'byte_size')::bigint, "
    "octet_length(encode(text_content))) end",
    TEXT_CHARS: "case when modality = 'text' then length(text_content) end",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit of a filter on a measure, as it was applied.

    Attributes:
        filter: the filter's name.
        setting: its parameter.
        value: the limit.
        keeps: ``at_least`` or ``at_most``.
        reason: of the rows that it dropped.
        scope: "row", or "sample" where a whole sample goes.
    """

    filter: str
    setting: str
    value: float
    keeps: str
    reason: str
    scope: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A measure that can be looked at.

    Attributes:
        name: its name: the column's, or the measure's where no column holds it.
        column: the column of the filtered rows that holds it, or None: then only dropped rows have values.
        limits: the limits on it.
        note: what to know of it, such as that partitions were filtered by different limits; else empty.
    """

    name: str
    column: str | None
    limits: tuple[Limit, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Values from `low` up to `high`, which belongs to the next one, but for the last.

    Attributes:
        low: its lower end.
        high: its upper end.
        kept: rows that are kept.
        dropped: rows that a limit on this measure dropped.
    """

    low: float
    high: float
    kept: int
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """The distribution of a measure.

    Attributes:
        score: the measure.
        num_kept: rows with a value that are kept.
        num_dropped: rows that a limit on it dropped.
        low: the least value; None without values.
        high: the largest.
        is_log: whether the bins are of equal ratio instead of equal width.
        bins: in order.
    """

    score: Score
    num_kept: int
    num_dropped: int
    low: float | None
    high: float | None
    is_log: bool
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What limits would keep.

    Attributes:
        kept: rows.
        total: rows with a value.
        is_exact: whether so many would be kept; else it is the most.
        note: why it is not exact; else empty.
    """

    kept: int
    total: int
    is_exact: bool
    note: str


def scores(state: DatasetState) -> list[Score]:
    """The measures of a dataset: those with limits first, then by name.

    Raises:
        SourceError: the dataset is not registered, or a file cannot be read.
    """
    found, _ = _scores(state)
    return sorted(found.values(), key=lambda score: (not score.limits, score.name))


def histogram(state: DatasetState, name: str, *, bins: int = _BINS, partition: str | None = None) -> Histogram:
    """The histogram of one measure over all partitions, or one.

    Args:
        state: the dataset as it was listed.
        name: of a `Score`.
        bins: how many.
        partition: its key; None: all.

    Raises:
        ConfigError: there is no such measure or partition.
        SourceError: a table cannot be read.
    """
    with _Values(state, name, partition) as values:
        low, high, least, kept, dropped = values.extent()
        if low is None or high is None:
            return Histogram(score=values.score, num_kept=0, num_dropped=0, low=None, high=None, is_log=False, bins=())
        # Sizes and durations vary by orders of magnitude; in bins of equal width most rows would be in the first.
        is_log = least is not None and low >= 0 and high > 100 * max(least, 1e-9) and high > 1
        edges = _edges(low, high, min(max(bins, 1), _MAX_BINS), least if is_log else None)
        counts = values.counts(edges)
        return Histogram(
            score=values.score,
            num_kept=kept,
            num_dropped=dropped,
            low=low,
            high=high,
            is_log=is_log,
            bins=tuple(
                Bin(low=edges[n], high=edges[n + 1], kept=counts.get((n, True), 0), dropped=counts.get((n, False), 0))
                for n in range(len(edges) - 1)
            ),
        )


def kept_by(
    state: DatasetState,
    name: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    partition: str | None = None,
) -> Kept:
    """How many rows other limits on a measure would keep; arguments and errors as `histogram`.

    Args:
        state: the dataset as it was listed.
        name: of a `Score`.
        at_least: the smallest value that is kept; None sets no limit.
        at_most: the largest.
        partition: its key; None: all.
    """
    with _Values(state, name, partition) as values:
        kept, back, total = values.between(at_least, at_most)
        score = values.score
    notes = []
    if score.column is None:
        notes.append("no column holds this measure of the kept rows: an annotator that adds it would")
    if back:
        notes.append("rows that come back have not been seen by the filters after this one")
        if any(limit.scope == "sample" for limit in score.limits):
            notes.append("of a dropped sample only the first value that decided is known")
    return Kept(kept=kept + back, total=total, is_exact=not notes, note="; ".join(notes))


def _scores(state: DatasetState) -> tuple[dict[str, Score], dict[str, dict[str, str]]]:
    """The measures by name, and the tables of the partitions that have filtered rows."""
    schema = state.dataset.schema()
    tables = {key: paths for key, paths in sorted(state.tables().items()) if _KEPT_ROWS in paths}
    limits, measures, differ = _limits(state, list(tables))
    columns = {c.name: c.name for c in (*schema.annotator_columns, *schema.user_columns) if c.type in _NUMERIC}
    holding = {measures.get(column, column): column for column in columns}
    holding |= {measure: measure for measure in _DERIVED if measure not in holding}
    note = "partitions were filtered by different limits: those of the first are shown" if differ else ""
    found = {}
    for measure in dict.fromkeys((*holding, *limits)):
        column = holding.get(measure)
        name = column or measure
        mine = tuple(limits.get(measure, ()))
        found[name] = Score(name=name, column=column, limits=mine, note=note if mine else "")
    return found, tables


def _limits(state: DatasetState, keys: Sequence[str]) -> tuple[dict[str, list[Limit]], Mapping[str, str], bool]:
    """The limits by measure, the measure of each column, and whether partitions differ, by some of the records."""
    step = max(len(keys) // _RECORDS, 1)
    records = [attempt.stages.get(FILTERED_ROWS) for attempt in state.latest(keys[::step][:_RECORDS])]
    limits = [record.limits for record in records if record is not None]
    found: dict[str, list[Limit]] = {}
    first = next((one for one in limits if one), {})
    for threshold in first.get("thresholds", ()):
        given = {name: threshold[name] for name in ("filter", "setting", "value", "keeps", "reason", "scope")}
        found.setdefault(threshold["measure"], []).append(Limit(**given))
    measures = {one["column"]: one["measure"] for one in first.get("measures", ())}
    return found, measures, any(one != first for one in limits)


class _Values:
    """The values of one measure in DuckDB: the kept rows' column, and what its filters measured of dropped rows."""

    def __init__(self, state: DatasetState, name: str, partition: str | None) -> None:
        found, tables = _scores(state)
        if name not in found:
            raise ConfigError("arguments", "score", f"{name!r} is not a measure; there are: {', '.join(sorted(found))}")
        if partition is not None and partition not in tables:
            raise ConfigError("arguments", "partition", f"{partition!r} is not a partition with filtered rows")
        self.score = found[name]
        self._dataset = state.dataset
        self._tables = tables
        self._keys = list(tables) if partition is None else [partition]
        self._connection = state.dataset.duckdb()

    def __enter__(self) -> _Values:
        try:
            self._connection.execute(f"set memory_limit = '{_MEMORY}'")
            self._connection.execute("set threads = 2")
        except BaseException:
            self._connection.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _kept(self, keys: Sequence[str]) -> str:
        column = self.score.column
        files = self._files(_KEPT_ROWS, keys)
        if column is None or not files:
            return "select null::double as value where false"
        value = sql_name(column)
        if column in _DERIVED and column not in self._columns():
            value = _DERIVED[column]
        table = parquet_relation(files, is_list=True, union_by_name="true")
        return (
            f"select value::double as value from (select {value} as value from {table}) where isfinite(value::double)"
        )

    def _lost(self, keys: Sequence[str]) -> str:
        files = self._files(DROPPED.name, keys)
        pairs = ", ".join(f"({sql_text(limit.filter)}, {sql_text(limit.reason)})" for limit in self.score.limits)
        if not pairs or not files:
            return "select null::double as value where false"
        # A filter of samples drops all rows of a sample by one value.
        per_sample = any(limit.scope == "sample" for limit in self.score.limits)
        group = f" group by {FILE_COLUMN}, filter, reason, sample_id" if per_sample else ""
        value = "any_value(value) as value" if per_sample else "value"
        return (
            f"select {value} from {parquet_relation(files, is_list=True, filename=sql_text(FILE_COLUMN))} "
            f"where (filter, reason) in ({pairs}) and value is not null{group}"
        )

    def _files(self, table: str, keys: Sequence[str]) -> str:
        paths = (self._tables[key][table] for key in keys if table in self._tables[key])
        listed = ", ".join(sql_text(self._dataset.duckdb_path(path)) for path in paths)
        return f"[{listed}]" if listed else ""

    def _columns(self) -> frozenset[str]:
        """The columns of the first table: a column of the dataset's own may have the name of a measure."""
        with (
            self._dataset.store.open(self._tables[self._keys[0]][_KEPT_ROWS]) as opened,
            closing(pq.ParquetFile(opened)) as file,
        ):
            return frozenset(file.schema_arrow.names) - RESERVED_COLUMNS

    def extent(self) -> tuple[float | None, float | None, float | None, int, int]:
        """The least and largest value, the least above zero, and how many rows are kept and were dropped."""
        found = self._query(
            "select min(value), max(value), min(value) filter (value > 0), count(*) filter (is_kept), "
            "count(*) filter (not is_kept) "
            "from (select value, true as is_kept from kept union all select value, false from lost)"
        )
        lows, highs, leasts, kept, lost = zip(*found, strict=True) if found else ((), (), (), (), ())
        return _of(min, lows), _of(max, highs), _of(min, leasts), sum(kept), sum(lost)

    def counts(self, edges: Sequence[float]) -> dict[tuple[int, bool], int]:
        """How many rows are in each bin, by its number and whether they are kept."""
        rows = self._query(
            "with edges as (select unnest($edges::double[]) as edge, unnest(range(len($edges))) as n), "
            "bins as (select n, edge as low, lead(edge) over (order by n) as high from edges) "
            "select least(n, $last), is_kept, count(*) "
            "from (select value, true as is_kept from kept union all select value, false from lost) "
            "asof join bins on value >= low group by all",
            {"edges": list(edges), "last": len(edges) - 2},
        )
        found: Counter[tuple[int, bool]] = Counter()
        for n, is_kept, count in rows:
            found[int(n), bool(is_kept)] += count
        return found

    def between(self, at_least: float | None, at_most: float | None) -> tuple[int, int, int]:
        """How many kept rows, and how many dropped ones, are between limits; and all of both."""
        where = "($low is null or value >= $low) and ($high is null or value <= $high)"
        found = self._query(
            f"select (select count(*) from kept where {where}), (select count(*) from lost where {where}), "
            "(select count(*) from kept) + (select count(*) from lost)",
            {"low": at_least, "high": at_most},
        )
        return sum(row[0] for row in found), sum(row[1] for row in found), sum(row[2] for row in found)

    def _query(self, statement: str, given: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """The rows of a query over `kept` and `lost` of some partitions after the other.

        DuckDB holds the footers of all files of a view, which of 10,000 partitions are a gigabyte.
        """
        import duckdb

        found: list[tuple[Any, ...]] = []
        try:
            for start in range(0, len(self._keys), _TOGETHER):
                keys = self._keys[start : start + _TOGETHER]
                self._connection.execute(f"create or replace temp view kept as {self._kept(keys)}")
                self._connection.execute(f"create or replace temp view lost as {self._lost(keys)}")
                found += self._connection.execute(statement, given or {}).fetchall()
        except duckdb.Error as error:
            where = self._dataset.store.url_of(_KEPT_ROWS)
            raise SourceError(where, f"the measure {self.score.name!r} cannot be read: {first_line(error)}") from error
        return found


def _of(choose: Callable[[Iterable[float]], float], values: Sequence[float | None]) -> float | None:
    """The least or largest of the values that there are."""
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _edges(low: float, high: float, bins: int, least: float | None) -> list[float]:
    """The ends of the bins; of equal ratio from `least` on, if that is given, and then from zero if `low` is below."""
    if high <= low:
        above = low + max(abs(low) * 1e-9, 1e-9)
        return [low, above] if math.isfinite(above) else [low - abs(low) * 1e-9, low]
    if least is None:
        step = high / bins - low / bins  # the difference of two doubles may exceed the largest double
        edges = [low + n * step for n in range(bins)]
    else:
        step = (math.log(high) - math.log(least)) / bins
        edges = [low, *(least * math.exp(n * step) for n in range(bins))]
    return sorted({high, *(edge for edge in edges if edge < high)})  # some may be equal in double precision
