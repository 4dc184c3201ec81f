"""The JSON document that a command writes with `--json`: one, on standard output, where nothing else goes.

Lines for people that a command writes with `cli.output` are left out then; what other code prints goes to standard
error. The document is written when all of it is known, so that an error leaves no part of one. docs/spec/json.md lists
the keys of each.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, ClassVar, TextIO

import click

from mm_assets.cli.secrets import masked_json

__all__ = [
    "document_only",
    "is_asked_for",
    "json_option",
    "json_value",
    "wants_json",
    "write_document",
    "write_error",
]

_MEMORY = 4 << 20  # bytes of a document that are held in memory until it is complete


class _Output:
    """Where the document goes, and whether it was written.

    Attributes:
        current: that of the command that this process runs, whichever thread asks; None where it writes text.
    """

    current: ClassVar[_Output | None] = None

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_written = False


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option `--json`; the group of commands looks for it before any is run."""
    return click.option(
        "--json", is_flag=True, expose_value=False, help="One JSON document instead of text (docs/spec/json.md)."
    )(function)


def is_asked_for(arguments: Sequence[str]) -> bool:
    """Whether the arguments of the command ask for a document, and not for its help."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options and not {"-h", "--help"} & set(options)


def wants_json() -> bool:
    """Whether the command that runs writes a document."""
    return _Output.current is not None


@contextmanager
def document_only() -> Iterator[None]:
    """In the block standard output has the document alone; other code's output, also by its descriptor, is redirected.

    That of processes which are started meanwhile goes to standard error too.
    """
    with _own_stdout() as stream, redirect_stdout(sys.stderr):
        _Output.current = _Output(stream)
        try:
            yield
        finally:
            _Output.current = None


@contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """Standard output; where it is a file of the system, by a descriptor that only this module knows."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # a test's, or a notebook's
        yield sys.stdout
        return
    sys.stdout.flush()
    saved = os.dup(number)
    with os.fdopen(saved, "w", encoding="utf-8", closefd=True) as stream:
        os.dup2(2, number)
        try:
            yield stream
        finally:
            with suppress(OSError):  # its reader is gone: closing it says so
                stream.flush()
            os.dup2(saved, number)


def write_document(value: Mapping[str, Any]) -> None:
    """Writes the document of a command, or nothing where none was asked for.

    Declarations that were left out because they are wrong follow under `errors`.

    Args:
        value: of JSON's types; an iterator becomes a list that is never held as a whole.
    """
    output = _Output.current
    if output is None:
        return
    context = click.get_current_context(silent=True)
    wrong = getattr(context.find_root().obj, "wrong", ()) if context is not None else ()
    document = {**value, "errors": [str(error) for error in wrong]} if wrong else value
    _write(output, document)


def write_error(kind: str, message: str, code: int) -> None:
    """Writes the document of an error, unless the command has written its own."""
    output = _Output.current
    if output is not None and not output.is_written:
        _write(output, {"error": {"kind": kind, "message": message, "exit_code": code}})


def _write(output: _Output, document: Mapping[str, Any]) -> None:
    with tempfile.SpooledTemporaryFile(_MEMORY, "w+", encoding="utf-8") as draft:
        for piece in _pieces(document, "\n"):
            draft.write(masked_json(piece))
        draft.seek(0)
        output.is_written = True
        while block := draft.read(1 << 16):
            output.stream.write(block)
    output.stream.write("\n")
    output.stream.flush()


def _pieces(value: object, newline: str) -> Iterator[str]:
    """The text of a value: a line for each key of an object and for each item of a list."""
    inner = f"{newline} "
    if isinstance(value, Mapping) and value:
        opened = "{"
        for key, item in value.items():
            yield f"{opened}{inner}{json.dumps(key)}: "
            yield from _pieces(item, inner)
            opened = ","
        yield f"{newline}}}"
    elif isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value):
        yield json.dumps(value, allow_nan=False)
    elif isinstance(value, Iterator) or (isinstance(value, list | tuple) and value):
        opened = "["
        for item in value:
            yield f"{opened}{inner}{json.dumps(item, allow_nan=False)}"
            opened = ","
        yield f"{newline}]" if opened == "," else "[]"
    else:
        yield json.dumps(value, allow_nan=False)


def json_value(value: Any) -> Any:
    """A value of a table as one of JSON's types.

    Bytes become base64, dates and times ISO 8601, decimals and UUIDs text; numbers that are not finite become null.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [json_value(item) for item in value]
    return str(value)
