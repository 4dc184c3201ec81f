from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import ConfigError, EncodeError, FormatError
from mm_assets.fields import ImageField, JSONField, NDArrayField, SequenceField, TextField, field_from_config
from mm_assets.testing import FieldSuite

from .conftest import picture


class TestSequenceField(FieldSuite):
    fields = [SequenceField(TextField()), SequenceField(ImageField(channels=3)), SequenceField(ImageField())]
    cases = [
        ([(0, "a"), (3, ""), (4, "déjà")], [(0, "a"), (3, ""), (4, "déjà")]),
        ([[5, b"bytes"]], [(5, "bytes")]),
        (((np.int32(2), "x"),), [(2, "x")]),
    ]
    empty = ([], [])
    maximum = (SequenceField(TextField()), [(2**31 - 1, "last")])
    past_maximum = (SequenceField(TextField()), [(2**31, "past")])
    wrong_types = ["text", b"bytes", {0: "a"}, 5, [1, 2], [(0,)], [("0", "a")], [(0.0, "a")], [(True, "a")]]
    wrong_shapes = [[(-1, "a")], [(0, "a"), (0, "b")], [(1, "a"), (0, "b")], [(0, None)], [(0, 5)]]
    bad_configs = [
        {},
        {"inner": "TextField"},
        {"inner": {"type": "NoField"}},
        {"inner": {"type": ["TextField"]}},
        {"inner": {"type": "TextField", "config": 5}},
        {"inner": {"type": "TextField", "extra": 1}},
        {"inner": {"type": "SequenceField", "config": {"inner": {"type": "TextField"}}}},
    ]

    def test_a_generator_is_taken_once(self):
        """Items may come from a generator."""
        pairs = ((i, str(i)) for i in range(3))
        assert self.field.decode(*self.field.encode(pairs)) == [(0, "0"), (1, "1"), (2, "2")]

    @given(st.dictionaries(st.integers(0, 2**31 - 1), st.text(st.characters(codec="utf-8")), max_size=8))
    @settings(deadline=None, max_examples=50)
    def test_any_sequence_round_trips(self, items):
        """Items come back at their positions, and each alone is what it is in the list."""
        pairs = sorted(items.items())
        metadata, data = self.field.encode(pairs)
        assert self.field.decode(metadata, data) == pairs
        for k in range(-len(pairs), len(pairs)):
            assert self.field.decode_item(metadata, data, k) == pairs[k]
        stored = self.field.item_payloads(metadata, data)
        assert [(position, bytes(item).decode()) for position, _, item in stored] == pairs
        for k in (len(pairs), -len(pairs) - 1):
            with pytest.raises(IndexError):
                self.field.decode_item(metadata, data, k)

    def test_all_payloads_cost_one_lookup_of_the_tables(self):
        """Giving every item's payload checks the tables once, not once for each item."""
        metadata, data = self.field.encode([(i, str(i)) for i in range(1000)])
        opened = SequenceField._open
        with mock.patch.object(SequenceField, "_open", autospec=True, side_effect=opened) as spy:
            items = list(self.field.item_payloads(metadata, data))
        assert [bytes(stored).decode() for _, _, stored in items] == [str(i) for i in range(1000)]
        assert spy.call_count == 1
        with pytest.raises(FormatError):
            list(self.field.item_payloads(metadata, data[:-1]))

    def test_one_item_is_read_alone(self):
        """decode_item decodes its item and no other, so damage elsewhere does not matter."""
        field = SequenceField(ImageField())
        pictures = [picture(seed=i) for i in range(3)]
        metadata, data = field.encode(list(enumerate(pictures)))
        decode = ImageField.decode
        with mock.patch.object(ImageField, "decode", autospec=True, side_effect=decode) as spy:
            position, pixels = field.decode_item(metadata, data, 1)
        assert (position, spy.call_count) == (1, 1)
        np.testing.assert_array_equal(pixels, pictures[1])
        broken = bytes(data[:-200]) + bytes(100) + bytes(data[-100:])
        np.testing.assert_array_equal(field.decode_item(metadata, broken, 0)[1], pictures[0])
        with pytest.raises(FormatError, match="item 2"):
            field.decode(metadata, broken)

    def test_an_error_names_the_item(self):
        """The error of an inner field names the item's position."""
        with pytest.raises(EncodeError, match=r"position 7.*TextField"):
            self.field.encode([(0, "a"), (7, 5)])
        with pytest.raises(EncodeError, match=r"position 7.*TextField"):
            self.field.check([(0, "a"), (7, 5)])

    def test_items_of_another_field_are_refused(self):
        """A payload of images is not a sequence of texts."""
        payload = SequenceField(NDArrayField()).encode([(0, np.zeros(2))])
        with pytest.raises(FormatError, match="field's type"):
            self.field.decode(*payload)

    def test_deep_json_is_read_from_a_deep_stack(self):
        """Values are made writable as their field does it: nothing walks through JSON, which may be 500 lists deep."""
        value = 1
        for _ in range(500):
            value = [value]
        field = SequenceField(JSONField())
        pairs = field.decode(*field.encode([(0, value)]))

        def read(depth):
            return read(depth - 1) if depth else field.writable(pairs)

        assert read(500)[0][1] is pairs[0][1]

    def test_sequences_do_not_nest(self):
        """A sequence of sequences is refused, so that hostile configurations cannot recurse."""
        with pytest.raises(ConfigError, match="other than SequenceField"):
            SequenceField(SequenceField(TextField()))
        nested = {"type": "TextField", "config": {}}
        for _ in range(5000):
            nested = {"type": "SequenceField", "config": {"inner": nested}}
        with pytest.raises(ConfigError):
            field_from_config("SequenceField", {"inner": nested})
