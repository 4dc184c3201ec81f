"""How stored content is served: what a browser may show, and nothing that it would run."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import Executor

from starlette.requests import Request
from starlette.responses import Response

from mm_assets.display import Content, Media
from mm_assets.view.backends.base import NoSampleError
from mm_assets.view.byte_ranges import range_response

__all__ = ["media_response", "served_type"]

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


async def media_response(
    request: Request, media: Media, *, etag: str, cache: str, readers: Executor, makers: Executor
) -> Response:
    """The answer with media of an item: stored bytes by range, made ones when they are made.

    Args:
        request: the request.
        media: the media.
        etag: of stored bytes, as that of `range_response`.
        cache: the ``cache-control`` of the answer.
        readers: threads that read stored bytes.
        makers: threads that make bytes.

    Raises:
        NoSampleError: these media have no bytes.
        MmAssetsError, OSError: the bytes cannot be made, or the first of them not be read.
    """
    read, size = media.read, media.size
    if media.make is not None:
        made = await asyncio.get_running_loop().run_in_executor(makers, media.make)
        read, size = Content.of(made).read, len(made)
        etag = hashlib.sha256(made).hexdigest()[:32]  # another release may make others of the same content
    if read is None or size is None:
        raise NoSampleError("these media have no bytes")
    content_type, extra = served_type(media.content_type)
    return await range_response(
        request.headers,
        size=size,
        read=read,
        etag=etag,
        content_type=content_type,
        executor=readers,
        extra={**extra, "cache-control": cache},
        is_head=request.method == "HEAD",
    )
