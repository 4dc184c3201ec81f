"""A batch of one small modality reads no bytes of the others: not their pages, nor their ranges of a remote file."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import mm_assets
from mm_assets import Dataset, MultimodalLoader
from mm_assets.errors import CorruptError
from mm_assets.fields import BytesField, TextField

NUM_TEXTS = 24
SIZES = {"image": 300_000, "sound": 290_000}  # bytes; more than what a read of neighbours would rather fetch than skip
PAGE = mmap.PAGESIZE
FORMS = ("mult", "mstr")


def content(name: str, i: int) -> bytes:
    """The bytes of a large modality, unlike any other's."""
    return np.random.default_rng([i, SIZES[name]]).bytes(SIZES[name])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By format, samples of an image and a sound of some 300 KB, each fourth one without a sound, and a text."""
    folder = tmp_path_factory.mktemp("selective")
    found = {form: folder / f"x.{form}" for form in FORMS}
    for path in found.values():
        fields = {"image": BytesField(), "text": TextField(), "sound": BytesField()}
        with mm_assets.create(path, fields, num_samples=NUM_TEXTS, fsync=False) as writer:
            for i in range(NUM_TEXTS):
                sound = None if i % 4 == 3 else content("sound", i)
                writer.write(str(i), {"image": content("image", i), "text": f"the text of {i:02}", "sound": sound})
    return found


def spans(path: Path) -> list[tuple[int, int]]:
    """Where the other modalities' payloads are in a file: [start, stop) of each, found by their bytes."""
    whole = path.read_bytes()
    found = []
    for i in range(NUM_TEXTS):
        for name in SIZES:
            start = whole.find(content(name, i))
            if start >= 0:
                found.append((start, start + SIZES[name]))
    assert len(found) == NUM_TEXTS + NUM_TEXTS * 3 // 4
    return found


def texts_of(data: Dataset, **options: Any) -> dict[int, str]:
    loader = MultimodalLoader(data, ["text"], 5, **options)
    return {i: text for batch in loader for i, text in zip(batch["index"].tolist(), batch["text"], strict=True)}


TEXTS = {i: f"the text of {i:02}" for i in range(NUM_TEXTS)}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_other_bytes_may_be_anything(files: dict[str, Path], form: str, num_workers: int, tmp_path: Path) -> None:
    """With all else overwritten the texts are the same, checksums checked; reading the rest raises an error."""
    whole = bytearray(files[form].read_bytes())
    for start, stop in spans(files[form]):
        whole[start:stop] = b"\xee" * (stop - start)
    path = tmp_path / f"overwritten.{form}"
    path.write_bytes(whole)
    with mm_assets.open(path, verify=True) as data:
        assert texts_of(data, num_workers=num_workers) == TEXTS
        assert [bytes(raw or b"").decode() for raw in data.read_raw(range(NUM_TEXTS), ["text"])["text"]] == list(
            TEXTS.values()
        )
        assert data.presence("sound").tolist() == [i % 4 != 3 for i in range(NUM_TEXTS)]
        for name in SIZES:
            with pytest.raises(CorruptError, match=f"modality '{name}'"):
                next(iter(MultimodalLoader(data, [name, "text"], 5)))


def resident(path: Path) -> np.ndarray:
    """Of each page of a file whether it is in memory, without paging any in.

    Skips on systems whose C library has no `mincore`, and on file systems for which it fails: which pages were read
    cannot be observed there in any other way.
    """
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError):
        pytest.skip("the C library has no mincore: residency of pages cannot be observed")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(view) // PAGE), np.uint8)
        args = (ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), ctypes.c_void_p(pages.ctypes.data))
        failed = mincore(*args)
        del view
        if failed:
            pytest.skip(f"mincore failed on this file system: {os.strerror(ctypes.get_errno())}")
    return (pages & 1).astype(bool)


def evict(path: Path) -> None:
    """Has the kernel drop a file's pages.

    Skips where it does not: on systems without `posix_fadvise`, and on tmpfs, where the pages are the file. A test that
    began with cached pages would pass whatever is read.
    """
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("no posix_fadvise: pages cannot be dropped")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if resident(path).mean() > 0.01:
        pytest.skip("the file system keeps dropped pages, as tmpfs does")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_no_page_of_another_modality_is_read(files: dict[str, Path], form: str, num_workers: int) -> None:
    """From disk, a shuffled pass over the texts leaves every page that is only of images and sounds where it is."""
    path = files[form]
    others = np.zeros(len(resident(path)), bool)
    for start, stop in spans(path):
        others[-(-start // PAGE) : stop // PAGE] = True
    evict(path)
    with mm_assets.open(path) as data:
        opened = resident(path)
        assert opened.sum() * PAGE <= 16 * 4096  # the file's two ends, where payloads may be too
        assert texts_of(data, num_workers=num_workers) == TEXTS
        read = resident(path) & ~opened
        assert read.any()
        assert (read & others).sum() == 0
        bytes(data.read_raw([0], ["image"])["image"][0] or b"")  # what would be noticed: the pages of one image
        assert (resident(path) & ~opened & others).sum() >= SIZES["image"] // PAGE - 4


class NotingFileSystem(MemoryFileSystem):
    """Files in memory; every range that is asked for is noted."""

    protocol = "noted"
    cachable = False
    ranges: ClassVar[list[tuple[int, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("noted://", "memory://", 1))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Notes one range; a whole file is one too."""
        size = self.info(path)["size"]
        self.ranges.append((start or 0, size if end is None else end))
        return super().cat_file(path, start, end)


@pytest.fixture
def remote(files: dict[str, Path]) -> Iterator[dict[str, str]]:
    """The URLs of the same files behind `NotingFileSystem`."""
    fsspec.register_implementation("noted", NotingFileSystem, clobber=True)
    memory = fsspec.filesystem("memory")
    for form, path in files.items():
        memory.pipe_file(f"/selective/x.{form}", path.read_bytes())
    NotingFileSystem.ranges.clear()
    yield {form: f"noted://selective/x.{form}" for form in files}
    memory.rm("/selective", recursive=True)


@pytest.mark.parametrize("form", FORMS)
def test_no_range_of_another_modality_is_asked_for(files: dict[str, Path], remote: dict[str, str], form: str) -> None:
    """From a bucket, a shuffled pass over the texts asks for no image or sound, and for few bytes besides."""
    middles = [(start + stop) // 2 for start, stop in spans(files[form])]
    with mm_assets.open(remote[form]) as data:
        assert texts_of(data, num_workers=2) == TEXTS
        asked = list(NotingFileSystem.ranges)
        assert asked
        assert [m for m in middles if any(start <= m < stop for start, stop in asked)] == []
        assert sum(stop - start for start, stop in asked) < 0.1 * files[form].stat().st_size
        NotingFileSystem.ranges.clear()
        data.read_raw([0], ["image"])
        assert any(start <= middles[0] < stop for start, stop in NotingFileSystem.ranges)
