"""The bounded cache of remote files' blocks on local disk."""

import errno
import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.errors import ConfigError, SourceError
from mm_assets.fields import BytesField, ScalarField
from mm_assets.storage import disk_cache
from mm_assets.storage import files as source_files
from mm_assets.storage.disk_cache import BLOCK, BlockCache, CachedFile
from mm_assets.storage.files import SourceFile

# Of later Pythons, where there are threads: that is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

SIZE = 10 * BLOCK + 777
CONTENT = np.random.default_rng(0).bytes(SIZE)
ROOM = 16 << 20  # the smallest bound


@pytest.fixture(autouse=True)
def remote() -> Iterator[str]:
    """A remote file of ten blocks and a part of one."""
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/cached/x.bin", CONTENT)
    yield "memory://cached/x.bin"
    memory.rm("/cached", recursive=True)


class Fetches:
    """What `SourceFile` has been asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[tuple[int, int]]] = []
        real = SourceFile.read_ranges

        def counted(source: SourceFile, ranges: Any, *, max_gap: int | None = None) -> list[memoryview]:
            self.calls.append(list(ranges))
            return real(source, ranges, max_gap=max_gap)

        monkeypatch.setattr(SourceFile, "read_ranges", counted)

    def take(self) -> list[list[tuple[int, int]]]:
        """The calls since the last look."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Fetches:
    return Fetches(monkeypatch)


def opened(url: str, folder: Path, size: int = ROOM) -> CachedFile:
    file = BlockCache(str(folder), size).over(SourceFile(url))
    assert isinstance(file, CachedFile)
    return file


def used(folder: Path) -> int:
    """Bytes that a folder takes on disk."""
    files = [os.path.join(path, name) for path, _, names in os.walk(folder) for name in names]
    return sum(os.stat(file).st_blocks * 512 for file in files)


NUMBERS = count()
RANGES = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, 3 * BLOCK)).map(lambda r: (r[0], min(r[1], SIZE - r[0]))), max_size=6
)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> BlockCache:
    return BlockCache(str(tmp_path_factory.mktemp("roomy")), 1 << 30)


@settings(deadline=None, max_examples=30)
@given(reads=st.lists(RANGES, max_size=3), gap=st.sampled_from([0, BLOCK, 5 * BLOCK]))
def test_ranges_are_returned_as_asked(roomy: BlockCache, reads: list[list[tuple[int, int]]], gap: int) -> None:
    """Whatever ranges are read, first and again, each comes back with its own bytes."""
    source = SourceFile("memory://cached/x.bin")
    source.fingerprint = str(next(NUMBERS))  # another file to the cache
    file = CachedFile(source, roomy)
    for ranges in reads + reads:
        views = file.read_ranges(ranges, max_gap=gap)
        assert [bytes(view) for view in views] == [CONTENT[offset : offset + size] for offset, size in ranges]


def test_what_was_read_is_not_fetched_again(remote: str, tmp_path: Path, fetches: Fetches) -> None:
    """A block is fetched once, by whole blocks in one call; also another object, as of a later run, finds it."""
    file = opened(remote, tmp_path)
    file.read_ranges([(5, 10), (BLOCK - 5, 10), (6 * BLOCK, 100)], max_gap=0)
    assert fetches.take() == [[(0, 2 * BLOCK), (6 * BLOCK, BLOCK)]]
    file.read_ranges([(0, 2 * BLOCK), (7 * BLOCK - 1, 1)])
    opened(remote, tmp_path).read_ranges([(BLOCK, BLOCK)])
    assert fetches.take() == []
    file.read_ranges([(0, SIZE)])
    assert fetches.take() == [[(2 * BLOCK, 4 * BLOCK), (7 * BLOCK, SIZE - 7 * BLOCK)]]
    file.read_ranges([(SIZE - 1, 1), (SIZE, 0)])
    assert fetches.take() == []


