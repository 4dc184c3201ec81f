"""The collator: every rule, out of samples and out of columns, rows aligned whatever is missing."""

import gc
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import MultimodalCollator, MultimodalLoader, Ragged
from mm_assets.dataset.decoding import Batch
from mm_assets.errors import CollateError, ConfigError
from mm_assets.fields import (
    AudioField,
    DepthField,
    Field,
    ImageField,
    NDArrayField,
    ScalarField,
    TimeSeriesField,
    TokensField,
)
from mm_assets.loading.collate import as_tensors


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def samples_of(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


# -- the rules


def test_the_dictionaries_of_both_notations_mean_the_same() -> None:
    """`{"type": "stack"}` is `{"stack": True}`, and a pad value alone means pad."""
    samples = [{"image": np.full((2, 2), i), "ids": ints(*range(i)), "text": str(i)} for i in range(1, 4)]
    first = MultimodalCollator(
        {"image": {"type": "stack"}, "ids": {"type": "pad", "pad_value": 7, "max_length": 5}, "text": {}}
    )(samples)
    second = MultimodalCollator(
        {"image": {"stack": True}, "ids": {"pad_value": 7, "max_length": 5}, "text": {"type": "list"}}
    )(samples)
    for batch in (first, second):
        assert batch["image"].shape == (3, 2, 2)
        assert batch["ids"].tolist() == [[0, 7, 7, 7, 7], [0, 1, 7, 7, 7], [0, 1, 2, 7, 7]]
        assert batch["text"] == ["1", "2", "3"]
        assert batch["lengths"]["ids"].tolist() == [1, 2, 3]
        assert list(batch) == ["image", "ids", "text", "present", "lengths"]


@pytest.mark.parametrize("kind", ["stack", "pad", "ragged", "list"])
def test_every_row_stays_whatever_is_missing(kind: str) -> None:
    """A value that is None, or not in its sample at all, is masked, and its row is empty."""
    batch = MultimodalCollator({"x": {"type": kind}})([{"x": ints(1, 2)}, {"x": None}, {}, {"x": ints(3, 4)}])
    assert batch["present"]["x"].tolist() == [True, False, False, True]
    rows = batch["x"]
    assert len(rows) == 4
    if kind == "ragged":
        assert [rows[i].tolist() for i in range(4)] == [[1, 2], [], [], [3, 4]]
    elif kind == "list":
        assert [None if row is None else row.tolist() for row in rows] == [[1, 2], None, None, [3, 4]]
    else:
        assert rows.tolist() == [[1, 2], [0, 0], [0, 0], [3, 4]]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.none() | st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6),
    st.sampled_from([None, 3, [3], [None, 2], [4, 2]]),
    st.integers(1, 4),
)
def test_padding_keeps_what_fits(shapes: list[Any], max_length: Any, multiple: int) -> None:
    """In two axes: what is within the limits is there unchanged, everything else is the pad value."""
    values = [None if shape is None else np.arange(1, 1 + shape[0] * shape[1]).reshape(shape) for shape in shapes]
    rule = {"type": "pad", "pad_value": -1, "max_length": max_length, "pad_to_multiple_of": multiple}
    batch = MultimodalCollator({"x": {k: v for k, v in rule.items() if v is not None}})(samples_of("x", *values))
    limits = [max_length] if isinstance(max_length, int) else list(max_length or [])
    padded, lengths = batch["x"], batch["lengths"]["x"]
    assert padded.shape[1] % multiple == 0
    if limits and limits[0] is not None:
        assert padded.shape[1] == -(-limits[0] // multiple) * multiple
    limits += [None] * (2 - len(limits))
    for row, value in enumerate(values):
        if value is None:
            assert (padded[row] == -1).all()
            assert not np.any(lengths[row])
            continue
        height, width = (
            extent if limit is None else min(extent, limit) for extent, limit in zip(value.shape, limits, strict=True)
        )
        assert np.array_equal(padded[row, :height, :width], value[:height, :width])
        assert (padded[row] == -1).sum() == padded[row].size - height * width
        assert np.array_equal(lengths[row], [height, width] if lengths.ndim == 2 else height)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.data())
