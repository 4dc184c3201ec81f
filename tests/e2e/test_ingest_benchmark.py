"""The ingest benchmark runs, end to end, with nothing installed that it compares with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CANDIDATES = ("copy", "arrow", "stream", "stages", "run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one round on a shard of 20 samples."""
    folder = tmp_path_factory.mktemp("ingest")
    # From a folder without `mm_assets`, so that an installed package is not hidden by the source tree's.
    (folder / "benchmarks").symlink_to(REPOSITORY / "benchmarks")
    command = [sys.executable, "-m", "benchmarks.ingest", "--data", str(folder / "data"), "--kinds", "pairs"]
    command += ["--rounds", "1", "--scale", "0.002", "--candidates", ",".join(CANDIDATES)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "data"


def test_every_candidate_is_measured(folder: Path) -> None:
    """Each candidate ended well, wrote at least most of the shard, and used time and memory."""
    found = {one["candidate"]: one for one in map(json.loads, (folder / "results.jsonl").read_text().splitlines())}
    assert found.keys() == set(CANDIDATES)
    for one in found.values():
        assert one["code"] == 0
        assert one["bytes_written"] > 0.5 * one["shard_bytes"]
        assert one["processor_seconds"] > 0
        assert one["peak_bytes"] > 1_000_000


def test_stages_are_measured_one_by_one(folder: Path) -> None:
    """The stages write more copies than one stream does, and the report has a row for each of them."""
    found = {one["candidate"]: one for one in map(json.loads, (folder / "results.jsonl").read_text().splitlines())}
    written = {
        name: sum(step["bytes_written"] for step in found[name]["inside"]["steps"].values())
        for name in ("stream", "stages")
    }
    assert written["stages"] > 2 * written["stream"]
    report = (folder / "report.md").read_text()
    assert all(f"| `{step}` |" in report for step in found["stages"]["inside"]["steps"])
