"""What every field promises, as tests: subclass `FieldSuite`, give it values, and the promises are checked."""

import itertools
import pickle
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import pytest

import mm_assets
from mm_assets.errors import ConfigError, EncodeError, FormatError
from mm_assets.fields import FIELD_NAMES, FIELD_TYPES, Encoded, Field, field_from_config

FLIPS = (0x01, 0x80, 0xFF)
MAX_FLIPPED = 400  # bytes of a payload that are flipped one by one; of a longer one, evenly spread


def same(found: Any, expected: Any) -> bool:
    """Deep equality that knows arrays, their dtypes and NaN, and tells 1 from 1.0 and True."""
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
        empty: (value, decoded value) of the least value there is.
        maximum: (field, value) at a limit.
        past_maximum: (field, value) just past it.
        wrong_types: values of types that the field does not take.
        wrong_shapes: values of the right type and wrong extent or content.
        bad_configs: configurations that must be refused.
    """

    fields: ClassVar[list[Field]]
    cases: ClassVar[list[tuple[Any, Any]]]
    empty: ClassVar[tuple[Any, Any]]
    maximum: ClassVar[tuple[Field, Any]]
    past_maximum: ClassVar[tuple[Field, Any]]
    wrong_types: ClassVar[list[Any]]
    wrong_shapes: ClassVar[list[Any]]
    bad_configs: ClassVar[list[dict[str, Any]]]

    @property
    def field(self) -> Field:
        """The configuration that the values belong to."""
        return self.fields[0]

    def test_values_come_back(self):
        """Each value is accepted by check, encodes to a record of the promised size, and decodes to what it should."""
        for value, expected in self.cases:
            self.field.check(value)
            encoded = self.field.encode(value)
            assert isinstance(encoded, Encoded)
            assert len(encoded.metadata) == self.field.metadata_type.itemsize
            assert same(self.field.decode(encoded.metadata, encoded.data), expected), expected

    def test_the_least_value_comes_back(self):
        """The emptiest value that the field takes is a value, not an absence."""
        value, expected = self.empty
        encoded = self.field.encode(value)
        assert same(self.field.decode(encoded.metadata, encoded.data), expected)

    def test_the_limit_is_inclusive(self):
        """A value at a limit is taken and comes back, one just past it is refused by encode and by check."""
        field, value = self.maximum
        field.check(value)
        field.decode(*field.encode(value))
        field, value = self.past_maximum
        with pytest.raises(EncodeError):
            field.encode(value)
        with pytest.raises(EncodeError):
            field.check(value)

    def test_wrong_types_are_refused(self):
        """A value of another type is an EncodeError that names the field, from encode and from check alike."""
        for value in [None, object(), *self.wrong_types]:
            with pytest.raises(EncodeError, match=type(self.field).__name__):
                self.field.encode(value)
            with pytest.raises(EncodeError):
                self.field.check(value)

    def test_wrong_extents_are_refused(self):
        """A value of the right type but wrong extent or content is an EncodeError that says what was expected."""
        for value in self.wrong_shapes:
            with pytest.raises(EncodeError, match="expected"):
                self.field.encode(value)
            with pytest.raises(EncodeError):
                self.field.check(value)

    def test_payloads_are_the_same_each_time(self):
        """Encoding is deterministic: the same value gives the same bytes, also from a copied field."""
        copy = pickle.loads(pickle.dumps(self.field))
        for value, _ in self.cases:
            first, second = self.field.encode(value), copy.encode(value)
            assert bytes(first.metadata) == bytes(second.metadata)
            assert bytes(first.data) == bytes(second.data)

    def test_any_buffer_decodes(self):
        """Bytes, bytearrays, memoryviews at odd offsets and NumPy records decode alike."""
        for value, expected in self.cases:
            metadata, data = self.field.encode(value)
            shifted = memoryview(b"x" + bytes(data))[1:]
            record = np.frombuffer(metadata, dtype=self.field.metadata_type)[0]
            assert same(self.field.decode(bytearray(metadata), bytearray(data)), expected)
            assert same(self.field.decode(memoryview(metadata), shifted), expected)
            assert same(self.field.decode(record, memoryview(data)), expected)

    def test_a_batch_is_its_values(self):
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

    def test_a_batch_of_other_rows_is_refused(self):
        """Records and data that do not fit one another are the caller's error."""
        records = np.zeros((2, self.field.metadata_type.itemsize), dtype=np.uint8)
        with pytest.raises(ValueError, match="records"):
            self.field.decode_batch(records, [None])

    def test_damage_anywhere_is_noticed_or_harmless(self):
        """With any byte flipped, cut off or added, a payload decodes to some value or raises FormatError."""
        for value, _ in self.cases[:2]:
            metadata, data = self.field.encode(value)
            for broken_metadata, broken_data in damaged(bytes(metadata), bytes(data)):
                try:
                    self.field.decode(broken_metadata, broken_data)
                except FormatError as error:
                    assert error.path == "<payload>"  # noqa: PT017  # no error is as good

    def test_a_record_of_another_size_is_refused(self):
        """A metadata record that is short or long is a FormatError before anything else is looked at."""
        metadata, data = self.field.encode(self.cases[0][0])
        for size in (0, len(metadata) - 1, len(metadata) + 8):
            with pytest.raises(FormatError):
                self.field.decode(bytes(metadata).ljust(size, b"\0")[:size], data)

    def test_configuration_comes_back(self):
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

    def test_a_file_keeps_the_configuration(self, tmp_path):
        """A packed file's schema restores an equal field, which reads the file's value; an absent value is None."""
        for place, field in enumerate(self.fields):
            value = self.cases[0][0] if place == 0 else None
            for form in ("mult", "mstr"):
                path = tmp_path / f"{place}.{form}"
                with mm_assets.create(path, {"value": field}) as writer:
                    writer.write("absent", {"value": None})
                    writer.write("sample", {"value": value})
                with mm_assets.open(path) as dataset:
                    assert dataset.fields == {"value": field}
                    assert dataset[0]["value"] is None
                    assert dataset[1]["value"] is None or same(dataset[1]["value"], self.cases[0][1])

    def test_bad_configurations_are_refused(self):
        """An unknown setting or a wrong value is a ConfigError."""
        for config in [{"no_such_setting": 1}, *self.bad_configs]:
            with pytest.raises(ConfigError):
                field_from_config(type(self.field).__name__, config)

    def test_fields_are_immutable(self):
        """A field cannot be changed after it is made."""
        name = next(iter(self.field.config), "anything")
        with pytest.raises(AttributeError):
            setattr(self.field, name, None)

    def test_it_is_registered(self):
        """The registry knows the class by its type id and by its name, and its record obeys the rules."""
        assert FIELD_TYPES[self.field.TYPE_ID] is type(self.field)
        assert FIELD_NAMES[type(self.field).__name__] is type(self.field)
        for field in self.fields:
            dtype = field.metadata_type
            assert dtype.itemsize >= 8
            assert dtype.itemsize % 8 == 0
            assert not dtype.isalignedstruct
            packed = np.dtype([(name, dtype.fields[name][0]) for name in dtype.names])
            assert packed == dtype, "no hidden padding"
            assert all(dtype.fields[name][0].base.byteorder in "|<=" for name in dtype.names)

    def test_bytes_that_are_kept_are_kept(self):
        """Where the field says that it keeps bytes, the payload's data is the bytes value."""
        for value, _ in self.cases:
            if isinstance(value, bytes) and self.field.keeps_bytes:
                assert bytes(self.field.encode(value).data) == value


def damaged(metadata: bytes, data: bytes) -> Iterable[tuple[bytes, bytes]]:
    """A payload with one byte flipped, in turn, and with its data cut off and extended."""
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
