"""How long commands take that have nothing to do, and which imports that is.

Makes a project with a packed dataset in a temporary folder. Each row is a new process, whose bytecode is cached; rounds
alternate between all rows, after one that does not count. Prints medians of wall and processor seconds, the goals, and
for each row the most expensive imports by package (`python -X importtime`, without what a package imports of others).

    python benchmarks/startup.py [--rounds 7] [--rows status,run] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHARDS = Path(__file__).parent.parent / "mm_assets" / "defs" / "demo" / "shards" / "captions-00000.tar"
DATASET = "captions"
NUM_IMPORTS = 10
SPAWN = """
import multiprocessing
import mm_assets

def read(dataset):
    dataset[0]

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=read, args=(mm_assets.open("x.mult"),))
    process.start()
    process.join()
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of process.

    Attributes:
        arguments: of the command, or of Python if `is_python`.
        goal: most wall seconds on a machine with nothing else to do; None for what is compared with.
        is_python: whether it is Python and not `mm-assets`.
        serves: whether it is ended when it has answered a request.
    """

    arguments: Sequence[str]
    goal: float | None = None
    is_python: bool = False
    serves: bool = False


def rows(folder: Path) -> Mapping[str, Row]:
    """Every row by name."""
    packed = str(folder / "x.mult")
    sample = "import mm_assets; mm_assets.open('x.mult')[0]"
    return {
        "python": Row(("-c", "pass"), is_python=True),
        "numpy": Row(("-c", "import numpy"), is_python=True),
        "numpy, pyarrow": Row(("-c", "import numpy, pyarrow"), is_python=True),
        "import mm_assets": Row(("-c", "import mm_assets"), 0.35, is_python=True),
        "first sample": Row(("-c", sample), 0.35, is_python=True),
        "spawned worker": Row(("spawn.py",), 0.7, is_python=True),
        "--version": Row(("--version",), 0.4),
        "--help": Row(("--help",), 0.4),
        "status": Row(("status",), 0.4),
        "stats": Row(("stats",), 0.4),
        "sql": Row(("sql", "SELECT 1"), 0.4),
        "losses": Row(("losses",), 0.4),
        "plan": Row(("plan",), 0.4),
        "verify": Row(("verify", packed), 0.4),
        "inspect": Row(("inspect", packed), 0.4),
        "view": Row(("view", packed), 0.4, serves=True),
        "run --dry-run": Row(("run", "--dry-run"), 0.4),
        "run": Row(("run",), 0.8),
    }


class Project:
    """A project with one packed dataset.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._script = Path(sys.executable).with_name("mm-assets")
        dropped = ("PYTHONDONTWRITEBYTECODE", "MM_ASSETS_ROOT", "DAGSTER_HOME")
        self._env = {name: value for name, value in os.environ.items() if name not in dropped}
        shutil.copy(SHARDS, folder)
        self._run("init", str(folder / SHARDS.name), "--dataset", DATASET, "--project")
        self._run("run")
        (packed,) = (folder / "dagster_home" / "data" / DATASET / "packed").glob("*.mult")
        (folder / "x.mult").symlink_to(packed)
        (folder / "spawn.py").write_text(SPAWN)

    def _run(self, *arguments: str) -> None:
        subprocess.run([self._script, *arguments], cwd=self.folder, env=self._env, check=True, capture_output=True)

    def _command(self, row: Row, *options: str) -> list[str]:
        return [sys.executable, *options, *([] if row.is_python else [str(self._script)]), *row.arguments]

    def measure(self, row: Row) -> tuple[float, float]:
        """Returns the wall seconds and the processor seconds of a process and its children."""
        before, start = os.times(), time.perf_counter()
        with subprocess.Popen(
            self._command(row),
            cwd=self.folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            if row.serves:
                assert process.stdout is not None
                with urllib.request.urlopen(process.stdout.readline().strip()) as answer:
                    answer.read()
                seconds = time.perf_counter() - start
                process.terminate()
            _, errors = process.communicate()
        if not row.serves:
            seconds = time.perf_counter() - start
            if process.returncode:
                raise SystemExit(f"{row.arguments}: exit code {process.returncode}: {errors}")
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        return seconds, used

    def imports(self, row: Row) -> dict[str, float]:
        """Returns the milliseconds that each package takes to import, not counting the packages that it imports."""
        command = self._command(row, "-X", "importtime")
        if row.serves:
            command.append("--help")  # what serves does not end
        found = subprocess.run(command, cwd=self.folder, env=self._env, capture_output=True, text=True, check=True)
        own: dict[str, float] = {}
        for microseconds, module in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", found.stderr, re.MULTILINE):
            names = module.split(".")
            package = ".".join(names[: 2 if names[0] == "mm_assets" else 1])
            own[package] = own.get(package, 0.0) + int(microseconds) / 1000
        return own


def main() -> None:
    """Prints two tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default="", help="names of rows, separated by commas")
    parser.add_argument("--json", type=Path, help="where to write the times of all rounds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        project = Project(Path(name))
        chosen = {
            name: row
            for name, row in rows(project.folder).items()
            if row.goal is None or not options.rows or name in options.rows.split(",")
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
        for number in range(options.rounds + 1):
            for name, row in chosen.items():
                measured = project.measure(row)
                if number:
                    times[name].append(measured)
        imports = {name: project.imports(row) for name, row in chosen.items()}
    print("| process | wall, s | processor, s | goal, s |\n| --- | ---: | ---: | ---: |")
    for name, row in chosen.items():
        wall, used = (statistics.median(one) for one in zip(*times[name], strict=True))
        print(f"| `{name}` | {wall:.2f} | {used:.2f} | {'' if row.goal is None else row.goal} |")
    print("\n| process | imports, ms | most expensive packages, ms |\n| --- | ---: | --- |")
    for name, own in imports.items():
        largest = sorted(own.items(), key=lambda item: -item[1])[:NUM_IMPORTS]
        packages = ", ".join(f"{package} {spent:.0f}" for package, spent in largest)
        print(f"| `{name}` | {sum(own.values()):.0f} | {packages} |")
    if options.json is not None:
        options.json.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
