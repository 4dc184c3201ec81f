"""Open files behind URLs: the same batches as of local files, few requests, and those of coming ones early."""

import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import MultimodalLoader
from mm_assets.dataset import files as packed_files
from mm_assets.errors import SourceError
from mm_assets.fields import BytesField, ScalarField, TextField
from mm_assets.loading.order import Blocks
from mm_assets.storage.remote import RemoteFile
from mm_assets.storage.urls import filesystem

from ..s3_server import serve

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

FIELDS = {"blob": BytesField(), "text": TextField(), "label": ScalarField("int32")}
FILES, ROWS, BLOB = 4, 60, 2000


def value(i: int) -> dict[str, Any]:
    """Sample `i` of all; every seventh has no text."""
    return {
        "blob": np.random.default_rng(i).bytes(BLOB),
        "text": None if i % 7 == 0 else f"text {i}",
        "label": i,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of 60 samples in each format."""
    folder = tmp_path_factory.mktemp("shards")
    for form in ("mult", "mstr"):
        (folder / form).mkdir()
        for k in range(FILES):
            with mm_assets.create(folder / form / f"{k}.{form}", FIELDS, num_samples=ROWS) as writer:
                for i in range(k * ROWS, (k + 1) * ROWS):
                    writer.write(f"id{i}", value(i))
    return folder


# --- the same as local ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """An S3 server that has the files: arguments of the file system, and the record of requests."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    pytest.importorskip("moto", reason="moto's server is not installed")
    with serve() as (url, record):
        options = {"key": "test", "secret": "test", "endpoint_url": url}
        s3 = fsspec.filesystem("s3", **options)
        s3.mkdir("loading")
        for form in ("mult", "mstr"):
            s3.put(str(folder / form), f"loading/{form}", recursive=True)
        yield options, record


Pair = tuple[mm_assets.Dataset, mm_assets.Dataset]


@pytest.fixture(scope="module", params=["mult", "mstr"])
def in_bucket(request: pytest.FixtureRequest, folder: Path, server: tuple[dict[str, Any], Any]) -> Iterator[Pair]:
    """The files opened locally, and from the server."""
    with (
        mm_assets.open(folder / request.param) as local,
        mm_assets.open(f"s3://loading/{request.param}", storage_options=server[0]) as remote,
    ):
        yield local, remote


@pytest.fixture(scope="module", params=["mult", "mstr"])
def in_memory(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    """The files opened locally, and as remote ones whose requests cost nothing."""
    memory = fsspec.filesystem("memory")
    for path in (folder / request.param).iterdir():
        memory.pipe_file(f"/equal/{path.name}", path.read_bytes())
    with mm_assets.open(folder / request.param) as local, mm_assets.open("memory://equal") as remote:
        yield local, remote
    memory.rm("/equal", recursive=True)


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as values that compare."""
    result: dict[str, Any] = {}
    for name, found in batch.items():
        if isinstance(found, dict):
            result[name] = plain(found)
        elif isinstance(found, np.ndarray):
            result[name] = (found.dtype, found.shape, found.tobytes())
        else:
            result[name] = [bytes(one) if isinstance(one, memoryview) else one for one in found]
    return result


def check_same(pair: Pair, *, stop: int, **arguments: Any) -> None:
    """The batches of both are equal, also after a stop after some, and each continues from the other's state."""
    local, remote = (MultimodalLoader(data, **arguments) for data in pair)
    with iter(remote) as batches:
        first = [plain(batch) for _, batch in zip(range(stop), batches, strict=False)]
    state = remote.state_dict()
    expected = [plain(batch) for batch in local]
    remote.load_state_dict(state)  # without it a loop is a new epoch
    assert first + [plain(batch) for batch in remote] == expected
    local.set_epoch(0)
    local.load_state_dict(state)
    assert local.state_dict() == state
    assert [plain(batch) for batch in local] == expected[stop:]


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.sampled_from([True, Blocks(8, 3), False]),
    world=st.integers(1, 3),
    rank=st.integers(0, 2),
    batch_size=st.integers(20, 70),
    stop=st.integers(0, 1),
    workers=st.sampled_from([0, 2]),
)
def test_batches_are_those_of_local_files(
    in_memory: Pair,
    seed: int,
    shuffle: bool | Blocks,
    world: int,
    rank: int,
    batch_size: int,
    stop: int,
    workers: int,
) -> None:
    """Whatever seed, shuffle, rank and batch size: each batch is bit for bit the local one; states are exchanged."""
    check_same(
        in_memory,
        stop=stop,
        seed=seed,
        shuffle=shuffle,
        world_size=world,
        rank=rank % world,
        batch_size=batch_size,
        num_workers=workers,
    )


def test_batches_of_a_bucket_are_those_of_local_files(in_bucket: Pair) -> None:
    """The same over real HTTP requests, several at a time."""
    check_same(in_bucket, stop=1, seed=5, shuffle=True, batch_size=80, num_workers=2)


def test_a_stream_of_raw_batches(in_memory: Pair) -> None:
    """Remote, too, each batch is the local one, errors come in their turn, and a stream that is left has no thread."""
    local, remote = in_memory
    indices = np.random.default_rng(3).integers(0, len(local), (12, 16))
    before = threading.active_count()
    assert list(remote.stream_raw(indices, ["blob", "text"])) == list(local.stream_raw(indices, ["blob", "text"]))
    stream = remote.stream_raw([indices[0], [len(local)], indices[1]], ["text"])
    assert next(stream) == local.read_raw(indices[0], ["text"])
    with pytest.raises(IndexError):
        next(stream)

    def one_array() -> Iterator[np.ndarray]:
        buffer = np.empty_like(indices[0])
        for row in indices:
            buffer[:] = row
            yield buffer

    assert list(remote.stream_raw(one_array(), ["text"])) == list(local.stream_raw(indices, ["text"]))
    stream = remote.stream_raw(iter(indices), ["text"])
    next(stream)
    del stream
    gc.collect()  # the error's traceback holds the stream that it came from
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("mm_assets-read") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert threading.active_count() <= before + packed_files.NUM_REQUESTS


def test_a_dataset_is_read_in_few_requests(folder: Path, server: tuple[dict[str, Any], Any]) -> None:
    """A file costs its head, its end, its tables, and one request per batch where payloads are near; the rest none."""
    options, record = server
    for form in ("mult", "mstr"):
        record.requests.clear()
        with mm_assets.open([f"s3://loading/{form}/0.{form}"], storage_options=options) as data:
            data.read_batch(range(0, ROWS, 2))
            reads = record.reads_of(f"/loading/{form}/0.{form}")
            # Head, end, and the tables of all modalities, which in MSTR are apart; the payloads of MSTR's streams too.
            assert len(reads) <= (4 if form == "mult" else 8)
            assert all(read.start is not None for read in reads), "no whole file"
            record.requests.clear()
            data.read_batch(range(1, ROWS, 2))
            data.read_raw(range(0, ROWS, 3))
            assert len(record.requests) <= (2 if form == "mult" else 6)
            assert sum(read.sent for read in record.requests) <= 2 * (folder / form / f"0.{form}").stat().st_size


def test_a_value_without_bytes_takes_no_request(server: tuple[dict[str, Any], Any]) -> None:
    """A number, which MSTR stores in its record alone, is read without asking for an empty range."""
    options, record = server
    with mm_assets.open("s3://loading/mstr/0.mstr", storage_options=options) as data:
        data.read_batch([0], ["label"])
        record.requests.clear()
        assert data.read_raw([9], ["label"])["label"][0] == b""
        assert data.read_batch([9, 3], ["label"])["label"].values.tolist() == [9, 3]
        assert record.requests == []


def test_far_payloads_are_asked_for_together(server: tuple[dict[str, Any], Any], tmp_path: Path) -> None:
    """Payloads more than 256 KiB apart are requests of their own, nearer ones share one, and no byte comes twice."""
    options, record = server
    with mm_assets.create(tmp_path / "x.mult", {"blob": BytesField()}) as writer:
        for i in range(12):
            writer.write(str(i), {"blob": bytes([i]) * (100 << 10)})
    fsspec.filesystem("s3", **options).put(str(tmp_path / "x.mult"), "loading/far.mult")
    with mm_assets.open("s3://loading/far.mult", storage_options=options) as data:
        data.read_batch([5])
        record.requests.clear()
        found = data.read_raw([0, 2, 11, 4, 7], ["blob"])["blob"]
        assert [bytes(one[:1])[0] for one in found] == [0, 2, 11, 4, 7]
        starts = sorted((read.start, read.end) for read in record.requests)
        assert [round((end - start) / (100 << 10)) for start, end in starts] == [8, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_reads(in_bucket: Pair) -> None:
    """A child that was forked with a remote dataset open reads from it, as torch's workers do."""
    local, remote = in_bucket
    expected = local.read_modality("label", [3, 200, 77])
    assert remote.read_modality("label", [3, 200, 77]) == expected
    child = os.fork()
    if child == 0:
        threading.Timer(60, os._exit, (2,)).start()
        os._exit(0 if remote.read_modality("label", [3, 200, 77]) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert remote.read_modality("label", [3, 200, 77]) == expected


# --- requests of a slow storage ---------------------------------------------------------------------------------------


class GatedFileSystem(MemoryFileSystem):
    """Files in memory; a request for payloads waits until the test lets it through."""

    protocol = "gated"
    cachable = False
    gate: ClassVar[threading.Event]
    asked: ClassVar[threading.Condition] = threading.Condition()
    paths: ClassVar[list[str]]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("gated://", "memory://", 1))

    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], **_: Any) -> list[bytes]:
        """Notes a call, and waits."""
        with self.asked:
            self.paths.append(paths[0])
            self.asked.notify_all()
        assert self.gate.wait(60)
        return [super(GatedFileSystem, self).cat_file(*one) for one in zip(paths, starts, ends, strict=True)]

    @classmethod
    def wait_for(cls, count: int) -> list[str]:
        """The files of the calls so far, when there have been that many."""
        with cls.asked:
            assert cls.asked.wait_for(lambda: len(cls.paths) >= count, 60), f"{len(cls.paths)} of {count} requests"
            return list(cls.paths)

    @classmethod
    def shut(cls) -> None:
        """From now on calls wait, and are counted from zero."""
        cls.gate = threading.Event()
        cls.paths = []


