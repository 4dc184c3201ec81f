"""What the machine allows: bare loops over known offsets, and over the decoder.

No checks, no index on disk, no missing values, no checksums: a format can come near. One that has the next batch on its
way while one is used can come past those that do not.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks.loading.adapters.base import BATCH, CORES, SIDE, Adapter, Columns, Decoded, Indices
from benchmarks.loading.corpus import AUDIO_SAMPLES, MODALITIES, Corpus, Sample, pixels_at
from benchmarks.loading.decoding import DECODING_MODULES, ImageDecoder

ALIGNMENT = 8
WRITE_BYTES = 4 << 20  # joined to one write
SCAN = 1024  # samples in one run of a scan


def _write_parts(path: os.PathLike[str], parts: Iterable[bytes]) -> None:
    """A bare loop of joined writes."""
    with open(path, "wb", buffering=0) as file:
        group: list[bytes] = []
        size = 0
        for part in parts:
            group += [part, bytes(-len(part) % ALIGNMENT)]
            size += len(part)
            if size >= WRITE_BYTES:
                file.write(b"".join(group))
                group, size = [], 0
        file.write(b"".join(group))


class RowBlob(Adapter):
    """Samples one after the other in one file; a loop of slices over a mapping."""

    name: ClassVar[str] = "limit-rows"
    kind: ClassVar[str] = "limit"
    takes_bytes: ClassVar[bool] = True

    def _order(self, samples: Sequence[Sample]) -> Iterable[bytes]:
        return itertools.chain.from_iterable(samples)

    def _starts(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Position of each payload: (N, 3) for sizes (N, 3) that include the fill."""
        flat = sizes.ravel()
        return np.asarray((flat.cumsum() - flat).reshape(sizes.shape), np.int64)

    def pack(self, samples: Sequence[Sample]) -> None:
        """Write the payloads, and beside them a table of their sizes."""
        _write_parts(self.folder / "data.bin", self._order(samples))
        np.save(self.folder / "sizes.npy", np.array([[len(part) for part in sample] for sample in samples], np.int64))

    def open(self) -> None:
        """Map the file; the offsets are known, as Python integers, before anything is read."""
        sizes = np.load(self.folder / "sizes.npy")
        starts = self._starts(-(-sizes // ALIGNMENT) * ALIGNMENT)
        ends = starts + sizes
        self._count = len(sizes)
        with (self.folder / "data.bin").open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._mapping)
        self._bounds = {
            name: (starts[:, column].tolist(), ends[:, column].tolist()) for column, name in enumerate(MODALITIES)
        }

    def __len__(self) -> int:
        """Samples."""
        return self._count

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """Slices of the mapping."""
        view, wanted = self._view, indices.tolist()
        columns = []
        for name in modalities:
            starts, ends = self._bounds[name]
            columns.append([view[starts[i] : ends[i]] for i in wanted])
        return columns

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """The same loop, in order."""
        view = self._view
        bounds = [self._bounds[name] for name in modalities]
        for start in range(0, self._count, SCAN):
            stop = min(start + SCAN, self._count)
            yield [
                [view[a:b] for a, b in zip(starts[start:stop], ends[start:stop], strict=True)]
                for starts, ends in bounds
            ]


class ColumnBlob(RowBlob):
    """All images, then all captions, then all sounds in one file."""

    name: ClassVar[str] = "limit-columns"

    def _order(self, samples: Sequence[Sample]) -> Iterable[bytes]:
        return (sample[column] for column in range(len(MODALITIES)) for sample in samples)

    def _starts(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return super()._starts(np.ascontiguousarray(sizes.T)).T


class Advised(RowBlob):
    """The row loop, which tells the kernel of each batch what it will read, whether it is cached or not."""

    name: ClassVar[str] = "limit-advised"
    shares: ClassVar[str | None] = "limit-rows"

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """Advise, then slice."""
        first, last = self._bounds[modalities[0]][0], self._bounds[modalities[-1]][1]
        for i in indices.tolist():
            start = first[i] & -mmap.PAGESIZE
            self._mapping.madvise(mmap.MADV_WILLNEED, start, last[i] - start)
        return super().read(indices, modalities)

    def open(self) -> None:
        """Map the file without the kernel's own read-ahead, which would read what no batch asked for."""
        super().open()
        self._mapping.madvise(mmap.MADV_RANDOM)

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """Not a limit of scans."""
        return Adapter.sequential(self, modalities)


class LibjpegTurbo(RowBlob):
    """The decoder in a bare loop on both cores: no sound, no captions, arrays of a ring used again."""

    name: ClassVar[str] = "limit-libjpeg-turbo"
    modules: ClassVar[tuple[str, ...]] = DECODING_MODULES
    shares: ClassVar[str | None] = "limit-rows"

    def pack_at_size(self, corpus: Corpus) -> None:
        """The row file with JPEGs at training size."""
        import simplejpeg

        def encoded(image: bytes) -> bytes:
            return bytes(simplejpeg.encode_jpeg(pixels_at(image, SIDE), quality=90, colorsubsampling="420"))

        self.pack([Sample(encoded(sample.image), *sample[1:]) for sample in corpus])

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """Whole batches by one thread each, two ahead, so that no thread waits for another."""
        view, (starts, ends) = self._view, self._bounds["image"]
        slots = [np.empty((BATCH, SIDE, SIDE, 3), np.uint8) for _ in range(2 * CORES + 1)]
        decoders = deque(ImageDecoder(mode) for _ in slots)
        audio = np.zeros((BATCH, AUDIO_SAMPLES), np.int16)
        generator = np.random.default_rng(seed)

        def decode(target: npt.NDArray[np.uint8], indices: list[int]) -> npt.NDArray[np.uint8]:
            decoder = decoders.popleft()
            for row, i in enumerate(indices):
                decoder.decode(view[starts[i] : ends[i]], target[row])
            decoders.append(decoder)
            return target

        running: deque[Future[npt.NDArray[np.uint8]]] = deque()
        with ThreadPoolExecutor(CORES) as pool:
            for slot in itertools.cycle(slots):
                indices = generator.integers(0, self._count, BATCH).tolist()
                running.append(pool.submit(decode, slot, indices))
                if len(running) == 2 * CORES:
                    yield Decoded(running.popleft().result(), [""] * BATCH, audio)

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """Not a limit of raw reads."""
        return Adapter.read(self, indices, modalities)

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """Not a limit of raw reads."""
        return Adapter.sequential(self, modalities)
