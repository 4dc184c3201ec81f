"""The routes of the exploring pages: each takes its parameters apart, asks the `Explorer`, and answers with JSON."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mm_assets.display import Item, Media
from mm_assets.pipeline.chain import FILTERED_ROWS
from mm_assets.view.answers import Json, bounded, item_json
from mm_assets.view.backends.base import Backend, NoSampleError, Picture, fingerprint
from mm_assets.view.explorer import PAGE, Explorer, explorer_of
from mm_assets.view.media_types import media_response
from mm_assets.view.parameters import optional_of, text_of, whole_of
from mm_assets.view.thumbnails import thumbnail_response

__all__ = ["explore_routes"]

T = TypeVar("T")

_CONTENT = ("partition", "sample_id", "position", "modality", "shard", "member", "byte_offset")


def explore_routes(backend: Backend) -> list[BaseRoute]:
    """The routes; those of anything but a dataset say that there is nothing to explore."""
    explorer = explorer_of(backend)
    about = Route("/api/explore", partial(_about, explorer))
    if explorer is None:
        return [about]
    gets: dict[str, Callable[[Explorer, Request], Any]] = {
        "relations": lambda e, r: e.relations(),
        "locate": lambda e, r: e.locate(text_of(r, "partition"), text_of(r, "sample_id")),
        "totals": lambda e, r: e.totals(),
        "losses": lambda e, r: e.losses(
            text_of(r, "stage"), text_of(r, "reason"), text_of(r, "partition"), text_of(r, "after")
        ),
        "scores": lambda e, r: e.scores(),
        "histogram": lambda e, r: e.histogram(
            text_of(r, "score"), whole_of(r, "bins", 60, 400), text_of(r, "partition")
        ),
        "kept": lambda e, r: e.kept(
            text_of(r, "score"), _float(r, "at_least"), _float(r, "at_most"), text_of(r, "partition")
        ),
        "versions": lambda e, r: e.versions(),
        "diff": lambda e, r: e.diff(text_of(r, "old"), text_of(r, "new"), whole_of(r, "offset", 0)),
        "diff/samples": lambda e, r: e.diff_samples(
            text_of(r, "old"), text_of(r, "new"), text_of(r, "partition"), whole_of(r, "offset", 0)
        ),
        "compare": lambda e, r: e.compare(
            text_of(r, "old"), text_of(r, "new"), text_of(r, "partition"), text_of(r, "sample_id")
        ),
        "origin": _origin,
        "at": lambda e, r: e.at(text_of(r, "shard"), text_of(r, "member"), optional_of(r, "byte")),
        "checksum": lambda e, r: e.checksum(_place(r)),
        "item": _item,
    }
    return [
        about,
        *(Route(f"/api/explore/{name}", partial(_answer, explorer, work)) for name, work in gets.items()),
        Route("/api/explore/select", partial(_select, explorer)),
        Route("/api/explore/sql", partial(_sql, explorer), methods=["POST"]),
        Route("/api/explore/cancel", partial(_cancel, explorer), methods=["POST"]),
        Route("/explore/thumbnail", partial(_thumbnail, explorer)),
        Route("/explore/media/{name}", partial(_media, explorer)),
    ]


async def _run(threads: Executor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


async def _about(explorer: Explorer | None, _request: Request) -> Response:
    return Json({"available": explorer is not None, "has_columns": True})


async def _answer(explorer: Explorer, work: Callable[[Explorer, Request], Any], request: Request) -> Response:
    return Json(await _run(explorer.threads, partial(work, explorer, request)))


# --- parameters -------------------------------------------------------------------------------------------------------


def _float(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"`{name}` is {text[:40]!r}, expected a number.")
    return value


def _place(request: Request) -> dict[str, Any]:
    """The row or member that a request names."""
    found: dict[str, Any] = {name: text_of(request, name) for name in ("partition", "sample_id", "modality")}
    position = text_of(request, "position")
    if not re.fullmatch(r"-?\d{1,10}", position, re.ASCII) and not text_of(request, "member"):
        raise HTTPException(400, f"`position` is {position[:40]!r}, expected a whole number.")
    if member := text_of(request, "member"):
        found |= {
            "member": member,
            "shard": text_of(request, "shard"),
            "byte_offset": optional_of(request, "byte_offset"),
        }
    else:
        found["position"] = int(position)
    return found


def _query_of(request: Request) -> str:
    """The parameters of a place as the query of another URL."""
    from urllib.parse import urlencode

    return urlencode({name: request.query_params[name] for name in _CONTENT if name in request.query_params})


async def _body(request: Request) -> dict[str, Any]:
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The request is not JSON: {error}.") from error
    except ClientDisconnect as error:  # by the guard, which takes no more of it, or by the browser, which reads nothing
        raise HTTPException(413, "The request is too large.") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise HTTPException(400, "The request is not an object of texts.")
    return found


# --- routes -----------------------------------------------------------------------------------------------------------


async def _sql(explorer: Explorer, request: Request) -> Response:
    body = await _body(request)
    sql, key = body.get("sql", ""), body.get("id", "")[:64]
    running = asyncio.ensure_future(_run(explorer.query_threads, partial(explorer.query, sql, key)))
    while not running.done():
        await asyncio.wait([running], timeout=0.5)
        if not running.done() and key and await request.is_disconnected():  # the page has been left
            explorer.cancel(key)
    return Json(running.result())


async def _cancel(explorer: Explorer, request: Request) -> Response:
    return Json(explorer.cancel((await _body(request)).get("id", "")[:64]))


async def _select(explorer: Explorer, request: Request) -> Response:
    viewer = request.app.state.viewer
    limit = max(whole_of(request, "limit", PAGE, 200), 1)

    def work() -> dict[str, Any]:
        answer, cards = explorer.select(
            text_of(request, "relation") or FILTERED_ROWS.tables[0].name,
            text_of(request, "where"),
            text_of(request, "order"),
            text_of(request, "direction") or "asc",
            whole_of(request, "offset", 0),
            limit,
            part=text_of(request, "part"),
        )
        entries = [{**viewer.entry_json(entry, part), "part": part} for part, entry in cards]
        return {**answer, "entries": entries}

    return Json(await _run(explorer.query_threads, work))


def _origin(explorer: Explorer, request: Request) -> dict[str, Any]:
    sample_id, part = text_of(request, "sample_id"), text_of(request, "part")
    index = optional_of(request, "n")
    partition = explorer.partition_of(part, index or 0) if index is not None else part.partition("/")[0]
    if not partition:
        raise NoSampleError("the partition of the sample is not known")
    return explorer.origin(partition, sample_id)


def _item(explorer: Explorer, request: Request) -> dict[str, Any]:
    (item,) = bounded((explorer.item(_place(request)),))
    return item_json(item, "explore/media", f"?{_query_of(request)}")


async def _thumbnail(explorer: Explorer, request: Request) -> Response:
    viewer, place = request.app.state.viewer, _place(request)
    identity = await _run(explorer.threads, partial(_identity, explorer, place))

    def picture() -> Picture:
        return _picture(identity, partial(explorer.item, place))

    headers = {"etag": f'"{identity}"', "cache-control": "private, max-age=3600"}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return await thumbnail_response(viewer.thumbnails.get(identity, picture), headers)


def _identity(explorer: Explorer, place: Mapping[str, Any]) -> str:
    """Changes when the shards of the place's partition do."""
    shards = explorer.state.partitions.get(place["partition"])
    return fingerprint("explore", *sorted(place.items()), None if shards is None else shards.fingerprints)


def _picture(identity: str, item: Callable[[], Item]) -> Picture:
    return Picture(identity=identity, items=(item,))


async def _media(explorer: Explorer, request: Request) -> Response:
    place, name = _place(request), request.path_params["name"]

    def work() -> tuple[Media, str]:
        found = next((one for one in explorer.item(place).media if one.name == name), None)
        if found is None:
            raise NoSampleError("the content has no such media")
        return found, fingerprint(_identity(explorer, place), name, found.size)

    media, tag = await _run(explorer.threads, work)
    makers = request.app.state.viewer.makers
    return await media_response(request, media, etag=tag, cache="no-cache", readers=explorer.threads, makers=makers)
