"""Files by ranges, and files that appear whole or not at all."""

import errno
import hashlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import infer_storage_options
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import SourceError, TruncatedError
from mm_assets.storage import remote
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import ShardKind, expand_shards
from mm_assets.storage.ranges import MAX_REQUEST
from mm_assets.storage.remote import RemoteFile
from mm_assets.storage.staged import StagedStore
from mm_assets.storage.store import PublishedFile, Snapshot, Store
from mm_assets.storage.urls import storage_errors, storage_fault

CONTENT = bytes(i * 7 % 251 for i in range(5000))


@pytest.fixture
def local_file(tmp_path: Path) -> Path:
    path = tmp_path / "x.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def memory_file() -> str:
    fsspec.filesystem("memory").pipe_file("/shards/x.bin", CONTENT)
    return "memory://shards/x.bin"


@settings(deadline=None, max_examples=60)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 4999), st.integers(0, 600)).filter(lambda r: sum(r) <= 5000), max_size=12),
    gap=st.integers(0, 700),
)
def test_ranges_are_returned_as_asked(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple[int, int]], gap: int
) -> None:
    """Whatever ranges are asked for, each comes back with its own bytes, local and remote alike."""
    path = tmp_path_factory.mktemp("ranges") / "x.bin"
    path.write_bytes(CONTENT)
    fsspec.filesystem("memory").pipe_file("/ranges/x.bin", CONTENT)
    expected = [CONTENT[o : o + s] for o, s in ranges]
    for url in (str(path), "memory://ranges/x.bin"):
        with SourceFile(url) as source:
            assert [bytes(v) for v in source.read_ranges(ranges, max_gap=gap)] == expected
            buffer = bytearray(sum(s for _, s in ranges))
            positions = [sum(s for _, s in ranges[:k]) for k in range(len(ranges))]
            source.read_into(ranges, memoryview(buffer), positions)
            assert bytes(buffer) == b"".join(expected)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that are asked of fsspec's file system in memory, as they come."""
    ranges: list[tuple[int, int]] = []
    fs = type(fsspec.filesystem("memory"))
    real = fs.cat_ranges

    def counting(self: Any, paths: list[str], starts: list[int], ends: list[int], **options: Any) -> Any:
        ranges.extend(zip(starts, ends, strict=True))
        return real(self, paths, starts, ends, **options)

    monkeypatch.setattr(fs, "cat_ranges", counting)
    return ranges


def test_near_ranges_are_one_request_and_no_byte_is_fetched_twice(
    memory_file: str, asked: list[tuple[int, int]]
) -> None:
    """Overlapping and near ranges are merged; far ones are not."""
    with SourceFile(memory_file) as source:
        source.read_ranges([(0, 10), (5, 10), (20, 10), (1000, 10), (0, 10)], max_gap=16)
    assert asked == [(0, 30), (1000, 1010)]


def test_merged_requests_stay_bounded(tmp_path: Path) -> None:
    """Adjacent ranges are not merged past the size that one request may hold."""
    path = tmp_path / "big.bin"
    with path.open("wb") as file:
        file.truncate(3 * MAX_REQUEST)
    half = MAX_REQUEST // 2 + 1
    with SourceFile(str(path)) as source:
        views = source.read_ranges([(k * half, half) for k in range(4)])
    assert max(len(view.obj) for view in views) <= MAX_REQUEST


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, -1), (4999, 2), (6000, 0), (2**63, 2**63)])
def test_a_range_outside_the_file_is_refused(local_file: Path, offset: int, size: int) -> None:
    """A range that leaves the file is an error that names the file, not a short read."""
    with SourceFile(str(local_file)) as source:
        for read in (lambda: source.read(offset, size), lambda: source.read_ranges([(offset, size)])):
            with pytest.raises(SourceError, match=r"x\.bin.*5000 bytes"):
                read()


def test_a_file_that_shrinks_is_reported(local_file: Path) -> None:
    """A file that is truncated after it was opened gives an error and not missing bytes."""
    with SourceFile(str(local_file)) as source:
        os.truncate(local_file, 100)
        with pytest.raises(SourceError, match="truncated while being read"):
            source.read(50, 100)


def test_a_stream_gives_every_byte_once(local_file: Path, memory_file: str) -> None:
    """Reading sequentially gives the file's content."""
    for url in (str(local_file), memory_file):
        with SourceFile(url) as source:
            assert source.stream().read() == CONTENT


