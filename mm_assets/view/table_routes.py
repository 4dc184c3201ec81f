"""The routes that sort and filter the grid: columns of what is looked at, and the samples that meet a condition."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mm_assets.view.answers import Json
from mm_assets.view.backends.base import NoSampleError
from mm_assets.view.parameters import text_of, whole_of
from mm_assets.view.sample_table import RELATION

__all__ = ["table_routes"]

PAGE = 50


def table_routes() -> list[BaseRoute]:
    """The routes; they take the viewer from the application's state."""
    return [Route("/api/columns", _columns), Route("/api/select", _select)]


async def _columns(request: Request) -> Response:
    """The relation `samples` and its columns, in a list; an empty one where the source has none."""
    viewer = request.app.state.viewer

    def work() -> dict[str, Any]:
        table = viewer.chosen(request).sample_table()
        found = [] if table is None else [{"name": RELATION, "columns": list(table.columns().items())}]
        return {"relations": found}

    return Json(await viewer.run(work))


async def _select(request: Request) -> Response:
    viewer, part = request.app.state.viewer, request.query_params.get("part", "")
    offset, limit = whole_of(request, "offset", 0), max(whole_of(request, "limit", PAGE, 200), 1)
    where, order = text_of(request, "where"), text_of(request, "order")
    direction = text_of(request, "direction") or "asc"

    def work() -> dict[str, Any]:
        backend = viewer.chosen(request)
        table = backend.sample_table()
        if table is None:
            raise NoSampleError(f"{backend.title} has no columns of its samples")
        found = table.select(where, order, direction, offset, limit)
        if found.error is not None:
            return dict(found.error)
        entries = backend.entries([int(row[0]) for row in found.rows])
        pictures = {one.picture: partial(backend.picture, one.index) for one in entries if one.picture}
        viewer.thumbnails.prefetch(pictures)
        return {
            "entries": [{**viewer.entry_json(entry, part), "part": part} for entry in entries],
            "rows": [{"value": row[-1] if order else None} for row in found.rows],
            "next": offset + limit if found.more else None,
        }

    # Not among the threads that read samples: columns that were not scanned yet take long.
    return Json(await asyncio.get_running_loop().run_in_executor(viewer.queries, work))
