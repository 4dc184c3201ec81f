"""Postgres as the storage of the Dagster instance, directly and behind PgBouncer, restarted during a load."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mm_assets.pipeline.chain import CHAIN

from .postgres import PGBOUNCER, PROGRAMS, WAIT, Server, reached, serving

pytestmark = pytest.mark.skipif(not PROGRAMS, reason="Debian's package postgresql is not installed")
COMMAND = (sys.executable, "-P", "-c", "from mm_assets.cli.main import main; main()")
DOWN = 2.0  # seconds

DAGSTER = """\
telemetry: {{enabled: false}}
storage:
  postgres:
    postgres_url: postgresql+psycopg2://dagster@127.0.0.1:{port}/dagster
"""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.fixture(params=["direct", "pgbouncer"])
def port(server: Server, request: pytest.FixtureRequest) -> Iterator[int]:
    """Where Dagster finds the server."""
    if request.param == "direct":
        yield server.port
        return
    if PGBOUNCER is None:
        pytest.skip("Debian's package pgbouncer is not installed")
    with server.pooled() as found:
        yield found


@pytest.mark.parametrize("moment", ["start", "middle"])
def test_a_restart_during_a_load_loses_nothing(
    server: Server, port: int, dagster_home: Path, demo_shards: Path, tmp_path: Path, moment: str
) -> None:
    """The command succeeds, its run too, and Dagster has each materialization and check result once."""
    (dagster_home / "dagster.yaml").write_text(DAGSTER.format(port=port))
    (tmp_path / "in").mkdir()
    for name in "abc":
        shutil.copy(demo_shards / "captions-00000.tar", tmp_path / "in" / f"{name}.tar")
    given = ("run", "-v", "--shards", "in", "--root", "out", "--set", "settle_seconds=0")
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen((*COMMAND, *given), cwd=tmp_path, stdout=log, stderr=log) as process,
    ):
        wanted = "a: done" if moment == "middle" else "partition"
        reached(lambda: wanted in (tmp_path / "log").read_text() or process.poll() is not None)
        server.control("stop")
        time.sleep(DOWN)
        server.control("start")
        process.wait(WAIT)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert server.query("dagster", "select status from runs") == "SUCCESS"
    made = server.query(
        "dagster", "select asset_key, partition from event_logs where dagster_event_type = 'ASSET_MATERIALIZATION'"
    )
    of_partitions = [line for line in made.splitlines() if not line.endswith("|")]
    assert len(of_partitions) == len(set(of_partitions)) == 3 * (len(CHAIN) - 1)
    results = server.query(
        "dagster", "select asset_key, check_name, partition from asset_check_executions"
    ).splitlines()
    evaluated = server.query(
        "dagster", "select count(*) from event_logs where dagster_event_type = 'ASSET_CHECK_EVALUATION'"
    )
    assert len(results) == len(set(results)) == int(evaluated) >= 30
