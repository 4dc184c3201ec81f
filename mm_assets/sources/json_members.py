"""The JSON of a sample, parsed without trust: an object, of bounded depth, whose strings Arrow can hold."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from mm_assets.sources.text_members import BadTextError

__all__ = ["ParsedObject", "dump_json", "parse_object"]

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


class ParsedObject(NamedTuple):
    """A sample's JSON.

    Attributes:
        value: keys and values; lone surrogates in their strings, which no UTF-8 can hold, replaced by U+FFFD.
        text: the JSON as it was written; anew with null for them where it holds numbers that JSON does not know.
        num_repaired: strings in which that was necessary.
        num_nonstandard: numbers written ``NaN`` or ``Infinity``, which Python writes and JSON does not know.
    """

    value: dict[str, Any]
    text: str
    num_repaired: int
    num_nonstandard: int


def parse_object(text: str) -> ParsedObject:
    """Parses the text of a JSON member.

    Raises:
        BadTextError: it is no JSON, too deep, or no object.
    """
    nonstandard: list[str] = []

    def constant(name: str) -> float:
        nonstandard.append(name)
        return float(name.replace("Infinity", "inf"))

    try:
        # The hook costs nothing unless it is called; passing it builds a decoder, so the common case goes without.
        if "NaN" in text or "Infinity" in text:
            value = json.loads(text, parse_constant=constant)
        else:
            value = json.loads(text)
        # Only an escape can bring a lone surrogate into valid UTF-8.
        escapes = "\\ud" in text or "\\uD" in text
        if nonstandard:
            text = json.dumps(_finite(value), ensure_ascii=escapes, separators=(",", ":"))
        repaired = 0
        if escapes:
            value, repaired = _repair(value)
    except RecursionError as error:
        raise BadTextError("bad_json", "is nested too deeply") from error
    except ValueError as error:
        raise BadTextError("bad_json", f"is no JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(value, dict):
        kind = "null" if value is None else type(value).__name__
        raise BadTextError("json_not_an_object", f"is a JSON {kind}, expected an object")
    return ParsedObject(value, text, repaired, len(nonstandard))


def _repair(value: Any) -> tuple[Any, int]:
    """The value with lone surrogates replaced, and the number of strings that had some."""
    if isinstance(value, str):
        repaired, count = _LONE_SURROGATE.subn(_REPLACEMENT, value)
        return repaired, int(count > 0)
    if isinstance(value, list):
        items = [_repair(item) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    if isinstance(value, dict):
        pairs = {_repair(key)[0]: _repair(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, sum(count for _, count in pairs.values())
    return value, 0


def dump_json(value: object) -> str:
    """A value as compact JSON, with null for numbers that are not finite: DuckDB and the packed fields refuse those.

    Raises:
        TypeError: it holds something that JSON does not know.
        RecursionError: it is nested too deeply.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    """The value with null for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
