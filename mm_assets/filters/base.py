"""The interfaces of filters and annotators, and the block that both read.

A *block* is a few whole samples, in order, with the measures of their content so far: several filters and annotators
that need the same measure share one computation. `apply` decides what is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import cached_property
from itertools import compress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mm_assets.errors import LazyModule, MediaError
from mm_assets.filters.parameters import Limits, check_flag
from mm_assets.media.images import share_probe
from mm_assets.rows.columns import content_views
from mm_assets.rows.schema import Drop, UserColumn

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

__all__ = [
    "Annotator",
    "Block",
    "Filter",
    "MeasuredRowFilter",
    "Rows",
    "Scope",
    "Threshold",
    "outside",
    "thresholds_of",
]

_T = TypeVar("_T")

Rows = npt.NDArray[np.int64]  # indices of rows of a block, ascending
Scope = Literal["row", "sample"]
Side = Literal["at_least", "at_most"]


class Threshold(NamedTuple):
    """A limit that a filter applies to a measure, so that others can show it and count what another would keep.

    Attributes:
        measure: the measure; an annotator that takes the same one names it so in `Annotator.measures`.
        setting: the parameter of the filter that sets it.
        value: the limit, in the unit of the measure.
        keeps: the side of it that is kept, the limit included.
        reason: of the rows that are dropped by it, whose `Drop.value` is the measure.
    """

    measure: str
    setting: str
    value: float
    keeps: Side
    reason: str


def thresholds_of(measure: str, limits: Limits, *, setting: str = "", reason: str = "") -> Iterator[Threshold]:
    """The thresholds that two limits are.

    Args:
        measure: of what.
        limits: those that are None give none.
        setting: suffix of the parameters' names, as in `check_limits`.
        reason: what the reason of a drop starts with, as in `outside`.
    """
    if limits.least is not None:
        yield Threshold(measure, f"min{setting}", float(limits.least), "at_least", f"{reason}below_min")
    if limits.most is not None:
        yield Threshold(measure, f"max{setting}", float(limits.most), "at_most", f"{reason}above_max")


class Block:
    """Whole samples of one partition as a table, and the measures taken of their content.

    Rows of a sample are contiguous: its metadata row first, then its content. Filters and annotators read a block and
    never change it.

    Args:
        table: columns of `MULTIMODAL_SCHEMA` and `SOURCE_SCHEMA`, then user columns.
        pool: runs measures that release the interpreter lock; None measures in the calling thread.

    Attributes:
        table: the rows.
        origin: (num_rows,) int64, index of each row in the block that this one was selected from first, ascending.
    """

    def __init__(self, table: pa.Table, *, pool: Executor | None = None) -> None:
        self.table = table
        self.origin: Rows = np.arange(table.num_rows, dtype=np.int64)
        self._pool = pool
        self._measures: dict[object, dict[int, Any]] = {}

    @property
    def num_rows(self) -> int:
        """Rows of the block."""
        return int(self.table.num_rows)

    @property
    def schema(self) -> pa.Schema:
        """Schema of `table`."""
        return self.table.schema

    def column(self, name: str) -> pa.ChunkedArray:
        """The column of that name."""
        return self.table.column(name)

    @cached_property
    def contents(self) -> list[memoryview | None]:
        """The content of each row, uint8 and read-only: its bytes, or its text as UTF-8; None where it has neither.

        `probe_image` reads the header of each of them once, also for the blocks that are selected from this one.
        """
        contents = content_views(self.table)
        for row in pc.indices_nonzero(self.column("binary_content").is_valid()).to_pylist():
            share_probe(contents[row])
        return contents

    @cached_property
    def is_metadata(self) -> npt.NDArray[np.bool_]:
        """(num_rows,) bool: True on metadata rows."""
        return _mask(pc.equal(self.column("modality"), "metadata"))

    @cached_property
    def sample_index(self) -> Rows:
        """(num_rows,) int64: number of each row's sample in the block, from 0, ascending."""
        ids = self.column("sample_id").combine_chunks()
        changed = _mask(pc.not_equal(ids.slice(1), ids.slice(0, max(len(ids) - 1, 0))))
        return np.concatenate([[0], np.cumsum(changed)]).astype(np.int64)[: len(ids)]

    @property
    def num_samples(self) -> int:
        """Samples of the block."""
        return int(self.sample_index[-1]) + 1 if self.num_rows else 0

    @property
    def sample_starts(self) -> Rows:
        """(num_samples,) int64: first row of each sample."""
        return np.searchsorted(self.sample_index, np.arange(self.num_samples)).astype(np.int64)

    def rows_of(self, *modalities: str) -> Rows:
        """Indices of the rows of these row modalities, ascending, int64."""
        wanted = pc.is_in(self.column("modality"), value_set=pa.array(modalities, pa.string()))
        return np.flatnonzero(_mask(wanted)).astype(np.int64)

    def payload(self, row: int) -> memoryview | None:
        """The content of a row; see `contents`."""
        return self.contents[row]

    def measure(
        self, key: object, rows: Iterable[int], function: Callable[[memoryview], _T], *, threaded: bool = False
    ) -> list[_T | None]:
        """Applies a function to the payloads of rows, once for each row, and caches the results.

        Args:
            key: identifies the function together with its parameters; hashable.
            rows: rows of the block.
            function: takes one payload; raises `MediaError` where it cannot be read.
            threaded: the function releases the interpreter lock for most of its time.

        Returns:
            One value for each of `rows`: None where there is no payload or it could not be read.
        """
        known: dict[int, Any] = self._measures.setdefault(key, {})
        asked = np.fromiter(rows, np.int64)
        origins = self.origin[asked].tolist()
        missing = {origin: row for row, origin in zip(asked.tolist(), origins, strict=True) if origin not in known}
        contents = self.contents

        def one(row: int) -> _T | None:
            payload = contents[row]
            if payload is None:
                return None
            try:
                return function(payload)
            except MediaError:
                return None

        if threaded and self._pool is not None and len(missing) > 1:
            values = list(self._pool.map(one, missing.values()))
        else:
            values = [one(row) for row in missing.values()]
        known.update(zip(missing, values, strict=True))
        return [known[origin] for origin in origins]

    def spread(self, rows: Iterable[int], values: Iterable[object], kind: pa.DataType) -> pa.Array:
        """A column of the block's length that has `values` at `rows` and null elsewhere."""
        column: list[object] = [None] * self.num_rows
        for row, value in zip(rows, values, strict=True):
            column[row] = value
        return pa.array(column, kind)

    def select(self, keep: npt.NDArray[np.bool_]) -> Block:
        """The block of the rows where `keep`, (num_rows,) bool, is True; measures taken so far stay."""
        chosen = self.with_table(self.table.filter(pa.array(keep)))
        chosen.origin = self.origin[keep]
        # Views of the new table: the old ones would hold its whole content in memory.
        chosen.contents = contents = content_views(chosen.table)
        before = list(compress(self.contents, keep))
        for row in pc.indices_nonzero(chosen.column("binary_content").is_valid()).to_pylist():
            share_probe(contents[row], like=before[row])
        return chosen

    def with_table(self, table: pa.Table) -> Block:
        """The block of the same rows and measures with the columns of `table`; the contents stay too."""
        block = Block(table, pool=self._pool)
        block.origin, block.contents, block._measures = self.origin, self.contents, self._measures
        return block