def test_padding_works_in_any_number_of_axes(num_axes: int, draw: st.DataObject) -> None:
    """Whatever the axes, each row's own corner is there, the batch is no larger than its largest, the rest is fill."""
    shapes = draw.draw(st.lists(st.tuples(*[st.integers(0, 3)] * num_axes), min_size=1, max_size=4))
    values = [np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape) for shape in shapes]
    padded = MultimodalCollator({"x": {"pad_value": -1}})(samples_of("x", *values))["x"]
    assert padded.shape == (len(values), *np.max(shapes, axis=0).tolist())
    for row, value in zip(padded, values, strict=True):
        corner = tuple(slice(0, extent) for extent in value.shape)
        assert np.array_equal(row[corner], value)
        assert (row == -1).sum() == row.size - value.size


@settings(deadline=None, max_examples=40)
@given(st.lists(st.none() | st.integers(0, 4), max_size=6))
def test_ragged_rows_are_the_values(sizes: list[int | None]) -> None:
    """Rows of a ragged output are what went in, from either end, an absent one empty."""
    values = [None if size is None else np.full((size, 2), row, np.float32) for row, size in enumerate(sizes)]
    ragged = MultimodalCollator({"x": {"type": "ragged"}})(samples_of("x", *values))["x"]
    assert isinstance(ragged, Ragged)
    assert len(ragged) == len(values)
    for row, value in enumerate(values):
        for found in (ragged[row], ragged[row - len(values)]):
            assert len(found) == (0 if value is None else len(value))
            assert (found == row).all()
    with pytest.raises(IndexError, match=f"of {len(values)}"):
        ragged[len(values)]
    assert repr(ragged).startswith(f"Ragged({len(values)} rows")


SPARSE_FIELDS: dict[str, tuple[Field, Any]] = {
    "tokens": (TokensField(decoded="int32"), [1, 2, 3]),
    "array": (NDArrayField(dtype="float64", shape=[None, 2, None]), np.ones((3, 2, 4))),
    "image": (ImageField(encoding="png"), np.zeros((2, 3, 1), np.uint8)),
    "fixed": (ImageField(encoding="png", size=(4, 5), channels=3), np.zeros((4, 5, 3), np.uint8)),
    "depth": (DepthField(dtype="uint16"), np.zeros((2, 3), np.uint16)),
    "audio": (AudioField(decoded="int16"), (np.zeros((5, 2), np.int16), 8000)),
    "series": (TimeSeriesField(dtype="int8"), (np.arange(3.0), np.ones((3, 2), np.int8))),
    "number": (ScalarField("int16"), 3),
}
SPARSE_SOURCES = [
    *(name for name in SPARSE_FIELDS if name not in ("audio", "series")),
    "audio.samples",
    "series.values",
]


@pytest.mark.parametrize("kind", ["stack", "pad", "ragged"])
@pytest.mark.parametrize("dtype", [None, "float64"])
@pytest.mark.parametrize("source", SPARSE_SOURCES)
def test_a_batch_without_values_is_like_one_with_values(
    tmp_path: Path, source: str, kind: str, dtype: str | None
) -> None:
    """Where no sample of a batch has a modality, its array keeps the dtype and rank that it has in other batches."""
    name = source.partition(".")[0]
    if name == "number" and kind != "stack":
        return  # single numbers have no axis
    field, value = SPARSE_FIELDS[name]
    with mm_assets.create(tmp_path / "x.mult", {name: field}) as writer:
        for number in range(4):
            writer.write(str(number), {name: value if number < 2 else None})
    collator = MultimodalCollator(
        {"out": {"type": kind, "source": source, **({} if dtype is None else {"dtype": dtype})}}
    )
    with mm_assets.open(tmp_path / "x.mult") as data:
        full, none = MultimodalLoader(data, batch_size=2, shuffle=False, collator=collator)
    assert (full["present"]["out"].all(), none["present"]["out"].any()) == (True, False)
    with_values, without = (one["out"].values if kind == "ragged" else one["out"] for one in (full, none))
    assert (without.dtype, without.ndim) == (with_values.dtype, with_values.ndim)
    assert not without.any()
    if kind != "ragged":
        assert len(without) == 2
    if name == "fixed" and kind == "stack":
        assert without.shape == with_values.shape


