"""Tests of the columns that the samples' JSON gives, and of the conversion of their values."""

import pytest

from mm_assets.errors import SourceError
from mm_assets.rows.schema import MemberRules
from mm_assets.rows.user_columns import UNFIT, columns_of, converter


def test_columns_are_inferred() -> None:
    """Types widen as the design says; order is that of first appearance; reserved names are set apart."""
    objects = [
        {"b": True, "i": 1, "f": 1, "s": "x", "li": [1], "le": [], "m": 1, "o": {"a": 1}, "modality": "q", "n": None},
        {"new": "y", "i": None, "f": 0.5, "li": [2.5, None], "le": ["t"], "m": "text", "big": 2**70, "lj": [[1]]},
        {"user_modality": 3, "texts": ["t"], "images": [None], "": 1, "bad\x01": 1, "e": []},
    ]
    columns = columns_of(objects, MemberRules(), shown="s")
    assert {c.name: c.type for c in columns} == {
        "b": "bool",
        "i": "int64",
        "f": "double",
        "s": "string",
        "li": "list<double>",
        "le": "list<string>",
        "m": "json",
        "o": "json",
        "user_modality": "string",
        "n": "json",
        "new": "string",
        "big": "json",
        "lj": "json",
        "user_user_modality": "int64",
        "e": "json",
    }
    assert [c.name for c in columns][:3] == ["b", "i", "f"]


def test_columns_that_are_asked_for() -> None:
    """Exactly the named keys are columns; one that is nowhere is refused, and a reserved one gets a name of its own."""
    objects = [{"a": 1, "b": 2}, {"b": 3}]
    (column,) = columns_of(objects, MemberRules(user_columns=("a",)), shown="s")
    assert (column.name, column.type, column.required) == ("a", "int64", True)
    assert columns_of(objects, MemberRules(user_columns=()), shown="s") == ()
    with pytest.raises(SourceError, match="'zz'"):
        columns_of(objects, MemberRules(user_columns=("a", "zz")), shown="s")
    (reserved,) = columns_of([{"modality": "x"}], MemberRules(user_columns=("modality",)), shown="s")
    assert (reserved.name, reserved.source) == ("user_modality", "modality")


def test_keys_that_are_data_do_not_become_columns_without_end() -> None:
    """The number of columns is bounded whatever the JSON holds."""
    assert len(columns_of([{str(k): k for k in range(5000)}], MemberRules(), shown="s")) == 512


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("bool", 1, UNFIT),
        ("int64", True, UNFIT),
        ("int64", 2**63, UNFIT),
        ("int64", 1.0, UNFIT),
        ("double", 3, 3.0),
        ("double", 10**400, UNFIT),
        ("string", 3, UNFIT),
        ("json", {"a": [1, "é"]}, '{"a":[1,"é"]}'),
        ("list<int64>", [1, None], [1, None]),
        ("list<int64>", [1, "x"], UNFIT),
        ("list<string>", "x", UNFIT),
    ],
)
def test_values_fit_or_not(kind: str, value: object, expected: object) -> None:
    """A value becomes its column's type without loss, or is reported not to fit."""
    assert converter(kind)(value) == expected
