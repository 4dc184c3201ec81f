"""Commands and the daemon, killed with SIGKILL at random points: nothing partial is visible, and the end is the same.

One kill of each command by default, of `run` without `--jobs`. ``MM_ASSETS_KILLS=500`` shares that number among the
commands and the daemon.
"""

import io
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

import mm_assets

KILLS = int(os.environ.get("MM_ASSETS_KILLS", "0"))
SHARES = {"register": 0.2, "run": 0.3, "add-stream": 0.2, "clean": 0.2, "daemon": 0.1}
SEED = 20_261_122
WAIT = 300.0  # for what takes seconds on an idle machine

# Commands are forks of this process, which has imported what they need: what is killed is their work, not imports.
SERVER = """
import json, os, sys
import mm_assets.cli.add_stream, mm_assets.cli.clean, mm_assets.cli.register, mm_assets.cli.run
import mm_assets.orchestration.launch, mm_assets.pipeline.state.added_streams, mm_assets.pipeline.partition.publish
import av, duckdb, cv2, PIL.Image, rich.progress, rich.table
from mm_assets.cli.main import main

def command(arguments, environment, log):
    os.setpgid(0, 0)
    os.environ.update(environment)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if arguments[0] == "daemon":
        os.execv(sys.executable, [sys.executable, "-m", "dagster._daemon", "run", "-m", "killed_project"])
    code = 1
    try:
        main(arguments, prog_name="mm-assets")
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

for line in sys.stdin:
    order = json.loads(line)
    if isinstance(order, int):
        print(os.waitstatus_to_exitcode(os.waitpid(order, 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        command(*order)
    os.setpgid(pid, pid)
    print(pid, flush=True)
"""

MODULE = """
import dagster as dg
from killed_defs import __path__ as folder
import killed_defs

@dg.definitions
def defs():
    datasets = dg.ComponentTree.from_module(defs_module=killed_defs, project_root=folder[0]).build_defs()
    return dg.Definitions.merge(datasets, dg.Definitions(executor=dg.in_process_executor))
"""

DECLARATION = """
type: mm_assets.orchestration.ShardDataset
attributes:
  name: d
  shards: {shards}
  root: "{{{{ env.KILLED_ROOT }}}}"
  pack: image_text
  settle_seconds: 0
  poll_seconds: 1
  run_sensor: true
"""

# A run whose process is gone before its first step is failed after the start's timeout, and Dagster runs it again.
SETTINGS = """
telemetry: {enabled: false}
run_monitoring: {enabled: true, start_timeout_seconds: 40, poll_interval_seconds: 2}
run_retries: {enabled: true, max_retries: 3, retry_on_asset_or_op_failure: false}
"""

STREAM = ("--name", "score", "--field", "ScalarField", "--config", '{"dtype": "float32"}')


