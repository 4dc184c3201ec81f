"""Runs each query of a stranger in a process of its own, which can be killed, or crash, without the viewer.

No limit of DuckDB replaces that: one call of a SQL function may allocate gigabytes that `memory_limit` does not count,
run for hours before it notices an interrupt, or overflow the stack.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mm_assets.errors import MmAssetsError
from mm_assets.pipeline.chain import TABLES
from mm_assets.pipeline.explore import sql_worker
from mm_assets.pipeline.state.sql_views import catalog_statements, catalog_variables, sql_connection, table_fault
from mm_assets.pipeline.state.staleness import DatasetState
from mm_assets.rows.sql import literal, sql_text
from mm_assets.storage.urls import protocols

__all__ = ["QueryError", "QueryResult", "Sandbox", "columns_of_relations", "dataset_sandbox"]

MAX_ROWS = 1000
MAX_BYTES = 4 << 20  # of a result as JSON
SECONDS = 15.0
_START_SECONDS = 60.0  # to open the relations; many files in an object store take long
# What a process needs of the environment, without and with a remote file system: nothing in it is of use to a query.
_LOCAL = re.compile("PATH|PYTHONPATH|LD_LIBRARY_PATH|LANG|LC_ALL|HOME|TMPDIR|VIRTUAL_ENV|SYSTEMROOT")
_REMOTE = re.compile(rf"{_LOCAL.pattern}|(AWS_|GOOGLE_|AZURE_|SSL_|HTTP|NO_PROXY).*", re.IGNORECASE)


class QueryError(MmAssetsError):
    """A query was refused or failed.

    Attributes:
        message: why, for its author.
        line: the line that it is about, from 1, or None.
        column: the column in that line, from 1, or None.
    """

    def __init__(self, message: str, *, line: int | None = None, column: int | None = None) -> None:
        where = f"line {line}, column {column}: " if line is not None else ""
        super().__init__(f"{where}{message}")
        self.message = message
        self.line = line
        self.column = column


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """What a query selected.

    Attributes:
        columns: name and DuckDB's type of each column.
        rows: their values as JSON: null, booleans, numbers and texts; whatever is long or of another type is text.
        truncated: whether there were more rows.
        seconds: wall clock, the start of the process included.
    """

    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Returns the result for a browser."""
        columns = [{"name": name, "type": kind} for name, kind in self.columns]
        return {"columns": columns, "rows": self.rows, "truncated": self.truncated, "seconds": round(self.seconds, 3)}


