"""The chain on an object store that fails at every tenth request, and two hosts that publish to one root."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partialmethod
from pathlib import Path
from typing import Any

import fsspec
import pytest

import mm_assets
from mm_assets.errors import ChangedError, SourceError
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Record
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions
from mm_assets.storage import store as store_module
from mm_assets.storage.store import Store

from ..pipeline.chain import at_work, record_name, record_of, run_once, run_partition
from ..s3_server import serve

s3fs = pytest.importorskip("s3fs", reason="the s3 extra is not installed")
pytest.importorskip("moto", reason="moto's server is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

PARTITION = "docs-00001"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    """An S3 server of this module, and its recorder."""
    with serve() as served:
        yield served


@pytest.fixture
def options(server: tuple[str, Any]) -> Iterator[dict[str, Any]]:
    """File-system arguments that lead to the server, which answers every request after the test."""
    yield {"key": "test", "secret": "test", "endpoint_url": server[0]}
    faults = server[1].faults
    faults.every, faults.kinds, faults.conditional, faults.conflicts = 0, faults.KINDS, True, 0


@pytest.fixture
def bucket(options: dict[str, Any], tmp_path: Path) -> str:
    """A bucket with the demo's smallest shard."""
    name = tmp_path.name.replace("_", "-").lower()[-50:].strip("-")
    fsspec.filesystem("s3", **options).mkdir(name)
    return name


@pytest.fixture
def dataset(
    demo_spec: Callable[..., DatasetSpec], demo_shards: Path, options: dict[str, Any], bucket: str
) -> DatasetStore:
    """The demo's documents, with shard and root in the bucket."""
    path = f"{bucket}/shards/{PARTITION}.tar"
    fsspec.filesystem("s3", **options).put_file(str(demo_shards / f"{PARTITION}.tar"), path)
    spec = demo_spec("docs", shards=f"s3://{path}", storage_options=options)
    return DatasetStore(spec.replace(root=f"s3://{bucket}/out", root_options=options))


def make(dataset: DatasetStore) -> None:
    """Runs the whole chain over the one partition."""
    register(dataset)
    run_partition(dataset, PARTITION)
    manifests.build_manifest(dataset)


def contents(dataset: DatasetStore) -> dict[str, bytes]:
    """Each file of the dataset by its name; fingerprints of shards aside."""
    found = {}
    for path in dataset.store.fs.find(dataset.store.path_of("")):
        name = str(path)[len(dataset.store.path_of("")) + 1 :]
        if not name.startswith(
            ("attempts/", "cache/", "records/", "manifest", "shards.json", "catalog.sql", "schema.json")
        ):
            found[name] = dataset.store.read_bytes(name)
    return found


@pytest.mark.fuzz
def test_a_store_that_fails_at_times_loses_nothing(
    dataset: DatasetStore, server: tuple[str, Any], bucket: str, tmp_path: Path
) -> None:
    """With errors, resets, slow and truncated replies at every tenth request, the same bytes are published."""
    quiet = DatasetStore(dataset.spec.replace(root=str(tmp_path / "quiet"), root_options={}))
    make(quiet)
    server[1].faults.every = 10
    make(dataset)
    server[1].faults.every = 0
    assert min(server[1].faults.injected.values()) >= 3, "every kind of fault was met"
    assert contents(dataset) == contents(quiet)
    listed = dataset.store.fs.find(f"{bucket}/out")
    assert not [path for path in listed if path.rsplit("/", 1)[-1].startswith(".") or path.endswith(".tmp")]
    url = dataset.store.url_of("manifest.json")
    with mm_assets.open(url, storage_options=dict(dataset.spec.root_options)) as opened:
        assert opened.verify().ok


@pytest.mark.fuzz
def test_a_run_through_scratch_survives_faults(dataset: DatasetStore, server: tuple[str, Any], tmp_path: Path) -> None:
    """A partition is fetched, made, uploaded and published byte for byte with a fault at every other request."""
    quiet = DatasetStore(dataset.spec.replace(root=str(tmp_path / "quiet"), root_options={}))
    for each in (quiet, dataset):
        register(each)
    partition, schema = dataset.partition(PARTITION), dataset.schema()
    assert run_once(quiet.spec, partition, schema).ok
    server[1].faults.every = 2
    report = run_once(dataset.spec, partition, schema)
    server[1].faults.every = 0
    assert report.failure is None
    assert report.record is not None
    assert report.record.to_bytes() == dataset.store.read_bytes(record_name(dataset, PARTITION))
    assert contents(dataset) == contents(quiet)


def test_a_store_that_is_down_is_named(dataset: DatasetStore, server: tuple[str, Any]) -> None:
    """Where every request fails, the stage ends with the URL and the store's own words, and publishes nothing."""
    register(dataset)
    server[1].faults.every, server[1].faults.kinds = 1, ("500",)
    with pytest.raises(SourceError, match=r"s3://.*(InternalError|injected)"):
        at_work(stages.raw_shards, dataset, PARTITION)
    server[1].faults.every = 0
    assert dataset.store.sizes("raw_shards") == {}


@pytest.mark.parametrize("kind", ["local", "s3", "s3 without conditions", "memory"])
def test_of_two_writers_one_replaces_a_file(
    options: dict[str, Any], bucket: str, server: tuple[str, Any], tmp_path: Path, kind: str
) -> None:
    """A file is replaced by who read its present version; the other is refused, unless the content is the same."""
    server[1].faults.conditional = kind != "s3 without conditions"
    urls = {"local": str(tmp_path / "store"), "memory": f"memory://{bucket}"}
    url = urls.get(kind, f"s3://{bucket}/store")
    first, second = (Store(url, None if kind in urls else options) for _ in range(2))
    for before in (None, b"first"):
        ours, theirs = first.snapshot("x.json"), second.snapshot("x.json")
        assert ours.content == theirs.content == before
        first.replace(ours, b"new")
        with pytest.raises(ChangedError, match=r"x\.json: another process published it meanwhile, with other content"):
            second.replace(theirs, b"other")
        second.replace(theirs, b"new")
        assert first.read_bytes("x.json") == b"new"
        first.replace(first.snapshot("x.json"), b"first")


