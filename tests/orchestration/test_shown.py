"""What is shown on Dagster's pages without a click."""

import io

import dagster as dg
import pytest
from PIL import Image

from mm_assets.orchestration.shown import MAX_INLINE, chart_value, counts_table, sample_value, text_table
from mm_assets.pipeline.partition.preview import MAX_BYTES, Chart, SampleView, drawn_bars


def length(text: str) -> int:
    """Characters as JavaScript counts them."""
    return len(text.encode("utf-16-le")) // 2


@pytest.mark.parametrize("said", ["short", "x" * 60, "*_" * 30, "\U0001f600" * 60])
def test_the_largest_picture_is_shown_in_place(said: str) -> None:
    """A picture of the most bytes, with a long name and description, is short enough; the text is truncated."""
    view = SampleView(name=said, said=(said, said), picture=b"RIFF" + bytes(MAX_BYTES - 4))
    text = sample_value(view).md_str
    assert length(text) <= MAX_INLINE < 1000
    assert text.startswith("![](data:image/webp;base64,")


def test_a_chart_is_a_small_png() -> None:
    """The bars of a histogram have heights in proportion, and the picture a data URL of its type."""
    picture = drawn_bars([1, 2, 0, 4])
    with Image.open(io.BytesIO(picture)) as drawn:
        pixels = drawn.convert("RGBA")
        width, height = pixels.size
        bars = [sum(pixels.getpixel((n * width // 4 + 1, y))[3] > 0 for y in range(height)) for n in range(4)]
    assert bars == [height // 4, height // 2, 0, height]
    assert "data:image/png;base64," in chart_value(Chart(name="x", said="4 values, 1 to 2", picture=picture)).md_str


def test_hostile_names_are_text() -> None:
    """No name or text of a sample becomes a link, a picture or HTML."""
    view = SampleView(name="![x](http://e.org/p.png)", said=("<script>", "[a](b) http://e.org www.e.org"), picture=None)
    text = sample_value(view).md_str
    assert "\\!\\[x\\]\\(http\\:" in text
    assert "\\<script\\>" in text
    assert "http\\://\u200be\\.org" in text
    assert "www\\.\u200be\\.org" in text


def test_cells_of_a_table_are_text() -> None:
    """A name in a table is neither a picture, which a page would load, nor HTML or a link; a path can be copied."""
    hostile = "![x](http://e.org/p.png) <img src=x> [a](b) `c` | d\nwww.e.org"
    (line,) = text_table(("what",), [(hostile,)]).md_str.splitlines()[2:]
    assert line == ("| !\\[x\\](http://\u200be.org/p.png) \\<img src=x\\> \\[a\\](b) \\`c\\` \\| d www.\u200be.org |")
    assert text_table(("file",), [("s3://bucket/a_b-c.tar",)]).md_str.endswith("| s3://bucket/a_b-c.tar |")


def test_a_long_table_is_a_table_value() -> None:
    """A table too long for Markdown in place becomes a table value, of which Dagster shows the first rows in place."""
    rows = [(f"partition-{n:05}", str(n)) for n in range(200)]
    short, long = text_table(("a", "b"), rows[:5]), text_table(("a", "b"), rows)
    assert isinstance(short, dg.MarkdownMetadataValue)
    assert isinstance(long, dg.TableMetadataValue)
    assert [record.data["b"] for record in long.records][:2] == ["0", "1"]
    assert long.records[-1].data["a"] == "and 150 more"


def test_counts_are_for_people() -> None:
    """Numbers have separators, bytes units, and bars the lengths of a chart."""
    text = counts_table({"content_bytes": 1_171_472, "rows": 12_345}, "what", "number").md_str
    assert "| content_bytes | 1.2 MB |" in text
    assert "| rows | 12,345 |" in text
    bars = [line.count("█") for line in counts_table({"a": 4, "b": 1}, "r", "n", has_bars=True).md_str.splitlines()]
    assert bars == [0, 0, 16, 4]
