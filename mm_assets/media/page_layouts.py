"""JSON layouts of document corpora, turned into words, boxes, labels, links and key fields.

A layout is data, not code: a `LayoutMap` has the paths of its entries in a JSON. Reading any JSON returns a
`PageLayout` or None, or raises an `EncodeError` that names the place. Nothing is dropped, repaired or scaled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType, UnionType
from typing import Any, Final, NamedTuple, Self

from mm_assets.errors import ConfigError
from mm_assets.media.text_boxes import MAX_COORDINATE, NORMALIZED_SIZE, PageLayout, TextBoxes, wrong_layout

__all__ = ["AUTO", "LAYOUTS", "LayoutMap", "detect_layout", "layout_map", "read_layout"]

AUTO: Final = "auto"
MAX_PAGES = 65_536  # of one document; a larger page number is damage

_BOX_FORMATS = ("xyxy", "xywh", "quad", "poly")
_BOX_SCALES = {"pixels": None, "page": None, "0..1": 1, "0..1000": NORMALIZED_SIZE}
_MISSING: Final = object()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMap:
    """The paths of words, boxes and the rest in a JSON layout.

    Paths are keys joined by dots; a part of digits is an index into a list. None: the layout has no such entry. An
    entry that is missing or null in the JSON is absent, but `words` (or `segments`, or `pages`), texts and boxes are
    required.

    Attributes:
        pages: list of pages, each with its own words; all other paths except `fields` then start at a page.
        segments: list of segments; `words` then starts at a segment.
        words: list of words: objects, or texts whose boxes, labels and pages are parallel lists beside it.
        text: text of a word or segment.
        box: its box; or four paths, one for each number.
        box_format: ``xyxy`` (left, top, right, bottom), ``xywh`` (left, top, width, height), ``quad`` (four corners,
            stored with the box around them) or ``poly`` (two or more points, of which only the box around them is
            stored). Points are pairs, or numbers in a row.
        box_scale: ``pixels`` of the page image; ``page``: units of the width and height in the JSON, for any size of
            the image; or parts of the page, ``0..1`` or ``0..1000``.
        label: label of a word or segment: text, or an integer, of which the digits are taken.
        page: number of its page, from 0.
        id: name of a segment in links; None: its position in the list of all segments.
        links: a segment's list of (from, to) pairs. A link that both its ends state counts once.
        fields: an object of facts about the whole document; or a list of paths, whose last keys name the facts.
        width: of all pages, or of each of `pages`: a number, or a text of one.
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
        """Restore it; missing paths have their defaults.

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
        """The path that every JSON of this layout has."""
        return self.pages or self.segments or self.words or ""


LAYOUTS: Mapping[str, LayoutMap] = MappingProxyType(
    {  # FUNSD's forms, SROIE's receipts, a plain list of words, and lists of words and boxes by page, as of a PDF
        "funsd": LayoutMap(segments="form", id="id", links="linking"),
        "sroie": LayoutMap(box="box8", box_format="quad", label=None, fields="labels"),
        "words": LayoutMap(page="page", fields="fields"),
        "pages": LayoutMap(pages="pages", box="boxes", label="labels"),
    }
)


def detect_layout(value: object) -> str | None:
    """The name of the layout in `LAYOUTS` that a sample's JSON has; None where it has none or no entries.

    The first entry decides: a form entry with words, a word with `box8`, a word with text and box, or a page with
    words and boxes.
    """
    if not isinstance(value, Mapping):
        return None
    entries = {root: _first(value.get(root)) for root in ("form", "words", "pages")}
    if "words" in entries["form"] and "box" in entries["form"]:
        return "funsd"
    if "text" in entries["words"] and ("box8" in entries["words"] or "box" in entries["words"]):
        return "sroie" if "box8" in entries["words"] else "words"
    return "pages" if {"words", "boxes"} <= entries["pages"].keys() else None


def _first(entries: object) -> Mapping[str, Any]:
    first = entries[0] if isinstance(entries, list) and entries else None
    return first if isinstance(first, Mapping) else {}


def layout_map(value: object, layout: str | LayoutMap = AUTO) -> LayoutMap | None:
    """The description by which `read_layout` reads a JSON value; None where there is no layout to read.

    Args:
        value: a parsed JSON value.
        layout: a description, the name of one of `LAYOUTS`, or ``auto``: the one that `detect_layout` finds. With
            ``auto`` an empty list is a document without words, and a JSON with neither `form` nor `words` has none.

    Raises:
        EncodeError: the JSON does not have the layout.
        ConfigError: an unknown name.
    """
    if layout == AUTO:
        if not isinstance(value, Mapping):
            raise wrong_layout("", _kind(value), "an object")
        name = detect_layout(value)
        for key, choice in (("form", "funsd"), ("words", "sroie" if "labels" in value else "words")):
            if name is None and value.get(key) is not None:
                if value[key] != []:
                    expected = f"those of {', '.join(LAYOUTS)}; or describe it"
                    raise wrong_layout(key, "entries of no known layout", expected)
                name = choice
        return None if name is None else LAYOUTS[name]
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise ConfigError("arguments", "layout", f"found {layout!r}, expected one of {', '.join((AUTO, *LAYOUTS))}")
        layout = LAYOUTS[layout]
    found = _at(value, layout.root)
    if found is _MISSING:
        raise wrong_layout(layout.root, "nothing", "a list (or null, for a document without layout)")
    return None if found is None else layout


def read_layout(value: object, layout: str | LayoutMap = AUTO, *, num_pages: int | None = None) -> PageLayout | None:
    """Read a document's words, boxes and the rest from a parsed JSON value.

    Args:
        value: the JSON.
        layout: as in `layout_map`.
        num_pages: number of pages of the document, if it is known.

    Returns:
        The layout; None where `layout_map` finds none. `page_sizes` is None where the JSON has no sizes and boxes
        are in pixels.

    Raises:
        EncodeError: the JSON does not have the layout.
        ConfigError: an unknown name.
    """
    chosen = layout_map(value, layout)
    return None if chosen is None else _Reading(chosen, num_pages).read(value)


class _Scope(NamedTuple):
    """Where paths start: the JSON, or one of its pages (with its number, if pages are listed), segments or words."""

    value: Any
    where: str
    page: int | None


class _Entry(NamedTuple):
    """A word or segment, checked; `page` is None if neither it nor the place of its list has a page."""

    text: str
    box: list[int | float]
    quad: list[list[int | float]] | None
    label: str | None
    page: int | None


class _Reading:
    """One JSON value while it is read."""

    def __init__(self, layout: LayoutMap, num_pages: int | None) -> None:
        self.map = layout
        self.num_pages = num_pages
        self.words: list[_Entry] = []
        self.segments: list[_Entry] = []
        self.word_segments: list[int] = []
        self.ids: dict[str | int, int] = {}
        self.links: list[_Scope] = []

    def read(self, value: Any) -> PageLayout:
        scopes = [_Scope(value, "", None)]
        if self.map.pages is not None:
            scopes = [page._replace(page=number) for number, page in enumerate(_items(scopes[0], self.map.pages))]
            if self.num_pages not in (None, len(scopes)) or len(scopes) > MAX_PAGES:
                expected = self.num_pages or f"at most {MAX_PAGES}"
                raise wrong_layout(self.map.pages, f"{len(scopes)} pages", f"{expected}")
        for scope in scopes:
            if self.map.segments is None:
                self._read_words(scope, -1)
            else:
                for segment in _items(scope, self.map.segments):
                    self._read_segment(segment)
        return PageLayout(
            _table(self.words),
            segments=_table(self.segments),
            word_segments=self.word_segments,
            links=self._join_links(),
            fields=self._fields(value),
            page_sizes=self._page_sizes(scopes),
        )

    def _read_segment(self, segment: _Scope) -> None:
        number = len(self.segments)
        self.segments.append(self._entry(segment))
        identity = number if self.map.id is None else _at(segment.value, self.map.id)
        if not _is(identity, str | int) or identity in self.ids:
            raise wrong_layout(f"{segment.where}.{self.map.id}", _kind(identity), "a text or integer that no other has")
        self.ids[identity] = number
        if self.map.links is not None and _get(segment.value, self.map.links) is not None:
            self.links += _items(segment, self.map.links)
        if self.map.words is not None:
            self._read_words(segment, number)

    def _read_words(self, scope: _Scope, segment: int) -> None:
        words = _items(scope, self.map.words or "")
        if words and isinstance(words[0].value, str):
            box = self.map.box
            columns = [_column(scope, path, len(words)) for path in ([box] if isinstance(box, str) else box)]
            boxes = columns[0] if isinstance(box, str) else map(list, zip(*columns, strict=True))
            labels, pages = (_column(scope, path, len(words)) for path in (self.map.label, self.map.page))
            for word, *rest in zip(words, boxes, labels, pages, strict=True):
                self.words.append(self._checked(word, word.value, *rest))
        else:
            self.words += map(self._entry, words)
        self.word_segments += [segment] * len(words)

    def _entry(self, entry: _Scope) -> _Entry:
        value, paths = entry.value, self.map.box
        if not isinstance(value, Mapping):
            raise wrong_layout(entry.where, _kind(value), "an object")
        box = _at(value, paths) if isinstance(paths, str) else [_at(value, path) for path in paths]
        label, page = _get(value, self.map.label), _get(value, self.map.page)
        return self._checked(entry, _at(value, self.map.text), box, label, page)

    def _checked(self, entry: _Scope, text: Any, box: Any, label: Any, page: Any) -> _Entry:
        where = entry.where
        if not isinstance(text, str):
            raise wrong_layout(f"{where}.{self.map.text}", _kind(text), "text")
        if _is(label, int) and abs(label) <= MAX_COORDINATE:
            label = str(label)
        if label is not None and not isinstance(label, str):
            raise wrong_layout(f"{where}.{self.map.label}", _kind(label), "text or an integer")
        if page is None:
            page = entry.page
        elif not _is(page, int) or not 0 <= page < MAX_PAGES:
            raise wrong_layout(f"{where}.{self.map.page}", _kind(page), f"an integer from 0 to {MAX_PAGES - 1}")
        return _Entry(text, *_box(box, self.map.box_format, where), label, page)

    def _page_sizes(self, scopes: list[_Scope]) -> list[tuple[int | float, int | float]] | None:
        pages = [entry.page for entry in (*self.words, *self.segments)]
        named = max((page or 0 for page in pages), default=0) + 1
        count = len(scopes) if self.map.pages is not None else self.num_pages or named
        if count > 1 and None in pages:
            raise wrong_layout(self.map.root, f"entries without a page, and {count} pages", "a page for each")
        extent = _BOX_SCALES[self.map.box_scale]
        if extent is not None:
            return [(extent, extent)] * count
        known = [size for size in map(self._size, scopes) if size is not None]
        if len(known) == len(scopes):
            return known if self.map.pages is not None else known * count
        if known or self.map.box_scale == "page":
            raise wrong_layout(
                f"{self.map.width} and {self.map.height}", "a page without them", "the size of each page"
            )
        return None

    def _size(self, scope: _Scope) -> tuple[int | float, int | float] | None:
        paths = [path for path in (self.map.width, self.map.height) if path is not None]  # both or neither
        if all(_get(scope.value, path) is None for path in paths):
            return None
        width, height = (_extent(_at(scope.value, path), _join(scope.where, path)) for path in paths)
        return width, height

    def _join_links(self) -> list[tuple[int, int]]:
        joined: dict[tuple[int, int], None] = {}  # in order, each once: corpora state a link at both its ends
        for link, where, _ in self.links:
            if not isinstance(link, list) or len(link) != 2:
                raise wrong_layout(where, _kind(link), "a pair of ids")
            for end in link:
                if not _is(end, str | int) or end not in self.ids:
                    raise wrong_layout(where, f"a link to {_kind(end)}", "the id of a segment that is there")
            joined[self.ids[link[0]], self.ids[link[1]]] = None
        return list(joined)

    def _fields(self, value: Any) -> dict[str, Any]:
        paths = self.map.fields
        if isinstance(paths, str):
            found = _at(value, paths)
            if isinstance(found, Mapping):
                return dict(found)
            paths = (paths,)
        values = ((path.rpartition(".")[2], _get(value, path)) for path in paths or ())
        return {name: found for name, found in values if found is not None}


def _table(entries: list[_Entry]) -> TextBoxes:
    return TextBoxes(
        [entry.text for entry in entries],
        [entry.box for entry in entries],
        pages=[entry.page or 0 for entry in entries],
        labels=[entry.label for entry in entries],
        quads=[entry.quad for entry in entries if entry.quad is not None] or None,
    )


def _box(value: Any, form: str, where: str) -> tuple[list[int | float], list[list[int | float]] | None]:
    """The box as left, top, right, bottom, and its four corners where it has them."""
    numbers = value
    if isinstance(value, list) and value and all(isinstance(point, list) and len(point) == 2 for point in value):
        numbers = [number for point in value for number in point]
    if not isinstance(numbers, list) or not all(map(_is_coordinate, numbers)):
        raise wrong_layout(f"{where}: box", _kind(value), f"numbers, as {form}")
    count = len(numbers)
    if (count < 4 or count % 2) if form == "poly" else count != (8 if form == "quad" else 4):
        raise wrong_layout(f"{where}: box", f"{count} numbers", f"those of {form}")
    if form == "xyxy":
        return numbers, None
    if form == "xywh":
        left, top, width, height = numbers
        return [left, top, left + width, top + height], None
    columns, rows = numbers[0::2], numbers[1::2]
    box = [min(columns), min(rows), max(columns), max(rows)]
    return box, [list(point) for point in zip(columns, rows, strict=True)] if form == "quad" else None


def _is(value: object, kinds: UnionType | type) -> bool:
    """`isinstance`, except that a boolean is not an integer."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_coordinate(value: Any) -> bool:
    return _is(value, int | float) and abs(value) <= MAX_COORDINATE  # False for NaN


