"""The application: JSON of pages and samples, thumbnails, and media by range, over one backend."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mm_assets.display import Item, Media
from mm_assets.errors import MmAssetsError
from mm_assets.view.answers import MAX_NOTE, Json, bounded, item_json, plain_page, quoted
from mm_assets.view.backends.base import Backend, Entry, NoSampleError, Page, Picture, fingerprint
from mm_assets.view.guard import Guard
from mm_assets.view.media_types import media_response
from mm_assets.view.parameters import whole_of
from mm_assets.view.static_files import static_files
from mm_assets.view.thumbnails import Thumbnails, thumbnail_response

__all__ = ["Viewer", "build_app", "build_viewer", "serve_icon", "serve_static"]

T = TypeVar("T")

MAX_LIMIT = 200  # samples of one page
MAX_PARTITIONS = 1000  # of one page
DEFAULT_LIMIT = 50
MAX_TEXT = 1024  # characters of what is searched for
READERS = 4  # threads that read
QUERIES = 2  # threads that sort and filter
MAKERS = 2  # threads that make media, such as a picture of a TIFF
MAX_ID = 1024  # characters of an id, and of a name, that is shown
MAX_NAMES = 40  # of what a card's sample has
_CACHED_SAMPLES = 6  # whose items are held: their media are asked for next


class Viewer:
    """What the routes share: the backend, its threads, and the samples that were shown last.

    Further routes, such as those of exploring, take it from ``request.app.state.viewer``.

    Args:
        backend: what is looked at; stays the caller's.

    Attributes:
        backend: the same.
        thumbnails: the cache.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.thumbnails = Thumbnails()
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="readers")
        self.makers = ThreadPoolExecutor(MAKERS, thread_name_prefix="makers")
        self.queries = ThreadPoolExecutor(QUERIES, thread_name_prefix="selecting")
        self._lock = threading.Lock()
        self._samples: OrderedDict[tuple[str, int, str], tuple[Item, ...]] = OrderedDict()

    async def run(self, work: Callable[[], T]) -> T:
        """The result of work that reads, done by a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.readers, work)

    def chosen(self, request: Request) -> Backend:
        """The backend that a request is about: that of the query's `part`, or the whole.

        Raises:
            NoSampleError: there is no such partition.
        """
        key = request.query_params.get("part", "")
        return self.backend.partition(key) if key else self.backend

    def items(self, part: str, backend: Backend, index: int) -> tuple[Item, ...]:
        """The items of a sample, cached for the requests of its media."""
        key = (part, index, backend.identity(index))
        with self._lock:
            found = self._samples.get(key)
            if found is not None:
                self._samples.move_to_end(key)
                return found
        found = bounded(backend.items(index))
        with self._lock:
            self._samples[key] = found
            while len(self._samples) > _CACHED_SAMPLES:
                self._samples.popitem(last=False)
        return found

    def entry_json(self, entry: Entry, part: str = "") -> dict[str, Any]:
        """A card for the page."""
        suffix = f"&part={quoted(part)}" if part else ""
        picture = f"thumbnail/{entry.index}?v={entry.picture}{suffix}" if entry.picture else None
        return {
            "index": entry.index,
            "id": entry.id[:MAX_ID],
            "text": entry.text,
            "names": [name[:MAX_ID] for name in entry.names[:MAX_NAMES]],
            "picture": picture,
            "note": entry.note[:MAX_NOTE],
        }

    def page_json(self, page: Page, part: str = "") -> dict[str, Any]:
        """A page of cards."""
        return {
            "entries": [self.entry_json(entry, part) for entry in page.entries],
            "total": page.total,
            "next": page.next,
            "note": page.note,
        }


def build_app(backend: Backend, *, token: str, hosts: Iterable[str] = ()) -> Guard:
    """The application over a backend.

    Args:
        backend: what is looked at.
        token: what every request must have, in its cookie or its URL.
        hosts: names by which the server may be called, beside localhost and IP addresses.
    """
    return Guard(build_viewer(backend), token=token, hosts=hosts)


def build_viewer(backend: Backend, *, is_listed: bool = False) -> Starlette:
    """Builds the routes over a backend, which answer every caller: a `Guard` comes before them. They may be mounted.

    Args:
        backend: what is looked at.
        is_listed: whether the page above lists it among others, to which its own pages lead back.
    """
    own: list[BaseRoute] = [
        Route("/", _index),
        Route("/static/{name}", serve_static),
        Route("/favicon.ico", serve_icon),  # which a browser asks for before it has read the page
        Route("/api/about", _about),
        Route("/api/newest", _newest),
        Route("/api/samples", _samples),
        Route("/api/find", _find),
        Route("/api/sample/{index:int}", _sample),
        Route("/api/partitions", _partitions),
        Route("/thumbnail/{index:int}", _thumbnail),
        Route("/media/{index:int}/{item:int}/{name}", _media),
    ]
    handlers: dict[Any, Any] = {
        NoSampleError: _no_sample,
        MmAssetsError: _known_error,
        OSError: _known_error,
        MemoryError: _too_much,
        HTTPException: _http_error,
        Exception: _bug,
    }
    app = Starlette(routes=[*own, *_exploring(backend)], exception_handlers=handlers)
    app.state.viewer, app.state.is_listed = Viewer(backend), is_listed
    return app


def _exploring(backend: Backend) -> list[BaseRoute]:
    """The routes of the exploring pages; of what cannot be a dataset one that says so, without importing the rest."""
    if not backend.may_be_dataset:
        return [Route("/api/explore", _nothing_to_explore)]
    from mm_assets.view.explore_routes import explore_routes  # which imports the pipeline
    from mm_assets.view.table_routes import table_routes

    return [*explore_routes(backend), *table_routes()]


async def _nothing_to_explore(_request: Request) -> Response:
    return Json({"available": False, "has_columns": False})


def _viewer(request: Request) -> Viewer:
    viewer: Viewer = request.app.state.viewer
    return viewer


# --- routes -----------------------------------------------------------------------------------------------------------


async def _index(request: Request) -> Response:
    return _file("index.html", request)


async def serve_static(request: Request) -> Response:
    """A file of the page."""
    return _file(request.path_params["name"], request)


async def serve_icon(request: Request) -> Response:
    """The page's icon."""
    return _file("icon.svg", request)


