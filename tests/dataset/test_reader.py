"""Stored bytes out of a dataset: batches of several modalities and files, streams of batches, scans."""

import gc
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.errors import CorruptError
from mm_assets.fields import BytesField, TextField
from mm_assets.formats import byte_source as source
from mm_assets.formats import fast_path
from mm_assets.formats.batch import Bounds
from mm_assets.formats.page_cache import CAN_ADVISE, PAGE, PageCache


@pytest.mark.parametrize("extension", ["mult", "mstr"])
def test_raw_batches_of_several_modalities_and_files(tmp_path, extension):
    """Raw views of all modalities are those of single reads, in the order asked, over files and views."""
    for part in range(3):
        with mm_assets.create(tmp_path / f"{part}.{extension}", {"a": TextField(), "b": TextField()}) as writer:
            for number in range(4):
                values = {"a": f"a{part}{number}", "b": None if number == part else f"b{part}{number}"}
                writer.write(f"{part}-{number}", values)
    with mm_assets.open(tmp_path) as dataset:
        indices = [11, 0, 5, 5, -1, 7]
        found = dataset.read_raw(indices)
        assert list(found) == ["a", "b"]
        for name, views in found.items():
            assert views == [dataset.read_raw([i], [name])[name][0] for i in indices]
        assert None in found["b"]
        view = dataset.select([7, 2])
        assert view.read_raw([1, 0], ["b"]) == {
            "b": [dataset.read_raw([2], ["b"])["b"][0], dataset.read_raw([7], ["b"])["b"][0]]
        }
        assert dataset.read_raw([], ["a"]) == {"a": []}
        with pytest.raises(KeyError):
            dataset.read_raw([0], ["c"])


@pytest.mark.parametrize("extension", ["mult", "mstr"])
def test_raw_batches_in_a_stream(tmp_path, extension):
    """A stream gives what single raw batches give, is one batch ahead, and an error comes behind what is before it."""
    for part in range(2):
        with mm_assets.create(tmp_path / f"{part}.{extension}", {"a": TextField(), "b": TextField()}) as writer:
            for number in range(4):
                writer.write(f"{part}-{number}", {"a": f"a{part}{number}", "b": None if number == part else "b"})
    batches = [[7, 0, 0], np.array([3, -1]), [], range(4)]
    asked: list[int] = []

    def endless():
        for k in itertools.count():
            asked.append(k)
            yield batches[k % 4]

    def failing():
        yield from batches
        raise RuntimeError("no more of these")

    with mm_assets.open(tmp_path) as dataset, mm_assets.open(tmp_path / f"1.{extension}") as one:
        for data in (dataset, dataset.select(range(7, -1, -1)), one):
            given = [[i % len(data) for i in indices] for indices in batches]
            for names in (None, ["b"]):
                assert list(data.stream_raw(given, names)) == [data.read_raw(indices, names) for indices in given]
        stream = dataset.stream_raw(endless())
        assert asked == []
        for k in range(9):
            assert next(stream) == dataset.read_raw(batches[k % 4])
            assert len(asked) == k + 2
        stream.close()
        assert list(dataset.stream_raw([])) == []
        for wrong, error in (([[1], [8], [2]], IndexError), (failing(), RuntimeError)):
            stream = dataset.stream_raw(wrong)
            for indices in batches if error is RuntimeError else [[1]]:
                assert next(stream) == dataset.read_raw(indices)
            with pytest.raises(error):
                next(stream)
            assert list(stream) == []
        with pytest.raises(KeyError):
            dataset.stream_raw(batches, ["c"])
        stream = dataset.stream_raw(batches)
        next(stream)
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError())  # raised where the batch was yielded, and not a batch later
        assert list(stream) == []


@pytest.mark.parametrize("extension", ["mult", "mstr"])
def test_a_raw_scan_gives_every_sample_in_order(tmp_path, extension):
    """Over all files, and of a view its samples only, a scan gives what single raw reads give."""
    for part in range(2):
        with mm_assets.create(tmp_path / f"{part}.{extension}", {"a": TextField(), "b": TextField()}) as writer:
            for number in range(500):
                writer.write(f"{part}-{number}", {"a": f"a{part}{number}", "b": None if number % 3 else f"b{number}"})
    with mm_assets.open(tmp_path) as dataset:
        for data in (dataset, dataset.select(range(999, 100, -2)), dataset.select([])):
            for names in (["b", "a"], ["b"]):
                found = {
                    name: [view for block in data.stream_raw(None, names) for view in block[name]] for name in names
                }
                assert found == {
                    name: [data.read_raw([i], [name])[name][0] for i in range(len(data))] for name in names
                }
        with pytest.raises(KeyError):
            dataset.stream_raw(None, ["c"])


# --- many local files as one ------------------------------------------------------------------------------------------

FIELDS = {"blob": BytesField(), "text": TextField()}
SIZES = (5, 0, 1, 9, 0, 3)  # samples of each file
TOTAL = sum(SIZES)


