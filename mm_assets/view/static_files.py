"""The files of the page: a fixed list, read from the package; a request names an entry and never a path."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

__all__ = ["StaticFile", "static_files"]

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "datasets.js": "text/javascript; charset=utf-8",
    "items.js": "text/javascript; charset=utf-8",
    "item_parts.js": "text/javascript; charset=utf-8",
    "item_players.js": "text/javascript; charset=utf-8",
    "items.css": "text/css; charset=utf-8",
    "explore.js": "text/javascript; charset=utf-8",
    "explore_tools.js": "text/javascript; charset=utf-8",
    "filter.js": "text/javascript; charset=utf-8",
    "versions.js": "text/javascript; charset=utf-8",
    "explore.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page, in memory."""

    content: bytes
    content_type: str
    etag: str


@cache
def static_files() -> Mapping[str, StaticFile]:
    """The files by name."""
    folder = resources.files("mm_assets.view") / "static"
    found = {}
    for name, content_type in _TYPES.items():
        file = folder / name
        if file.is_file():
            content = file.read_bytes()
            found[name] = StaticFile(content, content_type, hashlib.sha256(content).hexdigest()[:16])
    return found