def _mask(values: Any) -> npt.NDArray[np.bool_]:
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.bool_)


class Annotator(ABC):
    """Adds columns to the rows that pass the filters.

    Attributes:
        name: how messages call it.
        version: of your own, where you say yourself when its output changes; empty: whenever its module's source does.
        columns: what it adds, in order.
        needs_content: it reads the rows' bytes; others run before content is fetched.
        measures: the measure that a column holds, by the column's name, where a filter limits the same one.
    """

    name: str = ""
    version: str = ""
    columns: tuple[UserColumn, ...] = ()
    needs_content: bool = False
    measures: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def annotate(self, block: Block) -> Mapping[str, pa.Array]:
        """Computes every one of `columns`: one value for each row of the block, null where it does not apply."""


class Filter(ABC):
    """Decides row by row, or sample by sample, what is dropped.

    An instance lives for one partition and sees its blocks in order, so it may keep state from one to the next.
    Constructors take keyword-only parameters, check them, and do no work: they also run when a declaration is loaded.

    Attributes:
        name: in the ``filter`` column of the dropped rows and in the counts.
        scope: "row": a `Drop` takes out its row, or the whole sample if it names the metadata row. "sample": a `Drop`
            takes out every row of its row's sample.
        needs_content: it reads the rows' bytes; others run before content is fetched, and see none.
        after_content: it reads no bytes, but runs in its place among those that do.
        reasons: of a built-in filter, the reasons of its drops that are not those of a threshold.
        compares_samples: of a built-in filter, whether what it drops depends on the samples before.
        version: as of an `Annotator`.
    """

    name: str = ""
    version: str = ""
    scope: Scope = "row"
    needs_content: bool = False
    after_content: bool = False
    reasons: frozenset[str] = frozenset()
    compares_samples: bool = False

    @abstractmethod
    def judge(self, block: Block) -> Iterable[Drop]:
        """Names the rows to drop, in any order; of several for one row, the first counts."""

    def thresholds(self) -> Iterable[Threshold]:
        """The limits that it applies, for those who look at its drops; none by default."""
        return ()


