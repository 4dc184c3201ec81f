"""Tests of exports to Lance: the suite, and the columns that Lance itself reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mm_assets.exports import export
from mm_assets.fields import JSONField, NDArrayField, SequenceField, TextField
from mm_assets.fields.plain import BytesField

from .export_suite import ExportSuite, packed

lance = pytest.importorskip("lance", reason="the lance extra is not installed")


class TestLance(ExportSuite):
    format = "lance"
    is_deterministic = False  # the files that describe the dataset contain the time and a random name


def test_columns_have_the_types_of_their_fields(tmp_path: Path) -> None:
    """Arrays of one shape are lists of fixed size, lists are lists, and a reserved name is changed."""
    fields = {
        "state": NDArrayField("float16", (2, 2)),
        "free": NDArrayField(),
        "json": TextField(),
        "pages": SequenceField(BytesField()),
        "metadata": JSONField(),
    }
    samples = [
        {"state": np.array([[1, 2], [3, 4]], np.float16), "free": np.arange(3), "json": "t", "metadata": {"a": 1}},
        {"pages": [(0, b"p"), (1, b"q")]},
    ]
    path = packed(tmp_path / "x.mstr", {str(number): sample for number, sample in enumerate(samples)}, fields)
    for out in ("a", "b"):
        export(path, "lance", tmp_path / out, shard_samples=1)
    dataset = lance.dataset(str(tmp_path / "a"))
    dataset.validate()
    assert [fragment.count_rows() for fragment in dataset.get_fragments()] == [1, 1]
    types = {field.name: str(field.type) for field in dataset.schema}
    assert types["state"] == "fixed_size_list<item: fixed_size_list<item: halffloat>[2]>[2]"
    assert types["free"] == "large_binary"
    assert types["json_0"] == "string"
    assert types["pages"] == "list<item: large_binary>"
    first, second = dataset.to_table().to_pylist()
    assert (first["__key__"], first["json"], second["json"]) == ("0", '{"a":1}', None)
    assert first["__members__"] == '[["state","state.npy"],["free","free.npy"],["json_0","json.txt"]]'
    assert first["state"] == [[1, 2], [3, 4]]
    assert (second["state"], second["pages"]) == (None, [b"p", b"q"])
    data = [(tmp_path / out / "data/shard-000000.lance").read_bytes() for out in ("a", "b")]
    assert data[0] == data[1]
