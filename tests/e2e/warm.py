"""`mm-assets` commands as processes that need not import what they are made of: forks of one process that has.

A command imports Dagster for two seconds, and works for a fraction of one. Tests of what commands do, which start many
of them, use these; `test_wheels.py` and others show that a process that is started from nothing does the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOADED = (
    "alembic.command",
    "dagster",
    "dagster._core.storage.event_log",
    "dagster._core.storage.runs",
    "dagster._core.storage.schedules",
    "dagster._daemon.types",
    "duckdb",
    "mm_assets.cli.main",
    "mm_assets.orchestration.launch",
    "mm_assets.orchestration.load",
    "pandas",  # which duckdb and pyarrow use where it is installed
    "sqlalchemy.dialects.sqlite",
)


class WarmCommands:
    """Runs `mm-assets` commands, one after the other."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", __file__]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` gives for the command, with its output as text."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder, "output"), Path(folder, "errors")
            request = [list(arguments), str(cwd), dict(env), str(output), str(errors)]
            print(json.dumps(request), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())

    def close(self) -> None:
        """End the process; its last command has ended."""
        self._server.communicate()


def _serve() -> None:
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        arguments, folder, environment, output, errors = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, path in ((0, os.devnull), (1, output), (2, errors)):
                opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                os.dup2(opened, number)
                os.close(opened)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = ["-c", *arguments]
            from mm_assets.cli.main import main

            main()
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
