"""What is asked of the kernel before a file is read: of what is in memory nothing, of what is not all at once."""

from __future__ import annotations

import errno
import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest

from mm_assets.errors import TruncatedError
from mm_assets.formats import MappedFile, ModalitySpec, MstrWriter, MultWriter, Payload, open_reader
from mm_assets.formats import byte_source as source_module
from mm_assets.formats import page_cache as readahead
from mm_assets.formats.fast_path import read_raw, scan_raw
from mm_assets.formats.page_cache import PAGE, REQUEST, PageCache

SPEC = ModalitySpec(name="x", type_id=1, metadata_size=8)


class Kernel:
    """Answers probes from a set of pages, and notes what it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages: set[int] | None = None  # None: all
        self.refuses: int | None = None
        self.probes: list[int] = []
        self.asked: list[tuple[int, int]] = []
        monkeypatch.setattr(readahead, "_NOWAIT", 8)
        monkeypatch.setattr(os, "preadv", self._probe)
        monkeypatch.setattr(os, "posix_fadvise", self._ask)

    def _probe(self, fd: int, buffers: list[bytearray], position: int, flags: int) -> int:
        assert flags == 8
        self.probes.append(position)
        if self.refuses is not None:
            raise OSError(self.refuses, os.strerror(self.refuses))
        if self.pages is not None and position // PAGE not in self.pages:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        return 1

    def _ask(self, fd: int, position: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        self.asked.append((position, size))
        if fd == -1:
            raise OSError(errno.EBADF, "closed")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def arrays(ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of (start, end)."""
    starts, ends = np.array(ranges, np.uint64).reshape(-1, 2).T
    return starts, ends


def test_nothing_is_asked_for_what_is_there(kernel: Kernel) -> None:
    """Of a batch in memory four of 64 ranges are probed, not always the same, and later fewer."""
    cache = PageCache(3)
    starts, ends = arrays([(k * PAGE, k * PAGE + 10) for k in range(64)])
    seen = set()
    for _ in range(64):
        cache.fetch(starts, ends)
        assert len(kernel.probes) == 4
        seen |= set(kernel.probes)
        kernel.probes.clear()
    assert len(seen) > 32
    cache.fetch(starts, ends)
    assert len(kernel.probes) == 1
    assert kernel.asked == []


