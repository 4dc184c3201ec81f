"""Items as HTML that stands alone, for notebooks: no script, no address, every text escaped.

Media are put into the page as ``data:`` URLs, small ones as they are and others as thumbnails, until a budget is spent.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any

from mm_assets.display.item import Item
from mm_assets.display.thumbnails import bytes_of, thumbnail
from mm_assets.errors import MediaError, MissingExtraError

__all__ = ["sample_html"]

BUDGET = 8 << 20  # bytes of media in a page
_MAX_IMAGE = 1 << 20  # bytes of an image that is put in as it is
_MAX_FRAMES = 12
_MAX_TEXT = 4000
_MAX_ROWS = 50
_MAX_CHANNELS = 8
_MAX_NOTES = 2000
_MAX_BOXES = 1000
_WIDTH = 600  # of a drawing, in its own units
_COLOUR = "#4b8bd8"  # on light and dark pages

_FRAME = "border:1px solid #8884;border-radius:6px;padding:6px 10px;margin:6px 0;overflow-x:auto"
_SMALL = "opacity:.7;font-size:85%"


class _Budget:
    """Bytes of media that may still be put into the page, and the items that are on it."""

    def __init__(self, size: int, items: Sequence[Item]) -> None:
        self.left = size
        self.items = items

    def url(self, data: bytes | None, content_type: str) -> str | None:
        """Data as an address; None where there is none, or where it is too much."""
        if data is None or len(data) > self.left:
            return None
        self.left -= len(data)
        return f"data:{content_type};base64,{base64.b64encode(data).decode('ascii')}"


def sample_html(items: Iterable[Item], *, budget: int = BUDGET) -> str:
    """The items of a sample as HTML.

    Args:
        items: of one sample.
        budget: bytes of media that are put into the page; what does not fit is named instead.
    """
    found = list(items)
    left = _Budget(budget, found)
    sections = "".join(_section(item, left) for item in found if item.kind != "absent")
    absent = ", ".join(escape(item.name) for item in found if item.kind == "absent")
    end = f'<div style="{_SMALL}">Not in this sample: {absent}</div>' if absent else ""
    return f'<div class="mm-assets">{sections}{end}</div>'


def _section(item: Item, budget: _Budget) -> str:
    facts = " · ".join(f"{escape(name)} {escape(value)}" for name, value in item.facts.items())
    head = f'<b>{escape(item.name)}</b> <span style="{_SMALL}">{escape(item.kind)} {facts}</span>'
    note = f'<div style="{_SMALL}">{escape(item.note)}</div>' if item.note else ""
    draw = _KINDS.get(item.kind)
    body = "" if draw is None else draw(item, budget)
    return f'<div style="{_FRAME}">{head}{note}<div>{body}</div></div>'


def _text(text: object, limit: int = _MAX_TEXT) -> str:
    whole = str(text)
    more = f"… ({len(whole):,} characters)" if len(whole) > limit else ""
    return f'<pre style="white-space:pre-wrap;max-height:20em;overflow:auto">{escape(whole[:limit] + more)}</pre>'


def _tree(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=1)
    is_open = " open" if len(text) < 600 else ""
    return f"<details{is_open}><summary>JSON</summary>{_text(text, 20_000)}</details>"


def _words(item: Item, budget: _Budget) -> str:
    segments = item.data.get("segments")
    if not isinstance(segments, list):
        return _text(item.data.get("text", ""))
    rows = "".join(
        f"<tr><td>{start:.2f}</td><td>{end:.2f}</td><td>{escape(text)}</td></tr>"
        for start, end, text in segments[:_MAX_ROWS]
    )
    more = f"<div>… {len(segments):,} in all</div>" if len(segments) > _MAX_ROWS else ""
    return f"<table><tr><th>start, s</th><th>end, s</th><th>text</th></tr>{rows}</table>{more}"


def _json(item: Item, budget: _Budget) -> str:
    return _tree(item.data.get("value"))


def _scalar(item: Item, budget: _Budget) -> str:
    return f"<div>{escape(str(item.data.get('text', '')))}</div>"


def _tokens(item: Item, budget: _Budget) -> str:
    ids = " ".join(str(one) for one in item.data["ids"][:500])
    return (_text(item.data["text"]) if "text" in item.data else "") + _text(ids)


# --- pictures and players ---------------------------------------------------------------------------------------------


def _picture(item: Item, name: str, budget: _Budget, *, side: int = 640) -> str:
    """An image of an item: as it is where it is small, else a thumbnail."""
    medium = item.medium(name)
    if medium is None:
        return ""
    data: bytes | None = None
    content_type = medium.content_type
    try:
        if medium.size is None or medium.size <= _MAX_IMAGE:
            data = bytes_of(medium)
    except (MediaError, MissingExtraError) as error:
        return f'<div style="{_SMALL}">{escape(str(error))}</div>'
    if data is None or len(data) > _MAX_IMAGE:
        only = Item(name=item.name, kind=item.kind, media=(medium,))
        data, content_type = thumbnail(only, side), "image/jpeg"
    url = budget.url(data, content_type)
    if url is None:
        return f'<div style="{_SMALL}">{escape(name)} is not shown: the media of this page have their limit.</div>'
    return f'<img src="{url}" alt="{escape(item.name)}" style="max-width:100%;max-height:{min(side, 480)}px">'


def _image(item: Item, budget: _Budget) -> str:
    caption = _text(item.data["caption"]) if "caption" in item.data else ""
    return _picture(item, str(item.data.get("image", "image")), budget) + caption


def _images(item: Item, budget: _Budget) -> str:
    if any(picture is item for one in budget.items for picture in _pictures_of(one, budget)):
        return f'<div style="{_SMALL}">shown in {escape(str(item.data["over"]))}</div>'
    frames = [frame["media"] for frame in item.data["frames"] if frame["media"]]
    shown = "".join(_picture(item, name, budget, side=256) for name in frames[:_MAX_FRAMES])
    more = f"<div>… {len(frames):,} in all</div>" if len(frames) > _MAX_FRAMES else ""
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px">{shown}</div>{more}'


def _depth(item: Item, budget: _Budget) -> str:
    unit = escape(str(item.data["unit"]))
    scale = f"{item.data['low']} {unit} (dark) to {item.data['high']} {unit} (bright)"
    return f"{_picture(item, 'map', budget)}<div>{scale}</div>"


def _player(item: Item, tag: str, name: str, budget: _Budget) -> str:
    medium = item.medium(name)
    data = None
    try:
        if medium is not None and (medium.size is None or medium.size <= budget.left):
            data = bytes_of(medium)
    except (MediaError, MissingExtraError) as error:
        return f'<div style="{_SMALL}">{escape(str(error))}</div>'
    url = None if medium is None else budget.url(data, medium.content_type)
    if url is None:
        return f'<div style="{_SMALL}">Too large to be played in this page: use mm-assets view.</div>'
    return f'<{tag} controls preload="metadata" src="{url}" style="max-width:100%;max-height:360px"></{tag}>'


def _audio(item: Item, budget: _Budget) -> str:
    return f"<div>{_waveform(item)}</div>{_player(item, 'audio', 'audio', budget)}"


def _waveform(item: Item) -> str:
    medium = item.medium("peaks")
    if medium is None or medium.make is None:
        return ""
    try:
        peaks = json.loads(medium.make())["peaks"]
    except (MediaError, MissingExtraError):
        return ""
    step = _WIDTH / max(1, len(peaks))
    bars = "".join(f"M{n * step:.1f} {30 - 30 * high:.1f}V{30.5 - 30 * low:.1f}" for n, (low, high) in enumerate(peaks))
    return _svg(60, f'<path d="{bars}" stroke="{_COLOUR}" stroke-width="{max(0.5, step * 0.8):.2f}"/>')


def _video(item: Item, budget: _Budget) -> str:
    if item.data.get("playable"):
        medium = item.medium("video")
        if medium is not None and medium.size is not None and medium.size <= budget.left:
            return _player(item, "video", "video", budget)
    strip = [one["media"] for one in item.data.get("strip", [])]
    chosen = strip[:: max(1, len(strip) // 6)][:6]
    return "".join(_picture(item, name, budget, side=192) for name in chosen)


# --- drawings ---------------------------------------------------------------------------------------------------------


def _svg(height: float, content: str) -> str:
    box = f"0 0 {_WIDTH} {height:g}"
    return f'<svg viewBox="{box}" style="max-width:{_WIDTH}px;width:100%" role="img" fill="none">{content}</svg>'


def _series(item: Item, budget: _Budget) -> str:
    plot = item.data["plot"]
    channels, times = plot["channels"], plot["times"]
    known = [one for one in times if one is not None]
    first, span = (known[0], (known[-1] - known[0]) or 1.0) if known else (0.0, 1.0)
    rows = [_row(channel, times, first, span, 40.0 * number) for number, channel in enumerate(channels[:_MAX_CHANNELS])]
    unit = escape(str(item.data.get("unit", "")))
    legend = f"<div>{first:g} to {first + span:g} {unit}</div>" if known else ""
    more = f"<div>… {len(channels)} channels in all</div>" if len(channels) > _MAX_CHANNELS else ""
    return _svg(40.0 * len(rows), "".join(rows)) + legend + more


def _row(channel: Mapping[str, Any], times: Sequence[float | None], first: float, span: float, top: float) -> str:
    low = channel.get("values") or channel.get("low") or []
    high = channel.get("values") or channel.get("high") or []
    numbers = [one for one in (*low, *high) if one is not None]
    least, most = (min(numbers), max(numbers)) if numbers else (0.0, 0.0)
    path, is_down = [], False
    for at, one, other in zip(times, low, high, strict=False):
        if at is None or one is None or other is None:
            is_down = False
            continue
        x = 80 + (_WIDTH - 82) * (at - first) / span
        ys = [top + 34 - 30 * (v - least) / (most - least) if most > least else top + 19 for v in (one, other)]
        path.append(f"{'L' if is_down else 'M'}{x:.1f} {ys[0]:.1f}" + (f"V{ys[1]:.1f}" if ys[0] != ys[1] else ""))
        is_down = True
    label = (
        f'<text x="0" y="{top + 20:g}" font-size="11" fill="currentColor">{escape(str(channel["name"])[:10])}</text>'
    )
    scale = "".join(
        f'<text x="76" y="{y:g}" font-size="9" text-anchor="end" fill="currentColor">{value:.3g}</text>'
        for y, value in ((top + 11, most), (top + 36, least))
    )
    return f'{label}{scale}<path d="{"".join(path)}" stroke="{_COLOUR}"/>'


def _array(item: Item, budget: _Budget) -> str:
    body = _series(item, budget) if "plot" in item.data else _picture(item, "map", budget) if item.media else ""
    return body + _text("  ".join(item.data["first"]))


def _midi(item: Item, budget: _Budget) -> str:
    low, high, span = item.data["lowest"], item.data["highest"], item.data["duration"] or 1.0
    each = 120 / (high - low + 1)
    notes = "".join(
        f'<rect x="{_WIDTH * onset / span:.1f}" y="{120 - (pitch - low + 1) * each:.1f}" '
        f'width="{max(1.0, _WIDTH * length / span):.1f}" height="{max(1.0, each * 0.9):.1f}" fill="{_COLOUR}"/>'
        for onset, length, pitch, *_ in item.data["notes"][:_MAX_NOTES]
    )
    return _svg(120, notes)


def _page(item: Item, budget: _Budget) -> str:
    shown = [_sheet(item, page, budget) for page in item.data["pages"][:_MAX_FRAMES]]
    fields = _tree(item.data["fields"]) if item.data.get("fields") else ""
    return "".join(shown) + fields


def _sheet(item: Item, page: Mapping[str, Any], budget: _Budget) -> str:
    image = _picture(item, page["media"], budget) if page.get("media") else ""
    boxes = page.get("boxes", [])
    words = " ".join(str(box[4]) for box in boxes if box[6] == "word") or " ".join(str(box[4]) for box in boxes)
    if not image:
        return _text(words)
    drawn = "".join(
        f'<rect x="{left:g}" y="{top:g}" width="{right - left:.4f}" height="{bottom - top:.4f}"><title>'
        f"{escape(f'{label} {text}'.strip())}</title></rect>"
        for left, top, right, bottom, text, label, _ in boxes[:_MAX_BOXES]
    )
    over = (
        '<svg viewBox="0 0 1 1" preserveAspectRatio="none" style="position:absolute;inset:0;width:100%;height:100%" '
        f'fill="{_COLOUR}" fill-opacity=".12" stroke="{_COLOUR}" stroke-width=".0015">{drawn}</svg>'
    )
    sheet = f'<div style="position:relative;display:inline-block">{image}{over if boxes else ""}</div>'
    return sheet + (f"<details><summary>text</summary>{_text(words)}</details>" if words else "")


def _pictures_of(item: Item, budget: _Budget) -> list[Item]:
    """The images whose positions are between those of a document's texts."""
    if item.kind != "document" or "value" in item.data:
        return []
    return [one for one in budget.items if one.kind == "images" and one.data.get("over") == item.name]


