"""Values in a few words."""

import numpy as np
import pytest

from mm_assets.fields import Audio, TextBoxes, TimedSegment, TimeSeries
from mm_assets.summaries import counted, summarize


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((3, 4), np.uint8), "<uint8 3 x 4>"),
        (b"abc", "<3 bytes>"),
        (None, "None"),
        (np.float32(0.5), "0.5"),
        ("two\nlines", "two·lines"),
        ("x" * 500, "x" * 99 + "… (500 characters)"),
        (Audio(np.zeros((8, 1), np.float32), 16000), "Audio(samples=<float32 8 x 1>, sample_rate=16000)"),
        ([TimedSegment(0.0, 1.5, "a")], "[TimedSegment(start_seconds=0.0, end_seconds=1.5, text='a')]"),
        ([1, 2, 3, 4, 5], "[1, 2, 3, 4, … 5 in all]"),
        ({"a": {"b": {"c": {"d": 1}}}}, "{'a': {'b': {'c': {…}}}}"),
        ([(0, b"xy"), (2, np.zeros(3, np.int64))], "[(0, <2 bytes>), (2, <int64 3>)]"),
    ],
)
def test_a_value_in_one_line(value: object, words: str) -> None:
    """Arrays are shown by type and shape, bytes by size, texts and lists are truncated, and all is on one line."""
    assert summarize(value) == words


def test_a_long_value_is_truncated() -> None:
    """Whatever a value holds, its line has an end."""
    assert len(summarize([{"key": "y" * 90, "other": ["z" * 90] * 4}] * 4)) < 450


def test_values_show_their_arrays_by_shape() -> None:
    """The values of fields fit a screen when they are printed."""
    series = TimeSeries(np.arange(400.0), np.zeros((400, 3), np.float32))
    assert repr(series) == "TimeSeries(timestamps=<float64 400>, values=<float32 400 x 3>, columns=())"
    boxes = TextBoxes(["a"] * 9, np.zeros((9, 4), np.int32))
    assert "boxes=<int32 9 x 4>" in repr(boxes)
    assert "… 9 in all" in repr(boxes)


def test_things_are_counted_with_their_noun() -> None:
    """One is singular; none and many are plural, with separators."""
    assert [counted(number, "file") for number in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
