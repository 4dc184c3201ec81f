"""The bytes of a document's payload: columns of numbers and texts, then page images.

One list of columns serves writing and reading. Every count, offset and index is checked before it is used; what is
allocated is a small multiple of the bytes that are there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError
from mm_assets.fields.array_spec import as_bytes_view
from mm_assets.fields.base import Encoded, Locating, corrupt, decode_utf8, over_limit, stored_array, truncated
from mm_assets.fields.plain import JSONField
from mm_assets.fields.records import record_struct
from mm_assets.media.content_types import Buffer
from mm_assets.media.text_boxes import Numbers, PageLayout, TextBoxes

__all__ = ["RECORD", "Head", "OpenDocument", "check_places", "locate_layout", "locate_page", "write_document"]

# docs/spec/fields.md, type 52
RECORD = np.dtype(
    [
        ("num_pages", "<u4"),
        ("num_words", "<u4"),
        ("num_segments", "<u4"),
        ("num_labels", "<u4"),
        ("num_links", "<u4"),
        ("num_outside", "<u4"),
        ("contents", "u1"),
        ("coordinate_size", "u1"),
        ("_pad", "u1", (6,)),
    ]
)
IMAGES, LAYOUT, WORD_QUADS, SEGMENT_QUADS = 1, 2, 4, 8  # bits of `contents`
_COORDINATES = {4: "<i4", 8: "<f8"}

_JSON = JSONField()
_OBJECT = _JSON.encode({}).metadata


class Head(NamedTuple):
    """The numbers of a record, from which all offsets follow; in the order of `RECORD`."""

    num_pages: int
    num_words: int
    num_segments: int
    num_labels: int
    num_links: int
    num_outside: int
    contents: int
    coordinate_size: int

    def columns(self, image_record_size: int) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Name, dtype and shape of each column, in order."""
        pages, words, segments = self.num_pages, self.num_words, self.num_segments
        found: list[tuple[str, str, tuple[int, ...]]] = []
        if self.contents & IMAGES:
            found += [
                ("image_offsets", "<u8", (pages + 1,)),
                ("positions", "<i4", (pages,)),
                ("image_records", "u1", (pages, image_record_size)),
            ]
        if self.contents & LAYOUT:
            number = _COORDINATES[self.coordinate_size]
            found += [("page_sizes", number, (pages, 2)), ("word_boxes", number, (words, 4))]
            found += [("word_quads", number, (words, 4, 2))] if self.contents & WORD_QUADS else []
            found += [("segment_boxes", number, (segments, 4))]
            found += [("segment_quads", number, (segments, 4, 2))] if self.contents & SEGMENT_QUADS else []
            found += [
                ("word_pages", "<i4", (words,)),
                ("word_labels", "<i4", (words,)),
                ("word_segments", "<i4", (words,)),
                ("segment_pages", "<i4", (segments,)),
                ("segment_labels", "<i4", (segments,)),
                ("links", "<i4", (self.num_links, 2)),
                ("text_offsets", "<u8", (words + segments + self.num_labels + 2,)),
            ]
        return [(name, np.dtype(kind), shape) for name, kind, shape in found]

    def check(self) -> tuple[int, ...]:
        """The numbers of words, segments, labels, links and boxes outside; `FormatError` for a record that is none."""
        if not self.contents & (IMAGES | LAYOUT) or self.contents >= 2 * SEGMENT_QUADS:
            raise corrupt("document has impossible contents", found=self.contents, expected="pages, a layout or both")
        has_layout = bool(self.contents & LAYOUT)
        counts = (self.num_words, self.num_segments, self.num_labels, self.num_links, self.num_outside)
        if not has_layout and (any(counts) or self.contents != IMAGES or self.coordinate_size):
            raise corrupt("document without layout has words", found=(*counts, self.contents), expected="none")
        if has_layout and self.coordinate_size not in _COORDINATES:
            raise corrupt("coordinates are of an unknown size", found=self.coordinate_size, expected="4 or 8 bytes")
        if self.contents & IMAGES and not self.num_pages:
            raise corrupt("document has page images, but no pages", found=0, expected="1 or more")
        if max(self.num_labels, self.num_outside) > self.num_words + self.num_segments:
            raise corrupt("document has more labels or outside boxes than boxes", found=counts)
        return counts

    def layout_columns(self, image_record_size: int) -> tuple[int, int]:
        """Where the columns of a layout begin and end in the data; the texts follow."""
        position = start = 0
        for name, kind, shape in self.columns(image_record_size):
            start = position if name == "page_sizes" else start
            position += _padded(kind.itemsize * math.prod(shape))
        return start, position


