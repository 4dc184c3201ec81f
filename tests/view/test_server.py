"""Where the server listens, and the URL that it is opened by."""

import asyncio
import resource
import socket
import threading
import time
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner

from mm_assets.cli.main import main
from mm_assets.errors import ConfigError
from mm_assets.view import server
from mm_assets.view.server import bind, url_of


def test_port_0_takes_a_free_one() -> None:
    """Two servers on port 0 have different ports, which their URLs name."""
    with bind("127.0.0.1", 0) as one, bind("127.0.0.1", 0) as two:
        assert url_of(one, "127.0.0.1", "a") == f"http://127.0.0.1:{one.getsockname()[1]}/?t=a"
        assert one.getsockname()[1] != two.getsockname()[1]


@pytest.mark.parametrize(("host", "name"), [("0.0.0.0", "127.0.0.1"), ("localhost", "localhost"), ("::", "[::1]")])
def test_the_url_names_an_address_that_can_be_opened(host: str, name: str) -> None:
    """An address that means all of them is not one to open."""
    try:
        sock = bind(host, 0)
    except ConfigError:
        pytest.skip(f"this machine has no {host}")
    with sock:
        assert url_of(sock, host, "t") == f"http://{name}:{sock.getsockname()[1]}/?t=t"


def test_a_port_that_is_taken_is_an_error_with_advice() -> None:
    """A second server on a port is refused with the advice to take port 0."""
    with bind("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="--port 0"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="--host"):
        bind("203.0.113.7", 0)  # an address for documentation, of no machine


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--storage-options", "{anon: secret}", "x.tar"], "--storage-options: is not JSON"),
        (["--storage-options", "secret", "x.tar"], "--storage-options: found a text without ="),
        (["--storage-options", "key=[secret", "x.tar"], "key: found ***, expected YAML"),
        (["--storage-options", "a=1", "--storage-options", "a.b=secret", "x.tar"], "a.b: a is given as a whole"),
        (["--port", "70000", "x.tar"], "70000"),
        ([], "Missing argument"),
    ],
)
def test_wrong_options_are_refused_with_code_2(arguments: list[str], said: str) -> None:
    """A wrong option is said in a line before anything is opened."""
    result = CliRunner().invoke(main, ["view", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert "secret" not in result.stderr


def test_storage_options_reach_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of JSON and KEY=VALUE are joined, dots nest, and values have their types."""
    import mm_assets.view

    given: list[object] = []

    def opened(sources: tuple[str, ...], **options: object) -> None:
        given.append((sources, options["storage_options"]))
        raise ConfigError("arguments", "X", "is only looked at")

    monkeypatch.setattr(mm_assets.view, "open_backend", opened)
    options = ['{"key": "a"}', "anon=true", "client_kwargs.endpoint_url=http://localhost:1"]
    arguments = [word for option in options for word in ("--storage-options", option)]
    CliRunner().invoke(main, ["view", *arguments, "s3://b/x.tar"])
    expected = {"key": "a", "anon": True, "client_kwargs": {"endpoint_url": "http://localhost:1"}}
    assert given == [(("s3://b/x.tar",), expected)]


def test_a_body_that_does_not_arrive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose body stays away is given up after the time for a whole one; one whose body comes is answered."""
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await asyncio.sleep(1)  # an answer may take longer than a request
        await send({"type": "http.response.body", "body": body})

    sock = bind("127.0.0.1", 0)
    viewer = uvicorn.Server(uvicorn.Config(app, http=server._protocol(), log_level="critical", lifespan="off"))
    thread = threading.Thread(target=viewer.run, kwargs={"sockets": [sock]})
    thread.start()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
    try:
        with socket.create_connection(sock.getsockname(), 20) as late, late.makefile("rb") as answer:
            late.sendall(head + b"ab")
            assert answer.read() == b""
        with socket.create_connection(sock.getsockname(), 20) as whole, whole.makefile("rb") as answer:
            whole.sendall(head + b"ab")
            time.sleep(0.1)
            whole.sendall(b"cd")
            lines = iter(answer.readline, b"\r\n")
            assert b" 200 " in next(lines)
            list(lines)
            assert answer.read(4) == b"abcd"
    finally:
        viewer.should_exit = True
        thread.join(20)


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    """The soft limit of open files becomes the hard one, at most what is asked for, and is never lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        server.allow_open_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
        server.allow_open_files(250)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
