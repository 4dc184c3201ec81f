"""Where text is on pages: words and segments with their boxes, labels and links, as columns.

Values are immutable. Constructors check what can be checked without the pages and raise `EncodeError`. Coordinates are
never scaled or rounded on input: their unit is that of the page's size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.summaries import ArrayValue

__all__ = ["MAX_COORDINATE", "NORMALIZED_SIZE", "Numbers", "PageLayout", "TextBoxes", "wrong_layout"]

MAX_COORDINATE = 2**31 - 1  # coordinates that are all integers are stored as int32
NORMALIZED_SIZE: Final = 1000  # LayoutLM's page: its position embeddings go from 0 to 1000

Numbers = npt.NDArray[np.int32] | npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, init=False, repr=False)
class TextBoxes(ArrayValue):
    """Texts with their places on pages: words, or segments (form entries, lines, regions) of several words.

    Attributes:
        texts: n texts, which may be empty.
        boxes: (n, 4): left, top, right, bottom in the units of the page's size; int32 if all are integers, else
            float64.
        pages: (n,) int32, the index of each text's page, from 0.
        labels: n class names, None for a text without one.
        quads: (n, 4, 2): the x and y of four corners, in the source's order; or None where there are only boxes.
    """

    texts: tuple[str, ...]
    boxes: Numbers
    pages: npt.NDArray[np.int32]
    labels: tuple[str | None, ...]
    quads: Numbers | None

    def __init__(
        self,
        texts: Sequence[str] = (),
        boxes: npt.ArrayLike = (),
        *,
        pages: npt.ArrayLike | None = None,
        labels: Sequence[str | None] | None = None,
        quads: npt.ArrayLike | None = None,
    ) -> None:
        """Take columns of equal length; without `pages` all texts are on page 0, without `labels` none has a label.

        Raises:
            EncodeError: the columns have different lengths, or wrong types.
        """
        given = _strings(texts, "texts", none=False)
        count = len(given)
        _set(self, "texts", given)
        _set(self, "boxes", _coordinates(boxes, (count, 4), "boxes"))
        _set(self, "pages", _integers(np.zeros(count) if pages is None else pages, (count,), "pages", low=0))
        named = _strings((None,) * count if labels is None else labels, "labels", none=True)
        if len(named) != count:
            raise wrong_layout("labels", f"{len(named)}", f"{count}, one for each text")
        _set(self, "labels", named)
        _set(self, "quads", None if quads is None else _coordinates(quads, (count, 4, 2), "quads"))

    def __len__(self) -> int:
        """How many texts there are."""
        return len(self.texts)

    def outside(self, page_sizes: Numbers) -> npt.NDArray[np.bool_]:
        """Which texts extend beyond their pages of (p, 2) sizes: (n,) bool. A border belongs to the page."""
        limits = page_sizes[self.pages]
        outside = (self.boxes < 0).any(axis=1) | (self.boxes > np.tile(limits, 2)).any(axis=1)
        if self.quads is not None:
            outside |= (self.quads < 0).any(axis=(1, 2)) | (self.quads > limits[:, np.newaxis]).any(axis=(1, 2))
        return np.asarray(outside)

    def clipped(self, page_sizes: Numbers) -> TextBoxes:
        """The same with boxes and corners moved onto their pages, each coordinate by itself."""
        return self._moved(page_sizes, lambda values, limits: np.clip(values, 0, limits))

    def normalized(self, page_sizes: Numbers) -> TextBoxes:
        """The same with coordinates ``int(1000 * x / width)`` and ``int(1000 * y / height)``, within 0 to 1000."""
        return self._moved(page_sizes, _normalized)

    def _moved(self, page_sizes: Numbers, move: Callable[[Numbers, Numbers], npt.ArrayLike]) -> TextBoxes:
        limits: npt.NDArray[Any] = page_sizes[self.pages]
        quads = None if self.quads is None else move(self.quads, limits[:, np.newaxis])
        boxes = move(self.boxes, np.tile(limits, 2))
        return TextBoxes(self.texts, boxes, pages=self.pages, labels=self.labels, quads=quads)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, init=False, repr=False)
class PageLayout(ArrayValue):
    """The words of a document and their relations.

    Attributes:
        words: n words, or lines if the source has nothing finer.
        segments: s groups of words with a text, box and label of their own, such as the entries of a form.
        word_segments: (n,) int32, the index of each word's segment, -1 for none.
        links: (m, 2) int32, pairs of segments by index, such as question and answer.
        fields: facts about the whole document: ``{"total": "9.00"}``.
        page_sizes: (p, 2), width and height of each page in the units of boxes; int32 or float64 as boxes. None in a
            value to be encoded: the page images' sizes in pixels.
    """

    words: TextBoxes
    segments: TextBoxes
    word_segments: npt.NDArray[np.int32]
    links: npt.NDArray[np.int32]
    fields: Mapping[str, Any]
    page_sizes: Numbers | None

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
        """Take words, and optionally segments, each word's segment, and links between segments.

        Raises:
            EncodeError: an index of no segment, a page without extent, or a value of a wrong type.
        """
        words, segments = words or TextBoxes(), segments or TextBoxes()
        for name, table in (("words", words), ("segments", segments)):
            if not isinstance(table, TextBoxes):
                raise wrong_layout(name, type(table).__name__, "TextBoxes")
        if fields is not None and not isinstance(fields, Mapping):
            raise wrong_layout("fields", type(fields).__name__, "a mapping")
        count, past = len(words), len(segments) - 1
        of_words = np.full(count, -1) if word_segments is None else word_segments
        sizes = None if page_sizes is None else _coordinates(page_sizes, (None, 2), "page_sizes")
        if sizes is not None and not (sizes > 0).all():
            raise wrong_layout("page_sizes", "one that is not positive", "width and height above 0")
        _set(self, "words", words)
        _set(self, "segments", segments)
        _set(self, "word_segments", _integers(of_words, (count,), "word_segments", low=-1, high=past))
        _set(self, "links", _integers(links, (None, 2), "links", low=0, high=past))
        _set(self, "fields", dict(fields or {}))
        _set(self, "page_sizes", sizes)

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
            ``B-QUESTION`` for the first word of a segment, ``I-QUESTION`` for the others, ``O`` for words without a
            label or with an `outside` one. A blank word is ``O`` too, so that sequences stay valid without it.
        """
        found, begun = [], set()
        for label, text, group in zip(self.word_labels(), self.words.texts, self.word_segments.tolist(), strict=True):
            if label is None or label in outside or not text.strip():
                found.append("O")
            else:
                found.append(f"{'I' if group >= 0 and group in begun else 'B'}-{label.upper()}")
                begun.add(group)
        return found

    def normalized(self) -> PageLayout:
        """The same with boxes and corners as integers from 0 to 1000 of their page, as LayoutLM takes them.

        Raises:
            EncodeError: `page_sizes` is None.
        """
        if self.page_sizes is None:
            raise wrong_layout("page_sizes", "None", "the pages' sizes, to normalize by them")
        return dataclasses.replace(
            self,
            words=self.words.normalized(self.page_sizes),
            segments=self.segments.normalized(self.page_sizes),
            page_sizes=np.full_like(self.page_sizes, NORMALIZED_SIZE, dtype=np.int32),
        )


