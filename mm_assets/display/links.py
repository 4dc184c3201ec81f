"""Relations between the items of a sample: what lies over what, and what runs on whose clock.

Only items are read, no content. `data["over"]` of an item is the name of the item that it belongs on: boxes on an
image, words and subtitles on audio or video, series and notes on the clip's clock, images in the text that they are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mm_assets.display.item import MAX_DATA, Item, json_size
from mm_assets.display.pages import boxes_of_pages
from mm_assets.display.trees import bounded
from mm_assets.display.words import MAX_SEGMENTS, timed_item
from mm_assets.errors import ConfigError, EncodeError
from mm_assets.fields.timed_text import TimedTextField
from mm_assets.media.page_layouts import read_layout

__all__ = ["linked"]

_TIMES = ("timestamp", "timestamps", "time", "times", "t")
_MAX_BLOCKS = 1000
_REST = "rest"  # rows that no modality took, as presets name it: no images are between its texts
_SAME = 200  # characters by which a text is known again: a long one ends early in an item
_WORD_LISTS = ("words", "chunks", "segments")  # as `TimedTextField` takes them


def linked(items: Sequence[Item]) -> tuple[Item, ...]:
    """The items of one sample, with ``data["over"]``: the name of the item that one belongs on."""
    found = _with_times(list(items))
    found = [_interleaved(item, found) for item in found]
    found = [_with_boxes(item, found) for item in found]
    clock = _clock(found)
    if clock is not None:
        found = [_with_words(item) for item in found]
    texts = next((item for item in found if item.kind == "document" and item.name != _REST), None)
    return tuple(_over(item, found, clock, texts) for item in found)


def _over(item: Item, items: Sequence[Item], clock: Item | None, texts: Item | None) -> Item:
    if "over" in item.data:
        return item
    is_timed = item.kind in ("series", "midi", "audio", "video") or "segments" in item.data
    if clock is not None and item.name != clock.name and is_timed:
        return _with(item, over=clock.name)
    if texts is not None and (item.kind == "images" or (item.kind == "image" and "value" in texts.data)):
        return _with(item, over=texts.name)
    return item


def _with(item: Item, **data: Any) -> Item:
    return replace(item, data={**item.data, **data})


def _clock(items: Iterable[Item]) -> Item | None:
    """The item whose time the others follow: a video, else audio, else notes that can be played along."""
    by_kind = {kind: [item for item in items if item.kind == kind] for kind in ("video", "audio")}
    return next((found[0] for found in by_kind.values() if found), None)


# --- series -----------------------------------------------------------------------------------------------------------


def _with_times(items: list[Item]) -> list[Item]:
    """Arrays with a row for each timestamp of another array become series over those times."""
    times = next((item for item in items if item.kind == "array" and _is_times(item)), None)
    if times is None:
        return items
    drawn = times.data["plot"]
    count, (channel, *_) = drawn["count"], drawn["channels"]
    seconds = channel.get("values") or channel.get("low")
    if not seconds or any(one is None for one in seconds):
        return items
    found = []
    for item in items:
        plot = item.data.get("plot")
        if item is times or item.kind != "array" or not isinstance(plot, Mapping) or plot["count"] != count:
            found.append(item)
            continue
        at = [_at(position, seconds, count) for position in plot["times"]]
        facts = {**item.facts, "times": times.name}
        data = {**item.data, "plot": {**plot, "times": at}, "unit": "s"}
        found.append(replace(item, kind="series", facts=facts, data=data))
    return found


def _is_times(item: Item) -> bool:
    words = item.name.lower().replace("-", ".").replace("_", ".").replace("/", ".").split(".")
    drawn = item.data.get("plot")
    is_column = isinstance(drawn, Mapping) and len(drawn["channels"]) == 1
    return is_column and any(word in _TIMES for word in words)


def _at(position: float, seconds: Sequence[float], count: int) -> float:
    """The time of a step, between those that are known."""
    place = position * (len(seconds) - 1) / max(1, count - 1)
    low = min(int(place), len(seconds) - 1)
    high = min(low + 1, len(seconds) - 1)
    return seconds[low] + (place - low) * (seconds[high] - seconds[low])


# --- documents --------------------------------------------------------------------------------------------------------


def _interleaved(item: Item, items: Sequence[Item]) -> Item:
    """JSON with ``texts`` and ``images``, at each place one of both, as a document in reading order.

    Where the sample has these texts as items with positions too, that is the document, and the JSON stays a tree.
    """
    value = item.data.get("value") if item.kind == "json" else None
    if not isinstance(value, Mapping):
        return item
    texts, images = value.get("texts"), value.get("images")
    if not isinstance(texts, list) or not isinstance(images, list) or not texts:
        return item
    pairs = list(zip(texts, images, strict=False))[:_MAX_BLOCKS]
    if any((text is None) == (image is None) for text, image in pairs) or _are_packed(texts, items):
        return item
    pictures = _Pictures(items)
    blocks: list[dict[str, Any]] = []
    for position, (text, image) in enumerate(pairs):
        if text is not None:
            blocks.append({"position": position, "kind": "text", "data": {"text": str(text)}})
            continue
        label = str(image)[:200]
        blocks.append({"position": position, "kind": "picture", "label": label, "picture": pictures.find(label)})
    facts = {**item.facts, "texts": f"{sum(text is not None for text, _ in pairs):,}"}
    facts["images"] = f"{sum(image is not None for _, image in pairs):,}"
    rest = {key: one for key, one in value.items() if key not in ("texts", "images")}
    return replace(item, kind="document", facts=facts, data={"blocks": blocks, "value": rest})


def _are_packed(texts: Sequence[Any], items: Iterable[Item]) -> bool:
    for item in items:
        blocks = item.data["blocks"] if item.kind == "document" else ()
        block = next((one for one in blocks if one["kind"] == "text"), None)
        if block is not None and block["position"] < len(texts):
            words = block["data"].get("text")
            if words and str(texts[block["position"]]).startswith(words[:_SAME]):
                return True
    return False


class _Pictures:
    """The pictures of a sample: by the name of their member, whole or without the sample's key; else in order."""

    def __init__(self, items: Sequence[Item]) -> None:
        in_order: list[dict[str, str]] = []
        self._by_name: dict[str, dict[str, str]] = {}
        for item in items:
            if item.kind == "image":
                in_order.append({"item": item.name, "media": "image"})
                self._by_name[item.name.rsplit("/", 1)[-1]] = in_order[-1]
            elif item.kind == "images":
                in_order += [{"item": item.name, "media": one["media"]} for one in item.data["frames"] if one["media"]]
        self._left = iter(in_order)

    def find(self, label: str) -> dict[str, str] | None:
        """The picture that a document names, or the next one."""
        name = label.rsplit("/", 1)[-1]
        while name:
            if name in self._by_name:
                return self._by_name[name]
            name = name.partition(".")[2]
        return next(self._left, None)


