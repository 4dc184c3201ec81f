"""Loads on a Ray cluster of two hosts: equal files, and whatever is lost runs again.

One random moment of each kind of loss by default; ``MM_ASSETS_KILLS=20`` takes twenty.
"""

import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import mm_assets
from mm_assets.errors import ConfigError
from mm_assets.pipeline.engines.base import Task
from mm_assets.pipeline.register import register
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore

from ..pipeline.shards import make_shard, png
from .ray_cluster import RayCluster, can_isolate

ray_tasks = pytest.importorskip("mm_assets.pipeline.engines.ray_tasks")
pytest.importorskip("ray")

KILLS = int(os.environ.get("MM_ASSETS_KILLS", "1"))
SEED = 20_261_124
WAIT = 300.0
PARTITIONS = 24

pytestmark = pytest.mark.timeout(600 + 120 * KILLS)

# Notes the host that a partition runs on, and takes a moment, so that a load can be caught at work.
FILTERS = '''
import os, secrets, socket, time
from pathlib import Path
from mm_assets.filters.base import Filter

class Noting(Filter):
    """Keeps everything."""

    scope = "row"

    def __init__(self, *, folder: str, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds

    def judge(self, block):
        Path(self.folder, f"{secrets.token_hex(8)}").write_text(f"{socket.gethostname()} {os.getpid()}")
        time.sleep(self.seconds)
        return ()
'''


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module of filters, on the path of every process that starts later."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "noting_filters.py").write_text(FILTERS)
    return folder


def path_with(modules: Path) -> str:
    """$PYTHONPATH with a folder before its others."""
    return os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH"))))


@pytest.fixture(scope="module")
def cluster(modules: Path) -> Iterator[RayCluster]:
    if not can_isolate():
        pytest.skip("nodes need namespaces of their own: unshare is missing, or this is not root")
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # its sockets have paths of 107 bytes at most
    started = RayCluster(folder, path_with(modules))
    try:
        yield started
    finally:
        started.close()
        shutil.rmtree(folder, ignore_errors=True)


