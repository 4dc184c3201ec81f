"""The benchmark of very many partitions runs, end to end, with a few of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NUMBER = 12


def measured(folder: Path, *options: str) -> dict[str, dict[str, float]]:
    """The figures of each measure."""
    command = [sys.executable, "-m", "benchmarks.scale", "--data", str(folder), "--numbers", str(NUMBER), *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return {found["measure"]: found for found in map(json.loads, done.stdout.splitlines())}


def test_a_stub_in_place_of_workers(tmp_path: Path) -> None:
    """Over an S3 server each measure counts requests; a load runs all but the first, a tick what has changed."""
    pytest.importorskip("s3fs")
    pytest.importorskip("aiohttp")
    measures = ("load", "no-op load", "manifest of one new", "tick", "tick of ten changed")
    options = ("--storage", "s3", "--database", "sqlite", "--delay", "0", "--measures", ",".join(measures))
    found = measured(tmp_path / "data", *options)
    assert found.keys() == set(measures)
    assert all(found[what]["requests"] > 0 for what in measures)
    assert found["load"]["partitions run"] == NUMBER - 1
    assert (found["tick"]["runs requested"], found["tick of ten changed"]["runs requested"]) == (0, 10)


def test_workers_that_do_the_work(tmp_path: Path) -> None:
    """With processes the partitions are made, the figures of the load are those of the driver, and pages show them."""
    options = ("--storage", "local", "--database", "sqlite", "--engine", "processes", "--measures", "load,graph")
    found = measured(tmp_path / "data", *options)
    assert found["load"]["partitions run"] == NUMBER - 1
    assert found["load"]["processor seconds"] > 0
    assert found["load"]["database bytes per partition"] > 1000
    assert found["graph"]["seconds"] > 0
    assert len(list((tmp_path / "data").rglob("records/*.json"))) == NUMBER