# --- words ------------------------------------------------------------------------------------------------------------


def _with_words(item: Item) -> Item:
    """JSON with the times of words, as aligners and recognizers write it, as texts that follow the clock too."""
    value = item.data.get("value") if item.kind == "json" else None
    if not isinstance(value, Mapping) or not any(isinstance(value.get(name), list) for name in _WORD_LISTS):
        return item
    field = TimedTextField(sort=True, untimed="drop", max_segments=MAX_SEGMENTS)
    try:
        segments = field.decode(*field.encode(value))
    except EncodeError:  # lists of something else
        return item
    timed = timed_item(item.name, segments)
    tree = bounded(value, 60_000)[0]  # the texts take the rest
    small = {**timed.data, "value": tree}
    return replace(item, data=small, media=timed.media) if segments and json_size(small) <= MAX_DATA else item


# --- pages ------------------------------------------------------------------------------------------------------------


def _with_boxes(item: Item, items: Sequence[Item]) -> Item:
    """JSON with the words of pages, which are images of the sample, as boxes over them."""
    value = item.data.get("value") if item.kind == "json" else None
    pages = [one for one in items if one.kind == "image"]
    if not isinstance(value, Mapping) or not pages:
        return item
    try:
        layout = read_layout(value, num_pages=len(pages))
    except (EncodeError, ConfigError):  # JSON that only resembles one, or was truncated to be shown
        return item
    if layout is None or not (len(layout.words) or len(layout.segments)):
        return item
    sizes = [(one.data["width"], one.data["height"]) for one in pages]
    drawn, is_short = boxes_of_pages(layout, sizes)
    named = [{**page, "item": one.name} for page, one in zip(drawn, pages, strict=False)]
    note = f"{item.note} Not all boxes are drawn.".strip() if is_short else item.note
    tree = bounded(value, 60_000)[0]  # the boxes take the rest
    return replace(item, data={"value": tree, "pages": named, "over": pages[0].name}, note=note)
