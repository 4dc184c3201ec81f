"""Each way in which a load fails halfway: nothing published is lost or changed, and how soon the work goes on.

`SCENARIOS` lists the ways. ``python -m pytest -rP -m "" tests/e2e/test_failures.py`` prints a line for each: root,
scenario, exit codes, files that were published before, and seconds to recovery.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from mm_assets.pipeline.chain import CHAIN

from ..s3_server import ServerApart
from .hosts import WAIT, Command, Corpus, Project, object_files, wait_for
from .postgres import PROGRAMS, Server, serving
from .ray_cluster import Node, RayCluster, as_host, can_isolate

PARTITIONS = 12
FEW_PARTITIONS = 4  # of what every test run does
MANY_PARTITIONS = 64  # for scenarios that compare rates of publication
MIN_RATE_SECONDS = 10.0  # over which a rate is measured
MIN_RATE_RATIO = 0.7  # to the rate before: the machine may be busy
CLOCK_SECONDS = 180  # between the clocks of two hosts
FROZEN_SECONDS = float(os.environ.get("MM_ASSETS_FROZEN_SECONDS", "120"))
CLAIM_SECONDS = (
    90.0  # until another host takes over: a claim expires after 45, and on a busy machine commands start late
)
ENGINE = '{"type": "processes", "jobs": 2, "timeout_seconds": 8}'
WAITING = "claimed by a load on"  # in the output of a load that waits for another one

# For a process whose clock is wrong: the C library asks this for the time.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) { return atol(getenv("CLOCK_SHIFT")); }
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += shift();
    return code;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
"""

DAGSTER = """\
telemetry: {{enabled: false}}
storage:
  postgres:
    postgres_url: postgresql+psycopg2://dagster@127.0.0.1:{port}/dagster
"""

RECORDED = "select count(*) from asset_check_executions where partition is not null"


@dataclass
class Case:
    """A load that fails halfway, and those that go on.

    Attributes:
        corpus: the shards.
        project: an empty root for them.
        held: ends what was started.
        request: of the test.
        codes: exit codes of the commands, in the order of their ends.
        before: what was published when something failed.
        failed: when it failed, by the clock of the file system.
        seconds: from then until the work went on.
        rates: of publication before, while and after the database was unavailable.
    """

    corpus: Corpus
    project: Project
    held: ExitStack
    request: pytest.FixtureRequest
    codes: list[int] = field(default_factory=list)
    before: dict[str, str] = field(default_factory=dict)
    failed: float = 0.0
    seconds: float = 0.0
    rates: str = ""

    def start(self, *arguments: str, home: str = "home", host: str = "", clock: int = 0) -> Command:
        """Starts a load; on another host if that has a name, whose clock is so many seconds ahead."""
        prefix = as_host(host) if host else ()
        environment = {}
        if clock:
            environment = {"LD_PRELOAD": self.request.getfixturevalue("clock"), "CLOCK_SHIFT": str(clock)}
        given = arguments or ("--jobs", "2")
        command = self.project.start("run", *given, home=home, prefix=prefix, environment=environment)
        return self.held.enter_context(command)

    def end(self, command: Command, code: int = 0) -> str:
        """Waits for the end of a command, which must have this exit code; returns its output."""
        output = command.ended(code)
        self.codes.append(code)
        return output

    def await_notes(self, number: int = 4) -> None:
        """Waits until so many partitions have begun, of which at least one is published."""
        wait_for(lambda: len(self.corpus.noted()) >= number and self.project.records(), "partitions")

    def fail(self) -> None:
        """Notes that something fails now, and what is published."""
        self.failed = time.time()
        wait_for(self.project.records, "a published partition")
        self.before |= self.project.published()

    def resumed(self, since: float, host: str = "") -> None:
        """Notes when the first partition began after a time, on the host if that has a name."""
        began = [note.when for note in self.corpus.noted() if note.when > since and host in ("", note.host)]
        assert began, "no partition ran again"
        self.seconds = min(began) - self.failed

    def repeated(self) -> None:
        """Notes when a partition began for the second time."""
        times: dict[str, list[float]] = {}
        for note in self.corpus.noted():
            times.setdefault(note.key, []).append(note.when)
        again = [each for each in times.values() if len(each) > 1]
        assert again, "no partition ran again"
        self.seconds = max(each[1] - each[0] for each in again)