@dataclass(frozen=True)
class Project:
    """The root and the instance of the dataset, below a folder."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def environment(self, home: str = "home") -> dict[str, str]:
        (self.folder / home).mkdir(parents=True, exist_ok=True)
        (self.folder / home / "dagster.yaml").write_text(SETTINGS)
        return {"DAGSTER_HOME": str(self.folder / home), "KILLED_ROOT": str(self.root)}

    def copy(self, folder: Path) -> "Project":
        """The same in another folder, which it replaces."""
        shutil.rmtree(folder, ignore_errors=True)
        if self.folder.exists():
            shutil.copytree(self.folder, folder)
        return Project(folder)

    def contents(self) -> Mapping[str, bytes]:
        """Returns every visible file below the root but caches, by its path there."""
        names = [Path(name) for name in self.names()]
        visible = (path for path in names if path.name[0] != "." and "cache" not in path.parts)
        return {str(path): (self.root / path).read_bytes() for path in visible}

    def lasting(self) -> Mapping[str, bytes]:
        """Returns the same without what a killed command leaves to others: its claim, and notes on its attempts."""
        varies = ("attempts", "claims", "clean.json")
        return {name: data for name, data in self.contents().items() if Path(name).parts[1] not in varies}

    def litter(self) -> None:
        """Adds what earlier commands left, and makes everything two days old, so that `clean` deletes it."""
        (record,) = (self.root / "d" / "records").glob("a.*.json")
        shutil.copy(record, record.with_name(f"a.{'0' * 16}.json"))
        for folder, ending in (("packed", "mult"), ("packed", "mstr"), ("rows", "parquet")):
            (path,) = (self.root / "d" / folder).glob(f"a.*.{ending}")
            shutil.copy(path, path.with_name(f"gone.{'0' * 16}.{ending}"))
        old = time.time() - 2 * 86_400.0
        for name in self.names():
            os.utime(self.root / name, (old, old))

    def names(self) -> set[str]:
        """Every file below the root, those under construction too."""
        return {str(Path(at, name).relative_to(self.root)) for at, _, names in os.walk(self.root) for name in names}

    def assert_whole(self) -> None:
        """Every visible file can be read to its end, and no manifest names a file that is missing."""
        for name, content in self.contents().items():
            path = self.root / name
            if path.suffix == ".parquet":
                pq.read_table(path)
            elif path.suffix == ".json":
                json.loads(content)
            elif path.suffix in (".mult", ".mstr"):
                with mm_assets.open(str(path)) as opened:
                    assert opened.verify().ok
            else:
                assert (path.name, content[-1:]) == ("catalog.sql", b"\n")
        manifest = self.root / "d" / "manifest.json"
        if manifest.exists():
            with mm_assets.open(str(manifest)) as opened:
                assert opened.verify().ok

    def assert_same(self, expected: Mapping[str, bytes], *, past: str = "-") -> None:
        """The visible files are these, with these bytes.

        Further files are allowed below the folder `past`: a manifest that was made when less was published.
        """
        found = {name: data for name, data in self.lasting().items() if name in expected or not name.startswith(past)}
        assert sorted(found) == sorted(expected)
        assert [name for name in found if found[name] != expected[name]] == []

    def recorded(self) -> Counter[tuple[str, ...]]:
        """How often Dagster has each materialization and each check result of a partition."""
        index = self.home / "history" / "runs" / "index.db"
        with closing(sqlite3.connect(index)) as connection:
            made = connection.execute(
                "select asset_key, partition from event_logs where dagster_event_type = 'ASSET_MATERIALIZATION'"
            )
            found = Counter(made.fetchall())
            found.update(connection.execute("select asset_key, check_name, partition from asset_check_executions"))
        return Counter(
            {facts: number for facts, number in found.items() if facts[-1] is not None}
        )  # not the manifest's


class Server:
    """The process whose forks are the commands."""

    def __init__(self, folder: Path) -> None:
        (folder / "killed_defs" / "d").mkdir(parents=True)
        (folder / "killed_defs" / "__init__.py").touch()
        (folder / "killed_defs" / "d" / "defs.yaml").write_text(DECLARATION.format(shards=folder / "shards"))
        (folder / "killed_project.py").write_text(MODULE)
        write_shards(folder / "shards")
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("DAGSTER_", "MM_ASSETS_"))}
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER],
            env={**plain, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: object) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    @contextmanager
    def started(self, project: Project, *arguments: str, home: str = "home") -> Iterator["Command"]:
        """A command that is running; in the end it is killed."""
        options = () if arguments == ("daemon",) else ("--module", "killed_project", "--dataset", "d")
        environment = project.environment(home)
        log = project.folder / f"{len(list(project.folder.glob('*.log')))}.log"
        log.touch()
        order = [[*arguments, *options], environment, str(log)]
        command = Command(self, self.ask(order), log)
        try:
            yield command
        finally:
            command.kill()

    def complete(self, project: Project, *arguments: str) -> None:
        """Runs a command to its end."""
        with self.started(project, *arguments) as command:
            assert command.wait() == 0, command.said()


class Command:
    """A command with all that it started, in a process group of its own."""

    def __init__(self, server: Server, pid: int, log: Path) -> None:
        self._server = server
        self._pid = pid
        self._log = log
        self.code: int | None = None

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def running(self) -> bool:
        return self.code is None and _state(f"/proc/{self._pid}/stat")[0] != "Z"

    def kill(self) -> int:
        """Ends it and all that it started, as a machine that loses power does; the exit code, or minus the signal."""
        if self.code is None:
            os.killpg(self._pid, signal.SIGKILL)
            self.code = self._server.ask(self._pid)
            reached(lambda: not any(self._group()), self, pause=0.005)
        return self.code

    def _group(self) -> Iterator[bool]:
        for path in Path("/proc").glob("[0-9]*/stat"):
            state, _, group, *_ = _state(path)
            yield group == str(self._pid) and state not in "ZX"

    def wait(self) -> int:
        """The exit code."""
        reached(lambda: not self.running(), self)
        return self.kill()


def _state(path: Path | str) -> list[str]:
    """State, parent and group of a process."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return ["X", "", ""]


def reached(condition: Callable[[], bool], command: Command, pause: float = 0.02) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, command.said()
        time.sleep(pause)