@pytest.fixture
def gated(folder: Path) -> Iterator[str]:
    """The MULT files on a storage whose answers wait for the test."""
    fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
    memory = fsspec.filesystem("memory")
    for path in (folder / "mult").iterdir():
        memory.pipe_file(f"/slow/{path.name}", path.read_bytes())
    GatedFileSystem.shut()
    GatedFileSystem.gate.set()
    yield "gated://slow"
    GatedFileSystem.gate.set()
    memory.rm("/slow", recursive=True)


def test_the_files_of_a_batch_are_asked_at_once(gated: str) -> None:
    """A batch over all files has a request of each of them under way before any is answered; so has opening them."""
    GatedFileSystem.shut()
    opened: list[mm_assets.Dataset] = []
    thread = threading.Thread(target=lambda: opened.append(mm_assets.open(gated)))
    thread.start()
    names = [f"/slow/{k}.mult" for k in range(FILES)]
    assert sorted(GatedFileSystem.wait_for(FILES)) == names
    GatedFileSystem.gate.set()
    thread.join()
    indices = [7, 200, 70, 130, 8]
    with opened[0] as data:
        check_asked_at_once(lambda: data.read_batch(indices, ["label"])["label"].values.tolist(), indices)
        check_asked_at_once(lambda: data.read_modality("label", indices), indices)
        check_asked_at_once(
            lambda: [bytes(raw) for raw in data.read_raw(indices, ["blob"])["blob"]],
            [value(i)["blob"] for i in indices],
        )


