"""Texts with times, and token ids, for people."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.display.item import (
    MAX_DATA,
    MAX_WHOLE,
    Content,
    Item,
    clean_text,
    human_bytes,
    human_seconds,
    json_size,
    made,
)
from mm_assets.display.trees import text_of_bytes
from mm_assets.errors import MediaError
from mm_assets.fields.shown import ShownTokens
from mm_assets.media.subtitles import TimedSegment, parse_subtitles

__all__ = ["subtitles_item", "timed_item", "tokens_data", "tokens_item", "vtt_of"]

MAX_SEGMENTS = 4000
MAX_IDS = 4000
_MAX_PIECES = 1000
_FREQUENT = 20  # ids that are shown with how often they are there
_BINS = 64  # of the histogram of ids
_MAX_SUBTITLES = 8 << 20  # bytes of a file of subtitles
_BUDGET = MAX_DATA - 32_768


def timed_item(name: str, segments: Sequence[TimedSegment], *, size: int | None = None) -> Item:
    """Word timings, subtitles or lyrics: [start, end, text] in seconds, and the same as WebVTT."""
    shown: list[list[Any]] = []
    budget = _BUDGET
    for start, end, text in segments[:MAX_SEGMENTS]:
        entry = [round(start, 4), round(end, 4), clean_text(text)[:2000]]
        budget -= json_size(entry) + 1
        if budget < 0:
            break
        shown.append(entry)
    facts = {"segments": f"{len(segments):,}"}
    if segments:
        facts["time"] = f"{segments[0][0]:.4g} s to {max(one[1] for one in segments):.4g} s"
        facts["duration"] = human_seconds(max(one[1] for one in segments))
    if size is not None:
        facts["bytes"] = human_bytes(size)
    note = f"Shown are the first {len(shown):,} of {len(segments):,}." if len(shown) < len(segments) else ""
    media = (made("subtitles", "text/vtt", partial(vtt_of, shown)),)
    return Item(name=name, kind="text", facts=facts, data={"segments": shown}, media=media, note=note)


def vtt_of(segments: Sequence[Sequence[Any]]) -> bytes:
    """Segments as WebVTT, in which no text is markup or ends its cue."""
    lines = ["WEBVTT", ""]
    for start, end, text in segments:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        rows = [row for row in escaped.replace("\r", "\n").split("\n") if row.strip()]
        lines += [f"{_stamp(start)} --> {_stamp(max(end, start + 0.001))}", *rows, ""]
    return "\n".join(lines).encode("utf-8", "replace")


def _stamp(seconds: float) -> str:
    thousandths = round(min(seconds, 3.6e8) * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}.{rest % 1000:03}"


def subtitles_item(name: str, content: Content, content_type: str) -> Item:
    """A file of subtitles or lyrics; as plain text, with a note, where its times cannot be read."""
    if content.size > min(_MAX_SUBTITLES, MAX_WHOLE):
        return text_of_bytes(name, content, note="The times of a file of this size are not read.")
    try:
        segments = parse_subtitles(content.whole())
    except MediaError as error:
        return text_of_bytes(name, content, note=f"Its times cannot be read: {error.reason}.")
    return timed_item(name, segments, size=content.size)


def tokens_item(name: str, shown: ShownTokens, *, size: int | None = None) -> Item:
    """Token ids, with their text where the tokenizer is loaded."""
    facts = {"tokens": f"{len(shown.ids):,}"}
    if len(shown.ids):
        facts["distinct"] = f"{len(np.unique(shown.ids)):,}"
        facts["ids"] = f"{int(shown.ids.min()):,} to {int(shown.ids.max()):,}"
    if shown.tokenizer:
        facts["tokenizer"] = shown.tokenizer
    if size is not None:
        facts["bytes"] = human_bytes(size)
    data = tokens_data(shown)
    count = len(data["ids"])
    note = f"Shown are the first {count:,} of {len(shown.ids):,} ids." if count < len(shown.ids) else ""
    if shown.text_of is None:
        note = f"{note} Without the tokenizer their text is not known.".strip()
    return Item(name=name, kind="tokens", facts=facts, data=data, note=note)


def tokens_data(shown: ShownTokens) -> dict[str, Any]:
    """Ids, and where the tokenizer is loaded their text and the piece of it that each stands for."""
    ids = [int(one) for one in shown.ids[:MAX_IDS].tolist()]
    data: dict[str, Any] = {"ids": ids, **_distribution(shown.ids)}
    if shown.text_of is None:
        return data
    try:
        data["text"] = clean_text(shown.text_of(ids))[:20_000]
        data["pieces"] = [clean_text(shown.text_of([one]))[:40] for one in ids[:_MAX_PIECES]]
        data["frequent"] = [[*one, clean_text(shown.text_of([one[0]]))[:40]] for one in data.get("frequent", ())]
    except ValueError as error:  # an id outside the vocabulary
        data["text_note"] = f"The text is not known: {error}."
    return data


def _distribution(ids: npt.NDArray[Any]) -> dict[str, Any]:
    """The ids that are there most often, with how often, and how many ids are in each part of their range."""
    if len(ids) < 2:
        return {}
    values, counts = np.unique(ids, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_FREQUENT]  # of equal counts the smaller id first
    low, high = int(values[0]), int(values[-1])
    places = (values.astype(np.float64) - low) * (_BINS / (high - low + 1))
    bins = np.bincount(np.minimum(places.astype(np.int64), _BINS - 1), weights=counts, minlength=_BINS)
    return {
        "frequent": [[int(values[at]), int(counts[at])] for at in order],
        "histogram": {"low": low, "high": high, "counts": [int(one) for one in bins]},
    }
