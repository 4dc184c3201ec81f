"""The columns of packed samples as a relation that people sort and filter by: what the samples' grid asks.

The columns that a question names are scanned once, into a temporary Parquet file without a name; the question is then
a query of the sandbox over it. Neither holds more than a block of samples, or one packed file's column, in memory.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any

from mm_assets.dataset.dataset import Dataset
from mm_assets.dataset.selection import plain_columns
from mm_assets.errors import ConfigError, SourceError, full_disk_named
from mm_assets.pipeline.explore.sql import QueryError, Sandbox
from mm_assets.rows.sql import parquet_relation, sql_name, sql_text

__all__ = ["RELATION", "Ordered", "SampleTable", "ordered_rows"]

RELATION = "samples"
DIRECTIONS = ("asc", "desc")
SCAN_SECONDS = 60.0  # of a question about columns that were not scanned yet
_SCANS = 4  # files of columns that are held
_INDEX = "index"
_UNKNOWN = "not found in FROM clause"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """Rows that meet a condition, in order.

    Attributes:
        rows: the columns selected, and the value that they are ordered by last, or None.
        more: whether there are rows after these.
        error: why there are none, as JSON; None where the query ran.
    """

    rows: Sequence[tuple[Any, ...]] = ()
    more: bool = False
    error: Mapping[str, Any] | None = None


def ordered_rows(
    sandbox: Sandbox,
    relation: str,
    *,
    columns: Sequence[str],
    where: str,
    conditions: Sequence[str] = (),
    by: str,
    direction: str,
    offset: int,
    limit: int,
) -> Ordered:
    """Rows of a relation that meet a condition, ordered by an expression and then by the columns that are selected.

    Args:
        sandbox: has the relation.
        relation: its name, trusted, as are `columns`, `conditions` and `by`.
        columns: what is selected.
        where: a condition from outside; "" for none.
        conditions: further ones.
        by: what rows are ordered by, those without it left out; "" for any order.
        direction: ``asc`` or ``desc``.
        offset: rows to skip.
        limit: rows at most.

    Raises:
        ConfigError: the direction is not one.
    """
    if direction not in DIRECTIONS:
        raise ConfigError("arguments", "direction", f"found {direction!r}, expected asc or desc")
    names = ", ".join(columns)
    # Without groups: DuckDB then holds the rows of this page and not those of the dataset.
    said = [f"(\n{where}\n)"] if where.strip() else []
    said += [*conditions, *([f"{by} is not null"] if by else [])]
    condition = f"\nwhere {' and '.join(said)}" if said else ""
    end = f"\norder by value {direction}, {names}" if by else ""
    query = (
        f'select {names}, {by or "null"} as value from "{relation}"{condition}{end} limit {limit + 1} offset {offset}'
    )
    try:
        found = sandbox.run(query, max_rows=limit + 1)
    except QueryError as error:
        line = None if error.line is None else error.line - 2  # the condition has lines of its own, from the third on
        in_condition = line is not None and 1 <= line <= where.count("\n") + 1
        place = {"line": line, "column": error.column} if in_condition else {"line": None, "column": None}
        return Ordered(error={"error": error.message, **place})
    return Ordered(rows=found.rows[:limit], more=len(found.rows) > limit)


class SampleTable:
    """The table `samples` of a packed dataset: its columns are those of `Dataset.filter`. Safe for several threads.

    Args:
        dataset: open; stays the caller's.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._columns = plain_columns(dataset.names, dataset.fields)
        self._lock = threading.Lock()
        self._scans: OrderedDict[frozenset[str], tuple[IO[bytes], Sandbox]] = OrderedDict()

    def columns(self) -> dict[str, str]:
        """Name and type of what samples can be ordered by, a metadata record's entries as ``image.width``."""
        return {name: kind for name, (_, kind) in self._columns.items()}

    def select(self, where: str, order: str, direction: str, offset: int, limit: int) -> Ordered:
        """The indices of samples that meet a condition, with the values that they are ordered by.

        Args:
            where: a condition as `Dataset.filter` takes it; "" for all samples.
            order: one of `columns`, whose absent values are left out; "" for the samples' own order.
            direction: ``asc`` or ``desc``.
            offset: samples to skip.
            limit: samples at most.

        Raises:
            ConfigError: there is no such column, or the direction is not one.
            FormatError: a packed file is damaged.
            SourceError: the columns take too long to read, or the disk is full.
        """
        if order and order not in self._columns:
            raise ConfigError("arguments", "order", f"{order!r} is none of {', '.join(self._columns)}")
        path = self._columns[order][0] if order else ()
        by = ".".join(map(sql_name, path))
        held = self._scanned(self._named(where) | {*path[:1], _INDEX})  # with its file, while the query runs
        found = ordered_rows(
            held[1],
            RELATION,
            columns=[sql_name(_INDEX)],
            where=where,
            by=by or sql_name(_INDEX),
            direction=direction if by else "asc",
            offset=offset,
            limit=limit,
        )
        if not all(isinstance(row[0], int) for row in found.rows):  # those of another query, which a `union` added
            return Ordered(error={"error": "this is not a condition", "line": None, "column": None})
        if found.error is not None and _UNKNOWN in found.error["error"]:
            # What is known to the query are the columns that it named.
            said = f"{found.error['error'].partition('!')[0]}, there are {', '.join(self._columns)}"
            return Ordered(error={**found.error, "error": said})
        return found

    def close(self) -> None:
        """Releases the temporary files."""
        with self._lock:
            for file, sandbox in self._scans.values():
                sandbox.close()
                file.close()
            self._scans.clear()

    def _named(self, where: str) -> set[str]:
        """The columns that a condition may name: those whose names are in its text; all where it has a ``*``."""
        text, names = where.casefold(), {path[0] for path, _ in self._columns.values()}
        if "*" in text or "columns(" in text:
            return names
        return {name for name in names if re.search(rf"(?<!\w){re.escape(name.casefold())}(?!\w)", text)}

    def _scanned(self, names: set[str]) -> tuple[IO[bytes], Sandbox]:
        """Some columns in a file, and the sandbox over it; who holds both may go on when others took its place."""
        with self._lock:
            for known, found in self._scans.items():
                if names <= known:
                    self._scans.move_to_end(known)
                    return found
            file = TemporaryFile(prefix="mm-assets-view-")  # noqa: SIM115  # goes with the last who holds it
            try:
                self._scan(sorted(names), file)
            except BaseException:
                file.close()
                raise
            path = f"/dev/fd/{file.fileno()}"
            statement = f"create view {RELATION} as select * from {parquet_relation(sql_text(path))}"
            sandbox = Sandbox(statements=[statement], relations=[RELATION], paths=[path], files=[file.fileno()])
            self._scans[frozenset(names)] = file, sandbox
            while len(self._scans) > _SCANS:
                self._scans.popitem(last=False)
            return file, sandbox

    def _scan(self, names: Sequence[str], file: IO[bytes]) -> None:
        import pyarrow.parquet as pq

        ends = time.monotonic() + SCAN_SECONDS
        blocks = self._dataset.scan_columns(names)
        first, count = next(blocks), 0
        with full_disk_named(gettempdir()), pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
            for block in chain([first], blocks):
                writer.write_table(block)
                count += block.num_rows
                if time.monotonic() > ends and count < len(self._dataset):
                    what = f"{', '.join(names)} of {count:,} of {len(self._dataset):,} samples"
                    advice = "choose a partition, or filter in Python"
                    raise SourceError(self._dataset.path, f"{what} were read in {SCAN_SECONDS:.0f} s: {advice}")
        file.flush()
