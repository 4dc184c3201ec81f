"""Documents: page images and the words on them, with boxes, labels, links and key fields.

Either half may be absent. Pages are payloads of an `ImageField` after an index, so that a single page can be read. The
layout is a table of columns before them, so that it can be read without decoding pixels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from mm_assets.errors import EncodeError, MediaError
from mm_assets.fields.base import JSON, Encoded, Field, Item, Locating, Part, StoredPart, corrupt, over_limit
from mm_assets.fields.document_payload import (
    RECORD,
    Head,
    OpenDocument,
    check_places,
    locate_layout,
    locate_page,
    write_document,
)
from mm_assets.fields.facts import Boxes, Fact
from mm_assets.fields.image import ImageField
from mm_assets.fields.parts import Path, as_text
from mm_assets.fields.plain import json_of_utf8
from mm_assets.fields.shown import ShownFile, ShownPages, StoredBytes
from mm_assets.media.content_types import Buffer
from mm_assets.media.images import probe_image
from mm_assets.media.page_layouts import AUTO, LAYOUTS, LayoutMap, layout_map, read_layout
from mm_assets.media.text_boxes import MAX_COORDINATE, Numbers, PageLayout
from mm_assets.summaries import ArrayValue, describe, same_value

__all__ = ["Document", "DocumentField"]

_KEPT = ImageField()
_MAX_POSITION = 2**31 - 1  # positions are int32, as in the row table


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Document(ArrayValue):
    """Page images and their layout.

    Attributes:
        pages: images in order: (H, W, C) uint8, or, to be encoded, also the bytes of image files. None: no images.
        layout: words, boxes and the rest. None: not known; a layout without words is one of an empty page.
        positions: of the pages among the rows that they came from, increasing; None: 0, 1, 2 and so on. Words name
            their page by its index in `pages`, never by this.
    """

    pages: Sequence[npt.NDArray[np.uint8] | Buffer] | None = None
    layout: PageLayout | None = None
    positions: Sequence[int] | None = None

    def __eq__(self, other: object) -> bool:
        """Whether pages (pixels, or bytes), their positions and the layout are equal."""
        if not isinstance(other, Document):
            return NotImplemented
        if self.layout != other.layout or self.page_positions != other.page_positions:
            return False
        if (self.pages is None) != (other.pages is None):
            return False
        return all(map(same_value, self.pages or (), other.pages or ()))

    @property
    def page_positions(self) -> list[int]:
        """`positions`, also where they are not given; empty without pages."""
        if self.pages is None:
            return []
        return list(range(len(self.pages)) if self.positions is None else self.positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentField(Field):
    """A document: page images, and words with boxes, labels, links and key fields.

    Value: `Document`, with pages, a layout, or both. Decodes to a `Document` whose pages are (H, W, C) uint8 and whose
    layout knows its pages' sizes. `decode_page` gives one page, `decode_layout` everything but pixels.

    A page's size is that of its image as it came, upright where `image` turns it; a layout that brings its own sizes
    counts in those. Storing images at another size changes no box: boxes count in the page's size, not the image's.

    Attributes:
        image: the field of each page.
        layout: how a JSON layout is read: ``auto``, a name of `mm_assets.media.page_layouts.LAYOUTS`, or a `LayoutMap`.
        outside: what becomes of boxes that reach beyond their page: ``error``, ``clip`` or ``keep``. The record
            counts them.
        normalize: decode boxes and corners to integers from 0 to 1000 of their page, LayoutLM's way.
        max_pages: per document.
        max_words: per document; the limit of segments and of links too.
        max_pixels: of all images of a document together, as they are stored.
    """

    TYPE_ID: ClassVar[int] = 52
    VALUE_TYPE: ClassVar[type] = Document
    metadata_type: ClassVar[np.dtype[np.void]] = RECORD
    FACTS: ClassVar[tuple[type[Fact], ...]] = (Boxes,)
    TAKES_CONTENT: ClassVar[bool] = False
    LIMITS: ClassVar[tuple[str, ...]] = ("max_pages", "max_words", "max_pixels")
    PARTS: ClassVar[Mapping[str, Part]] = {"pages": Part(many=True), "layout": Part()}

    image: ImageField = _KEPT
    layout: str | LayoutMap = AUTO
    outside: str = "error"
    normalize: bool = False
    max_pages: int = 1024
    max_words: int = 1_000_000
    max_pixels: int = 2**30

    def __post_init__(self) -> None:
        if not isinstance(self.image, ImageField):
            raise self._wrong_setting("image", "settings of ImageField")
        if self.image.frames != "first":
            raise self._wrong_setting("image", "frames: first, since a page is one image")
        if not isinstance(self.layout, LayoutMap) and self.layout not in (AUTO, *LAYOUTS):
            names = ", ".join((AUTO, *LAYOUTS))
            raise self._wrong_setting("layout", f"{names}, or a description of a JSON layout")
        self._expect_choice("outside", ("error", "clip", "keep"))
        self._expect_bool("normalize")
        self._expect_int("max_pages", 1, 2**16)
        self._expect_int("max_words", 1, 2**31 - 1)
        self._expect_int("max_pixels", 1, 2**40)

    @property
    def decodes_in_parallel(self) -> bool:
        """As the images."""
        return self.image.decodes_in_parallel

    @property
    def empty_value(self) -> Document:
        """A document with a layout of nothing, and without pages."""
        return self.decode(*self.encode(Document(None, PageLayout())))

    @property
    def config(self) -> dict[str, JSON]:
        """All settings, those of `image` and of a described `layout` as mappings."""
        layout = self.layout.config if isinstance(self.layout, LayoutMap) else self.layout
        return {**super().config, "image": self.image.config, "layout": layout}

    @classmethod
    def from_config(cls, config: Mapping[str, JSON]) -> Self:
        """Restore a field from its configuration."""
        values = dict(config)
        if isinstance(values.get("image"), Mapping):
            values["image"] = ImageField.from_config(values["image"])
        if isinstance(values.get("layout"), Mapping):
            values["layout"] = LayoutMap.from_config(values["layout"])
        return super().from_config(values)

    # --- parts --------------------------------------------------------------------------------------------------------

    def keeps_part(self, part: str) -> bool:
        """Page images, where `image` keeps their bytes."""
        return part == "pages" and self.image.keeps_bytes

    def assemble(self, contents: Mapping[str, Any]) -> Document:
        """Make a document of page images, and of a JSON layout as text or as a value.

        A JSON value without layout gives a document without one where `layout` is ``auto``; a file that is given as
        the layout must hold one.
        """
        self._expect_parts(contents)
        pairs = contents.get("pages")
        if pairs is not None and not (isinstance(pairs, list) and all(isinstance(pair, tuple) for pair in pairs)):
            raise self._wrong_content(f"{describe(pairs)} as pages", "a list of (position, image file)")
        pages = None if pairs is None else [content for _, content in pairs]
        found = contents.get("layout")
        layout = None if found is None else self._read_layout(found, pages)
        if pages is None and layout is None:
            raise self._wrong_content("neither pages nor a layout", "at least one of them")
        return Document(pages, layout, None if pairs is None else [position for position, _ in pairs])

    def _read_layout(self, found: Any, pages: list[Buffer] | None) -> PageLayout | None:
        is_file = isinstance(found, Buffer)
        if is_file:
            try:
                found = json_of_utf8(found)
            except ValueError as error:
                raise self._wrong_content(f"a layout that is not JSON ({error})", "a JSON file") from error
        chosen = self._within("", layout_map, found, self.layout)
        if chosen is None:
            if is_file:
                raise self._wrong_content("a file without layout", "a layout: a file that is given must hold one")
            return None
        layout = self._within("", read_layout, found, chosen, num_pages=None if pages is None else len(pages))
        if pages is not None and layout is not None and layout.page_sizes is not None and chosen.box_scale == "pixels":
            self._compare_sizes(layout.page_sizes, pages)
        return layout

    def _compare_sizes(self, expected: Numbers, pages: list[Buffer]) -> None:
        """Boxes in pixels of an image of another size would silently be in the wrong places."""
        for index, page in enumerate(pages):
            size = self._page_size(page, index)
            if tuple(expected[index].tolist()) != size:
                width, height = expected[index].tolist()
                found = f"a layout for {width} x {height} pixels and an image of {size[0]} x {size[1]} on page {index}"
                turned = "; set orientation of image to apply to turn it" if size == (height, width) else ""
                raise self._wrong_content(found, f"the same size, or another box_scale{turned}")

    def stored_part(self, path: Path) -> StoredPart | None:
        """The layout, or the image of a page."""
        if path[0] == "layout":
            return StoredPart("layout", self, path, self._locate_layout)
        if path[0] == "pages" and len(path) > 1 and isinstance(path[1], int):
            return StoredPart(as_text(path[:2]), self.image, path[2:], partial(self._locate_page, path[1]))
        return None

    def _locate_layout(self, metadata: Buffer, size: int) -> Locating:
        head = Head(*self._unpack_record(metadata))
        return locate_layout(head, size, image_record_size=self.image.metadata_type.itemsize)

    def _locate_page(self, number: int, metadata: Buffer, size: int) -> Locating:
        head, record_size = Head(*self._unpack_record(metadata)), self.image.metadata_type.itemsize
        return locate_page(head, size, number, image_record_size=record_size, max_pages=self.max_pages)

    def items(self, metadata: Buffer | np.void, data: Buffer) -> Iterator[Item]:
        """Return each page's image file, and the layout as it is stored."""
        opened = self._open(metadata, data)
        if opened.has_images:
            for index, position in enumerate(opened.positions()):
                yield Item("pages", position, opened.image(index)[1])
        if opened.has_layout:
            yield Item("layout", 0, opened.stored_layout)

    # --- encode -------------------------------------------------------------------------------------------------------

    def encode(self, value: Document) -> Encoded:
        """Encode a `Document`."""
        sizes = self._check_pages(value)
        layout, num_outside = self._place(value.layout, sizes)
        pages = [self._within(f"page {k}", self.image.encode, page) for k, page in enumerate(value.pages or ())]
        images = list(zip(value.page_positions, pages, strict=True))
        head, pieces = self._write(images, layout, num_outside)
        self._expect_data_size(sum(map(len, pieces)))
        return Encoded(self._pack_record(*head), b"".join(pieces))

    def check(self, value: Document) -> None:
        """Check each page as its field does, and the layout."""
        sizes = self._check_pages(value)
        self._write([], *self._place(value.layout, sizes))
        for index, page in enumerate(value.pages or ()):
            self._within(f"page {index}", self.image.check, page)

    def _write(
        self, images: list[tuple[int, Encoded]], layout: PageLayout | None, num_outside: int
    ) -> tuple[Head, list[bytes | memoryview]]:
        size = self.image.metadata_type.itemsize
        return self._within("", write_document, images, layout, num_outside=num_outside, image_record_size=size)

    def _check_pages(self, value: Document) -> Numbers | None:
        """The pages' sizes, (p, 2) int32; None without images."""
        if not isinstance(value, Document):
            raise self._wrong_value(value, "a Document")
        if value.layout is not None and not isinstance(value.layout, PageLayout):
            raise self._wrong_content(f"{describe(value.layout)} as layout", "a PageLayout")
        if value.pages is None:
            if value.layout is None:
                raise self._wrong_content("a document without pages and layout", "at least one of them")
            return None
        pages: object = value.pages
        if isinstance(pages, str | Buffer) or not isinstance(pages, Sequence):
            raise self._wrong_content(f"{describe(pages)} as pages", "a list of images")
        if not value.pages:
            raise self._wrong_content("no pages", "1 or more, or None")
        if len(value.pages) > self.max_pages:
            raise self._too_large(f"{len(value.pages)} pages", f"at most {self.max_pages}", "max_pages")
        self._check_positions(value)
        sizes = [self._page_size(page, index) for index, page in enumerate(value.pages)]
        stored = [self.image.size[0] * self.image.size[1] if self.image.size else w * h for w, h in sizes]
        if sum(stored) > self.max_pixels:
            raise self._too_large(f"{sum(stored)} pixels", f"at most {self.max_pixels}", "max_pixels")
        return np.array(sizes, dtype=np.int32)

    def _check_positions(self, value: Document) -> None:
        positions = value.page_positions or []
        kinds = {isinstance(position, int | np.integer) and not isinstance(position, bool) for position in positions}
        steps = zip([-1, *positions], [*positions, _MAX_POSITION + 1], strict=True)
        if len(positions) != len(value.pages or ()) or kinds != {True} or any(one >= two for one, two in steps):
            expected = f"one for each page, increasing, from 0, at most {_MAX_POSITION}"
            raise self._wrong_content(f"positions {positions[:4]}…", expected)

    def _page_size(self, page: object, index: int) -> tuple[int, int]:
        """Width and height of a page as it comes, upright where `image` turns it."""
        if isinstance(page, np.ndarray) and page.ndim in (2, 3) and page.size:
            return page.shape[1], page.shape[0]
        if not isinstance(page, Buffer):
            raise self._wrong_content(f"{describe(page)} as page {index}", "pixels of uint8 or an image file's bytes")
        try:
            info = probe_image(page)
        except MediaError as error:
            raise self._wrong_content(f"page {index} that is not an image ({error.reason})", "an image file") from error
        turned = self.image.orientation == "apply" and info.orientation >= 5
        size = (info.height, info.width) if turned else (info.width, info.height)
        if max(size) > MAX_COORDINATE:
            raise self._wrong_content(f"page {index} of {size[0]} x {size[1]} pixels", f"sides up to {MAX_COORDINATE}")
        return size

    def _place(self, layout: PageLayout | None, image_sizes: Numbers | None) -> tuple[PageLayout | None, int]:
        """The layout with its page sizes, clipped if so set, and how many boxes reach beyond their page."""
        if layout is None:
            return None, 0
        sizes = image_sizes if layout.page_sizes is None else layout.page_sizes
        if sizes is None:
            if len(layout.words) or len(layout.segments):
                raise self._wrong_content("words without page images and page_sizes", "one of them, to place boxes by")
            sizes = np.zeros((0, 2), dtype=np.int32)
        if image_sizes is not None and len(sizes) != len(image_sizes):
            raise self._wrong_content(f"{len(sizes)} page_sizes and {len(image_sizes)} pages", "as many of both")
        for count, limit, what in (
            (len(sizes), self.max_pages, "max_pages"),
            *((len(rows), self.max_words, "max_words") for rows in (layout.words, layout.segments, layout.links)),
        ):
            if count > limit:
                raise self._wrong_content(f"a layout with {count} entries", f"at most {limit} ({what})")
        outside = self._within("", check_places, layout, sizes)
        words, segments = layout.words, layout.segments
        num_outside = sum(int(which.sum()) for which in outside)
        if num_outside and self.outside == "error":
            what, table, which = next(
                (what, table, np.flatnonzero(found)[0])
                for what, table, found in zip(("word", "segment"), (words, segments), outside, strict=True)
                if found.any()
            )
            width, height = sizes[table.pages[which]].tolist()
            found = f"{num_outside} boxes beyond their page, first {what} {which}: {table.boxes[which].tolist()}"
            raise self._wrong_content(found, f"all within {width} x {height} (see the setting outside)")
        if num_outside and self.outside == "clip":
            words, segments = words.clipped(sizes), segments.clipped(sizes)
        return dataclasses.replace(layout, words=words, segments=segments, page_sizes=sizes), num_outside

    # --- decode -------------------------------------------------------------------------------------------------------

    def decode(self, metadata: Buffer | np.void, data: Buffer) -> Document:
        """Return pages and layout."""
        opened = self._open(metadata, data)
        layout = self._layout_of(opened)
        if not opened.has_images:
            return Document(None, layout)
        positions = self._positions(opened)
        return Document([self._decode_image(opened, index) for index in range(len(positions))], layout, positions)

    def check_decodable(self, metadata: Buffer | np.void, data: Buffer) -> None:
        """Judge each page image as its field does, and decode the layout."""
        opened = self._open(metadata, data)
        self._layout_of(opened)
        if opened.has_images:
            for index in range(len(self._positions(opened))):
                self._within(f"page {index}", self.image.check_decodable, *opened.image(index))

    def _positions(self, opened: OpenDocument) -> list[int]:
        """The positions of the page images, which together are within `max_pixels`."""
        positions = opened.positions()
        # Each image's own limit is checked as it is decoded; many small bombs are one large one.
        sides = (
            np.frombuffer(opened.image(index)[0], dtype="<u4", count=2).tolist() for index in range(len(positions))
        )
        num_pixels = sum(height * width for height, width in sides)
        if num_pixels > self.max_pixels:
            expected = f"at most {self.max_pixels} pixels"
            raise over_limit("pages are too large together", "max_pixels", found=num_pixels, expected=expected)
        return positions

    def decode_page(self, metadata: Buffer | np.void, data: Buffer, k: int) -> npt.NDArray[np.uint8]:
        """Return page `k`, (H, W, C) uint8, counted from 0 (from the end where negative), decoding nothing else.

        Raises:
            IndexError: there is no image of such a page.
            FormatError: the payload is damaged.
        """
        opened = self._open(metadata, data)
        count = opened.head.num_pages if opened.has_images else 0
        if not -count <= k < count:
            raise IndexError(f"page {k} of a document of {count} page images")
        return self._decode_image(opened, k % count)

    def decode_layout(self, metadata: Buffer | np.void, data: Buffer) -> PageLayout | None:
        """Return the layout, decoding no page; None where the document has none; errors as `decode`."""
        return self._layout_of(self._open(metadata, data))

    def shown(self, metadata: Buffer, stored: StoredBytes) -> ShownPages:
        """The page images and the layout, also where boxes reach beyond their page."""
        lenient = dataclasses.replace(self, normalize=False, outside="keep")
        opened = lenient._open(metadata, stored.whole())
        ranges = [opened.image_range(index) for index in range(opened.head.num_pages)] if opened.has_images else []
        pages = [ShownFile(offset=start, size=end - start) for start, end in ranges]
        return ShownPages(pages=pages, layout=lenient._layout_of(opened))

    def facts(self, metadata: Buffer, data: Buffer) -> Iterator[Boxes]:
        """The boxes as stored, also where `decode` refuses their places; none where `outside` is ``keep``."""
        if self.outside == "keep":
            return
        stored = dataclasses.replace(self, normalize=False, outside="keep")
        layout = stored.decode_layout(metadata, data)
        if layout is None or layout.page_sizes is None:
            return
        for kind, texts in (("word", layout.words), ("segment", layout.segments)):
            yield Boxes(kind, texts.boxes, texts.pages, np.asarray(layout.page_sizes)[texts.pages])

    def _open(self, metadata: Buffer | np.void, data: Buffer) -> OpenDocument:
        return OpenDocument(
            Head(*self._unpack_record(metadata)),
            data,
            image_record_size=self.image.metadata_type.itemsize,
            max_pages=self.max_pages,
            max_words=self.max_words,
        )

    def _decode_image(self, opened: OpenDocument, index: int) -> npt.NDArray[np.uint8]:
        return self._within(f"page {index}", self.image.decode, *opened.image(index))

    def _layout_of(self, opened: OpenDocument) -> PageLayout | None:
        if not opened.has_layout:
            return None
        layout = opened.layout()
        try:
            outside = check_places(layout, opened.page_sizes)
        except EncodeError as error:  # a verdict on the payload's own boxes
            raise corrupt(str(error)) from error
        if self.outside != "keep" and any(which.any() for which in outside):
            raise corrupt("boxes reach beyond their page", found=sum(int(which.sum()) for which in outside), expected=0)
        return layout.normalized() if self.normalize else layout
