"""What comes before every route: who may ask, by which name and method, and how much at a time.

Other pages of the same browser can send requests here. They do not know the token, and a name that an attacker's DNS
points here is not an allowed host. Every answer forbids scripts and content that are not this server's own.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response

from mm_assets.view.answers import plain_page

__all__ = ["MAX_IN_FLIGHT", "Guard"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_IN_FLIGHT = 64  # requests; a browser sends six at a time
MAX_BODY = 1 << 20  # bytes of a POST
MAX_PATH = 2000  # characters
_LOCAL_NAMES = frozenset({"localhost"})

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), interest-cohort=()",
}


class Guard:
    """Lets a request through if it has the token, an allowed host and method, and is not one too many.

    Args:
        app: what answers then.
        token: what every request has, in its cookie or as the query's `t`.
        hosts: names, beside localhost and IP addresses, by which the server may be called.

    Attributes:
        cookie: name of the cookie that holds the token.
    """

    def __init__(self, app: App, *, token: str, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._token = token
        # Cookies do not distinguish ports: two viewers on one machine must not take each other's.
        self.cookie = f"mm_assets_{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        self._hosts = frozenset(name.lower() for name in hosts) | _LOCAL_NAMES
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return  # no WebSockets and no lifespan here
        send = _with_headers(send)
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        self._in_flight += 1
        try:
            await self._app(scope, _bounded(receive), send)
        finally:
            self._in_flight -= 1

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not let through, or to the one that brings the token; else None."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_allowed_host(host):
            detail = f"This viewer does not answer to the name {host!r}. Open the URL that the command printed."
            return plain_page(403, "Not this host", detail)
        method = scope["method"]
        if method not in ("GET", "HEAD", "POST"):
            return plain_page(405, "Not allowed", f"{method} is not a method of this viewer.", {"allow": "GET, HEAD"})
        if method == "POST" and not _is_same_origin(headers.get("origin"), host):
            return plain_page(403, "Not from here", "A form of another page cannot post to this viewer.")
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == "t"), None)
        if given is not None and scope["path"].endswith("/") and self._is_token(given):
            return self._welcome([(name, value) for name, value in query if name != "t"])
        if not self._is_token(self._cookie_of(headers)):
            detail = "Open the URL that the command `mm-assets view` printed: it has the token of this viewer."
            return plain_page(403, "The token is missing", detail)
        if len(scope["path"]) > MAX_PATH:
            return plain_page(414, "Too long", f"A path may have {MAX_PATH:,} characters.")
        if self._in_flight >= MAX_IN_FLIGHT:
            detail = f"{MAX_IN_FLIGHT} requests are being answered. Try again in a second."
            return plain_page(503, "Busy", detail, {"retry-after": "1"})
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_BODY:
            return plain_page(413, "Too large", f"A request may hold {MAX_BODY:,} bytes.")
        return None

    def _welcome(self, query: list[tuple[str, str]]) -> Response:
        """Stores the token as a cookie and opens the page without it in its URL.

        Not by a redirect: a browser that follows one from a link on another site does not send a strict cookie.
        """
        target = f"?{urlencode(query)}" if query else "./"
        shown = escape(target)
        answer = HTMLResponse(
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>mm-assets view</title>'
            '<link rel="icon" href="static/icon.svg">'
            f'<meta http-equiv="refresh" content="0; url={shown}"><p><a href="{shown}">Open the viewer</a>'
        )
        answer.set_cookie(self.cookie, self._token, httponly=True, samesite="strict", path="/")
        answer.headers["cache-control"] = "no-store"
        return answer

    def _is_token(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _cookie_of(self, headers: Headers) -> str | None:
        # Not by http.cookies, which gives up at a cookie against the RFC, such as JSON of another server on this host.
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return next((value for name, _, value in pairs if name == self.cookie), None)

    def _is_allowed_host(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if name is None:
            return False
        if name in self._hosts:
            return True
        try:
            # An address is not a name, which a DNS server could point here.
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _is_same_origin(origin: str | None, host: str) -> bool:
    return origin in (f"http://{host}", f"https://{host}")  # the second behind a proxy


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            extra = [(k.encode(), v.encode()) for k, v in _HEADERS.items() if k.encode() not in present]
            message = {**message, "headers": [*message["headers"], *extra]}
        await send(message)

    return sending


def _bounded(receive: Receive) -> Receive:
    """The body of a request, of which no more than `MAX_BODY` bytes are taken."""
    taken = 0

    async def receiving() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        return {"type": "http.disconnect"} if taken > MAX_BODY else message

    return receiving