def test_a_miss_asks_for_the_whole_batch(kernel: Kernel) -> None:
    """One missing page makes it ask for all ranges, once a page, those that touch together."""
    kernel.pages = set(range(100)) - {5}
    cache = PageCache(3)
    # In any order; two in one page, two in neighbouring pages, one within another, one over three requests.
    ranges = [(90_000, 90_001), (5 * PAGE, 5 * PAGE + 1), (6 * PAGE - 2, 7 * PAGE), (2 * PAGE, 2 * PAGE + 3)]
    ranges += [(2 * PAGE + 100, 2 * PAGE + 200), (1 << 20, (1 << 20) + 2 * REQUEST + 1)]
    for fetch in (
        lambda: cache.fetch(*arrays(ranges)),
        lambda: cache.fetch_ranges([(start, end - start) for start, end in ranges]),
    ):
        kernel.asked.clear()
        fetch()
        last = [(1 << 20, REQUEST), ((1 << 20) + REQUEST, REQUEST), ((1 << 20) + 2 * REQUEST, PAGE)]
        assert kernel.asked == [(2 * PAGE, PAGE), (5 * PAGE, 2 * PAGE), (90_000 // PAGE * PAGE, PAGE), *last]
    # After a miss all four are looked at again.
    kernel.pages = None
    kernel.probes.clear()
    cache.fetch(*arrays([(k, k) for k in range(64)]))
    assert len(kernel.probes) == 4


def test_matrices_and_nothing(kernel: Kernel) -> None:
    """Ranges of several modalities come as matrices; no range at all asks nothing."""
    kernel.pages = set()
    cache = PageCache(3)
    cache.fetch(*arrays([]))
    cache.fetch_ranges([])
    assert (kernel.probes, kernel.asked) == ([], [])
    starts = np.array([[0, 8 * PAGE], [PAGE, 20 * PAGE]], np.uint64)
    cache.fetch(starts, starts + np.uint64(PAGE))
    assert kernel.asked == [(0, 2 * PAGE), (8 * PAGE, PAGE), (20 * PAGE, PAGE)]


def test_single_ranges(kernel: Kernel) -> None:
    """A single read is probed; when nothing was missed for long only every eighth is, until one is missed again."""
    cache = PageCache(3)
    for _ in range(64):
        cache.fetch_one(0, 3 * PAGE)
    assert len(kernel.probes) == 64
    for _ in range(80):
        cache.fetch_one(0, 3 * PAGE)
    assert len(kernel.probes) == 74
    kernel.pages = set()
    for _ in range(8):
        cache.fetch_one(100, 3 * PAGE)
    assert kernel.asked[0] == (100, 3 * PAGE - 100)
    asked = len(kernel.asked)
    cache.fetch_ranges([(PAGE, 2 * PAGE)])
    assert kernel.asked[asked:] == [(PAGE, 2 * PAGE)]


def test_long_ranges(kernel: Kernel) -> None:
    """Of a long range several positions are probed: its first page may be there alone."""
    cache = PageCache(3)
    cache.fetch_one(0, 4 * REQUEST)
    assert kernel.probes == [0, REQUEST, 2 * REQUEST, 3 * REQUEST]
    assert kernel.asked == []
    kernel.pages = {0}
    cache.fetch_one(0, 4 * REQUEST)
    assert kernel.asked == [(k * REQUEST, REQUEST) for k in range(4)]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_where_residency_is_unknown(kernel: Kernel, code: int) -> None:
    """A file system that refuses the probe is asked once whether it can, and then every batch is asked for."""
    kernel.refuses = code
    cache = PageCache(3)
    for _ in range(3):
        cache.fetch(*arrays([(0, 1), (2 * PAGE, 2 * PAGE + 1)]))
    assert len(kernel.probes) == 1
    assert kernel.asked == 3 * [(0, PAGE), (2 * PAGE, PAGE)]


def test_a_kernel_without_such_reads(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python knows no such read, every batch is asked for without a probe."""
    monkeypatch.setattr(readahead, "_NOWAIT", None)
    PageCache(3).fetch(*arrays([(0, 1)]))
    assert (kernel.probes, kernel.asked) == ([], [(0, PAGE)])


def test_closed(kernel: Kernel) -> None:
    """Once the file is closed nothing is asked of its descriptor, which may be another file's, and nothing raises."""
    kernel.pages = set()
    cache = PageCache(3)
    cache.forget()
    cache.fetch(*arrays([(0, 1)]))
    kernel.refuses = errno.EBADF
    cache.fetch(*arrays([(0, 1)]))
    assert kernel.asked == [(0, PAGE)]


@pytest.mark.parametrize("writer", [MultWriter, MstrWriter])
def test_without_advice(tmp_path: Path, writer: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system takes no advice the same is read."""
    with writer(tmp_path / "x", [SPEC], fsync=False) as file:
        for k in range(5):
            file.write(str(k), {"x": Payload(bytes(8), bytes([k]) * 20_000)})
    monkeypatch.setattr(source_module, "CAN_ADVISE", False)
    monkeypatch.setattr(readahead, "CAN_ADVISE", False)
    with open_reader(tmp_path / "x") as reader:
        assert [bytes(view) for view in read_raw(reader, [4, 1], ["x"])["x"]] == [b"\x04" * 20_000, b"\x01" * 20_000]
        assert sum(len(block["x"]) for block in scan_raw(reader, ["x"])) == 5
        assert reader.read_payload(2, "x").data == b"\x02" * 20_000
        assert reader.presence("x").all()
        assert reader.verify().ok


def cold(path: Path) -> None:
    """Puts a file out of memory, or skips the test where the file system keeps it."""
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    there = PageCache(fd).is_resident(path.stat().st_size // 2)
    os.close(fd)
    if there or not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this file system or kernel does not evict a file's pages, or does not report residency")


@pytest.mark.parametrize("writer", [MultWriter, MstrWriter])
def test_a_cold_file(tmp_path: Path, writer: type) -> None:
    """A batch of a cold file brings its pages, and not the file; a scan brings all of it."""
    path = tmp_path / "x"
    rng = np.random.default_rng(1)
    payloads = [rng.bytes(100_000) for _ in range(200)]
    with writer(path, [SPEC], num_samples=200) as file:
        for k, data in enumerate(payloads):
            file.write(str(k), {"x": Payload(bytes(8), data)})
    cold(path)
    indices = [150, 20, 77]
    with open_reader(path) as reader:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        probe = PageCache(fd)
        found = read_raw(reader, indices, ["x"])["x"]
        places = reader._locate(np.arange(200), [0])[0]
        positions = [int(places.ptrs[k]) + 50_000 for k in range(200)]
        deadline = time.monotonic() + 120
        while not all(probe.is_resident(positions[k]) for k in indices) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(probe.is_resident(positions[k]) for k in indices)
        assert sum(probe.is_resident(position) for position in positions) < 60
        assert [bytes(view) for view in found] == [payloads[k] for k in indices]
        everything = [view for block in scan_raw(reader, ["x"]) for view in block["x"]]
        while not all(probe.is_resident(position) for position in positions) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(probe.is_resident(position) for position in positions)
        assert [bytes(view) for view in everything] == payloads
        os.close(fd)


def test_truncated_while_opened(tmp_path: Path) -> None:
    """A file that is truncated between the stat of its size and the first read is refused, not a signal."""
    path = tmp_path / "x"
    with MultWriter(path, [SPEC], fsync=False) as file:
        for k in range(5):
            file.write(str(k), {"x": Payload(bytes(8), bytes(20_000))})
    source = MappedFile(path)
    os.truncate(path, 50_000)
    with pytest.raises(TruncatedError, match="truncated after it was opened"):
        open_reader(source)
    source.close()


def test_descriptors(tmp_path: Path) -> None:
    """A mapped file that is dropped unclosed releases its descriptors, and one that is closed does so at once."""
    (tmp_path / "x").write_bytes(bytes(100))
    gc.collect()  # the collection below must not close what earlier tests dropped
    before = len(os.listdir("/proc/self/fd"))
    source = MappedFile(tmp_path / "x")
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before
    source = MappedFile(tmp_path / "x")
    del source
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(IsADirectoryError):
        MappedFile(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