def write_shards(folder: Path) -> None:
    """Shards of two captioned images each: one by default, since a partition takes seconds, and two for `--jobs 2`."""
    folder.mkdir()
    for shard in "ab" if KILLS else "a":
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(2):
                image = io.BytesIO()
                Image.new("RGB", (8, 8), (number, 100, 200)).save(image, "png")
                for name, content in (
                    (f"{shard}{number}.txt", b"a caption"),
                    (f"{shard}{number}.png", image.getvalue()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


@dataclass(frozen=True)
class Case:
    """A command, the state that it starts from, and the files of its result.

    Attributes:
        arguments: of the command.
        before: root and instance before it.
        expected: the files of the root after it.
        recorded: what Dagster knows after it.
    """

    arguments: tuple[str, ...]
    before: Project
    expected: Mapping[str, bytes]
    recorded: Mapping[tuple[str, ...], int]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("project"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def cases(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """The commands, each of which leaves something that the next one needs, and what they do undisturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    values = folder / "values.csv"
    values.write_text("sample_id,value\na0,0.5\na1,2\n")
    project, cases = Project(folder / "now"), {}
    for name, arguments in {
        "register": ("register",),
        "run": ("run",),
        "add-stream": ("add-stream", *STREAM, "--values", str(values)),
        "clean": ("clean", "--keep", "1"),
    }.items():
        if name == "clean":
            project.litter()
        before = project.copy(folder / name)
        server.complete(project, *arguments)
        cases[name] = Case(arguments, before, project.lasting(), project.recorded())
    return cases


class Kills:
    """Kills commands at random points of their work on the root.

    Attributes:
        count: commands that were killed at work.
        hidden: files under construction that the kills left.
    """

    def __init__(self) -> None:
        self.count = 0
        self.hidden = 0
        self._random = random.Random(SEED)

    def kill(self, project: Project, command: Command, expected: Mapping[str, bytes]) -> None:
        """Kills the command after a random number of the files that it adds or removes, and checks all of them."""
        before = project.names()
        steps = self._random.randint(0, len(before ^ set(expected)))
        while command.running() and len(project.names() ^ before) < steps:
            time.sleep(0.002)
        time.sleep(self._random.uniform(0, 0.05 if steps else 0.3))
        self.count += command.kill() == -signal.SIGKILL
        self.hidden += sum(Path(name).name.startswith(".") for name in project.names())
        project.assert_whole()


@pytest.mark.fuzz
@pytest.mark.timeout(600 + 60 * KILLS)
@pytest.mark.parametrize("name", ["register", "run", "add-stream", "clean"])
def test_killed_commands_leave_nothing_partial_and_lose_nothing(
    server: Server, cases: dict[str, Case], tmp_path: Path, name: str
) -> None:
    """After each kill every visible file is whole; in the end all files equal those of undisturbed commands.

    So does what Dagster knows: of a load nothing is lost, and nothing is recorded twice.
    """
    case, kills = cases[name], Kills()
    several = ("--jobs", "2") if name == "run" and KILLS else ()  # each process imports for seconds
    while kills.count < max(KILLS * SHARES[name], 1):
        project = case.before.copy(tmp_path / "killed")
        for _ in range(2 if KILLS else 1):
            with server.started(project, *case.arguments, *several) as command:
                kills.kill(project, command, case.expected)
        server.complete(project, *case.arguments)
        project.assert_same(case.expected)
        assert project.recorded() == case.recorded
    print(f"{name}: {kills.count} kills, {kills.hidden} files under construction")


@pytest.mark.fuzz
@pytest.mark.timeout(600 + 60 * KILLS)
@pytest.mark.skipif(not KILLS, reason="a daemon takes half a minute: MM_ASSETS_KILLS=10 kills one")
def test_a_killed_daemon_completes_its_runs_when_it_is_started_again(
    server: Server, cases: dict[str, Case], tmp_path: Path
) -> None:
    """Its runs are killed with it; started again, it runs them again, until all files are those of undisturbed runs."""
    case, kills = cases["run"], Kills()
    while kills.count < max(KILLS * SHARES["daemon"], 1):
        project = case.before.copy(tmp_path / "killed")
        for _ in range(2):
            with server.started(project, "daemon") as command:
                kills.kill(project, command, case.expected)
        with server.started(project, "daemon") as command:
            reached(partial(_has, project, case.expected), command, pause=0.5)
        project.assert_whole()
        project.assert_same(case.expected, past="d/manifests/")
    print(f"daemon: {kills.count} kills, {kills.hidden} files under construction")


def _has(project: Project, expected: Mapping[str, bytes]) -> bool:
    return expected.items() <= project.lasting().items()


@pytest.mark.parametrize("homes", [("home", "home"), ("home", "other")], ids=["one instance", "two instances"])
def test_two_commands_on_one_root_publish_each_partition_once(
    server: Server, cases: dict[str, Case], tmp_path: Path, homes: tuple[str, str]
) -> None:
    """Two `run` at the same time exit 0 with every partition published and recorded, and with the files of one."""
    case = cases["run"]
    project = case.before.copy(tmp_path / "shared")
    with server.started(project, "run", home=homes[0]) as one, server.started(project, "run", home=homes[1]) as two:
        codes = [one.wait(), two.wait()]
    project.assert_whole()
    assert codes == [0, 0], (one.said(), two.said())
    project.assert_same(case.expected, past="d/manifests/")
    if homes[0] == homes[1]:
        assert project.recorded() == case.recorded
