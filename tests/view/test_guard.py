"""Who may ask, by which name, how much at a time, and what every answer forbids."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mm_assets.view import open_backend

from .conftest import TOKEN, client_of

Open = Callable[..., TestClient]
PATHS = (
    "/",
    "/api/about",
    "/api/samples",
    "/api/sample/0",
    "/thumbnail/0",
    "/media/0/0/stored",
    "/static/app.js",
    "/x",
)


@pytest.fixture
def stranger(packed: Path) -> Iterator[TestClient]:
    """A client that does not know the token."""
    backend = open_backend([str(packed)])
    yield client_of(backend, token=None)
    backend.close()


@pytest.mark.parametrize("path", PATHS)
def test_no_path_answers_without_the_token(stranger: TestClient, path: str) -> None:
    """Every path is 403 without a token, and with a wrong one in query or cookie."""
    assert stranger.get(path).status_code == 403
    assert stranger.get(path, params={"t": "wrong"}).status_code == 403
    assert stranger.get(path, params={"t": ""}).status_code == 403
    cookies = {"mm_assets_view": TOKEN, "t": TOKEN}
    assert stranger.get(path, headers={"cookie": "; ".join(f"{k}={v}" for k, v in cookies.items())}).status_code == 403


def test_the_token_becomes_a_cookie_that_scripts_cannot_read(stranger: TestClient) -> None:
    """The URL with the token stores it as a strict cookie and leads to the page without it, the state kept."""
    answer = stranger.get("/", params={"t": TOKEN, "n": "5", "part": 'a"><script>'})
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in answer.text
    assert "url=?n=5&amp;part=a%22%3E%3Cscript%3E" in answer.text
    assert stranger.get("/api/about").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "", "a@b", "["]
)
def test_other_names_are_refused_even_with_the_token(packed: Path, view: Open, host: str) -> None:
    """A name that a foreign DNS server points here is not answered."""
    assert view(packed).get("/api/about", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000", "192.168.1.7:8000"])
def test_addresses_and_localhost_are_answered(packed: Path, view: Open, host: str) -> None:
    """The machine's own name and addresses are answered."""
    assert view(packed).get("/api/about", headers={"host": host}).status_code == 200


def test_every_answer_forbids_foreign_scripts(packed: Path, view: Open, stranger: TestClient) -> None:
    """Pages, JSON, media and refusals carry the policy, and media one that lets nothing run."""
    client = view(packed)
    for path in PATHS:
        for answer in (client.get(path), stranger.get(path)):
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy, path
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
    url = client.get("/api/sample/0").json()["items"][0]["media"][0]["url"]
    assert client.get(url).headers["content-security-policy"] == "default-src 'none'; sandbox"


def test_methods_that_change_something_are_refused(packed: Path, view: Open) -> None:
    """PUT and DELETE are 405; a POST from another origin, or none, is 403."""
    client = view(packed)
    assert client.put("/api/samples").status_code == 405
    assert client.delete("/api/samples").status_code == 405
    assert client.post("/api/samples").status_code == 403
    assert client.post("/api/samples", headers={"origin": "https://evil.example"}).status_code == 403
    assert client.post("/api/samples", headers={"origin": "http://127.0.0.1:8000"}).status_code == 405


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/..%5capp.py", "/static/%00", "//etc/passwd"]
)
def test_no_path_reaches_the_file_system(packed: Path, view: Open, path: str) -> None:
    """Paths that climb out of the folder of the page are unknown names."""
    assert view(packed).get(path).status_code == 404


def test_a_body_that_is_too_large_is_refused(packed: Path, view: Open) -> None:
    """A request announces at most a mebibyte."""
    headers = {"origin": "http://127.0.0.1:8000"}
    assert view(packed).post("/api/samples", content=b"x" * (2 << 20), headers=headers).status_code == 413


def test_cookies_of_other_servers_do_not_lock_anyone_out(stranger: TestClient) -> None:
    """Cookies know no ports: one of another server on this host, whatever it holds, does not hide the token."""
    cookie = stranger.get("/", params={"t": TOKEN}).headers["set-cookie"].partition(";")[0]
    stranger.cookies.clear()
    for other in ('{"theme": "dark"}', 'settings={"a": [1, 2]}', "a b=c d", ";;=;", "é=ü", '"'):
        sent = f"{other}; {cookie}; {other}".encode()
        assert stranger.get("/api/about", headers={b"cookie": sent}).status_code == 200, other
    assert stranger.get("/api/about", headers={"cookie": f"{cookie}x"}).status_code == 403


def test_origins_of_other_schemes_cannot_post(packed: Path, view: Open) -> None:
    """The origin of a POST is this host by http, or by https behind a proxy."""
    client = view(packed)
    for origin, status in {"https://127.0.0.1:8000": 405, "file://127.0.0.1:8000": 403, "null": 403}.items():
        assert client.post("/api/samples", headers={"origin": origin}).status_code == status


def test_a_path_without_end_is_refused(packed: Path, view: Open) -> None:
    """A number of thousands of digits is an answer to the client, and no bug of the viewer."""
    client = view(packed)
    assert client.get(f"/api/sample/{'9' * 5000}").status_code == 414
    assert client.get(f"/api/sample/{'9' * 1000}").status_code == 404
