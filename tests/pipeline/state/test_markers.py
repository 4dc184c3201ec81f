"""Markers are withdrawn where the files of a partition are replaced or damaged, and lose no added stream by it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_assets.errors import SourceError
from mm_assets.fields import ScalarField
from mm_assets.formats import MstrReader
from mm_assets.pipeline.chain import FILTERED_ROWS
from mm_assets.pipeline.partition import stage_run as stage_runs
from mm_assets.pipeline.partition.run import run_partition
from mm_assets.pipeline.state import clean, manifests, sql_views
from mm_assets.pipeline.state.added_streams import add_to_dataset
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.leases import Leases
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import Present, pending_partitions
from mm_assets.storage.staged import StagedStore
from mm_assets.storage.store import Store
from tests.dataset.test_add_stream import values_of
from tests.pipeline.chain import declare, marker_of, run_chain
from tests.pipeline.shards import CAPTIONS, make_shard


class Killed(BaseException):
    """A SIGKILL between two calls."""


def published_dataset(tmp_path: Path, *, with_stream: bool = False) -> DatasetStore:
    """A dataset of one partition `s`, in the newest manifest; with the added stream `score`."""
    spec = declare(tmp_path / "root", make_shard(tmp_path / "in" / "s.tar", CAPTIONS), filters=[])
    dataset, _ = run_chain(spec)
    if with_stream:
        with MstrReader(Path(dataset.store.path_of(marker_of(dataset, "s")["files"]["mstr"]["path"]))) as reader:
            ids = list(reader.sample_ids)
        list(add_to_dataset(dataset, "score", ScalarField(dtype="float32"), values_of(dict.fromkeys(ids, 1.0))))
        manifests.build_manifest(dataset)
    return DatasetStore(spec)


def lose_mult(dataset: DatasetStore) -> None:
    """Removes the partition's MULT file."""
    (packed,) = Path(dataset.store.path_of("packed")).glob("s.*.mult")
    packed.unlink()


def marker_names(dataset: DatasetStore) -> list[str]:
    return sorted(dataset.store.sizes("published"))


def streams_in_manifest(dataset: DatasetStore) -> list[str]:
    return [stream["name"] for stream in json.loads(dataset.store.read_bytes("manifest.json")).get("added_streams", ())]


def ran(dataset: DatasetStore, **options: Any) -> bool:
    return run_partition(dataset.spec, dataset.partition("s"), dataset.schema(), **options).ok


def test_run_carries_over_streams_of_a_marker_that_was_withdrawn_meanwhile(tmp_path: Path) -> None:
    """A manifest made while a load is at work withdraws a marker, and the run carries over its added stream."""
    dataset = published_dataset(tmp_path, with_stream=True)
    lose_mult(dataset)
    names = Present(dataset).names["s"]
    assert manifests.build_manifest(dataset).left_out.keys() == {"s"}
    assert marker_names(dataset) != list(names)
    assert ran(dataset, markers=names)
    assert not manifests.build_manifest(dataset).left_out
    assert streams_in_manifest(dataset) == ["score"]
    clean.clean(dataset, keep=1)
    assert dataset.store.exists(marker_of(dataset, "s")["added"]["file"]["path"])
    assert len(marker_names(dataset)) == 1


def test_run_replaces_a_marker_that_was_published_and_withdrawn_meanwhile(tmp_path: Path) -> None:
    """Of two runs of a new partition the later one leaves no withdrawn marker of the other."""
    dataset = published_dataset(tmp_path, with_stream=True)
    lose_mult(dataset)
    manifests.build_manifest(dataset)
    assert ran(dataset, markers=())  # none was there when the run began
    manifests.build_manifest(dataset)
    assert streams_in_manifest(dataset) == ["score"]
    assert len(marker_names(dataset)) == 1


