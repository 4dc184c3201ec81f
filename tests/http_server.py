"""An HTTP server whose replies a test decides, and a record of the requests that came."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, Mapping[str, str | None], bytes]  # status, headers (None: the reply lacks it), body
Request = tuple[str, str]  # method, path with the query


@contextmanager
def answer(reply: Callable[..., Reply], *, is_ranged: bool = False) -> Iterator[tuple[str, list[Request]]]:
    """Starts a server on a free port of the loopback address; its URL, and the requests so far.

    `reply` is called with the method and the path; if `is_ranged`, also with the header ``Range`` or None.
    """
    requests: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            requests.append((self.command, self.path))
            asked = (self.headers.get("Range"),) if is_ranged else ()
            status, headers, body = reply(self.command, self.path, *asked)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                if value is not None:
                    self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                with suppress(OSError):  # the client wanted the headers alone
                    self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Requests are recorded, not printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