# -- on one host, or on several that share a root


def lose_worker(case: Case, how: str) -> None:
    """A worker is killed, or stopped until its partition takes too long; the load runs that partition again."""
    case.corpus.order(hang=how)
    command = case.start("--set", f"engine={ENGINE}")
    wait_for((case.corpus.notes / ".has_hung").exists, "a worker that hangs")
    case.fail()
    assert f"{case.corpus.number} partitions run" in case.end(command)
    case.repeated()


def kill_driver(case: Case, host: str) -> None:
    """The next load goes on at once where the process is known to have ended, else when its claim has expired."""
    case.corpus.order(seconds=1.0)
    command = case.start(host=host)
    case.await_notes()
    command.kill()
    case.fail()
    case.codes.append(command.process.returncode)
    time.sleep(1.5)  # the workers end with their parent
    began = time.time()
    case.end(case.start(home="other"))
    case.resumed(began)


def stop_driver(case: Case) -> None:
    """A driver that is stopped holds nothing for longer than its claim lasts, on its own host either."""
    case.corpus.order(seconds=1.0)
    command = case.start()
    case.await_notes()
    command.signal(signal.SIGSTOP)
    case.fail()
    began = time.time()
    case.end(case.start(home="other"))
    case.resumed(began)


def freeze_host(case: Case) -> None:
    """A host that is frozen, while another one takes over, and goes on later changes no file and exits with 0."""
    case.corpus.order(seconds=1.0)
    first = case.start(host="first")
    case.await_notes()
    first.signal(signal.SIGSTOP)
    case.fail()
    case.end(case.start(home="other", host="second"))
    case.resumed(case.failed, "second")
    case.before |= case.project.published()
    time.sleep(max(case.failed + FROZEN_SECONDS - time.time(), 0.0))
    first.signal(signal.SIGCONT)
    case.end(first)


def start_two(case: Case, homes: tuple[str, str], *, staggered: bool) -> None:
    """Two loads of one dataset both exit with 0; the later one waits, and says what for."""
    case.corpus.order(seconds=1.0)
    first = case.start(home=homes[0])
    if staggered:
        case.await_notes()
        case.fail()
    second = case.start(home=homes[1])
    case.end(first)
    case.failed = time.time()
    output = case.end(second)
    case.seconds = time.time() - case.failed
    if staggered:
        assert WAITING in output
        assert set(Counter(note.key for note in case.corpus.noted()).values()) == {1}


def shift_clocks(case: Case, clocks: tuple[int, int]) -> None:
    """A load is waited for while it lives, and taken over when it is killed, whatever the clocks of the hosts say."""
    case.corpus.order(seconds=6.0)
    first = case.start(host="first", clock=clocks[0])
    case.await_notes()
    second = case.start(home="other", host="second", clock=clocks[1])
    wait_for(lambda: len(case.corpus.noted()) >= PARTITIONS - 3, "more partitions")
    assert {note.host for note in case.corpus.noted()} == {"first"}
    first.kill()
    case.fail()
    case.codes.append(first.process.returncode)
    case.corpus.order()
    assert WAITING in case.end(second)
    case.resumed(case.failed, "second")


def lose_database(case: Case, how: str, seconds: float | None) -> None:
    """Publishes at the same rate without the database, and records what it missed later, or with the next `sync`."""
    server: Server = case.request.getfixturevalue("postgres")
    (case.project.folder / "home").mkdir()
    (case.project.folder / "home" / "dagster.yaml").write_text(DAGSTER.format(port=server.port))
    lose, restore = {
        "stopped": (partial(server.control, "stop"), partial(server.control, "start")),
        "silent": (partial(server.signal, signal.SIGSTOP), partial(server.signal, signal.SIGCONT)),
        "slow": (partial(server.delay, "event_logs", 1.0), partial(server.delay, "event_logs", 0.0)),
    }[how]
    case.corpus.order(seconds=1.5)
    command = case.start()
    case.await_notes(12)
    known = server.query("dagster", RECORDED)
    lose()
    case.held.callback(server.signal, signal.SIGCONT)
    case.fail()
    if seconds is None:
        output = case.end(command, 1)
        case.seconds = time.time() - case.project.published_at()[-1]
        assert "not recorded in Dagster" in output
        restore()
        case.project.run("sync")
    else:
        time.sleep(seconds)
        restore()
        back = time.time()
        wait_for(lambda: server.query("dagster", RECORDED) != known, "events of further partitions")
        case.seconds = time.time() - back
        case.end(command)
    compare_rates(case, seconds)
    check_recorded(server, case.corpus.number)


