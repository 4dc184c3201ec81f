import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import EncodeError, FormatError
from mm_assets.fields import ScalarField
from mm_assets.testing import FieldSuite

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


class TestFloat(FieldSuite):
    fields = [ScalarField(), ScalarField("float32"), ScalarField("int8")]
    cases = [
        (1.5, 1.5),
        (3, 3.0),
        (math.nan, math.nan),
        (-math.inf, -math.inf),
        (np.float32(0.1), float(np.float32(0.1))),
    ]
    empty = (0.0, 0.0)
    maximum = (ScalarField("float32"), 3.4e38)
    past_maximum = (ScalarField("float32"), 3.5e38)
    wrong_types = ["1", True, [1.0], np.zeros(1), 1j]
    wrong_shapes = [10**400]
    bad_configs = [{"dtype": "float128"}, {"dtype": "complex64"}, {"dtype": 4}, {"dtype": None}]


class TestInteger(FieldSuite):
    fields = [ScalarField("int16"), ScalarField("uint64"), ScalarField("bool")]
    cases = [(-5, -5), (np.uint8(200), 200)]
    empty = (0, 0)
    maximum = (ScalarField("uint64"), 2**64 - 1)
    past_maximum = (ScalarField("uint64"), 2**64)
    wrong_types = [1.0, "1", False, np.float32(2)]
    wrong_shapes = [40_000, -40_000]
    bad_configs = [{"dtype": "int128"}]

    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_both_ends_of_every_width(self, dtype):
        """The least and the greatest integer of each width come back; one more is refused, never wrapped."""
        field, info = ScalarField(dtype), np.iinfo(dtype)
        for value in (int(info.min), int(info.max)):
            assert field.decode(*field.encode(value)) == value
        for value in (int(info.min) - 1, int(info.max) + 1):
            with pytest.raises(EncodeError, match="from"):
                field.encode(value)

    def test_a_stored_number_out_of_range_is_damage(self):
        """A record whose number does not fit the field's type is a FormatError, alone and in a batch."""
        wide, narrow = ScalarField("int64").encode(300), ScalarField("int8")
        with pytest.raises(FormatError):
            narrow.decode(*wide)
        with pytest.raises(FormatError):
            narrow.decode_batch(np.frombuffer(wide.metadata, np.uint8)[np.newaxis], [b""])


class TestBool(FieldSuite):
    fields = [ScalarField("bool")]
    cases = [(True, True), (np.bool_(False), False)]
    empty = (False, False)
    maximum = (ScalarField("bool"), True)
    past_maximum = (ScalarField("bool"), 2)
    wrong_types = [0, 1, "true", 1.0]
    wrong_shapes = []
    bad_configs = [{"dtype": "bool_"}]


@given(st.lists(st.none() | st.floats(width=32), max_size=20))
@settings(deadline=None, max_examples=50)
def test_a_column_is_one_array(values):
    """A batch is one array of the field's dtype, and lands in the caller's array where one is given."""
    field = ScalarField("float32")
    encoded = [None if value is None else field.encode(value) for value in values]
    records = np.zeros((len(values), 8), dtype=np.uint8)
    for row, one in zip(records, encoded, strict=True):
        if one is not None:
            row[:] = np.frombuffer(one.metadata, np.uint8)
    out = np.full(len(values), 7, dtype=np.float32)
    column, present = field.decode_batch(records, [one and one.data for one in encoded], out)
    assert column is out
    expected = np.array([0.0 if value is None else value for value in values], dtype=np.float32)
    np.testing.assert_array_equal(column, expected)
    assert present.tolist() == [value is not None for value in values]
    with pytest.raises(ValueError, match="out is"):
        field.decode_batch(records, [one and one.data for one in encoded], np.zeros(len(values)))
