"""How stored content is served: what a browser may show, and nothing that it would run."""

from __future__ import annotations

__all__ = ["served_type"]

# Images that no browser runs scripts in: an SVG is not among them.
_IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp", "image/avif", "image/bmp"})
_TEXTS = frozenset({"text/plain", "text/vtt", "application/json"})
_AS_TEXT = frozenset({"image/svg+xml", "text/html", "application/xhtml+xml", "text/xml", "application/xml"})


def served_type(content_type: str) -> tuple[str, dict[str, str]]:
    """The content type of an answer and the headers that go with it."""
    kind = content_type.partition(";")[0].strip().lower()
    headers = {"content-security-policy": "default-src 'none'; sandbox"}
    if kind in _IMAGES or (kind.startswith(("audio/", "video/")) and kind.isascii() and kind.isprintable()):
        return kind, headers
    if kind in _TEXTS:
        return f"{kind}; charset=utf-8", headers
    if kind in _AS_TEXT:
        return "text/plain; charset=utf-8", headers
    return "application/octet-stream", {**headers, "content-disposition": "attachment"}