def compare_rates(case: Case, seconds: float | None) -> None:
    """Checks that partitions are published at the same rate before, during and after an outage of so many seconds."""
    times = case.project.published_at()
    back = times[-1] if seconds is None else case.failed + max(seconds, MIN_RATE_SECONDS)
    spans = [(times[0], case.failed), (case.failed, back), *([] if seconds is None else [(back, times[-1])])]
    before, *rates = [sum(a < time <= b for time in times) / (b - a) for a, b in spans]
    case.rates = "partitions a second: " + ", ".join(f"{rate:.2f}" for rate in (before, *rates))
    assert min(rates) > MIN_RATE_RATIO * before, case.rates


def check_recorded(server: Server, partitions: int) -> None:
    """Dagster has each materialization and each check result of every partition once."""
    made = server.query(
        "dagster",
        "select asset_key, partition, count(*) from event_logs where partition is not null and dagster_event_type = "
        "'ASSET_MATERIALIZATION' group by 1, 2",
    ).splitlines()
    assert len(made) == partitions * (len(CHAIN) - 1)
    assert {line.rpartition("|")[2] for line in made} == {"1"}
    checked = "asset_check_executions where partition is not null"
    results = server.query("dagster", f"select distinct asset_key, check_name, partition from {checked}").splitlines()
    assert len(results) >= 10 * partitions
    assert server.query("dagster", RECORDED) == str(len(results))


def refuse_requests(case: Case) -> None:
    """One of twenty requests is answered with 503: the load takes longer, and that is all."""
    store: ServerApart = case.request.getfixturevalue("object_store")
    case.corpus.order()
    before = store.fail(20, ["503"])
    case.held.callback(store.fail, 0)
    command = case.start()
    case.await_notes()
    case.fail()
    case.end(command)
    case.seconds = time.time() - case.failed
    after = store.fail(0)
    assert after["503"] - before["503"] >= (after["requests"] - before["requests"]) // 20 - 1 > 0


# -- on a Ray cluster


def on_ray(cluster: RayCluster) -> tuple[str, ...]:
    return ("--engine", "ray", "--address", cluster.address)


def lose_ray_worker(case: Case, how: str) -> None:
    """A worker of Ray is killed, or stopped until its partition takes too long; another one runs that partition."""
    cluster: RayCluster = case.request.getfixturevalue("cluster")
    case.corpus.order(hang=how)
    command = case.start(*on_ray(cluster), "--set", 'engine={"timeout_seconds": 8}')
    wait_for((case.corpus.notes / ".has_hung").exists, "a worker that hangs")
    case.fail()
    assert f"{case.corpus.number} partitions run" in case.end(command)
    case.repeated()


def lose_ray_node(case: Case, how: Callable[[Node], None]) -> None:
    """What ran on a node that is killed, or that stops to answer, runs again on another one."""
    cluster: RayCluster = case.request.getfixturevalue("cluster")
    case.corpus.order(seconds=2.0)
    with cluster.node("second") as node:
        command = case.start(*on_ray(cluster))
        wait_for(lambda: sum(note.host == "second" for note in case.corpus.noted()) >= 3, "work on the second host")
        how(node)
        case.fail()
        active = {note.key for note in case.corpus.noted() if note.host == "second" and note.when > case.failed - 1.5}
        assert active

        def again() -> dict[str, float]:
            notes = case.corpus.noted()
            return {note.key: note.when for note in notes if note.key in active and note.when > case.failed}

        wait_for(lambda: again().keys() == active, "what ran on the lost host runs again")
        case.seconds = max(again().values()) - case.failed
        node.resume()
        assert f"{case.corpus.number} partitions run" in case.end(command)


