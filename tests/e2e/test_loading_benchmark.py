"""The loading benchmark runs, end to end, with nothing installed that it compares with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROWS = "random_all,sequential_text,first_batch,open_warm,size"  # cold ones need a disk, which a test may not have


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report on 130 samples, of one round."""
    folder = tmp_path_factory.mktemp("loading")
    # From a folder without `mm_assets`, so that an installed package is not hidden by the source tree's.
    (folder / "benchmarks").symlink_to(REPOSITORY / "benchmarks")
    command = [sys.executable, "-m", "benchmarks.loading", "--data", str(folder), "--out", str(folder / "report")]
    command += ["--samples", "130", "--rounds", "1", "--seconds", "0.02", "--rows", ROWS]
    command += ["--candidates", "mult,mstr,limit-rows"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "report"


def test_every_row_has_a_value_for_both_formats(report: Path) -> None:
    """MULT and MSTR are measured in every row, each time in the state of the page cache that the row is about."""
    lines = [json.loads(line) for line in (report / "results.jsonl").read_text().splitlines()]
    measured = {(one["row"], one["candidate"]) for one in lines if one["outcome"]["value"] is not None}
    assert measured >= {(row, name) for row in ROWS.split(",") for name in ("mult", "mstr")}
    assert all(one["share_cached"] > 0.95 for one in lines if one["row"] == "random_all")


def test_report_pairs_values_with_limits(report: Path) -> None:
    """A row's table gives ratios to its limits, and says who is not in it and why."""
    text = (report / "report.md").read_text()
    table = text.partition("### Random, image, text and audio, raw, batches of 64\n")[2].partition("###")[0]
    assert "of limit-rows | of limit-columns" in table
    row = next(line for line in table.splitlines() if line.startswith("| limit-rows |"))
    assert row.split(" | ")[3] == "1.00"
    assert (report / "loading-raw.png").stat().st_size > 1000
