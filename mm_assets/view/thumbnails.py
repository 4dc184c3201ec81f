"""Thumbnails, made by two threads and cached by their content up to a number of bytes."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from starlette.responses import Response

from mm_assets.display import thumbnail
from mm_assets.errors import SourceError
from mm_assets.view.backends.base import Picture

__all__ = ["Thumbnails", "thumbnail_response"]

THREADS = 2
CACHED_BYTES = 32 << 20
_ENTRY_BYTES = 256  # of a cached entry beside its picture


class Thumbnails:
    """The most recently used thumbnails; what has no picture is cached too.

    Args:
        cached_bytes: bytes of the pictures that are cached.
    """

    def __init__(self, cached_bytes: int = CACHED_BYTES) -> None:
        self._limit = cached_bytes
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, bytes | None] = OrderedDict()
        self._bytes = 0
        self._running: dict[str, Future[bytes | None]] = {}
        self._ahead: set[str] = set()  # of those that run or wait, the ones that nothing has asked for yet
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="thumbnails")

    def get(self, identity: str, picture: Callable[[], Picture]) -> Future[bytes | None]:
        """The JPEG of a picture, or None where it has none; made once for all that ask at the same time.

        Args:
            identity: of the content.
            picture: gives what the picture is made of; called by a thread of the pool.
        """
        with self._lock:
            self._ahead.discard(identity)
            if identity in self._cached:
                self._cached.move_to_end(identity)
                done: Future[bytes | None] = Future()
                done.set_result(self._cached[identity])
                return done
            return self._begin(identity, picture)

    def prefetch(self, pictures: Mapping[str, Callable[[], Picture]]) -> None:
        """Begins the pictures of a page, which will be asked for next, and gives up those of the page before it."""
        with self._lock:
            for identity in self._ahead - pictures.keys():
                if self._running[identity].cancel():
                    del self._running[identity]
                    self._ahead.discard(identity)
            for identity, picture in pictures.items():
                if identity not in self._cached and identity not in self._running:
                    self._ahead.add(identity)
                    self._begin(identity, picture)

    def _begin(self, identity: str, picture: Callable[[], Picture]) -> Future[bytes | None]:
        running = self._running.get(identity)
        if running is None:
            running = self._running[identity] = self._pool.submit(self._make, identity, picture)
        return running

    def _make(self, identity: str, picture: Callable[[], Picture]) -> bytes | None:
        try:
            made = _first_of(picture())
        except BaseException:
            with self._lock:
                self._end(identity)
            raise
        with self._lock:
            self._end(identity)
            self._cached[identity] = made
            self._bytes += _ENTRY_BYTES + len(made or b"")
            while self._bytes > self._limit and self._cached:
                _, dropped = self._cached.popitem(last=False)
                self._bytes -= _ENTRY_BYTES + len(dropped or b"")
        return made

    def _end(self, identity: str) -> None:
        self._running.pop(identity, None)
        self._ahead.discard(identity)

    @property
    def cached_bytes(self) -> int:
        """Bytes that the cache takes."""
        return self._bytes

    def close(self) -> None:
        """Ends the threads; what waits is given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _first_of(picture: Picture) -> bytes | None:
    """The JPEG of the first item that has one; `SourceError` where none has and one could not be read."""
    fault: SourceError | None = None
    for item in picture.items:
        try:
            made = thumbnail(item())
        except SourceError as error:
            fault = error
            continue
        if made is not None:
            return made
    if fault is not None:
        raise fault
    return None


async def thumbnail_response(making: Future[bytes | None], headers: Mapping[str, str]) -> Response:
    """The answer with a thumbnail; where there is none it is empty and no error: the card shows its text instead.

    Args:
        making: gives the JPEG.
        headers: of the answer, with which a browser may store it.
    """
    try:
        made = await asyncio.shield(asyncio.wrap_future(making))  # others may wait for it too
    except SourceError:  # it may be readable the next time
        return Response(status_code=204, headers={"cache-control": "no-store"})
    if made is None:
        return Response(status_code=204, headers=headers)
    return Response(made, headers=headers, media_type="image/jpeg")