def _file(name: str, request: Request) -> Response:
    file = static_files().get(name)
    if file is None:
        raise HTTPException(404, "There is no such file.")
    headers = {"etag": f'"{file.etag}"', "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == f'"{file.etag}"':
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.content_type)


async def _about(request: Request) -> Response:
    viewer = _viewer(request)

    def work() -> dict[str, Any]:
        backend = viewer.chosen(request)
        names = static_files()
        backend.reach(1, 1.0)  # of a small source the number of samples is known then
        return {
            "title": viewer.backend.title,
            "kind": backend.kind,
            "count": backend.count(),
            "part": request.query_params.get("part", ""),
            "is_listed": request.app.state.is_listed,
            "has_versions": viewer.backend.has_versions,
            "has_partitions": bool(viewer.backend.partitions()),
            "modules": [name for name in ("items.js", "explore.js") if name in names],
            **backend.about(),
            **backend.place,
        }

    return Json(await viewer.run(work))


async def _newest(request: Request) -> Response:
    viewer, part = _viewer(request), request.query_params.get("part", "")
    return Json({"part": await viewer.run(lambda: viewer.backend.newest(part))})


async def _samples(request: Request) -> Response:
    viewer, part = _viewer(request), request.query_params.get("part", "")
    offset = whole_of(request, "offset", 0)
    limit = whole_of(request, "limit", DEFAULT_LIMIT, MAX_LIMIT)

    def work() -> dict[str, Any]:
        backend = viewer.chosen(request)
        page = backend.page(offset, limit)
        pictures = {one.picture: partial(backend.picture, one.index) for one in page.entries if one.picture}
        viewer.thumbnails.prefetch(pictures)
        return {**viewer.page_json(page, part), "offset": offset, "limit": limit}

    return Json(await viewer.run(work))