class Project:
    """A dataset of small shards, run by commands."""

    def __init__(self, folder: Path, modules: Path, address: str, seconds: float) -> None:
        self.folder, self.address = folder, address
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.root = folder / "root"
        for number in range(PARTITIONS):
            members = {
                f"{number}-{i}.{kind}": png(i) if kind == "png" else "words"
                for i in range(3)
                for kind in ("png", "txt")
            }
            make_shard(folder / "shards" / f"{number:02}.tar", members)
        noting = {"type": "noting_filters:Noting", "folder": str(self.notes), "seconds": seconds}
        self.given = ["--shards", f"{folder}/shards/*.tar", "--set", f"filters={json.dumps([noting])}"]
        self.environment = {**os.environ, "PYTHONPATH": path_with(modules), "DAGSTER_HOME": str(folder / "home")}

    def command(self, *arguments: str, root: Path | None = None) -> list[str]:
        """`mm-assets run` on the cluster, or as the arguments say."""
        return [
            *(sys.executable, "-c", "from mm_assets.cli.main import main; main()"),
            *("run", "--root", str(root or self.root)),
            *self.given,
            *(arguments or ("--engine", "ray", "--address", self.address)),
        ]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(), env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, *arguments: str, root: Path | None = None) -> str:
        """Runs a command to its end; its output."""
        done = subprocess.run(
            self.command(*arguments, root=root),
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=WAIT,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def hosts(self) -> set[str]:
        return {note.read_text().split()[0] for note in self.notes.iterdir()}

    def begun(self, number: int, command: subprocess.Popen[str]) -> list[tuple[str, int]]:
        """Host and process of each partition that has begun, once there are so many."""
        deadline = time.monotonic() + WAIT
        while len(found := [note for note in self.notes.iterdir() if note.stat().st_size]) < number:
            assert command.poll() is None, command.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        latest = sorted(found, key=lambda note: note.stat().st_mtime)
        return [(host, int(pid)) for host, pid in (note.read_text().split() for note in latest)]

    def contents(self, root: Path | None = None) -> dict[str, bytes]:
        """Every visible file but caches, which do not have the same bytes."""
        root = root or self.root
        files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
        apart = ("cache", "leases", "manifests")
        return {
            name: path.read_bytes()
            for name, path in files.items()
            if Path(name).parts[1] not in apart and "/." not in name and path.name[0] != "."
        }


@pytest.fixture
def project(tmp_path: Path, modules: Path, cluster: RayCluster) -> Project:
    return Project(tmp_path, modules, cluster.address, 0.3)


@pytest.fixture
def expected(project: Project) -> dict[str, bytes]:
    """The files of a load on this host alone."""
    project.run("--jobs", "2", root=project.folder / "alone")
    shutil.rmtree(project.notes)
    project.notes.mkdir()
    return project.contents(project.folder / "alone")


@pytest.mark.cluster
def test_two_hosts_make_the_same_files(project: Project, cluster: RayCluster, expected: dict[str, bytes]) -> None:
    """A load on two hosts works on both, and makes the bytes of a load on one; a second load has nothing to do."""
    with cluster.node("second"):
        said = project.run()
    assert f"{PARTITIONS} partitions run" in said
    assert project.hosts() == {socket.gethostname(), "second"}
    assert project.contents() == expected
    assert not list(project.root.glob("*/leases/**/*.json"))
    assert "0 partitions run" in project.run()


@pytest.mark.cluster
@pytest.mark.parametrize("what", ["node", "worker", "driver"])
def test_what_is_lost_runs_again(project: Project, cluster: RayCluster, expected: dict[str, bytes], what: str) -> None:
    """A node, a worker or the driver is killed at random moments: every partition is published, with equal bytes."""
    chance = random.Random(f"{SEED}{what}")
    for _ in range(KILLS):
        shutil.rmtree(project.root, ignore_errors=True)
        shutil.rmtree(project.notes)
        project.notes.mkdir()
        with cluster.node("second") as node:
            command = project.start()
            number = chance.randint(2, PARTITIONS - 6)
            project.begun(number, command)
            time.sleep(chance.random() * 0.5)
            if what == "node":
                node.lose()
            elif what == "worker":
                here = [pid for host, pid in project.begun(number, command) if host == socket.gethostname()]
                os.kill(next(pid for pid in reversed(here) if psutil.pid_exists(pid)), signal.SIGKILL)
            else:
                command.kill()
            lost = time.monotonic()
            said, _ = command.communicate(timeout=WAIT)
            assert (command.returncode == 0) == (what != "driver"), said
            if what == "driver":
                project.run()
            assert time.monotonic() - lost < 60
        assert project.contents() == expected


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path, modules: Path) -> None:
    """An address without a cluster is refused in seconds, with the address and what to do."""
    project = Project(tmp_path, modules, "127.0.0.1:9", 0.0)
    began = time.monotonic()
    done = subprocess.run(
        project.command(),
        env=project.environment,
        text=True,
        capture_output=True,
        timeout=WAIT,
        check=False,
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: arguments: --address: 127\.0\.0\.1:9 cannot be connected to: .*Connection refused", line)
    assert "`ray start --address=127.0.0.1:9 --num-cpus=0`" in line
    assert time.monotonic() - began < 60


# -- what a worker refuses


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetStore:
    make_shard(tmp_path / "a.tar", {"0.txt": "words"})
    config = {"name": "d", "shards": f"{tmp_path}/*.tar", "root": str(tmp_path / "root"), "settle_seconds": 0}
    found = DatasetStore(DatasetSpec.from_config(config, where="test"))
    register(found)
    return found


@pytest.fixture
def work(dataset: DatasetStore) -> Callable[..., str]:
    """Runs the partition of the dataset as a worker does: what it refused it for, or nothing."""

    def run(*, version: str = mm_assets.__version__, host: str = "driver", probe: str = "schema.json") -> str:
        task = Task(spec=dataset.spec, schema=dataset.schema(), partition=dataset.partition("a"))
        ((number, report),) = ray_tasks.run_group(version, host, {"d": probe}, pickle.dumps((task,)))
        assert number == 0
        assert report.ok or report.is_refused
        return "" if report.failure is None else report.failure.detail

    return run


def test_a_root_that_hosts_do_not_share_is_refused(work: Callable[..., str], dataset: DatasetStore) -> None:
    """A worker whose folder of the root's name is another one touches nothing, and says what to set."""
    said = work(probe=".missing")
    assert said.startswith(f"the root {dataset.spec.root} of host {socket.gethostname()} is not that of the driver")
    assert "set `root`, --root or MM_ASSETS_ROOT" in said
    assert not dataset.marker_names()
    assert work() == ""
    assert dataset.marker_names()


@pytest.mark.parametrize("what", ["missing", "another"])
def test_shards_that_hosts_do_not_share_are_refused(
    work: Callable[..., str], dataset: DatasetStore, tmp_path: Path, what: str
) -> None:
    """A worker on another host whose shard is not there, or is another file, names host and shard."""
    if what == "missing":
        (tmp_path / "a.tar").unlink()
    else:
        os.utime(tmp_path / "a.tar", (1, 1))
    said = work()
    assert f"on host {socket.gethostname()}" in said
    assert str(tmp_path / "a.tar") in said
    assert "put shards where all hosts see the same files" in said


def test_another_version_is_refused(work: Callable[..., str]) -> None:
    """A worker with another version of the package runs nothing."""
    with pytest.raises(ConfigError, match=r"has .*, the driver 0\.0\.1: files could differ"):
        work(version="0.0.1")
