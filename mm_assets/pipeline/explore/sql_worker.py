"""The process that runs one query of a stranger: reads a request from standard input and writes its result.

It is run by its path and imports nothing of this package, so that it starts fast. Four things limit a query, and none
is trusted alone: it has to be one statement that only reads relations; DuckDB opens no other file than theirs, and its
settings are locked; the process cannot take more memory or write a file; and its parent kills it.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["RefusedError", "check_statement", "connect", "main"]

MEMORY = 512 << 20  # bytes for DuckDB, and as many for values that it does not count
MAX_TEXT = 64 << 10  # characters of a query
MAX_CELL = 4 << 10  # characters of one value in a result
_THREADS = 2
_PR_SET_PDEATHSIG = 1
_FETCH = 64  # rows that become Python objects at a time
_EXACT = 2**53  # whole numbers beyond it are not exact in a browser

_ONE = "one SELECT, FROM, WITH, VALUES, DESCRIBE or SUMMARIZE statement can be run"
_TABLE_FUNCTIONS = frozenset({"unnest", "range", "generate_series", "json_each", "json_tree"})
_REFUSED_FUNCTIONS = re.compile(r"current_setting|getenv|getvariable|write_log|(pg_)?sleep.*|json_(de)?serialize_.*")


class RefusedError(Exception):
    """A query that is not run.

    Attributes:
        position: byte of the query that the message is about, or None.
    """

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


def check_statement(connection: Any, text: str, relations: frozenset[str]) -> None:
    """Refuses a text that is not one statement over these relations.

    Args:
        connection: parses the text.
        text: the query.
        relations: names of the views that it may read, in lower case.

    Raises:
        RefusedError: it is not such a statement, or cannot be parsed.
    """
    if len(text) > MAX_TEXT:
        raise RefusedError(f"the query has {len(text):,} characters, at most {MAX_TEXT:,} are run")
    try:
        ((serialized,),) = connection.execute("select json_serialize_sql(?)", [text]).fetchall()
        parsed = json.loads(serialized)
    except RecursionError as error:
        raise RefusedError("the query is nested too deeply") from error
    if parsed["error"] and parsed.get("error_type") == "parser":
        raise RefusedError(parsed["error_message"], int(parsed["position"]) if "position" in parsed else None)
    if parsed["error"]:
        raise RefusedError(f"{_ONE}, nothing that changes data or settings")
    if len(parsed["statements"]) != 1:
        raise RefusedError(f"found {len(parsed['statements'])} statements: {_ONE}")
    nodes = list(_nodes(parsed["statements"]))
    ctes = [cte["key"].lower() for node in nodes for cte in (node.get("cte_map") or {}).get("map", ())]
    queries = set(filter(str.isidentifier, ctes))  # outside of its scope, another name may be that of a file
    for node in nodes:
        _check_node(node, relations, queries)


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yields every object of a parsed statement, however deep."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
        if isinstance(node, dict | list):
            waiting.extend(node.values() if isinstance(node, dict) else node)


def _check_node(node: Mapping[str, Any], relations: frozenset[str], queries: set[str]) -> None:
    """Refuses a node that reads what is neither a relation nor one of the statement's own queries."""
    kind, position = node.get("type"), node.get("query_location")
    if kind in ("BASE_TABLE", "SHOW_REF"):
        name = str(node.get("table_name") or "").strip('"')
        schema = ".".join(filter(None, (node.get("catalog_name"), node.get("schema_name"))))
        # A name with a schema is never that of a query, but may be that of a table of DuckDB's own catalog.
        known = {*relations, *(() if schema else queries), *(("", "tables") if kind == "SHOW_REF" else ())}
        if name.lower() not in known:
            there = ", ".join(sorted(relations)) or "none"
            raise RefusedError(
                f"there is no relation {'.'.join(filter(None, (schema, name)))!r}; relations: {there}", position
            )
    name = str(node.get("function_name", "")).lower()
    if _REFUSED_FUNCTIONS.fullmatch(name):
        raise RefusedError(f"the function {name}() is not allowed here", position)
    if kind == "TABLE_FUNCTION":
        name = str(node["function"].get("function_name")).lower()
        if name not in _TABLE_FUNCTIONS:
            allowed = ", ".join(sorted(_TABLE_FUNCTIONS))
            raise RefusedError(f"{name}() is not allowed in FROM; allowed are the relations, and {allowed}", position)


