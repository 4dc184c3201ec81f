"""Loads of 200 shards on a Ray cluster that loses hosts, workers, drivers and its database, on a faulty object store.

One random moment of each kind of loss by default; ``MM_ASSETS_KILLS=20`` takes twenty, several in each load. One of 20
requests to the object store fails all the time.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from mm_assets.pipeline.chain import CHAIN

from ..s3_server import ServerApart
from .hosts import Command, Corpus, Project, make_shards, object_files, wait_for
from .postgres import PROGRAMS, Server
from .ray_cluster import Node, RayCluster, as_host

pytest.importorskip("mm_assets.pipeline.load.ray_tasks")

KILLS = int(os.environ.get("MM_ASSETS_KILLS", "1"))
SEED = int(os.environ.get("MM_ASSETS_SEED", "20261124"))
KINDS = ("node", "worker", "driver", "database")
PARTITIONS = 200
LATEST = 150  # partitions that have begun when something is lost at the latest: it takes a moment to have an effect
MOMENTS = 8  # of one load
BUCKET = "losses"
EVERY = 20  # requests, of which one fails
STAGES = len(CHAIN) - 1  # that a partition has, without the manifest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600 + 150 * KILLS),
    pytest.mark.skipif(not PROGRAMS, reason="Debian's package postgresql is not installed"),
]

DAGSTER = """\
telemetry: {{enabled: false}}
storage:
  postgres:
    postgres_url: postgresql+psycopg2://dagster@127.0.0.1:{port}/{database}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A Postgres server, in a folder that its user may enter."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    made = Server(folder)
    try:
        yield made
    finally:
        made.control("stop")
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def corpus(
    object_store: ServerApart, host_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Corpus:
    """Shards in a bucket."""
    folder = tmp_path_factory.mktemp("corpus")
    make_shards(folder / "made", PARTITIONS)
    files = object_files(object_store.url)
    files.mkdir(BUCKET)
    files.put(f"{folder}/made/", f"{BUCKET}/shards/", recursive=True)
    return Corpus(folder, PARTITIONS, shards=f"s3://{BUCKET}/shards", environment=host_environment)


class Losses:
    """A load, and what it loses meanwhile."""

    def __init__(
        self,
        corpus: Corpus,
        project: Project,
        cluster: RayCluster,
        server: Server,
        chance: random.Random,
        held: ExitStack,
    ) -> None:
        self.corpus, self.project, self.cluster, self.server = corpus, project, cluster, server
        self.chance, self.held = chance, held
        self.pool = held.enter_context(ThreadPoolExecutor(1))
        self.node = self.started(cluster.start_node("second"))
        self.coming: Future[Node] | None = None
        self.homes = 0
        self.command = self.start()

    def started(self, node: Node) -> Node:
        self.held.callback(node.lose)
        return node

    def start(self, *, elsewhere: bool = False) -> Command:
        """The driver of the load; `elsewhere` on another host, with a home of its own."""
        self.homes += elsewhere
        home = f"home{self.homes}"
        (self.project.folder / home).mkdir(exist_ok=True)
        shutil.copy(self.project.folder / "dagster.yaml", self.project.folder / home)
        arguments = ("run", "--engine", "ray", "--address", self.cluster.address)
        prefix = as_host(f"third{self.homes}", own_processes=False) if elsewhere else ()
        return self.held.enter_context(self.project.start(*arguments, home=home, prefix=prefix))

    def begun(self) -> int:
        return len({note.key for note in self.corpus.noted()})

    @property
    def is_over(self) -> bool:
        return self.command.process.poll() is not None

    def lose(self, kind: str) -> bool:
        """Whether there was something to lose, and it is lost."""
        if kind == "node":
            self.await_node()
        if self.is_over:
            return False
        if kind == "node":
            self.node.lose()
            self.coming = self.pool.submit(self.cluster.start_node, "second")
        elif kind == "worker":
            workers = [*self.cluster.head.workers(), *self.node.workers()]
            if not workers:
                return False
            os.kill(self.chance.choice(workers), signal.SIGKILL)
        elif kind == "driver":
            self.command.kill()
            self.command = self.start(elsewhere=self.chance.random() < 0.5)
        else:
            self.server.control("stop")
            time.sleep(self.chance.uniform(0.5, 3.0))
            self.server.control("start")
        return True

    def await_node(self) -> None:
        """The node that comes after one that was lost: hosts are replaced in time."""
        if self.coming is not None:
            self.node, self.coming = self.started(self.coming.result()), None


def test_what_is_lost_is_made_up_for(
    tmp_path: Path, object_store: ServerApart, corpus: Corpus, cluster: RayCluster, server: Server
) -> None:
    """Whatever is lost whenever: each partition is published once and recorded once, with the bytes of one host."""
    corpus.order()
    alone = Project(corpus, tmp_path / "alone", root=f"s3://{BUCKET}/alone")
    alone.run("run", "--jobs", "2")
    wanted = alone.contents()
    assert sum(name.startswith("default/records/") for name in wanted) == PARTITIONS

    chance = random.Random(SEED)
    kinds = list(KINDS) * KILLS
    chance.shuffle(kinds)
    todo, done, number = deque(kinds), Counter[str](), 0
    while todo:
        number += 1
        database = f"losses{number}"
        server.query("postgres", f"create database {database}")
        corpus.order()
        project = Project(corpus, tmp_path / database, root=f"s3://{BUCKET}/{database}")
        (project.folder / "dagster.yaml").write_text(DAGSTER.format(port=server.port, database=database))
        before = object_store.fail(EVERY)
        began = time.monotonic()
        with ExitStack() as held:
            load = Losses(corpus, project, cluster, server, chance, held)
            moments = sorted(chance.randint(2, LATEST) for _ in range(min(MOMENTS, len(todo))))
            for moment in moments:
                kind = todo.popleft()
                wait_for(lambda: load.begun() >= moment or load.is_over, f"{moment} partitions")  # noqa: B023
                time.sleep(chance.random())
                if load.lose(kind):
                    done[kind] += 1
                    at = time.monotonic() - began
                    print(f"load {number}: {kind} lost at {at:.1f} s, of which {load.begun()} had begun", flush=True)
                else:
                    todo.append(kind)  # in the next load
            load.command.ended()
            load.await_node()
            synced = project.run("sync", home="home0")
        faults = Counter(object_store.fail(0))
        faults.subtract(before)
        print(f"load {number}: {time.monotonic() - began:.0f} s; {dict(faults)}; {synced.splitlines()[0]}", flush=True)
        assert sum(count for kind, count in faults.items() if kind != "requests") >= faults["requests"] / EVERY - 2

        found = project.contents()
        published = [name for name in found if name.startswith("default/records/")]
        assert len(published) == PARTITIONS
        assert found == wanted, sorted(found.items() ^ wanted.items())[:10]
        check_recorded(server, database)
        object_files(object_store.url).rm(project.root, recursive=True)
    assert done == dict.fromkeys(KINDS, KILLS)
    print(f"seed {SEED}: {dict(done)} in {number} loads of {PARTITIONS} shards")


def check_recorded(server: Server, database: str) -> None:
    """Dagster has every materialization and every check result of every partition once."""
    made = server.query(
        database,
        "select asset_key, partition, count(*) from event_logs where partition is not null and dagster_event_type = "
        "'ASSET_MATERIALIZATION' group by 1, 2",
    ).splitlines()
    assert len(made) == PARTITIONS * STAGES
    assert {line.rpartition("|")[2] for line in made} == {"1"}
    checked = server.query(
        database,
        "select asset_key, check_name, partition, count(*) from asset_check_executions where partition is not null "
        "group by 1, 2, 3",
    ).splitlines()
    assert {line.rpartition("|")[2] for line in checked} == {"1"}
    per_check = Counter(line.rpartition("|")[0].rpartition("|")[0] for line in checked)
    assert len(per_check) >= 10
    assert set(per_check.values()) == {PARTITIONS}
    evaluated = server.query(
        database,
        "select count(*) from event_logs where partition is not null and dagster_event_type = 'ASSET_CHECK_EVALUATION'",
    )
    assert int(evaluated) in (0, len(checked))