@pytest.mark.parametrize("url", ["nowhere/x.tar", "memory://nowhere/x.tar"])
def test_a_missing_file_is_named(tmp_path: Path, url: str) -> None:
    """Opening what is not there names it."""
    with pytest.raises(SourceError, match=r"x\.tar"):
        SourceFile(url if "://" in url else str(tmp_path / url))


def test_an_unknown_scheme_is_named() -> None:
    """A URL whose scheme no file system has is an error of the library that names the URL and the scheme."""
    with pytest.raises(SourceError, match=r"s4://bucket/x\.tar: s4:// is not known"):
        SourceFile("s4://bucket/x.tar")


def test_a_server_that_is_not_reached_is_not_a_missing_name() -> None:
    """The message says what the client said, where fsspec's own error has the URL alone."""
    with pytest.raises(SourceError, match=r"not found \(Client\w+: Cannot connect"):
        SourceFile("http://127.0.0.1:1/x.tar")


def test_a_fingerprint_changes_with_the_content(local_file: Path) -> None:
    """A rewritten file has another fingerprint, even when it keeps its size."""
    before = SourceFile(str(local_file)).fingerprint
    time.sleep(0.01)
    local_file.write_bytes(CONTENT[::-1])
    assert SourceFile(str(local_file)).fingerprint != before


def test_shards_of_a_folder_a_glob_and_a_file(tmp_path: Path) -> None:
    """A folder gives the shards below it; a glob and a path give what they name; hidden files never count."""
    for name in ("a/s-1.tar", "a/b/s-2.tar.gz", "a/.s-3.tar", "a/readme.txt", "a/s-4.tgz"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")

    def names(pattern: str) -> list[str]:
        found = expand_shards(str(tmp_path / pattern), kinds=[ShardKind("tar", (".tar", ".tar.gz", ".tgz"))])
        return [shard.url.rsplit("/", 1)[-1] for shard in found.shards]

    assert names("a") == ["s-2.tar.gz", "s-1.tar", "s-4.tgz"]
    assert names("a/*") == ["readme.txt", "s-1.tar", "s-4.tgz"]
    assert names("a/s-1.tar") == ["s-1.tar"]
    assert names("nowhere") == []


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path / "root") if request.param == "local" else f"memory://root-{tmp_path.name}")


def test_a_published_file_is_whole(store: Store) -> None:
    """What is published can be read back, with its size and digest."""
    with store.draft("a/b.json") as draft:
        draft.path.write_bytes(b"hello")
    published = draft.result()
    assert store.read_bytes("a/b.json") == b"hello"
    assert (published.path, published.size, published.sha256[:8]) == ("a/b.json", 5, "2cf24dba")
    assert store.sizes("a") == {"a/b.json": 5}
    assert store.exists("a/b.json")
    assert store.size("a/none") is None
    store.delete("a/b.json")
    store.delete("a/b.json")
    assert not store.exists("a/b.json")


def test_a_failed_draft_leaves_nothing(store: Store) -> None:
    """An exception while a file is built leaves neither the file nor a part of it, and keeps the one that was there."""
    store.write_bytes("a/x", b"old")

    def build() -> None:
        with store.draft("a/x") as draft:
            draft.path.write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()
    assert store.read_bytes("a/x") == b"old"
    assert store.sizes("a") == {"a/x": 3}
    if store.is_local:
        assert os.listdir(store.path_of("a")) == ["x"]


def test_a_draft_may_be_named_by_its_content(store: Store) -> None:
    """A file can take its digest into its name."""
    with store.draft("p/x.mult") as draft:
        draft.path.write_bytes(b"hello")
        draft.name = f"p/x.{draft.digest()[:8]}.mult"
    assert store.sizes("p") == {"p/x.2cf24dba.mult": 5}
    assert draft.result().path == "p/x.2cf24dba.mult"


def test_a_digest_is_that_of_the_last_content(store: Store) -> None:
    """A file that changes after its digest was asked for is published with the digest of what it became."""
    with store.draft("x") as draft:
        draft.path.write_bytes(b"first")
        first = draft.digest()
        draft.path.write_bytes(b"and then more")
    assert draft.result().sha256 == hashlib.sha256(b"and then more").hexdigest() != first


