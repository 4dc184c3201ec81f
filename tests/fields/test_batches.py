"""Batches of small values are decoded together, and are what each value decodes to alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import FormatError, LimitError
from mm_assets.fields import (
    Audio,
    AudioField,
    Encoded,
    Field,
    NDArrayField,
    ScalarField,
    TextField,
    TimeSeries,
    TimeSeriesField,
    TokensField,
)
from mm_assets.testing import same

Payloads = list[Encoded | None]


def arrays(draw: st.DrawFn, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Any bits: NaN and negative zeros too."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(draw(st.integers(0, 99))).bytes(size), dtype).reshape(shape)


@st.composite
def array_batches(draw: st.DrawFn) -> tuple[Field, list[Any]]:
    """Arrays of one shape, of a free first extent, or of any shape and dtype."""
    dtype = draw(st.sampled_from(["<f4", "<i2", "|u1", "<c16", "<f8"]))
    inner = draw(st.lists(st.integers(0, 3), max_size=2))
    kind = draw(st.sampled_from(["fixed", "free", "any", "mixed"]))
    count = draw(st.integers(1, 6))
    if kind == "fixed":
        return NDArrayField(dtype, tuple(inner)), [arrays(draw, dtype, inner) for _ in range(count)]
    values = [arrays(draw, dtype, [draw(st.integers(0, 4)), *inner]) for _ in range(count)]
    if kind == "free":
        return NDArrayField(dtype, (None, *inner)), values
    if kind == "mixed":
        values += [np.arange(3, dtype="<i8"), np.array(2.5)]
    return NDArrayField(), values


@st.composite
def token_batches(draw: st.DrawFn) -> tuple[Field, list[Any]]:
    """Ids of two and four bytes, padded or not, stored with more ids than the reader's `max_tokens`."""
    vocab_size = draw(st.sampled_from([40, 70_000]))
    max_tokens = draw(st.sampled_from([None, 1, 3, 8, 200]))
    keep = {"keep_start": draw(st.integers(0, 2)), "keep_end": draw(st.integers(0, 2))} if max_tokens != 1 else {}
    field = TokensField(
        vocab_size=vocab_size,
        max_tokens=max_tokens,
        truncate=draw(st.sampled_from(["right", "left", "error"])),
        pad_id=draw(st.sampled_from([0, 7])),
        decoded=draw(st.sampled_from(["int64", "uint32", "int32"])),
        **keep,
    )
    return field, draw(st.lists(st.lists(st.integers(0, 39), max_size=10), min_size=1, max_size=6))


@st.composite
def series_batches(draw: st.DrawFn) -> tuple[Field, list[Any]]:
    """Series of one extent, or of any number of steps."""
    num_columns, dtype = draw(st.integers(0, 3)), draw(st.sampled_from(["float32", "int16", "bool"]))
    fixed = draw(st.booleans())
    num_steps = draw(st.integers(0, 4))
    settings: dict[str, Any] = {"num_steps": num_steps, "num_columns": num_columns, "dtype": dtype} if fixed else {}
    field = TimeSeriesField(allow_equal=draw(st.booleans()), **settings)
    values = []
    for _ in range(draw(st.integers(1, 6))):
        steps = num_steps if fixed else draw(st.integers(0, 4))
        times = np.arange(steps) * 0.5 + draw(st.integers(-3, 3))
        values.append((times, (arrays(draw, "|u1", (steps, num_columns)) % 2).astype(dtype)))
    return field, values


@st.composite
def audio_batches(draw: st.DrawFn) -> tuple[Field, list[Any]]:
    """Samples of 16 bits or floats, of one or several numbers of channels."""
    dtype = draw(st.sampled_from(["<i2", "<f4"]))
    field = AudioField(
        decoded=draw(st.sampled_from(["int16", "float32"])),
        sample_rate=draw(st.sampled_from([None, 16_000, 8_000])),
        max_frames=8,
    )
    channels = draw(st.lists(st.integers(1, 2), min_size=1, max_size=6))
    values = []
    for count in channels:
        samples = arrays(draw, "<i2", (draw(st.integers(0, 8)), count))
        values.append((samples if dtype == "<i2" else samples.astype("<f4") / np.float32(40_000), 16_000))
    return field, values


