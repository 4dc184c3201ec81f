import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.filters.apply import FilterStream
from mm_assets.filters.registry import build_filter
from mm_assets.filters.text import count_characters, count_words
from mm_assets.rows.schema import DatasetSchema


def _judge(tables: pa.Table | list[pa.Table], config: dict) -> list[tuple[str, int, str, float | None]]:
    """What a filter drops: (sample_id, position, reason, value)."""
    blocks = tables if isinstance(tables, list) else [tables]
    stream = FilterStream(
        blocks,
        annotators=[],
        filters=[build_filter(config, where="w", key="k")],
        schema=DatasetSchema(),
        on_empty_sample="keep",
    )
    list(stream)
    rows = [row for part in stream.take_dropped() for row in part.to_pylist()]
    return [(r["sample_id"], r["position"], r["reason"], r["value"]) for r in rows]


# Length of texts


@settings(deadline=None, max_examples=200)
@given(texts=st.lists(st.none() | st.text(alphabet=st.characters(codec="utf-8"), max_size=30), max_size=8))
def test_counts_agree_with_python(texts):
    """Characters are code points and words are what str.split() gives, in every script and with every white space."""
    column = pa.array(texts, pa.string())
    assert count_characters(column).to_pylist() == [None if t is None else len(t) for t in texts]
    assert count_words(column).to_pylist() == [None if t is None else len(t.split()) for t in texts]


def test_length_limits_are_inclusive(make_table):
    """Text rows are kept between the limits, both included; the value is the count that decided."""
    table = make_table({"a": [("text", t) for t in ("", "ab", "abc", "a b c d", "äöü ß x")] + [("image", b"i")]})
    assert _judge(table, {"type": "text_length", "min_chars": 2, "max_chars": 6}) == [
        ("a", 0, "chars_below_min", 0.0), ("a", 3, "chars_above_max", 7.0), ("a", 4, "chars_above_max", 7.0)
    ]  # fmt: skip
    assert _judge(table, {"type": "text_length", "min_words": 1, "max_words": 3}) == [
        ("a", 0, "words_below_min", 0.0), ("a", 3, "words_above_max", 4.0)
    ]  # fmt: skip


def test_length_of_a_whole_sample(make_table):
    """With scope "sample" the texts of a sample count together and it stays or goes whole, missing texts as none."""
    table = make_table({"a": [("text", "one two"), ("text", "three")], "b": [("text", "one")], "c": [("text", None)]})
    dropped = _judge(table, {"type": "text_length", "min_words": 3, "scope": "sample"})
    assert dropped == [
        ("b", -1, "words_below_min", 1.0), ("b", 0, "words_below_min", 1.0),
        ("c", -1, "words_below_min", 0.0), ("c", 0, "words_below_min", 0.0),
    ]  # fmt: skip


def test_text_rows_without_text_are_dropped_by_default(make_table):
    """A text row that holds no text is invalid, not short."""
    table = make_table({"a": [("text", None), ("text", "abc")]})
    assert _judge(table, {"type": "text_length", "min_chars": 1}) == [("a", 0, "no_content", None)]
    assert _judge(table, {"type": "text_length", "min_chars": 1, "drop_invalid_rows": False}) == []


# Images for each word


def test_image_to_text_ratio_judges_samples(make_table):
    """Samples are kept whose images for each word lie between the limits, both included."""
    samples = {
        "none": [("text", "four words are here")],
        "half": [("image", b"1"), ("text", "two"), ("text", "words"), ("audio", b"3")],
        "all": [("image", b"1"), ("image", b"2")],
    }
    table = make_table(samples)
    config = {"type": "image_to_text_ratio", "min": 0.5, "max": 2.0}
    assert _judge(table, config) == [("none", -1, "below_min", 0.0), ("none", 0, "below_min", 0.0)]
    tighter = _judge(table, {"type": "image_to_text_ratio", "max": 1.9})
    assert {(d[0], d[2], d[3]) for d in tighter} == {("all", "above_max", 2.0)}


# Exact duplicates


def test_duplicate_rows_go_and_the_first_stays(make_table):
    """With scope "row" media that came before in the partition is dropped, across samples and blocks; text is not."""
    first = make_table({"a": [("image", b"1"), ("text", "t"), ("image", b"1")]})
    second = make_table({"b": [("image", b"1"), ("text", "t"), ("audio", b"1"), ("image", b"2")]})
    config = {"type": "exact_duplicates", "scope": "row"}
    assert _judge([first, second], config) == [("a", 2, "duplicate", None), ("b", 0, "duplicate", None)]
    texts = _judge([first, second], {**config, "modalities": ["text"]})
    assert texts == [("b", 1, "duplicate", None)]


def test_duplicate_samples_have_the_same_content_in_the_same_order(make_table):
    """With scope "sample" all content must agree, modality by modality, in order; positions do not matter."""
    table = make_table(
        {
            "a": [("image", b"1"), ("text", "t")],
            "same": [("image", (4, b"1")), ("text", (9, "t"))],
            "turned": [("text", "t"), ("image", b"1")],
            "more": [("image", b"1"), ("text", "t"), ("text", "u")],
            "less": [("image", b"1")],
            "other kind": [("audio", b"1"), ("text", "t")],
        }
    )
    assert {d[0] for d in _judge(table, {"type": "exact_duplicates"})} == {"same"}
    images = _judge(table, {"type": "exact_duplicates", "modalities": ["image"]})
    assert {d[0] for d in images} == {"same", "turned", "more", "less"}


def test_unknown_content_is_never_a_duplicate(make_table):
    """Rows and samples whose content could not be read, and samples with nothing to compare, are not dropped."""
    table = make_table({"a": [("image", None)], "b": [("image", None)], "c": [], "d": []})
    assert _judge(table, {"type": "exact_duplicates"}) == []
    assert _judge(table, {"type": "exact_duplicates", "scope": "row"}) == []


def test_boundaries_between_rows_count(make_table):
    """Content that only agrees when run together is not the same."""
    table = make_table({"a": [("text", "ab"), ("text", "c")], "b": [("text", "a"), ("text", "bc")]})
    assert _judge(table, {"type": "exact_duplicates"}) == []


@pytest.mark.parametrize("modalities", [None, ["text"], ["image", "text"]])
def test_text_alone_needs_no_content(modalities):
    """Duplicates by text alone are found before media is fetched; all others need it."""
    built = build_filter({"type": "exact_duplicates", "modalities": modalities}, where="w", key="k")
    assert built.needs_content == (modalities != ["text"])
