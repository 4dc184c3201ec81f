"""A Postgres server, and PgBouncer in front of it with the settings of `deploy/pgbouncer.ini`.

It needs the programs of Postgres and PgBouncer (Debian: `postgresql`, `pgbouncer`).
"""

import configparser
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
PGBOUNCER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
SETTINGS = Path(__file__).resolve().parents[2] / "deploy" / "pgbouncer.ini"
WAIT = 120.0  # for what takes seconds on an idle machine


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def reached(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.02)


def unprivileged(command: Sequence[str]) -> tuple[str, ...]:
    """The same command, of the user `postgres` where this is root: the servers refuse to be."""
    return ("runuser", "-u", "postgres", "--", *command) if os.geteuid() == 0 else tuple(command)


class Server:
    """A Postgres server with its files in a folder, and the database `dagster` of a user of this name.

    Args:
        folder: empty; it becomes the server's.
        password: of the user; None lets every local client in.
    """

    def __init__(self, folder: Path, password: str | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self._environment = {**os.environ, **({} if password is None else {"PGPASSWORD": password})}
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
        programs = PROGRAMS[-1].parent
        entry = ("-A", "trust")
        if password is not None:
            (folder / "password").write_text(password)
            entry = ("-A", "scram-sha-256", "--pwfile", str(folder / "password"))
        self._run(str(programs / "initdb"), "-D", str(folder / "data"), *entry, "-U", "dagster")
        with (folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write(f"port = {self.port}\nunix_socket_directories = ''\nfsync = off\n")
        self.control("start")
        self.query("postgres", "create database dagster")

    def _run(self, *command: str) -> None:
        done = subprocess.run(unprivileged(command), cwd=self.folder, stdout=subprocess.DEVNULL, check=False)
        assert done.returncode == 0, command

    def _client(self, program: str, database: str, *options: str) -> str:
        given = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "dagster", "-d", database, *options)
        done = subprocess.run((program, *given), capture_output=True, text=True, check=True, env=self._environment)
        return done.stdout.strip()

    def control(self, action: str) -> None:
        data, log = str(self.folder / "data"), str(self.folder / "log")
        self._run(str(PROGRAMS[-1]), "-D", data, "-l", log, "-m", "fast", "-w", action)

    def signal(self, number: int) -> None:
        """Sends a signal to each of its processes, if it runs."""
        with suppress(FileNotFoundError, psutil.NoSuchProcess):
            first = psutil.Process(int((self.folder / "data" / "postmaster.pid").read_text().split()[0]))
            for process in (first, *first.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def delay(self, table: str, seconds: float) -> None:
        """Has each insertion into a table of Dagster's database take so much longer."""
        self.query(
            "dagster",
            f"set client_min_messages = error; drop trigger if exists delay on {table}; "
            "create or replace function delay() returns trigger language plpgsql as "
            f"'begin perform pg_sleep({seconds}); return null; end'; "
            + (f"create trigger delay before insert on {table} execute function delay()" if seconds else ""),
        )

    def query(self, database: str, statement: str) -> str:
        return self._client("psql", database, "-qtAc", statement)

    def dump(self, database: str) -> str:
        """All tables, as SQL."""
        return self._client("pg_dump", database)

    @contextmanager
    def pooled(self, users: str | None = None) -> Iterator[int]:
        """PgBouncer in front of the server: its port.

        Args:
            users: what `auth_file` has; None lets every local client in.
        """
        assert PGBOUNCER is not None
        folder, found = self.folder, free_port()
        settings = configparser.ConfigParser()
        settings.read(SETTINGS)
        settings["databases"]["dagster"] = f"host=127.0.0.1 port={self.port} dbname=dagster"
        settings["pgbouncer"].update(
            listen_addr="127.0.0.1",
            listen_port=str(found),
            auth_file=f"{folder}/users.txt",
            logfile=f"{folder}/pgbouncer.log",
            pidfile=f"{folder}/pgbouncer.pid",
        )
        if users is None:
            settings["pgbouncer"]["auth_type"] = "trust"
        (folder / "users.txt").write_text(users or '"dagster" ""\n')
        with (folder / "pgbouncer.ini").open("w") as file:
            settings.write(file)
        with subprocess.Popen(unprivileged((PGBOUNCER, "-q", str(folder / "pgbouncer.ini")))) as process:
            try:
                reached(lambda: (folder / "pgbouncer.pid").exists())
                yield found
            finally:
                process.terminate()


@contextmanager
def serving(password: str | None = None) -> Iterator[Server]:
    """A server while it is needed."""
    # The folders of pytest are its user's alone, and this one another's.
    folder = Path(subprocess.run(("mktemp", "-d"), capture_output=True, text=True, check=True).stdout.strip())
    made = Server(folder, password)
    try:
        yield made
    finally:
        made.control("stop")
        shutil.rmtree(folder)
