"""Shards whose bytes or times change: which partitions are pending afterwards, and what their next run reads."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_assets.errors import SourceError
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions

from ..chain import at_work, declare, marker_of, run_chain, run_partition


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
    marker = marker_of(dataset, "s")
    for name, change in HARMLESS.items():
        before = shard.stat()
        change(shard)
        assert shard.stat().st_ctime_ns != before.st_ctime_ns, name
        assert not pending(dataset), name
        assert dataset.partition("s").shards[0].times == f"{shard.stat().st_mtime_ns}-{shard.stat().st_ctime_ns}"
    run_partition(dataset, "s")
    assert marker_of(dataset, "s") == marker


def test_other_bytes_are_another_shard(published: tuple[DatasetStore, Path]) -> None:
    """Other bytes of the same size and time are noticed once, refused until they are indexed, and then published."""
    dataset, shard = published
    first = marker_of(dataset, "s")
    overwrite(shard, OTHER)
    assert pending(dataset)
    with pytest.raises(SourceError, match=r"changed since it was indexed \(found .*, expected .*\): materialize raw_"):
        at_work(stages.rows, dataset, "s")
    assert register(dataset).changed == ()
    run_partition(dataset, "s")
    assert pending_partitions(dataset) == []
    assert marker_of(dataset, "s")["files"]["mult"] != first["files"]["mult"]
    shard.chmod(0o600)
    assert not pending(dataset)
    overwrite(shard, FIRST)
    assert pending(dataset)
    run_partition(dataset, "s")
    assert marker_of(dataset, "s")["files"]["mult"] == first["files"]["mult"]


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


def test_a_registration_without_times_takes_them_over(published: tuple[DatasetStore, Path]) -> None:
    """Shards that an earlier release registered are not pending, and later changes of their bytes are noticed."""
    dataset, shard = published
    listed = json.loads(dataset.store.read_bytes("shards.json"))
    times = listed["partitions"]["s"][0].pop("times")
    dataset.store.write_bytes("shards.json", json.dumps(listed).encode())
    assert not pending(dataset)
    assert dataset.partition("s").shards[0].times == times
    overwrite(shard, OTHER)
    assert pending(dataset)
