"""Loads on a Ray cluster: equal files on any number of hosts, stragglers, memory, and what workers refuse."""

import json
import os
import pickle
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import mm_assets
from mm_assets.errors import ConfigError
from mm_assets.pipeline.chain import CHAIN
from mm_assets.pipeline.load.engine import Task
from mm_assets.pipeline.partition.run import PartitionReport
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register

from ..pipeline.shards import make_shard
from .hosts import MAIN, Corpus, Project, object_files, wait_for
from .ray_cluster import RayCluster

ray_tasks = pytest.importorskip("mm_assets.pipeline.load.ray_tasks")
pytest.importorskip("ray")

PARTITIONS = 20
HERE = socket.gethostname()

# A load in a process whose engine says what was lost; an assignment may come before it.
REPORTING = """
import json
from mm_assets.pipeline.load import ray_tasks

class Reporting(ray_tasks.RayTasks):
    def ended(self, timeout):
        for ended in super().ended(timeout):
            if ended.loss is not None:
                key, kind = ended.task.partition.key, ended.loss.kind
                print("LOST", json.dumps([key, kind, ended.task.memory_factor]), flush=True)
            yield ended

ray_tasks.RayTasks = Reporting
"""


def on_ray(cluster: RayCluster, *more: str) -> tuple[str, ...]:
    return ("run", "--engine", "ray", "--address", cluster.address, *more)


def losses(said: str) -> list[tuple[str, str, int]]:
    """What the engine of `REPORTING` said: key, kind, and how many times the memory the task had."""
    found = [json.loads(line.removeprefix("LOST ")) for line in said.splitlines() if line.startswith("LOST ")]
    return [(key, kind, factor) for key, kind, factor in found]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, host_environment: dict[str, str]) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"), PARTITIONS, environment=host_environment)


