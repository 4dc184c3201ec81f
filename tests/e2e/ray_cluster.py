"""A Ray cluster on this machine: a head, and nodes in namespaces of their own that can be lost like hosts."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

WAIT = 120.0  # for a node, which takes 10 to 25 seconds
_ISOLATED = ("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
_RAY = "from ray.scripts.scripts import main; main()"


def can_isolate() -> bool:
    """Whether this process may start others in namespaces of their own."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*_ISOLATED, "hostname", "isolated"], capture_output=True, check=False, timeout=30)
    return tried.returncode == 0


class RayCluster:
    """The head of a cluster and the nodes that were started beside it, with two processors each.

    Args:
        folder: for the sockets and logs of Ray; its path must be short.
        path: $PYTHONPATH of its workers.
        takes_jobs: whether it has a dashboard, to which jobs are submitted at `jobs`; it needs `ray[default]`.
        variables: of the environment of its nodes, beside this process's.
    """

    def __init__(
        self, folder: Path, path: str, *, takes_jobs: bool = False, variables: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self._environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path, **(variables or {})}
        self._port, dashboard = _free_port(), _free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.jobs = f"http://127.0.0.1:{dashboard}"
        head = ("--head", f"--port={self._port}", f"--temp-dir={folder}", f"--dashboard-port={dashboard}")
        self._head = self._started("head", (), *head, f"--include-dashboard={str(takes_jobs).lower()}")

    def _started(self, name: str, prefix: tuple[str, ...], *options: str) -> subprocess.Popen[bytes]:
        agent = f"--dashboard-agent-listen-port={_free_port()}"  # nodes share this host's ports
        command = [*prefix, sys.executable, "-c", _RAY, "start", *options, agent, "--num-cpus=2", "--block"]
        log = (self._folder / f"{name}.log").open("wb")
        with log:
            started = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment, start_new_session=True)
        deadline = time.monotonic() + WAIT
        while b"Ray runtime started" not in (self._folder / f"{name}.log").read_bytes():
            assert started.poll() is None, (self._folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline, (self._folder / f"{name}.log").read_text()
            time.sleep(0.2)
        return started

    @contextmanager
    def node(self, name: str) -> Iterator["Node"]:
        """A node with a host name and process ids of its own."""
        prefix = (*_ISOLATED, "sh", "-c", f'hostname {name} && exec "$@"', "sh")
        node = Node(self._started(name, prefix, f"--address={self.address}"))
        try:
            yield node
        finally:
            node.lose()

    def close(self) -> None:
        """Ends the head with all that it started."""
        _kill_all(self._head)


def _free_port() -> int:
    with socket.socket() as free:  # outside the ports of Ray's workers, which are from 10002 to 19999
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Node:
    """A node of a cluster."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def lose(self) -> None:
        """Kills every process of the node at once, as a host that loses power."""
        _kill_all(self.process)


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    # The init of a namespace takes all others with it; what is not in one is killed by its number.
    for each in (*started, process):
        try:
            os.kill(each.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(WAIT)
