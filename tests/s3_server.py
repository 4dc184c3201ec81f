"""A real HTTP S3 server in this process, and a record of every request that it answered."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """One request as the server saw it."""

    method: str
    path: str  # /bucket/key
    start: int | None  # of the range asked for
    end: int | None  # exclusive
    sent: int  # bytes of the answer's body


class Recorder:
    """WSGI middleware that notes requests."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application = application
        self.requests: list[Request] = []
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        chunks = list(self.application(environ, start_response))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", environ.get("HTTP_RANGE", ""))
        request = Request(
            method=environ["REQUEST_METHOD"],
            path=environ["PATH_INFO"],
            start=int(wanted[1]) if wanted else None,
            end=int(wanted[2]) + 1 if wanted else None,
            sent=sum(len(chunk) for chunk in chunks) if environ["REQUEST_METHOD"] != "HEAD" else 0,
        )
        with self._lock:
            self.requests.append(request)
        return chunks

    def reads_of(self, path: str) -> list[Request]:
        """The GET requests of one object."""
        return [r for r in self.requests if r.method == "GET" and r.path == path]


@contextmanager
def serve() -> Iterator[tuple[str, Recorder]]:
    """Starts the server on a free port of the loopback address; gives its URL and the record."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log_request(self, *_: object) -> None:
            """Requests are recorded, not printed."""

    recorder = Recorder(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, recorder, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", recorder
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