async def _find(request: Request) -> Response:
    viewer, part = _viewer(request), request.query_params.get("part", "")
    text = request.query_params.get("q", "")
    start = whole_of(request, "start", 0)
    limit = whole_of(request, "limit", DEFAULT_LIMIT, MAX_LIMIT)
    if not text or len(text) > MAX_TEXT:
        raise HTTPException(400, f"`q` has {len(text)} characters, expected 1 to {MAX_TEXT}.")

    def work() -> dict[str, Any]:
        return {**viewer.page_json(viewer.chosen(request).find(text, start, limit), part), "start": start}

    return Json(await viewer.run(work))


async def _sample(request: Request) -> Response:
    viewer, part = _viewer(request), request.query_params.get("part", "")
    index = request.path_params["index"]

    def work() -> dict[str, Any]:
        backend = viewer.chosen(request)
        items = viewer.items(part, backend, index)
        suffix = f"?part={quoted(part)}&" if part else "?"
        version = backend.identity(index)
        shown = [item_json(item, f"media/{index}/{place}", f"{suffix}v={version}") for place, item in enumerate(items)]
        return {"index": index, "id": backend.sample_id(index)[:MAX_ID], "count": backend.count(), "items": shown}

    return Json(await viewer.run(work))


async def _partitions(request: Request) -> Response:
    viewer = _viewer(request)
    offset = whole_of(request, "offset", 0)
    limit = whole_of(request, "limit", MAX_LIMIT, MAX_PARTITIONS)
    found = await viewer.run(viewer.backend.partitions)
    return Json({"partitions": list(found[offset : offset + limit]), "total": len(found), "offset": offset})


async def _thumbnail(request: Request) -> Response:
    viewer, index = _viewer(request), request.path_params["index"]

    def work() -> tuple[Picture, Future[bytes | None] | None]:
        picture = viewer.chosen(request).picture(index)
        is_there = picture.identity and request.headers.get("if-none-match") != f'"{picture.identity}"'
        return picture, viewer.thumbnails.get(picture.identity, lambda: picture) if is_there else None

    picture, making = await viewer.run(work)
    if not picture.identity:
        raise HTTPException(404, "The sample has no picture.")
    # `v` in the URL names the content, so a browser need not ask again for what it has.
    is_named = request.query_params.get("v") == picture.identity
    headers = {
        "etag": f'"{picture.identity}"',
        "cache-control": "private, max-age=86400, immutable" if is_named else "no-cache",
    }
    if making is None:
        return Response(status_code=304, headers=headers)
    return await thumbnail_response(making, headers)


async def _media(request: Request) -> Response:
    viewer, part = _viewer(request), request.query_params.get("part", "")
    index, place = request.path_params["index"], request.path_params["item"]

    def work() -> tuple[Media, str]:
        backend = viewer.chosen(request)
        items = viewer.items(part, backend, index)
        named = items[place].media if place < len(items) else ()
        media = next((one for one in named if one.name == request.path_params["name"]), None)
        if media is None:
            raise NoSampleError(f"sample {index} has no such media")
        return media, fingerprint(backend.identity(index), items[place].name, media.name, media.size)

    media, etag = await viewer.run(work)
    return await media_response(
        request, media, etag=etag, cache="private, max-age=3600", readers=viewer.readers, makers=viewer.makers
    )


# --- errors -----------------------------------------------------------------------------------------------------------


async def _no_sample(_request: Request, error: Exception) -> Response:
    return plain_page(404, "Not found", str(error))


async def _known_error(_request: Request, error: Exception) -> Response:
    """A file that is damaged or gone: its message is what the person needs."""
    return plain_page(422, "Cannot be read", str(error))


async def _too_much(_request: Request, _error: Exception) -> Response:
    return plain_page(422, "Cannot be shown", "It needs more memory than the viewer may take.")


async def _http_error(_request: Request, error: Exception) -> Response:
    status, detail = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, str(error))
    return plain_page(status, "Not found" if status == 404 else "Cannot be answered", detail)


async def _bug(_request: Request, error: Exception) -> Response:
    # The bytes of an answer that had begun could not be read on, which is not a bug.
    is_known = isinstance(error.__cause__, MmAssetsError | OSError)
    said = f"{error.__cause__}" if is_known else "".join(traceback.format_exception(error))
    # It may quote the data, whose control characters a terminal obeys.
    print("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in said), file=sys.stderr)
    return plain_page(500, "The viewer has a bug", f"{type(error).__name__}; the terminal shows where.")
