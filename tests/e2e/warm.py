"""`mm-assets` commands as processes that need not import what they are made of: forks of one process that has.

A command imports Dagster for two seconds, and works for a fraction of one. Tests of what commands do, which start many
of them, use these; `test_wheels.py` and others show that a process that is started from nothing does the same.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PRELOADED = (
    "alembic.command",
    "cv2",
    "dagster",
    "dagster._cli",
    "dagster._core.storage.event_log",
    "dagster._core.storage.runs",
    "dagster._core.storage.schedules",
    "dagster._daemon.types",
    "dotenv",
    "duckdb",
    "mm_assets.cli.main",
    "mm_assets.cli.run",
    "mm_assets.orchestration.launch",
    "mm_assets.orchestration.load",
    "mm_assets.view.server",
    "pandas",  # which duckdb and pyarrow use where it is installed
    "sqlalchemy.dialects.sqlite",
    "upath.implementations.local",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
)


COMMAND = "from mm_assets.cli.main import main; main()"


class WarmCommands:
    """Starts `mm-assets` commands."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", __file__]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], code: str = COMMAND
    ) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` gives for the command, or for other code that is imported, with its output as text."""
        with self.running(arguments, cwd=cwd, env=env, code=code) as process:
            code = process.wait()
            return subprocess.CompletedProcess(arguments, code, process.output.read_text(), process.errors.read_text())

    @contextmanager
    def running(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], code: str = COMMAND
    ) -> Iterator[WarmProcess]:
        """The command at work; where it has not ended at the end of the block, it is interrupted."""
        with tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder, "output"), Path(folder, "errors")
            pid = self._ask([code, list(arguments), str(cwd), dict(env), str(output), str(errors)])
            process = WarmProcess(pid, output, errors, lambda: self._ask(pid))
            try:
                yield process
            finally:
                if process.code is None:
                    process.interrupt()
                    process.wait()

    def close(self) -> None:
        """End the process; its last command has ended."""
        self._server.communicate()

    def _ask(self, request: object) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())


class WarmProcess:
    """A command at work, and the files to which it writes."""

    def __init__(self, pid: int, output: Path, errors: Path, wait: Callable[[], int]) -> None:
        self.pid = pid
        self.output = output
        self.errors = errors
        self.code: int | None = None
        self._wait = wait

    def interrupt(self) -> None:
        """Has it end, as Ctrl+C in a terminal does."""
        os.kill(self.pid, signal.SIGINT)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        if self.code is None:
            self.code = self._wait()
        return self.code

    def first_line(self, seconds: float = 60.0) -> str:
        """The first line of its output, for which this waits."""
        ends = time.monotonic() + seconds
        while not (self.output.exists() and "\n" in self.output.read_text()):
            assert time.monotonic() < ends, self.errors.read_text()
            time.sleep(0.01)
        return self.output.read_text().partition("\n")[0]


def _serve() -> None:
    import importlib

    code = 0

    def end() -> None:
        """Ends the process without the half second that it takes to free what was imported."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(end)  # the first that is registered is the last that is called
    for name in PRELOADED:
        importlib.import_module(name)
    sys.path.append(str(Path(__file__).resolve().parent))
    from databases import open_databases

    sys.path.pop()
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            print(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]), flush=True)
            continue
        program, arguments, folder, environment, output, errors = request
        child = os.fork()
        if child == 0:
            for number, path in ((0, os.devnull), (1, output), (2, errors)):
                opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                os.dup2(opened, number)
                os.close(opened)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            given = environment.get("PYTHONPATH", "").split(os.pathsep)
            sys.path[:0] = [place for place in given if place and place not in sys.path]
            sys.argv = ["-c", *arguments]
            code = 1  # of an error that is not caught
            try:
                with open_databases():
                    exec(program, {"__name__": "__main__"})
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
                raise
            return
        print(child, flush=True)


if __name__ == "__main__":
    _serve()
