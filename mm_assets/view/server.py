"""Runs the application with uvicorn on one address, and says where it is."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from mm_assets.errors import ConfigError

if TYPE_CHECKING:
    from mm_assets.view.guard import Guard

__all__ = ["bind", "serve", "url_of"]


def bind(host: str, port: int, *, option: str = "--port", advice: str = "`--port 0` takes a free one") -> socket.socket:
    """A socket that listens on an address; port 0 takes a free one.

    Args:
        host: name or IP address of this machine.
        port: number.
        option: that the port was given with, for the message.
        advice: what to do where it is taken.

    Raises:
        ConfigError: the address is not one of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        detail = f"{host}:{port} is in use by another program; {advice}" if taken else f"{host}: {error}"
        raise ConfigError("arguments", option if taken else "--host", detail) from error


def url_of(sock: socket.socket, host: str, token: str) -> str:
    """The URL that opens the page; an address that stands for all of them is called localhost."""
    port = sock.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/?t={token}"


def serve(app: Guard, sock: socket.socket, *, on_started: Callable[[], None] | None = None) -> None:
    """Answers requests until the process is interrupted."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=0,  # an interrupt does not wait for a film to end
        proxy_headers=False,
    )
    if on_started is not None:
        on_started()
    uvicorn.Server(config).run(sockets=[sock])
