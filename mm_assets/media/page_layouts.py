"""JSON layouts of document corpora, turned into words, boxes, labels, links and key fields.

A layout is data, not code: `LayoutMap` has the paths of its entries in a JSON. Reading any JSON returns a `PageLayout`
or None, or raises `EncodeError` that names the place. Nothing is dropped, repaired or scaled; the only arithmetic is
that of a box's corners.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from mm_assets.errors import ConfigError, EncodeError
from mm_assets.media.text_boxes import MAX_COORDINATE, NORMALIZED_SIZE, PageLayout, TextBoxes

__all__ = ["AUTO", "LAYOUTS", "LayoutMap", "detect_layout", "layout_map", "read_layout"]

AUTO: Final = "auto"
MAX_PAGES = 65_536  # of one document; a page number past it is damage

_BOX_FORMATS = ("xyxy", "xywh", "quad", "poly")
_BOX_SCALES = {"pixels": None, "page": None, "0..1": 1, "0..1000": NORMALIZED_SIZE}
_MISSING: Final = object()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMap:
    """The paths of words, boxes and the rest in a JSON layout.

    Paths are keys joined by dots; a part of digits is an index into a list. None: the layout has no such entry. An
    entry that is missing or null in the JSON is absent; but `words` (or `segments`, or `pages`), texts and boxes must
    be there.

    Attributes:
        pages: list of pages, each with its own words; the other paths but `fields` then start at a page.
        segments: list of segments; `words` then starts at a segment.
        words: list of words: objects, or texts whose boxes, labels and pages are parallel lists beside it.
        text: of a word and of a segment.
        box: likewise; or four paths, one for each number.
        box_format: ``xyxy`` (left, top, right, bottom), ``xywh`` (left, top, width, height), ``quad`` (four corners,
            kept, and the box around them) or ``poly`` (two or more points, of which only the box around is kept).
            Points are pairs, or numbers in a row.
        box_scale: ``pixels`` of the page image; ``page``: units of the width and height in the JSON, for any size of
            the image; or parts of the page, ``0..1`` or ``0..1000``.
        label: of a word and of a segment: text, or an integer, which is taken as its digits.
        page: number of its page, of a word and of a segment, from 0.
        id: the name of a segment in links; None: its place in the list of all segments.
        links: of a segment: list of (from, to) pairs. A link that is given at both its ends counts once.
        fields: an object with what the document says as a whole; or a list of paths, of each of which the value is a
            field by the path's last key.
        width: of every page, or of each of `pages`: a number, or a text of one.
        height: likewise.
    """

    pages: str | None = None
    segments: str | None = None
    words: str | None = "words"
    text: str = "text"
    box: str | tuple[str, ...] = "box"
    box_format: str = "xyxy"
    box_scale: str = "pixels"
    label: str | None = "label"
    page: str | None = None
    id: str | None = None
    links: str | None = None
    fields: str | tuple[str, ...] | None = None
    width: str | None = "width"
    height: str | None = "height"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name not in ("text", "box", "box_format", "box_scale"):
                continue
            paths = (value,)
            if field.name in ("box", "fields") and isinstance(value, list | tuple):
                paths = tuple(value)
                object.__setattr__(self, field.name, paths)
            if not all(isinstance(path, str) and path for path in paths):
                raise _bad_setting(field.name, value, "a path: keys joined by dots")
        if isinstance(self.box, tuple) and (len(self.box) != 4 or self.box_format not in ("xyxy", "xywh")):
            raise _bad_setting("box", list(self.box), "four paths, and the box_format xyxy or xywh")
        if self.box_format not in _BOX_FORMATS:
            raise _bad_setting("box_format", self.box_format, f"one of {', '.join(_BOX_FORMATS)}")
        if self.box_scale not in _BOX_SCALES:
            raise _bad_setting("box_scale", self.box_scale, f"one of {', '.join(_BOX_SCALES)}")
        if self.words is None and self.segments is None:
            raise _bad_setting("words", None, "a path, unless there are segments")
        if self.links is not None and self.segments is None:
            raise _bad_setting("links", self.links, "None without segments, which are what links join")
        if self.pages is not None and self.page is not None:
            raise _bad_setting("page", self.page, "None where words are within their pages")
        if (self.width is None) != (self.height is None):
            raise _bad_setting("height", self.height, "both width and height, or neither")

    @property
    def config(self) -> dict[str, Any]:
        """All paths as JSON."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Restore it; paths that are not given have their defaults.

        Raises:
            ConfigError: an unknown key or a wrong value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key, value in config.items():
            if key not in known:
                raise _bad_setting(str(key), value, f"one of the keys {', '.join(known)}")
        return cls(**config)

    @property
    def root(self) -> str:
        """The path that a JSON has where it has this layout."""
        return self.pages or self.segments or self.words or ""


