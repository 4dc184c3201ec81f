"""A root that is full or read-only: the stage says so, publishes nothing partial, and goes on once it can write."""

import io
import multiprocessing.util
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import mm_assets
from mm_assets.cli.main import main
from mm_assets.errors import MmAssetsError, SourceError
from mm_assets.orchestration.launch import open_instance
from mm_assets.orchestration.recorded_load import run_load
from mm_assets.pipeline.chain import RAW_SHARDS
from mm_assets.pipeline.load.processes import Processes
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import loss_totals
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState, pending_partitions

from ..pipeline.chain import at_work, declare, record_of, run_chain, run_once, run_partition
from ..pipeline.shards import CAPTIONS, make_shard
from .files import files_of

PARTITION = "docs-00001"
PLENTY = 64 << 20  # bytes


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        pytest.skip(f"a file system in memory cannot be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system in memory."""
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command, or this is not Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    multiprocessing.util.get_temp_dir()  # of this process until it ends: not on this disk
    mount("-t", "tmpfs", "-o", f"size={PLENTY}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def make(dataset: DatasetStore) -> None:
    """Runs the chain over the partition, from registration to the manifest."""
    register(dataset)
    run_partition(dataset, PARTITION)
    manifests.build_manifest(dataset)


def contents(dataset: DatasetStore) -> dict[str, bytes]:
    folder = Path(dataset.store.url)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files_of(folder)}


def test_a_full_disk_is_named_and_leaves_nothing_partial(
    demo_spec: Callable[..., DatasetSpec], tmp_path: Path, disk: Path
) -> None:
    """With space for ever more of the outputs each attempt ends with the system's words; the last gives equal bytes."""
    spec = demo_spec("docs")
    undisturbed = DatasetStore(spec.replace(root=str(tmp_path / "undisturbed")))
    make(undisturbed)
    expected = contents(undisturbed)
    total = sum(map(len, expected.values()))
    dataset = DatasetStore(spec.replace(root=str(disk)))
    for share in (0.0, 0.1, 0.3, 0.6, 0.9):
        mount("-o", f"remount,size={max(int(total * share), 4096)}", str(disk))
        with pytest.raises(
            MmAssetsError, match=rf"No space left on device: free some space on the disk at {disk}, then"
        ):
            make(dataset)
        for path in disk.rglob("*"):
            assert not path.name.startswith("."), "a file under construction is removed"
            if path.suffix == ".parquet":
                pq.read_table(path)
            elif path.suffix in (".mult", ".mstr"):
                with mm_assets.open(str(path)) as opened:
                    assert opened.verify().ok
        assert pending_partitions(dataset) in ([], ["docs-00000"], ["docs-00000", PARTITION])
    mount("-o", f"remount,size={PLENTY}", str(disk))
    make(dataset)
    assert contents(dataset) == expected


def test_full_scratch_is_named(
    demo_spec: Callable[..., DatasetSpec], tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files for a remote root are made in scratch: if its disk is full, it is named, and nothing is published."""
    dataset = DatasetStore(demo_spec("docs").replace(root=f"memory://{tmp_path.name}"))
    register(dataset)
    mount("-o", f"remount,size={512 << 10}", str(disk))
    partition, schema = dataset.partition(PARTITION), dataset.schema()
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    report = run_once(dataset.spec, partition, schema)
    assert report.failure is not None
    assert str(report.failure.path).startswith(str(disk))
    assert "No space left on device" in report.failure.detail
    assert record_of(dataset, PARTITION) is None
    assert list(disk.iterdir()) == []
    mount("-o", f"remount,size={PLENTY}", str(disk))
    assert run_once(dataset.spec, partition, schema).ok


def test_a_read_only_root_is_named_and_stays_readable(demo_spec: Callable[..., DatasetSpec], disk: Path) -> None:
    """Registration and stages name what they cannot write, and what was published is read as before."""
    dataset = DatasetStore(demo_spec("docs").replace(root=str(disk)))
    mount("-o", "remount,ro", str(disk))
    with pytest.raises(MmAssetsError, match=rf"{disk}.*Read-only file system: make the disk at {disk} writable"):
        register(dataset)
    mount("-o", "remount,rw", str(disk))
    make(dataset)
    expected = contents(dataset)
    mount("-o", "remount,ro", str(disk))
    for write in (stages.raw_shards, stages.packed):
        with pytest.raises(MmAssetsError, match=rf"{disk}.*Read-only file system"):
            at_work(write, dataset, PARTITION)
    assert contents(dataset) == expected
    with mm_assets.open(dataset.store.url_of("manifest.json")) as opened:
        assert opened.verify().ok


def test_a_full_dagster_home_is_named(monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    """A database that cannot grow is one error that says that `DAGSTER_HOME` needs space; with some it opens again."""
    monkeypatch.setenv("DAGSTER_HOME", str(disk))
    open_instance().dispose()
    with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    with pytest.raises(SourceError, match=rf"the Dagster instance cannot be used: .*: give {disk} .*free space"):
        open_instance()
    (disk / "filler").unlink()
    open_instance().dispose()


def test_a_read_only_root_with_nothing_to_do(
    instance: dg.DagsterInstance, demo_spec: Callable[..., DatasetSpec], disk: Path
) -> None:
    """A load that has nothing to do succeeds where the root may only be read; one that has names the disk.

    A copy of a root has other times of change.
    """
    dataset = DatasetStore(demo_spec("docs").replace(root=str(disk)))
    make(dataset)
    with Processes() as processes:
        assert run_load(dataset.spec, pending_partitions(dataset), engine=processes).ok
        for path in (disk / "docs" / "records").iterdir():
            os.utime(path, (1, 1))
        mount("-o", "remount,ro", str(disk))
        assert run_load(dataset.spec, [], engine=processes).ok
        (line,) = run_load(dataset.spec, [PARTITION], engine=processes, first=RAW_SHARDS).failures
    assert f"Read-only file system: make the disk at {disk} writable" in line


@pytest.mark.usefixtures("dagster_home")
def test_a_load_without_a_manifest_names_none(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first manifest could not be made, the summary names no file that does not exist."""
    for name in ("a.tar", "b.tar"):
        make_shard(tmp_path / "shards" / name, CAPTIONS)
    root = tmp_path / "root"
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    mount("-o", "remount,size=4k", str(disk))
    arguments = ["run", str(tmp_path / "shards"), "--root", str(root), "--set", "settle_seconds=0"]
    failed = CliRunner().invoke(main, arguments)
    assert failed.exit_code == 1
    assert "default: no manifest\n" in failed.stdout
    assert "manifest.json" not in failed.stdout
    assert f"failed: default: {disk}: cannot be written: No space left on device" in failed.stderr
    mount("-o", f"remount,size={PLENTY}", str(disk))
    assert f"default: {root}/default/manifest.json (preset " in CliRunner().invoke(main, arguments).stdout


def test_full_temporary_files_are_named(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a compressed shard wait in a temporary file: where its disk is full, registration says so."""
    with tarfile.open(tmp_path / "texts.tar.gz", "w:gz") as tar:
        for number in range(8):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 64 << 10
            tar.addfile(member, io.BytesIO(b"text " * (member.size // 5) + b"text!"))
    spec = declare(tmp_path / "root", tmp_path / "texts.tar.gz")
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    mount("-o", f"remount,size={64 << 10}", str(disk))
    with pytest.raises(SourceError, match=rf"No space left on device: free some space on the disk at {disk}, then"):
        register(DatasetStore(spec))
    mount("-o", f"remount,size={PLENTY}", str(disk))
    run_chain(spec)


def test_no_place_for_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any folder for temporary files a partition fails with what to set, and the shard is not suspected."""
    shard = make_shard(tmp_path / "in" / "s.tar", {"a.txt": "words"})
    dataset = DatasetStore(declare(tmp_path / "root", shard))
    register(dataset)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    report = run_once(dataset.spec, dataset.partition("s"), dataset.schema())
    assert report.failure is not None
    assert report.failure.path == "TMPDIR"
    assert "set it to a folder with free space" in report.failure.detail
    monkeypatch.undo()
    (total,) = loss_totals(DatasetState(dataset), ["s"])
    assert "salvage" not in total.example.advice