def check_asked_at_once(read: Callable[[], Any], expected: Any) -> None:
    """All files are asked before any answers."""
    read()  # so that there are only payloads to be asked for
    GatedFileSystem.shut()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    assert sorted(GatedFileSystem.wait_for(FILES)) == [f"/slow/{k}.mult" for k in range(FILES)]
    GatedFileSystem.gate.set()
    thread.join()
    assert found == [expected]


def test_coming_batches_are_asked_for_before_they_are_wanted(gated: str) -> None:
    """While the consumer holds its first batch and asks for nothing, the requests of the next ones are made."""
    with mm_assets.open([f"{gated}/0.mult"]) as data:
        loader = MultimodalLoader(data, ["label"], batch_size=10, shuffle=False, num_workers=2, prefetch=3)
        with iter(loader) as batches:
            before = len(GatedFileSystem.paths)
            first = next(batches)
            # Its own request, with the tables', and those of two further batches that were not asked for yet.
            GatedFileSystem.wait_for(before + 4)
            assert first["label"].tolist() == list(range(10))
            assert [batch["label"].tolist()[0] for batch in batches] == [10, 20, 30, 40, 50]


def test_a_file_that_fails_ends_a_batch(gated: str) -> None:
    """When one of the files of a batch is gone, the error names it, nothing runs on, and the others can be read."""
    before = set(threading.enumerate())
    with mm_assets.open(gated) as data:
        fsspec.filesystem("memory").rm("/slow/2.mult")
        with pytest.raises(SourceError, match=r"slow/2\.mult"):
            data.read_batch([1, 70, 130, 190])
        assert data.read_modality("label", [1, 70, 190]) == [1, 70, 190]
    assert set(threading.enumerate()) <= before