def connect(request: Mapping[str, Any]) -> Any:
    """Returns DuckDB with the relations, which can read nothing else.

    It does not resolve ``..`` in a URL, which leads out of a folder on servers that do, such as SFTP: there only the
    check of the statement refuses it.
    """
    import duckdb

    connection = duckdb.connect(
        config={
            "threads": _THREADS,
            "memory_limit": f"{MEMORY >> 20}MiB",
            "temp_directory": "",
            "errors_as_json": True,
            "allow_persistent_secrets": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        }
    )
    if (remote := request["remote"]) is not None:
        import fsspec

        connection.register_filesystem(fsspec.filesystem(remote["protocol"], **remote["options"]))
    for name, value in request["variables"].items():
        connection.execute(f"set variable {name} = ?", [value])
    for statement in request["statements"]:
        connection.execute(statement)
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection


def _limit(seconds: float) -> None:
    """Limits the memory that this process takes beyond what it has, its processor time, and its files to no byte."""
    try:
        import resource
    except ImportError:  # not on this platform: DuckDB's own limit and the parent remain
        return
    if sys.platform == "linux":  # elsewhere address space says little
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2 * MEMORY,) * 2)
    cpu = math.ceil(seconds) * 2 + 8  # of all threads; the parent ends it earlier unless it has exited
    for kind, most in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))


def _cell(value: Any) -> Any:
    """Returns a value as JSON: numbers and short texts as they are, everything else as bounded text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= _EXACT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value):,} bytes>"
    if isinstance(value, list | tuple | dict):
        value = json.dumps(value, default=lambda v: _cell(v) if isinstance(v, bytes | bytearray) else str(v))
    text = str(value)
    return text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]}… ({len(text):,} characters)"


def _result(connection: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    cursor = connection.execute(request["sql"])
    columns = [(str(column[0]), str(column[1])) for column in cursor.description or ()]
    rows: list[list[Any]] = []
    size, truncated = 0, False
    while not truncated and (batch := cursor.fetchmany(min(_FETCH, request["max_rows"] + 1))):
        for row in batch:
            cells = [_cell(value) for value in row]
            size += len(json.dumps(cells))
            if len(rows) == request["max_rows"] or size > request["max_bytes"]:
                truncated = True
                break
            rows.append(cells)
    return {"columns": columns, "rows": rows, "truncated": truncated}


def _failure(error: Exception) -> dict[str, Any]:
    """Returns an error for the author of the query: the message, its place in the query, and whether a file failed."""
    if type(error).__name__ == "OutOfMemoryException" or isinstance(error, MemoryError):
        said = f"the query needs more than {MEMORY >> 20:,} MiB of memory"
        return {"error": f"{said}: select fewer rows or columns, or aggregate less"}
    message, position = str(error), None
    with suppress(ValueError, TypeError, KeyError):  # not one of DuckDB's
        details = json.loads(message.partition(": ")[2])
        message, position = details["exception_message"], details.get("position")
    return {
        "error": " ".join(message.split()),
        "position": None if position is None else int(position),
        "is_of_file": type(error).__name__ in ("IOException", "InvalidInputException"),
    }


def main() -> None:
    """Answers one request: JSON on standard input, one JSON object on standard output."""
    if sys.platform == "linux":  # elsewhere the limit of processor time ends it when its parent has exited
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.load(sys.stdin)
    try:
        connection = connect(request)
        _limit(request["seconds"])
        check_statement(connection, request["sql"], frozenset(request["relations"]))
        answer = _result(connection, request)
    except RefusedError as refused:
        answer = {"error": str(refused), "position": refused.position}
    except Exception as error:  # noqa: BLE001 - whatever a query raises is the answer to its author
        answer = _failure(error)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
