import io
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mm_assets.errors import ConfigError, EncodeError, FormatError
from mm_assets.fields import NDArrayField
from mm_assets.testing import FieldSuite


def npy(array, **options):
    target = io.BytesIO()
    np.lib.format.write_array(target, array, **options)
    return target.getvalue()


MATRIX = np.arange(6, dtype="<f4").reshape(2, 3)


class TestNDArrayField(FieldSuite):
    fields = [
        NDArrayField(),
        NDArrayField("float32"),
        NDArrayField("float32", (None, 3)),
        NDArrayField(shape=()),
        NDArrayField("bfloat16"),
    ]
    cases = [
        (MATRIX, MATRIX),
        (np.arange(3, dtype=">i8"), np.arange(3, dtype="<i8")),
        (MATRIX.T, np.ascontiguousarray(MATRIX.T)),
        (np.array(True), np.array(True)),
        (np.array([1 + 2j, np.nan], dtype=np.complex64), np.array([1 + 2j, np.nan], dtype=np.complex64)),
        (npy(np.asfortranarray(MATRIX)), MATRIX),
        (npy(np.array(5, dtype=">u2"), version=(2, 0)), np.array(5, dtype="<u2")),
    ]
    empty = (np.zeros((0, 4, 0), dtype=np.float16), np.zeros((0, 4, 0), dtype=np.float16))
    maximum = (NDArrayField(), np.zeros((1,) * 8))
    past_maximum = (NDArrayField(), np.zeros((1,) * 9))
    wrong_types = ["text", [1, 2], 5, np.float32(1)]
    wrong_shapes = [
        np.array(["a"]),
        np.array([None]),
        np.zeros(1, dtype=[("a", "<f4")]),
        np.zeros(1, dtype="M8[s]"),
        b"",
        b"\x93NUMPY",
        npy(MATRIX)[:-1],
        npy(MATRIX) + b"\0",
        npy(MATRIX).replace(b"(2, 3)", b"(2,-3)"),
        npy(MATRIX).replace(b"(2, 3)", b"(9**9)"),
        npy(np.zeros(1, dtype=[("a", "<f4")])),
        npy(np.array([None]), allow_pickle=True),
    ]
    bad_configs = [
        {"dtype": "no such"},
        {"dtype": "object"},
        {"dtype": "longdouble"},
        {"dtype": 3j},
        {"shape": [1] * 9},
        {"shape": [-1]},
        {"shape": [1.5]},
        {"shape": 3},
    ]

    @given(
        hnp.arrays(
            dtype=st.one_of(
                hnp.boolean_dtypes(),
                hnp.integer_dtypes(endianness="?"),
                hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
                hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
            ),
            shape=hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4),
        )
    )
    @settings(deadline=None, max_examples=80)
    def test_any_array_round_trips(self, array):
        """Every array of a kind that the field takes comes back equal, read-only, in little-endian order."""
        found = self.field.decode(*self.field.encode(array))
        assert found.dtype == array.dtype.newbyteorder("<")
        assert found.shape == array.shape
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, array)

    def test_decoding_does_not_copy(self):
        """The decoded array is a view of the payload, and cannot write to it."""
        metadata, data = self.field.encode(MATRIX)
        buffer = bytearray(data)
        found = self.field.decode(metadata, buffer)
        buffer[0:4] = np.float32(9).tobytes()
        assert found[0, 0] == 9
        with pytest.raises(ValueError, match="read-only"):
            found[0, 0] = 1

    def test_a_declared_type_is_held_to(self):
        """An array of another dtype or shape than the field's is refused on the way in, and damage on the way out."""
        field = NDArrayField("float32", (None, 3))
        for wrong in (MATRIX.astype(np.float64), MATRIX.T, MATRIX[0]):
            with pytest.raises(EncodeError, match="expected"):
                field.encode(wrong)
            with pytest.raises(FormatError):
                field.decode(*self.field.encode(wrong))
        np.testing.assert_array_equal(field.decode(*field.encode(MATRIX)), MATRIX)

    def test_a_fixed_shape_is_one_array(self):
        """With dtype and shape fixed, a batch is one array."""
        field = NDArrayField("float32", (2, 3))
        metadata, data = field.encode(MATRIX)
        records = np.stack([np.frombuffer(metadata, np.uint8)] * 2)
        batch, present = field.decode_batch(records, [None, data])
        assert batch.shape == (2, 2, 3)
        np.testing.assert_array_equal(batch[1], MATRIX)
        assert present.tolist() == [False, True]

    @given(st.binary(max_size=200))
    @settings(deadline=None, max_examples=100)
    def test_hostile_npy_headers(self, tail):
        """Whatever follows the .npy magic, the field takes it or raises EncodeError."""
        for start in (b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x00\x76\x00{'descr': ", npy(MATRIX)[:30]):
            try:
                self.field.encode(start + tail)
            except EncodeError as error:
                assert "expected" in str(error)  # noqa: PT017  # the bytes may also be valid


def _number(pattern: int, num_exponent: int, bias: int) -> Fraction:
    """The number of a pattern of 8 bits that is finite."""
    num_fraction = 7 - num_exponent
    exponent, fraction = (pattern & 127) >> num_fraction, Fraction(pattern & (2**num_fraction - 1), 2**num_fraction)
    size = (1 + fraction) * Fraction(2) ** (exponent - bias) if exponent else fraction * Fraction(2) ** (1 - bias)
    return -size if pattern > 127 else size


@pytest.mark.parametrize(
    ("dtype", "num_exponent", "bias", "nan", "infinite"),
    [
        ("float8_e4m3fn", 4, 7, {0x7F, 0xFF}, set()),
        ("float8_e4m3fnuz", 4, 8, {0x80}, set()),
        ("float8_e5m2", 5, 15, {*range(0x7D, 0x80), *range(0xFD, 0x100)}, {0x7C, 0xFC}),
        ("float8_e5m2fnuz", 5, 16, {0x80}, set()),
    ],
)
@pytest.mark.parametrize("descr", ["|V1", "<f1"])
def test_every_float_of_8_bits_is_exact_as_float16(dtype, num_exponent, bias, nan, infinite, descr):
    """Each of the 256 patterns, in a file as `np.save` writes it, decodes to its number in the declared format."""
    content = npy(np.arange(256, dtype="u1").view("V1")).replace(b"'|V1'", f"'{descr}'".encode())
    field = NDArrayField(dtype=dtype)
    found = field.decode(*field.encode(content))
    assert found.dtype == np.float16
    for pattern, value in enumerate(found.tolist()):
        if pattern in nan:
            assert np.isnan(value)
        elif pattern in infinite:
            assert value == (-np.inf if pattern > 127 else np.inf)
        else:
            assert Fraction(value) == _number(pattern, num_exponent, bias)
            assert np.signbit(value) == (pattern > 127)


@pytest.mark.parametrize("shape", [(65536,), (256, 256), (0,), (2, 0)])
def test_every_bfloat16_is_exact_as_float32(shape):
    """Each of the 65,536 patterns is the float32 whose upper half it is, NaN payloads included, in any order."""
    bits = np.arange(np.prod(shape), dtype="<u2").reshape(shape)
    field = NDArrayField(dtype="bfloat16", shape=(None,) * len(shape))
    expected = (bits.astype("<u4") << 16).view("<f4")
    for value in (bits.view("V2"), npy(bits.view("V2")), npy(np.asfortranarray(bits.view("V2")))):
        found = field.decode(*field.encode(value))
        assert found.dtype == np.float32
        assert found.shape == shape
        assert found.tobytes() == expected.tobytes()
    assert field.decode(*field.encode(expected)).tobytes() == expected.tobytes()  # its own values are taken again


def test_small_floats_are_never_guessed():
    """Opaque elements without a declaration are refused with a hint, as are other arrays of that size with one."""
    opaque = np.zeros(3, "V2")
    with pytest.raises(EncodeError, match=r"\|V2 .*if its elements are bfloat16, declare that as the field's dtype"):
        NDArrayField().encode(npy(opaque))
    with pytest.raises(EncodeError, match=r"\|V1 .*float8_e4m3fn or .*declare that"):
        NDArrayField(dtype="float32").encode(np.zeros(3, "V1"))
    for value in (np.zeros(3, np.float16), np.zeros(3, "V1"), np.zeros(3, "V4"), np.zeros(3, [("a", "V2")])):
        with pytest.raises(EncodeError, match="expected"):
            NDArrayField(dtype="bfloat16").encode(value)
    with pytest.raises(ConfigError, match="float8_e5m2fnuz"):
        NDArrayField(dtype="float8")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", (3,)), ("<i2", (2, 2)), ("bool", (3,)), ("bfloat16", (2,)), ("float64", ()), ("u1", (0,))],
)
@given(data=st.data())
@settings(max_examples=15)
def test_a_batch_is_what_single_values_are(dtype, shape, data):
    """Arrays of a fixed dtype and shape are decoded together to the same values, or with the error of the first one."""
    field = NDArrayField(dtype, shape)
    layout = field.value_layout
    values = data.draw(st.lists(st.none() | hnp.arrays(layout.dtype, shape), max_size=4))
    payloads = [value if value is None else field.encode(value) for value in values]
    records = np.zeros((len(values), field.metadata_type.itemsize), np.uint8)
    datas = [None if payload is None else bytearray(payload.data) for payload in payloads]
    for row, payload in enumerate(payloads):
        if payload is not None:
            records[row] = np.frombuffer(payload.metadata, np.uint8)
    row = data.draw(st.sampled_from([row for row, payload in enumerate(payloads) if payload is not None] or [None]))
    if row is not None and data.draw(st.booleans()):
        if data.draw(st.booleans()):
            records[row, data.draw(st.integers(0, records.shape[1] - 1))] ^= data.draw(st.integers(1, 255))
        else:
            datas[row].append(1)
    try:
        expected = [one if one is None else field.decode(records[i].tobytes(), one) for i, one in enumerate(datas)]
    except FormatError as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            field.decode_batch(records, datas)
        return
    out = np.ones((len(values) + 1, *shape), layout.dtype)
    for found, present in (field.decode_batch(records, datas), field.decode_batch(records, datas, out[:-1])):
        assert present.tolist() == [one is not None for one in expected]
        for one, value in zip(found, expected, strict=True):
            assert one.tobytes() == (np.zeros(shape, layout.dtype) if value is None else value).tobytes()
