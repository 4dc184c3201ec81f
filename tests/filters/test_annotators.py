import hashlib

import pyarrow as pa
import pytest

from mm_assets.filters.apply import FilterStream
from mm_assets.filters.registry import build_annotator
from mm_assets.filters.sharpness import sharpness
from mm_assets.rows.schema import DatasetSchema


def _annotate(table: pa.Table, **config: object) -> list[dict]:
    """Rows of the added columns alone."""
    annotator = build_annotator(config, where="w", key="k")
    schema = DatasetSchema(annotator_columns=annotator.columns)
    stream = FilterStream([table], annotators=[annotator], filters=[], schema=schema, on_empty_sample="keep")
    kept = pa.Table.from_batches(list(stream), schema=schema.filtered_schema())
    return kept.select([column.name for column in annotator.columns]).to_pylist()


def test_image_size(make_table, image):
    """Image rows carry width, height and their ratio from the header; others and unreadable ones are null."""
    table = make_table({"a": [("image", image(30, 20)), ("image", b"?"), ("image", None), ("text", "t")]})
    none = {"image_width": None, "image_height": None, "image_aspect_ratio": None}
    found = _annotate(table, type="image_size")
    assert found == [none, {"image_width": 30, "image_height": 20, "image_aspect_ratio": 1.5}, none, none, none]


def test_blur(make_table, image):
    """Image rows carry the score that the filter judges by, at the scale that is asked for."""
    noise = image(40, 30, seed=2)
    table = make_table({"a": [("image", noise), ("image", b"?"), ("text", "t")]})
    full = sharpness(memoryview(noise), min_side=None)
    reduced = sharpness(memoryview(noise), min_side=10)
    assert full != reduced
    assert [r["image_sharpness"] for r in _annotate(table, type="blur")] == [None, full, None, None]
    assert [r["image_sharpness"] for r in _annotate(table, type="blur", min_side=10)] == [None, reduced, None, None]


def test_audio_duration(make_table, wav):
    """Audio rows carry their duration in seconds."""
    table = make_table({"a": [("audio", wav(1.5)), ("audio", b"?"), ("image", b"?")]})
    values = [r["audio_duration_seconds"] for r in _annotate(table, type="audio_duration")]
    assert values == [None, 1.5, None, None]


def test_text_length(make_table):
    """Text rows carry their characters and words."""
    table = make_table({"a": [("text", "zwei Wörter"), ("text", None), ("image", b"?")]})
    found = [(r["text_chars"], r["text_words"]) for r in _annotate(table, type="text_length")]
    assert found == [(None, None), (11, 2), (None, None), (None, None)]


def test_image_to_text_ratio(make_table):
    """Metadata rows carry the sample's images, words and images for each word, counted before any filter."""
    table = make_table({"a": [("image", b"1"), ("text", "one two")], "b": [("image", b"1"), ("image", b"2")], "c": []})
    found = [tuple(r.values()) for r in _annotate(table, type="image_to_text_ratio")]
    none = (None, None, None)
    assert found == [(1, 2, 0.5), none, none, (2, 0, 2.0), none, none, (0, 0, 0.0)]


@pytest.mark.parametrize("modalities", [None, ["text"], ["image", "audio"]])
def test_content_hash(make_table, modalities):
    """Content rows carry the SHA-256 of their bytes, or of their text as UTF-8; metadata rows and errors none."""
    table = make_table({"a": [("image", b"1"), ("text", "ß"), ("image", None)]})
    found = [r["content_sha256"] for r in _annotate(table, type="content_hash", modalities=modalities)]
    expected = [None, hashlib.sha256(b"1").hexdigest(), hashlib.sha256("ß".encode()).hexdigest(), None]
    if modalities is not None:
        expected[1 if modalities == ["text"] else 2] = None
    assert found == expected


def test_prefix_goes_before_every_column(make_table, image):
    """`prefix` keeps the columns clear of the dataset's own."""
    table = make_table({"a": [("image", image(30, 20))]})
    assert set(_annotate(table, type="image_size", prefix="my_")[1]) == {
        "my_image_width", "my_image_height", "my_image_aspect_ratio"
    }  # fmt: skip
