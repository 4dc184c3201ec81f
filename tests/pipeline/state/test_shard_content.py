"""Shards whose bytes or times change: which partitions are pending afterwards, and what their next run reads."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from mm_assets.errors import SourceError
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions

from ..chain import at_work, declare, record_of, run_chain, run_once, run_partition


def tar_of(text: bytes) -> bytes:
    """A shard of one text."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        info = tarfile.TarInfo("a.txt")
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
    return target.getvalue()


FIRST, OTHER = tar_of(b"first text"), tar_of(b"other text")


@pytest.fixture
def published(tmp_path: Path) -> tuple[DatasetStore, Path]:
    """A dataset of one published partition, and its shard."""
    shard = tmp_path / "in" / "s.tar"
    shard.parent.mkdir()
    shard.write_bytes(FIRST)
    os.utime(shard, ns=(10**18, 10**18))
    return run_chain(declare(tmp_path / "root", shard))[0], shard


def overwrite(shard: Path, content: bytes) -> None:
    """Another content with the size and the modification time of the first."""
    times = shard.stat()
    assert times.st_size == len(content)
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))


def pending(dataset: DatasetStore) -> bool:
    """Whether registration says that the shard changed, as the pending partitions do then."""
    changed = register(dataset).changed
    assert list(changed) == pending_partitions(dataset)
    return bool(changed)


def copy(shard: Path) -> None:
    shutil.copy2(shard, shard.with_suffix(".new"))
    os.replace(shard.with_suffix(".new"), shard)


def rename(shard: Path) -> None:
    shard.rename(shard.with_suffix(".old"))
    shard.with_suffix(".old").rename(shard)


HARMLESS: dict[str, Callable[[Path], None]] = {
    "touch": lambda shard: os.utime(shard),
    "chmod": lambda shard: shard.chmod(0o640),
    "copy": copy,
    "rename": rename,
}


def test_equal_bytes_are_the_same_shard(published: tuple[DatasetStore, Path]) -> None:
    """A touch, a change of rights, a copy and a rename make nothing pending, and a run afterwards changes no file."""
    dataset, shard = published
    record = record_of(dataset, "s")
    for name, change in HARMLESS.items():
        before = shard.stat()
        change(shard)
        assert shard.stat().st_ctime_ns != before.st_ctime_ns, name
        assert not pending(dataset), name
        assert dataset.partition("s").shards[0].times == f"{shard.stat().st_mtime_ns}-{shard.stat().st_ctime_ns}"
    run_partition(dataset, "s")
    assert record_of(dataset, "s") == record


def test_other_bytes_are_another_shard(published: tuple[DatasetStore, Path]) -> None:
    """Other bytes of the same size and time are noticed once, refused until they are indexed, and then published."""
    dataset, shard = published
    first = record_of(dataset, "s")
    overwrite(shard, OTHER)
    assert pending(dataset)
    with pytest.raises(SourceError, match=r"raw_shards of partition 's' has not been made"):
        at_work(stages.rows, dataset, "s")
    assert register(dataset).changed == ()
    run_partition(dataset, "s")
    assert pending_partitions(dataset) == []
    assert record_of(dataset, "s").packed["mult"] != first.packed["mult"]
    shard.chmod(0o600)
    assert not pending(dataset)
    overwrite(shard, FIRST)
    assert pending(dataset)
    run_partition(dataset, "s")
    assert record_of(dataset, "s").packed["mult"] == first.packed["mult"]


def test_other_bytes_before_a_run(published: tuple[DatasetStore, Path]) -> None:
    """Several changes between two runs leave the partition pending, until the bytes are those of the last run."""
    dataset, shard = published
    overwrite(shard, OTHER)
    assert pending(dataset)
    overwrite(shard, tar_of(b"third text"))
    assert register(dataset).changed == ("s",)
    assert pending_partitions(dataset) == ["s"]
    os.utime(shard)
    assert register(dataset).changed == ()
    assert pending_partitions(dataset) == ["s"]


def test_an_object_that_was_uploaded_again_is_the_same_shard(tmp_path: Path) -> None:
    """An object with another tag and equal bytes makes its partition pending, and its run publishes the same files."""
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/again/s.tar", FIRST)
    dataset = DatasetStore(declare(tmp_path / "root", "memory://again/s.tar"))

    def run() -> int:
        """Runs the partition; returns how many stages ran."""
        report = run_once(dataset.spec, dataset.partition("s"), dataset.schema())
        assert report.ok
        return len(report.results)

    register(dataset)
    assert run() > 0
    first = record_of(dataset, "s")
    fs.pipe_file("/again/s.tar", FIRST)
    assert pending(dataset)
    assert run() == 0
    again = record_of(dataset, "s")
    assert again.recipe != first.recipe
    assert (again.packed, again.tables) == (first.packed, first.tables)
    assert pending_partitions(dataset) == []
    fs.pipe_file("/again/s.tar", OTHER)
    assert pending(dataset)
    assert run() > 0
    assert record_of(dataset, "s").packed["mult"] != first.packed["mult"]