def _set(value: object, name: str, attribute: object) -> None:
    object.__setattr__(value, name, attribute)


def wrong_layout(where: str, found: str, expected: str) -> EncodeError:
    """The error that names a place in a layout."""
    return EncodeError(f"layout: {f'{where}: ' if where else ''}found {found}, expected {expected}")


def _strings(value: object, what: str, *, none: bool) -> tuple[Any, ...]:
    expected = "a list of text" + (" or None" if none else "")
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise wrong_layout(what, type(value).__name__, expected)
    for index, item in enumerate(value):
        if not isinstance(item, str) and not (none and item is None):
            raise wrong_layout(f"{what}[{index}]", type(item).__name__, expected)
    return tuple(value)


def _numbers(value: npt.ArrayLike, shape: tuple[int | None, ...], what: str) -> npt.NDArray[Any]:
    """An array of real numbers of a shape, where None is any extent; an empty value fits if the first one may be 0."""
    wanted = "(" + ", ".join("n" if extent is None else str(extent) for extent in shape) + ")"
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise wrong_layout(what, f"no array ({error})", f"numbers of shape {wanted}") from error
    if array.size == 0 and not shape[0]:
        return np.zeros((0, *(extent or 0 for extent in shape[1:])), dtype=np.int32)
    fits = array.ndim == len(shape) and all(
        extent in (None, found) for extent, found in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in "iuf":
        raise wrong_layout(what, f"{array.dtype} of shape {array.shape}", f"numbers of shape {wanted}")
    return array


def _coordinates(value: npt.ArrayLike, shape: tuple[int | None, ...], what: str) -> Numbers:
    array = _numbers(value, shape, what)
    if not ((array >= -MAX_COORDINATE) & (array <= MAX_COORDINATE)).all():  # NaN is not
        raise wrong_layout(what, "a number that is not finite or too large", f"at most {MAX_COORDINATE} either way")
    return _frozen(array, np.float64 if array.dtype.kind == "f" else np.int32)


def _integers(
    value: npt.ArrayLike, shape: tuple[int | None, ...], what: str, *, low: int, high: int = MAX_COORDINATE
) -> npt.NDArray[np.int32]:
    array = _numbers(value, shape, what)
    wrong = (array < low) | (array > high) | (array != np.trunc(array))  # NaN equals nothing
    if wrong.any():
        raise wrong_layout(what, f"{array[wrong].tolist()[:1]}", f"integers from {low} to {high}")
    return _frozen(array, np.int32)


def _frozen(array: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    copy = np.array(array, dtype=dtype, order="C")
    copy.setflags(write=False)
    return copy


def _normalized(values: Numbers, limits: Numbers) -> npt.NDArray[np.int32]:
    # 1000 * x is exact for integers, so that the division, which rounds once, cannot reach the next integer, as
    # 1000 * (x / width) sometimes does.
    with np.errstate(over="ignore"):  # a tiny page gives infinity, which is clipped
        scaled = NORMALIZED_SIZE * values.astype(np.float64) / limits
    return np.asarray(np.trunc(scaled.clip(0, NORMALIZED_SIZE)), dtype=np.int32)
