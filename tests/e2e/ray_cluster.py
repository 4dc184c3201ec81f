"""A Ray cluster on this machine: a head, and nodes in namespaces of their own that can be lost like hosts."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

WAIT = 120.0  # for a node, which takes 10 to 25 seconds
_HOST = ("sh", "-c", 'hostname "$0" && exec "$@"')
_ISOLATED = ("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
_RAY = "from ray.scripts.scripts import main; main()"


def can_isolate() -> bool:
    """Whether this process may start others in namespaces of their own."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*_ISOLATED, "hostname", "isolated"], capture_output=True, check=False, timeout=30)
    return tried.returncode == 0


def as_host(name: str, *, own_processes: bool = True) -> tuple[str, ...]:
    """What to put before a command to run it as on another host: with a host name, and process ids, of its own."""
    return (*(_ISOLATED if own_processes else ("unshare", "--uts")), *_HOST, name)


class RayCluster:
    """The head of a cluster and the nodes that were started beside it, with two processors each.

    Args:
        folder: for the sockets and logs of Ray; its path must be short.
        environment: of its nodes, beside this process's.
        takes_jobs: whether it has a dashboard, to which jobs are submitted at `jobs`; it needs `ray[default]`.

    Attributes:
        address: of the head.
        jobs: URL of the dashboard.
        head: the first node.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], *, takes_jobs: bool = False) -> None:
        self._folder = folder
        # Otherwise Ray takes a token from the home folder, if there is one, which commands would then need too.
        own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        self._environment = {**os.environ, **own, **environment}
        port, dashboard = _free_port(), _free_port()
        self.address = f"127.0.0.1:{port}"
        self.jobs = f"http://127.0.0.1:{dashboard}"
        head = ("--head", f"--port={port}", f"--temp-dir={folder}", f"--dashboard-port={dashboard}")
        includes = f"--include-dashboard={str(takes_jobs).lower()}"
        self.head = Node(self._started("head", (), {}, *head, includes))

    def _started(
        self, name: str, prefix: tuple[str, ...], environment: Mapping[str, str], *options: str
    ) -> subprocess.Popen[bytes]:
        agent = f"--dashboard-agent-listen-port={_free_port()}"  # nodes share this host's ports
        command = [*prefix, sys.executable, "-c", _RAY, "start", *options, agent, "--num-cpus=2", "--block"]
        given = {**self._environment, **environment}
        with (self._folder / f"{name}.log").open("wb") as log:
            started = subprocess.Popen(command, stdout=log, stderr=log, env=given, start_new_session=True)
        deadline = time.monotonic() + WAIT
        while b"Ray runtime started" not in (self._folder / f"{name}.log").read_bytes():
            assert started.poll() is None, (self._folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline, (self._folder / f"{name}.log").read_text()
            time.sleep(0.2)
        return started

    def start_node(self, name: str, *options: str, environment: Mapping[str, str] | None = None) -> "Node":
        """Starts a node with a host name and process ids of its own."""
        process = self._started(name, as_host(name), environment or {}, f"--address={self.address}", *options)
        return Node(process)

    @contextmanager
    def node(self, name: str, *options: str, environment: Mapping[str, str] | None = None) -> Iterator["Node"]:
        """The same, which is lost at the end of the block."""
        node = self.start_node(name, *options, environment=environment)
        try:
            yield node
        finally:
            node.lose()

    def signal_head(self, number: int) -> None:
        """Signals the process that knows the nodes and their tasks; the nodes and what runs on them go on."""
        servers = [each for each in _started_by(self.head.process) if each.name() == "gcs_server"]
        assert len(servers) == 1
        servers[0].send_signal(number)

    def close(self) -> None:
        """Ends the head with all that it started."""
        self.head.lose()


def _free_port() -> int:
    with socket.socket() as free:  # outside the ports of Ray's workers, which are from 10002 to 19999
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Node:
    """A node of a cluster.

    Attributes:
        process: the first one of the host.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def workers(self) -> list[int]:
        """The ids, as this process sees them, of the processes that run a task."""
        found = []
        for process in _started_by(self.process):
            with suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith("ray::_work"):
                    found.append(process.pid)
        return found

    def lose(self) -> None:
        """Kills every process of the node at once; the system closes their connections."""
        _kill_all(self.process)

    def silence(self) -> None:
        """Stops every process of the node: it answers nothing and closes nothing, as a host that loses power."""
        _signal_all(self.process, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets the processes that `silence` stopped go on."""
        _signal_all(self.process, signal.SIGCONT)


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    # The init of a namespace takes all others with it; what is not in one is killed by its number.
    _signal_all(process, signal.SIGKILL)
    process.wait(WAIT)


def _signal_all(process: subprocess.Popen[bytes], number: int) -> None:
    for each in (*_started_by(process), process):
        with suppress(ProcessLookupError):
            os.kill(each.pid, number)


def _started_by(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