def test_withdrawn_marker_belongs_to_its_own_partition(tmp_path: Path) -> None:
    """Where one key is another with 16 digits, a withdrawn marker of the one is not taken for one of the other."""
    long, short = "data.0123456789abcdef", "data"
    for key in (long, short):
        make_shard(tmp_path / "in" / f"{key}.tar", CAPTIONS)
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in", filters=[]))
    before = Present(dataset).names
    dataset.withdraw_markers(before[long])
    found = Present(dataset)
    assert found.pending() == [long]
    assert found.names[short] == before[short]
    assert len(found.names[long]) == 1


def test_failed_check_unpublishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a check failed, the view `published` does not list the partition; its next run finds the added stream."""
    dataset = published_dataset(tmp_path, with_stream=True)
    with sql_views.sql_connection(dataset) as connection:
        assert connection.execute("select partition from published").fetchall() == [("s",)]
    real = stage_runs.run_checks

    def failing(context: Any, *args: Any, **options: Any) -> Any:
        *others, last = real(context, *args, **options)
        return [*others, replace(last, passed=False, num_violations=1)]

    with monkeypatch.context() as patched:
        patched.setattr(stage_runs, "run_checks", failing)
        assert not ran(dataset, first=FILTERED_ROWS)
    with sql_views.sql_connection(dataset) as connection:
        assert connection.execute("select partition from published").fetchall() == []
    assert manifests.build_manifest(dataset).left_out == {"s": "its files are not those that were published"}
    assert ran(dataset)
    manifests.build_manifest(dataset)
    assert streams_in_manifest(dataset) == ["score"]


def test_manifest_does_not_withdraw_what_was_published_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that another process publishes while a manifest is made is in that manifest, and not pending."""
    dataset = published_dataset(tmp_path)
    lose_mult(dataset)
    dataset = DatasetStore(dataset.spec)
    listed = after_first_call(lambda: ran(dataset), Present.published)
    monkeypatch.setattr(Present, "published", listed)
    report = manifests.build_manifest(dataset)
    assert not report.left_out
    assert pending_partitions(dataset) == []


def after_first_call(act: Callable[[], object], method: Callable[[Present], Any]) -> Callable[[Present], Any]:
    """A method that acts before its first call, after the listings of its object were made."""
    calls: list[object] = []

    def wrapped(present: Present) -> Any:
        calls.append(present)
        if len(calls) == 1:
            act()
        return method(present)

    return wrapped


@pytest.mark.parametrize("is_replaced", [False, True])
def test_killed_between_the_steps_of_withdrawing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """A process killed while it withdrew a marker loses no stream, and without a changed file nothing at all."""
    dataset = published_dataset(tmp_path, with_stream=True)
    (name,) = marker_names(dataset)

    def killed(_: str) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(dataset.store, "delete", killed)
        with pytest.raises(Killed):
            dataset.withdraw_markers([name])
    assert len(marker_names(dataset)) == 2
    if is_replaced:
        dataset.store.delete("filtered_rows/s.parquet")
    report = manifests.build_manifest(DatasetStore(dataset.spec))
    assert report.left_out.keys() == ({"s"} if is_replaced else set())
    clean.clean(dataset, keep=1)
    assert ran(dataset)
    manifests.build_manifest(dataset)
    assert streams_in_manifest(dataset) == ["score"]
    assert pending_partitions(dataset) == []


def test_streams_of_the_present_marker_count(tmp_path: Path) -> None:
    """Where a killed run left a former marker, streams that were added to the present one since remain."""
    dataset = published_dataset(tmp_path, with_stream=True)
    (name,) = marker_names(dataset)
    dataset.store.write_bytes(dataset.marker_name("s", "0123456789abcdef"), dataset.store.read_bytes(name))
    path = Path(dataset.store.path_of(marker_of(dataset, "s")["files"]["mstr"]["path"]))
    with MstrReader(path) as reader:
        values = values_of(dict.fromkeys(reader.sample_ids, 2.0))
    list(add_to_dataset(dataset, "second", ScalarField(dtype="float32"), values))
    manifests.build_manifest(DatasetStore(dataset.spec))
    assert streams_in_manifest(dataset) == ["score", "second"]
    assert marker_names(dataset) == [name]


