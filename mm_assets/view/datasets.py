"""Viewers of several datasets on one port, each below its name and opened when it is first asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from html import escape
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route

from mm_assets.errors import MmAssetsError
from mm_assets.view.answers import plain_page
from mm_assets.view.app import build_viewer, serve_icon, serve_static
from mm_assets.view.backends import Backend
from mm_assets.view.guard import Guard, Receive, Send

__all__ = ["build_datasets_app"]


class _Lazy:
    """The viewer of one dataset, opened by the first request; one that cannot be opened is tried again."""

    def __init__(self, open_dataset: Callable[[], Backend]) -> None:
        self._open_dataset = open_dataset
        self._opening = asyncio.Lock()
        self._app: Starlette | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async with self._opening:
            if self._app is None:
                try:
                    self._app = build_viewer(await asyncio.to_thread(self._open_dataset))
                except (MmAssetsError, OSError) as error:
                    await plain_page(404, "This dataset cannot be opened", str(error))(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def build_datasets_app(
    datasets: Mapping[str, Callable[[], Backend]], *, token: str, hosts: Iterable[str] = ()
) -> Guard:
    """The application over several datasets: a page with their names, and the viewer of each at ``/NAME/``.

    Args:
        datasets: what opens the dataset of a name. It runs in a thread, once for all requests; after an
            `MmAssetsError` or `OSError`, which the page says, again.
        token: what every request must have, in its cookie or its URL.
        hosts: names by which the server may be called, beside localhost and IP addresses.
    """

    async def front(_request: Request) -> Response:
        names = "".join(f'<li><a href="{escape(name)}/">{escape(name)}</a>' for name in sorted(datasets))
        return HTMLResponse(
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>mm-assets: datasets</title>'
            '<meta name="viewport" content="width=device-width"><link rel="icon" href="static/icon.svg">'
            f'<link rel="stylesheet" href="static/app.css"><main><h1>Datasets</h1><ul>{names}</ul></main>'
        )

    async def nothing(request: Request, _error: Exception) -> Response:
        return plain_page(404, "Not found", f"There is no dataset at {request.url.path}.")

    mounts = [Mount(f"/{name}", app=_Lazy(open_dataset)) for name, open_dataset in datasets.items()]
    own = [Route("/", front), Route("/static/{name}", serve_static), Route("/favicon.ico", serve_icon)]
    return Guard(Starlette(routes=[*own, *mounts], exception_handlers={404: nothing}), token=token, hosts=hosts)
