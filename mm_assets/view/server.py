"""Runs the application with uvicorn on one address, and says where it is."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_assets.errors import ConfigError

if TYPE_CHECKING:
    from mm_assets.view.guard import Guard

__all__ = ["allow_open_files", "bind", "limit_memory", "serve", "url_of"]

REQUEST_SECONDS = 30.0  # for a request to arrive whole
OPEN_FILES = 1 << 16
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


def allow_open_files(most: int = OPEN_FILES) -> None:
    """Lets this process have as many files open as the system allows, at most `most`: every shard looked at is one."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a system may allow fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve(app: Guard, sock: socket.socket) -> None:
    """Answers requests until the process is interrupted.

    A connection on which no whole request arrives for `REQUEST_SECONDS` is closed, so that slow ones do not use up the
    open files of the process.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        http=_protocol(),
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=0,  # an interrupt does not wait for a film to end
        proxy_headers=False,
    )
    allow_open_files()
    uvicorn.Server(config).run(sockets=[sock])


def _protocol() -> type[asyncio.Protocol]:
    """The HTTP protocol of uvicorn, with a limit for the time that a request takes to arrive."""
    if TYPE_CHECKING:  # the two classes that uvicorn chooses from, by what is installed, have the same members
        from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
    else:
        from uvicorn.protocols.http.auto import AutoHTTPProtocol as Protocol

    class Impatient(Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:  # uvicorn takes less than `asyncio.Protocol` does
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            self._disarm()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_answering():
                self._disarm()
            elif self._timer is None:
                self._arm()

        def _is_answering(self) -> bool:
            cycle = self.cycle
            return cycle is not None and not cycle.response_complete and not cycle.more_body

        def _arm(self) -> None:
            self._timer = asyncio.get_running_loop().call_later(REQUEST_SECONDS, self._give_up)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            self._timer = None
            if not self._is_answering():
                self.transport.close()

    return Impatient
