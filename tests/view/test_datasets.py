"""Viewers of several datasets on one port."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mm_assets.errors import SourceError
from mm_assets.view import Backend, build_datasets_app, open_backend

from .conftest import TOKEN


class Datasets:
    """Two datasets: one opens a packed file, the other is not there until `is_made`."""

    def __init__(self, packed: Path) -> None:
        self.packed = packed
        self.is_made = False
        self.opened: list[Backend] = []

    def first(self) -> Backend:
        self.opened.append(open_backend([str(self.packed)]))
        return self.opened[-1]

    def second(self) -> Backend:
        if not self.is_made:
            raise SourceError("there", "is not registered yet")
        return self.first()


@pytest.fixture
def datasets(packed: Path) -> Iterator[Datasets]:
    found = Datasets(packed)
    yield found
    for backend in found.opened:
        backend.close()


@pytest.fixture
def client(datasets: Datasets) -> TestClient:
    app = build_datasets_app({"first": datasets.first, "second": datasets.second}, token=TOKEN)
    return TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


def test_nothing_answers_without_the_token(client: TestClient, datasets: Datasets) -> None:
    """The list, a dataset and its samples are 403, and no dataset is opened."""
    for path in ("/", "/first/", "/first/api/samples", "/static/app.js", "/nothing/"):
        assert client.get(path).status_code == 403
    assert not datasets.opened


def test_a_link_with_the_token_opens_a_dataset_at_its_partition(client: TestClient) -> None:
    """The link leads to the dataset's page without the token, whose URLs are relative and answer below its name."""
    welcome = client.get("/first/", params={"t": TOKEN, "part": "a"}).text
    assert "url=?part=a" in welcome
    page = client.get("/first/").text
    assert 'src="static/app.js"' in page
    assert client.get("/first/static/app.js").status_code == 200
    card = client.get("/first/api/samples").json()["entries"][0]
    assert client.get(f"/first/{card['picture']}").headers["content-type"] == "image/jpeg"
    media = client.get("/first/api/sample/0").json()["items"][0]["media"][0]["url"]
    assert client.get(f"/first/{media}").status_code == 200


def test_the_front_page_names_each_dataset(client: TestClient, datasets: Datasets) -> None:
    """It has a link to each, and opens none; a name without its slash leads to it, and an unknown one is 404."""
    page = client.get("/", params={"t": TOKEN}) and client.get("/")
    assert 'href="first/"' in page.text
    assert 'href="second/"' in page.text
    assert not datasets.opened
    assert client.get("/first").status_code == 200
    assert client.get("/third/").status_code == 404


def test_the_list_has_counts_and_a_picture_and_datasets_lead_back(client: TestClient, datasets: Datasets) -> None:
    """Each dataset's counts and a card of it can be asked for; one that cannot be opened says why."""
    client.get("/", params={"t": TOKEN})
    assert 'src="static/datasets.js"' in client.get("/").text
    assert client.get("/static/datasets.js").status_code == 200
    found = client.get("/@summary/first").json()
    assert found["samples"] == datasets.opened[0].count() > 0
    assert client.get(f"/first/{found['card']['picture']}").headers["content-type"] == "image/jpeg"
    assert client.get("/first/api/about").json()["is_listed"] is True
    refused = client.get("/@summary/second")
    assert (refused.status_code, "is not registered yet" in refused.json()["error"]) == (200, True)
    assert "error" in client.get("/@summary/third").json()
    page = client.get("/second/", headers={"accept": "text/html"}).text
    assert '<a href="/">To the datasets</a>' in page


def test_a_dataset_that_cannot_be_opened_is_tried_again(client: TestClient, datasets: Datasets) -> None:
    """Its page says why; once it is there the next request opens it, and later ones do not open it again."""
    client.get("/", params={"t": TOKEN})
    refused = client.get("/second/")
    assert refused.status_code == 404
    assert "is not registered yet" in refused.json()["detail"]
    datasets.is_made = True
    assert [client.get("/second/api/about").status_code for _ in range(3)] == [200] * 3
    assert len(datasets.opened) == 1
