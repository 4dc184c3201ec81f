"""Values as Dagster's pages show them without a click: short Markdown, small pictures, tables.

Dagster 1.13 shows Markdown of less than 1,000 characters in place and longer one behind "[Show Markdown]"; a table
metadata value is always shown in place, and a picture if it is a data URL in such a Markdown.
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import dagster as dg

from mm_assets.errors import MmAssetsError, masked_urls
from mm_assets.pipeline.partition.preview import Chart, SampleView, shortened
from mm_assets.summaries import bytes_said

__all__ = [
    "MAX_INLINE",
    "chart_value",
    "counts_table",
    "escaped",
    "escaped_in_line",
    "failure_of",
    "is_inline",
    "markdown_table",
    "rows_table",
    "sample_value",
    "secrets_hidden",
    "shown_cause",
    "text_table",
]

MAX_INLINE = 999  # characters of Markdown, as JavaScript counts them
_BAR = 16  # characters of the longest bar in a table
_MAX_ROWS = 50  # of a table
_ADDRESS = re.compile(r"://|www\.|@")
_LINKED = re.compile(r"https?://|www\.")  # of a text in a line; other URLs are there to be copied
_ESCAPED = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]<>()#+-.!|~&:@"})
_ESCAPED_IN_LINE = str.maketrans({character: f"\\{character}" for character in "\\`*[]<>|~&"})


def failure_of(error: MmAssetsError, *, allow_retries: bool = False) -> dg.Failure:
    """A failure with the message of an error, without the secrets of URLs; raised `from shown_cause(error)`."""
    return dg.Failure(description=masked_urls(str(error)), allow_retries=allow_retries)


def shown_cause(error: Exception) -> Exception | None:
    """The error as the cause of a failure: Dagster stores its message; None where a URL in that has a secret."""
    return error if masked_urls(str(error)) == str(error) else None


@contextmanager
def secrets_hidden() -> Iterator[None]:
    """Raises an error in whose message a URL has a secret without it: what a tick raises is stored."""
    try:
        yield
    except MmAssetsError as error:
        if shown_cause(error) is None:
            raise failure_of(error) from None
        raise


def sample_value(view: SampleView) -> dg.MarkdownMetadataValue:
    """A sample: its picture, its name, and its content in a few lines."""
    return _pictured(view.picture, (view.name, *view.said))


def chart_value(chart: Chart) -> dg.MarkdownMetadataValue:
    """A histogram, with the range of its values in words."""
    return _pictured(chart.picture, chart.said.split(", ", 1))


def _pictured(picture: bytes | None, lines: Sequence[str]) -> dg.MarkdownMetadataValue:
    shown = ""
    if picture is not None:
        kind = "png" if picture.startswith(b"\x89PNG") else "webp"
        shown = f"![](data:image/{kind};base64,{base64.b64encode(picture).decode()})\n\n"
    width = max(map(len, lines), default=0)
    while not is_inline(text := shown + "  \n".join(escaped(shortened(line, width)) for line in lines)):
        width -= 8
    return dg.MetadataValue.md(text)


def escaped(text: str) -> str:
    """Text in which Markdown means nothing; a space without width keeps addresses from becoming links."""
    return _ADDRESS.sub("\\g<0>\u200b", masked_urls(text)).translate(_ESCAPED)


def escaped_in_line(text: str) -> str:
    """As `escaped`, for what does not begin a line: names and URLs stay as they are, as far as they can."""
    return _LINKED.sub("\\g<0>\u200b", masked_urls(text)).translate(_ESCAPED_IN_LINE).replace("\n", " ")


def is_inline(text: str) -> bool:
    """Whether Dagster shows a Markdown in place."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2 <= MAX_INLINE


def counts_table(counts: Mapping[str, int], what: str, of: str, *, has_bars: bool = False) -> Any:
    """Numbers by name, those of bytes for people; with bars, those of a chart."""
    most = max(counts.values(), default=0) or 1
    rows = []
    for name, count in sorted(counts.items()):
        bar = ["█" * max(round(_BAR * count / most), 1)] if has_bars else []
        rows.append((name, bytes_said(count) if name.endswith("bytes") else f"{count:,}", *bar))
    return text_table((what, of, *([""] if has_bars else [])), rows, numbers={1})


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: set[int] | None = None) -> Any:
    """A table: Markdown where that is short enough to be shown in place, else a table value of the first rows."""
    text = markdown_table(head, rows, numbers=numbers)
    if is_inline(text):
        return dg.MetadataValue.md(text)
    more = [[f"and {len(rows) - _MAX_ROWS:,} more", *[""] * (len(head) - 1)]] if len(rows) > _MAX_ROWS else []
    names = [name or " " for name in head]
    return rows_table([dict(zip(names, row, strict=True)) for row in [*rows[:_MAX_ROWS], *more]], names)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: set[int] | None = None) -> str:
    """A Markdown table whose cells are plain text; columns of `numbers` are aligned to the right."""
    rule = [" ---: " if n in (numbers or ()) else " --- " for n in range(len(head))]
    return "\n".join([_row(head), f"|{'|'.join(rule)}|", *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escaped_in_line, cells)) + " |"


def rows_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dg.TableMetadataValue:
    """Rows as a table value."""
    records = [dg.TableRecord({name: _scalar(row.get(name)) for name in names}) for row in rows]
    return dg.MetadataValue.table(records, schema=dg.TableSchema(columns=[dg.TableColumn(name=n) for n in names]))


def _scalar(value: object) -> str | int | float | bool | None:
    return value if value is None or isinstance(value, int | float | bool) else masked_urls(str(value))