def test_a_file_that_cannot_be_opened_closes_the_others(gated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list with a file that is not there is refused by its name, and no file or thread stays."""
    before = set(threading.enumerate())
    made: list[RemoteFile] = []
    closed: list[RemoteFile] = []
    real, real_close = RemoteFile.__init__, RemoteFile.close

    def init(self: RemoteFile, *args: Any) -> None:
        real(self, *args)
        made.append(self)

    def close(self: RemoteFile) -> None:
        closed.append(self)
        real_close(self)

    monkeypatch.setattr(RemoteFile, "__init__", init)
    monkeypatch.setattr(RemoteFile, "close", close)
    names = [f"{gated}/{k}.mult" for k in (0, 1, 9, 2, 3)]
    with pytest.raises(SourceError, match=r"9\.mult"):
        mm_assets.open(names)
    assert set(closed) == set(made)
    assert set(threading.enumerate()) <= before


def test_a_storage_failure_is_not_damage(gated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that the storage refuses raises, also where damaged samples are skipped."""

    def refuse(*_: Any, **__: Any) -> list[bytes]:
        raise PermissionError(13, "Forbidden")

    with mm_assets.open(gated) as data:
        data.read_batch([0])
        loader = MultimodalLoader(data, ["label"], batch_size=10, on_damaged="skip", num_workers=0)
        monkeypatch.setattr(GatedFileSystem, "cat_ranges", refuse)
        with pytest.raises(SourceError, match=r"Forbidden|denied"):
            next(iter(loader))
        assert loader.num_damaged == 0


def test_tables_of_remote_files_are_bounded(gated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of remote files as many stay open as their tables fit a bounded memory, and all can be read again and again."""
    with mm_assets.open(gated) as data:
        shards = data._files._shared
        assert len(shards.readers) == FILES
        one = shards.tables // FILES
        assert one >= ROWS * 16 * len(FIELDS)
        monkeypatch.setattr("mm_assets.dataset.open_files.MAX_TABLES", 3 * one)
        GatedFileSystem.shut()
        GatedFileSystem.gate.set()
        for i in (0, 60, 120, 180, 0, 239):
            assert data[i]["label"] == i
        assert data[[239, 0, 100, 150]] == [value(i) for i in (239, 0, 100, 150)]
        assert len(shards.readers) <= FILES
        data.read_modality("label", range(4 * ROWS))
        data.read_modality("label", [0])


def test_one_file_is_opened_once(gated: str) -> None:
    """Threads that need one file that is not open yet wait for one opening of it."""
    with mm_assets.open(gated) as data:
        shards = data._files._shared
        shards.tables -= shards._table_bytes(2, shards.readers.pop(2))
        GatedFileSystem.shut()
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(data[125]["label"])) for _ in range(4)]
        for thread in threads:
            thread.start()
        GatedFileSystem.wait_for(1)
        assert data._files._shared.opening.keys() == {2}
        GatedFileSystem.gate.set()
        for thread in threads:
            thread.join()
        assert found == [125] * 4
        assert not data._files._shared.opening


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("allowed", "expected"), [(256, 64), (1024, 256), (20_000, 2048), (-1, 2048)])
def test_open_files_follow_what_the_process_may_have(
    allowed: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the allowed descriptors, whatever little or unlimited number that is, within sane bounds."""
    limit = resource.RLIM_INFINITY if allowed < 0 else allowed
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert packed_files._most_files() == expected


def test_an_s3_client_has_connections_for_a_batch() -> None:
    """A client gets connections for the ranges of a batch, unless the caller says how many."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    client, _ = filesystem("s3://bucket/key", {"anon": True, "config_kwargs": {"user_agent": "x"}})
    assert client.config_kwargs == {"max_pool_connections": 64, "user_agent": "x"}
    client, _ = filesystem("s3://bucket/key", {"anon": True, "config_kwargs": {"max_pool_connections": 3}})
    assert client.config_kwargs == {"max_pool_connections": 3}
