"""HTTP ranges (RFC 9110, section 14): which bytes a request wants, and an answer that reads only these."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor

from starlette.datastructures import Headers
from starlette.responses import Response, StreamingResponse

__all__ = ["RangeError", "range_response", "wanted_range"]

CHUNK = 256 << 10  # bytes that are read, and held, at a time
_RANGE = re.compile(r"bytes=\s*(?:(\d{1,19})-(\d{0,19})|-(\d{1,19}))\s*", re.ASCII)


class RangeError(Exception):
    """The range begins after the end, or is empty: status 416."""


def wanted_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The first byte and the byte after the last of a `Range` header; None where the whole is wanted.

    Several ranges, other units and what is not a range are ignored, as the RFC allows: the whole is sent.

    Raises:
        RangeError: no byte of the content is in the range.
    """
    found = None if header is None else _RANGE.fullmatch(header)
    if found is None:
        return None
    first, last, suffix = found.groups()
    if suffix is not None:
        count = min(int(suffix), size)
        if count == 0:
            raise RangeError
        return size - count, size
    start = int(first)
    if last and int(last) < start:
        return None  # not a range by the RFC's grammar
    if start >= size:
        raise RangeError
    return start, min(int(last) + 1, size) if last else size


async def range_response(
    headers: Headers,
    *,
    size: int,
    read: Callable[[int, int], bytes],
    etag: str,
    content_type: str,
    executor: Executor,
    extra: dict[str, str],
    is_head: bool = False,
) -> Response:
    """The answer to a request for stored bytes: whole, a range, unchanged, or out of range.

    Args:
        headers: of the request.
        size: bytes of the content.
        read: gives (offset, size) of it; called by the executor for `CHUNK` bytes at a time.
        etag: changes whenever the content may have changed; without quotes.
        content_type: of the answer.
        executor: where `read` runs.
        extra: further headers.
        is_head: only the headers are wanted.

    Raises:
        MmAssetsError, OSError: as `read`, of the first bytes; where later ones cannot be read the answer breaks off.
    """
    tag = f'"{etag}"'
    common = {**extra, "accept-ranges": "bytes", "etag": tag, "content-type": content_type}
    if _names(headers.get("if-none-match"), tag):
        return Response(status_code=304, headers={k: v for k, v in common.items() if k != "content-type"})
    header = headers.get("range")
    if header is not None and headers.get("if-range", tag) != tag:
        header = None  # of another version than the browser has begun with
    try:
        found = wanted_range(header, size)
    except RangeError:
        return Response(
            status_code=416, headers={**extra, "accept-ranges": "bytes", "content-range": f"bytes */{size}"}
        )
    start, stop = found or (0, size)
    common["content-length"] = str(stop - start)
    if found is not None:
        common["content-range"] = f"bytes {start}-{stop - 1}/{size}"
    status = 206 if found is not None else 200
    if is_head:
        return Response(status_code=status, headers=common)
    chunks = _chunks(read, start, stop, executor)
    first = await anext(chunks, b"")  # before the answer begins: then an error can still be one
    return StreamingResponse(_after(first, chunks), status, common)


def _names(header: str | None, tag: str) -> bool:
    """Whether an `If-None-Match` names the tag."""
    if header is None:
        return False
    return header.strip() == "*" or tag in (part.strip().removeprefix("W/") for part in header.split(","))


async def _after(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in chunks:
        yield chunk


async def _chunks(read: Callable[[int, int], bytes], start: int, stop: int, executor: Executor) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    while start < stop:
        size = min(CHUNK, stop - start)
        yield await loop.run_in_executor(executor, read, start, size)
        start += size
