"""Answers in JSON, and small pages that say what is wrong, whatever text they have to carry."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response

from mm_assets.display import Item
from mm_assets.json_text import dump_json

__all__ = ["MAX_NOTE", "Json", "bounded", "item_json", "plain_page", "quoted"]

MAX_NOTE = 4000  # characters of what is said about a sample or an item
MAX_SAMPLE = 16 << 20  # bytes of JSON of the items of a sample

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Json(Response):
    """A value as JSON; numbers that JSON lacks are null, and lone surrogates are escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of the answer."""
        text = dump_json(content)
        try:
            return text.encode()
        except UnicodeEncodeError:
            return json.dumps(json.loads(text), separators=(",", ":")).encode()


def plain_page(status: int, title: str, detail: str, headers: dict[str, str] | None = None) -> Response:
    """What is wrong, in a sentence: a small page for a person, JSON for a script."""
    return _Plain(status, title, detail, headers)


class _Plain(Response):
    def __init__(self, status: int, title: str, detail: str, headers: dict[str, str] | None) -> None:
        self._title, self._detail = title, detail
        self._extra = {"cache-control": "no-store", "vary": "accept", **(headers or {})}
        super().__init__(status_code=status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: Response
        if "text/html" in Headers(scope=scope).get("accept", ""):
            title, detail = escape(self._title), escape(self._detail.encode(errors="backslashreplace").decode())
            root = escape(scope.get("root_path", ""))
            above = f' <a href="{root.rpartition("/")[0]}/">To the datasets</a>' if root else ""
            answer = HTMLResponse(
                f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
                f'<link rel="icon" href="{root}/static/icon.svg"><h1>{title}</h1>'
                f'<p>{detail}<p><a href="{root}/">To the samples</a>{above}',
                self.status_code,
                self._extra,
            )
        else:
            answer = Json({"error": self._title, "detail": self._detail}, self.status_code, self._extra)
        await answer(scope, receive, send)


def bounded(items: Sequence[Item], limit: int = MAX_SAMPLE) -> tuple[Item, ...]:
    """The items of a sample, the data of those beyond a number of bytes left out, with a note."""
    found: list[Item] = []
    left = limit
    for item in items:
        size = len(json.dumps(dict(item.data), default=str))
        left -= size
        if left < 0:
            note = f"Its {size:,} bytes are not shown: the sample has more than {limit:,} to show at once. {item.note}"
            item = Item(name=item.name, kind="unreadable", facts=item.facts, note=note.strip())
        found.append(item)
    return tuple(found)


def item_json(item: Item, base: str, suffix: str) -> dict[str, Any]:
    """An item for the page; its media are at `base`, with the query `suffix`."""
    return {
        "name": item.name,
        "kind": item.kind,
        "facts": dict(item.facts),
        "data": dict(item.data),
        "note": item.note[:MAX_NOTE],
        "media": [
            {
                "name": media.name,
                "content_type": media.content_type,
                "size": media.size,
                "url": f"{base}/{quoted(media.name)}{suffix}",
            }
            for media in item.media
        ],
    }


def quoted(text: str) -> str:
    """Returns text as one segment of a URL's path or a value of its query."""
    return quote(text, safe="")
