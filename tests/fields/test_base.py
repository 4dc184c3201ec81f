"""What a field declares by default, and that other packages rely on nothing else."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mm_assets
from mm_assets import fields
from mm_assets.errors import ConfigError, EncodeError
from mm_assets.fields import (
    FIELD_TYPES,
    BytesField,
    DepthField,
    Field,
    JSONField,
    NDArrayField,
    Part,
    ScalarField,
    SequenceField,
    TextField,
)

PACKAGE = Path(mm_assets.__file__).parent


class Pair(TextField):
    """A composite that shows what it is assembled of."""

    PARTS = {"left": Part(), "right": Part(), "more": Part(many=True)}

    def assemble(self, contents: Any) -> Any:
        return contents


def test_composite_values_are_assembled() -> None:
    """An object becomes the value of a composite field by its parts; a part that it does not have is refused."""
    value = {"left": "x", "right": None, "more": ["p", "q"]}
    assert Pair().from_json_value(value) == {"left": "x", "more": [(0, "p"), (1, "q")]}
    with pytest.raises(EncodeError, match="found the part 'up', expected parts of Pair: left, right, more"):
        Pair().from_json_value({"up": 1})


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        (TextField(), "12", "12"),
        (JSONField(), {"a": [1]}, {"a": [1]}),
        (BytesField(), b"x", b"x"),
        (SequenceField(TextField()), ["a", None, "b"], [(0, "a"), (2, "b")]),
    ],
)
def test_json_values_become_values(field: Field, given: Any, expected: Any) -> None:
    """A JSON value is what the field encodes; a list is a sequence, whose nulls are gaps."""
    assert field.from_json_value(given) == expected
    field.check(field.from_json_value(given))


def test_lists_become_arrays_of_the_field() -> None:
    """A list of numbers takes the field's dtype where each number fits, and is refused where one does not."""
    array = SequenceField(NDArrayField(dtype="float32")).from_json_value([[1, 2]])[0][1]
    assert array.dtype == "float32"
    assert array.tolist() == [1.0, 2.0]
    for wrong in ([1.5], [300], [True], ["a"], [[1], [2, 3]]):
        with pytest.raises(EncodeError, match="found"):
            NDArrayField(dtype="int8").from_json_value(wrong)


def test_text_becomes_a_number_where_the_field_is_one() -> None:
    """A text row is passed on to a field that takes text, and parsed for a number; CSV cells may say True."""
    assert TextField().from_text(b"12") == b"12"
    assert ScalarField().from_text(b" 12\n") == 12
    with pytest.raises(EncodeError, match="found the text 'True', expected a number"):
        ScalarField("bool").from_text(b"True")
    assert ScalarField("bool").from_csv_cell("True") is True
    assert TextField().from_csv_cell("[1]") == "[1]"
    assert JSONField().from_csv_cell("[1]") == [1]


def test_facts_are_declared_where_they_are_yielded() -> None:
    """A field that overrides `facts` names their kinds, since only named kinds are read from packed files."""
    for cls in FIELD_TYPES.values():
        assert bool(cls.FACTS) == (cls.facts is not Field.facts), cls


# --- no module asks which field it is ---------------------------------------------------------------------------------

CONCRETE = {
    name
    for name, value in vars(fields).items()
    if inspect.isclass(value) and issubclass(value, Field) and value != Field
}


def names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def questions(code: str) -> Iterator[int]:
    """The lines of a module that ask for the class of a field; most modules name none, and are not parsed."""
    if CONCRETE.isdisjoint(re.findall(r"\w+", code)):
        return
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass")):
                asks = bool(names_in(node) & CONCRETE)
            case ast.Compare():
                sides, names = (node.left, *node.comparators), names_in(node)
                asks = bool("type" in names and names & CONCRETE)
                asks |= any(isinstance(side, ast.Name) and side.id in CONCRETE for side in sides)
            case ast.Dict():
                asks = any(isinstance(key, ast.Name) and key.id in CONCRETE for key in node.keys)
            case ast.match_case():
                asks, node = bool(names_in(node.pattern) & CONCRETE), node.pattern
            case _:
                asks = False
        if asks:
            yield node.lineno


def test_code_outside_fields_does_not_test_field_types() -> None:
    """Outside `fields` no module asks for a concrete field by isinstance, type, pattern or table: a method answers."""
    assert {cls.__name__ for cls in FIELD_TYPES.values()} <= CONCRETE
    modules = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "fields"]
    assert len(modules) > 100
    asked = {str(path.relative_to(PACKAGE)): list(questions(path.read_text())) for path in modules}
    assert not {path: lines for path, lines in asked.items() if lines}


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("isinstance(field, TextField)", [1]),
        ("isinstance(field, A | JSONField)", [1]),
        ("issubclass(cls, (A, ImageField))", [1]),
        ("type(field) is TextField", [1]),
        ("type(field) in (A, TextField)", [1]),
        ("made == TextField", [1]),
        ("{AudioField: 1}", [1]),
        ("match field:\n    case AudioField():\n        pass", [2]),
        ("isinstance(field, Field)\nfield == TextField()\n{'a': TextField}\ntype(field)", []),
    ],
)
def test_the_question_is_found_in_each_form(code: str, lines: list[int]) -> None:
    """The search above finds every form of the question, and nothing else."""
    assert list(questions(code)) == lines


@pytest.mark.parametrize("record", [np.dtype([("a", "u1"), ("b", "<u4")], align=True), np.dtype([("a", ">u4")])])
def test_a_record_that_is_not_packed_little_endian_is_refused(record: np.dtype[np.void]) -> None:
    """A field of the user's own whose record would be written wrongly says so when it first packs one."""

    class Own(TextField):
        metadata_type = record

    with pytest.raises(TypeError, match="expected little-endian numbers without gaps"):
        Own()._pack_record(*range(len(record)))


def test_a_choice_has_the_type_of_its_setting() -> None:
    """A dtype, which is equal to its name, is not a choice: a configuration holds JSON."""
    with pytest.raises(ConfigError, match="dtype"):
        DepthField(dtype=np.dtype("uint16"))  # type: ignore[arg-type]  # the wrong type is what is tested