def test_gaps_between_near_blocks_are_cached_too(remote: str, tmp_path: Path, fetches: Fetches) -> None:
    """Blocks that came with a merged request are not fetched a second time."""
    file = opened(remote, tmp_path)
    file.read_ranges([(0, 1), (4 * BLOCK, 1), (9 * BLOCK, 1)], max_gap=3 * BLOCK)
    assert fetches.take() == [[(0, 5 * BLOCK), (9 * BLOCK, BLOCK)]]
    assert bytes(file.read_ranges([(BLOCK, 3 * BLOCK)])[0]) == CONTENT[BLOCK : 4 * BLOCK]
    assert fetches.take() == []


def test_a_changed_object_gives_its_new_bytes(remote: str, tmp_path: Path) -> None:
    """An object that was replaced by another of the same size is never read from blocks of the old one."""
    assert bytes(opened(remote, tmp_path).read_ranges([(0, SIZE)])[0]) == CONTENT
    fsspec.filesystem("memory").pipe_file("/cached/x.bin", CONTENT[::-1])
    assert bytes(opened(remote, tmp_path).read_ranges([(0, SIZE)])[0]) == CONTENT[::-1]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


TABLE = disk_cache._TABLE_SIZE


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: [flip(path, TABLE + slot * BLOCK + 500) for slot in range(0, 11, 2)],
        lambda path: [flip(path, slot * TABLE // disk_cache._SLOTS + 9) for slot in range(0, 11, 2)],
        lambda path: os.truncate(path, TABLE + 5 * BLOCK - 1),
        lambda path: os.truncate(path, TABLE // 2),
        lambda path: path.write_bytes(b"no cache at all" * 100_000),
        lambda path: path.write_bytes(b"\xff" * 1_000_000),
        Path.unlink,
    ],
    ids=["blocks flipped", "table flipped", "blocks truncated", "table truncated", "text", "ones", "removed"],
)
def test_damaged_blocks_are_fetched_again(remote: str, tmp_path: Path, fetches: Fetches, damage: Any) -> None:
    """A segment that was flipped, truncated, replaced or removed costs requests, never wrong bytes, and is repaired."""
    opened(remote, tmp_path).read_ranges([(0, SIZE)])
    (segment,) = tmp_path.iterdir()
    damage(segment)
    fetches.take()
    file = opened(remote, tmp_path)
    assert bytes(file.read_ranges([(0, SIZE)])[0]) == CONTENT
    if damage is not Path.unlink:  # of a part of the segment only what was lost
        assert sum(size for ranges in fetches.take() for _, size in ranges) >= 5 * BLOCK + 777
    fetches.take()
    assert bytes(file.read_ranges([(0, SIZE)])[0]) == CONTENT
    assert fetches.take() == []


def test_blocks_that_changed_places_are_noticed(remote: str, tmp_path: Path) -> None:
    """A whole block in the slot of another one is not taken for it."""
    opened(remote, tmp_path).read_ranges([(0, SIZE)])
    (segment,) = tmp_path.iterdir()
    data = segment.read_bytes()
    table, first, second, rest = np.split(np.frombuffer(data, np.uint8), [TABLE, TABLE + BLOCK, TABLE + 2 * BLOCK])
    segment.write_bytes(b"".join(part.tobytes() for part in (table, second, first, rest)))
    assert bytes(opened(remote, tmp_path).read_ranges([(0, SIZE)])[0]) == CONTENT


@pytest.mark.parametrize("operation", ["write", "read", "seek"])
def test_a_full_or_broken_disk_is_reported_once(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Where the folder's disk is full or fails, reads use the storage, and one warning says why."""
    opened(remote, tmp_path).read_ranges([(0, BLOCK)])
    file = opened(remote, tmp_path)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_cache._Segment, operation, fail, raising=False)
    with pytest.warns(RuntimeWarning, match="No space left on device; blocks are read from the storage") as caught:
        reads = [bytes(file.read_ranges([(5, SIZE - 5)])[0]) for _ in range(3)]
    assert reads == [CONTENT[5:]] * 3
    assert len(caught) == 1


def test_a_segment_that_cannot_be_opened(remote: str, tmp_path: Path) -> None:
    """A folder in place of a segment is reported once, and reads go on."""
    file = opened(remote, tmp_path)
    (tmp_path / "segment-0").mkdir()
    with pytest.warns(RuntimeWarning, match=rf"{tmp_path}: the cache cannot be used: Is a directory") as caught:
        reads = [bytes(file.read_ranges([(0, SIZE)])[0]) for _ in range(2)]
    assert reads == [CONTENT] * 2
    assert len(caught) == 1


def test_another_size_keeps_most(large: list[str], tmp_path: Path, fetches: Fetches) -> None:
    """A larger bound moves only the blocks of the new segments; a smaller one removes the segments beyond it."""
    for size, least in ((4 * ROOM, 0), (5 * ROOM, 9), (4 * ROOM, 9), (ROOM, 2)):
        opened(large[0], tmp_path, size).read_ranges([(0, 14 << 20)])
        fetched = sum(n for ranges in fetches.take() for _, n in ranges)
        assert fetched <= (14 - least) << 20
        assert {path.name for path in tmp_path.iterdir()} == {f"segment-{k}" for k in range(size // ROOM)}


@pytest.fixture
def large() -> Iterator[list[str]]:
    """Two remote files of 14 MiB, each of which fits the smallest bound."""
    memory = fsspec.filesystem("memory")
    for name in "ab":
        memory.pipe_file(f"/large/{name}", np.random.default_rng(ord(name)).bytes(14 << 20))
    yield ["memory://large/a", "memory://large/b"]
    memory.rm("/large", recursive=True)


def test_the_bound_holds(large: list[str], tmp_path: Path, fetches: Fetches) -> None:
    """However much is read, by several files and threads, the folder stays below its bound, and is made use of."""

    def read(url: str, seed: int) -> None:
        file = opened(url, tmp_path)
        for start in np.random.default_rng(seed).permutation(14).tolist():
            file.read_ranges([(start << 20, 1 << 20)])
            sizes.append(used(tmp_path))

    sizes: list[int] = []
    threads = [threading.Thread(target=read, args=(url, k)) for k, url in enumerate(large)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(sizes) <= ROOM
    assert max(sizes) >= ROOM // 2
    fetched = sum(size for ranges in fetches.take() for _, size in ranges)
    assert fetched == 28 << 20


def test_blocks_of_this_run_are_not_evicted(large: list[str], tmp_path: Path, fetches: Fetches) -> None:
    """Of a file larger than the bound each epoch finds what the first one kept: as much as there is room for."""
    file = opened(large[0], tmp_path)
    file._cache.put(b"other" * 3, dict.fromkeys(range(60), memoryview(bytes(BLOCK))))
    fetched = []
    for seed in range(3):
        for start in np.random.default_rng(seed).permutation(14).tolist():
            file.read_ranges([(start << 20, 1 << 20)])
        fetched.append(sum(size for ranges in fetches.take() for _, size in ranges))
    assert fetched[0] == 14 << 20
    assert fetched[1] == fetched[2] <= 4 << 20


def test_blocks_of_earlier_runs_are_evicted(large: list[str], tmp_path: Path, fetches: Fetches) -> None:
    """A later run on another file keeps its own blocks; earlier ones are evicted, and are right when fetched again."""
    opened(large[0], tmp_path).read_ranges([(0, 11 << 20)])
    later = opened(large[1], tmp_path)
    later.read_ranges([(0, 6 << 20)])
    fetches.take()
    later.read_ranges([(0, 6 << 20)])
    assert fetches.take() == []
    assert used(tmp_path) <= ROOM
    again = opened(large[0], tmp_path).read_ranges([(0, 11 << 20)])[0]
    assert bytes(again) == fsspec.filesystem("memory").cat_file("/large/a")[: 11 << 20]


def test_processes_share_it(tmp_path: Path) -> None:
    """Processes that fill one folder at a time all get right bytes, and the bound holds for all together."""
    code = (
        "import sys, numpy as np, fsspec\n"
        "from mm_assets.storage.disk_cache import BlockCache\n"
        "from mm_assets.storage.files import SourceFile\n"
        "content = np.random.default_rng(int(sys.argv[2]) // 2).bytes(7 << 20)\n"
        "fs = fsspec.filesystem('memory')\n"
        "url = f'memory://p/{int(sys.argv[2]) // 2}'\n"
        "fs.pipe_file(url, content)\n"
        "file = BlockCache(sys.argv[1], 16 << 20).over(SourceFile(url))\n"
        "for k in np.random.default_rng(0).permutation(28).tolist():\n"
        "    at = k << 18\n"
        "    assert bytes(file.read_ranges([(at, 1 << 18)])[0]) == content[at : at + (1 << 18)]\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "c")]
    children = [subprocess.Popen([*command, str(k)], stderr=subprocess.PIPE) for k in range(3)]
    errors = [child.communicate(timeout=200)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], errors
    assert used(tmp_path / "c") <= ROOM


def test_it_pickles(remote: str, tmp_path: Path, fetches: Fetches) -> None:
    """A copy uses the same folder, and keeps to what belongs to this run, also in a spawned process."""
    cache = BlockCache(str(tmp_path), ROOM)
    cache.over(SourceFile(remote)).read_ranges([(0, SIZE)])
    cache.put(b"m" * 16, {k: memoryview(bytes([k]) * BLOCK) for k in range(3)})
    copy = pickle.loads(pickle.dumps(cache))
    assert (copy.folder, copy.size, copy._since) == (cache.folder, cache.size, cache._since)
    fetches.take()
    assert bytes(copy.over(SourceFile(remote)).read_ranges([(0, SIZE)])[0]) == CONTENT
    assert fetches.take() == []
    code = "import pickle, sys; c = pickle.load(sys.stdin.buffer); print(dict(c.get(b'm' * 16, range(9))).keys())"
    command = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(command, input=pickle.dumps(cache), capture_output=True, check=True, timeout=200)
    assert found.stdout == b"dict_keys([0, 1, 2])\n"


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_shares_it(remote: str, tmp_path: Path, fetches: Fetches) -> None:
    """A child, a copy made in it and a cache that it opens find what the parent stored, and the parent theirs."""
    cache = BlockCache(str(tmp_path), ROOM)
    file = cache.over(SourceFile(remote))
    file.read_ranges([(0, 1)])
    fetches.take()
    child = os.fork()
    if child == 0:
        files = [file]
        for one in (cache, pickle.loads(pickle.dumps(cache)), BlockCache(str(tmp_path), ROOM)):
            files.append(one.over(SourceFile(remote)))
        right = all(bytes(one.read_ranges([(5, BLOCK)])[0]) == CONTENT[5 : 5 + BLOCK] for one in files)
        os._exit(0 if right and fetches.calls == [[(BLOCK, BLOCK)]] else 1)
    assert status_of(child) == 0
    assert bytes(file.read_ranges([(0, 2 * BLOCK)])[0]) == CONTENT[: 2 * BLOCK]
    assert fetches.take() == []


def test_forks_during_storing(remote: str, tmp_path: Path) -> None:
    """Children that are forked while other threads read and store can read, and the parent finds all it has stored."""
    cache = BlockCache(str(tmp_path), 64 << 20)
    file = cache.over(SourceFile(remote))
    stored: list[bytes] = []
    ended = threading.Event()

    def store() -> None:
        while not ended.is_set() and len(stored) < 300:
            mark = len(stored).to_bytes(16, "little")
            cache.put(mark, {k: memoryview(bytes([k]) * 100) for k in range(3)})
            stored.append(mark)

    def read() -> None:
        while not ended.is_set():
            file.read_ranges([(0, SIZE)])

    threads = [threading.Thread(target=run) for run in (store, read)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                os._exit(0 if bytes(file.read_ranges([(0, SIZE)])[0]) == CONTENT else 1)
            assert status_of(child) == 0
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    found = [dict(cache.get(mark, range(3))) for mark in stored]
    assert all(content == bytes([k]) * 100 for one in found for k, content in one.items())
    assert sum(map(len, found)) >= 2.7 * len(stored)  # two that take one slot at the same time lose a block


def test_a_block_of_this_run_does_not_keep_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older blocks make room although one that came first counts as this run's, as after the clock was set back."""
    block = memoryview(bytes(BLOCK))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1000)
    BlockCache(str(tmp_path), ROOM).put(b"o" * 16, {0: block})
    monkeypatch.setattr(time, "time", lambda: now)
    BlockCache(str(tmp_path), ROOM).put(b"o" * 16, dict.fromkeys(range(250), block))
    monkeypatch.setattr(time, "time", lambda: now + 10)
    later = BlockCache(str(tmp_path), ROOM)
    later.put(b"n" * 16, dict.fromkeys(range(40), block))
    assert len(list(later.get(b"n" * 16, range(40)))) == 40
    assert len(list(later.get(b"o" * 16, [0]))) == 1


def test_a_block_that_is_there_is_not_stored_again(tmp_path: Path) -> None:
    """What is fetched with other blocks and is cached already does not become this run's: it is still evicted."""
    block = memoryview(bytes(BLOCK))
    BlockCache(str(tmp_path), ROOM).put(b"o" * 16, {0: block})
    cache = BlockCache(str(tmp_path), ROOM)
    cache.put(b"o" * 16, {0: block, 1: block})
    assert [number for number, _ in cache.get(b"o" * 16, range(3))] == [0, 1]
    cache.put(b"n" * 16, dict.fromkeys(range(300), block))
    assert [number for number, _ in cache.get(b"o" * 16, range(3))] == [1]
    assert len(list(cache.get(b"n" * 16, range(300)))) == 254


def test_a_file_that_changes_while_it_is_read(remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file replaced while open is detected at the next request to the storage; blocks cached until then stay."""
    file = opened(remote, tmp_path)
    file.read_ranges([(0, 1)])
    monkeypatch.setattr(disk_cache, "_RECHECK", 0.0)
    file.read_ranges([(BLOCK, 0), (9 * BLOCK, 1)])
    monkeypatch.setattr(disk_cache, "_RECHECK", 60.0)
    fsspec.filesystem("memory").pipe_file("/cached/x.bin", CONTENT[::-1])
    file.read_ranges([(BLOCK, 1), (3 * BLOCK, 1)])
    monkeypatch.setattr(disk_cache, "_RECHECK", 0.0)
    for _ in range(2):
        with pytest.raises(SourceError, match=r"cached/x\.bin: has changed while it was read"):
            file.read_ranges([(2 * BLOCK, 1)])
    # Which of the two files the others are of is unknown.
    assert [number for number, _ in file._cache.get(file._key, range(11))] == [0]
    assert bytes(opened(remote, tmp_path).read_ranges([(0, SIZE)])[0]) == CONTENT[::-1]


def test_a_restored_version(remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were read of another version are not taken for the first one's when that is put back."""
    memory = fsspec.filesystem("memory")
    info = type(memory).info

    def tagged(fs: Any, path: str, **options: Any) -> dict[str, Any]:
        return {**info(fs, path, **options), "ETag": hashlib.md5(fs.cat_file(path)).hexdigest()}

    monkeypatch.setattr(type(memory), "info", tagged)
    file = opened(remote, tmp_path)
    memory.pipe_file("/cached/x.bin", CONTENT[::-1])
    file.read_ranges([(0, SIZE)])
    memory.pipe_file("/cached/x.bin", CONTENT)
    assert SourceFile(remote).fingerprint == file._source.fingerprint
    assert bytes(opened(remote, tmp_path).read_ranges([(0, SIZE)])[0]) == CONTENT


def test_servers_are_distinguished(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetches: Fetches
) -> None:
    """One URL on two servers is two files to the cache, whatever else the options say, such as other keys."""
    real = source_files.filesystem
    monkeypatch.setattr(source_files, "filesystem", lambda url, _: real(url, None))
    servers = [
        {},
        {"endpoint_url": "http://a"},
        {"endpoint_url": "http://b"},
        {"client_kwargs": {"endpoint_url": "http://b"}},
        {"host": "a", "port": 1},
    ]
    cache = BlockCache(str(tmp_path), ROOM)
    for options in servers:
        for key in ("one", "other"):
            cache.over(SourceFile(remote, {**options, "secret": key})).read_ranges([(0, 1)])
    assert len(fetches.take()) == len(servers)


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_verifying_one_file_reads_the_storage(form: str, tmp_path: Path) -> None:
    """Damage of a dataset's only file in the storage is found although the cache has the sound bytes."""
    with mm_assets.create(tmp_path / f"x.{form}", {"blob": BytesField()}) as writer:
        for i in range(10):
            writer.write(str(i), {"blob": bytes([i + 1]) * 5000})
    memory = fsspec.filesystem("memory")
    content = (tmp_path / f"x.{form}").read_bytes()
    memory.pipe_file(f"/cached/x.{form}", content)
    with mm_assets.open(f"memory://cached/x.{form}", cache_dir=tmp_path / "c", cache_size=ROOM) as data:
        assert [data[i]["blob"] for i in range(10)] == [bytes([i + 1]) * 5000 for i in range(10)]
        assert data.verify().ok
        # In place: the storage reports no change.
        memory.store[f"/cached/x.{form}"].getbuffer()[content.index(b"\x05" * 5000) + 7] = 6
        assert [damage.sample for damage in data.verify().damage] == [4]


def test_wrong_arguments(remote: str, tmp_path: Path) -> None:
    """A bound that is too small, a folder that is a file, and storage that reports no change are refused by name."""
    for size in (0, ROOM - 1, True, 1e9):
        with pytest.raises(ConfigError, match=r"cache_size.*16777216"):
            mm_assets.open(remote, cache_dir=tmp_path, cache_size=size)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match="file: cannot be used as a cache"):
        BlockCache(str(tmp_path / "file"), ROOM)
    source = SourceFile(remote)
    source.fingerprint = "5-unmarked"
    with pytest.raises(SourceError, match=r"x\.bin: cannot be cached"):
        BlockCache(str(tmp_path / "c"), ROOM).over(source)


def test_a_dataset_reads_through_it(tmp_path: Path, fetches: Fetches) -> None:
    """A second epoch asks the storage for nothing, a second run only for what opening must know; verifying asks it."""
    memory = fsspec.filesystem("memory")
    for k in range(3):
        with mm_assets.create(tmp_path / "x.mult", {"blob": BytesField(), "k": ScalarField("int32")}) as writer:
            for i in range(40):
                writer.write(f"{k}-{i}", {"blob": bytes([k, i]) * 5000, "k": 40 * k + i})
        memory.pipe_file(f"/cached/d/{k}.mult", (tmp_path / "x.mult").read_bytes())
    for _ in range(2):
        with mm_assets.open("memory://cached/d", cache_dir=tmp_path / "c", cache_size=ROOM) as data:
            for _ in range(2):
                loader = mm_assets.MultimodalLoader(data, batch_size=16, seed=3)
                for batch in loader:
                    assert batch["k"].tolist() == batch["index"].tolist()
                fetched = fetches.take()
            assert fetched == []
            assert data.verify().ok
            assert fetches.take() != []
    with mm_assets.open("memory://cached/d", cache_dir=tmp_path / "c", cache_size=ROOM) as data:
        list(mm_assets.MultimodalLoader(pickle.loads(pickle.dumps(data)), batch_size=16))
    assert fetches.take() == []
    shutil.rmtree(tmp_path / "c")
