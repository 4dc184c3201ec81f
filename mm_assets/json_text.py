"""JSON by one set of rules, the same in every process: how a text is repaired, what its value is, how it is written.

Python's `json` reads NaN and infinities, which JSON does not have, and escapes of lone surrogates, which neither UTF-8
nor DuckDB has; how deep it reads depends on the stack and on the limit of recursion. Here a text is repaired first, and
nothing in it changes but these numbers and escapes. The result has a value that UTF-8 can hold, nests at most
`MAX_DEPTH` lists and objects, and repairing it again changes nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

__all__ = ["MAX_DEPTH", "RepairedJSON", "call_with_room", "compact_member", "dump_json", "parse_json", "repair_json"]

MAX_DEPTH = 500  # lists and objects within each other: half of Python's own limit, which counts all callers too

_T = TypeVar("_T")
_V = TypeVar("_V")

# A string, which ends with the text if it is not closed: otherwise each quote in it would be tried as a start.
_NUMBER_OR_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|(-?Infinity|NaN)', re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


class RepairedJSON(NamedTuple):
    r"""The text of a JSON value without what is not JSON.

    Attributes:
        text: the text as it was written, but for what is counted here.
        num_nulls: how many NaN and infinities, which Python writes, became ``null``.
        num_surrogates: how many escapes of a lone surrogate, such as ``\ud800``, became ``\ufffd``.
    """

    text: str
    num_nulls: int = 0
    num_surrogates: int = 0


def repair_json(text: str) -> RepairedJSON:
    """Returns the text with null for NaN and infinities, and U+FFFD for lone surrogates; it is not parsed."""
    num_nulls = num_surrogates = 0
    if "NaN" in text or "Infinity" in text:
        text, num_nulls = _replace(_NUMBER_OR_STRING, text, "null")
    if "\\" in text and ("\\ud" in text or "\\uD" in text):
        text, num_surrogates = _replace(_ESCAPE, text, "\\ufffd")
    return RepairedJSON(text, num_nulls, num_surrogates)


def _replace(pattern: re.Pattern[str], text: str, replacement: str) -> tuple[str, int]:
    """Replaces the matches that have a group, and counts them."""
    count = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal count
        if match[1] is None:
            return match[0]
        count += 1
        return replacement

    return pattern.sub(replaced, text), count


def _refuse(name: str) -> NoReturn:
    raise _ConstantError(f"{name} is not JSON")


class _ConstantError(ValueError):
    """The text has a number that JSON does not know."""


_PARSE = json.JSONDecoder(parse_constant=_refuse).decode  # which `json.loads` makes again for each text


def parse_json(text: str, *, max_depth: int | None = MAX_DEPTH) -> Any:
    """Returns the value of a JSON text.

    A number beyond the range of float64 is infinite. Of repeated keys the last counts.

    Args:
        text: the text; `repair_json` removes what Python writes and JSON does not have.
        max_depth: lists and objects that may be within each other; None for as many as Python reads.

    Raises:
        ValueError: it is not JSON, too deep, or has an integer with more digits than Python reads; the message is a
            clause about the text.
    """
    if max_depth is not None and len(text) > max_depth and text.count("[") + text.count("{") > max_depth:
        depth = _depth(text)
        if depth > max_depth:
            raise ValueError(f"has {depth:,} lists and objects within each other, allowed are {max_depth:,}")
    try:
        try:
            return _PARSE(text)
        except RecursionError:
            return _call_with_room(_PARSE, text)
    except (json.JSONDecodeError, _ConstantError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("has too many lists and objects within each other") from error
    except ValueError as error:  # of `int`
        raise ValueError(f"has an integer of more than {sys.get_int_max_str_digits():,} digits") from error


_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def _depth(text: str) -> int:
    """Returns how many lists and objects are within each other, at most; strings are left out."""
    if "\\" in text:
        text = text.replace("\\\\", "").replace('\\"', "")
    outside = "".join(text.split('"')[::2]).encode("ascii", "replace")
    steps = _STEPS[np.frombuffer(outside, np.uint8)]
    return int(steps.cumsum(dtype=np.int64).max(initial=0))


_ROOM = 2 * MAX_DEPTH + 100
_ROOM_LOCK = Lock()


def call_with_room(function: Callable[[_V], _T], value: _V) -> _T:
    """Returns the result of a function that recurses through JSON, whatever the stack and the limit of recursion are.

    Raises:
        RecursionError: the value nests more than `MAX_DEPTH` lists and objects.
    """
    try:
        return function(value)
    except RecursionError:
        return _call_with_room(function, value)


def _call_with_room(function: Callable[[_V], _T], value: _V) -> _T:
    with _ROOM_LOCK:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + _ROOM)
        try:
            return function(value)
        finally:
            sys.setrecursionlimit(limit)


_RAW = json.JSONDecoder()
_BETWEEN = re.compile(r'("[^"\\]*+(?:\\.[^"\\]*+)*+")|[ \t\r\n]+')


def compact_member(text: str, key: str) -> str:
    """Returns the compact JSON of one value of an object: numbers as they are written, and repeated keys.

    Args:
        text: JSON that `parse_json` reads, an object.
        key: a key of it; where it is repeated, the last value counts.
    """
    start, stop = call_with_room(_place_of, (text, key))
    return _BETWEEN.sub(_compact_string, text[start:stop])


def _compact_string(match: re.Match[str]) -> str:
    string = match[1] or ""
    return _encode(_RAW.decode(string)) if "\\" in string else string


def _place_of(text_and_key: tuple[str, str]) -> tuple[int, int]:
    text, wanted = text_and_key
    place = 0, 0
    at = text.index("{")
    while text[at] != "}":  # at the brace or comma before a key
        key, at = _RAW.raw_decode(text, _after_spaces(text, at + 1))
        start = _after_spaces(text, _after_spaces(text, at) + 1)
        _, stop = _RAW.raw_decode(text, start)
        if key == wanted:
            place = start, stop
        at = _after_spaces(text, stop)
    return place


def _after_spaces(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


_OPTIONS: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
_encode = json.JSONEncoder(allow_nan=False, **_OPTIONS).encode


def dump_json(value: object, *, default: Callable[[object], object] | None = None) -> str:
    """Returns a value as compact JSON, with null for numbers that are not finite, which packed fields refuse.

    Args:
        value: the value.
        default: converts what JSON does not know.

    Raises:
        TypeError: it holds something that JSON does not know, and there is no `default`.
        ValueError: it holds itself.
        RecursionError: it nests more than `MAX_DEPTH` lists and objects.
    """
    encode = _encode if default is None else json.JSONEncoder(allow_nan=False, default=default, **_OPTIONS).encode
    try:
        return call_with_room(encode, value)
    except ValueError:
        text = call_with_room(json.JSONEncoder(default=default, **_OPTIONS).encode, value)
        return _replace(_NUMBER_OR_STRING, text, "null")[0]
