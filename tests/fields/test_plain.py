import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import EncodeError, FormatError
from mm_assets.fields import BytesField, JSONField, RawJSON, TextField
from mm_assets.testing import FieldSuite


class TestBytesField(FieldSuite):
    fields = [BytesField()]
    cases = [(b"\x00\xffabc", b"\x00\xffabc"), (bytearray(b"xy"), b"xy"), (memoryview(b"z"), b"z")]
    empty = (b"", b"")
    maximum = (BytesField(), bytes(1 << 20))
    past_maximum = (BytesField(), "has no limit: a text takes its place")
    wrong_types = ["text", 5, [1, 2]]
    wrong_shapes = []
    bad_configs = [{"size": 3}]


class TestTextField(FieldSuite):
    fields = [TextField()]
    cases = [
        ("a\r\n\u00e9\U0001f600", "a\r\n\u00e9\U0001f600"),
        ("e\u0301".encode(), "e\u0301"),
        ("\ue000\x07", "\ue000\x07"),
    ]
    empty = ("", "")
    maximum = (TextField(), "\U0010ffff" * 1000)
    past_maximum = (TextField(), "\ud800")
    wrong_types = [5, ["text"]]
    wrong_shapes = ["lone \udc80 surrogate", b"\xff\xfe", b"cut \xe2\x82"]
    bad_configs = [{"encoding": "latin-1"}]

    @given(st.text(alphabet=st.characters(codec="utf-8")))
    @settings(deadline=None)
    def test_any_text_round_trips(self, text):
        """Every text that has a UTF-8 form comes back as it was."""
        assert self.field.decode(*self.field.encode(text)) == text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
).filter(lambda value: value is not None)


class TestJSONField(FieldSuite):
    fields = [JSONField()]
    cases = [
        ({"b": [1, -2.5, True, None], "a": {"\u00e9": ""}}, {"b": [1, -2.5, True, None], "a": {"\u00e9": ""}}),
        (b' {"x" :1.50} ', {"x": 1.5}),
        (RawJSON("null"), None),
        ((1, 2), [1, 2]),
        ("text", "text"),
        (7, 7),
        (False, False),
        ("\ud800", "\ud800"),
    ]
    empty = ({}, {})
    maximum = (JSONField(), [10**4299])
    past_maximum = (JSONField(), [10**4301])
    wrong_types = [{1, 2}, [b"bytes"], {1: "key is not text"}, {"a": {None: 1}}, 1j]
    wrong_shapes = [float("nan"), [float("inf")], b"{", b"NaN", b"\xff", RawJSON("{'a': 1}"), b"1 2", b"\xef\xbb\xbf{}"]
    bad_configs = [{"indent": 2}]

    @given(JSON_VALUES)
    @settings(deadline=None, max_examples=60)
    def test_any_value_round_trips(self, value):
        """Every JSON value comes back equal, keys in order."""
        found = self.field.decode(*self.field.encode(value))
        assert found == value
        assert repr(found) == repr(value)

    def test_text_is_stored_as_written(self):
        """RawJSON keeps spaces, number forms and repeated keys."""
        text = '{"a": 1.0e2,\n "a": 2}'
        assert self.field.encode(RawJSON(text)).data == text.encode()

    def test_keys_keep_their_order(self):
        """Values are written compactly, in the order of their keys, outside ASCII as themselves."""
        assert self.field.encode({"z": 1, "\u00e9": [2]}).data == '{"z":1,"\u00e9":[2]}'.encode()

    def test_deep_nesting_is_refused_not_a_crash(self):
        """A value nested past any use, one within itself and hostile text are errors of the family."""
        loop: list[object] = []
        loop.append(loop)
        with pytest.raises(EncodeError, match="nested"):
            self.field.encode(loop)
        with pytest.raises(EncodeError):
            self.field.encode(b"[" * 200_000)
        metadata = self.field.encode([1]).metadata
        with pytest.raises(FormatError):
            self.field.decode(metadata, b"[" * 200_000)
