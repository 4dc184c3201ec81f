"""Filters of text: its length, and the number of images per word of a sample.

Characters are Unicode code points. Words are the runs between white space, as Python's ``str.split()`` finds them. Both
are counted by Arrow over whole columns; no bytes of media are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from mm_assets.filters.base import Block, Filter, Threshold, thresholds_of
from mm_assets.filters.parameters import (
    Limits,
    check_choice,
    check_flag,
    check_limits,
    check_number,
    check_whole,
    some_limit,
)
from mm_assets.rows.schema import Drop

__all__ = [
    "ImageToTextRatioFilter",
    "TextLengthFilter",
    "count_characters",
    "count_words",
    "images_and_words",
]


def count_characters(texts: Any) -> pa.Array:
    """Code points of each text: int64, null where the text is null."""
    return _one_array(pc.utf8_length(texts).cast(pa.int64()))


def count_words(texts: Any) -> pa.Array:
    """Words of each text: int64, null where the text is null."""
    trimmed = pc.utf8_trim_whitespace(texts)
    parts = pc.list_value_length(pc.utf8_split_whitespace(trimmed)).cast(pa.int64())
    # Splitting the empty text gives one empty part.
    return _one_array(pc.if_else(pc.equal(pc.binary_length(trimmed), 0), pa.scalar(0, pa.int64()), parts))


def images_and_words(block: Block) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Image rows and words of all text rows, of each sample: two (num_samples,) int64 arrays."""
    images = np.bincount(block.sample_index[block.rows_of("image")], minlength=block.num_samples)
    return images.astype(np.int64), _sum_by_sample(block, count_words)


def _one_array(values: Any) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _of_texts(block: Block, count: Any) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """The text rows, and a count for each; null where the row has no text."""
    rows = block.rows_of("text")
    return rows, count(block.column("text_content").take(pa.array(rows)))


def _sum_by_sample(block: Block, count: Any) -> npt.NDArray[np.int64]:
    rows, counts = _of_texts(block, count)
    sums = np.zeros(block.num_samples, dtype=np.int64)
    np.add.at(sums, block.sample_index[rows], np.asarray(pc.fill_null(counts, 0).to_numpy(zero_copy_only=False)))
    return sums


class TextLengthFilter(Filter):
    """Keeps texts, or samples by all their texts, whose length lies between limits, all inclusive; None sets no limit.

    Args:
        min_chars: fewest characters kept.
        max_chars: most characters kept.
        min_words: fewest words kept.
        max_words: most words kept.
        scope: "row" judges each text row alone; "sample" judges the sum over a sample's text rows and drops it whole.
        drop_invalid_rows: with scope "row", drop text rows that hold no text.
    """

    reasons = frozenset({"no_content"})

    def __init__(
        self,
        *,
        min_chars: int | None = None,
        max_chars: int | None = None,
        min_words: int | None = None,
        max_words: int | None = None,
        scope: str = "row",
        drop_invalid_rows: bool = True,
    ) -> None:
        some_limit(min_chars=min_chars, max_chars=max_chars, min_words=min_words, max_words=max_words)
        self.chars = check_limits("_chars", min_chars, max_chars, check=check_whole)
        self.words = check_limits("_words", min_words, max_words, check=check_whole)
        self.scope = "sample" if check_choice("scope", scope, ("row", "sample")) == "sample" else "row"
        self.drop_invalid_rows = check_flag("drop_invalid_rows", drop_invalid_rows)

    def judge(self, block: Block) -> Iterable[Drop]:
        """``chars_below_min``, ``chars_above_max`` and likewise for words, with the count; ``no_content``."""
        if self.scope == "row" and self.drop_invalid_rows:
            rows = block.rows_of("text")
            missing = block.column("text_content").take(pa.array(rows)).is_null().to_numpy()
            yield from (Drop(int(row), "no_content", None) for row in rows[missing])
        for name, count, limits in (("chars", count_characters, self.chars), ("words", count_words, self.words)):
            if limits != Limits():
                rows, counts = self._count(block, count)
                for index, reason in limits.reasons(counts):
                    yield Drop(int(rows[index]), f"{name}_{reason}", float(counts[index]))

    def thresholds(self) -> Iterator[Threshold]:
        """Of ``text_chars`` and ``text_words``, or of their sums over a sample."""
        over = " of the sample" if self.scope == "sample" else ""
        for name, limits in (("chars", self.chars), ("words", self.words)):
            yield from thresholds_of(f"text_{name}{over}", limits, setting=f"_{name}", reason=f"{name}_")

    def _count(self, block: Block, count: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows to name in a drop, and the count that decides each."""
        if self.scope == "sample":
            return block.sample_starts, _sum_by_sample(block, count)
        rows, counts = _of_texts(block, count)
        present = counts.is_valid().to_numpy(zero_copy_only=False)
        return rows[present], np.asarray(counts.drop_null().to_numpy(zero_copy_only=False))


class ImageToTextRatioFilter(Filter):
    """Keeps samples whose number of images for each word lies in a closed interval.

    The ratio is image rows / max(words of all text rows, 1).

    Args:
        min: smallest ratio kept.
        max: largest ratio kept; None sets no limit.
    """

    scope = "sample"

    def __init__(self, *, min: float = 0.0, max: float | None = None) -> None:
        self.limits = check_limits("", check_number("min", min), max)
        some_limit(min=min or None, max=max)

    def judge(self, block: Block) -> Iterable[Drop]:
        """``below_min`` or ``above_max`` with the ratio."""
        images, words = images_and_words(block)
        ratios = images / np.maximum(words, 1)
        starts = block.sample_starts
        for sample, reason in self.limits.reasons(ratios):
            yield Drop(int(starts[sample]), reason, float(ratios[sample]))

    def thresholds(self) -> Iterator[Threshold]:
        """Of a measure of its own: the annotator's counts are those before any filter."""
        limits = self.limits._replace(least=self.limits.least or None)  # no ratio is below 0
        return thresholds_of("image_to_text_ratio of the rows that are left", limits)
