"""Postgres as the storage of the Dagster instance, directly and behind PgBouncer, restarted during a load.

It needs the programs of Postgres and PgBouncer (Debian: `postgresql`, `pgbouncer`).
"""

import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mm_assets.pipeline.chain import CHAIN

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
pytestmark = pytest.mark.skipif(not PROGRAMS, reason="Debian's package postgresql is not installed")
COMMAND = (sys.executable, "-P", "-c", "from mm_assets.cli.main import main; main()")
DOWN = 2.0  # seconds
WAIT = 120.0  # for what takes seconds on an idle machine

DAGSTER = """\
telemetry: {{enabled: false}}
storage:
  postgres:
    postgres_url: postgresql+psycopg2://dagster@127.0.0.1:{port}/dagster
"""

PGBOUNCER = """\
[databases]
dagster = host=127.0.0.1 port={server} dbname=dagster
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users.txt
pool_mode = transaction
default_pool_size = 10
server_reset_query_always = 1
server_login_retry = 1
logfile = {folder}/pgbouncer.log
pidfile = {folder}/pgbouncer.pid
"""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def unprivileged(command: Sequence[str]) -> tuple[str, ...]:
    """The same command, of the user `postgres` where this is root: the servers refuse to be."""
    return ("runuser", "-u", "postgres", "--", *command) if os.geteuid() == 0 else tuple(command)


class Server:
    """A Postgres server with its files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
        programs = PROGRAMS[-1].parent
        self._run(str(programs / "initdb"), "-D", str(folder / "data"), "-A", "trust", "-U", "dagster")
        with (folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write(f"port = {self.port}\nunix_socket_directories = ''\nfsync = off\n")
        self.control("start")
        self.query("postgres", "create database dagster")

    def _run(self, *command: str) -> None:
        done = subprocess.run(unprivileged(command), cwd=self.folder, stdout=subprocess.DEVNULL, check=False)
        assert done.returncode == 0, command

    def control(self, action: str) -> None:
        data, log = str(self.folder / "data"), str(self.folder / "log")
        self._run(str(PROGRAMS[-1]), "-D", data, "-l", log, "-m", "fast", "-w", action)

    def query(self, database: str, statement: str) -> str:
        given = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "dagster", "-d", database, "-qtAc", statement)
        return subprocess.run(("psql", *given), capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def server() -> Iterator[Server]:
    # The folders of pytest are its user's alone, and this one another's.
    folder = Path(subprocess.run(("mktemp", "-d"), capture_output=True, text=True, check=True).stdout.strip())
    made = Server(folder)
    yield made
    made.control("stop")
    shutil.rmtree(folder)


@pytest.fixture(params=["direct", "pgbouncer"])
def port(server: Server, request: pytest.FixtureRequest) -> Iterator[int]:
    """Where Dagster finds the server."""
    if request.param == "direct":
        yield server.port
        return
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("Debian's package pgbouncer is not installed")
    found, folder = free_port(), server.folder
    (folder / "users.txt").write_text('"dagster" ""\n')
    (folder / "pgbouncer.ini").write_text(PGBOUNCER.format(server=server.port, port=found, folder=folder))
    with subprocess.Popen(unprivileged((program, "-q", str(folder / "pgbouncer.ini")))) as process:
        reached(lambda: (folder / "pgbouncer.pid").exists())
        yield found
        process.terminate()


def reached(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("moment", ["start", "middle"])
def test_a_restart_during_a_load_loses_nothing(
    server: Server, port: int, dagster_home: Path, demo_shards: Path, tmp_path: Path, moment: str
) -> None:
    """The command succeeds, its run too, and Dagster has each materialization and check result once."""
    (dagster_home / "dagster.yaml").write_text(DAGSTER.format(port=port))
    (tmp_path / "in").mkdir()
    for name in "abc":
        shutil.copy(demo_shards / "captions-00000.tar", tmp_path / "in" / f"{name}.tar")
    given = ("run", "--shards", "in", "--root", "out", "--set", "settle_seconds=0")
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen((*COMMAND, *given), cwd=tmp_path, stdout=log, stderr=log) as process,
    ):
        wanted = "a: done" if moment == "middle" else "partition"
        reached(lambda: wanted in (tmp_path / "log").read_text() or process.poll() is not None)
        server.control("stop")
        time.sleep(DOWN)
        server.control("start")
        process.wait(WAIT)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert server.query("dagster", "select status from runs") == "SUCCESS"
    made = server.query(
        "dagster", "select asset_key, partition from event_logs where dagster_event_type = 'ASSET_MATERIALIZATION'"
    )
    of_partitions = [line for line in made.splitlines() if not line.endswith("|")]
    assert len(of_partitions) == len(set(of_partitions)) == 3 * (len(CHAIN) - 1)
    results = server.query(
        "dagster", "select asset_key, check_name, partition from asset_check_executions"
    ).splitlines()
    evaluated = server.query(
        "dagster", "select count(*) from event_logs where dagster_event_type = 'ASSET_CHECK_EVALUATION'"
    )
    assert len(results) == len(set(results)) == int(evaluated) >= 30