@pytest.fixture(scope="module")
def expected(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a load on this host alone."""
    corpus.order()
    alone = Project(corpus, tmp_path_factory.mktemp("alone"))
    alone.run("run", "--jobs", "2")
    return alone.contents()


@pytest.fixture
def project(corpus: Corpus, tmp_path: Path) -> Project:
    return Project(corpus, tmp_path)


@pytest.fixture
def remote(corpus: Corpus, tmp_path: Path) -> Project:
    """One whose root is in an object store: there a host that hangs keeps no file locked."""
    bucket = f"b{secrets.token_hex(8)}"
    object_files(corpus.environment["AWS_ENDPOINT_URL"]).mkdir(bucket)
    return Project(corpus, tmp_path, root=f"s3://{bucket}/root")


@pytest.mark.cluster
def test_two_hosts_make_the_same_files(
    corpus: Corpus, project: Project, expected: dict[str, str], cluster: RayCluster
) -> None:
    """A load on two hosts works on both, and makes the bytes of a load on one; a second load has nothing to do.

    The log names the stages of every partition.
    """
    corpus.order(seconds=0.3)
    with cluster.node("second"):
        said = project.run(*on_ray(cluster, "-v"))
    begun = Counter(re.findall(r"^\S+ \S+/\S+: (\w+)$", said, re.MULTILINE))
    assert {stage.name: begun[stage.name] for stage in CHAIN if stage.name in begun} == dict.fromkeys(
        ("raw_shards", "rows", "materialized_rows", "filtered_rows", "packed_mult", "published"), PARTITIONS
    )
    assert f"{PARTITIONS} partitions run" in said
    assert {note.host for note in corpus.noted()} == {HERE, "second"}
    assert project.contents() == expected
    assert not list(Path(project.root).glob("*/claims/*.json"))
    assert "0 partitions run" in project.run(*on_ray(cluster))


@pytest.mark.cluster
def test_a_worker_that_hangs_is_replaced(
    corpus: Corpus, project: Project, expected: dict[str, str], cluster: RayCluster
) -> None:
    """A worker that is stopped is reported with its process, host and stage, and killed; its partition runs again."""
    corpus.order(hang="stop")
    limits = (
        "from mm_assets.pipeline.load import driver\n"
        "driver.MIN_LIMIT_SECONDS, driver.LIMIT_MEDIANS = 30.0, 1.0\n"
        "driver.MIN_WARNING_SECONDS, driver.STRAGGLES = 15.0, 1.0\n"
        "from mm_assets.pipeline.load.ray_tasks import RayTasks\n"
        "RayTasks.spans_hosts = False\n"  # else a node that another test lost may get a copy, which ends first
    )
    said = project.run(*on_ray(cluster), code=limits + REPORTING + MAIN)
    found = re.search(r"no result after \d+ seconds: process (\d+) on host (\S+) is at stage materialized_rows", said)
    assert found is not None, said
    assert found[2] == HERE
    assert f"process {found[1]} on host {HERE} did not end the partition within" in said
    assert f"{PARTITIONS} partitions run" in said
    assert project.contents() == expected


@pytest.mark.cluster
def test_a_straggler_is_overtaken(
    corpus: Corpus, remote: Project, expected: dict[str, str], cluster: RayCluster
) -> None:
    """A partition that hangs on one host runs a second time on the other, and what is published first counts."""
    corpus.order(slow_host="second", slow_seconds=600.0)
    began = time.monotonic()
    with cluster.node("second"):
        said = remote.run(*on_ray(cluster), code=REPORTING + MAIN)
    assert time.monotonic() - began < 200
    assert {kind for _, kind, _ in losses(said)} <= {"neighbor"}
    by_key: dict[str, list[str]] = {}
    for note in corpus.noted():
        by_key.setdefault(note.key, []).append(note.host)
    (slow,) = [key for key, hosts in by_key.items() if hosts == ["second", HERE]]
    print(f"{slow} was overtaken after {time.monotonic() - began:.0f} s in all; losses: {losses(said)}")
    assert remote.contents() == expected


@pytest.mark.cluster
def test_a_task_without_memory_gets_more(
    corpus: Corpus, project: Project, expected: dict[str, str], cluster: RayCluster
) -> None:
    """Where Ray ends a task for lack of memory, it runs again with twice as much: here that is on the other host."""
    corpus.order(seconds=1.0)
    # Whatever this machine uses is too much for the memory monitor of that node, which has memory for two tasks.
    starved = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    with cluster.node("second", f"--memory={(2 << 30) - (1 << 20)}", environment=starved):
        said = project.run(*on_ray(cluster), code=REPORTING + MAIN)
    found = losses(said)
    assert found, said
    assert {kind for _, kind, _ in found} <= {"memory"}
    assert {factor for _, _, factor in found} == {1}
    assert max(Counter(key for key, _, _ in found).values()) == 1
    assert f"{PARTITIONS} partitions run" in said
    assert project.contents() == expected


@pytest.mark.cluster
@pytest.mark.parametrize("what", ["memory", "scratch"])
def test_what_no_node_has_is_said(project: Project, cluster: RayCluster, what: str) -> None:
    """A task that fits on no node does not wait without end: it says what it asks for, and what there is."""
    code = REPORTING + "ray_tasks._MISSING_SECONDS = 5.0\n"
    engine: dict[str, object] = {"type": "ray", "address": cluster.address}
    if what == "memory":
        engine["memory_bytes"] = 1 << 50
    else:
        code += "ray_tasks.scratch_bytes = lambda task: 10**15\n"
    with cluster.node("second", "--resources", json.dumps({"scratch": 10**9})):
        began = time.monotonic()
        arguments = ("run", "--set", f"engine={json.dumps(engine)}")
        with project.start(*arguments, code=code + MAIN) as command:
            said = " ".join(command.ended(1).split())
        assert time.monotonic() - began < 60
    amount = f"{1 << 30:,} MiB" if what == "memory" else f"{10**15:,} bytes of scratch space"
    assert re.search(rf"it asks for 1 processor and .*{amount}.* on one node, and no node of the Ray cluster has", said)
    assert "start a larger one, or lower what is asked for" in said


@pytest.mark.cluster
def test_without_workers_no_partition_is_given_up(project: Project, cluster: RayCluster) -> None:
    """A cluster that has no node for tasks ends a load with one error, and its partitions wait for the next load."""
    code = REPORTING + (
        "ray_tasks._MISSING_SECONDS = 5.0\n"
        "of = ray_tasks._Node.of\n"
        "ray_tasks._Node.of = lambda listed: of({**listed, 'Resources': {**listed['Resources'], 'CPU': 0}})\n"
    )
    # More memory than there is, so that the head, which has processors, takes no task.
    engine = json.dumps({"type": "ray", "address": cluster.address, "memory_bytes": 1 << 48})
    with project.start("run", "--set", f"engine={engine}", code=code + MAIN) as command:
        said = " ".join(command.ended(1).split())
    assert said.count("no node of the Ray cluster has a processor for tasks: start one") == 1
    assert not list(project.folder.rglob("attempts/*.json"))


@pytest.mark.cluster
def test_a_load_that_is_not_recorded_ends_when_the_head_is_lost(
    corpus: Corpus, project: Project, expected: dict[str, str], host_environment: dict[str, str]
) -> None:
    """It ends within a minute with its summary, exit code 1 and the command to continue; what is published stays."""
    corpus.order(seconds=2.0)
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    with ExitStack() as held:
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        other = RayCluster(folder, host_environment)
        held.callback(other.close)
        with project.start(*on_ray(other, "--no-record")) as command:
            wait_for(lambda: len(corpus.noted()) >= 6, "work")
            other.signal_head(signal.SIGKILL)
            lost = time.monotonic()
            said = " ".join(command.ended(1).split())
            assert time.monotonic() - lost < 60
    assert f"{other.address}: the head of the Ray cluster has not answered for" in said
    assert re.search(r"\d+ partitions? run in", said), "the summary"
    assert re.search(rf"to continue: `mm-assets run .*--engine ray --address {other.address}", said)
    published = project.records()
    assert 2 <= len(published) < PARTITIONS
    corpus.order()
    said = project.run("run", "--jobs", "2")
    assert f"{PARTITIONS - len(published)} partitions run" in said
    assert project.contents() == expected


def test_a_cluster_that_is_not_there_is_named(project: Project) -> None:
    """An address without a cluster is refused in seconds, with the address and what to do."""
    began = time.monotonic()
    with project.start("run", "--engine", "ray", "--address", "127.0.0.1:9") as command:
        said = command.ended(2)
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
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
        *stages, (number, report) = ray_tasks.run_group(version, host, {"d": probe}, pickle.dumps((task,)))
        assert number == 0
        assert isinstance(report, PartitionReport)
        assert [name for _, name in stages][-1:] == (["published"] if report.ok else [])
        assert report.ok or report.is_refused
        return "" if report.failure is None else report.failure.detail

    return run


def test_a_root_that_hosts_do_not_share_is_refused(work: Callable[..., str], dataset: DatasetStore) -> None:
    """A worker whose folder of the root's name is another one touches nothing, and says what to set."""
    said = work(probe=".missing")
    assert said.startswith(f"the root {dataset.spec.root} of host {socket.gethostname()} is not that of the driver")
    assert "set `root`, --root or MM_ASSETS_ROOT" in said
    assert not dataset.store.sizes("records")
    assert work() == ""
    assert dataset.store.sizes("records")


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
