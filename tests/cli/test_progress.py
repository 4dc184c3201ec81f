"""The progress of a load, on a terminal and in a pipe."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mm_assets.cli import progress
from mm_assets.cli.progress import LoadProgress, duration_text
from mm_assets.pipeline.load.tasks import PartitionRun

from ..pipeline.shards import CAPTIONS, make_shard


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(stream: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.01)


def run(key: str, *failures: str) -> PartitionRun:
    return PartitionRun(dataset="web", partition=key, failures=failures)


def test_rate_and_time_left() -> None:
    """After 10 of 40 partitions in 20 seconds, 60 seconds are left; before the first end neither is known."""
    clock = Clock()
    shown = LoadProgress(total=40, stream=io.StringIO(), clock=clock)
    shown.started("web", "p0", "")
    assert (shown.remaining(), shown.line()) == (None, "0 of 40 partitions done; running: web/p0")
    for number in range(10):
        clock.now += 2
        shown.ended(run(f"p{number}"))
    assert (shown.rate(), shown.remaining()) == (0.5, 60)
    for number in range(10, 15):
        shown.started("web", f"p{number}", "rows")
    assert shown.line() == (
        "10 of 40 partitions done; 30.0 per minute, 1 min 0 s left; "
        "running: web/p10 (rows), web/p11 (rows), web/p12 (rows) and 2 more"
    )


def test_the_rate_is_that_of_the_last_partitions() -> None:
    """A load that becomes ten times as slow is not promised to end at the old rate."""
    clock = Clock()
    shown = LoadProgress(total=10_000, stream=io.StringIO(), clock=clock)
    for seconds in (0.1, 1.0):
        for number in range(1000):
            clock.now += seconds
            shown.ended(run(f"p{number}"))
    assert shown.remaining() == pytest.approx(8000, rel=0.01)


def test_a_failure_is_a_line_at_once() -> None:
    """In a pipe a partition that fails has its line, with control characters escaped, and one that is done has none."""
    stream = io.StringIO()
    with LoadProgress(total=3, stream=stream) as shown:
        shown.started("web", "a", "rows")
        shown.ended(run("a"))
        shown.ended(run("b", "rows: \x1b[2J is odd", "more"))
    assert stream.getvalue() == "web/b: FAILED: rows: \\x1b[2J is odd\n"


def test_lines_follow_in_a_pipe_only_where_something_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is written again and again, but never twice the same."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    stream = io.StringIO()
    with LoadProgress(total=2, stream=stream, clock=Clock()) as shown:
        wait_for(stream, "0 of 2")
        shown.ended(run("a"))
        wait_for(stream, "1 of 2")
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(set(lines)) == 2


def test_verbose_logs_stages() -> None:
    """Each stage has a line with the time of day, and the end of the partition how long it took."""
    clock, stream = Clock(), io.StringIO()
    with LoadProgress(total=1, stream=stream, verbose=True, clock=clock) as shown:
        for stage in ("", "rows", "published"):
            shown.started("web", "a", stage)
            clock.now += 1
        shown.ended(run("a"))
    logged = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in stream.getvalue().splitlines()]
    assert logged == ["web/a: begins", "web/a: rows", "web/a: published", "web/a: done in 3.0 s"]


def test_a_terminal_names_what_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows partitions with their stages, no more than fit, and failures above; then nothing of it is left."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    stream = Terminal()
    with LoadProgress(total=20, stream=stream) as shown:
        for number in range(9):
            shown.started("web", f"p{number}" + "x" * 100, "filtered_rows")
        shown.ended(run("p0" + "x" * 100, "why"))
        wait_for(stream, "and 2 more are running")
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "FAILED" in drawn
    assert "1/20" in drawn
    assert max(len(line) for line in re.split(r"[\r\n]", drawn) if "FAILED" not in line) <= 60


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7260, "2 h 1 min")]
)
def test_durations(seconds: float, said: str) -> None:
    """Durations have the two largest units."""
    assert duration_text(seconds) == said


def test_a_command_writes_nothing_else(tmp_path: Path, dagster_home: Path) -> None:
    """With `-v` standard error has the stages and no noise of libraries, also at the end of the process."""
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    given = ("run", "-v", "--shards", "in", "--root", "out")
    code = "from mm_assets.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *given], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in done.stderr.splitlines()]
    stages = [line for line in lines if line.startswith("default/a: ")]
    assert stages[:3] == ["default/a: begins", "default/a: raw_shards", "default/a: rows"]
    rest = [line for line in lines if line not in stages and " of 1 partition done" not in line]
    assert [line.partition(":")[0] for line in rest] == ["default"]
