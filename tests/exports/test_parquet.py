"""Tests of exports to Parquet and Hugging Face: columns, files, arrays, row groups, and the card."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.exports import export
from mm_assets.exports import parquet as shards
from mm_assets.fields import (
    AudioField,
    BytesField,
    ImageField,
    JSONField,
    NDArrayField,
    SequenceField,
    TextField,
)

from ..pipeline.shards import png
from .export_suite import ExportSuite, packed, unsynced_folder

FILE = {"bytes": {"dtype": "binary", "_type": "Value"}, "path": {"dtype": "string", "_type": "Value"}}
TEXT = {"dtype": "string", "_type": "Value"}


def value(dtype: str) -> dict[str, str]:
    return {"dtype": dtype, "_type": "Value"}


def sequence(feature: Any) -> dict[str, Any]:
    return {"feature": feature, "_type": "Sequence"}


def table_of(out: Path) -> list[dict[str, Any]]:
    """Returns the rows of all shards."""
    return [row for path in sorted(out.rglob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def features_of(out: Path) -> dict[str, Any]:
    metadata = pq.read_schema(next(out.rglob("*.parquet"))).metadata
    features: dict[str, Any] = json.loads(metadata[b"huggingface"])["info"]["features"]
    return features


class TestHuggingFace(ExportSuite):
    format = "hf"


class TestParquet(ExportSuite):
    format = "parquet"


class TestColumns:
    def test_media_texts_and_arrays_have_their_features(self, tmp_path: Path) -> None:
        """Each modality is a column with the feature of its content, and each file has its name in the tar."""
        fields = {
            "image": ImageField(),
            "pages": SequenceField(ImageField()),
            "audio": AudioField(),
            "text": TextField(),
            "raw": BytesField(),
            "pose": NDArrayField(),
            "state": NDArrayField(),
            "metadata": JSONField(),
        }
        samples = {
            "dir/a": {
                "image": png(1),
                "pages": [(0, png(2)), (2, png(3))],
                "text": "ä",
                "raw": b"\0\1",
                "pose": np.eye(4, dtype=np.float32),
                "state": np.arange(3, dtype=np.int16),
                "metadata": {"n": 1},
            },
            "b": {"pose": np.zeros((2, 4), np.float32), "state": np.arange(2, dtype=np.int16)},
        }
        summary = export(packed(tmp_path / "x.mult", samples, fields), "hf", tmp_path / "out")
        assert [shard.files for shard in summary.shards] == [["data/train-00000-of-00001.parquet"]]
        assert features_of(tmp_path / "out") == {
            "__key__": TEXT,
            "n": value("int64"),
            "image": {"_type": "Image"},
            "pages": sequence({"_type": "Image"}),
            "audio": {"_type": "Audio"},
            "text": TEXT,
            "raw": FILE,
            "pose": {"shape": [None, 4], "dtype": "float32", "_type": "Array2D"},
            "state": sequence(value("int16")),
            "json": TEXT,
            "__members__": TEXT,
        }
        first, second = table_of(tmp_path / "out")
        assert (first["__key__"], first["json"], first["text"]) == ("dir/a", '{"n":1}', "ä")
        assert first["image"] == {"bytes": png(1), "path": "a.png"}
        assert [page["bytes"] for page in first["pages"]] == [png(2), png(3)]
        assert first["state"] == [0, 1, 2]
        assert (second["image"], second["pages"], second["json"]) == (None, None, None)

    def test_samples_of_audio_are_files(self, tmp_path: Path) -> None:
        """Audio that was packed from an array is a WAV file with its rate, and audio files are as they are."""
        wave = np.linspace(-1, 1, 80, dtype=np.float32)
        path = packed(tmp_path / "x.mult", {"a": {"audio": (wave, 8000)}}, {"audio": AudioField()})
        export(path, "hf", tmp_path / "out")
        (row,) = table_of(tmp_path / "out")
        assert row["audio"]["path"] == "a.wav"
        samples, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
        assert rate == 8000
        np.testing.assert_array_equal(samples, wave)

    def test_keys_of_the_json_are_columns_of_one_type(self, tmp_path: Path) -> None:
        """A key whose values have one type is a column; other keys and values are in the text of the JSON alone."""
        rows = [
            {"n": 1, "x": 0.5, "t": "a", "ok": True, "boxes": [1, 2], "big": 2**70, "mixed": 1, "o": {}, "text": 1},
            {"n": None, "x": 2, "t": "b", "boxes": [], "big": 1, "mixed": "1", "empty": [], "far": 2**60, "json": "x"},
            {"far": 0.5, "words": ["a", None], "bell\7": 1},
        ]
        samples = {str(n): {"metadata": row, "text": "t"} for n, row in enumerate(rows)}
        path = packed(tmp_path / "x.mult", samples, {"metadata": JSONField(), "text": TextField()})
        export(path, "hf", tmp_path / "out")
        features = features_of(tmp_path / "out")
        assert {
            name: feature
            for name, feature in features.items()
            if name not in ("__key__", "text", "json", "__members__")
        } == {
            "n": value("int64"),
            "x": value("float64"),
            "t": TEXT,
            "ok": value("bool"),
            "boxes": sequence(value("int64")),
            "words": sequence(TEXT),
        }
        table = table_of(tmp_path / "out")
        assert [row["x"] for row in table] == [0.5, 2.0, None]
        assert [row["words"] for row in table] == [None, None, ["a", None]]
        assert [json.loads(row["json"]) for row in table] == rows

    @pytest.mark.parametrize(
        ("pairs", "classes"),
        [
            ([(1, "dog"), (0, "cat"), (1, "dog")], ["cat", "dog"]),
            ([(0, "cat"), (2, "dog")], None),
            ([(0, "cat"), (0, "dog")], None),
            ([(0, "cat"), (1, "cat")], None),
            ([(0, "cat"), (-1, "none")], None),
            ([(0, "cat"), (1, None)], None),
        ],
    )
    def test_numbers_with_names_are_class_labels(
        self, tmp_path: Path, pairs: list[tuple[int, str | None]], classes: list[str] | None
    ) -> None:
        """A key is a `ClassLabel` if `<key>_name` names each of its numbers from 0 on, always alike and each other."""
        samples = {str(n): {"metadata": {"label": pair[0], "label_name": pair[1]}} for n, pair in enumerate(pairs)}
        export(packed(tmp_path / "x.mult", samples, {"metadata": JSONField()}), "hf", tmp_path / "out")
        feature = features_of(tmp_path / "out")["label"]
        assert feature == (value("int64") if classes is None else {"names": classes, "_type": "ClassLabel"})

    def test_arrays_of_several_types_are_files(self, tmp_path: Path) -> None:
        """Arrays that differ in type or dimensions, and those that lists cannot hold, are `.npy` files."""
        arrays: dict[str, list[Any]] = {
            "types": [np.zeros(2, np.int8), np.zeros(2, np.int16)],
            "ranks": [np.zeros(2), np.zeros((2, 1))],
            "empty": [np.zeros((0, 3)), np.zeros((1, 3))],
            "single": [np.float32(1), np.float32(2)],
            "complex": [np.zeros(1, np.complex64)] * 2,
        }
        samples = {str(n): {name: np.asarray(values[n]) for name, values in arrays.items()} for n in range(2)}
        export(packed(tmp_path / "x.mult", samples, dict.fromkeys(arrays, NDArrayField())), "hf", tmp_path / "out")
        assert [features_of(tmp_path / "out")[name] for name in arrays] == [FILE] * len(arrays)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


class TestAnyJSON:
    @given(
        rows=st.lists(
            st.dictionaries(st.sampled_from(["a", "b", "json", "", "\n"]), JSON_VALUES), min_size=1, max_size=5
        )
    )
    @settings(max_examples=20, deadline=None)
    @pytest.mark.nightly_examples(10_000)
    def test_columns_agree_with_the_json(self, rows: list[Any]) -> None:
        """Whatever the values of a key are, its column has them or null, and the text of the JSON all of them."""
        with unsynced_folder() as folder:
            samples = {str(n): {"metadata": row} for n, row in enumerate(rows)}
            path = packed(folder / "x.mult", samples, {"metadata": JSONField()})
            export(path, "parquet", folder / "out", shard_samples=2)
            exported = table_of(folder / "out")
        for row, expected in zip(exported, rows, strict=True):
            assert json.loads(row["json"]) == expected
            for name in {"a", "b"} & row.keys():
                assert row[name] == expected.get(name)


class TestFiles:
    def test_row_groups_are_small_and_pages_have_an_index(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A row group ends before the sample that would make it too large; a larger sample is one of its own."""
        monkeypatch.setattr(shards, "GROUP_BYTES", 1000)
        samples = {str(n): {"raw": bytes(size)} for n, size in enumerate((400, 400, 400, 3000, 1))}
        export(packed(tmp_path / "x.mult", samples, {"raw": BytesField()}), "parquet", tmp_path / "out")
        file = pq.ParquetFile(tmp_path / "out/part-00000-of-00001.parquet")
        assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [2, 1, 1, 1]
        assert file.metadata.row_group(0).column(0).has_offset_index
        assert file.schema_arrow.metadata is None

    def test_the_card_describes_the_dataset(self, tmp_path: Path) -> None:
        """The head of `README.md` has features, splits, sizes and the files of the configuration."""
        fields = {"image": SequenceField(ImageField()), "rest": SequenceField(BytesField()), "pose": NDArrayField()}
        fields |= {"metadata": JSONField()}
        samples = {
            str(n): {
                "image": [(0, png(n))],
                "rest": [(0, b"x")],
                "pose": np.eye(2),
                "metadata": {"label": n, "label_name": f"class {n}", "words": ["a"]},
            }
            for n in range(2)
        }
        export(packed(tmp_path / "x.mult", samples, fields), "hf", tmp_path / "out", shard_samples=1)
        card = yaml.safe_load((tmp_path / "out/README.md").read_text().split("---\n")[1])
        info = card["dataset_info"]
        assert info["features"] == [
            {"name": "__key__", "dtype": "string"},
            {"name": "label", "dtype": {"class_label": {"names": {"0": "class 0", "1": "class 1"}}}},
            {"name": "label_name", "dtype": "string"},
            {"name": "words", "list": "string"},
            {"name": "image", "list": "image"},
            {"name": "rest", "list": [{"name": "bytes", "dtype": "binary"}, {"name": "path", "dtype": "string"}]},
            {"name": "pose", "dtype": {"array2_d": {"shape": [2, 2], "dtype": "float64"}}},
            {"name": "json", "dtype": "string"},
            {"name": "__members__", "dtype": "string"},
        ]
        assert [(split["name"], split["num_examples"]) for split in info["splits"]] == [("train", 2)]
        assert card["configs"] == [
            {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}
        ]
        assert sorted(path.name for path in (tmp_path / "out/data").iterdir()) == [
            "train-00000-of-00002.parquet",
            "train-00001-of-00002.parquet",
        ]
