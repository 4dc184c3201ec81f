"""Runs an asset's checks over one partition: provides the relations, executes each statement, lists first violations.

DuckDB works in bounded memory and in one thread. A statement that does not fit gets more, up to the share of the
machine's memory that this process has. A statement over relations without rows
selects nothing, and is not executed. A table with wrong columns fails its `schema` check and all other checks of the
asset, which are not run then.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mm_assets.checks.alignment import FACT_RELATIONS
from mm_assets.checks.catalog import Check, checks_of
from mm_assets.checks.context import CheckContext
from mm_assets.checks.database import connection, limit_memory, memory_share
from mm_assets.checks.origins import OriginRelations
from mm_assets.checks.outcome import Outcome
from mm_assets.checks.packed import PackedFiles, PackedRelations
from mm_assets.checks.relations import Measured, TableRelations, View, table_named
from mm_assets.errors import SourceError, first_line

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["CheckContext", "Outcome", "Session", "run_checks"]

MAX_LISTED = 20  # violations in an outcome
MAX_TEXT = 200  # characters of a value in it
_FETCH = 4096
_ROW_MEMORY = 768  # bytes that DuckDB mostly needs for a row of the widest check, which cannot all be spilled
_MOST_MEMORY = 16  # times as much, where a statement does not fit
_EXECUTE = compile("connection.execute(statement)", "<statement of a check>", "eval")


def run_checks(
    context: CheckContext, files: PackedFiles | None = None, measured: Measured | None = None
) -> list[Outcome]:
    """Runs every check of an asset, in the order of the catalog.

    Args:
        context: the asset and the partition.
        files: the partition's packed files, where the checks of both formats share them.
        measured: what the checks of several stages of the partition share.

    Returns:
        An outcome per check.

    Raises:
        ValueError: there is no such asset.
        SourceError: a file that the checks need is missing or cannot be read, or DuckDB could not judge it.
        SchemaMismatchError: a table of an asset before this one lacks a column.
    """
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        if files is None:
            own = () if context.packed_format is None else (context.packed_format,)
            files = stack.enter_context(PackedFiles(context, own))
        session = stack.enter_context(Session(context, files, measured))
        for check in checks_of(context.asset):
            wrong_columns = outcomes and not outcomes[0].passed and context.own_tables
            outcomes.append(_not_judged(check) if wrong_columns else session.judge(check))
    return outcomes


def _not_judged(check: Check) -> Outcome:
    return Outcome(
        name=check.name,
        passed=False,
        num_violations=1,
        violations=({"problem": "not judged: the tables do not have their columns, see the check `schema`"},),
        description=check.description,
    )


class Session:
    """A connection to DuckDB with the relations that were requested so far.

    Args:
        context: the asset and the partition.
        files: the partition's packed files.
        measured: what the checks of several stages of the partition share.
    """

    def __init__(self, context: CheckContext, files: PackedFiles, measured: Measured | None = None) -> None:
        import duckdb

        self._error: type[Exception] = duckdb.Error
        self._does_not_fit: type[Exception] = duckdb.OutOfMemoryException
        self._context = context
        self._memory = self._least_memory = context.memory_limit
        self._tables = TableRelations(context, measured)
        self._origins = OriginRelations(context, self._tables)
        self._packed = PackedRelations(context, files)
        self._num_rows: dict[str, int] = {}  # of each relation that was provided
        self._arrow: dict[str, pa.Table] = {}  # those that are not views

    def __enter__(self) -> Session:
        pa.default_memory_pool().release_unused()  # what the stage itself no longer needs
        self._stack = ExitStack()
        self._stack.callback(pa.default_memory_pool().release_unused)  # a partition's content has passed through it
        self._stack.callback(self._tables.close)
        self._connection = self._stack.enter_context(connection(self._memory))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _provide(self, name: str) -> int:
        """Makes a relation known to DuckDB, and gives its number of rows."""
        if name not in self._num_rows:
            known_as = self._context.known_as(name)
            made = self.relation(known_as)
            table = table_named(known_as)
            if isinstance(made, View):
                self._arrow |= made.columns
                self._execute(f'create temp view "{name}" as {made.statement}')
                self._num_rows[name] = self._tables.parquet(table).metadata.num_rows
            else:
                self._arrow[name] = made
                self._num_rows[name] = made.num_rows
            needed = _ROW_MEMORY * self._num_rows[name]
            if table in self._context.tables and needed > self._memory:
                needed = max(self._memory, min(needed, memory_share()))  # files of the kernel are read: only if needed
                self._least_memory = max(self._least_memory, needed)
                self._allow(needed)
        return self._num_rows[name]

    def _allow(self, memory: int) -> None:
        """Lets DuckDB use so many bytes."""
        self._memory = memory
        limit_memory(self._connection, memory)

    def relation(self, name: str) -> View | pa.Table:
        """A relation by its name."""
        if name in FACT_RELATIONS:
            return self._packed.facts.table(name)
        for relations in (self._packed, self._origins):
            made = getattr(relations, name, None)
            if made is not None:
                return made()
        return self._tables.relation(name)

    def judge(self, check: Check) -> Outcome:
        """The outcome of one check; `SourceError` if a file cannot be read or the statement not executed."""
        try:
            names, first, count = self._violations(check)
        except self._error as error:
            what = f"the check {check.name} of {self._context.asset} could not be executed: {first_line(error)}"
            if isinstance(error, self._does_not_fit):
                what += f": it may use {self._most_memory >> 20} MiB: run fewer processes, or use a machine with more"
            raise SourceError(self._files_of(check), what) from error
        return Outcome(
            name=check.name,
            passed=count == 0,
            num_violations=count,
            violations=tuple({name: _shown(v) for name, v in zip(names, row, strict=True)} for row in first),
            description=check.description,
            blocking=not check.about_content or self._context.on_misaligned != "warn",
        )

    def _violations(self, check: Check) -> tuple[list[str], list[tuple[Any, ...]], int]:
        """The columns of what a statement selects, its first rows, and their number."""
        if check.needs and not any(self._provide(name) for name in check.needs):
            return [], [], 0
        if check.equal and self._are_equal(*check.equal):
            return [], [], 0
        if not sum([self._provide(name) for name in check.relations]):
            return [], [], 0
        # Whether DuckDB can spill a join depends on its plan: what a statement needs is found out by running it.
        try:
            while True:
                try:
                    return self._executed(check.sql)
                except self._does_not_fit:
                    if self._memory >= self._most_memory:
                        raise
                    self._allow(min(2 * self._memory, self._most_memory))
        finally:
            self._allow(self._least_memory)

    def _are_equal(self, *names: str) -> bool:
        """Whether two relations have the same rows in the same order; False if DuckDB reads one from its file."""
        for name in names:
            self._provide(name)
        tables = [self._arrow[name].replace_schema_metadata() for name in names if name in self._arrow]
        return len(tables) == len(names) and bool(tables[0].equals(tables[1]))

    @property
    def _most_memory(self) -> int:
        """The bytes that a statement may use which does not fit into less."""
        return max(self._least_memory, min(_MOST_MEMORY * self._least_memory, memory_share()))

    def _execute(self, sql: str) -> DuckDBPyConnection:
        # DuckDB finds the relations as global variables of its caller: to register one costs more than to scan it.
        executed: DuckDBPyConnection = eval(_EXECUTE, {"connection": self._connection, "statement": sql, **self._arrow})
        return executed

    def _executed(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]], int]:
        result = self._execute(sql)
        names = [column[0] for column in result.description]
        first = result.fetchmany(MAX_LISTED)
        count = len(first)
        while more := result.fetchmany(_FETCH):
            count += len(more)
        return names, first, count

    def _files_of(self, check: Check) -> str:
        """The files that a check reads, those of its asset where its relations have other names."""
        known = self._context.tables
        read = dict.fromkeys(map(table_named, check.relations))
        named = [name for name in read if name in known] or self._context.own_tables
        paths = [known[name].path for name in named if name in known] or list(self._context.packed.values())
        return ", ".join(self._context.store.url_of(path) for path in paths)


def _shown(value: Any) -> Any:
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = str(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
