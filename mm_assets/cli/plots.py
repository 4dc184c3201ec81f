"""Histograms of a few lines, in characters: blocks on a terminal, number signs where a file or a program reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["histogram_lines", "number_text"]

_EIGHTHS = " ▏▎▍▌▋▊▉"
_BAR = 40  # columns of the longest bar, at most
_LEAST = 8


def number_text(value: float) -> str:
    """A number for people: whole ones with separators, others with three digits that count."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def histogram_lines(edges: Sequence[float], bins: Sequence[int], *, width: int | None) -> Iterator[str]:
    """A line for each bin: its lower and upper edge, its number, and a bar.

    Args:
        edges: of the bins, one more than there are.
        bins: the number in each.
        width: columns of the terminal; None where there is none.
    """
    texts = list(map(number_text, edges))
    counts = [f"{number:,}" for number in bins]
    edge_width, count_width = max(map(len, texts)), max(map(len, counts))
    rest = _BAR if width is None else width - 2 * edge_width - count_width - 9
    longest = min(max(rest, _LEAST), _BAR)
    most = max(*bins, 1)
    for low, high, number, count in zip(texts, texts[1:], bins, counts, strict=False):
        bar = _blocks(number / most * longest) if width is not None else "#" * _whole(number / most * longest)
        yield f"  {low:>{edge_width}} – {high:>{edge_width}}  {count:>{count_width}}  {bar}".rstrip()


def _whole(length: float) -> int:
    return max(round(length), 1) if length else 0


def _blocks(length: float) -> str:
    """A bar whose length is exact to an eighth of a column; what is not nothing is seen."""
    eighths = max(round(length * 8), 1) if length else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
