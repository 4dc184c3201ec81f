"""Where the server listens, and the URL that it is opened by."""

import pytest
from click.testing import CliRunner

from mm_assets.cli.main import main
from mm_assets.errors import ConfigError
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
        (["--storage-options", "{anon}", "x.tar"], "--storage-options: is not JSON"),
        (["--storage-options", "[1]", "x.tar"], "--storage-options: is not an object"),
        (["--port", "70000", "x.tar"], "70000"),
        ([], "Missing argument"),
    ],
)
def test_wrong_options_are_refused_with_code_2(arguments: list[str], said: str) -> None:
    """A wrong option is said in a line before anything is opened."""
    result = CliRunner().invoke(main, ["view", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
