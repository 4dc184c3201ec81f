"""Viewers of several datasets on one port, each below its name and opened when it is first asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from html import escape
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route

from mm_assets.errors import MmAssetsError
from mm_assets.view.answers import Json, plain_page
from mm_assets.view.app import Viewer, build_viewer, serve_icon, serve_static
from mm_assets.view.backends import Backend
from mm_assets.view.guard import Guard, Receive, Send

__all__ = ["build_datasets_app"]

_LOOKED_AT = 12  # samples, of which the first with a picture gives it
_CARD = (  # datasets.js fills it
    '<li><a class="card" href="{name}/" aria-busy="true"><div class="thumb"></div><div class="words">'
    '<span class="id" dir="auto">{name}</span><span class="text" dir="auto"></span></div></a>'
)


class _Lazy:
    """The viewer of one dataset, opened by the first request; one that cannot be opened is tried again."""

    def __init__(self, open_dataset: Callable[[], Backend]) -> None:
        self._open_dataset = open_dataset
        self._opening = asyncio.Lock()
        self._app: Starlette | None = None

    async def _opened(self) -> Starlette:
        async with self._opening:
            if self._app is None:
                self._app = build_viewer(await asyncio.to_thread(self._open_dataset), is_listed=True)
            return self._app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            app = await self._opened()
        except (MmAssetsError, OSError) as error:
            await plain_page(404, "This dataset cannot be opened", str(error))(scope, receive, send)
            return
        await app(scope, receive, send)

    async def summary(self) -> dict[str, Any]:
        """Returns the counts of samples and partitions, and the card of a sample with a picture; or an error."""
        try:
            viewer: Viewer = (await self._opened()).state.viewer
            return await viewer.run(partial(_summary, viewer))
        except (MmAssetsError, OSError) as error:
            return {"error": str(error)}


def _summary(viewer: Viewer) -> dict[str, Any]:
    entries = viewer.backend.page(0, _LOOKED_AT).entries
    chosen = next((entry for entry in entries if entry.picture), entries[0] if entries else None)
    return {
        "samples": viewer.backend.count(),
        "partitions": len(viewer.backend.partitions()),
        "card": None if chosen is None else viewer.entry_json(chosen),
    }


def build_datasets_app(
    datasets: Mapping[str, Callable[[], Backend]], *, token: str, hosts: Iterable[str] = ()
) -> Guard:
    """The application over several datasets: a page that lists them, and the viewer of each at ``/NAME/``.

    Args:
        datasets: what opens the dataset of a name. It runs in a thread, once for all requests; after an
            `MmAssetsError` or `OSError`, which the page says, again.
        token: what every request must have, in its cookie or its URL.
        hosts: names by which the server may be called, beside localhost and IP addresses.
    """

    async def front(_request: Request) -> Response:
        cards = "".join(_CARD.format(name=escape(name)) for name in sorted(datasets))
        return HTMLResponse(
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>mm-assets: datasets</title>'
            '<meta name="viewport" content="width=device-width"><link rel="icon" href="static/icon.svg">'
            '<link rel="stylesheet" href="static/app.css"><script type="module" src="static/datasets.js"></script>'
            '<header id="top"><div class="title"><h1>Datasets</h1></div></header>'
            f'<main><ol class="grid" aria-label="Datasets">{cards}</ol></main>'
        )

    async def summary(request: Request) -> Response:
        found = lazy.get(request.path_params["name"])
        return Json({"error": "there is no such dataset"} if found is None else await found.summary())

    async def nothing(request: Request, _error: Exception) -> Response:
        return plain_page(404, "Not found", f"There is no dataset at {request.url.path}.")

    lazy = {name: _Lazy(open_dataset) for name, open_dataset in datasets.items()}
    mounts = [Mount(f"/{name}", app=app) for name, app in lazy.items()]
    own = [
        Route("/", front),
        Route("/@summary/{name}", summary),
        Route("/static/{name}", serve_static),
        Route("/favicon.ico", serve_icon),
    ]
    return Guard(Starlette(routes=[*own, *mounts], exception_handlers={404: nothing}), token=token, hosts=hosts)
