from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import mm_assets
from mm_assets import Dataset
from mm_assets.errors import CorruptError
from mm_assets.fields import (
    AudioField,
    BytesField,
    Field,
    ImageTextPairField,
    NDArrayField,
    ScalarField,
    TextField,
    TokensField,
)

from .shards import COUNT, SIZE, sample


def test_columns_hold_the_values(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each modality is a column of the type of its field, null where absent, whatever the size of chunks."""
    for rows in (4096, 5):
        monkeypatch.setattr("mm_assets.dataset.arrow.BLOCK_ROWS", rows)
        table = data.to_arrow(threads=2)
        table.validate(full=True)
        assert table.num_rows == COUNT
        assert dict(zip(table.column_names, table.schema.types, strict=True)) == {
            "image": pa.list_(pa.list_(pa.list_(pa.uint8(), 3), SIZE[1]), SIZE[0]),
            "photo": pa.large_binary(),
            "text": pa.string(),
            "label": pa.int16(),
            "state": pa.list_(pa.list_(pa.float32(), 3), 2),
            "tokens": pa.large_list(pa.int64()),
            "note": pa.string(),
        }
        for i, row in enumerate(table.to_pylist()):
            expected = sample(i)
            for name in ("image", "state", "tokens"):
                expected[name] = None if expected[name] is None else expected[name].tolist()
            expected["note"] = None if expected["note"] is None else f'{{"i":[{i}]}}'
            raw = data.read_raw([i], ["photo"])["photo"][0]
            expected["photo"] = None if raw is None else bytes(raw)
            assert row == expected


def test_some_columns_of_some_samples(data: Dataset) -> None:
    """Indices, slices and masks choose rows, names choose columns and their order, `raw` those that stay bytes."""
    table = data.to_arrow([5, -1, 5], ["label", "text"])
    assert table.to_pylist() == [{"label": data[i]["label"], "text": data[i]["text"]} for i in (5, -1, 5)]
    assert data.to_arrow(slice(2, 4), ["label"]).column("label").to_pylist() == [-8, -7]
    assert data.select([3]).to_arrow(modalities=["label"]).to_pylist() == [{"label": data[3]["label"]}]
    raw = data.to_arrow([0, 4], ["image", "text"], raw=["image"])
    assert raw.schema.field("image").type == pa.large_binary()
    assert raw.column("image").to_pylist() == [bytes(data.read_raw([0], ["image"])["image"][0] or b""), None]
    empty = data.to_arrow([])
    assert (empty.num_rows, empty.schema) == (0, data.to_arrow().schema)
    with pytest.raises(KeyError, match="nothing"):
        data.to_arrow(raw=["nothing"])


@pytest.mark.parametrize(
    ("field", "values", "kind", "expected"),
    [
        (ScalarField("bool"), [True, None, False], pa.bool_(), [True, None, False]),
        (ScalarField("float16"), [0.5, None], pa.float16(), [0.5, None]),
        (ScalarField("uint64"), [2**64 - 1, None], pa.uint64(), [2**64 - 1, None]),
        (BytesField(), [b"", None, b"ab"], pa.large_binary(), [b"", None, b"ab"]),
        (NDArrayField("bool", (2,)), [np.array([True, False]), None], pa.list_(pa.bool_(), 2), [[True, False], None]),
        (
            NDArrayField("int8", (2, 0)),
            [np.zeros((2, 0), np.int8), None],
            pa.list_(pa.list_(pa.int8(), 0), 2),
            [[[], []], None],
        ),
        (NDArrayField("int8", ()), [np.array(3, np.int8), None], pa.int8(), [3, None]),
        (
            NDArrayField("complex64", (1,)),
            [np.array([1 + 2j], np.complex64), None],
            pa.list_(pa.list_(pa.float32(), 2), 1),
            [[[1.0, 2.0]], None],
        ),
        (
            NDArrayField("int32", (None, 2)),
            [np.array([[1, 2], [3, 4]], np.int32), None, np.zeros((0, 2), np.int32)],
            pa.large_list(pa.list_(pa.int32(), 2)),
            [[[1, 2], [3, 4]], None, []],
        ),
        (NDArrayField(), [np.arange(2, dtype="<u2"), None], pa.large_binary(), [b"\0\0\1\0", None]),
        (TokensField(max_tokens=4, decoded="int32"), [[1, 2], None, []], pa.large_list(pa.int32()), [[1, 2], None, []]),
        (AudioField(encoding="pcm16"), [None], pa.large_binary(), [None]),
    ],
)
def test_a_column_of_each_kind(tmp_path: Path, field: Field, values: list[Any], kind: Any, expected: list[Any]) -> None:
    """Numbers, arrays of any shape, token ids and bytes keep type and value; only absent ones are null."""
    path = str(tmp_path / "a.mstr")
    with mm_assets.create(path, {"m": field}) as writer:
        for i, value in enumerate(values):
            writer.write(str(i), {"m": value})
    with mm_assets.open(path) as data:
        table = data.to_arrow()
        table.validate(full=True)
        assert table.schema.field("m").type == kind
        assert table.column("m").to_pylist() == expected


def test_a_batch_of_several_arrays_is_a_struct(tmp_path: Path) -> None:
    """A field with several arrays in a batch has a column of structs, null where the value is absent."""
    field = ImageTextPairField(encoding="png", image_size=(4, 4), max_tokens=3)
    path = str(tmp_path / "a.mult")
    with mm_assets.create(path, {"m": field}) as writer:
        writer.write("0", {"m": None})
        writer.write("1", {"m": (np.zeros((4, 4, 3), np.uint8), "ab", 0.5)})
    with mm_assets.open(path) as data:
        column = data.to_arrow().column("m").to_pylist()
        batch = data.read_batch([1])["m"].values
    assert column[0] is None
    assert {name: np.asarray(value).tolist() for name, value in column[1].items()} == {
        name: array[0].tolist() for name, array in batch.items()
    }


def test_damage_in_a_column_is_reported(tmp_path: Path) -> None:
    """Damaged text raises as in any other reading, with its place."""
    path = tmp_path / "a.mult"
    with mm_assets.create(str(path), {"t": TextField()}) as writer:
        writer.write("0", {"t": "fine"})
        writer.write("1", {"t": "damaged"})
    path.write_bytes(path.read_bytes().replace(b"damaged", b"\xffamaged"))
    with mm_assets.open(str(path)) as data, pytest.raises(CorruptError, match="sample 1, modality 't'"):
        data.to_arrow()