def _padded(size: int) -> int:
    return (size + 7) & ~7


# --- writing ----------------------------------------------------------------------------------------------------------


def check_places(layout: PageLayout, page_sizes: Numbers) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which words and which segments reach beyond their pages.

    Raises:
        EncodeError: there is no such page, or a box has its right before its left, or its bottom above its top.
    """
    found = []
    for what, table in (("word", layout.words), ("segment", layout.segments)):
        missing = np.flatnonzero(table.pages >= len(page_sizes))
        if missing.size:
            page = table.pages[missing[0]]
            raise EncodeError(f"{what} {missing[0]}: found page {page}, expected one of {len(page_sizes)}, from 0")
        swapped = np.flatnonzero((table.boxes[:, :2] > table.boxes[:, 2:]).any(axis=1))
        if swapped.size:
            box = table.boxes[swapped[0]].tolist()
            raise EncodeError(f"{what} {swapped[0]}: found box {box}, expected left <= right and top <= bottom")
        found.append(table.outside(page_sizes))
    return found[0], found[1]


def write_document(
    images: Sequence[tuple[int, Encoded]], layout: PageLayout | None, *, num_outside: int = 0, image_record_size: int
) -> tuple[Head, list[bytes | memoryview]]:
    """A document's record and the pieces of its data; `images` are (position, payload) of each page.

    Raises:
        EncodeError: a text has no UTF-8 form, or key fields are not JSON.
    """
    head = Head(len(images), 0, 0, 0, 0, 0, IMAGES if images else 0, 0)
    columns: dict[str, npt.NDArray[Any]] = {}
    texts = b""
    if layout is not None:
        head, columns, texts = _layout_columns(head, layout, num_outside)
    placed = head.columns(image_record_size)
    if images:
        start = sum(_padded(kind.itemsize * math.prod(shape)) for _, kind, shape in placed) + _padded(len(texts))
        texts = texts.ljust(_padded(len(texts)), b"\0")
        sizes = [start, *(len(image.data) for _, image in images)]
        columns["image_offsets"] = np.array(list(itertools.accumulate(sizes)), dtype="<u8")
        columns["positions"] = np.array([position for position, _ in images])
        columns["image_records"] = np.frombuffer(b"".join(image.metadata for _, image in images), dtype="u1")
    pieces: list[bytes | memoryview] = []
    for name, kind, _ in placed:
        stored = columns[name].astype(kind).tobytes()
        pieces.append(stored.ljust(_padded(len(stored)), b"\0"))
    return head, [*pieces, texts, *(image.data for _, image in images)]


def _layout_columns(
    head: Head, layout: PageLayout, num_outside: int
) -> tuple[Head, dict[str, npt.NDArray[Any]], bytes]:
    words, segments = layout.words, layout.segments
    sizes = np.zeros((0, 2), dtype=np.int32) if layout.page_sizes is None else layout.page_sizes
    numbers = {"page_sizes": sizes, "word_boxes": words.boxes, "segment_boxes": segments.boxes}
    contents = head.contents | LAYOUT
    if words.quads is not None:
        numbers["word_quads"] = words.quads
        contents |= WORD_QUADS
    if segments.quads is not None:
        numbers["segment_quads"] = segments.quads
        contents |= SEGMENT_QUADS
    labels: dict[str | None, int] = {None: -1}  # class names by first use
    for label in (*words.labels, *segments.labels):
        labels.setdefault(label, len(labels) - 1)
    names = [label for label in labels if label is not None]
    texts = [_utf8(text) for text in (*words.texts, *segments.texts, *names)]
    texts.append(bytes(_JSON.encode(dict(layout.fields)).data))
    columns: dict[str, npt.NDArray[Any]] = {
        **numbers,
        "word_pages": words.pages,
        "word_labels": np.array([labels[label] for label in words.labels], dtype="<i4"),
        "word_segments": layout.word_segments,
        "segment_pages": segments.pages,
        "segment_labels": np.array([labels[label] for label in segments.labels], dtype="<i4"),
        "links": layout.links,
        "text_offsets": np.array(list(itertools.accumulate(map(len, texts), initial=0)), dtype="<u8"),
    }
    filled = Head(
        num_pages=len(sizes),
        num_words=len(words),
        num_segments=len(segments),
        num_labels=len(names),
        num_links=len(layout.links),
        num_outside=num_outside,
        contents=contents,
        coordinate_size=8 if any(column.dtype.kind == "f" for column in numbers.values()) else 4,
    )
    return filled, columns, b"".join(texts)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise EncodeError(f"found a text that has no UTF-8 form ({error.reason}), expected text") from error


# --- reading ----------------------------------------------------------------------------------------------------------


def locate_layout(head: Head, size: int, *, image_record_size: int) -> Locating:
    """See `StoredPart`: the layout, as a document without images; None if there is none."""
    head.check()
    if not head.contents & LAYOUT:
        return None
    start, texts_start = head.layout_columns(image_record_size)
    _expect_size(size, texts_start)
    (texts_size,) = np.frombuffer((yield texts_start - 8, 8), "<u8").tolist()  # the last of the text offsets
    _expect_size(size, texts_start + texts_size)
    record = record_struct(RECORD).pack(*head._replace(contents=head.contents & ~IMAGES))
    return record, start, texts_start + texts_size - start


def locate_page(head: Head, size: int, number: int, *, image_record_size: int, max_pages: int) -> Locating:
    """See `StoredPart`: the image of a page; None if there is none of that number."""
    head.check()
    count = head.num_pages if head.contents & IMAGES else 0
    if not -count <= number < count:
        return None
    images = {name: kind.itemsize * math.prod(shape) for name, kind, shape in head.columns(image_record_size)[:3]}
    records_start = _padded(images["image_offsets"]) + _padded(images["positions"])
    tables_size = records_start + images["image_records"]
    _expect_size(size, tables_size)
    if count > max_pages:
        raise over_limit("document has too many pages", "max_pages", found=count, expected=f"at most {max_pages}")
    tables = as_bytes_view((yield 0, tables_size))
    number %= count
    start, end = np.frombuffer(tables, "<u8", 2, 8 * number).tolist()
    if not tables_size <= start <= end <= size:
        raise corrupt("a page's image is out of place", found=(start, end), expected=f"within {tables_size}..{size}")
    record = records_start + number * image_record_size
    return tables[record : record + image_record_size], start, end - start


def _expect_size(size: int, least: int) -> None:
    if size < least:
        raise truncated("document is shorter than its tables", found=size, expected=least)


class OpenDocument:
    """A payload whose record and tables have been checked: the offsets within its data."""

    __slots__ = ("_columns", "_layout_end", "_layout_start", "_view", "head")

    def __init__(self, head: Head, data: Buffer, *, image_record_size: int, max_pages: int, max_words: int) -> None:
        self.head = head
        self._view = as_bytes_view(data)
        counts = head.check()
        position = self._layout_start = 0
        self._columns: dict[str, npt.NDArray[Any]] = {}
        for name, kind, shape in head.columns(image_record_size):
            size = kind.itemsize * math.prod(shape)
            if position + size > len(self._view):
                raise truncated("document is shorter than its tables", found=len(self._view), expected=position + size)
            if name == "page_sizes":
                self._layout_start = position
            self._columns[name] = stored_array(self._view, kind, shape, offset=position)
            position += _padded(size)
        # After the sizes: counts that the bytes cannot hold are damage, and none of these takes memory.
        if head.num_pages > max_pages:
            expected = f"at most {max_pages}"
            raise over_limit("document has too many pages", "max_pages", found=head.num_pages, expected=expected)
        if max(head.num_words, head.num_segments, head.num_links) > max_words:
            expected = f"at most {max_words} of each"
            raise over_limit("document has too many words", "max_words", found=counts[:4], expected=expected)
        self._layout_end = position
        if self.has_layout:
            self._check_offsets("text_offsets", 0, None)
            self._layout_end += int(self._columns["text_offsets"][-1])
        start = _padded(self._layout_end)
        if head.contents & IMAGES:
            self._check_offsets("image_offsets", start, len(self._view))
        elif self._layout_end != len(self._view):
            raise corrupt("texts do not end with the data", found=self._layout_end, expected=len(self._view))

    def _check_offsets(self, name: str, first: int, last: int | None) -> None:
        offsets = self._columns[name]
        if int(offsets[0]) != first or (last is not None and int(offsets[-1]) != last):
            found = (int(offsets[0]), int(offsets[-1]))
            raise corrupt(f"{name} do not fill the data", found=found, expected=(first, last))
        if (offsets[1:] < offsets[:-1]).any():
            raise corrupt(f"{name} are out of order", found="decreasing ones", expected="increasing ones")
        if last is None and int(offsets[-1]) > len(self._view):
            raise truncated("document is shorter than its texts", found=len(self._view), expected=int(offsets[-1]))

    @property
    def has_images(self) -> bool:
        """Whether there are page images."""
        return bool(self.head.contents & IMAGES)

    @property
    def has_layout(self) -> bool:
        """Whether there is a layout."""
        return bool(self.head.contents & LAYOUT)

    @property
    def page_sizes(self) -> Numbers:
        """The pages' sizes, (p, 2), of a layout."""
        return self._columns["page_sizes"]

    @property
    def stored_layout(self) -> memoryview:
        """The bytes of the layout's columns and texts."""
        return self._view[self._layout_start : self._layout_end]

    def positions(self) -> list[int]:
        """The pages' positions."""
        positions: list[int] = self._columns["positions"].tolist()
        if any(one >= two for one, two in itertools.pairwise([-1, *positions])):
            raise corrupt("positions are out of order", found=positions[:4], expected="increasing ones, from 0")
        return positions

    def image(self, index: int) -> tuple[memoryview, memoryview]:
        """Record and data of a page's image."""
        start, end = self.image_range(index)
        return memoryview(self._columns["image_records"][index]), self._view[start:end]

    def image_range(self, index: int) -> tuple[int, int]:
        """Where a page's image begins and ends in the data."""
        start, end = self._columns["image_offsets"][index : index + 2].tolist()
        return start, end

    def layout(self) -> PageLayout:
        """The layout, all of it checked; `FormatError` where it contradicts itself."""
        head, columns = self.head, self._columns
        texts = self._texts()
        segments_start = head.num_words
        names_start = segments_start + head.num_segments
        names = texts[names_start:-1]
        fields = _JSON.decode(_OBJECT, texts[-1].encode("utf-8"))
        try:
            return PageLayout(
                self._table("word", texts[:segments_start], names),
                segments=self._table("segment", texts[segments_start:names_start], names),
                word_segments=columns["word_segments"],
                links=columns["links"],
                fields=fields,
                page_sizes=columns["page_sizes"],
            )
        except EncodeError as error:  # a verdict on columns, which are the file's here
            raise corrupt(str(error)) from error

    def _texts(self) -> list[str]:
        offsets = self._columns["text_offsets"]
        start = self._layout_end - int(offsets[-1])
        ends = (offsets.astype(np.int64) + start).tolist()
        return [decode_utf8(self._view[one:two]) for one, two in itertools.pairwise(ends)]

    def _table(self, what: str, texts: list[str], names: list[str]) -> TextBoxes:
        numbers = self._columns[f"{what}_labels"]
        if ((numbers < -1) | (numbers >= len(names))).any():
            raise corrupt(f"a {what} has an unknown label", found=numbers.tolist()[:4], expected=f"-1 to {len(names)}")
        by_number: list[str | None] = [*names, None]  # -1 is the last
        return TextBoxes(
            texts,
            self._columns[f"{what}_boxes"],
            pages=self._columns[f"{what}_pages"],
            labels=[by_number[number] for number in numbers.tolist()],
            quads=self._columns.get(f"{what}_quads"),
        )
