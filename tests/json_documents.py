"""JSON texts of every kind for property tests, and what has to become of each, found out in another way."""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

MAX_DEPTH = 500  # as documented
TOO_DEEP = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)

_written_numbers = st.sampled_from(
    [
        *("0", "-0", "1E+2", "1e5", "0.10", "-0.0", "1e400", "-1e400", "1e-400", "2e308", "1.7976931348623157e308"),
        *("0.1234567890123456789012345678901", "9007199254740993", "9223372036854775808", "-9223372036854775809"),
        *("18446744073709551616", "9" * 400, "9" * 4300),
        *("NaN", "Infinity", "-Infinity"),
    ]
)
_broken = st.sampled_from(
    ["9" * 4301, "-" + "9" * 5000, "01", "+1", ".5", "1.", "nan", "-NaN", "'a'", "[1,]", '"\t"', '"\\x"', "", "tru"]
)
_numbers = st.one_of(
    _written_numbers,
    st.integers().map(str),
    st.floats().map(json.dumps),
    st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: f"{d:f}" if abs(d.adjusted()) < 50 else "1"),
)
_escapes = st.sampled_from(
    ["\\ud800", "\\uDFFF", "\\ud83d\\ude00", "\\udc00\\ud800", "\\u0000", "\\\\ud800", '\\"', "\\/", "\\u00e9", "\\\\"]
)
_letters = st.text(st.characters(exclude_categories=("Cs",)), max_size=8).map(
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1]
)
_words = st.sampled_from(["NaN", "Infinity War", "[", "}", "-Infinity,", "\u2028", "\x7f"])
_strings = st.lists(st.one_of(_letters, _escapes, _words), max_size=3).map(lambda parts: f'"{"".join(parts)}"')
_spaces = st.sampled_from(["", "", " ", "\n\t", "\r "])
_depths = st.sampled_from([1, 2, 127, 128, 129, 400, 498, 499, 500, 501, 938, 960, 980, 3000])
_deep = st.tuples(_depths, st.booleans()).map(
    lambda drawn: "[" * drawn[0] + "]" * drawn[0] if drawn[1] else '{"a":' * drawn[0] + "1" + "}" * drawn[0]
)
_scalars = st.one_of(_numbers, _strings, st.sampled_from(["true", "false", "null"]))


def _list_of(items: list[str], space: str) -> str:
    return f"[{space}{f'{space},'.join(items)}{space}]"


def object_of(members: list[tuple[str, str]], space: str = "") -> str:
    """The text of an object whose keys, as JSON strings, may repeat."""
    return "{" + space + f",{space}".join(f"{key}{space}:{value}" for key, value in members) + space + "}"


values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.builds(_list_of, st.lists(inner, max_size=4), _spaces),
        st.builds(
            object_of,
            st.lists(st.tuples(st.one_of(st.sampled_from(['"a"', '"b"']), _strings), inner), max_size=4),
            _spaces,
        ),
    ),
    max_leaves=8,
)
"""JSON values, many of them with what Python writes and JSON does not have."""


def documents(*keys: str) -> st.SearchStrategy[str]:
    """Texts of JSON objects with these keys, which may repeat; some are too deep, and some are not JSON."""
    names = st.sampled_from([json.dumps(key) for key in keys]) if keys else _strings
    member = st.tuples(names, st.one_of(values, values, values, values, _deep))
    good = st.builds(object_of, st.lists(member, max_size=6), _spaces)
    bad = st.builds(object_of, st.lists(st.tuples(names, st.one_of(values, _broken)), max_size=6), _spaces)
    return st.one_of(good, good, good, bad, _broken, values, _deep)


def _depth(text: str) -> int:
    depth = most = 0
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text, re.DOTALL):
        depth += (token in "[{") - (token in "]}") if len(token) == 1 else 0
        most = max(most, depth)
    return most


def rejection(text: str) -> str | None:
    """What a text that Python, which knows NaN, does not read is rejected with; None where it has a value."""
    if _depth(text) > MAX_DEPTH:
        return "within each other"
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return "is not JSON"
    except ValueError:
        return "digits"
    return None


def exact_value(text: str) -> Any:
    """The value with numbers as they are written, repeated keys, null for NaN, and U+FFFD for lone surrogates."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub("[\ud800-\udfff]", "\ufffd", value)
        return [clean(item) for item in value] if isinstance(value, list | tuple) else value

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20 * MAX_DEPTH)
    try:
        return clean(_exact(text, clean))
    finally:
        sys.setrecursionlimit(limit)


def _exact(text: str, clean: Callable[[Any], Any]) -> Any:
    return json.loads(
        text,
        parse_constant=lambda _: None,
        parse_float=lambda number: ("number", number),
        parse_int=lambda number: ("number", number),
        object_pairs_hook=lambda pairs: [("object", clean(key), value) for key, value in pairs],
    )