def test_a_dtype_converts_and_decides_empty_batches() -> None:
    """With a dtype a batch in which nothing is present is of it, and values are converted where they may be."""
    collator = MultimodalCollator({
        "s": {"type": "stack", "dtype": "float32"},
        "p": {"type": "pad", "max_length": [4, 2], "dtype": "int32"},
        "r": {"type": "ragged", "dtype": "float16"},
    })  # fmt: skip
    empty = collator([{}, {}])
    assert (empty["s"].dtype, empty["p"].dtype, empty["r"].values.dtype) == (np.float32, np.int32, np.float16)
    assert empty["p"].shape == (2, 4, 2)
    assert empty["lengths"]["p"].shape == (2, 2)
    full = collator([{"s": ints(1), "p": np.ones((2, 2), np.int8), "r": np.ones(3, np.float32)}] * 2)
    assert (full["s"].dtype, full["p"].dtype, full["r"].values.dtype) == (np.float32, np.int32, np.float16)
    with pytest.raises(CollateError, match="output 'p', row 0: found float64, expected int32"):
        collator([{"p": np.ones((2, 2))}])


def test_single_numbers_stack_into_a_column() -> None:
    """Numbers as Python has them become an array of the type that holds all of them."""
    batch = MultimodalCollator({"x": {"stack": True}})(samples_of("x", 1, 2.5, None, True))
    assert batch["x"].tolist() == [1.0, 2.5, 0.0, 1.0]


def test_sources_lead_to_parts_of_values() -> None:
    """An output may be a key or an attribute, however deep, of a modality; an absent part is absent."""
    clip = SimpleNamespace(audio={"samples": ints(1, 2)}, frames=np.zeros((1, 2)))
    rules = {
        "sound": {"type": "pad", "source": "clip.audio.samples"},
        "frames": {"stack": True, "source": "clip.frames"},
    }
    collator = MultimodalCollator(rules)
    batch = collator([{"clip": clip}, {"clip": SimpleNamespace(audio=None, frames=np.ones((1, 2)))}, {}])
    assert batch["sound"].tolist() == [[1, 2], [0, 0], [0, 0]]
    assert batch["present"]["sound"].tolist() == [True, False, False]
    assert batch["present"]["frames"].tolist() == [True, True, False]
    assert collator.modalities == ("clip",)
    assert collator.outputs == ("sound", "frames")


def test_a_name_with_dots_is_a_modality() -> None:
    """Only a source that is given is taken apart at its dots."""
    assert MultimodalCollator({"a.json": {}})([{"a.json": "x"}])["a.json"] == ["x"]


# -- columns


def test_columns_give_what_samples_give() -> None:
    """Rows out of arrays, dicts of arrays and lists make the same batch as the same rows as samples."""
    present = np.array([True, False, True])
    image = np.arange(12, dtype=np.uint8).reshape(3, 2, 2) * present[:, None, None].astype(np.uint8)
    pair = {"ids": np.arange(6).reshape(3, 2), "mask": np.ones((3, 2), bool)}
    tokens = [ints(1), None, ints(2, 3)]
    columns = {"image": Batch(image, present), "pair": Batch(pair, present), "tokens": Batch(tokens, present)}
    samples = [
        {"image": image[row], "pair": {"ids": pair["ids"][row]}, "tokens": tokens[row]} if present[row] else {}
        for row in range(3)
    ]
    rules: dict[str, dict[str, Any]] = {
        "image": {"stack": True},
        "padded": {"pad_value": 9, "source": "image", "pad_to_multiple_of": 4},
        "ids": {"type": "ragged", "source": "pair.ids"},
        "tokens": {"pad_value": 0},
        "rows": {"source": "image"},
    }
    collator = MultimodalCollator(rules)
    first, second = collator(columns), collator(samples)
    assert list(first) == list(second)
    for name in ("image", "padded", "tokens"):
        assert np.array_equal(first[name], second[name]), name
    assert np.array_equal(first["ids"].values, second["ids"].values)
    assert first["rows"][1] is None
    assert np.array_equal(first["rows"][2], image[2])
    assert {name: mask.tolist() for name, mask in first["present"].items()} == dict.fromkeys(rules, present.tolist())
    assert first["image"] is image  # not copied


def test_without_rules_everything_comes_as_it_is() -> None:
    """Arrays of a column stay arrays, dicts of arrays dicts; samples become lists."""
    image, pair = np.zeros((2, 3)), {"ids": np.zeros((2, 4))}
    present = np.array([True, True])
    batch = MultimodalCollator()({"image": Batch(image, present), "pair": Batch(pair, present)})
    assert batch["image"] is image
    assert batch["pair"] is pair
    listed = MultimodalCollator()([{"a": 1}, {"b": 2}])
    assert (listed["a"], listed["b"]) == ([1, None], [None, 2])
    assert listed["present"]["b"].tolist() == [False, True]
    assert MultimodalCollator()([]) == {"present": {}}