def test_run_whose_marker_is_withdrawn_meanwhile_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose very marker is withdrawn while it replaces it, without the lock, does not report success."""
    dataset = published_dataset(tmp_path)
    (name,) = marker_names(dataset)
    real = manifests.canonical_json

    def withdrawing(value: object, **options: Any) -> bytes:
        dataset.withdraw_markers([name])
        return real(value, **options)

    with monkeypatch.context() as patched:
        patched.setattr("mm_assets.pipeline.partition.publish.canonical_json", withdrawing)
        assert not ran(dataset, first=FILTERED_ROWS)
    assert pending_partitions(dataset) == ["s"]
    assert ran(dataset)


def during_first_call(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, act: Callable[[], object]
) -> list[Future[object]]:
    """Lets another thread `act` while a method is called for the first time, until it waits or ends."""
    real, calls = getattr(owner, method), list[Future[object]]()

    def calling(*args: Any, **options: Any) -> Any:
        if not calls:
            calls.append(Future())
            thread = threading.Thread(target=lambda: calls[0].set_result(act()))
            thread.start()
            thread.join(1.0)
        return real(*args, **options)

    monkeypatch.setattr(owner, method, calling)
    return calls


def test_run_that_publishes_during_a_withdrawal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that publishes while a manifest withdraws its marker waits, and leaves its own with the added stream."""
    dataset = published_dataset(tmp_path, with_stream=True)
    lose_mult(dataset)
    with monkeypatch.context() as patched:
        calls = during_first_call(patched, Store, "delete", lambda: ran(DatasetStore(dataset.spec)))
        manifests.build_manifest(DatasetStore(dataset.spec))
        assert calls[0].result(timeout=60)
    assert len(marker_names(dataset)) == 1
    assert pending_partitions(dataset) == []
    manifests.build_manifest(DatasetStore(dataset.spec))
    assert streams_in_manifest(dataset) == ["score"]


def test_stream_that_is_added_during_a_withdrawal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose partition is withdrawn while it is added is reported as not added, and the one before remains."""
    dataset = published_dataset(tmp_path, with_stream=True)
    values = values_of({})

    def added() -> str:
        with pytest.raises(SourceError) as caught:
            list(add_to_dataset(DatasetStore(dataset.spec), "second", ScalarField(dtype="float32"), values))
        return str(caught.value)

    dataset.store.delete("filtered_rows/s.parquet")
    with monkeypatch.context() as patched:
        calls = during_first_call(patched, Store, "delete", added)
        manifests.build_manifest(DatasetStore(dataset.spec))
        assert "was published again while a stream was added to it: add it again" in calls[0].result(timeout=60)
    assert ran(dataset)
    manifests.build_manifest(DatasetStore(dataset.spec))
    assert streams_in_manifest(dataset) == ["score"]


def test_stream_that_is_added_while_clean_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a stream that is being added is not removed: it is there before a marker lists it."""
    dataset = published_dataset(tmp_path)
    calls = during_first_call(monkeypatch, Store, "replace", lambda: clean.clean(DatasetStore(dataset.spec), keep=1))
    list(add_to_dataset(dataset, "score", ScalarField(dtype="float32"), values_of({})))
    report = calls[0].result(timeout=60)
    assert isinstance(report, clean.CleanReport)
    assert report.files == ()
    manifests.build_manifest(dataset)
    assert streams_in_manifest(dataset) == ["score"]


def test_markers_of_two_declarations(tmp_path: Path) -> None:
    """A manifest by a declaration that was changed since leaves the marker of the changed one as it is."""
    dataset = published_dataset(tmp_path)
    # Without limits, so that the records of both have the same size: only their digests differ.
    spec = declare(tmp_path / "root", tmp_path / "in" / "s.tar", filters=[{"type": "exact_duplicates"}])
    (name,) = marker_names(dataset)
    former = dataset.store.read_bytes(name)
    changed, _ = run_chain(spec)
    (new,) = marker_names(changed)
    dataset.store.write_bytes(name, former)  # the other run published it after this one had listed the markers
    manifests.build_manifest(DatasetStore(dataset.spec))
    assert marker_names(changed) == sorted([new, name])
    assert pending_partitions(DatasetStore(spec)) == []