LAYOUTS: Mapping[str, LayoutMap] = MappingProxyType(
    {
        "funsd": LayoutMap(segments="form", id="id", links="linking"),
        "sroie": LayoutMap(box="box8", box_format="quad", label=None, fields="labels"),
        "words": LayoutMap(page="page", fields="fields"),
    }
)
"""The layouts that have a name: FUNSD's forms, SROIE's receipts, and a plain list of words of our own."""


def detect_layout(value: object) -> str | None:
    """The first of `LAYOUTS` that a sample's JSON has at least one entry of; None where it has none.

    The first entry decides: a form entry with words, a word with `box8`, or a word with text and box.
    """
    if not isinstance(value, Mapping):
        return None
    entries = {root: _first(value.get(root)) for root in ("form", "words")}
    if "words" in entries["form"] and "box" in entries["form"]:
        return "funsd"
    if "text" not in entries["words"]:
        return None
    return "sroie" if "box8" in entries["words"] else "words" if "box" in entries["words"] else None


def _first(entries: object) -> Mapping[str, Any]:
    first = entries[0] if isinstance(entries, list) and entries else None
    return first if isinstance(first, Mapping) else {}


def layout_map(value: object, layout: str | LayoutMap = AUTO) -> LayoutMap | None:
    """The description by which `read_layout` reads a JSON value; None where there is no layout to read.

    Args:
        value: a parsed JSON value.
        layout: a description, the name of one of `LAYOUTS`, or ``auto``: the one that `detect_layout` finds. There an
            empty list is the layout of a document without words, and a JSON with neither `form` nor `words` has none.

    Raises:
        EncodeError: the JSON does not have the layout.
        ConfigError: an unknown name.
    """
    if layout == AUTO:
        if not isinstance(value, Mapping):
            raise _wrong("", _kind(value), "an object")
        name = detect_layout(value)
        for key, choice in (("form", "funsd"), ("words", "sroie" if "labels" in value else "words")):
            if name is None and value.get(key) is not None:
                if value[key] != []:
                    raise _wrong(key, "entries of no known layout", f"those of {', '.join(LAYOUTS)}; or describe it")
                name = choice
        return None if name is None else LAYOUTS[name]
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise ConfigError("arguments", "layout", f"found {layout!r}, expected one of {', '.join((AUTO, *LAYOUTS))}")
        layout = LAYOUTS[layout]
    found = _at(value, layout.root)
    if found is _MISSING:
        raise _wrong(layout.root, "nothing", "a list (or null, for a document without layout)")
    return None if found is None else layout


def read_layout(value: object, layout: str | LayoutMap = AUTO, *, num_pages: int | None = None) -> PageLayout | None:
    """Reads a document's words, boxes and the rest out of a parsed JSON value.

    Args:
        value: the JSON.
        layout: as in `layout_map`.
        num_pages: how many pages the document has, where that is known.

    Returns:
        The layout; None where `layout_map` finds none. `page_sizes` is None where the JSON has no sizes and boxes
        are in pixels.

    Raises:
        EncodeError: the JSON does not have the layout.
        ConfigError: an unknown name.
    """
    chosen = layout_map(value, layout)
    return None if chosen is None else _Reading(chosen, num_pages).read(value)