@st.composite
def text_batches(draw: st.DrawFn) -> tuple[Field, list[Any]]:
    """Texts and numbers."""
    if draw(st.booleans()):
        return TextField(), draw(st.lists(st.text(max_size=8), min_size=1, max_size=6))
    return ScalarField("float32"), draw(st.lists(st.floats(width=32), min_size=1, max_size=6))


BATCHES = st.one_of(array_batches(), token_batches(), series_batches(), audio_batches(), text_batches())


def writer_of(field: Field) -> Field:
    """A field of the same values, as they were packed: without the settings of a reader that refuse some."""
    if isinstance(field, TokensField):
        return TokensField(vocab_size=field.vocab_size)
    return AudioField(max_frames=8) if isinstance(field, AudioField) else field


def decoded_alone(field: Field, payloads: Payloads) -> tuple[list[Any], str | None]:
    """The values one by one up to the first damaged one, and that one's error."""
    values: list[Any] = []
    for payload in payloads:
        try:
            values.append(None if payload is None else field.decode(*payload))
        except (FormatError, LimitError) as error:
            return values, f"{type(error).__name__}: {error}"
    return values, None


def decoded_together(field: Field, payloads: Payloads) -> tuple[Any, npt.NDArray[np.bool_]]:
    """The batch."""
    blank = bytes(field.metadata_type.itemsize)
    records = b"".join(blank if payload is None else bytes(payload.metadata) for payload in payloads)
    table = np.frombuffer(records, np.uint8).reshape(len(payloads), -1)
    return field.decode_batch(table, [None if payload is None else memoryview(payload.data) for payload in payloads])


def row_of(field: Field, values: Any, row: int) -> Any:
    """A row of a batch as its field decodes it alone, except for padding."""
    if not isinstance(values, dict):
        value = values[row]
        return value.item() if isinstance(value, np.generic) and isinstance(field, ScalarField) else value
    if isinstance(field, TokensField):
        mask = values["attention_mask"][row].astype(bool)
        ids = values["input_ids"][row]
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
        assert (ids[~mask] == field.pad_id).all()
        return ids[mask]
    return TimeSeries(values["timestamps"][row], values["values"][row])


def check(field: Field, payloads: Payloads) -> None:
    expected, error = decoded_alone(field, payloads)
    if error is not None:
        with pytest.raises((FormatError, LimitError)) as raised:
            decoded_together(field, payloads)
        if len(expected) + 1 == len(payloads):  # of several damaged rows, a dataset finds the first
            assert f"{type(raised.value).__name__}: {raised.value}" == error
        return
    values, present = decoded_together(field, payloads)
    assert present.tolist() == [payload is not None for payload in payloads]
    for row, one in enumerate(expected):
        if one is not None:
            value = row_of(field, values, row)
            assert same(np.asarray(value) if isinstance(one, np.ndarray) else value, one)
        elif isinstance(values, list):
            assert values[row] is None
        else:
            parts = values.values() if isinstance(values, dict) else [values]
            assert not any(np.any(part[row]) for part in parts)


@settings(deadline=None)
@given(BATCHES, st.lists(st.integers(0, 7), max_size=3))
def test_a_batch_is_its_values(batch: tuple[Field, list[Any]], absent: list[int]) -> None:
    """Every row of a batch is bit for bit what its payload decodes to alone, with rows absent anywhere."""
    field, values = batch
    payloads: Payloads = []
    writer = writer_of(field)
    for row, value in enumerate(values):
        payloads += [None] if row in absent else []
        payloads.append(writer.encode(value))
    check(field, payloads)


