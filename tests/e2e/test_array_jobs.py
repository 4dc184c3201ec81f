"""The job arrays of `deploy/`: their tasks are all slices, and a repeated task is the same slice."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from mm_assets.pipeline.load.tasks import Slice

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def sliced(folder: Path, command: Sequence[str | Path], **variables: object) -> list[str]:
    """Runs a command of an array job, with a program in place of `mm-assets` that notes what it is given."""
    (folder / "mm-assets").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {folder}/given\n")
    (folder / "mm-assets").chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **{name: str(value) for name, value in variables.items()}}
    subprocess.run(command, env=environment, check=True)
    return (folder / "given").read_text().splitlines()


def test_an_array_of_slurm_runs_every_slice(tmp_path: Path) -> None:
    """Its tasks are all slices, and a task that is repeated alone is the same slice: Slurm then counts one task."""
    found = re.search(r"^#SBATCH --array=1-(\d+)$", (DEPLOY / "slurm.sbatch").read_text(), re.M)
    assert found is not None
    number = int(found.group(1))
    given = {"MM_ASSETS_ROOT": "/out", "SLURM_CPUS_PER_TASK": 8}
    for task, count in ((1, number), (number, number), (3, 1)):
        ids = {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": count}
        arguments = sliced(tmp_path, ["bash", DEPLOY / "slurm.sbatch"], **given, **ids)
        part = Slice.parse(arguments[arguments.index("--slice") + 1])
        assert (part.number, part.total) == (task, number)
        assert arguments[arguments.index("--jobs") + 1] == "8"


def test_an_indexed_job_runs_every_slice(tmp_path: Path) -> None:
    """Its indices, which begin with 0, are all slices, and no more pods are at work than there are."""
    job = yaml.safe_load((DEPLOY / "indexed-job.yaml").read_text())
    number = job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert 0 < job["spec"]["parallelism"] <= number == job["spec"]["maxFailedIndexes"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    for index in (0, 4, number - 1):
        arguments = sliced(tmp_path, [*container["command"], *container["args"]], JOB_COMPLETION_INDEX=index)
        part = Slice.parse(arguments[arguments.index("--slice") + 1])
        assert (part.number, part.total) == (index + 1, number)
        assert arguments[arguments.index("--jobs") + 1] == container["resources"]["requests"]["cpu"]
