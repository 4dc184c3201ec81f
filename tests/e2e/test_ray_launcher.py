"""Runs that Dagster's daemon launches as Ray jobs, with the files of `deploy/`: instance, PgBouncer, passwords.

Everything that shows what a run did is in Postgres. Secrets in the environment of all processes are not.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from ..pipeline.shards import make_shard, png
from .postgres import PGBOUNCER, PROGRAMS, Server, serving
from .ray_cluster import RayCluster, can_isolate

pytest.importorskip("dagster_ray")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
WAIT = 300.0  # for what takes half a minute on an idle machine
KEYS = {f"{number:02}" for number in range(6)}
SECRET = f"planted-{secrets.token_hex(16)}"
PLANTED = {"AWS_SECRET_ACCESS_KEY": SECRET, "MY_TOKEN": SECRET}

DEFINITIONS = """
from pathlib import Path

import dagster as dg


@dg.definitions
def defs() -> dg.Definitions:
    datasets = dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
    return dg.Definitions.merge(datasets, dg.Definitions(executor=dg.in_process_executor))
"""

# Notes what each partition runs in.
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
        import ray
        task = ray.get_runtime_context().get_task_name() if ray.is_initialized() else None
        Path(self.folder, secrets.token_hex(8)).write_text(f"{socket.gethostname()} {task} {os.environ['MY_TOKEN']}")
        time.sleep(self.seconds)
        return ()
'''
PACKAGE = "launched_project"
PROJECT = f"""
[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "{PACKAGE}"
registry_modules = ["mm_assets.orchestration"]
"""
MODULE = f"{PACKAGE}.definitions"
RAY = {"type": "ray"}
ENGINES = {  # of each dataset
    "launched": RAY,
    "killed": RAY,
    "terminated": RAY,
    "stopped": RAY,
    "damaged": RAY,
    "elsewhere": {**RAY, "address": "127.0.0.1:9"},
    "single": {},
}
SLOW = {"killed", "terminated", "stopped"}
# What the page of Dagster does.
TERMINATE = "import dagster as dg, sys; i = dg.DagsterInstance.get(); print(i.run_launcher.terminate(sys.argv[1]))"
COMMAND = (sys.executable, "-c", "from mm_assets.cli.main import main; main()")


@dataclass
class Project:
    """Datasets, an instance on a Postgres with a password, and the daemon that launches their runs on a cluster."""

    folder: Path
    server: Server
    cluster: RayCluster
    environment: dict[str, str]
    password: str

    def command(self, *arguments: str) -> str:
        """Runs a command; its output."""
        done = subprocess.run(
            arguments, env=self.environment, cwd=self.folder, text=True, capture_output=True, timeout=WAIT, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def launch(self, job: str, *options: str) -> str:
        """Puts a run of a job in the queue; its id."""
        self.command(sys.executable, "-m", "dagster", "job", "launch", "-m", MODULE, "-j", job, *options)
        (run_id,) = self.runs_of(job)
        return run_id

    def runs_of(self, job: str) -> list[str]:
        return self.server.query("dagster", f"select run_id from runs where pipeline_name = '{job}'").splitlines()

    def runs(self) -> dict[str, str]:
        """The status of each run by its id."""
        rows = self.server.query("dagster", "select run_id || ' ' || status from runs").splitlines()
        return dict(row.split() for row in rows)

    def reached(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < deadline, (self.folder / "daemon.log").read_text()[-4000:]
            time.sleep(0.5)

    def ended(self, run_id: str) -> str:
        """The status of a run, once it has ended."""
        self.reached(lambda: self.runs()[run_id] in {"SUCCESS", "FAILURE", "CANCELED"})
        return self.runs()[run_id]

    def events(self, run_id: str, kind: str) -> list[str]:
        """Asset and partition of the events of a kind in a run."""
        where = f"run_id = '{run_id}' and dagster_event_type = '{kind}'"
        found = self.server.query("dagster", f"select asset_key, partition from event_logs where {where}")
        return found.splitlines()

    def log(self, run_id: str) -> str:
        return self.server.query("dagster", f"select event from event_logs where run_id = '{run_id}'")

    def published(self, dataset: str) -> set[str]:
        """Returns the partitions that have a record."""
        records = (self.folder / "root" / dataset / "records").glob("*.json")
        return {record.name.split(".")[0] for record in records}

    def notes(self, dataset: str) -> list[list[str]]:
        """Host, Ray task and a secret of the process of each partition that ran."""
        return [note.read_text().split() for note in (self.folder / f"notes_{dataset}").iterdir()]


def write_project(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(PROJECT)
    package = folder / PACKAGE
    for name, engine in ENGINES.items():
        (folder / f"notes_{name}").mkdir()
        attributes = {
            "name": name,
            "shards": f"{folder}/{'damaged_shards' if name == 'damaged' else 'shards'}/*.tar",
            "root": str(folder / "root"),
            "settle_seconds": 0,
            "engine": engine,
            "filters": [
                {
                    "type": f"{PACKAGE}.filters:Noting",
                    "folder": str(folder / f"notes_{name}"),
                    "seconds": 2.0 if name in SLOW else 0.0,
                }
            ],
        }
        declared = {"type": "mm_assets.orchestration.ShardDataset", "attributes": attributes}
        (package / "defs" / name).mkdir(parents=True)
        (package / "defs" / name / "defs.yaml").write_text(yaml.safe_dump(declared))
    for module, code in {"__init__": "", "defs/__init__": "", "definitions": DEFINITIONS, "filters": FILTERS}.items():
        (package / f"{module}.py").write_text(code)
    for key in KEYS:
        members = {f"{key}-{i}.{kind}": png(i) if kind == "png" else "words" for i in (0, 1) for kind in ("png", "txt")}
        make_shard(folder / "shards" / f"{key}.tar", members)
    shutil.copytree(folder / "shards", folder / "damaged_shards")
    damaged = folder / "damaged_shards" / "01.tar"
    damaged.write_bytes(damaged.read_bytes()[:700])


def write_instance(home: Path, port: int, jobs: str, passfile: Path) -> None:
    """`deploy/dagster.yaml` with the addresses of this machine."""
    settings = yaml.safe_load((DEPLOY / "dagster.yaml").read_text())
    settings["storage"]["postgres"]["postgres_db"] |= {
        "hostname": "127.0.0.1",
        "port": port,
        "params": {"passfile": str(passfile)},
    }
    settings["run_launcher"]["config"]["ray"]["address"] = jobs
    settings["run_monitoring"]["poll_interval_seconds"] = 5
    home.mkdir()
    (home / "dagster.yaml").write_text(yaml.safe_dump(settings))


def wait_for_jobs(address: str) -> None:
    """Returns when the cluster has run a job: its agents start after the cluster itself."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    deadline = time.monotonic() + WAIT
    submitted = None
    while submitted is None:
        try:
            client = JobSubmissionClient(address)
            submitted = client.submit_job(entrypoint="true")
        except (ConnectionError, RuntimeError):
            assert time.monotonic() < deadline, "the cluster takes no jobs"
            time.sleep(0.5)
    while (status := client.get_job_status(submitted)) != JobStatus.SUCCEEDED:
        assert time.monotonic() < deadline, status
        time.sleep(0.5)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    if not can_isolate():
        pytest.skip("nodes need namespaces of their own: unshare is missing, or this is not root")
    if not PROGRAMS or PGBOUNCER is None:
        pytest.skip("Debian's packages postgresql and pgbouncer are not installed")
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    subprocess.run([DEPLOY / "secrets.sh", folder / "secrets"], check=True)
    password = (folder / "secrets" / "postgres-password").read_text()
    ray_folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # its sockets have paths of 107 bytes at most
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    # Of hosts that share only storage: the nodes have an empty $DAGSTER_HOME.
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # a run is the command `dagster`
    nodes = {**PLANTED, "DAGSTER_HOME": str(folder / "home_of_nodes"), "PATH": programs}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, ray_folder, ignore_errors=True)
        server = stack.enter_context(serving(password))
        port = stack.enter_context(server.pooled((folder / "secrets" / "userlist.txt").read_text()))
        cluster = RayCluster(ray_folder, {**nodes, "PYTHONPATH": path}, takes_jobs=True)
        stack.callback(cluster.close)
        stack.enter_context(cluster.node("second"))
        wait_for_jobs(cluster.jobs)
        write_instance(folder / "home", port, cluster.jobs, folder / "secrets" / "pgpass")
        environment = {**os.environ, **PLANTED, "PYTHONPATH": path, "DAGSTER_HOME": str(folder / "home")}
        made = Project(folder, server, cluster, environment, password)
        made.command(*COMMAND, "register", "--module", MODULE, "--dataset", "single")
        log = stack.enter_context((folder / "daemon.log").open("wb"))
        daemon = subprocess.Popen(
            [sys.executable, "-m", "dagster._daemon", "run", "-m", MODULE],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        stack.callback(daemon.wait, 30)
        stack.callback(os.killpg, daemon.pid, signal.SIGKILL)
        yield made


def test_a_load_is_driven_from_a_ray_job(project: Project) -> None:
    """The run succeeds, its partitions run as Ray tasks on both hosts, and all is published and recorded once."""
    run_id = project.launch("launched_load")
    assert project.ended(run_id) == "SUCCESS", project.log(run_id)
    assert "Ray run job created" in project.log(run_id)
    hosts, tasks, tokens = map(set, zip(*project.notes("launched"), strict=True))
    assert (hosts, tasks, tokens) == ({socket.gethostname(), "second"}, {"_work"}, {SECRET})
    manifest = json.loads((project.folder / "root" / "launched" / "manifest.json").read_text())
    assert set(manifest["partitions"]["key"]) == KEYS
    recorded = project.events(run_id, "ASSET_MATERIALIZATION")
    assert len(recorded) == len(set(recorded))
    published = [event for event in recorded if event.startswith('["launched", "published"]')]
    assert {event.split("|")[1] for event in published} == KEYS


def test_one_partition_is_run_by_a_ray_job(project: Project) -> None:
    """The job of one partition runs in the Ray job itself, and is published and recorded."""
    run_id = project.launch("single_pack", "--tags", json.dumps({"dagster/partition": "03"}))
    assert project.ended(run_id) == "SUCCESS", project.log(run_id)
    assert project.published("single") == {"03"}
    assert '["single", "published"]|03' in project.events(run_id, "ASSET_MATERIALIZATION")


def test_a_driver_that_is_killed_is_launched_again(project: Project) -> None:
    """Run monitoring fails a run whose Ray job was killed, and the daemon repeats it: every partition is published."""
    run_id = project.launch("killed_load")
    project.reached(lambda: bool(project.notes("killed")))
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(run_id in argument for argument in process.cmdline()):
                process.kill()
    assert project.ended(run_id) == "FAILURE"
    assert "Run has not completed but Ray job has is in status: FAILED" in project.log(run_id)
    project.reached(lambda: len(project.runs_of("killed_load")) == 2)
    (again,) = set(project.runs_of("killed_load")) - {run_id}
    assert project.ended(again) == "SUCCESS", project.log(again)
    assert project.published("killed") == KEYS


def test_a_load_that_is_terminated_is_canceled(project: Project) -> None:
    """Terminate ends a load and its tasks, and the daemon does not repeat it; the next load runs what is left."""
    run_id = project.launch("terminated_load")
    project.reached(lambda: bool(project.notes("terminated")))
    assert project.command(sys.executable, "-c", TERMINATE, run_id).splitlines()[-1] == "True"
    assert project.ended(run_id) == "CANCELED", project.log(run_id)
    assert project.runs_of("terminated_load") == [run_id]
    project.command(sys.executable, "-m", "dagster", "job", "launch", "-m", MODULE, "-j", "terminated_load")
    (again,) = set(project.runs_of("terminated_load")) - {run_id}
    assert project.ended(again) == "SUCCESS", project.log(again)
    assert project.published("terminated") == KEYS


def test_a_load_whose_ray_job_is_stopped_is_repeated(project: Project) -> None:
    """To Dagster a job that was stopped elsewhere is lost: the run fails, and the daemon repeats it."""
    from ray.job_submission import JobSubmissionClient

    run_id = project.launch("stopped_load")
    project.reached(lambda: bool(project.notes("stopped")))
    assert JobSubmissionClient(project.cluster.jobs).stop_job(f"dagster-run-{run_id}")
    assert project.ended(run_id) == "FAILURE", project.log(run_id)
    project.reached(lambda: len(project.runs_of("stopped_load")) == 2)
    (again,) = set(project.runs_of("stopped_load")) - {run_id}
    assert project.ended(again) == "SUCCESS", project.log(again)
    assert project.published("stopped") == KEYS


def test_a_damaged_shard_fails_its_partition_alone(project: Project) -> None:
    """The run fails and names the partition; the others are published; the daemon does not repeat it."""
    run_id = project.launch("damaged_load")
    assert project.ended(run_id) == "FAILURE"
    assert f"1 of {len(KEYS)} partitions failed: 01" in project.log(run_id)
    assert project.published("damaged") == KEYS - {"01"}


def test_a_cluster_that_is_not_there_fails_the_run(project: Project) -> None:
    """A dataset that names another cluster, which is not there, fails its run in seconds, with the address."""
    run_id = project.launch("elsewhere_load")
    assert project.ended(run_id) == "FAILURE"
    assert "127.0.0.1:9 cannot be connected to" in project.log(run_id)


def test_no_secret_is_in_the_database(project: Project) -> None:
    """After runs that succeeded and that failed, no table and no job has a secret of the processes' environment."""
    statuses = project.runs()
    assert {"SUCCESS", "FAILURE"} <= {*statuses.values()}
    dumped = project.server.dump("dagster")
    assert all(run_id in dumped for run_id in statuses)
    assert "runtime_env=" in dumped  # what Ray knows about the job of the killed driver
    from ray.job_submission import JobSubmissionClient

    jobs = JobSubmissionClient(project.cluster.jobs).list_jobs()
    assert len(jobs) >= len(statuses)
    for said in (dumped, *map(str, jobs)):
        assert SECRET not in said
        assert project.password not in said
