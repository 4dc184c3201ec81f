"""What every field promises, as tests: subclass `FieldSuite` and give it values.

Example:
    class TestPose(FieldSuite):
        fields = [PoseField(), PoseField(unit="cm")]
        cases = [((1.0, 2.0), (1.0, 2.0))]
        wrong_types = ["a pose"]
        wrong_shapes = [(1.0,)]
        bad_configs = [{"unit": "inch"}]
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import mm_assets
from mm_assets.dataset.manifest import FORMATS
from mm_assets.display import KINDS, MAX_DATA, Content, value_item
from mm_assets.errors import ConfigError, EncodeError, FormatError, LimitError
from mm_assets.fields import FIELD_NAMES, FIELD_TYPES, ArraySpec, Encoded, Field, SequenceField, field_from_config
from mm_assets.fields.base import StoredPart
from mm_assets.fields.parts import Path as PartPath
from mm_assets.fields.parts import as_text, take

__all__ = ["FieldSuite", "damaged", "flipped", "same"]

FLIPS = (0x01, 0x80, 0xFF)
MAX_FLIPPED = 400  # bytes of a payload that are flipped one by one; of a longer one, evenly spread
MAX_TRUNCATED = 24  # sizes at which a payload is truncated


def same(found: Any, expected: Any) -> bool:
    """Deep equality of values with arrays, by dtype and with NaN equal to NaN; 1, 1.0 and True differ."""
    if isinstance(expected, np.ndarray):
        return (
            isinstance(found, np.ndarray)
            and found.dtype == expected.dtype
            and np.array_equal(found, expected, equal_nan=expected.dtype.kind in "fc")
        )
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, float) and expected != expected:
        return isinstance(found, float) and found != found
    return type(found) is type(expected) and bool(found == expected)


class FieldSuite:
    """Tests that every field passes.

    Attributes:
        fields: differently configured instances; the first is the one that the values belong to.
        cases: (value, decoded value) pairs, a small one first.
        wrong_types: values of types that the field does not take.
        wrong_shapes: values of the right type and wrong extent or content.
        bad_configs: configurations that must be refused.
        empty: (value, decoded value) of the smallest value there is, where that is special.
        maximum: (field, value) at a limit, where the field has one.
        past_maximum: (field, value) just past it.
    """

    fields: ClassVar[list[Field]]
    cases: ClassVar[list[tuple[Any, Any]]]
    wrong_types: ClassVar[list[Any]]
    wrong_shapes: ClassVar[list[Any]]
    bad_configs: ClassVar[list[dict[str, Any]]]
    empty: ClassVar[tuple[Any, Any] | None] = None
    maximum: ClassVar[tuple[Field, Any] | None] = None
    past_maximum: ClassVar[tuple[Field, Any] | None] = None

    @property
    def field(self) -> Field:
        """The configuration that the values belong to."""
        return self.fields[0]

    def test_values_come_back(self) -> None:
        """Each value is accepted by check, encodes to a record of the promised size, and decodes as expected."""
        for value, expected in self.cases:
            self.field.check(value)
            encoded = self.field.encode(value)
            assert isinstance(encoded, Encoded)
            assert len(encoded.metadata) == self.field.metadata_type.itemsize
            assert same(self.field.decode(encoded.metadata, encoded.data), expected), expected

    def test_the_least_value_comes_back(self) -> None:
        """The smallest value that the field takes is a value, not an absent one."""
        value, expected = self.empty or self.cases[0]
        encoded = self.field.encode(value)
        assert same(self.field.decode(encoded.metadata, encoded.data), expected)

    def test_the_limit_is_inclusive(self) -> None:
        """A value at a limit is taken and comes back, one just past it is refused by encode and by check."""
        assert (self.maximum is None) == (self.past_maximum is None), "a limit has a value on either side"
        if self.maximum is not None:
            field, value = self.maximum
            field.check(value)
            field.decode(*field.encode(value))
        if self.past_maximum is not None:
            field, value = self.past_maximum
            _refuses(field, value)

    def test_wrong_types_are_refused(self) -> None:
        """A value of another type is an EncodeError that names the field, from encode and from check alike."""
        for value in [None, object(), *self.wrong_types]:
            _refuses(self.field, value, match=type(self.field).__name__)

    def test_wrong_extents_are_refused(self) -> None:
        """A value of the right type but wrong extent or content is an EncodeError that says what was expected."""
        for value in self.wrong_shapes:
            _refuses(self.field, value)

    def test_payloads_are_the_same_each_time(self) -> None:
        """Encoding is deterministic: the same value gives the same bytes, also from a copied field."""
        copy = pickle.loads(pickle.dumps(self.field))
        for value, _ in self.cases:
            first, second = self.field.encode(value), copy.encode(value)
            assert bytes(first.metadata) == bytes(second.metadata)
            assert bytes(first.data) == bytes(second.data)

    def test_any_buffer_decodes(self) -> None:
        """Bytes, bytearrays, memoryviews at odd offsets and NumPy records decode alike."""
        for value, expected in self.cases:
            metadata, data = self.field.encode(value)
            shifted = memoryview(b"x" + bytes(data))[1:]
            record = np.frombuffer(metadata, dtype=self.field.metadata_type)[0]
            assert same(self.field.decode(bytearray(metadata), bytearray(data)), expected)
            assert same(self.field.decode(memoryview(metadata), shifted), expected)
            assert same(self.field.decode(record, memoryview(data)), expected)

    def test_a_batch_is_its_values(self) -> None:
        """A batch decodes to the values one by one, absent rows masked and in their places."""
        encoded = [self.field.encode(value) for value, _ in self.cases]
        rows = [encoded[0], None, *encoded[1:], None]
        blank = bytes(self.field.metadata_type.itemsize)
        joined = b"".join(row.metadata if row else blank for row in rows)
        records = np.frombuffer(joined, dtype=np.uint8).reshape(len(rows), -1)
        values, present = self.field.decode_batch(records, [row.data if row else None for row in rows])
        assert present.tolist() == [row is not None for row in rows]
        for value, row in zip(values, rows, strict=True):
            if row is not None:
                one = self.field.decode(row.metadata, row.data)
                assert same(value.item() if isinstance(value, np.generic) else value, one)
            elif isinstance(values, list):
                assert value is None
            else:
                assert not np.any(value)

    def test_a_batch_of_other_rows_is_refused(self) -> None:
        """Records and data that do not fit one another are the caller's error."""
        records = np.zeros((2, self.field.metadata_type.itemsize), dtype=np.uint8)
        with pytest.raises(ValueError, match="records"):
            self.field.decode_batch(records, [None])

    def test_damage_anywhere_is_noticed_or_harmless(self) -> None:
        """With any byte flipped, removed or added, a payload decodes, or raises FormatError or LimitError."""
        for value, _ in self.cases[:2]:
            metadata, data = self.field.encode(value)
            for broken_metadata, broken_data in damaged(bytes(metadata), bytes(data)):
                try:
                    self.field.decode(broken_metadata, broken_data)
                except (FormatError, LimitError) as error:
                    assert error.path == "<payload>"  # noqa: PT017  # the bytes may also be valid

    def test_judging_agrees_with_decoding(self) -> None:
        """check_decodable accepts a whole payload, and refuses a truncated one exactly when decode does."""
        for value, _ in self.cases[:3]:
            metadata, data = self.field.encode(value)
            self.field.check_decodable(metadata, data)
            step = max(1, len(data) // MAX_TRUNCATED)
            for size in {*range(0, len(data), step), len(data) - 1, len(data)} - {-1}:
                cut = bytes(data[:size])
                assert _is_damaged(self.field.check_decodable, metadata, cut) == _is_damaged(
                    self.field.decode, metadata, cut
                ), size

    def test_a_record_of_another_size_is_refused(self) -> None:
        """A metadata record that is short or long is a FormatError before anything else is looked at."""
        metadata, data = self.field.encode(self.cases[0][0])
        for size in (0, len(metadata) - 1, len(metadata) + 8):
            with pytest.raises(FormatError):
                self.field.decode(bytes(metadata).ljust(size, b"\0")[:size], data)

    def test_configuration_comes_back(self) -> None:
        """A field's configuration is JSON and restores an equal field; other configurations are not equal."""
        for field in self.fields:
            config = field.config
            restored = field_from_config(type(field).__name__, pickle.loads(pickle.dumps(config)))
            assert restored == field
            assert hash(restored) == hash(field)
            assert repr(restored) == repr(field)
            assert pickle.loads(pickle.dumps(field)) == field
        for one, other in itertools.combinations(self.fields, 2):
            assert one != other

    def test_a_file_keeps_the_configuration(self, tmp_path: Path) -> None:
        """A packed file's schema restores an equal field, which reads the file's value; an absent value is None."""
        for place, field in enumerate(self.fields):
            value = self.cases[0][0] if place == 0 else None
            for form in FORMATS:
                path = tmp_path / f"{place}.{form}"
                with mm_assets.create(path, {"value": field}) as writer:
                    writer.write("absent", {"value": None})
                    writer.write("sample", {"value": value})
                with mm_assets.open(path) as dataset:
                    assert dataset.fields == {"value": field}
                    assert dataset[0]["value"] is None
                    assert dataset[1]["value"] is None or same(dataset[1]["value"], self.cases[0][1])

    def test_the_empty_value_is_like_the_others(self) -> None:
        """Every configuration has a value without elements, whose arrays have the dtype and rank of the others'."""
        for field in self.fields:
            empty, layout = field.empty_value, field.value_layout
            if isinstance(layout, ArraySpec) and isinstance(empty, np.ndarray):
                assert (empty.dtype, empty.ndim) == (layout.dtype, len(layout.shape))
        values = [self.field.decode(*self.field.encode(value)) for value, _ in self.cases]
        for path, empty in _arrays_by_path(self.field.empty_value):
            found = {
                (array.dtype, array.ndim) for value in values for at, array in _arrays_by_path(value) if at == path
            }
            if len(found) == 1:  # otherwise the settings leave it open
                assert found == {(empty.dtype, empty.ndim)}, path

    def test_arrays_may_be_written_to(self, tmp_path: Path) -> None:
        """However a value is read, in a sequence too, its arrays may be written to, and no two values share memory."""
        fields = {"value": self.field}
        if self.field.item_field is None:
            fields["items"] = SequenceField(self.field)
        values = [value for value, _ in self.cases for _ in range(2)]
        with mm_assets.create(tmp_path / "x.mult", fields) as writer:
            for number, value in enumerate(values):
                sample = {"value": value, "items": [(0, value), (3, value)]}
                writer.write(str(number), {name: sample[name] for name in fields})
        every = range(len(values))
        with mm_assets.open(tmp_path / "x.mult") as dataset:
            read: list[Any] = [dataset[0], dataset[0], dataset[every], list(dataset), dataset.__getitems__(every)]
            for name in fields:
                read += [dataset.read_modality(name, [*every, 0], threads=2)]
                read += [dataset.read_batch([*every, 0], [name], threads=threads)[name].values for threads in (0, 2)]
            loader = mm_assets.MultimodalLoader(dataset, batch_size=2, shuffle=False, num_workers=2)
            read += loader
        arrays = [array for _, array in _arrays_by_path(read) if array.size]
        assert all(array.flags.writeable for array in arrays)
        spans = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "arrays share memory"

    def test_parts_are_those_of_the_values(self, tmp_path: Path) -> None:
        """Each attribute of a value, and each item of a sequence, is read by its name as the value has it."""
        with mm_assets.create(tmp_path / "x.mstr", {"value": self.field}) as writer:
            writer.write("absent", {"value": None})
            for number, (value, _) in enumerate(self.cases):
                writer.write(str(number), {"value": value})
        with mm_assets.open(tmp_path / "x.mstr") as dataset:
            values = [sample["value"] for sample in dataset]
            parts = [set(_parts_of(value)) for value in values]
            for path in sorted(set().union(*parts), key=str):
                rows = [row for row, value in enumerate(values) if value is None or path in parts[row]]
                found = dataset.read_modality("value" + as_text(path), rows)
                assert all(same(one, take(values[row], path)) for one, row in zip(found, rows, strict=True)), path

    def test_parts_of_damaged_payloads_are_damaged_or_harmless(self) -> None:
        """Of a damaged payload a part decodes, or raises FormatError or LimitError, and reads nothing outside of it."""
        for value, decoded in self.cases[:2]:
            metadata, data = self.field.encode(value)
            stored = [part for path in _parts_of(decoded) if (part := self.field.stored_part(path)) is not None]
            for part in {part.payload: part for part in stored}.values():
                for broken_metadata, broken_data in damaged(bytes(metadata), bytes(data)):
                    with contextlib.suppress(FormatError, LimitError):
                        place = _place_of(part, broken_metadata, broken_data)
                        if place is not None:
                            part.field.decode(*place)

    def test_bad_configurations_are_refused(self) -> None:
        """An unknown setting or a wrong value is a ConfigError."""
        for config in [{"no_such_setting": 1}, *self.bad_configs]:
            with pytest.raises(ConfigError):
                field_from_config(type(self.field).__name__, config)

    def test_fields_are_immutable(self) -> None:
        """A field cannot be changed after it is made."""
        name = next(iter(self.field.config), "anything")
        with pytest.raises(AttributeError):
            setattr(self.field, name, None)

    def test_it_is_registered(self) -> None:
        """The registry knows the class by its type id and by its name, and its record follows the rules."""
        assert FIELD_TYPES[self.field.TYPE_ID] is type(self.field)
        assert FIELD_NAMES[type(self.field).__name__] is type(self.field)
        for field in self.fields:
            dtype = field.metadata_type
            assert dtype.itemsize >= 8
            assert dtype.itemsize % 8 == 0
            assert not dtype.isalignedstruct
            names = dtype.names or ()
            assert np.dtype([(name, dtype[name]) for name in names]) == dtype, "no hidden padding"
            assert all(dtype[name].base.byteorder in "|<=" for name in names)

    def test_a_declaration_is_complete(self) -> None:
        """The settings that a pack plan stores make an equal field, and do so again from a plan."""
        for field in self.fields:
            declared = field.declared_config(field.config)
            restored = field_from_config(type(field).__name__, declared)
            assert restored == field
            assert restored.declared_config(declared) == declared

    def test_a_column_holds_the_values(self, tmp_path: Path) -> None:
        """As an Arrow column there is a row for each value, null where it is absent, of a type that does not vary."""
        path = tmp_path / "x.mstr"
        with mm_assets.create(path, {"value": self.field}) as writer:
            writer.write("absent", {"value": None})
            for number, (value, _) in enumerate(self.cases):
                writer.write(str(number), {"value": value})
        with mm_assets.open(path) as dataset:
            table = dataset.to_arrow()
            none = dataset.to_arrow([])
        table.validate(full=True)
        assert table.schema == none.schema
        assert table.column("value").is_valid().to_pylist() == [False] + [True] * len(self.cases)

    def test_facts_are_of_the_declared_kinds(self) -> None:
        """`facts` yields what `FACTS` names; damage is a FormatError, as in decoding."""
        for value, _ in self.cases:
            metadata, data = self.field.encode(value)
            assert {type(fact) for fact in self.field.facts(metadata, data)} <= set(self.field.FACTS)
            for broken_metadata, broken_data in itertools.islice(damaged(bytes(metadata), bytes(data)), 100):
                with contextlib.suppress(FormatError, LimitError):
                    list(self.field.facts(broken_metadata, broken_data))

    def test_values_are_shown(self) -> None:
        """What people see of each value, damaged ones too, is of a known kind and within its bounds."""
        for value, _ in self.cases:
            metadata, data = (bytes(part) for part in self.field.encode(value))
            for record, content in [(metadata, data), *itertools.islice(damaged(metadata, data), 60)]:
                item = value_item("it", self.field, Content.of(content), record)
                assert item.kind in KINDS
                assert len(json.dumps(dict(item.data), allow_nan=False, ensure_ascii=False).encode()) <= MAX_DATA

    def test_items_are_payloads_of_their_field(self) -> None:
        """The items of a sequence are payloads that its item field decodes; of any other field, the payload itself."""
        for value, _ in self.cases:
            metadata, data = self.field.encode(value)
            for _, record, content in self.field.item_payloads(metadata, data):
                (self.field.item_field or self.field).decode(record, content)
            if self.field.item_field is not None:
                items = list(self.field.item_payloads(metadata, data))
                positions, records = self.field.item_table(metadata, Content.of(bytes(data)))
                assert positions.tolist() == [position for position, _, _ in items]
                assert records.tobytes() == b"".join(record for _, record, _ in items)

    def test_bytes_that_are_kept_are_kept(self) -> None:
        """Where the field says that it keeps bytes, the payload's data is the bytes value."""
        for value, _ in self.cases:
            if isinstance(value, bytes) and self.field.keeps_bytes:
                assert bytes(self.field.encode(value).data) == value


def _arrays_by_path(value: Any, path: tuple[Any, ...] = ()) -> Iterable[tuple[tuple[Any, ...], np.ndarray[Any, Any]]]:
    """Yields the arrays in a value, however deep, each with the keys and attributes that lead to it."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, np.ndarray):
        yield path, value
    elif isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    for key, part in parts:
        yield from _arrays_by_path(part, (*path, key))


def _parts_of(value: Any) -> list[PartPath]:
    """The paths to the attributes of a value, and to the items of lists."""
    if isinstance(value, list):
        return [(0,), (-1,), (len(value),)]
    if not dataclasses.is_dataclass(value):
        return []
    parts: list[PartPath] = []
    for field in dataclasses.fields(value):
        parts += [(field.name,), *((field.name, *path) for path in _parts_of(getattr(value, field.name)))]
    return parts


def _place_of(stored: StoredPart, metadata: bytes, data: bytes) -> tuple[bytes, bytes] | None:
    """Record and data of a part, which is found without reading outside of the data."""
    locating = stored.locate(metadata, len(data))
    answer: Any = None
    while True:
        try:
            offset, size = locating.send(answer)
        except StopIteration as end:
            if end.value is None:
                return None
            record, offset, size = end.value
            assert 0 <= offset <= offset + size <= len(data)
            return bytes(record), data[offset : offset + size]
        assert 0 <= offset <= offset + size <= len(data)
        answer = data[offset : offset + size]


def _refuses(field: Field, value: Any, *, match: str = "expected") -> None:
    with pytest.raises(EncodeError, match=match):
        field.encode(value)
    with pytest.raises(EncodeError):
        field.check(value)


def _is_damaged(judge: Callable[[bytes, bytes], Any], metadata: bytes, data: bytes) -> bool:
    try:
        judge(metadata, data)
    except (FormatError, LimitError):
        return True
    return False


def damaged(metadata: bytes, data: bytes) -> Iterable[tuple[bytes, bytes]]:
    """A payload with one byte flipped, in turn, and with its data truncated and extended."""
    step = max(1, len(data) // MAX_FLIPPED)
    for index, mask in itertools.product(range(len(metadata)), FLIPS):
        yield flipped(metadata, index, mask), data
    for index, mask in itertools.product(range(0, len(data), step), FLIPS):
        yield metadata, flipped(data, index, mask)
    for size in range(0, len(data), step):
        yield metadata, data[:size]
    for extra in (1, 8, 4096):
        yield metadata, data + bytes(extra)
    yield b"\xff" * len(metadata), data
    yield bytes(len(metadata)), data


def flipped(data: bytes, index: int, mask: int) -> bytes:
    """A copy with one byte changed."""
    return data[:index] + bytes([data[index] ^ mask]) + data[index + 1 :]