def test_clean_beside_a_withdrawal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A marker that is withdrawn after `clean` listed it still protects the file with its added stream."""
    dataset = published_dataset(tmp_path, with_stream=True)
    (name,) = marker_names(dataset)
    lost = marker_of(dataset, "s")["added"]["file"]["path"]
    dataset.store.delete("manifest.json")

    def withdraw() -> None:
        dataset.withdraw_markers([name])

    monkeypatch.setattr(Present, "published", after_first_call(withdraw, Present.published))
    clean.clean(DatasetStore(dataset.spec), keep=1)
    assert marker_names(dataset) == [dataset.withdrawn_name(name)]
    assert dataset.store.exists(lost)


def test_clean_needs_every_marker(tmp_path: Path) -> None:
    """A damaged marker stops `clean`, which cannot know what it protects; a run removes it."""
    dataset = published_dataset(tmp_path, with_stream=True)
    dataset.withdraw_markers(marker_names(dataset))
    (name,) = marker_names(dataset)
    dataset.store.write_bytes(name, b"{")
    dataset.store.write_bytes("manifest.json", b'{"shards": []}')
    before = dataset.store.sizes("packed")
    with pytest.raises(SourceError, match=r"withdrawn.json: is not JSON: .*; run `mm-assets run --dataset data`"):
        clean.clean(DatasetStore(dataset.spec), keep=1)
    assert dataset.store.sizes("packed") == before
    assert ran(dataset)
    manifests.build_manifest(DatasetStore(dataset.spec))
    assert clean.clean(DatasetStore(dataset.spec), keep=1).files
    assert pending_partitions(dataset) == []


def test_stream_for_a_pending_partition(tmp_path: Path) -> None:
    """A stream is not added to a partition that has to run again: it would be lost with its file."""
    dataset = published_dataset(tmp_path)
    dataset.withdraw_markers(marker_names(dataset))
    message = "partition 's': its files are not those that were published: run `mm-assets run --dataset data` first"
    with pytest.raises(SourceError, match=message):
        list(add_to_dataset(dataset, "score", ScalarField(dtype="float32"), values_of({}), keys=["s"]))


def test_marker_of_other_settings_is_merged_before_it_is_removed(tmp_path: Path) -> None:
    """A run killed between publishing and removing the former marker loses no stream that only the former lists."""
    dataset = published_dataset(tmp_path, with_stream=True)
    (name,) = marker_names(dataset)
    marker = json.loads(dataset.store.read_bytes(name))
    former = dataset.marker_name("s", "0123456789abcdef")
    dataset.store.write_bytes(former, json.dumps(marker).encode())
    del marker["added"]
    dataset.store.write_bytes(name, json.dumps(marker).encode())
    assert clean.clean(DatasetStore(dataset.spec), dry_run=True).files == ()
    manifests.build_manifest(DatasetStore(dataset.spec))
    assert streams_in_manifest(dataset) == ["score"]
    assert marker_names(dataset) == [name]


def test_cleaning_leaves_what_a_run_is_about_to_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed files that are uploaded before the records which name them are not removed while their run is at work."""
    shard = make_shard(tmp_path / "in" / "s.tar", CAPTIONS)
    dataset = DatasetStore(declare(f"memory://{tmp_path.name}", shard, filters=[]))
    register(dataset)
    removed: list[tuple[str, ...]] = []
    put = StagedStore._put

    def cleaned(store: StagedStore, name: str) -> None:
        if name == dataset.records_name("s"):  # the last before the marker
            removed.append(clean.clean(DatasetStore(dataset.spec)).files)
        put(store, name)

    monkeypatch.setattr(StagedStore, "_put", cleaned)
    with Leases(dataset, "run") as leases, leases.held("s"):
        report = run_partition(dataset.spec, dataset.partition("s"), dataset.schema())
    assert (report.ok, removed) == (True, [()])
    assert [
        shard["partition"] for shard in manifests.build_manifest(DatasetStore(dataset.spec)).manifest["shards"]
    ] == ["s"]