def test_two_writers_of_one_file_write_it_whole(tmp_path: Path) -> None:
    """Each of two writers of one file builds it apart: the file is that of the last, and nothing else stays."""
    store = Store(str(tmp_path))
    with store.draft("x") as draft:
        draft.path.write_bytes(b"first")
        store.write_bytes("x", b"second")
        assert store.read_bytes("x") == b"second"
    assert store.read_bytes("x") == b"first"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("root", ["local", "memory://created"])
def test_a_file_is_created_once(tmp_path: Path, root: str) -> None:
    """Of several writers that create a file one succeeds, and the file is that of this one."""
    store = Store(str(tmp_path) if root == "local" else f"{root}/{tmp_path.name}")
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda n: store.create("records/x", b"%d" % n), range(8 if root == "local" else 1)))
    assert created.count(True) == 1
    assert store.read_bytes("records/x") == b"%d" % created.index(True)
    assert not store.create("records/x", b"another")
    assert list(store.sizes("records")) == ["records/x"]


def test_an_upload_that_another_writer_wins_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without S3's conditions creates the file only if there is none by then."""
    store = Store(f"memory://created/{tmp_path.name}-race")
    store.write_bytes("x", b"first")
    monkeypatch.setattr(store, "exists", lambda _: False)  # it was asked before the first one was written
    assert not store.create("x", b"second")
    assert store.create("x", b"first")  # its own upload, repeated by the client
    assert store.read_bytes("x") == b"first"


