"""The rows of the tables: what is measured, in which state of the page cache, and against which limit.

A measurement runs in a process of its own, with everything imported that it needs. What a candidate returns is
touched, in the same way for all: of raw reads a byte of every page of each payload, and its last byte; of decoded
batches a pixel of the first and of the last row of every image, and the last value of every sound. So no candidate
gains by returning what it has not looked up, or read, yet.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from benchmarks.loading.adapters import make_adapter
from benchmarks.loading.adapters.base import BATCH, SIDE, Adapter, Decoded, Indices, Unsupported
from benchmarks.loading.corpus import AUDIO_SAMPLES, MODALITIES, Corpus

WARM_UP_SECONDS = 0.3  # of a rate: page tables, caches of the processor, threads
DECODED_WARM_UP_SECONDS = 1.0  # workers have a queue of batches filled by then
SETTLE_SECONDS = 0.3  # libraries' threads turn for a while after their import, and take a core meanwhile
OPENINGS = 9  # of a small dataset, before one is timed: the interpreter specializes code that it has seen a few times
COLD_SECONDS = 0.3  # later, what the disk has read ahead is measured and not the reading
PAGE = 4096  # bytes
PREPARED_INDICES = 1 << 20  # indices drawn before the clock runs; then they repeat

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The arguments of one measuring process.

    Attributes:
        candidate: its name.
        folder: its files.
        tiny: files of the same candidate with few samples, to load code with; they are never evicted.
        scratch: an empty folder on the same disk, to write into.
        corpus: the samples.
        seed: of orders; the round's number.
        num_large: samples of the large files.
        seconds: how long a rate is measured; decoding takes three times as long.
    """

    candidate: str
    folder: str
    tiny: str
    scratch: str
    corpus: str
    seed: int
    num_large: int
    seconds: float

    def adapter(self, folder: str | None = None) -> Adapter:
        """The candidate on its files or on others, with its imports done."""
        adapter = make_adapter(self.candidate, Path(folder or self.folder))
        adapter.prepare()
        return adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row.

    Attributes:
        title: in the report.
        unit: of the value.
        cache: what is in the page cache when the process starts: all of the candidate's files, or none.
        limits: the candidates that values are divided by, round by round.
        measure: gives the value; None where it needs no process.
        files: the candidate's files that are read: as packed first, with images at training size, or of many samples.
        rising: whether more is better.
    """

    title: str
    unit: str
    cache: Literal["warm", "cold", "any"]
    limits: tuple[str, ...] = ()
    measure: Callable[[Task], float] | None
    files: Literal["full", "stored", "large"] = "full"
    rising: bool = True


# --- touching ---------------------------------------------------------------------------------------------------------

_FIRST, _LAST, _PAGES = itemgetter(0), itemgetter(-1), itemgetter(slice(None, None, PAGE))


def touch_raw(columns: Sequence[Any]) -> int:
    """Read a byte of each page of every payload, and its last byte; the number of samples."""
    for column in columns:
        if isinstance(column, np.ndarray):  # padded rows
            column[:, 0].sum() + column[:, -1].sum()
            continue
        deque(map(_LAST, column), maxlen=0)
        if max(map(len, column)) > PAGE:
            deque(map(bytes, map(_PAGES, column)), maxlen=0)
        else:
            deque(map(_FIRST, column), maxlen=0)
    return len(columns[0])


def touch_decoded(batch: Decoded) -> int:
    """Read of every image and sound; the number of samples."""
    count = len(batch.image)
    expected = ((count, SIDE, SIDE, 3), (count, AUDIO_SAMPLES), count)
    found = (tuple(batch.image.shape), tuple(batch.audio.shape), len(batch.text))
    if found != expected:
        raise ValueError(f"a decoded batch of shapes {found}, expected {expected}")
    batch.image[:, 0, 0].sum() + batch.image[:, -1, -1].sum()
    batch.audio[:, -1].sum()
    return count


# --- measuring --------------------------------------------------------------------------------------------------------


def _rate(passes: Callable[[], Iterator[T]], touch: Callable[[T], int], *, warm_up: float, seconds: float) -> float:
    """Samples per second, over as many passes as it takes."""
    stream = itertools.chain.from_iterable(passes() for _ in itertools.count())
    clock = time.perf_counter
    begin = clock()
    while clock() - begin < warm_up:
        touch(next(stream))
    count, begin = 0, clock()
    while True:
        count += touch(next(stream))
        elapsed = clock() - begin
        if elapsed >= seconds:
            return count / elapsed


def _random_batches(num_samples: int, seed: int) -> list[Indices]:
    """Batches of permutations, one after the other, until enough indices are drawn."""
    generator = np.random.default_rng(seed)
    whole = max(num_samples // BATCH, 1)
    size = min(BATCH, num_samples)
    batches: list[Indices] = []
    while len(batches) * BATCH < PREPARED_INDICES:
        order = generator.permutation(num_samples)[: whole * size].astype(np.int64)
        batches += list(order.reshape(whole, size))
    return batches


def _num_samples(task: Task) -> int:
    return len(Corpus(Path(task.corpus)))  # also for candidates that do not know it


def _random(modalities: Sequence[str]) -> Callable[[Task], float]:
    def measure(task: Task) -> float:
        batches = _random_batches(_num_samples(task), task.seed)
        adapter = task.adapter()
        adapter.open()
        return _rate(
            lambda: adapter.random(modalities, batches), touch_raw, warm_up=WARM_UP_SECONDS, seconds=task.seconds
        )

    return measure


def _sequential(modalities: Sequence[str]) -> Callable[[Task], float]:
    def measure(task: Task) -> float:
        adapter = task.adapter()
        adapter.open()
        return _rate(lambda: adapter.sequential(modalities), touch_raw, warm_up=WARM_UP_SECONDS, seconds=task.seconds)

    return measure


def _cold_random(task: Task) -> float:
    batches = _random_batches(_num_samples(task), task.seed)
    tiny = task.adapter(task.tiny)
    tiny.open()
    next(tiny.random(MODALITIES, [np.arange(8)]))
    adapter = task.adapter()
    time.sleep(SETTLE_SECONDS)
    adapter.open()
    count, begin, elapsed = 0, time.perf_counter(), 0.0
    # Samples that come a second time would not be cold: few samples are over sooner.
    for columns in adapter.random(MODALITIES, batches[: max(_num_samples(task) // BATCH, 1)]):
        count += touch_raw(columns)
        elapsed = time.perf_counter() - begin
        if elapsed >= COLD_SECONDS:
            break
    return count / elapsed


def _decoded(mode: str) -> Callable[[Task], float]:
    def measure(task: Task) -> float:
        adapter = task.adapter()
        adapter.open()
        return _rate(
            lambda: adapter.decoded(mode, seed=task.seed),
            touch_decoded,
            warm_up=DECODED_WARM_UP_SECONDS,
            seconds=3 * task.seconds,
        )

    return measure


def _first_batch(task: Task) -> float:
    adapter = task.adapter()
    time.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    adapter.open()
    touch_decoded(next(adapter.decoded("exact", seed=task.seed)))
    return 1e3 * (time.perf_counter() - begin)


def _open(task: Task) -> float:
    for _ in range(OPENINGS):  # whatever is imported or compiled then
        tiny = task.adapter(task.tiny)
        tiny.open()
        len(tiny)
        tiny.close()
    adapter = task.adapter()
    begin = time.perf_counter()
    adapter.open()
    len(adapter)
    return 1e3 * (time.perf_counter() - begin)


def _claim_pages(path: Path, size: int) -> None:
    """Fill pages of the page cache and free them at once: a virtual machine may have to get them from its host first.

    That takes several times as long as writing into them, and which candidate meets it is chance. Not more than a
    tenth of the memory, or the kernel begins to write to the disk.
    """
    block = bytes(4 << 20)
    with path.open("wb", buffering=0) as file:
        for _ in range(0, size, len(block)):
            file.write(block)
    path.unlink()


def _write(*, encoded: bool) -> Callable[[Task], float]:
    def measure(task: Task) -> float:
        first, target = Path(task.scratch, "first"), Path(task.scratch, "target")
        adapter = task.adapter(str(target))
        if adapter.shares is not None:
            raise Unsupported(f"has the files of {adapter.shares}")
        if adapter.reencodes:
            raise Unsupported("re-encodes images")
        corpus = Corpus(Path(task.corpus))
        samples: Any = list(corpus)
        begun: Any = samples[:BATCH]
        pack, pack_first = adapter.pack, task.adapter(str(first)).pack
        if encoded:
            samples, begun = adapter.encode(samples), adapter.encode(begun)
            pack, pack_first = adapter.pack_encoded, task.adapter(str(first)).pack_encoded
        for folder in (first, target):
            folder.mkdir()
        pack_first(begun)  # whatever is imported or compiled at the first writing
        _claim_pages(first / "claimed", corpus.num_bytes * 3 // 2)
        begin = time.perf_counter()
        pack(samples)
        seconds = time.perf_counter() - begin
        shutil.rmtree(task.scratch)
        return corpus.num_bytes / seconds / 1e9

    return measure


ROWS: dict[str, Row] = {
    "random_all": Row(
        title="Random, image, text and audio, raw, batches of 64",
        unit="samples/s",
        cache="warm",
        limits=("limit-rows", "limit-columns"),
        measure=_random(MODALITIES),
    ),
    "random_image_text": Row(
        title="Random, image and text, raw, batches of 64",
        unit="samples/s",
        cache="warm",
        limits=("limit-rows", "limit-columns"),
        measure=_random(("image", "text")),
    ),
    "random_text": Row(
        title="Random, text only, raw, batches of 64",
        unit="samples/s",
        cache="warm",
        limits=("limit-rows", "limit-columns"),
        measure=_random(("text",)),
    ),
    "sequential_all": Row(
        title="Sequential, image, text and audio, raw",
        unit="samples/s",
        cache="warm",
        limits=("limit-rows", "limit-columns"),
        measure=_sequential(MODALITIES),
    ),
    "sequential_text": Row(
        title="Sequential, text only, raw",
        unit="samples/s",
        cache="warm",
        limits=("limit-rows", "limit-columns"),
        measure=_sequential(("text",)),
    ),
    "decoded_exact": Row(
        title="Batches of 64 for training, images decoded in full and resized to 224 x 224, two cores",
        unit="samples/s",
        cache="warm",
        limits=("limit-libjpeg-turbo",),
        measure=_decoded("exact"),
    ),
    "decoded_fast": Row(
        title="The same, images decoded at a fraction where that is large enough",
        unit="samples/s",
        cache="warm",
        limits=("limit-libjpeg-turbo",),
        measure=_decoded("fast"),
    ),
    "decoded_stored": Row(
        title="The same, images stored at 224 x 224, so that nothing is resized",
        unit="samples/s",
        cache="warm",
        limits=("limit-libjpeg-turbo",),
        measure=_decoded("stored"),
        files="stored",
    ),
    "decoded_crop": Row(
        title="The same, a random crop of each image resized to 224 x 224",
        unit="samples/s",
        cache="warm",
        limits=("limit-libjpeg-turbo",),
        measure=_decoded("crop"),
    ),
    "first_batch": Row(
        title="From open to the first batch for training (exact)",
        unit="ms",
        cache="warm",
        measure=_first_batch,
        rising=False,
    ),
    "cold_random": Row(
        title="Random, image, text and audio, raw, batches of 64: the first 0.3 s with nothing in the page cache",
        unit="samples/s",
        cache="cold",
        limits=("limit-advised",),
        measure=_cold_random,
    ),
    "open_warm": Row(title="Opening, files in the page cache", unit="ms", cache="warm", measure=_open, rising=False),
    "open_cold": Row(title="Opening, nothing in the page cache", unit="ms", cache="cold", measure=_open, rising=False),
    "open_large_warm": Row(
        title="Opening a file of many samples, in the page cache",
        unit="ms",
        cache="warm",
        measure=_open,
        files="large",
        rising=False,
    ),
    "open_large_cold": Row(
        title="Opening a file of many samples, nothing in the page cache",
        unit="ms",
        cache="cold",
        measure=_open,
        files="large",
        rising=False,
    ),
    "write": Row(
        title="Writing from memory, without waiting for the disk",
        unit="GB/s",
        cache="any",
        limits=("limit-rows", "limit-columns"),
        measure=_write(encoded=False),
    ),
    "write_encoded": Row(
        title="Writing bytes that are encoded already, without waiting for the disk",
        unit="GB/s",
        cache="any",
        limits=("limit-rows", "limit-columns"),
        measure=_write(encoded=True),
    ),
    "size": Row(title="Size of the files over that of the payloads", unit="%", cache="any", measure=None, rising=False),
}
