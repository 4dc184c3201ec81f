"""A run that is killed in the middle of a stage leaves nothing half-written in sight, and the next run completes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import mm_assets
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import clean, manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions

from ..pipeline.chain import at_work
from .files import files_of

# Runs the stages of one partition and dies of SIGKILL at a chosen moment: inside a write of a stage's table, inside the
# packed files, or between the content and the record.
CHILD = """
import os, pickle, signal, sys
from mm_assets.pipeline.partition import publish
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.rows.parquet import ParquetSink

spec, key, victim = pickle.load(sys.stdin.buffer)
dataset = DatasetStore(spec)
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def run(stage, function):
    if stage == victim and stage != "packed":
        real = ParquetSink.write
        def write(self, batch):
            real(self, batch)
            self._writer.file_handle.flush() if getattr(getattr(self, "_writer", None), "file_handle", None) else None
            die()
        ParquetSink.write = write
    if stage == victim == "packed":
        real_pack = stages.pack_rows
        def pack(blocks, *args, **kwargs):
            def cut():
                for block in blocks:
                    yield block.slice(0, 3)
                    die()
            return real_pack(cut(), *args, **kwargs)
        stages.pack_rows = pack
    if victim == stage + ".record":
        DatasetStore.write_attempt = lambda self, attempt: die()
    with PartitionWork.registered(dataset, key) as work:
        function(work)

for stage, function in stages.TABLE_STAGES.items():
    run(stage.name, function)
run("packed", stages.packed)
"""

VICTIMS = ["raw_shards", "rows", "materialized_rows", "filtered_rows", "packed", "rows.record", "packed.record"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in files_of(folder)}


def complete(dataset: DatasetStore, key: str) -> None:
    for make in stages.TABLE_STAGES.values():
        assert at_work(make, dataset, key).passed
    assert all(result.passed for result in at_work(stages.packed, dataset, key).values())
    at_work(publish.publish, dataset, key)
    manifests.build_manifest(dataset)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_stage_leaves_no_partial_file(
    demo_spec: Callable[..., DatasetSpec], root: Path, tmp_path: Path, victim: str
) -> None:
    """Whatever stage is killed, what is visible is whole, nothing is published, and a new run gives the same bytes."""
    import pickle

    spec = demo_spec("docs")
    dataset = DatasetStore(spec)
    register(dataset)
    key = "docs-00001"
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps((spec, key, victim)),
        check=False,
        capture_output=True,
        timeout=280,
    )
    assert done.returncode == -9, done.stderr.decode()
    for path in (root / "docs").rglob("*"):
        if path.name.startswith(".") or path.is_dir():
            continue
        if path.suffix == ".parquet":
            pq.read_table(path)
        elif path.suffix in (".mult", ".mstr"):
            with mm_assets.open(str(path)) as opened:
                assert opened.verify().ok
    assert pending_partitions(dataset) == ["docs-00000", "docs-00001"]
    complete(dataset, key)
    old = time.time() - 2 * clean.MIN_AGE_SECONDS
    for path in (root / "docs").rglob(".*"):
        os.utime(path, (old, old))
    clean.clean(dataset)
    assert list((root / "docs").rglob(".*")) == []

    fresh = DatasetStore(spec.replace(root=str(tmp_path / "fresh")))
    register(fresh)
    complete(fresh, key)
    assert contents(root) == contents(tmp_path / "fresh")
    assert os.listdir(root) == ["docs"]