def test_whole_dicts_can_be_listed() -> None:
    """A modality of several arrays as a list has a dict of rows for each sample."""
    column = Batch({"ids": ints(1, 2), "mask": ints(0, 1)}, np.array([True, False]))
    assert MultimodalCollator({"pair": {}})({"pair": column})["pair"] == [{"ids": 1, "mask": 0}, None]


# -- torch


def test_tensors_share_the_arrays_memory() -> None:
    """With `pt` outputs, masks, lengths and ragged parts are tensors, and nothing was copied."""
    torch = pytest.importorskip("torch")
    image = np.zeros((2, 3), np.float32)
    columns = {"image": Batch(image, np.array([True, True])), "t": Batch([ints(1), ints(2, 3)], np.array([True, True]))}
    rules = {
        "image": {"stack": True},
        "t": {"pad_value": 0},
        "r": {"type": "ragged", "source": "t"},
        "l": {"source": "t"},
    }
    batch = MultimodalCollator(rules, return_tensors="pt")(columns)
    image[1, 2] = 5
    assert isinstance(batch["image"], torch.Tensor)
    assert batch["image"][1, 2] == 5
    assert batch["r"][1].tolist() == [2, 3]
    assert batch["lengths"]["t"].tolist() == [1, 2]
    assert batch["present"]["t"].dtype == torch.bool
    assert isinstance(batch["l"][0], np.ndarray)
    del image, columns
    gc.collect()
    assert batch["image"][1, 2] == 5


def test_tensors_are_at_the_arrays_own_addresses() -> None:
    """A stacked column, and the values and offsets of a ragged one, are not moved on the way to torch."""
    torch = pytest.importorskip("torch")
    image = np.zeros((2, 3), np.float32)
    batch = MultimodalCollator({"image": {"stack": True}}, "pt")({"image": Batch(image, np.array([True, False]))})
    assert batch["image"].data_ptr() == image.ctypes.data
    assert (batch["image"].shape, batch["image"].dtype) == ((2, 3), torch.float32)
    ragged = MultimodalCollator({"x": {"type": "ragged"}})(samples_of("x", ints(1), ints(2, 3)))["x"]
    tensors = as_tensors(ragged)
    assert tensors.values.data_ptr() == ragged.values.ctypes.data
    assert tensors.offsets.data_ptr() == ragged.offsets.ctypes.data


@pytest.mark.parametrize("kind", ["read-only", "backwards", "foreign"])
def test_what_torch_cannot_hold_is_copied(kind: str) -> None:
    """Memory that torch would refuse or warn of becomes a tensor of the same numbers."""
    torch = pytest.importorskip("torch")
    array = np.arange(4, dtype=np.float32)
    array = {"read-only": array, "backwards": array[::-1], "foreign": array.astype(">f4")}[kind]
    array.flags.writeable = kind != "read-only"
    batch = MultimodalCollator({"x": {"stack": True}}, return_tensors="pt")({"x": Batch(array, np.ones(4, bool))})
    assert isinstance(batch["x"], torch.Tensor)
    assert batch["x"].tolist() == array.tolist()


def test_tensors_may_come_in() -> None:
    """Values that a transform made into tensors are stacked like arrays."""
    torch = pytest.importorskip("torch")
    batch = MultimodalCollator({"x": {"stack": True}}, return_tensors="pt")(samples_of("x", torch.ones(2), None))
    assert batch["x"].tolist() == [[1, 1], [0, 0]]


# -- what is refused