class Sandbox:
    """Runs queries over some relations; safe for several threads, which limit how many run at once.

    Args:
        statements: what makes the relations in DuckDB; trusted.
        relations: the relations' names.
        paths: files, and folders without a final slash, of the relations: nothing else can be read.
        variables: values that the statements read.
        remote: protocol and options of the file system if the files are not local.
        files: descriptors that the statements read as ``/dev/fd/N``; open while queries run.
        seconds: a query that takes longer is ended.
        max_rows: of a result.
        max_bytes: of a result as JSON.
        cancelled: names of queries that are not begun, and may still grow.
        fault: returns what is wrong with a file of the relations, or None; asked if a query could not read one.

    Attributes:
        names: the relations' names.
        request: what each process is sent beside its query.
    """

    def __init__(
        self,
        *,
        statements: Sequence[str],
        relations: Sequence[str],
        paths: Sequence[str],
        variables: Mapping[str, Sequence[Any]] = MappingProxyType({}),
        remote: Mapping[str, Any] | None = None,
        files: Sequence[int] = (),
        seconds: float = SECONDS,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        cancelled: Container[str] = (),
        fault: Callable[[], MmAssetsError | None] = lambda: None,
    ) -> None:
        self.names = tuple(relations)
        # DuckDB compares the pattern of the files, and then each file.
        allowed = [sql_text(form) for path in paths for form in (path, literal(path))]
        self.request = {
            "variables": dict(variables),
            "statements": [
                *statements,
                f"set allowed_paths = [{', '.join(allowed)}]",
                f"set allowed_directories = [{', '.join(allowed)}]",
            ],
            "relations": [name.lower() for name in relations],
            "remote": remote,
            "seconds": seconds,
            "max_bytes": max_bytes,
        }
        self._seconds, self._max_rows = seconds, max_rows
        self._files = tuple(files)
        self._processes: dict[object, subprocess.Popen[bytes]] = {}
        self._cancelled = cancelled
        self._fault = fault
        self._lock = threading.Lock()

    def run(self, sql: str, *, key: str = "", max_rows: int | None = None) -> QueryResult:
        """Runs one query and waits for its result.

        Args:
            sql: one statement that selects.
            key: a name of the query, by which `cancel` finds it.
            max_rows: of the result, at most those of the sandbox, which is the default.

        Raises:
            QueryError: it was refused or cancelled, failed, or needed more than it may.
        """
        began = time.perf_counter()
        most = min(max_rows or self._max_rows, self._max_rows)
        answer = self._answer(key or object(), json.dumps({**self.request, "sql": sql, "max_rows": most}).encode())
        if "error" in answer:
            if answer.get("is_of_file") and (fault := self._fault()) is not None:
                raise QueryError(str(fault))
            raise _located(sql, answer["error"], answer.get("position"))
        return QueryResult(
            columns=tuple(map(tuple, answer["columns"])),
            rows=tuple(map(tuple, answer["rows"])),
            truncated=answer["truncated"],
            seconds=time.perf_counter() - began,
        )

    def cancel(self, key: str) -> bool:
        """Ends a query; returns whether it was running."""
        with self._lock:
            process = self._processes.pop(key, None)
            if process is not None:
                process.kill()
        return process is not None

    def close(self) -> None:
        """Ends all queries."""
        with self._lock:
            while self._processes:
                self._processes.popitem()[1].kill()

    def _answer(self, key: object, request: bytes) -> dict[str, Any]:
        kept = _LOCAL if self.request["remote"] is None else _REMOTE
        environment = {name: value for name, value in os.environ.items() if kept.fullmatch(name)}
        environment["MALLOC_ARENA_MAX"] = "1"  # arenas of many threads are address space that is never used
        with self._lock:
            if key in self._cancelled:
                raise QueryError("cancelled")
            if key in self._processes:
                raise QueryError("a query of this name is running")
            process = self._processes[key] = subprocess.Popen(
                [sys.executable, "-P", str(Path(sql_worker.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=self._files,
            )
        with process:
            try:
                wait = self._seconds + (0 if self.request["remote"] is None else _START_SECONDS)
                output, _ = process.communicate(request, timeout=wait)
            except subprocess.TimeoutExpired as error:
                advice = "select from fewer partitions, or aggregate less"
                raise QueryError(f"the query was ended after {self._seconds:g} s: {advice}") from error
            finally:
                process.kill()
                with self._lock:
                    is_cancelled = self._processes.get(key) is not process
                    if not is_cancelled:
                        del self._processes[key]
        if is_cancelled:
            raise QueryError("cancelled")
        try:
            return dict(json.loads(output))
        except ValueError as error:  # it was killed, or died of memory that DuckDB did not count or of a full stack
            why = "it probably needed more memory than it may have, or a value was nested too deeply"
            raise QueryError(f"the process of the query ended with code {process.returncode}: {why}") from error


def _located(sql: str, message: str, position: int | None) -> QueryError:
    """Returns the error with the place of a byte of the query; DuckDB has a huge number if it knows none."""
    if position is None or position > len(sql.encode()):
        return QueryError(message)
    before = sql.encode()[:position].decode(errors="replace")
    return QueryError(message, line=before.count("\n") + 1, column=len(before) - (before.rfind("\n") + 1) + 1)


def dataset_sandbox(state: DatasetState, **limits: Any) -> Sandbox:
    """Returns a sandbox over a dataset's catalog: the views that `mm-assets sql` has.

    Args:
        state: the dataset as it was listed.
        limits: `seconds`, `max_rows`, `max_bytes` and `cancelled` of the sandbox.

    Raises:
        SourceError: the manifest cannot be read.
    """
    dataset, statements, remote = state.dataset, catalog_statements(state), None
    if (files := dataset.duckdb_filesystem) is not None:
        remote = {"protocol": protocols(files)[0], "options": dict(files.storage_options)}
    return Sandbox(
        statements=list(statements.values()),
        variables=catalog_variables(state),
        relations=list(statements),
        paths=[dataset.duckdb_path(table) for table in TABLES],
        remote=remote,
        fault=partial(table_fault, state),
        **limits,
    )


def columns_of_relations(state: DatasetState) -> dict[str, list[tuple[str, str]]]:
    """Returns name and DuckDB's type of each column, by relation; nothing before the first manifest.

    Raises:
        SourceError: the manifest or a table cannot be read.
    """
    columns: dict[str, list[tuple[str, str]]] = {}
    if state.manifest is None:
        return columns
    with closing(sql_connection(state)) as connection:
        for name in catalog_statements(state):
            described = connection.execute(f"describe {name}").fetchall()
            columns[name] = [(row[0], row[1]) for row in described]
    return columns