def test_a_large_file_is_uploaded_with_its_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of very many partitions is compared and swapped as a short one is: an upload in parts has no condition."""
    store, asked = Store("s3://bucket/root", {"anon": True}), list[tuple[str, dict[str, Any]]]()

    async def call(method: str, **options: Any) -> dict[str, Any]:
        asked.append((method, {name: value for name, value in options.items() if name != "Body"}))
        return {"ETag": '"1"'}

    monkeypatch.setattr(store.fs, "_call_s3", call)
    content = bytes(101 << 20)
    assert store.create("x", content)
    assert store.replace(Snapshot(name="x", content=b"", etag='"0"'), content) == '"1"'
    assert store.write_bytes("x", content) == '"1"'
    at = {"Bucket": "bucket", "Key": "root/x"}
    conditions: list[dict[str, str]] = [{"IfNoneMatch": "*"}, {"IfMatch": '"0"'}, {}]
    assert asked == [("put_object", at | condition) for condition in conditions]


def test_a_file_that_cannot_be_deleted_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that refuses is reported as any other fault of it; a missing file is none."""

    def refuse(*_: object) -> None:
        raise PermissionError("denied")

    store.delete("missing")
    monkeypatch.setattr(type(store.fs), "rm_file", refuse)
    with pytest.raises(SourceError, match="x: cannot be deleted: "):
        store.delete("x")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_names_of_new_folders_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder in which a file or folder was made is synced."""
    synced: set[Path] = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(Path(f"/proc/self/fd/{fd}").readlink()))
    Store(str(tmp_path / "a")).write_bytes("b/x", b"1")
    assert synced >= {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}


def test_files_are_deleted_together(tmp_path: Path) -> None:
    """Files that are named are deleted, those that are missing are passed over, and others stay."""
    store = Store(str(tmp_path))
    for name in ("a/x", "a/y", "b/z"):
        store.write_bytes(name, b"1")
    store.delete_all(["a/x", "a/missing", "b/z"])
    assert [*store.sizes("a"), *store.sizes("b")] == ["a/y"]


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_a_file_with_two_names_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_hard_links: bool
) -> None:
    """A file that is published once more is young, and stays when its first name is deleted."""

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links")

    store = Store(str(tmp_path))
    with store.draft("first/a") as draft:
        draft.path.write_bytes(b"content")
    os.utime(tmp_path / "first" / "a", (0, 0))
    with monkeypatch.context() as patch:
        if not has_hard_links:
            patch.setattr(os, "link", refused)
        for _ in range(2):
            linked = store.link(draft.result(), "second/b")
    assert linked == PublishedFile(path="second/b", size=7, sha256=hashlib.sha256(b"content").hexdigest())
    assert (tmp_path / "first" / "a").samefile(tmp_path / "second" / "b") == has_hard_links
    assert time.time() - (store.modified("second/b") or 0) < 3600
    store.delete("first/a")
    assert store.read_bytes("second/b") == b"content"
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["b"]
    with pytest.raises(SourceError, match="first/a: cannot be published as third/c"):
        store.link(draft.result(), "third/c")


def test_a_refreshed_file_is_young(tmp_path: Path) -> None:
    """A file that is refreshed has its content and a new time; a missing one is an error."""
    store = Store(str(tmp_path))
    store.write_bytes("x", b"1")
    os.utime(tmp_path / "x", (1, 1))
    assert store.modified("x") == 1
    store.refresh(["x"])
    assert store.modified("x") > 1_000_000_000
    assert store.read_bytes("x") == b"1"
    with pytest.raises(SourceError, match="missing: cannot be kept"):
        store.refresh(["missing"])


class GoogleError(Exception):
    """As gcsfs raises one: the status is its `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"HTTP {code}")
        self.code = code


class AzureError(Exception):
    """As the client of Azure raises one."""

    def __init__(self, status_code: int) -> None:
        super().__init__(f"HTTP {status_code}")
        self.status_code = status_code


@pytest.mark.parametrize("kind", [GoogleError, AzureError])
@pytest.mark.parametrize(
    ("status", "fault"), [(429, "slow_down"), (503, "slow_down"), (502, "unavailable"), (404, None)]
)
def test_what_may_pass_is_known_of_other_clouds(
    kind: type[GoogleError | AzureError], status: int, fault: str | None
) -> None:
    """The replies of object stores other than S3 that may pass are tried again, and others are not."""
    with pytest.raises(SourceError) as raised, storage_errors("gs://bucket/x", "cannot be read"):
        raise kind(status)
    assert storage_fault(raised.value) == fault


def test_a_killed_writer_leaves_nothing_visible_and_nothing_in_the_way(tmp_path: Path) -> None:
    """After a writer is killed in the middle, no file stands under the final name and the next writer succeeds."""
    code = (
        "import os, signal, sys; from mm_assets.storage.store import Store\n"
        "with Store(sys.argv[1]).draft('a/x') as d:\n"
        "    d.path.write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    store = Store(str(tmp_path))
    assert store.sizes("a") == {}
    store.write_bytes("a/x", b"whole")
    assert store.sizes("a") == {"a/x": 5}
    (leftover,) = store.leftovers("a")
    store.delete_all([leftover])
    assert os.listdir(tmp_path / "a") == ["x"]


def test_a_remote_file_gives_views_and_fetches_blocks_once(memory_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small look-ups in one block cost one request, and views hold the right bytes across block borders."""
    monkeypatch.setattr(RemoteFile, "BLOCK", 512)
    remote = RemoteFile(memory_file)
    calls: list[object] = []
    real = SourceFile.read_ranges
    monkeypatch.setattr(
        SourceFile, "read_ranges", lambda self, ranges, **kw: (calls.append(ranges), real(self, ranges, **kw))[1]
    )
    assert bytes(remote.view(10, 20)) == CONTENT[10:30]
    assert bytes(remote.view(40, 20)) == CONTENT[40:60]
    assert len(calls) == 1
    assert bytes(remote.view(500, 40)) == CONTENT[500:540]
    assert [bytes(v) for v in remote.view_many([(0, 5), (4000, 1000)])] == [CONTENT[:5], CONTENT[4000:]]
    with pytest.raises(TruncatedError):
        remote.view_many([(4999, 2)])


def test_look_up_blocks_of_all_files_are_bounded_together(memory_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many remote files are looked into, what is kept of them stays within one bound, and closing frees it."""
    monkeypatch.setattr(RemoteFile, "BLOCK", 512)
    monkeypatch.setattr(remote, "_BLOCKS", kept := remote._Blocks(2048))
    files = [RemoteFile(memory_file) for _ in range(3)]
    for offset in (10, 600, 1200, 4990, 10):
        for file in files:
            assert bytes(file.view(offset, 5)) == CONTENT[offset : offset + 5]
            assert kept._size == sum(map(len, kept._cached.values())) <= 2048
    for file in files:
        file.close()
    assert (kept._size, kept._cached) == (0, {})


class DisconnectedError(Exception):
    """Such as an HTTP library raises: no `OSError`."""


@pytest.mark.parametrize("call", ["cat_file", "cat_ranges", "info"])
def test_whatever_a_storage_raises_is_reported(memory_file: str, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """An error of a client's own type is a `SourceError` that names the file and the error, from every way to read."""
    source = SourceFile(memory_file)

    def fail(*_: Any, **__: Any) -> None:
        raise DisconnectedError("gone")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), call, fail)
    reads: dict[str, Callable[[], Any]] = {
        "cat_file": lambda: source.read(0, 5),
        "cat_ranges": lambda: source.read_ranges([(0, 5)]),
        "info": lambda: SourceFile(memory_file),
    }
    with pytest.raises(SourceError, match=r"x\.bin.*: cannot be read: DisconnectedError: gone") as caught:
        reads[call]()
    assert isinstance(caught.value.__cause__, DisconnectedError)


def test_a_remote_folder_is_not_a_file(memory_file: str) -> None:
    """A folder's URL is reported as what it is, and not as storage that fails."""
    with pytest.raises(SourceError, match=r"^memory://shards: is a folder, expected a file$"):
        SourceFile(memory_file.rsplit("/", 1)[0])


def test_a_short_reply_is_not_a_truncated_file(memory_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer bytes than asked for are damage of the file only if the storage says that it has become smaller."""
    memory = fsspec.filesystem("memory")
    remote = RemoteFile(memory_file)
    real = type(memory).cat_file
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "cat_file", lambda fs, path, start, end: real(fs, path, start, end)[:-1])
        with pytest.raises(SourceError, match=r"x\.bin.*the storage gave 99 of 100 bytes"):
            remote.view_many([(0, 100)])
        with pytest.raises(SourceError, match=r"x\.bin.*the storage gave 99 of 100 bytes"):
            SourceFile(memory_file).read(0, 100)
    memory.pipe_file(memory_file, CONTENT[:50])
    with pytest.raises(TruncatedError, match=rf"50 of 100 bytes: the file has 50 bytes, it had {len(CONTENT)}"):
        remote.view_many([(0, 100)])


class HostedFileSystem(MemoryFileSystem):
    """Knows its server by the URL's host, as those do that cannot make a URL with it from a path."""

    protocol = "hosted"
    store: ClassVar[dict[str, Any]] = {}

    def __init__(self, host: str, **options: Any) -> None:
        super().__init__(**options)
        self.host = host

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(infer_storage_options(path)["path"]) if "://" in path else path

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {"host": infer_storage_options(path)["host"]}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The host, over and over."""
        return (self.host.encode() * 1000)[start:end]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of later Pythons, if others left threads
def test_a_url_keeps_its_host() -> None:
    """A pickled copy and a forked child read from the host of the URL that was given, and hosts are distinguished."""
    fsspec.register_implementation("hosted", HostedFileSystem, clobber=True)
    HostedFileSystem(host="a").pipe_file("/d/x.bin", bytes(100))
    remote = RemoteFile("hosted://a/d/x.bin")
    assert bytes(pickle.loads(pickle.dumps(remote)).view(0, 3)) == b"aaa"
    source = SourceFile("hosted://a/d/x.bin")
    child = os.fork()
    if child == 0:
        os._exit(0 if source.read(0, 3) == b"aaa" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert source.identity == SourceFile("hosted://a/d/x.bin").identity
    assert source.identity != SourceFile("hosted://b/d/x.bin").identity


def test_empty_ranges_are_not_asked_for(memory_file: str, local_file: Path, asked: list[tuple[int, int]]) -> None:
    """An empty range, for which HTTP has no word, is answered without a request, alone and among others."""
    for url in (memory_file, str(local_file)):
        with SourceFile(url) as source:
            assert source.read_ranges([(7, 0), (5000, 0)]) == [b"", b""]
            assert source.read_ranges([(5000, 0), (4990, 10), (0, 0)]) == [b"", CONTENT[4990:], b""]
    assert asked == [(4990, 5000)]


def test_a_staged_store_refreshes_what_is_not_here(tmp_path: Path) -> None:
    """Of files that are kept young, those that an earlier run uploaded are refreshed in the remote store."""
    remote = Store(f"memory://created/{tmp_path.name}-staged")
    remote.write_bytes("rows/old", b"1")
    written = remote.modified("rows/old")
    staged = StagedStore(remote, tmp_path)
    staged.write_bytes("rows/new", b"2")
    staged.refresh(["rows/old", "rows/new"])
    assert remote.read_bytes("rows/new") == b"2"
    assert written is not None
    assert (remote.modified("rows/old") or 0.0) > written