@pytest.mark.parametrize(
    ("rule", "values", "message"),
    [
        (
            {"stack": True},
            [ints(1), ints(1, 2)],
            r"row 1: found shape \(2,\), expected \(1,\) as in row 0; .*pad or rag",
        ),
        ({"stack": True}, [None, ints(1), np.ones(1)], "row 2: found float64 with 1 axes, expected int64 with 1 axes"),
        ({"stack": True}, ["a"], "row 0: found str of length 1, expected numbers for stack"),
        ({"stack": True}, [{"a": 1}], "row 0: its source is several values: give one of them, such as x.a"),
        ({"pad_value": 0}, [1], "row 0: found single numbers, which have no axis to pad: stack them"),
        ({"pad_value": 0, "max_length": [1, 2]}, [ints(1)], "found 1 axes, expected 2 as in max_length"),
        ({"pad_value": 0.5}, [ints(1)], "pad_value 0.5 does not fit int64"),
        ({"pad_value": -1}, [np.ones(1, np.uint8)], "pad_value -1 does not fit uint8"),
        (
            {"type": "ragged"},
            [np.ones((1, 2)), np.ones((1, 3))],
            r"row 1: found shape \(1, 3\), expected one that differs",
        ),
        ({"type": "ragged"}, [1], r"row 0: found shape \(\)"),
        (
            {"source": "x.part"},
            [ints(1)],
            "row 0: found .*array.* without the part part; it has 1 items, by number: its source is x.part",
        ),
        (
            {"source": "x.part"},
            [{"other": 1}],
            "row 0: found dict .* without the part part; it has other: its source is x.part",
        ),
    ],
)
def test_values_that_do_not_fit_are_named(rule: dict[str, Any], values: list[Any], message: str) -> None:
    """The error says which output and row, what was found and what was expected."""
    with pytest.raises(CollateError, match="output 'x'.*" + message):
        MultimodalCollator({"x": rule})(samples_of("x", *values))


def test_a_column_that_is_not_there_is_named() -> None:
    """A rule for a modality that was not read is an error, not a batch of absent values."""
    with pytest.raises(CollateError, match="output 'y': no modality 'y'; there are x"):
        MultimodalCollator({"y": {}})({"x": Batch([1], np.array([True]))})


def test_a_modality_named_like_a_part_of_every_batch_needs_a_source() -> None:
    """`present` as a modality is refused without a rule, and works with one."""
    with pytest.raises(CollateError, match="give the output another"):
        MultimodalCollator()([{"present": 1}])
    assert MultimodalCollator({"here": {"source": "present"}})([{"present": 1}])["here"] == [1]


@pytest.mark.parametrize(
    ("rules", "key"),
    [
        ({"present": {}}, "present"),
        ({"x": "stack"}, "x"),
        ({"x": {"kind": "stack"}}, "x.kind"),
        ({"x": {"type": "stak"}}, "x.type"),
        ({"x": {"stack": 1}}, "x.stack"),
        ({"x": {"stack": True, "type": "pad"}}, "x.stack"),
        ({"x": {"type": "stack", "pad_value": 0}}, "x.pad_value"),
        ({"x": {"type": "pad", "pad_value": "0"}}, "x.pad_value"),
        ({"x": {"type": "pad", "max_length": 1.5}}, "x.max_length"),
        ({"x": {"type": "pad", "max_length": []}}, "x.max_length"),
        ({"x": {"type": "pad", "max_length": [True]}}, "x.max_length"),
        ({"x": {"type": "pad", "max_length": -1}}, "x.max_length"),
        ({"x": {"type": "pad", "pad_to_multiple_of": 0}}, "x.pad_to_multiple_of"),
        ({"x": {"type": "pad", "dtype": "str"}}, "x.dtype"),
        ({"x": {"type": "pad", "dtype": "no such"}}, "x.dtype"),
        ({"x": {"dtype": "int8"}}, "x.dtype"),
        ({"x": {"source": "a..b"}}, "x.source"),
        ({"x": {"source": 3}}, "x.source"),
        ([], "modality_configs"),
        (["x"], "modality_configs"),
    ],
)
def test_wrong_rules_are_refused_before_any_data(rules: Any, key: str) -> None:
    """A `ConfigError` names the key."""
    if rules == []:  # an empty list is not a rule
        assert MultimodalCollator(rules)([{"x": 1}])["x"] == [1]
        return
    with pytest.raises(ConfigError, match=re.escape(f"arguments: {key}: ")):
        MultimodalCollator(rules)


def test_other_tensors_are_refused() -> None:
    """`return_tensors` is np or pt."""
    with pytest.raises(ConfigError, match="return_tensors"):
        MultimodalCollator(return_tensors="tf")


def test_errors_survive_the_way_between_processes() -> None:
    """A `CollateError` pickles with its facts."""
    error = pickle.loads(pickle.dumps(CollateError("x", "is wrong", row=3)))
    assert (error.output, error.detail, error.row, str(error)) == ("x", "is wrong", 3, "output 'x', row 3: is wrong")