def _document(item: Item, budget: _Budget) -> str:
    drawn: list[tuple[int, Callable[[], str]]]
    drawn = [(block["position"], partial(_block, item, block, budget)) for block in item.data["blocks"]]
    drawn += [
        (frame["position"], partial(_picture, one, frame["media"], budget, side=256))
        for one in _pictures_of(item, budget)
        for frame in one.data["frames"]
        if frame["media"]
    ]
    drawn.sort(key=lambda one: one[0])
    parts = [draw() for _, draw in drawn[: 4 * _MAX_ROWS]]
    rest = _tree(item.data["value"]) if item.data.get("value") else ""
    return f'<div style="max-height:40em;overflow:auto">{"".join(parts)}</div>{rest}'


def _block(item: Item, block: Mapping[str, Any], budget: _Budget) -> str:
    if block["kind"] == "picture":
        place = block["picture"]
        owner = next((one for one in budget.items if place and one.name == place["item"]), None)
        label = f'<div style="{_SMALL}">[{escape(str(block["label"]))}]</div>'
        return label if owner is None else _picture(owner, place["media"], budget, side=256) + label
    if block["kind"] == "text" and "segments" not in block["data"]:
        return _text(block["data"].get("text", ""))
    prefix = block["prefix"]
    inner = Item(
        name=str(block["position"]),
        kind=block["kind"],
        facts=block["facts"],
        data=block["data"],
        media=tuple(
            replace(one, name=one.name.removeprefix(prefix)) for one in item.media if one.name.startswith(prefix)
        ),
        note=block["note"],
    )
    return _section(inner, budget)


_KINDS: dict[str, Callable[[Item, _Budget], str]] = {
    "text": _words,
    "json": _json,
    "scalar": _scalar,
    "tokens": _tokens,
    "image": _image,
    "images": _images,
    "depth": _depth,
    "audio": _audio,
    "video": _video,
    "series": _series,
    "array": _array,
    "midi": _midi,
    "page": _page,
    "document": _document,
}
