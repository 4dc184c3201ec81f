"""The process that runs one query of a stranger: it reads a request from standard input and writes the result.

It is run by its path and imports nothing of this package, so that it starts fast. Four things limit a query: the parsed
statement has to be one that only reads relations and calls functions without side effects; DuckDB may read nothing but
the folders of the relations; the process may not take more memory or write a file; and its parent kills it. Any one of
them would do for most texts, and none is trusted alone.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Refused", "check_statement", "main"]

MAX_TEXT = 64 << 10  # characters of a query
MAX_CELL = 4 << 10  # characters of one value in a result
MAX_UNITED = 1000  # files of a relation whose columns are united where relations are listed
_PR_SET_PDEATHSIG = 1
_FETCH = 64  # rows that become Python objects at a time
_EXACT = 2**53  # whole numbers beyond it are not exact in a browser

_ONE = "one SELECT, FROM, WITH, VALUES, DESCRIBE or SUMMARIZE statement can be run"
_TABLE_REFS = frozenset(
    {"BASE_TABLE", "SUBQUERY", "JOIN", "TABLE_FUNCTION", "EXPRESSION_LIST", "EMPTY", "EMPTY_FROM", "SHOW_REF", "PIVOT"}
)
_TABLE_FUNCTIONS = frozenset({"unnest", "range", "generate_series", "json_each", "json_tree"})
_SPECIAL = frozenset({"tables"})  # what SHOW may list
_DENIED = re.compile(
    r"(read|pg|duckdb|parquet|pragma)_.*|glob|getenv|getvariable|current_setting|write_log|sleep_ms|nextval|currval"
    r"|setval|setseed|query|query_table|sniff_.*|json_(de)?serialize_.*|json_execute_.*|in_search_path|vector_type"
)
_HARMLESS = frozenset({"pg_typeof", "pg_size_pretty"})
_NAME = re.compile(r"[^\W\d]\w*")  # of a CTE: no name of a file that DuckDB would read has this form
_LINE = re.compile(r"\n+LINE (\d+): (.*)\n( *)\^.*", re.DOTALL)


class Refused(Exception):  # noqa: N818 - it is an answer to the query's author, not a fault of this program
    """A query that is not run, or failed.

    Attributes:
        message: why, for its author.
        position: index of the character that it is about, if that is known.
    """

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.position = position


def check_statement(connection: Any, text: str, relations: frozenset[str]) -> None:
    """Refuses a text that is not one statement over these relations.

    Args:
        connection: parses the text.
        text: the query.
        relations: names of the views that it may read, in lower case.

    Raises:
        Refused: it is not such a statement, or cannot be parsed.
    """
    if len(text) > MAX_TEXT:
        raise Refused(f"the query has {len(text):,} characters, at most {MAX_TEXT:,} are run")
    try:
        ((serialized,),) = connection.execute("select json_serialize_sql(?)", [text]).fetchall()
        parsed = json.loads(serialized)
    except RecursionError as error:
        raise Refused("the query is nested too deeply") from error
    if parsed["error"]:
        if parsed.get("error_type") == "parser":
            position = parsed.get("position")
            raise Refused(str(parsed["error_message"]), None if position is None else int(position))
        raise Refused(f"{_ONE}, nothing that changes data or settings")
    if len(parsed["statements"]) != 1:
        raise Refused(f"found {len(parsed['statements'])} statements: {_ONE}")
    nodes = list(_nodes(parsed["statements"]))
    known = relations | set(_cte_names(nodes))
    for node in nodes:
        _check_node(node, known, relations)


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Every object of a parsed statement, however deep."""
    waiting = [tree]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            yield found
            waiting.extend(found.values())
        elif isinstance(found, list):
            waiting.extend(found)