class MeasuredRowFilter(Filter):
    """A filter that takes one measure of each row of one modality and judges each alone.

    Args:
        drop_invalid_rows: drop a row whose measure cannot be taken (reason ``no_content``, or ``unreadable``), and one
            at a negative position (``invalid_position``); otherwise such a row is kept unjudged.
    """

    modality: ClassVar[str]
    needs_content = True
    reasons = frozenset({"invalid_position", "no_content", "unreadable"})

    def __init__(self, *, drop_invalid_rows: bool = True) -> None:
        self.drop_invalid_rows = check_flag("drop_invalid_rows", drop_invalid_rows)

    @abstractmethod
    def measure(self, block: Block, rows: Rows) -> Sequence[Any]:
        """One measure for each of `rows`, None where there is none."""

    @abstractmethod
    def verdict(self, value: Any) -> tuple[str, float | None] | None:
        """Reason and deciding value, if there is one, to drop a row of this measure, or None to keep it."""

    def judge(self, block: Block) -> Iterable[Drop]:
        """Measures the rows of the filter's modality and gives a verdict on each."""
        rows = block.rows_of(self.modality)
        positions = block.column("position").to_pylist()
        for row, value in zip(rows.tolist(), self.measure(block, rows), strict=True):
            if self.drop_invalid_rows and positions[row] < 0:
                yield Drop(row, "invalid_position", None)
            elif value is not None:
                found = self.verdict(value)
                if found is not None:
                    yield Drop(row, *found)
            elif self.drop_invalid_rows:
                yield Drop(row, "no_content" if block.payload(row) is None else "unreadable", None)


def outside(*measures: tuple[str, float | None, Limits]) -> tuple[str, float] | None:
    """The verdict on a row of which each measure has limits: of the first that is outside of them.

    Args:
        measures: what the reason starts with, the measure (None is not judged), and its limits.

    Returns:
        Reason and deciding value, or None where all measures are inside.
    """
    for prefix, value, limits in measures:
        reason = None if value is None else limits.reason(value)
        if value is not None and reason is not None:
            return prefix + reason, float(value)
    return None
