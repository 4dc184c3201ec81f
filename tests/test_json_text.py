"""Tests of JSON texts: what is repaired in them, how deep they may nest, and that no process reads them differently."""

import json
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings

from mm_assets.fields import JSONField, RawJSON
from mm_assets.json_text import MAX_DEPTH, compact_member, dump_json, parse_json, repair_json

from .json_documents import TOO_DEEP, documents, exact_value, rejection

DEEPEST = "[" * MAX_DEPTH + "]" * MAX_DEPTH


@pytest.mark.nightly_examples(10_000)
@settings(max_examples=150)
@given(text=documents())
def test_repairing_changes_nothing_else(text: str) -> None:
    """Numbers, repeated keys, spaces and escapes stay as written, repairing twice is repairing once, parts likewise."""
    repaired = repair_json(text)
    assert repair_json(repaired.text) == (repaired.text, 0, 0)
    if repaired[1:] == (0, 0):
        assert repaired.text == text
    reason = rejection(text)
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            parse_json(repaired.text)
        return
    assert exact_value(repaired.text) == exact_value(text)
    value = parse_json(repaired.text)
    dump_json(value).encode()
    line = f'{{"a": 1, "\\u006bey" :\t{repaired.text}\n, "z": [{{"key": 1}}]}}'
    if rejection(line) is None:
        member = compact_member(line, "key")
        assert exact_value(member) == exact_value(text)
        if "\\" not in text:
            assert re.sub(r"\s", "", member) == re.sub(r"\s", "", repaired.text)
    if repaired.num_nulls:
        with pytest.raises(ValueError, match=r"is not JSON: -?(NaN|Infinity) is not JSON"):
            parse_json(text)


def at_depth(num_frames: int, function: Any, argument: Any) -> Any:
    """The result of a call with so many more frames on the stack."""
    return at_depth(num_frames - 1, function, argument) if num_frames else function(argument)


@pytest.mark.parametrize("num_frames", [0, 300, 700])
def test_depth_does_not_depend_on_the_stack(num_frames: int) -> None:
    """The deepest JSON is read, stored and written from any depth of the stack, and what is deeper never is."""
    value = json.loads(DEEPEST)
    assert at_depth(num_frames, parse_json, DEEPEST) == value
    assert at_depth(num_frames, dump_json, value) == DEEPEST
    assert at_depth(num_frames, JSONField().encode, value).data == DEEPEST.encode()
    encoded = at_depth(num_frames, JSONField().encode, RawJSON(DEEPEST))
    assert at_depth(num_frames, lambda e: JSONField().decode(*e), encoded) == value
    for deeper in (f"[{DEEPEST}]", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900):
        with pytest.raises(ValueError, match="lists and objects within each other, allowed are 500"):
            at_depth(num_frames, parse_json, deeper)


@pytest.mark.parametrize("limit", [150, 1000, 100_000])
def test_depth_does_not_depend_on_the_limit_of_recursion(limit: int) -> None:
    """Whatever the limit of recursion of a process is, the same JSON is read and the same is refused."""
    code = f"""if True:
        import json, sys
        from mm_assets.json_text import MAX_DEPTH, dump_json, parse_json
        sys.setrecursionlimit({limit})
        for depth in (MAX_DEPTH, MAX_DEPTH + 1, 980):
            text = "[" * depth + "]" * depth
            try:
                print(dump_json(parse_json(text)) == text, sys.getrecursionlimit())
            except ValueError as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    read, *refused = done.stdout.splitlines()
    assert read == f"True {limit}"
    assert refused == [f"has {n} lists and objects within each other, allowed are 500" for n in (501, 980)]


def test_brackets_in_strings_are_no_depth() -> None:
    """Only lists and objects count as depth, not what looks like one in a string."""
    text = json.dumps({"a": "[" * 5000, 'b\\"': '\\"{[' * 1000, "c": [[]] * 2000})
    assert parse_json(text) == json.loads(text)
    with pytest.raises(ValueError, match="has 501 lists"):
        parse_json(json.dumps({"s": '\\\\"[' * 600})[:-1] + ',"d":' + DEEPEST + "}")


def test_what_a_message_says_is_true() -> None:
    """Text that is not JSON, depth, and integers that Python does not read have messages of their own."""
    for text, message in (
        ("{", "is not JSON: "),
        (TOO_DEEP, "has 501 "),
        ("[" + "9" * 5000 + "]", "of more than 4,300"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_json(text)


def test_hostile_text_costs_time_in_proportion() -> None:
    """Quotes and backslashes without end, beside a NaN and a lone surrogate, do not take the square of their number."""
    started = time.monotonic()
    for text in (
        '[NaN,"' + '\\"' * 2_000_000,
        "NaN" + "\\" * 4_000_001,
        '"\\ud800' * 500_000,
        "[NaN" + '"' * 3_000_001,
    ):
        repair_json(text)
    assert time.monotonic() - started < 30