def lose_ray_driver(case: Case, number: int) -> None:
    """After the driver is killed, or stopped, a load elsewhere goes on when the claim has expired.

    A stopped driver keeps its workers of Ray until it is killed, so that load is not on the cluster.
    """
    cluster: RayCluster = case.request.getfixturevalue("cluster")
    case.corpus.order(seconds=1.0)
    command = case.project.start("run", *on_ray(cluster), prefix=as_host("first", own_processes=False))
    case.held.enter_context(command)
    case.await_notes()
    command.signal(number)
    case.fail()
    began = time.time() + 1.0
    if number == signal.SIGKILL:
        case.codes.append(command.process.wait(WAIT))
        case.end(case.start(*on_ray(cluster), home="other"))
        case.resumed(began)
    else:
        case.end(case.start(home="other", host="second"))
        case.resumed(began, "second")


def lose_ray_head(case: Case, number: int) -> None:
    """Without the head a load ends with its summary and the command to continue, which does so without a cluster."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    case.held.callback(shutil.rmtree, folder, ignore_errors=True)
    cluster = RayCluster(folder, case.corpus.environment)
    case.held.callback(cluster.close)
    case.corpus.order(seconds=2.0)
    command = case.start(*on_ray(cluster))
    case.await_notes(6)
    cluster.signal_head(number)
    case.fail()
    code = command.process.wait(WAIT)
    assert code == 1 or (number == signal.SIGSTOP and code == 0), "its workers may end all partitions without it"
    output = " ".join(case.end(command, code).split())
    case.seconds = time.time() - case.failed
    assert "partitions run in" in output, "the summary"
    if code:
        assert f"{cluster.address}: the head of the Ray cluster has not answered for" in output
        assert f"--engine ray --address {cluster.address}" in output.partition("to continue: `mm-assets run")[2]
    case.corpus.order()
    case.end(case.start(home="home"))


@dataclass(frozen=True)
class Scenario:
    """A way to fail.

    Attributes:
        run: makes a load fail, and another one, or the same, go on.
        seconds: until the work goes on, or ends where it cannot, at the latest, on a busy machine.
        kind: the marker of its tests; empty for what is fast.
        roots: where it happens.
        needs_hosts: whether it needs namespaces.
        partitions: of the load.
    """

    run: Callable[[Case], None]
    seconds: float = 30.0
    kind: str = "slow"
    roots: tuple[str, ...] = ("local", "s3")
    needs_hosts: bool = False
    partitions: int = PARTITIONS


def _outage(how: str, outage_seconds: float | None, seconds: float) -> Scenario:
    """Returns a scenario of a database that is unavailable."""
    run = partial(lose_database, how=how, seconds=outage_seconds)
    return Scenario(run, seconds, partitions=MANY_PARTITIONS)


ONE, TWO = ("home", "home"), ("home", "other")
SCENARIOS = {
    "worker killed": Scenario(partial(lose_worker, how="kill"), kind="", partitions=FEW_PARTITIONS),
    "worker stopped": Scenario(partial(lose_worker, how="stop")),
    "driver killed": Scenario(partial(kill_driver, host="")),
    "driver killed on another host": Scenario(partial(kill_driver, host="first"), CLAIM_SECONDS, needs_hosts=True),
    "driver stopped": Scenario(stop_driver, CLAIM_SECONDS),
    "host frozen": Scenario(freeze_host, CLAIM_SECONDS, needs_hosts=True),
    "two drivers, one home": Scenario(partial(start_two, homes=ONE, staggered=False)),
    "two drivers, two homes": Scenario(partial(start_two, homes=TWO, staggered=False)),
    "two drivers staggered, one home": Scenario(partial(start_two, homes=ONE, staggered=True)),
    "two drivers staggered, two homes": Scenario(partial(start_two, homes=TWO, staggered=True)),
    "clock ahead": Scenario(partial(shift_clocks, clocks=(CLOCK_SECONDS, 0)), CLAIM_SECONDS, needs_hosts=True),
    "clock behind": Scenario(partial(shift_clocks, clocks=(0, CLOCK_SECONDS)), CLAIM_SECONDS, needs_hosts=True),
    "database unavailable for 1 s": _outage("stopped", 1.0, 30.0),
    "database unavailable for 25 s": _outage("stopped", 25.0, 45.0),
    "database unavailable for good": _outage("stopped", None, 150.0),
    "database silent for 25 s": _outage("silent", 25.0, 45.0),
    "database slow for 25 s": _outage("slow", 25.0, 45.0),
    "503 for one request of 20": Scenario(refuse_requests, 120.0, roots=("s3",)),
    "Ray worker killed": Scenario(partial(lose_ray_worker, how="kill"), kind="cluster"),
    "Ray worker stopped": Scenario(partial(lose_ray_worker, how="stop"), 45.0, kind="cluster"),
    "Ray node killed": Scenario(partial(lose_ray_node, how=Node.lose), 60.0, kind="cluster"),
    "Ray node stopped": Scenario(partial(lose_ray_node, how=Node.silence), 60.0, kind="cluster"),
    "Ray driver killed": Scenario(partial(lose_ray_driver, number=signal.SIGKILL), 75.0, kind="cluster"),
    "Ray driver stopped": Scenario(partial(lose_ray_driver, number=signal.SIGSTOP), 75.0, kind="cluster"),
    "Ray head killed": Scenario(partial(lose_ray_head, number=signal.SIGKILL), 60.0, kind="cluster"),
    "Ray head stopped": Scenario(partial(lose_ray_head, number=signal.SIGSTOP), 75.0, kind="cluster"),
}


def _cases() -> Iterator[object]:
    for name, scenario in SCENARIOS.items():
        for root in scenario.roots:
            kind = scenario.kind or ("slow" if root == "s3" else "")
            marks = [getattr(pytest.mark, kind)] if kind else []
            if scenario.needs_hosts or scenario.kind == "cluster":
                marks.append(pytest.mark.skipif(not can_isolate(), reason="hosts need namespaces: unshare, and root"))
            yield pytest.param(name, root, id=f"{name} {root}", marks=marks)


@dataclass
class Undisturbed:
    """Shards, and the files of a load of them to which nothing happens, for each number of shards."""

    folders: pytest.TempPathFactory
    environment: dict[str, str]
    loads: dict[int, tuple[Corpus, dict[str, str]]] = field(default_factory=dict)

    def __getitem__(self, number: int) -> tuple[Corpus, dict[str, str]]:
        if number not in self.loads:
            corpus = Corpus(self.folders.mktemp("corpus"), number, environment=self.environment)
            corpus.order()
            alone = Project(corpus, self.folders.mktemp("alone"))
            alone.run("run", "--jobs", "2")
            self.loads[number] = corpus, alone.contents()
        return self.loads[number]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, host_environment: dict[str, str]) -> Undisturbed:
    return Undisturbed(tmp_path_factory, host_environment)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that shifts the clock of the process that loads it."""
    if shutil.which("cc") is None:
        pytest.skip("a compiler is needed to shift a clock")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    library = str(folder / "clock.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(folder / "clock.c"), "-ldl"], check=True)
    return library


@pytest.fixture
def postgres() -> Iterator[Server]:
    if not PROGRAMS:
        pytest.skip("Debian's package postgresql is not installed")
    with serving() as server:
        yield server


@pytest.mark.parametrize(("name", "root"), [*_cases()])
def test_nothing_published_is_lost_or_changed(
    request: pytest.FixtureRequest, undisturbed: Undisturbed, tmp_path: Path, name: str, root: str
) -> None:
    """Whatever fails, published files stay as they are, the exit codes are those stated, and the end is the same."""
    scenario, url = SCENARIOS[name], ""
    corpus, expected = undisturbed[scenario.partitions]
    if root == "s3":
        bucket = f"b{secrets.token_hex(8)}"
        object_files(corpus.environment["AWS_ENDPOINT_URL"]).mkdir(bucket)
        url = f"s3://{bucket}/root"
    with ExitStack() as held:
        case = Case(corpus, Project(corpus, tmp_path, root=url), held, request)
        scenario.run(case)
    contents = case.project.contents()
    changed = [name for name, digest in case.before.items() if contents.get(name) != digest]
    codes = ", ".join(map(str, case.codes))
    print(f"{root} | {name} | {codes} | {len(case.before)} | {len(changed)} | {case.seconds:.1f} | {case.rates}")
    assert changed == []
    assert contents == expected, sorted(contents.items() ^ expected.items())[:10]
    assert case.seconds < scenario.seconds