@pytest.mark.parametrize("before", [None, b"before"])
def test_a_lost_reply_is_not_a_conflict(
    options: dict[str, Any], bucket: str, server: tuple[str, Any], before: bytes | None
) -> None:
    """Where the upload arrived and its reply was lost, the client's second attempt finds its own file."""
    store = Store(f"s3://{bucket}/store", options)
    if before is not None:
        store.write_bytes("x.json", before)
    snapshot = store.snapshot("x.json")
    lost = server[1].faults.injected["reset after"]
    server[1].faults.every, server[1].faults.kinds = 2, ("reset after",)
    store.exists("other")  # so that the next request is the second
    store.replace(snapshot, b"after")
    server[1].faults.every = 0
    assert server[1].faults.injected["reset after"] > lost
    assert store.read_bytes("x.json") == b"after"


def test_two_hosts_publish_a_partition_once(dataset: DatasetStore) -> None:
    """Of two processes that publish one partition at a time one creates the record, and both return it."""
    make(dataset)
    dataset.store.delete(record_name(dataset, PARTITION))
    together = threading.Barrier(2, timeout=200)

    def host(_: int) -> Record:
        mine = DatasetStore(dataset.spec)
        with PartitionWork.registered(mine, PARTITION) as work:
            together.wait()
            record = run_once(mine.spec, work.partition, work.schema).record
        assert record is not None
        manifests.build_manifest(mine)
        return record

    with ThreadPoolExecutor(2) as hosts:
        first, second = hosts.map(host, range(2))
    assert first.to_bytes() == second.to_bytes() == dataset.store.read_bytes(record_name(dataset, PARTITION))
    assert pending_partitions(dataset) == []


def test_the_first_record_counts(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that another host created meanwhile, with other files, is not replaced: it is what is published."""
    make(dataset)
    name, first = record_name(dataset, PARTITION), record_of(dataset, PARTITION)
    assert first is not None
    dataset.store.delete(name)
    theirs = replace(first, num_samples=first.num_samples + 1)
    create = DatasetStore.create_record

    def late(self: DatasetStore, record: Record) -> bool:
        assert create(self, theirs)
        return create(self, record)

    monkeypatch.setattr(DatasetStore, "create_record", late)
    report = run_once(dataset.spec, dataset.partition(PARTITION), dataset.schema())
    assert report.record == theirs == record_of(dataset, PARTITION)


def test_an_upload_that_meets_another_one_is_made_again(
    server: tuple[str, Any], options: dict[str, Any], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conflict decides nothing, since the other upload may fail: the file is created, or replaced, or was before."""
    monkeypatch.setattr(store_module, "_CONFLICT_PAUSES", (0.0, 0.0))
    store, faults = Store(f"s3://{bucket}/conflicts", options), server[1].faults
    for content in (b"first", b"second"):
        faults.conflicts = 2
        assert store.create("x", content) is (content == b"first")
    faults.conflicts = 2
    assert store.replace(store.snapshot("x"), b"third") is not None
    assert store.read_bytes("x") == b"third"
    faults.conflicts = 3
    with pytest.raises(SourceError, match=r"y: cannot be written: .*injected"):
        store.create("y", b"1")
    assert not store.exists("y")


def test_a_large_object_is_refreshed_in_parts(
    server: tuple[str, Any], options: dict[str, Any], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that is too large to be copied by one request has its content and another time."""
    store, content = Store(f"s3://{bucket}/large", options), os.urandom(11 << 20)
    store.write_bytes("x", content)
    before = store.modified("x")
    monkeypatch.setattr(s3fs.core, "MANAGED_COPY_THRESHOLD", 1 << 20)
    monkeypatch.setattr(
        s3fs.S3FileSystem, "_copy_managed", partialmethod(s3fs.S3FileSystem._copy_managed, block=5 << 20)
    )
    server[1].requests.clear()
    time.sleep(1.0)  # times are seconds
    store.refresh(["x"])
    copied = [request for request in server[1].requests if "partNumber" in request.query]
    assert len(copied) == 3
    assert store.modified("x") > before
    assert store.read_bytes("x") == content


def test_unfinished_uploads_of_every_page_are_aborted(
    options: dict[str, Any], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of uploads has 1,000; those that began long ago are aborted, those that have ended are passed over."""
    store = Store(f"s3://{bucket}/unfinished", options)
    old, now = datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC)
    pages = {
        "": [("unfinished/a", old), ("unfinished/b", now)],
        "unfinished/b": [("unfinished/c", old)],
    }
    aborted = []

    def call(method: str, **asked: Any) -> dict[str, Any]:
        if method == "abort_multipart_upload":
            aborted.append((asked["Key"], asked["UploadId"]))
            raise FileNotFoundError("it has ended")
        uploads = pages[asked.get("KeyMarker", "")]
        return {
            "Uploads": [{"Key": key, "UploadId": f"{key}!", "Initiated": began} for key, began in uploads],
            "IsTruncated": "KeyMarker" not in asked,
            "NextKeyMarker": uploads[-1][0],
            "NextUploadIdMarker": f"{uploads[-1][0]}!",
        }

    monkeypatch.setattr(store.fs, "call_s3", call)
    store.abort_uploads(3600.0)
    assert aborted == [("unfinished/a", "unfinished/a!"), ("unfinished/c", "unfinished/c!")]
