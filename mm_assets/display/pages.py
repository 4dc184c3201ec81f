"""Scanned pages with what is written on them: boxes, labels and links in parts of the page's width and height."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mm_assets.display.item import Item, clean_text, json_size
from mm_assets.display.pictures import MAX_FRAMES, frames_item
from mm_assets.display.trees import bounded
from mm_assets.media.text_boxes import PageLayout, TextBoxes

__all__ = ["boxes_of_pages", "pages_item"]

MAX_BOXES = 4000  # of all pages
_MAX_TEXT = 200  # characters of a box's text
_BUDGET = 160_000  # bytes of JSON for boxes


def pages_item(
    name: str, pages: Sequence[tuple[int, Item]], layout: PageLayout | None, facts: Mapping[str, str]
) -> Item:
    """Page images with the boxes that lie over them; without images the boxes alone."""
    item = frames_item(name, list(pages), facts=dict(facts), what="page")
    shown: list[dict[str, Any]] = [dict(frame) for frame in item.data["frames"]]
    data: dict[str, Any] = {"pages": shown}
    note = item.note
    if layout is not None:
        drawn, is_short = boxes_of_pages(layout, [])
        for number, found in enumerate(drawn[:MAX_FRAMES]):
            if number >= len(shown):
                shown.append({"position": number, "media": None, "note": ""})
            shown[number] |= found
        fields, _ = bounded(dict(layout.fields), 16_384)
        data["fields"] = fields
        facts = {**facts, "words": f"{len(layout.words):,}"}
        if len(layout.segments):
            facts = {**facts, "segments": f"{len(layout.segments):,}"}
        if is_short:
            note = f"{note} Not all boxes are drawn.".strip()
    return Item(name=name, kind="page", facts=facts, data=data, media=item.media, note=note)


def boxes_of_pages(layout: PageLayout, sizes: Sequence[tuple[int, int]]) -> tuple[list[dict[str, Any]], bool]:
    """Boxes and links by page, and whether some were left out.

    Args:
        layout: words and segments.
        sizes: (width, height) of the pages, for a layout without sizes of its own.

    Returns:
        Of each page ``boxes``, [left, top, right, bottom, text, label, kind], coordinates in parts of the page, kind
        ``word`` or ``segment``; and ``links``, pairs of indices of boxes.
    """
    own = layout.page_sizes
    extents = np.asarray(sizes if own is None else own, np.float64).reshape(-1, 2)
    if not len(extents):
        return [], bool(len(layout.words) or len(layout.segments))
    pages: list[dict[str, Any]] = [{"boxes": [], "links": []} for _ in extents[:MAX_FRAMES]]
    if own is not None:
        for page, (width, height) in zip(pages, extents.tolist(), strict=False):
            page["shape"] = [width, height]
    left, budget = MAX_BOXES, _BUDGET
    is_short = len(extents) > MAX_FRAMES
    places: dict[int, tuple[int, int]] = {}  # of segments: page and index
    for table, kind in ((layout.segments, "segment"), (layout.words, "word")):
        labels = layout.word_labels() if kind == "word" else table.labels
        for number, box in enumerate(_boxes(table, extents)):
            page_number = int(table.pages[number])
            if page_number >= len(pages) or left <= 0 or budget <= 0:
                is_short = True
                continue
            entry = [*box, clean_text(table.texts[number])[:_MAX_TEXT], clean_text(labels[number] or "")[:60], kind]
            boxes = pages[page_number]["boxes"]
            if kind == "segment":
                places[number] = (page_number, len(boxes))
            boxes.append(entry)
            left -= 1
            budget -= json_size(entry) + 1
    for one, other in layout.links[:MAX_BOXES].tolist():
        if one in places and other in places and places[one][0] == places[other][0]:
            pages[places[one][0]]["links"].append([places[one][1], places[other][1]])
    return pages, is_short


def _boxes(table: TextBoxes, extents: Any) -> list[list[float]]:
    """Coordinates in parts of each page, within it."""
    if not len(table):
        return []
    limits = np.tile(extents[np.minimum(table.pages, len(extents) - 1)], 2)
    parts = np.clip(table.boxes.astype(np.float64) / limits, 0, 1)
    rounded: list[list[float]] = np.round(np.nan_to_num(parts), 4).tolist()
    return rounded
