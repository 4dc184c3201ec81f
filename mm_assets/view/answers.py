"""Answers in JSON, and small pages that say what is wrong, whatever text they have to carry."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from html import escape
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response

from mm_assets.json_text import dump_json

__all__ = ["Json", "plain_page"]

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
