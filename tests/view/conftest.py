"""Packed files with pictures, and clients of the application over them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import mm_assets
from mm_assets.fields import ImageField, TextField
from mm_assets.view import Backend, build_app, open_backend

TOKEN = "token-of-the-tests"


def client_of(backend: Backend, *, token: str | None = TOKEN) -> TestClient:
    """A client of the viewer over a backend; with the token as a browser has it after its first request."""
    client = TestClient(
        build_app(backend, token=TOKEN), base_url="http://127.0.0.1:8000", raise_server_exceptions=False
    )
    if token is not None:
        assert client.get("/", params={"t": token}).status_code == 200
    return client


def viewer_of(client: TestClient) -> Any:
    """What the routes share, of the application behind its guard."""
    guard: Any = client.app
    return guard._app.state.viewer


@pytest.fixture
def view() -> Iterator[Callable[..., TestClient]]:
    """Opens locations in a viewer; their files are closed at the end."""
    opened: list[Backend] = []

    def open_view(*locations: Path | str) -> TestClient:
        opened.append(open_backend([str(location) for location in locations]))
        return client_of(opened[-1])

    yield open_view
    for backend in opened:
        backend.close()


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A MULT file of 120 samples with a caption; every third has a picture too."""
    import numpy as np

    path = tmp_path / "pairs.mult"
    fields = {"image": ImageField(encoding="png"), "caption": TextField()}
    with mm_assets.create(path, fields) as writer:
        for i in range(120):
            image = np.full((12, 16, 3), i, np.uint8) if i % 3 == 0 else None
            writer.write(f"id-{i:04d}", {"image": image, "caption": f"caption {i} <script>alert(1)</script>"})
    return path