class _Rows:
    """The columns of a table while they are read."""

    __slots__ = ("boxes", "labels", "pages", "quads", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.boxes: list[list[int | float]] = []
        self.quads: list[list[list[int | float]]] = []
        self.labels: list[str | None] = []
        self.pages: list[int] = []

    def table(self) -> TextBoxes:
        quads = self.quads if self.quads else None
        return TextBoxes(self.texts, self.boxes, pages=self.pages, labels=self.labels, quads=quads)


class _Scope(NamedTuple):
    """The start of paths: the JSON, or one of its pages (with its number, if pages are listed) or segments."""

    value: Any
    where: str
    page: int | None


class _Reading:
    """One JSON value while it is read."""

    def __init__(self, layout: LayoutMap, num_pages: int | None) -> None:
        self.map = layout
        self.num_pages = num_pages
        self.words = _Rows()
        self.segments = _Rows()
        self.word_segments: list[int] = []
        self.ids: dict[str | int, int] = {}
        self.links: list[tuple[str, Any]] = []
        self.has_unplaced = False

    def read(self, value: Any) -> PageLayout:
        scopes = [_Scope(value, "", None)]
        if self.map.pages is not None:
            pages, where = _list(scopes[0], self.map.pages)
            if self.num_pages not in (None, len(pages)) or len(pages) > MAX_PAGES:
                raise _wrong(where, f"{len(pages)} pages", f"{self.num_pages or f'at most {MAX_PAGES}'}")
            scopes = [_Scope(page, f"{where}[{number}]", number) for number, page in enumerate(pages)]
        for scope in scopes:
            self._read_scope(scope)
        num_pages = self._count_pages(len(scopes))
        return PageLayout(
            self.words.table(),
            segments=self.segments.table(),
            word_segments=self.word_segments,
            links=self._join_links(),
            fields=self._fields(value),
            page_sizes=self._page_sizes(scopes, num_pages),
        )

    def _read_scope(self, scope: _Scope) -> None:
        if self.map.segments is None:
            self._read_words(scope, -1)
            return
        segments, where = _list(scope, self.map.segments)
        for index, item in enumerate(segments):
            segment = _Scope(item, f"{where}[{index}]", scope.page)
            number = len(self.segments.texts)
            self._add_entry(self.segments, segment)
            identity = number if self.map.id is None else _at(item, self.map.id)
            if isinstance(identity, bool) or not isinstance(identity, str | int) or identity in self.ids:
                raise _wrong(f"{segment.where}.{self.map.id}", _kind(identity), "a text or integer that no other has")
            self.ids[identity] = number
            links = None if self.map.links is None else _at(item, self.map.links)
            if links is not None and links is not _MISSING:
                links, at = _list(segment, self.map.links or "")
                self.links += [(f"{at}[{k}]", link) for k, link in enumerate(links)]
            if self.map.words is not None:
                self._read_words(segment, number)

    def _read_words(self, scope: _Scope, segment: int) -> None:
        words, where = _list(scope, self.map.words or "")
        if words and isinstance(words[0], str):
            boxes, labels, pages = self._parallel(scope, len(words))
            for index, text in enumerate(words):
                at = f"{where}[{index}]"
                self._add(self.words, at, text, boxes[index], labels[index], pages[index], scope.page)
        else:
            for index, word in enumerate(words):
                self._add_entry(self.words, _Scope(word, f"{where}[{index}]", scope.page))
        self.word_segments += [segment] * len(words)

    def _parallel(self, scope: _Scope, count: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Boxes, labels and pages of words that are plain texts."""

        def column(path: str | None) -> list[Any]:
            values = None if path is None else _at(scope.value, path)
            if values is None or values is _MISSING:
                return [None] * count
            if not isinstance(values, list) or len(values) != count:
                raise _wrong(_join(scope.where, path or ""), _kind(values), f"a list of {count}, one for each word")
            return values

        box = self.map.box
        boxes = column(box) if isinstance(box, str) else [list(row) for row in zip(*map(column, box), strict=True)]
        return boxes, column(self.map.label), column(self.map.page)

    def _add_entry(self, rows: _Rows, entry: _Scope) -> None:
        value, box = entry.value, self.map.box
        if not isinstance(value, Mapping):
            raise _wrong(entry.where, _kind(value), "an object")
        self._add(
            rows,
            entry.where,
            _at(value, self.map.text),
            _at(value, box) if isinstance(box, str) else [_at(value, path) for path in box],
            None if self.map.label is None else _at(value, self.map.label),
            None if self.map.page is None else _at(value, self.map.page),
            entry.page,
        )

    def _add(self, rows: _Rows, where: str, text: Any, box: Any, label: Any, page: Any, scope_page: int | None) -> None:
        if not isinstance(text, str):
            raise _wrong(f"{where}.{self.map.text}", _kind(text), "text")
        if isinstance(label, int) and not isinstance(label, bool) and abs(label) <= MAX_COORDINATE:
            label = str(label)
        if label is _MISSING:
            label = None
        if label is not None and not isinstance(label, str):
            raise _wrong(f"{where}.{self.map.label}", _kind(label), "text or an integer")
        if page is None or page is _MISSING:
            self.has_unplaced |= scope_page is None
            page = scope_page or 0
        if isinstance(page, bool) or not isinstance(page, int) or not 0 <= page < MAX_PAGES:
            raise _wrong(f"{where}.{self.map.page}", _kind(page), f"an integer from 0 to {MAX_PAGES - 1}")
        found, quad = _box(box, self.map.box_format, where)
        rows.texts.append(text)
        rows.boxes.append(found)
        rows.labels.append(label)
        rows.pages.append(page)
        if quad is not None:
            rows.quads.append(quad)

    def _count_pages(self, num_scopes: int) -> int:
        named = max((*self.words.pages, *self.segments.pages), default=0) + 1
        count = num_scopes if self.map.pages is not None else self.num_pages or named
        if count > 1 and self.has_unplaced:
            raise _wrong(self.map.root, f"entries without a page, and {count} pages", "a page for each")
        return count

    def _page_sizes(self, scopes: list[_Scope], count: int) -> list[tuple[int | float, int | float]] | None:
        extent = _BOX_SCALES[self.map.box_scale]
        if extent is not None:
            return [(extent, extent)] * count
        sizes = [self._size(scope) for scope in scopes]
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes):
            return known if self.map.pages is not None else known * count
        if known or self.map.box_scale == "page":
            raise _wrong(f"{self.map.width} and {self.map.height}", "a page without them", "the size of each page")
        return None

    def _size(self, scope: _Scope) -> tuple[int | float, int | float] | None:
        if self.map.width is None or self.map.height is None:
            return None
        values = [_at(scope.value, path) for path in (self.map.width, self.map.height)]
        if all(value is None or value is _MISSING for value in values):
            return None
        width, height = (
            _extent(value, _join(scope.where, path))
            for value, path in zip(values, (self.map.width, self.map.height), strict=True)
        )
        return width, height

    def _join_links(self) -> list[tuple[int, int]]:
        joined: dict[tuple[int, int], None] = {}  # in order, each once: corpora state a link at both its ends
        for where, link in self.links:
            if not isinstance(link, list) or len(link) != 2:
                raise _wrong(where, _kind(link), "a pair of ids")
            for end in link:
                if isinstance(end, bool) or not isinstance(end, str | int) or end not in self.ids:
                    raise _wrong(where, f"a link to {_kind(end)}", "the id of a segment that is there")
            joined[self.ids[link[0]], self.ids[link[1]]] = None
        return list(joined)

    def _fields(self, value: Any) -> dict[str, Any]:
        paths = self.map.fields
        if isinstance(paths, str):
            found = _at(value, paths)
            if isinstance(found, Mapping):
                return dict(found)
            paths = (paths,)
        values = ((path.rpartition(".")[2], _at(value, path)) for path in paths or ())
        return {name: found for name, found in values if found is not None and found is not _MISSING}


def _box(value: Any, form: str, where: str) -> tuple[list[int | float], list[list[int | float]] | None]:
    """The box as left, top, right, bottom, and its four corners where it has them."""
    numbers = value
    if isinstance(value, list) and value and all(isinstance(point, list) and len(point) == 2 for point in value):
        numbers = [number for point in value for number in point]
    if not isinstance(numbers, list) or not all(map(_is_coordinate, numbers)):
        raise _wrong(f"{where}: box", _kind(value), f"numbers, as {form}")
    count = len(numbers)
    if (count < 4 or count % 2) if form == "poly" else count != (8 if form == "quad" else 4):
        raise _wrong(f"{where}: box", f"{count} numbers", f"those of {form}")
    if form == "xyxy":
        return numbers, None
    if form == "xywh":
        left, top, width, height = numbers
        return [left, top, left + width, top + height], None
    columns, rows = numbers[0::2], numbers[1::2]
    box = [min(columns), min(rows), max(columns), max(rows)]
    return box, [list(point) for point in zip(columns, rows, strict=True)] if form == "quad" else None


def _is_coordinate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_COORDINATE  # not NaN


def _extent(value: Any, where: str) -> int | float:
    """A page's width or height; some tools write it as text."""
    if isinstance(value, str) and len(value) <= 32:  # longer ones are not numbers; Python's own limit is an error too
        try:
            value = int(value) if value.isdecimal() else float(value)
        except ValueError:
            value = _MISSING
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_COORDINATE:
        raise _wrong(where, _kind(value), "a number above 0")
    return math.trunc(value) if isinstance(value, float) and value.is_integer() else value


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and len(key) <= 9 and int(key) < len(value):
            value = value[int(key)]
        else:
            return _MISSING
    return value


def _list(scope: _Scope, path: str) -> tuple[list[Any], str]:
    """The list at a path and the words for where it is; null is an empty one."""
    found, where = _at(scope.value, path), _join(scope.where, path)
    if found is not None and not isinstance(found, list):
        raise _wrong(where, _kind(found), "a list")
    return found or [], where


def _join(where: str, path: str) -> str:
    return f"{where}.{path}" if where else path


def _kind(value: object) -> str:
    """A JSON value in a few words."""
    if value is _MISSING:
        return "nothing"
    if isinstance(value, list | dict | str):
        return f"{type(value).__name__} of length {len(value)}"
    if isinstance(value, int) and abs(value) > MAX_COORDINATE:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write out very long ones
    return repr(value) if isinstance(value, int | float | None) else type(value).__name__


def _wrong(where: str, found: str, expected: str) -> EncodeError:
    return EncodeError(f"layout: {f'{where}: ' if where else ''}found {found}, expected {expected}")


def _bad_setting(key: str, found: object, expected: str) -> ConfigError:
    return ConfigError("arguments", f"layout.{key}", f"found {found!r}, expected {expected}")
