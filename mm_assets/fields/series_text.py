"""Time series from the forms that datasets have them in: ``.npy`` files, JSON lists, CSV tables.

Memory is a small multiple of the text; for any bytes a function returns or raises `EncodeError`.
"""

from __future__ import annotations

import io
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.fields.array_spec import as_bytes_view
from mm_assets.fields.ndarray import array_of_npy, is_npy
from mm_assets.media.content_types import Buffer
from mm_assets.summaries import describe

__all__ = ["array_of_content", "columns_of_csv"]

_MAX_JSON_DEPTH = 8  # of lists in one another
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


def array_of_content(content: Any) -> tuple[npt.NDArray[Any], bool]:
    """The array of an ``.npy`` file's bytes, of JSON text, or of a parsed JSON list; and whether it came from JSON.

    Raises:
        EncodeError: it is not an array of numbers.
    """
    if isinstance(content, Buffer):
        if is_npy(content):
            return array_of_npy(content), False
        content = _json_of(content)
    if isinstance(content, np.ndarray):
        return content, False
    if not isinstance(content, list):
        raise EncodeError(f"found {describe(content)}, expected .npy bytes or a JSON list")
    _check_numbers(content, _MAX_JSON_DEPTH)
    try:
        found = np.array(content) if content else np.zeros(0)
    except (ValueError, OverflowError) as error:
        raise EncodeError(f"found a JSON list of {len(content)} ({error}), expected rows of one length") from error
    if found.dtype.kind not in "iufb":
        raise EncodeError(f"found a JSON list of {found.dtype}, expected numbers of 64 bits at most")
    return found, True


def _json_of(content: Buffer) -> Any:
    try:
        return json.loads(bytes(content))
    except (ValueError, RecursionError) as error:  # a wrong encoding is a ValueError too
        found = f"{len(content)} bytes that are neither .npy nor JSON ({error})"
        raise EncodeError(f"found {found}, expected .npy bytes or a JSON list") from error


def _check_numbers(content: list[Any], depth: int) -> None:
    """Refuse values that NumPy would convert: texts, nulls, truth values among numbers."""
    kinds = set(map(type, content))
    if kinds == {list} and depth > 1:
        for row in content:
            _check_numbers(row, depth - 1)
    elif not (kinds <= {int, float} or kinds == {bool}):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise EncodeError(
            f"found a JSON list of {names}, expected numbers, or lists of them up to {_MAX_JSON_DEPTH} deep"
        )


def columns_of_csv(
    data: Buffer, names: Sequence[str] | None, num_columns: int | None
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    """Times and values of a CSV: UTF-8, commas, time first; a first line with another cell than a number is a header.

    Args:
        data: the text.
        names: what a header must name after its first cell; None for any.
        num_columns: values in a row, for a text without any row.

    Returns:
        (T,) times, int64 where all are integers and else float64; and (T, D) values.

    Raises:
        EncodeError: not such a table.
    """
    try:
        text = str(as_bytes_view(data), "utf-8-sig")
    except UnicodeDecodeError as error:
        raise EncodeError(f"found bytes that are not UTF-8 ({error.reason}), expected a CSV of numbers") from error
    lines = _lines(text)
    first = next(lines, None)
    width = None
    if first is not None and not all(_NUMBER.fullmatch(cell.strip()) for cell in first.split(",")):
        header = [cell.strip().strip('"') for cell in first.split(",")]
        if names is not None and header[1:] != list(names):
            raise EncodeError(f"found a header with columns {header[1:]}, expected {list(names)}")
        width = len(header)
        if width < 2:
            raise EncodeError(f"found a text of {len(data)} bytes without commas, expected a CSV of numbers")
        first = next(lines, None)
    if first is None:
        empty = num_columns if num_columns is not None else (width or 1) - 1
        return np.zeros(0), np.zeros((0, empty))
    try:
        table = np.loadtxt(chain([first], lines), delimiter=",", comments=None, dtype=np.float64, ndmin=2)
    except ValueError as error:
        raise EncodeError(
            f"found a CSV that is not a table of numbers ({error}), expected the time, then values"
        ) from error
    if table.shape[1] != (width or table.shape[1]):
        raise EncodeError(f"found rows of {table.shape[1]} cells below a header of {width}, expected as many")
    ticks = _integers(islice(_lines(text), 0 if width is None else 1, None))
    return (table[:, 0] if ticks is None else ticks), table[:, 1:]


def _lines(text: str) -> Iterator[str]:
    """The lines that are not blank, one at a time: a list of them would be many times the text."""
    return (stripped for line in io.StringIO(text, newline=None) if (stripped := line.strip()))


def _integers(lines: Iterator[str]) -> npt.NDArray[np.int64] | None:
    """The first cells where all are integers of 64 bits, exactly: float64 would round a clock of nanoseconds."""
    ticks = array("q")
    for line in lines:
        cell = line.partition(",")[0].strip()
        if not _INTEGER.fullmatch(cell) or not -(2**63) <= int(cell) < 2**63:
            return None
        ticks.append(int(cell))
    return np.array(ticks, dtype=np.int64)
