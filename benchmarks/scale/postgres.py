"""A Postgres server of Debian's package, with its files in a temporary folder, for Dagster's instance."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Postgres", "postgres"]


class Postgres:
    """A server at work.

    Args:
        folder: for its files.
        programs: the folder of `initdb`.

    Attributes:
        url: that Dagster opens.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder, self._programs = folder, programs
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            self._port = listening.getsockname()[1]
        self.url = f"postgresql+psycopg2://dagster@127.0.0.1:{self._port}/dagster"
        self._run("initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "dagster")
        with (folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write(f"port = {self._port}\nunix_socket_directories = ''\n")
        self.control("start")
        self.query("create database dagster", "postgres")

    def control(self, action: str) -> None:
        """Starts or stops it."""
        self._run("pg_ctl", "-D", f"{self._folder}/data", "-l", f"{self._folder}/log", "-m", "fast", "-w", action)

    def query(self, statement: str, database: str = "dagster") -> str:
        """The answer to a statement, as text."""
        given = ("-h", "127.0.0.1", "-p", str(self._port), "-U", "dagster", "-d", database, "-qtAc", statement)
        program = str(self._programs / "psql")
        return subprocess.run((program, *given), capture_output=True, text=True, check=True).stdout.strip()

    def used(self) -> dict[str, int]:
        """Rows that were inserted, sessions and commits so far, and bytes of the database."""
        rows = "select coalesce(sum(n_tup_ins), 0) from pg_stat_user_tables"
        of = "from pg_stat_database where datname = 'dagster'"
        self.query("select pg_stat_force_next_flush()")
        return {
            "rows": int(self.query(rows)),
            "connections": int(self.query(f"select sessions {of}")),
            "commits": int(self.query(f"select xact_commit {of}")),
            "database bytes": int(self.query("select pg_database_size('dagster')")),
        }

    def _run(self, program: str, *arguments: str) -> None:
        command = (str(self._programs / program), *arguments)
        if os.geteuid() == 0:  # whom the server refuses
            command = ("runuser", "-u", "postgres", "--", *command)
        subprocess.run(command, cwd=self._folder, stdout=subprocess.DEVNULL, check=True)


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Starts a server, and stops it at the end.

    Raises:
        SystemExit: it is not installed.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        raise SystemExit("Postgres is not installed: Debian's package is `postgresql`")
    folder = Path(tempfile.mkdtemp(prefix="mm-assets-postgres-"))
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
    server = Postgres(folder, found[-1].parent)
    try:
        yield server
    finally:
        server.control("stop")
        shutil.rmtree(folder)
