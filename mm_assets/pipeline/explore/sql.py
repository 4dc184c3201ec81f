"""Queries in processes of their own.

One call of a SQL function may build gigabytes or run for hours, whatever DuckDB's own limits are: only the end of its
process stops it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_assets.errors import MmAssetsError
from mm_assets.pipeline.explore import sql_worker
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.sql_views import catalog_statements
from mm_assets.rows.sql import literal, sql_text
from mm_assets.storage.urls import protocols

__all__ = ["QueryError", "QueryResult", "Relation", "Sandbox", "dataset_sandbox"]

MAX_ROWS = 1000
MAX_BYTES = 4 << 20  # of a result as JSON
SECONDS = 15.0
MEMORY = 512 << 20  # of DuckDB
_HEADROOM = 512 << 20  # beyond it, for values that DuckDB does not count
_THREADS = 2
_MOST_AT_ONCE = 2  # queries of one sandbox; others wait
_START_SECONDS = 60.0  # to open the relations; many files in an object store take long
# What a process needs of the environment: nothing in it is of use to a query.
_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "LANG",
    "LC_ALL",
    "HOME",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "SYSTEMROOT",
)
_CREDENTIALS = ("AWS_", "GOOGLE_", "AZURE_", "SSL_", "HTTP", "NO_PROXY")  # starts of names, for remote tables only


class QueryError(MmAssetsError):
    """A query was refused or failed.

    Attributes:
        message: why, in words for its author.
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
        """The result for a browser."""
        columns = [{"name": name, "type": kind} for name, kind in self.columns]
        return {"columns": columns, "rows": self.rows, "truncated": self.truncated, "seconds": round(self.seconds, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A relation that queries may read.

    Attributes:
        name: its name.
        columns: name and DuckDB's type of each column.
    """

    name: str
    columns: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes] | None = None
    is_cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        with self.lock:
            self.is_cancelled = True
            if self.process is not None:
                self.process.kill()


class Sandbox:
    """Runs queries over some relations; safe for several threads.

    Args:
        root: folder or URL of the files of the relations, the only one that a query can read.
        statements: what makes the relations in DuckDB; trusted. They find `root` in the variable of that name.
        relations: the relations' names.
        remote: protocol and options of the file system where the files are not local.
        seconds: a query that takes longer is ended.
        memory: bytes for DuckDB.
        max_rows: of a result.
        max_bytes: of a result as JSON.
        files: descriptors that the statements read as ``/dev/fd/N``; open while queries run.
    """

    def __init__(
        self,
        *,
        root: str,
        statements: Sequence[str],
        relations: Sequence[str],
        remote: Mapping[str, Any] | None = None,
        seconds: float = SECONDS,
        memory: int = MEMORY,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        files: Sequence[int] = (),
    ) -> None:
        self.names = tuple(relations)
        self.seconds = seconds
        self._request = {
            "root": root,
            # DuckDB compares the pattern of the files, and then each file.
            "folders": [sql_text(folder.rstrip("/") + "/") for folder in (root, literal(root))],
            "statements": list(statements),
            "relations": [name.lower() for name in relations],
            "remote": remote,
            "seconds": seconds,
            "memory": memory,
            "headroom": _HEADROOM,
            "threads": _THREADS,
            "max_bytes": max_bytes,
        }
        self._max_rows = max_rows
        self._files = tuple(files)
        self._slots = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()

    def run(self, sql: str, *, key: str | None = None, max_rows: int | None = None) -> QueryResult:
        """Runs one query and waits for its result.

        Args:
            sql: one statement that selects.
            key: a name of the query, by which `cancel` finds it.
            max_rows: of the result, at most those of the sandbox, which is the default.

        Raises:
            QueryError: it was refused or cancelled, failed, or needed more than it may.
        """
        began = time.perf_counter()
        answer = self._run(sql, key, min(max_rows or self._max_rows, self._max_rows))
        return QueryResult(
            columns=tuple((column["name"], column["type"]) for column in answer["columns"]),
            rows=tuple(map(tuple, answer["rows"])),
            truncated=answer["truncated"],
            seconds=time.perf_counter() - began,
        )

    def cancel(self, key: str) -> bool:
        """Ends a query that is running; whether there was one of that name."""
        with self._lock:
            running = self._running.get(key)
        if running is not None:
            running.end()
        return running is not None

    def close(self) -> None:
        """Ends all queries."""
        with self._lock:
            running = list(self._running.values())
        for one in running:
            one.end()

    def relations(self) -> list[Relation]:
        """Every relation with its columns, of which one that cannot be read has none; errors as `run`."""
        columns = self._run(None, None, 0)["relations"]
        return [
            Relation(name=name, columns=tuple((column, kind) for column, kind in columns[name.lower()]))
            for name in self.names
        ]

    def _run(self, sql: str | None, key: str | None, max_rows: int) -> dict[str, Any]:
        running = _Running()
        name = key or f"{threading.get_ident()} {time.perf_counter()}"
        with self._lock:
            if name in self._running:
                raise QueryError("a query of this name is running")
            self._running[name] = running
        try:
            if not self._slots.acquire(timeout=self.seconds + _START_SECONDS):
                raise QueryError("too many queries are running: wait for one of them, or cancel it")
            try:
                answer = self._answer(sql, running, max_rows)
            finally:
                self._slots.release()
        finally:
            with self._lock:
                del self._running[name]
        if "error" in answer:
            raise _located(sql or "", str(answer["error"]), answer.get("position"))
        return answer

    def _answer(self, sql: str | None, running: _Running, max_rows: int) -> dict[str, Any]:
        request = json.dumps({**self._request, "sql": sql, "max_rows": max_rows}).encode()
        kept = _ENVIRONMENT if self._request["remote"] is None else (*_ENVIRONMENT, *_credentials())
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment["MALLOC_ARENA_MAX"] = "1"  # arenas of many threads are address space that is never used
        with running.lock:
            if running.is_cancelled:
                raise QueryError("cancelled")
            process = running.process = subprocess.Popen(
                [sys.executable, "-P", str(Path(sql_worker.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=self._files,
            )
        wait = self.seconds + (0 if self._request["remote"] is None else _START_SECONDS)
        with process:
            try:
                output, _ = process.communicate(request, timeout=wait)
            except subprocess.TimeoutExpired as error:
                raise QueryError(
                    f"the query was ended after {self.seconds:g} s: select from fewer partitions, or aggregate less"
                ) from error
            finally:
                process.kill()
        if running.is_cancelled:
            raise QueryError("cancelled")
        try:
            answer = json.loads(output)
        except ValueError as error:  # its process died, of memory that DuckDB did not count, or was killed
            detail = f"the process of the query ended with code {process.returncode}"
            raise QueryError(f"{detail}: it probably needed more memory than it may have") from error
        return dict(answer)


def _credentials() -> list[str]:
    return [name for name in os.environ if name.upper().startswith(_CREDENTIALS)]


def _located(sql: str, message: str, position: int | None) -> QueryError:
    if position is None or not 0 <= position <= len(sql):
        return QueryError(message)
    before = sql[:position]
    return QueryError(message, line=before.count("\n") + 1, column=position - (before.rfind("\n") + 1) + 1)


def dataset_sandbox(dataset: DatasetStore, **limits: Any) -> Sandbox:
    """A sandbox over a dataset's catalog: the views that `mm-assets sql` has.

    Args:
        dataset: the dataset's folder.
        limits: `seconds`, `memory`, `max_rows` and `max_bytes` of the sandbox.

    Raises:
        SourceError: the folder could not be listed.
    """
    statements, remote = catalog_statements(dataset), None
    if (files := dataset.duckdb_filesystem) is not None:
        remote = {"protocol": protocols(files)[0], "options": dict(files.storage_options)}
    return Sandbox(
        root=dataset.duckdb_path(""),
        statements=list(statements.values()),
        relations=[name for name in statements if name.isidentifier()],
        remote=remote,
        **limits,
    )
