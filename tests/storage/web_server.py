"""A small HTTP server over a folder: it lists folders, reads ranges, and lacks what a test wants it to lack."""

from __future__ import annotations

import hashlib
import http.server
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class WebServer:
    """The server of a folder.

    Attributes:
        folder: what it serves.
        lacks: of ``head``, ``length``, ``ranges`` and ``pages``, what it does not have.
        signature: the query without which it refuses a file; empty for none.
        links: further links on the page of every folder.
        refused: paths of folders that it does not list.
        requests: method and path of each request.
    """

    folder: Path
    lacks: tuple[str, ...] = ()
    signature: str = ""
    links: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: Any, *, has_body: bool) -> None:
        """Answers one request."""
        self.requests.append((handler.command, handler.path))
        parts = urllib.parse.urlsplit(handler.path)
        path = self.folder / urllib.parse.unquote(parts.path).lstrip("/")
        status, content, headers = 200, b"", {}
        if not has_body and "head" in self.lacks:
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
            if (asked := handler.headers.get("Range")) and "ranges" not in self.lacks:
                first, last = map(int, asked.removeprefix("bytes=").split("-"))
                headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
                status, content = 206, content[first : last + 1]
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        if "length" not in self.lacks:
            handler.send_header("Content-Length", str(len(content)))
        handler.send_header("Connection", "close")
        handler.end_headers()
        if has_body:
            with suppress(OSError):  # the client wanted the headers alone
                handler.wfile.write(content)


@contextmanager
def serve(folder: Path, **settings: Any) -> Iterator[WebServer]:
    """Runs a `WebServer` in a thread."""
    web = WebServer(folder, **settings)

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            web.answer(self, has_body=True)

        def do_HEAD(self) -> None:
            web.answer(self, has_body=False)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        web.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield web
        server.shutdown()
        thread.join()
