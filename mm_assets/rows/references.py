"""Which URLs and paths a dataset's JSON may point to.

A shard's content is not trusted: a reference is followed only below a prefix that the declaration names, and never in a
spelling that means another place to a file system or a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["is_allowed_reference", "is_reference"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_UP = re.compile(r"(?:^|/)(?:\.|%2e){2}(?:/|%2f|\\|$|\?|#)", re.IGNORECASE)
_BOUNDARY = ("/", "?", "#")


def is_reference(token: str) -> bool:
    """Whether a text is a URL or an absolute path."""
    return token.startswith("/") or _URL.match(token) is not None


def is_allowed_reference(token: str, prefixes: Iterable[str]) -> bool:
    """Whether a URL or absolute path stands below one of `prefixes`.

    A prefix ends where a part of the path does: ``https://a.org`` allows neither ``https://a.org.b.net`` nor
    ``https://a.org@b.net``. References with ``..`` parts, control characters, backslashes or fsspec's ``::`` are never
    allowed.
    """
    if not is_reference(token) or _CONTROL.search(token) or "\\" in token or "::" in token:
        return False
    unescaped = re.sub(r"%2f", "/", token, flags=re.IGNORECASE)
    if _UP.search(unescaped):
        return False
    for prefix in prefixes:
        if prefix and token.startswith(prefix):
            rest = token[len(prefix) :]
            if not rest or prefix.endswith("/") or rest.startswith(_BOUNDARY):
                return True
    return False
