"""The samples that every format is packed from: image (JPEG), caption and one second of sound, all of them distinct.

Sample i depends on i alone, so the same number of samples gives the same bytes with the same libjpeg-turbo and OpenCV.
Images are smooth noise with fine grain, which compresses about as a photograph does.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

MODALITIES = ("image", "text", "audio")

MIN_SIDE, MAX_SIDE = 224, 512  # pixels
SAMPLE_RATE = 16_000  # Hz
AUDIO_SAMPLES = SAMPLE_RATE  # one second
JPEG_QUALITY = 90
GRAIN = 10  # of 256 levels; with it an image takes 23 KB on average
CHUNK = 250  # samples made by one task

_VOCABULARY = (
    "a the of on in with two small old red green blue wooden stone quiet busy early late river street market bridge "
    "garden window boat bicycle dog cat horse child woman man musician table lamp tower field mountain harbour train "
    "station rain snow light shadow morning evening"
)
_WORDS = _VOCABULARY.split()


class Sample(NamedTuple):
    """One sample.

    Attributes:
        image: a JPEG, sides of 224 to 512 pixels.
        text: UTF-8.
        audio: 16,000 samples of little-endian int16, at 16 kHz.
    """

    image: bytes
    text: bytes
    audio: bytes


def make_image(generator: np.random.Generator) -> bytes:
    """One JPEG."""
    import cv2
    import simplejpeg

    height, width = (int(side) for side in generator.integers(MIN_SIDE, MAX_SIDE + 1, 2))
    shapes = generator.integers(0, 256, (max(2, height // 40), max(2, width // 40), 3), dtype=np.uint8)
    grain = generator.integers(0, GRAIN, (height // 2, width // 2), dtype=np.uint8)
    picture = cv2.resize(shapes, (width, height), interpolation=cv2.INTER_CUBIC)
    detail = cv2.resize(grain, (width, height), interpolation=cv2.INTER_LINEAR)
    picture = cv2.add(picture, cv2.merge([detail, detail, detail]))
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality=JPEG_QUALITY, colorsubsampling="420"))


def make_sample(index: int) -> Sample:
    """Sample `index`."""
    generator = np.random.default_rng([20_000, index])
    words = generator.integers(0, len(_WORDS), int(generator.integers(6, 25)))
    text = f"{' '.join(_WORDS[word] for word in words)}, number {index}"
    time = np.arange(AUDIO_SAMPLES) / SAMPLE_RATE
    tone = np.sin(2 * np.pi * generator.uniform(100, 2000) * time) * generator.uniform(2000, 20_000)
    audio = (tone + generator.normal(0, 300, AUDIO_SAMPLES)).clip(-32_768, 32_767).astype("<i2")
    return Sample(make_image(generator), text.encode(), audio.tobytes())


def _make_chunk(start: int, stop: int) -> list[Sample]:
    return [make_sample(index) for index in range(start, stop)]


class Corpus(Sequence[Sample]):
    """The samples on disk: one file of bytes, and a table of sizes.

    Args:
        folder: where `make_corpus` has put them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: npt.NDArray[np.int64] = np.load(folder / "sizes.npy")
        ends = self._sizes.ravel().cumsum()
        self._bounds = np.concatenate([[0], ends]).tolist()
        self._bytes: Any = np.memmap(folder / "samples.bin", np.uint8, "r").data

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        bounds = self._bounds[3 * index : 3 * index + 4]
        return Sample(*(bytes(self._bytes[start:stop]) for start, stop in itertools.pairwise(bounds)))

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all samples."""
        return int(self._sizes.sum())


def make_corpus(folder: Path, num_samples: int) -> Corpus:
    """The samples, made if they are not there."""
    if not (folder / "sizes.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        starts = range(0, num_samples, CHUNK)
        stops = [min(start + CHUNK, num_samples) for start in starts]
        sizes: list[tuple[int, ...]] = []
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool, (folder / "samples.bin").open("wb") as file:
            for chunk in pool.map(_make_chunk, starts, stops):
                for sample in chunk:
                    file.write(b"".join(sample))
                    sizes.append(tuple(len(part) for part in sample))
        np.save(folder / "sizes.npy", np.array(sizes, np.int64))  # last: its presence says that all is there
    return Corpus(folder)


def pixels_at(image: bytes, side: int | None = None) -> npt.NDArray[np.uint8]:
    """Pixels (H, W, 3) uint8 of a JPEG, resized by areas to a square of `side` where it is given."""
    import cv2
    import simplejpeg

    pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(image)
    if side is not None:
        pixels = np.asarray(cv2.resize(pixels, (side, side), interpolation=cv2.INTER_AREA), np.uint8)
    return pixels
