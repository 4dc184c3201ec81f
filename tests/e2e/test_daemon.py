"""The daemon, for real: a shard that is dropped into a folder becomes packed files and a manifest."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mm_assets

CODE = """
import dagster as dg
from mm_assets.orchestration import build_definitions
from mm_assets.pipeline.spec import DatasetSpec

SPEC = DatasetSpec.from_config(
    {{"name": "dropped", "shards": {shards!r}, "root": {root!r}, "settle_seconds": 1, "poll_seconds": 2,
      "run_sensor": True, "pack": "image_text"}},
    where="test",
)
defs = dg.Definitions.merge(build_definitions(SPEC), dg.Definitions(executor=dg.in_process_executor))
"""


WAIT = 240.0  # for what takes seconds on an idle machine


@contextmanager
def process_group(command: list[str], log: Path, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all its children, which are ended together: Dagster's own do not die with their parent."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=cwd, stdout=output, stderr=output, start_new_session=True)
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def wait_for(condition: Callable[[], bool], seconds: float, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        time.sleep(0.05)


def test_a_dropped_in_shard_becomes_a_manifest(
    dagster_home: Path, tmp_path: Path, demo_shards: Path, inbox: Callable[..., Path]
) -> None:
    """With the daemon and the sensor running, a new shard is registered, run, checked, published and listed."""
    folder = inbox()
    root = tmp_path / "root"
    (tmp_path / "dropped_defs.py").write_text(CODE.format(shards=str(folder), root=str(root)))
    log = tmp_path / "daemon.log"
    command = [sys.executable, "-m", "dagster._daemon", "run", "-f", "dropped_defs.py"]
    with process_group(command, log, tmp_path) as daemon:
        wait_for(lambda: "Checking for new runs" in log.read_text() or "dropped_shards" in log.read_text(), WAIT, log)
        staged = folder / ".captions-00000.tar"
        staged.write_bytes((demo_shards / "captions-00000.tar").read_bytes())
        staged.replace(folder / "captions-00000.tar")
        manifest = root / "dropped" / "manifest.json"
        wait_for(lambda: manifest.exists() or daemon.poll() is not None, WAIT, log)
    assert json.loads(manifest.read_text())["partitions"]["key"] == ["captions-00000"]
    with mm_assets.open(str(manifest)) as dataset:
        assert len(dataset) > 20
        assert dataset[0]["image"].shape[2] in (3, 4)