@settings(deadline=None)
@given(BATCHES, st.integers(0, 7), st.integers(0, 200), st.integers(1, 255))
def test_damage_in_a_batch_is_the_damage_of_its_row(
    batch: tuple[Field, list[Any]], row: int, place: int, mask: int
) -> None:
    """With a byte of one row flipped, or its data truncated, a batch has the row's error, or the row's value."""
    field, values = batch
    writer = writer_of(field)
    payloads: Payloads = [writer.encode(value) for value in values]
    row %= len(payloads)
    damaged = payloads[row]
    assert damaged is not None
    whole = bytearray(bytes(damaged.metadata) + bytes(damaged.data))
    whole[place % len(whole)] ^= mask
    size = len(damaged.metadata)
    payloads[row] = Encoded(bytes(whole[:size]), bytes(whole[size:]))
    check(field, payloads[: row + 1])
    check(field, payloads)
    payloads[row] = Encoded(damaged.metadata, bytes(damaged.data)[:-1])
    check(field, payloads)


STEPS = np.arange(3.0)
TOGETHER: list[tuple[Field, Callable[[int], Any]]] = [
    (NDArrayField("float32", (2, 3)), lambda k: np.full((2, 3), k, np.float32)),
    (NDArrayField(), lambda k: np.full((k, 3), k, np.int16)),
    (TokensField(vocab_size=50), lambda k: [k] * k),
    (TokensField(vocab_size=50, max_tokens=4), lambda k: [k] * k),
    (TimeSeriesField(num_steps=3, num_columns=2, dtype="int16"), lambda k: (STEPS + k, np.full((3, 2), k, "<i2"))),
    (TimeSeriesField(), lambda k: (STEPS[: k % 3 + 1] + k, np.full((k % 3 + 1, 2), k, "<f4"))),
    (AudioField(), lambda k: Audio(np.full((k, 2), k, np.int16), 8_000)),
    (TextField(), lambda k: "é" * k),
]


@pytest.mark.parametrize(("field", "value"), TOGETHER, ids=lambda one: type(one).__name__)
def test_small_values_are_decoded_together(
    monkeypatch: pytest.MonkeyPatch, field: Field, value: Callable[[int], Any]
) -> None:
    """At most the first value of a batch is decoded by itself, with absent rows too; the arrays may be written to."""
    payloads: Payloads = [field.encode(value(k)) for k in range(6)]
    expected = [field.decode(*payload) for payload in payloads if payload is not None]

    alone: list[object] = []
    decode, decode_into = type(field).decode, type(field)._decode_into
    monkeypatch.setattr(type(field), "decode", lambda *given: alone.append(given) or decode(*given))
    monkeypatch.setattr(type(field), "_decode_into", lambda *given: alone.append(given) or decode_into(*given))
    for rows in (payloads, [payloads[0], None, *payloads[1:]]):
        alone.clear()
        values, present = decoded_together(field, rows)
        assert len(alone) <= 1
        for row, one in zip(np.flatnonzero(present).tolist(), expected, strict=True):
            value = row_of(field, values, row)
            assert same(np.asarray(value) if isinstance(one, np.ndarray) else value, one)
            parts = [value, *(getattr(value, name, None) for name in ("timestamps", "values", "samples"))]
            assert all(part.flags.writeable for part in parts if isinstance(part, np.ndarray))


def test_a_subclass_decodes_as_it_says() -> None:
    """A field of the user's that overrides how a value is decoded gets that in batches too."""

    class Doubled(NDArrayField):
        def decode(self, metadata: Any, data: Any) -> npt.NDArray[Any]:
            return 2 * super().decode(metadata, data)

    field = Doubled("float32", (2,))
    payload = field.encode(np.ones(2, np.float32))
    values, _ = decoded_together(field, [payload, None, payload])
    assert values.tolist() == [[2, 2], [0, 0], [2, 2]]


def test_large_values_have_memory_of_their_own() -> None:
    """A row of a batch of large arrays keeps no other row in memory."""
    field = NDArrayField("uint8")
    payload = field.encode(np.zeros(1 << 17, np.uint8))
    values, _ = decoded_together(field, [payload, payload])
    assert all(value.base is None for value in values)