def value(i: int) -> dict[str, bytes | str | None]:
    """Sample `i` of all: some without a text, some with an empty one."""
    return {"blob": bytes([i]) * (i * 700), "text": None if i % 5 == 2 else "t" * (i % 4)}


@pytest.fixture(scope="module", params=["mult", "mstr"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files, two of them without samples."""
    folder = tmp_path_factory.mktemp(request.param)
    i = 0
    for number, size in enumerate(SIZES):
        with mm_assets.create(folder / f"{number}.{request.param}", FIELDS) as writer:
            for _ in range(size):
                writer.write(f"id{i}", value(i))
                i += 1
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[mm_assets.Dataset, mm_assets.Dataset]]:
    """The files twice: read file by file, and as one."""
    with mm_assets.open(folder) as apart, mm_assets.open(folder) as multi:
        apart._files._shared.may_be_multi_file = False
        multi.read_raw(range(TOTAL))
        assert multi._files.multi_file is not None
        yield apart, multi


def plain(batch: dict[str, list[memoryview | None]]) -> dict[str, list[bytes | None]]:
    return {name: [None if view is None else bytes(view) for view in views] for name, views in batch.items()}


@settings(deadline=None)
@given(
    indices=st.lists(st.integers(-TOTAL, TOTAL - 1), max_size=40),
    names=st.sampled_from([None, ("blob",), ("text",), ("text", "blob"), ()]),
    chosen=st.none() | st.lists(st.integers(0, TOTAL - 1), min_size=1, max_size=30),
)
def test_files_as_one_give_the_same(
    pair: tuple[mm_assets.Dataset, mm_assets.Dataset],
    indices: list[int],
    names: tuple[str, ...] | None,
    chosen: list[int] | None,
) -> None:
    """Whatever indices, modalities and view: files read as one give what files apart give, and what was written."""
    apart, multi = pair
    if chosen is not None:
        apart, multi = apart.select(chosen), multi.select(chosen)
        indices = [i % len(chosen) for i in indices]
    found = plain(multi.read_raw(indices, names))
    assert found == plain(apart.read_raw(indices, names))
    stored = [value(i if chosen is None else chosen[i]) for i in (i % TOTAL if chosen is None else i for i in indices)]
    for name, column in found.items():
        wanted = [one[name] for one in stored]
        assert column == [one.encode() if isinstance(one, str) else one for one in wanted]


def test_files_become_one_once_an_eighth_was_read(folder: Path) -> None:
    """Few reads open few files; no such sample is said as before; a closed dataset reads nothing."""
    with mm_assets.open(sorted(folder.iterdir())) as data:
        data.read_raw([0])
        assert data._files.multi_file is None
        data.read_raw([0, TOTAL - 1])
        assert data._files.multi_file is not None
        with pytest.raises(IndexError, match=f"index {TOTAL} is out of range for {TOTAL} samples"):
            data.read_raw([0, TOTAL])
        with pytest.raises(KeyError):
            data.read_raw([0], ["sound"])
        view = data.select([3, 4])
    assert plain(view.read_raw([1])) == plain(view.read_raw([1]))
    with pytest.raises(ValueError, match="closed"):
        data.read_raw([0])
    view.close()
    with pytest.raises(ValueError, match="closed"):
        view.read_raw([0])


def test_views_outlive_the_files(folder: Path) -> None:
    """Values stay readable after the dataset is closed; other threads continue to read until then."""
    with mm_assets.open(folder) as data:
        found = [data.read_raw(range(TOTAL)) for _ in range(3)]

        def read() -> None:
            while True:
                assert plain(data.read_raw([7, 1]))["text"] == [None, b"t"]

        pool = ThreadPoolExecutor(2)
        reading = [pool.submit(read) for _ in range(2)]
    for future in reading:
        with pytest.raises(ValueError, match="is closed"):
            future.result(timeout=10)
    pool.shutdown()
    for batch in found:
        assert plain(batch)["blob"] == [value(i)["blob"] for i in range(TOTAL)]


def test_without_memory_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the memory budget files are read one by one."""
    monkeypatch.setattr("mm_assets.formats.fast_path.BUDGET", fast_path._Budget(0))
    with mm_assets.open(folder) as data:
        for _ in range(3):
            assert plain(data.read_raw(range(TOTAL)))["blob"] == [value(i)["blob"] for i in range(TOTAL)]
        multi = data._files.multi_file
        assert multi is not None
        assert multi.read(np.arange(3), ["blob"]) is None


def test_damage_stays_that_of_its_file(folder: Path, tmp_path: Path) -> None:
    """A file with a position out of place is named when that sample is read; all other samples are read."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    bad = sorted(tmp_path.iterdir())[3]  # samples 6 to 14
    with mm_assets.open(bad) as one:
        reader = one._files[0]
        place = reader._locate(np.array([4]), [reader.number_of("blob")])
        ptr = int(next(iter(place.values())).ptrs[0])
    data = bytearray(bad.read_bytes())
    at = data.find(ptr.to_bytes(8, "little"))
    assert at > 0
    while at >= 0:
        data[at : at + 8] = (1 << 60).to_bytes(8, "little")
        at = data.find(ptr.to_bytes(8, "little"), at)
    bad.write_bytes(data)
    with mm_assets.open(tmp_path) as found:
        left = fast_path.BUDGET._left
        for _ in range(3):
            with pytest.raises(CorruptError, match=f"{bad.name}.*sample 4"):
                found.read_raw(range(TOTAL), ["blob"])
            others = [i for i in range(TOTAL) if i != 10]
            assert plain(found.read_raw(others, ["blob"]))["blob"] == [value(i)["blob"] for i in others]
        # What the others keep of their own; nothing is held for all of them together.
        assert left - fast_path.BUDGET._left <= fast_path.CachedBounds.nbytes(TOTAL - SIZES[3])


def test_threads_cache_bounds_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that read first at the same moment cache the bounds once, and read right meanwhile."""
    monkeypatch.setattr("mm_assets.formats.fast_path.BUDGET", budget := fast_path._Budget(1 << 20))
    make = fast_path.CachedBounds.__init__

    def slow(self: fast_path.CachedBounds, bounds: Iterable[Bounds], num_samples: int) -> None:
        time.sleep(0.02)
        make(self, bounds, num_samples)

    monkeypatch.setattr(fast_path.CachedBounds, "__init__", slow)
    begin = threading.Barrier(8)

    def read(data: mm_assets.Dataset) -> dict[str, list[bytes | None]]:
        begin.wait()
        for _ in range(5):
            found = data.read_raw(range(TOTAL), ["blob"])
        return plain(found)

    with mm_assets.open(folder) as data:
        with ThreadPoolExecutor(8) as pool:
            for found in pool.map(read, [data] * 8):
                assert found["blob"] == [value(i)["blob"] for i in range(TOTAL)]
        assert data._files.multi_file is not None
        one = fast_path.CachedBounds.nbytes(TOTAL)  # files that are read meanwhile may cache their own, once
        assert one <= (1 << 20) - budget._left <= 2 * one
    gc.collect()
    assert budget._left == 1 << 20


def test_a_view_of_few_samples_opens_few_files(folder: Path) -> None:
    """However often it is read, a small view does not open all files as one; it uses what a larger one has made."""
    with mm_assets.open(sorted(folder.iterdir())) as data:
        view = data.select([0, 1])
        for _ in range(50):
            view.read_raw([0, 1, 1])
        assert view._files.multi_file is None
        data.read_raw(range(TOTAL))
        assert view._files.multi_file is not None
        view.close()


@pytest.mark.skipif(not CAN_ADVISE, reason="the system has no posix_fadvise to ask for pages with")
def test_pages_that_are_not_resident_are_prefetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss prefetches the pages of the whole batch, in each file its own; without one nothing is, with few probes."""
    monkeypatch.setattr(source, "WHOLE_LIMIT", 0)  # no stream is loaded whole
    there, looked = True, 0
    asked: dict[int, set[int]] = {}

    def is_resident(self: PageCache, position: int) -> bool:
        nonlocal looked
        looked += 1
        return there

    def request(self: PageCache, start: int, end: int) -> None:
        asked.setdefault(self._fd, set()).update(range(start // PAGE, -(-end // PAGE)))

    monkeypatch.setattr(PageCache, "is_resident", is_resident)
    monkeypatch.setattr(PageCache, "request", request)
    indices = np.array([17, 3, 5, 12, 0, 8])
    with mm_assets.open(folder) as data:
        for _ in range(200):
            data.read_raw(indices, ["blob"])
        looked, before = 0, dict(asked)
        for _ in range(160):
            data.read_raw(indices, ["blob"])
        assert 5 <= looked <= 20
        assert asked == before
        there = False
        asked.clear()
        for _ in range(32):
            found = data.read_raw(indices, ["blob"])
        found_pages = {os.fstat(fd).st_ino: pages for fd, pages in asked.items()}
        monkeypatch.undo()
        assert plain(found)["blob"] == [value(int(i))["blob"] for i in indices]
        wanted: dict[int, set[int]] = {}
        for number, where, local in data._files._parts(indices):
            reader = data._files[number]
            places = next(iter(reader._locate(local, [reader.number_of("blob")]).values()))
            pages = wanted.setdefault(os.open(reader.path, os.O_RDONLY), set())
            for row, ptr, size in zip(where.tolist(), places.ptrs.tolist(), places.sizes.tolist(), strict=True):
                assert size >= len(value(int(indices[row]))["blob"] or b"")
                pages.update(range(ptr // PAGE, -(-(ptr + size) // PAGE)))
        same = {os.fstat(fd).st_ino: pages for fd, pages in wanted.items()}
        for inode, pages in same.items():
            # The record before the data is not asked for, and may be on a page of its own.
            assert found_pages[inode] <= pages
            assert len(pages) - len(found_pages[inode]) <= len(indices)
        for fd in wanted:
            os.close(fd)
