"""A real HTTP S3 server, and a record of every request that it answered: in this process, or in one of its own."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True)
class Request:
    """One request as the server saw it."""

    method: str
    path: str  # /bucket/key
    query: str
    start: int | None  # of the range asked for
    end: int | None  # exclusive
    sent: int  # bytes of the answer's body


class Recorder:
    """WSGI middleware that notes requests; `faults` makes some of them fail."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application = application
        self.faults = Faults(self)
        self.requests: list[Request] = []
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        chunks = list(self.application(environ, start_response))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", environ.get("HTTP_RANGE", ""))
        request = Request(
            method=environ["REQUEST_METHOD"],
            path=environ["PATH_INFO"],
            query=unquote(environ.get("QUERY_STRING", "")),
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


_REPLIES = {
    "400": ("400 Bad Request", "ExpiredToken"),
    "500": ("500 Internal Server Error", "InternalError"),
    "409": ("409 Conflict", "ConditionalRequestConflict"),
    "501": ("501 Not Implemented", "NotImplemented"),
    "503": ("503 Slow Down", "SlowDown"),
}
_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>injected</Message></Error>"


class Faults:
    """WSGI middleware under which some requests fail, as on a busy object store: each kind of fault in turn.

    Attributes:
        every: how many requests one fails of; 0 for none.
        kinds: the faults that are injected.
        conditional: whether uploads with conditions are implemented; else the reply is 501.
        conflicts: how many of the next uploads with conditions meet another one: the reply is 409.
        is_expired: whether the credentials have expired: every reply is 400, to HEAD without a reason.
        injected: faults so far, by kind.
    """

    KINDS = ("500", "503", "reset before", "reset after", "slow", "truncated")

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application = application
        self.every = 0
        self.kinds: Sequence[str] = self.KINDS
        self.conditional = True
        self.conflicts = 0
        self.is_expired = False
        self.injected: dict[str, int] = dict.fromkeys(self.KINDS, 0)
        self._numbers = count()
        self._lock = threading.Lock()

    def _kind(self) -> str | None:
        with self._lock:
            if not self.every or next(self._numbers) % self.every != self.every - 1:
                return None
            kind = min(self.kinds, key=lambda kind: self.injected[kind])
            self.injected[kind] += 1
            return kind

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        kind = self._kind()
        conditions = environ.keys() & {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"}
        if conditions and environ["REQUEST_METHOD"] == "PUT":
            if not self.conditional:
                kind = "501"
            elif self.conflicts:
                self.conflicts -= 1
                kind = "409"
        if self.is_expired:
            kind = "400"
        if kind == "reset before":
            return self._reset(environ)
        if kind in _REPLIES:
            status, code = _REPLIES[kind]
            body = b"" if environ["REQUEST_METHOD"] == "HEAD" else _ERROR.format(code).encode()
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if kind == "slow":
            time.sleep(0.3)
        body = b"".join(self.application(environ, start_response))
        if kind == "reset after":
            return self._reset(environ)
        if kind == "truncated":
            return self._truncated(environ, body)
        return [body]

    @staticmethod
    def _truncated(environ: dict[str, Any], body: bytes) -> Iterator[bytes]:
        yield body[: len(body) // 2]  # of the length that the headers announced
        Faults._reset(environ)

    @staticmethod
    def _reset(environ: dict[str, Any]) -> Iterable[bytes]:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError("injected")


@contextmanager
def serve() -> Iterator[tuple[str, Recorder]]:
    """Starts the server on a free port of the loopback address; gives its URL and the record."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log_request(self, *_: object) -> None:
            """Requests are recorded, not printed."""

    recorder = Recorder(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, recorder.faults, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", recorder
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


class ServerApart:
    """A server in a process of its own, which takes its share of the processors from no test.

    Attributes:
        url: of the server.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, "the server did not start"

    def fail(self, every: int, kinds: Sequence[str] = Faults.KINDS) -> dict[str, int]:
        """Makes one of `every` requests fail, or none; the number of requests and of faults of each kind so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([every, *kinds]) + "\n")
        self._process.stdin.flush()
        counts: dict[str, int] = json.loads(self._process.stdout.readline())
        return counts

    def close(self) -> None:
        """Ends the server."""
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    with serve() as (url, recorder):
        print(url, flush=True)
        for line in sys.stdin:
            recorder.faults.every, *recorder.faults.kinds = json.loads(line)
            print(json.dumps({"requests": len(recorder.requests), **recorder.faults.injected}), flush=True)
