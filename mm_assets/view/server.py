"""Runs the application with uvicorn on one address, and says where it is."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mm_assets.errors import ConfigError

if TYPE_CHECKING:
    from mm_assets.view.guard import Guard

__all__ = ["bind", "limit_memory", "serve", "url_of"]

MEMORY = 4 << 30  # bytes beyond those of the start; files that are mapped do not count


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


def limit_memory(size: int = MEMORY) -> None:
    """Has this process fail to take more memory than now by a number of bytes, where the system can do that.

    What is shown is bounded piece by piece; this is for a decoder that a file leads to take more, such as for a page
    of a Parquet file that is 2 GiB of zeros, compressed to nothing: its sample then says so, and the machine goes on.
    """
    if sys.platform != "linux":  # elsewhere the limit counts mapped files too
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = pages * resource.getpagesize() + size
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or soft > most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


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
