"""A small HTTP server over a folder: it lists folders, reads ranges, and lacks what a test wants it to lack."""

from __future__ import annotations

import hashlib
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..http_server import Reply, answer


@dataclass
class WebServer:
    """The server of a folder.

    Attributes:
        folder: what it serves.
        lacks: of ``head``, ``length``, ``ranges`` and ``pages``, what it does not have.
        signature: the query without which it refuses a file; empty for none.
        links: further links on the page of every folder.
        refused: paths of folders that it does not list.
    """

    folder: Path
    lacks: tuple[str, ...] = ()
    signature: str = ""
    links: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    url: str = ""

    def reply(self, method: str, url: str, asked: str | None) -> Reply:
        """Answers one request."""
        parts = urllib.parse.urlsplit(url)
        path = self.folder / urllib.parse.unquote(parts.path).lstrip("/")
        status, content = 200, b""
        headers: dict[str, str | None] = {"Connection": "close"}
        if method == "HEAD" and "head" in self.lacks:
            status = 405
        elif not path.exists() or parts.path in self.refused or (path.is_dir() and "pages" in self.lacks):
            status = 403 if path.exists() else 404
        elif self.signature and self.signature not in urllib.parse.unquote(parts.query):
            status = 403
        elif path.is_dir():
            names = [urllib.parse.quote(p.name) + ("/" if p.is_dir() else "") for p in path.iterdir()]
            content = "".join(f'<a href="{name}">{name}</a>\n' for name in (*self.links, *names)).encode()
            headers["Content-Type"] = "text/html"
        else:
            content = path.read_bytes()
            headers["ETag"] = hashlib.md5(content).hexdigest()
            if asked and "ranges" not in self.lacks:
                first, last = map(int, asked.removeprefix("bytes=").split("-"))
                headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
                status, content = 206, content[first : last + 1]
        if "length" in self.lacks:
            headers["Content-Length"] = None
        return status, headers, content


@contextmanager
def serve(folder: Path, **settings: Any) -> Iterator[WebServer]:
    """Runs a `WebServer` in a thread."""
    web = WebServer(folder, **settings)
    with answer(web.reply, is_ranged=True) as (web.url, _):
        yield web
