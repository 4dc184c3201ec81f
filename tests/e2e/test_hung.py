"""Workers that hang: stopped by a signal, in an endless loop, and in a sleep that no signal ends."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import dagster as dg
import pytest

from .hosts import MAIN, Corpus, Project

PARTITIONS = 8

LIMITS = """
from mm_assets.pipeline.load import driver, processes
driver.MIN_LIMIT_SECONDS, driver.LIMIT_MEDIANS = 12.0, 1.0
driver.MIN_WARNING_SECONDS, driver.STRAGGLES = 5.0, 1.0
processes.KILL_SECONDS = 1.0
"""

# No signal ends what is stopped: a process in uninterruptible sleep, as far as its parent can tell.
UNKILLABLE = """
import dataclasses
from multiprocessing.process import BaseProcess
BaseProcess.kill = lambda self: None
driver.STORAGE = dataclasses.replace(driver.STORAGE, pauses=())
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"), PARTITIONS)


def hung_process(said: str) -> int:
    """The id of the process that the command reported first: it filters rows while they are materialized."""
    found = re.search(
        r"warning: \S+/\d{3}: no result after \d+ seconds: process (\d+) is at stage materialized_rows; after \d+ "
        r"seconds it is killed, and the partition repeated",
        said,
    )
    assert found is not None, said
    return int(found[1])


@pytest.mark.parametrize(("how", "recorded", "jobs"), [("stop", True, "2"), ("loop", False, "1")])
def test_a_worker_that_hangs_is_replaced(corpus: Corpus, tmp_path: Path, how: str, recorded: bool, jobs: str) -> None:
    """The command and Dagster's log name the process and its stage; it is killed, and its partition repeated."""
    corpus.order(hang=how)
    options = () if recorded else ("--no-record",)
    said = Project(corpus, tmp_path).run("run", "--jobs", jobs, *options, code=LIMITS + MAIN)
    pid = hung_process(said)
    assert re.search(rf"stage materialized_rows: process {pid} did not end the partition within \d+ seconds", said)
    assert f"{PARTITIONS} partitions run" in said
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    if recorded:
        with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:
            (run,) = instance.get_runs()
            lines = [entry.user_message for entry in instance.all_logs(run.run_id)]
        assert any(f"process {pid} is at stage materialized_rows" in line for line in lines)
        assert any(f"process {pid} did not end the partition" in line for line in lines)


def test_a_worker_that_cannot_be_killed_is_left_behind(corpus: Corpus, tmp_path: Path) -> None:
    """Another worker publishes its partition, and the command ends with the id of the process that is still there."""
    corpus.order(hang="stop")
    with Project(corpus, tmp_path).start("run", "--jobs", "2", code=LIMITS + UNKILLABLE + MAIN) as command:
        said = command.ended(0)
    pid = hung_process(said)
    try:
        assert f"process {pid} cannot be killed: it is abandoned" in said
        assert f"1 worker did not end after SIGKILL (process {pid})" in said
        assert f"{PARTITIONS} done" in said
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
