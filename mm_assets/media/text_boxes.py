"""Where text is on pages: words and segments with their boxes, labels and links, as columns.

Values are immutable and checked when they are made, as far as that is possible without the pages; a wrong one raises
`EncodeError`. Coordinates are never scaled or rounded on input: their unit is that of the page's size. Nothing here
reads pixels, files or JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.summaries import summary_repr

__all__ = ["MAX_COORDINATE", "NORMALIZED_SIZE", "Numbers", "PageLayout", "TextBoxes"]

MAX_COORDINATE = 2**31 - 1  # coordinates that are all integers are stored as int32
NORMALIZED_SIZE: Final = 1000  # LayoutLM's page: its position embeddings go from 0 to 1000

Numbers = npt.NDArray[np.int32] | npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, init=False)
class TextBoxes:
    """Texts at their places on pages: words, or segments (form entries, lines, regions) of several words.

    Attributes:
        texts: n texts; may be empty ones.
        boxes: (n, 4): left, top, right, bottom in the units of the page's size; int32 where all are integers, else
            float64.
        pages: (n,) int32, the index of each one's page, from 0.
        labels: n class names, None for one that has none.
        quads: (n, 4, 2): the x and y of four corners, in the source's order; or None where there are only boxes.
    """

    texts: tuple[str, ...]
    boxes: Numbers
    pages: npt.NDArray[np.int32]
    labels: tuple[str | None, ...]
    quads: Numbers | None

    __repr__ = summary_repr

    def __init__(
        self,
        texts: Sequence[str] = (),
        boxes: npt.ArrayLike = (),
        *,
        pages: npt.ArrayLike | None = None,
        labels: Sequence[str | None] | None = None,
        quads: npt.ArrayLike | None = None,
    ) -> None:
        """Take columns of equal length; without `pages` all are on page 0, without `labels` none has one.

        Raises:
            EncodeError: the columns are of different lengths, or of wrong types.
        """
        given = _strings(texts, "texts", none=False)
        count = len(given)
        _set(self, "texts", given)
        _set(self, "boxes", _coordinates(boxes, (count, 4), "boxes"))
        _set(self, "pages", _integers(np.zeros(count) if pages is None else pages, (count,), "pages", low=0))
        named = _strings((None,) * count if labels is None else labels, "labels", none=True)
        if len(named) != count:
            raise _wrong("labels", f"{len(named)}", f"{count}, one for each text")
        _set(self, "labels", named)
        _set(self, "quads", None if quads is None else _coordinates(quads, (count, 4, 2), "quads"))

    def __len__(self) -> int:
        """How many texts there are."""
        return len(self.texts)

    def __eq__(self, other: object) -> bool:
        """Whether texts, labels and numbers are equal; 1 equals 1.0."""
        if not isinstance(other, TextBoxes):
            return NotImplemented
        return (
            (self.texts, self.labels) == (other.texts, other.labels)
            and np.array_equal(self.boxes, other.boxes)
            and np.array_equal(self.pages, other.pages)
            and _equal(self.quads, other.quads)
        )

    def outside(self, page_sizes: Numbers) -> npt.NDArray[np.bool_]:
        """Which are not wholly within their pages of (p, 2) sizes: (n,) bool. A border belongs to the page."""
        limits = page_sizes[self.pages]
        outside = (self.boxes < 0).any(axis=1) | (self.boxes > np.tile(limits, 2)).any(axis=1)
        if self.quads is not None:
            outside |= (self.quads < 0).any(axis=(1, 2)) | (self.quads > limits[:, np.newaxis]).any(axis=(1, 2))
        return np.asarray(outside)

    def clipped(self, page_sizes: Numbers) -> TextBoxes:
        """The same with boxes and corners moved onto their pages, each coordinate by itself."""
        limits = page_sizes[self.pages]
        quads = None if self.quads is None else np.clip(self.quads, 0, limits[:, np.newaxis])
        boxes = np.clip(self.boxes, 0, np.tile(limits, 2))
        return TextBoxes(self.texts, boxes, pages=self.pages, labels=self.labels, quads=quads)

    def normalized(self, page_sizes: Numbers) -> TextBoxes:
        """The same with coordinates ``int(1000 * x / width)`` and ``int(1000 * y / height)``, within 0 to 1000."""
        limits = page_sizes[self.pages].astype(np.float64)
        quads = None if self.quads is None else _normalized(self.quads, limits[:, np.newaxis])
        boxes = _normalized(self.boxes, np.tile(limits, 2))
        return TextBoxes(self.texts, boxes, pages=self.pages, labels=self.labels, quads=quads)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, init=False)
class PageLayout:
    """The words of a document and their relations.

    Attributes:
        words: n words (or lines, where the source has nothing finer).
        segments: s groups of words with a text, box and label of their own, such as the entries of a form.
        word_segments: (n,) int32, the index of each word's segment, -1 for none.
        links: (m, 2) int32, from which segment to which, by index: question to answer, say.
        fields: facts of the document as a whole: ``{"total": "9.00"}``.
        page_sizes: (p, 2), width and height of each page in the units of boxes; int32 or float64 as boxes. None in a
            value to be encoded means: the page images' sizes in pixels.
    """

    words: TextBoxes
    segments: TextBoxes
    word_segments: npt.NDArray[np.int32]
    links: npt.NDArray[np.int32]
    fields: Mapping[str, Any]
    page_sizes: Numbers | None

    __repr__ = summary_repr

    def __init__(
        self,
        words: TextBoxes | None = None,
        *,
        segments: TextBoxes | None = None,
        word_segments: npt.ArrayLike | None = None,
        links: npt.ArrayLike = (),
        fields: Mapping[str, Any] | None = None,
        page_sizes: npt.ArrayLike | None = None,
    ) -> None:
        """Take words and, where there are some, segments with the segment of each word, and links between segments.

        Raises:
            EncodeError: an index is of no segment, a page has no extent, or something is of a wrong type.
        """
        words, segments = words or TextBoxes(), segments or TextBoxes()
        for name, table in (("words", words), ("segments", segments)):
            if not isinstance(table, TextBoxes):
                raise _wrong(name, type(table).__name__, "TextBoxes")
        if fields is not None and not isinstance(fields, Mapping):
            raise _wrong("fields", type(fields).__name__, "a mapping")
        count, past = len(words), len(segments) - 1
        of_words = np.full(count, -1) if word_segments is None else word_segments
        sizes = None if page_sizes is None else _coordinates(page_sizes, (None, 2), "page_sizes")
        if sizes is not None and not (sizes > 0).all():
            raise _wrong("page_sizes", "one that is not positive", "width and height above 0")
        _set(self, "words", words)
        _set(self, "segments", segments)
        _set(self, "word_segments", _integers(of_words, (count,), "word_segments", low=-1, high=past))
        _set(self, "links", _integers(links, (None, 2), "links", low=0, high=past))
        _set(self, "fields", dict(fields or {}))
        _set(self, "page_sizes", sizes)

    def __eq__(self, other: object) -> bool:
        """Whether words, segments, links, fields and page sizes are equal."""
        if not isinstance(other, PageLayout):
            return NotImplemented
        return (
            (self.words, self.segments, self.fields) == (other.words, other.segments, other.fields)
            and np.array_equal(self.word_segments, other.word_segments)
            and np.array_equal(self.links, other.links)
            and _equal(self.page_sizes, other.page_sizes)
        )

    def word_labels(self) -> list[str | None]:
        """Each word's own label, else its segment's, else None."""
        groups = self.word_segments.tolist()
        return [
            self.segments.labels[group] if own is None and group >= 0 else own
            for own, group in zip(self.words.labels, groups, strict=True)
        ]

    def bio_labels(self, *, outside: Sequence[str] = ("other",)) -> list[str]:
        """Each word's label for token classification, as LayoutLM is trained on FUNSD.

        Args:
            outside: segment labels that do not name a class.

        Returns:
            ``B-QUESTION`` for the first word of a segment, ``I-QUESTION`` for the others, ``O`` for words without
            label, of an `outside` one, or only of blanks: dropping blank words leaves every sequence well formed.
        """
        found, begun = [], set()
        groups = self.word_segments.tolist()
        for index, label in enumerate(self.word_labels()):
            if label is None or label in outside or not self.words.texts[index].strip():
                found.append("O")
                continue
            group = groups[index]
            found.append(f"{'I' if group in begun else 'B'}-{label.upper()}")
            if group >= 0:
                begun.add(group)
        return found

    def normalized(self) -> PageLayout:
        """The same with boxes and corners as integers from 0 to 1000 of their page, as LayoutLM takes them.

        Raises:
            EncodeError: page sizes are not known.
        """
        if self.page_sizes is None:
            raise _wrong("page_sizes", "None", "the pages' sizes, to normalize by them")
        return PageLayout(
            self.words.normalized(self.page_sizes),
            segments=self.segments.normalized(self.page_sizes),
            word_segments=self.word_segments,
            links=self.links,
            fields=self.fields,
            page_sizes=np.full_like(self.page_sizes, NORMALIZED_SIZE, dtype=np.int32),
        )


def _set(value: object, name: str, attribute: object) -> None:
    object.__setattr__(value, name, attribute)


def _wrong(what: str, found: str, expected: str) -> EncodeError:
    return EncodeError(f"layout: {what}: found {found}, expected {expected}")


def _equal(one: Numbers | None, other: Numbers | None) -> bool:
    return one is None and other is None if one is None or other is None else np.array_equal(one, other)


def _strings(value: object, what: str, *, none: bool) -> tuple[Any, ...]:
    expected = "a list of text" + (" or None" if none else "")
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _wrong(what, type(value).__name__, expected)
    for index, item in enumerate(value):
        if not isinstance(item, str) and not (none and item is None):
            raise _wrong(f"{what}[{index}]", type(item).__name__, expected)
    return tuple(value)


def _numbers(value: npt.ArrayLike, shape: tuple[int | None, ...], what: str) -> npt.NDArray[Any]:
    """An array of real numbers of a shape, in which None is any extent; nothing is of every shape that has a zero."""
    wanted = "(" + ", ".join("n" if extent is None else str(extent) for extent in shape) + ")"
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise _wrong(what, f"no array ({error})", f"numbers of shape {wanted}") from error
    if array.size == 0 and not shape[0]:
        return np.zeros((0, *(extent or 0 for extent in shape[1:])), dtype=np.int32)
    fits = array.ndim == len(shape) and all(
        extent in (None, found) for extent, found in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in "iuf":
        raise _wrong(what, f"{array.dtype} of shape {array.shape}", f"numbers of shape {wanted}")
    return array


def _coordinates(value: npt.ArrayLike, shape: tuple[int | None, ...], what: str) -> Numbers:
    array = _numbers(value, shape, what)
    if not ((array >= -MAX_COORDINATE) & (array <= MAX_COORDINATE)).all():  # NaN is not
        raise _wrong(what, "a number that is not finite or too large", f"at most {MAX_COORDINATE} either way")
    return _frozen(array, np.float64 if array.dtype.kind == "f" else np.int32)


def _integers(
    value: npt.ArrayLike, shape: tuple[int | None, ...], what: str, *, low: int, high: int = MAX_COORDINATE
) -> npt.NDArray[np.int32]:
    array = _numbers(value, shape, what)
    wrong = (array < low) | (array > high) | (array != np.trunc(array))  # NaN equals nothing
    if wrong.any():
        raise _wrong(what, f"{array[wrong].tolist()[:1]}", f"integers from {low} to {high}")
    return _frozen(array, np.int32)


def _frozen(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    copy = np.array(array, dtype=dtype, order="C")
    copy.setflags(write=False)
    return copy


def _normalized(values: Numbers, limits: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    # Multiplied first: 1000 * x is exact for integers, so that the one rounding of the division cannot reach the next
    # integer, which 1000 * (x / width) now and then does.
    with np.errstate(over="ignore"):  # a page of next to no extent gives infinity, which is clipped
        scaled = NORMALIZED_SIZE * values.astype(np.float64) / limits
    return np.asarray(np.trunc(scaled.clip(0, NORMALIZED_SIZE)), dtype=np.int32)