def _extent(value: Any, where: str) -> int | float:
    """A page's width or height; some tools write it as text."""
    if isinstance(value, str) and len(value) <= 32:  # Python refuses very long numbers
        try:
            value = int(value) if value.isdecimal() else float(value)
        except ValueError:
            value = _MISSING
    if not _is(value, int | float) or not 0 < value <= MAX_COORDINATE:
        raise wrong_layout(where, _kind(value), "a number above 0")
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


def _get(value: Any, path: str | None) -> Any:
    """The value at a path; None where it is missing, or where the layout has no such path."""
    found = None if path is None else _at(value, path)
    return None if found is _MISSING else found


def _items(scope: _Scope, path: str) -> list[_Scope]:
    """The entries of the list at a path; null is an empty list."""
    found, where = _at(scope.value, path), _join(scope.where, path)
    if found is not None and not isinstance(found, list):
        raise wrong_layout(where, _kind(found), "a list")
    return [_Scope(item, f"{where}[{index}]", scope.page) for index, item in enumerate(found or [])]


def _column(scope: _Scope, path: str | None, count: int) -> list[Any]:
    """The list at a path that is parallel to `count` words; of None where there is no such list."""
    values = _get(scope.value, path)
    if values is None:
        return [None] * count
    if not isinstance(values, list) or len(values) != count:
        raise wrong_layout(_join(scope.where, path or ""), _kind(values), f"a list of {count}, one for each word")
    return values


def _join(where: str, path: str) -> str:
    return f"{where}.{path}" if where else path


def _kind(value: object) -> str:
    """A JSON value in a message."""
    if value is _MISSING:
        return "nothing"
    if isinstance(value, list | dict | str):
        return f"{type(value).__name__} of length {len(value)}"
    if isinstance(value, int) and abs(value) > MAX_COORDINATE:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write out very long ones
    return repr(value) if isinstance(value, int | float | None) else type(value).__name__


def _bad_setting(key: str, found: object, expected: str) -> ConfigError:
    return ConfigError("arguments", f"layout.{key}", f"found {found!r}, expected {expected}")
