"""Commands that are killed with SIGKILL at random moments: nothing partial is visible, and the end result is the same.

Two kills of `run` and one of each other command by default; ``MM_ASSETS_KILLS=500`` for a long run.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import mm_assets

KILLS = int(os.environ.get("MM_ASSETS_KILLS", "2"))
SEED = 20_261_122
ENTRY = "from mm_assets.cli.main import main; main()"


class Project:
    """The demo's documents below a root of their own, and the commands over them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.home = folder / "root", folder / "home"
        self.home.mkdir(parents=True)
        self.values = folder / "values.csv"
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("DAGSTER_", "MM_ASSETS_"))}
        self._environment = {**plain, "DAGSTER_HOME": str(self.home)}

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts a command in a process group of its own."""
        options = ("--module", "demo_project", "--dataset", "docs", "--root", str(self.root))
        return subprocess.Popen(
            [sys.executable, "-P", "-c", ENTRY, *arguments, *options],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def complete(self, *arguments: str) -> float:
        """Runs a command to its end; its seconds."""
        began = time.monotonic()
        process = self.start(*arguments)
        try:
            _, errors = process.communicate(timeout=200)
        finally:
            kill(process)
        assert process.returncode == 0, errors.decode()
        return time.monotonic() - began

    def contents(self) -> Mapping[str, bytes]:
        """Every visible file below the root, by its path there."""
        files = (p for p in sorted(self.root.rglob("*")) if p.is_file() and not p.name.startswith("."))
        return {str(p.relative_to(self.root)): p.read_bytes() for p in files}

    def assert_whole(self) -> None:
        """Every visible file can be read to its end, and no manifest names a file that is missing."""
        for path in self.root.rglob("*"):
            if path.name.startswith(".") or path.is_dir():
                continue
            if path.suffix == ".parquet":
                pq.read_table(path)
            elif path.suffix == ".json":
                json.loads(path.read_bytes())
            elif path.suffix in (".mult", ".mstr"):
                with mm_assets.open(str(path)) as opened:
                    assert opened.verify().ok
        manifest = self.root / "docs" / "manifest.json"
        if manifest.exists():
            with mm_assets.open(str(manifest)) as opened:
                assert opened.verify().ok


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and all that it started, as a machine that loses power does."""
    with suppress(ProcessLookupError):  # it has ended, and all that it started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, dict[str, float]]:
    """The result of all commands without a kill, and the seconds of each."""
    project = Project(tmp_path_factory.mktemp("undisturbed"))
    return project, {name: project.complete(*arguments) for name, arguments in commands(project).items()}


def commands(project: Project) -> dict[str, tuple[str, ...]]:
    """The commands in their order; each leaves something that the next one needs."""
    if not project.values.exists():
        project.values.write_text("sample_id,value\n")
    stream = ("--name", "score", "--field", "ScalarField", "--config", '{"dtype": "float32"}')
    return {
        "register": ("register",),
        "run": ("run", "--jobs", "2"),
        "add-stream": ("add-stream", *stream, "--values", str(project.values)),
        "clean": ("clean", "--keep", "1"),
    }


@pytest.mark.fuzz
@pytest.mark.timeout(600 + 60 * KILLS)
def test_killed_commands_leave_nothing_partial_and_lose_nothing(
    undisturbed: tuple[Project, dict[str, float]], tmp_path: Path
) -> None:
    """After each kill every visible file is whole; in the end all files equal those of undisturbed commands."""
    expected, seconds = undisturbed
    project, moments = Project(tmp_path / "killed"), random.Random(SEED)
    for name, arguments in commands(project).items():
        for _ in range(KILLS if name == "run" else max(KILLS // 4, 1)):
            process = project.start(*arguments)
            # Half of a command's time is the start of Python; what comes before the first file teaches nothing.
            time.sleep(seconds[name] * moments.uniform(0.5, 1.0))
            kill(process)
            if process.stderr is not None:
                process.stderr.close()
            if project.root.exists():
                project.assert_whole()
        project.complete(*arguments)
    assert project.contents() == expected.contents()
    assert [p for p in project.root.rglob(".*") if not p.name.endswith(".lock")] == []
