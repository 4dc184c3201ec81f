"""A signal stops `mm-assets run` soon, with nothing half done in sight, and its workers end with it."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from mm_assets.cli.main import main
from mm_assets.pipeline.state.claims import process_is_gone

COMMAND = (sys.executable, "-P", "-c", "from mm_assets.cli.main import main; main()")
WAIT = 120.0  # for what takes seconds on an idle machine

FILTERS = '''
import time
from pathlib import Path

from mm_assets.filters.base import Filter
from mm_assets.pipeline.state.claims import process_tag


class Wait(Filter):
    """Lets the first partition pass, and waits in the others until there is a file `go`."""

    scope = "row"

    def __init__(self, *, notes: str, stubborn: bool = False) -> None:
        self.notes = Path(notes)
        self.stubborn = stubborn

    def judge(self, block):
        try:
            (self.notes / "first").mkdir()
            return ()
        except FileExistsError:
            pass
        tag = process_tag("x")
        (self.notes / f"waits-{tag.split(' ')[3]}").write_text(tag)
        while not (self.notes / "go").exists():
            try:
                time.sleep(0.05)
            except BaseException:
                if not self.stubborn:
                    raise
        return ()
'''


class Work:
    """A folder with a shard more than jobs, and the command that runs them with a filter that waits."""

    def __init__(self, folder: Path, *, jobs: int, stubborn: bool) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        for name in ("in", "notes", "home"):
            (folder / name).mkdir()
        for name in "abc"[: jobs + 1]:
            with tarfile.open(folder / "in" / f"{name}.tar", "w") as tar:
                tar.addfile(tarfile.TarInfo(f"{name}.txt"), io.BytesIO())
        (folder / "waiting_filters.py").write_text(FILTERS)
        given = f"[{{type: 'waiting_filters:Wait', notes: {self.notes}, stubborn: {stubborn}}}]"
        self.command = COMMAND
        self.arguments = ("run", "--shards", "in", "--root", "out", "--set", f"filters={given}")
        self.arguments += ("--jobs", str(jobs))
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("DAGSTER_", "MM_ASSETS_"))}
        self.environment["DAGSTER_HOME"] = str(folder / "home")
        path = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
        self.environment["PYTHONPATH"] = os.pathsep.join(path)

    @contextmanager
    def started(self) -> Iterator["subprocess.Popen[str]"]:
        """The running command, in a process group of its own."""
        process = subprocess.Popen(
            (*self.command, *self.arguments),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            (self.notes / "go").touch()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=WAIT)

    def waiting(self, count: int) -> list[str]:
        """The process tags of so many filters that wait."""
        reached(lambda: len(list(self.notes.glob("waits-*"))) >= count)
        reached(lambda: all(path.read_text() for path in self.notes.glob("waits-*")))
        return [path.read_text() for path in self.notes.glob("waits-*")]

    def published(self) -> list[str]:
        return sorted(path.stem.rsplit(".", 1)[0] for path in (self.folder / "out/default/records").glob("*.json"))

    def runs(self) -> list[tuple[str, str | None]]:
        """The status of each run in Dagster, and whether Dagster repeats it."""
        with dg.DagsterInstance.from_config(str(self.folder / "home")) as instance:
            return [(run.status.value, run.tags.get("dagster/will_retry")) for run in instance.get_runs()]

    def packed(self) -> list[str]:
        """Every visible packed file, by its partition and format."""
        files = (self.folder / "out/default/packed").glob("[!.]*")
        return sorted(re.sub(r"\.[0-9a-f]{16}\.", ".", path.name) for path in files)


def reached(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.02)


@pytest.fixture
def work(tmp_path: Path) -> Callable[..., Work]:
    def make(*, jobs: int, stubborn: bool = False) -> Work:
        return Work(tmp_path, jobs=jobs, stubborn=stubborn)

    return make


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_stops_the_run_and_says_how_to_continue(
    work: Callable[..., Work], monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """SIGINT to all processes, as a terminal sends it: exit code 130, no traceback, and the named command goes on."""
    here = work(jobs=jobs)
    here.arguments += ("--json",) if jobs == 2 else ()
    with here.started() as process:
        tags = here.waiting(jobs)
        os.killpg(process.pid, signal.SIGINT)
        document, said = process.communicate(timeout=WAIT)
        assert process.returncode == 130, said
        assert "Traceback" not in said
        assert f"stopped by SIGINT: 1 of {jobs + 1} partitions done" in said
        assert len(here.published()) == 1
        assert len(here.packed()) == 2, "files of a partition that was stopped"
        reached(lambda: all(process_is_gone("x", tag) for tag in tags))
        again = re.search(r"to continue: `mm-assets (.*)`", said)
        assert again, said
        assert here.runs() == [("CANCELED", None)]
    if jobs == 2:
        error = json.loads(document)["error"]
        assert (error["kind"], error["exit_code"]) == ("Stopped", 130)
    if jobs == 1:
        monkeypatch.chdir(here.folder)
        monkeypatch.syspath_prepend(str(here.folder))
        monkeypatch.setenv("DAGSTER_HOME", here.environment["DAGSTER_HOME"])
        assert CliRunner().invoke(main, shlex.split(again[1])).exit_code == 0
        assert here.published() == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--force",), "--partition b --from raw_shards"),
        (("--partition", "a", "--partition", "b"), "--partition b"),
    ],
    ids=["force", "partitions"],
)
@pytest.mark.parametrize("most", [1, 0])
def test_what_is_done_is_not_done_again(
    work: Callable[..., Work], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], expected: str, most: int
) -> None:
    """Where all partitions were wanted again, the command that continues takes those that are left."""
    here = work(jobs=1)
    monkeypatch.chdir(here.folder)
    monkeypatch.syspath_prepend(str(here.folder))
    monkeypatch.setenv("DAGSTER_HOME", here.environment["DAGSTER_HOME"])
    (here.notes / "go").touch()
    assert CliRunner().invoke(main, here.arguments).exit_code == 0
    for path in (here.notes / "go", *here.notes.glob("waits-*")):
        path.unlink()
    (here.notes / "first").rmdir()
    here.arguments += options
    here.command = (*COMMAND[:-1], f"import mm_assets.cli.run as run; run._NAMED = {most}; {COMMAND[-1]}")
    with here.started() as process:
        here.waiting(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WAIT)
    assert process.returncode == 130, said
    assert "stopped by SIGINT: 1 of 2 partitions done" in said
    (again,) = re.findall(r"to continue: `mm-assets (.*)`", said)
    if not most:
        (file,) = map(Path, re.findall(r"--partitions-from (\S+)", again))
        assert file.read_text() == "b\n"
        expected = expected.replace("--partition b", f"--partitions-from {file}")
    assert expected in again
    assert "partition a" not in again
    done = CliRunner().invoke(main, shlex.split(again))
    if not most:
        file.unlink()
    assert (done.exit_code, done.stdout.startswith("1 partition run in ")) == (0, True)
    assert here.published() == ["a", "b"]


def test_work_that_does_not_end_is_abandoned(work: Callable[..., Work]) -> None:
    """SIGTERM ends a command whose step ignores every interruption: exit code 143, and nothing of the step in sight."""
    here = work(jobs=1, stubborn=True)
    with here.started() as process:
        here.waiting(1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=WAIT)
        assert process.returncode == 143, said
        assert "stopped by SIGTERM: 1 of 2 partitions done" in said
        assert len(here.packed()) == 2


def test_workers_end_with_a_parent_that_is_killed(work: Callable[..., Work]) -> None:
    """No worker is left when the command is killed and can end none of them."""
    here = work(jobs=2, stubborn=True)
    with here.started() as process:
        tags = here.waiting(2)
        assert not any(process_is_gone("x", tag) for tag in tags)
        process.kill()
        reached(lambda: all(process_is_gone("x", tag) for tag in tags))