def _cte_names(nodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for node in nodes:
        ctes = node.get("cte_map")
        for cte in ctes.get("map", ()) if isinstance(ctes, dict) else ():
            if not _NAME.fullmatch(cte["key"]):
                raise Refused(f"{cte['key']!r} cannot be the name of a query: use letters, digits and _")
            yield cte["key"].lower()


def _check_node(node: Mapping[str, Any], known: frozenset[str] | set[str], relations: frozenset[str]) -> None:
    kind = node.get("type")
    if "class" not in node and "alias" in node and "sample" in node and kind not in _TABLE_REFS:
        raise Refused(f"{kind} is not allowed in FROM", _position(node))
    if kind == "BASE_TABLE":
        _check_table(node, known, relations)
    elif kind == "SHOW_REF":
        name = str(node.get("table_name") or "").strip('"').lower()
        special = node.get("show_type") == "SHOW_SPECIAL"
        if name and name not in (_SPECIAL if special else known):
            raise _unknown(name, relations, node)
    elif kind == "TABLE_FUNCTION":
        name = str(node["function"].get("function_name")).lower()
        if name not in _TABLE_FUNCTIONS:
            allowed = ", ".join(sorted(_TABLE_FUNCTIONS))
            raise Refused(f"{name}() is not allowed in FROM; allowed are the relations, and {allowed}", _position(node))
    if "function_name" in node:
        name = str(node["function_name"]).lower()
        if name not in _HARMLESS and _DENIED.fullmatch(name):
            raise Refused(f"the function {name}() is not allowed here", _position(node))


def _check_table(node: Mapping[str, Any], known: frozenset[str] | set[str], relations: frozenset[str]) -> None:
    name, qualified = str(node["table_name"]), node.get("qualified_name")
    place = (str(node.get("catalog_name") or ""), str(node.get("schema_name") or ""))
    is_plain = place in (("", ""), ("", "main"), ("memory", "main"))
    path = qualified.get("path") if isinstance(qualified, dict) else None
    if path is not None and (len(path) > 3 or str(path[-1]) != name):
        is_plain = False
    if not is_plain or name.lower() not in (known if place == ("", "") else relations):
        raise _unknown(".".join(filter(None, (*place, name))), relations, node)


def _unknown(name: str, relations: frozenset[str], node: Mapping[str, Any]) -> Refused:
    there = ", ".join(sorted(relations)) or "none"
    return Refused(f"there is no relation {name!r}; relations: {there}", _position(node))


def _position(node: Mapping[str, Any]) -> int | None:
    found = node.get("query_location")
    return found if isinstance(found, int) and found < MAX_TEXT else None  # else it is unknown


def _connect(request: Mapping[str, Any]) -> Any:
    """DuckDB with the relations, which can read nothing else."""
    import duckdb

    connection = duckdb.connect(
        config={
            "threads": request["threads"],
            "memory_limit": f"{request['memory'] >> 20}MiB",
            "temp_directory": "",
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        }
    )
    remote = request.get("remote")
    if remote is not None:
        import fsspec

        connection.register_filesystem(fsspec.filesystem(remote["protocol"], **remote["options"]))
    connection.execute("set variable root = ?", [request["root"]])
    for statement in request["statements"]:
        connection.execute(statement)
    connection.execute(f"set allowed_directories = [{', '.join(request['folders'])}]")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection


def _limit(memory: int, seconds: float) -> None:
    """Limits this process: more memory than now by `memory` bytes, its processor time, and no byte in any file."""
    try:
        import resource
    except ImportError:  # not on this platform: DuckDB's own limit and the parent remain
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:  # elsewhere address space says little, and DuckDB's own limit and the parent remain
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    cpu = math.ceil(seconds) * 2 + 8  # of all threads; the parent ends it earlier unless it is gone
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_with_parent() -> None:
    """Has this process killed when its parent ends, where the kernel can do that."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            sys.exit(1)


def _cell(value: Any) -> Any:
    """A value as JSON: numbers and short texts as they are, everything else as bounded text."""
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
    columns = [{"name": str(column[0]), "type": str(column[1])} for column in cursor.description or ()]
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


def _columns(connection: Any, relation: str) -> list[list[str]]:
    """Name and type of each column of a relation; none where its files cannot be read.

    Of more than `MAX_UNITED` files the columns are those of the first one: to unite them all takes seconds. None are
    counted below a root with wildcards in its path, which are not escaped here.
    """
    import duckdb

    try:
        files = "select count(*) from glob(getvariable('root') || '/' || ? || '/*')"
        ((count,),) = connection.execute(files, [relation]).fetchall()
        connection.execute(f"set variable union_by_name = {str(count <= MAX_UNITED).lower()}")
        described = connection.execute(f'describe "{relation}"').fetchall()
    except duckdb.Error:
        return []
    return [[str(row[0]), str(row[1])] for row in described]


def _failure(error: Exception, request: Mapping[str, Any]) -> dict[str, Any]:
    """An error of DuckDB for the author of the query: its first sentence, and where."""
    kind, text = type(error).__name__, str(error)
    if kind == "OutOfMemoryException" or isinstance(error, MemoryError):
        said = f"the query needs more than {request['memory'] >> 20:,} MiB of memory"
        return {"error": f"{said}: select fewer rows or columns, or aggregate less", "position": None}
    position = None
    if found := _LINE.search(text):
        text = text[: found.start()]
        position = _offset(request["sql"], int(found[1]), found[2], len(found[3]) - len(f"LINE {found[1]}: "))
    text = re.sub(r"^\w+ (Error|Exception): ", "", text.split("\n\nPossible solutions")[0])
    return {"error": " ".join(text.split()), "position": position}


def _offset(sql: str, line: int, shown: str, column: int) -> int | None:
    """The index in a query of a character in one of its lines as an error shows it, which may be an extract."""
    lines = sql.split("\n")
    if not 0 < line <= len(lines):
        return None
    start = sum(len(before) + 1 for before in lines[: line - 1])
    extract = shown.split("\n")[0]
    if extract.startswith("..."):
        extract, column = extract[3:], column - 3
    at = lines[line - 1].find(extract.removesuffix("..."))
    return start + max(at, 0) + column if column >= 0 else None


def main() -> None:
    """Answers one request: JSON on standard input, one JSON object on standard output.

    Without a query the answer is the columns of each relation.
    """
    _end_with_parent()
    request = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        connection = _connect(request)
        _limit(request["memory"] + request["headroom"], request["seconds"])
        if request["sql"] is None:
            answer = {"relations": {name: _columns(connection, name) for name in request["relations"]}}
        else:
            check_statement(connection, request["sql"], frozenset(request["relations"]))
            answer = _result(connection, request)
    except Refused as refused:
        answer = {"error": refused.message, "position": refused.position}
    except Exception as error:  # noqa: BLE001 - whatever a query raises is the answer to its author
        answer = _failure(error, request)
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
