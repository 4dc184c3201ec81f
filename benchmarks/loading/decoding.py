"""Decoding for candidates that leave it to their user: the quickest decoder and resize there are, the same for all.

libjpeg-turbo by simplejpeg, in full or at a fraction, and OpenCV's resize, with one buffer for full-size pixels that is
used again; in two workers of torch's `DataLoader`, a whole batch at a time, as tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.loading.adapters.base import BATCH, CORES, CROP_SCALE, SIDE, Adapter, Decoded
from benchmarks.loading.corpus import AUDIO_SAMPLES, MAX_SIDE, MODALITIES

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

DECODING_MODULES = ("cv2", "simplejpeg")
TORCH_MODULES = (*DECODING_MODULES, "torch.utils.data")


class ImageDecoder:
    """Decodes JPEGs to 224 x 224 into given rows; each thread needs its own.

    Args:
        mode: as in `Adapter.decoded`.
    """

    def __init__(self, mode: str) -> None:
        import cv2
        import simplejpeg

        cv2.setNumThreads(1)  # one core for each thread or worker that decodes
        self._decode = simplejpeg.decode_jpeg
        self._resize = cv2.resize
        self._mode = mode
        self._rng = np.random.default_rng()
        self._interpolation = cv2.INTER_AREA if mode == "exact" else cv2.INTER_LINEAR
        self._mirrored = np.empty((SIDE, SIDE, 3), np.uint8)
        self._pixels = np.empty(MAX_SIDE * MAX_SIDE * 3, np.uint8)

    def decode(self, data: Any, target: npt.NDArray[np.uint8]) -> None:
        """Decode one image.

        Args:
            data: a buffer with the JPEG.
            target: (224, 224, 3), C-contiguous.
        """
        if self._mode == "stored":
            self._decode(data, buffer=target)
            return
        # With a least size, the decoder takes the smallest fraction of the image that is not below it, and none
        # between 1/2 and 1, which would take longer than the whole.
        least = SIDE if self._mode == "fast" else 0
        pixels = self._decode(data, min_height=least, min_width=least, min_factor=2, buffer=self._pixels)
        if self._mode == "crop":
            top, left, height, width = self._draw(*pixels.shape[:2])
            pixels = pixels[top : top + height, left : left + width]
            if self._rng.random() < 0.5:
                self._resize(pixels, (SIDE, SIDE), dst=self._mirrored, interpolation=self._interpolation)
                target[:] = self._mirrored[:, ::-1]
                return
        if pixels.shape[:2] == (SIDE, SIDE):
            target[:] = pixels
        else:
            self._resize(pixels, (SIDE, SIDE), dst=target, interpolation=self._interpolation)

    def _draw(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of a random crop, as `RandomResizedCrop` draws it."""
        for _ in range(10):
            area = height * width * self._rng.uniform(*CROP_SCALE)
            ratio = np.exp(self._rng.uniform(np.log(3 / 4), np.log(4 / 3)))
            inner = round(np.sqrt(area / ratio)), round(np.sqrt(area * ratio))
            if inner[0] <= height and inner[1] <= width:
                return (
                    int(self._rng.integers(height - inner[0] + 1)),
                    int(self._rng.integers(width - inner[1] + 1)),
                    *inner,
                )
        return 0, 0, height, width


def decode_batch(decoder: ImageDecoder, images: Sequence[Any], texts: Sequence[Any], audios: Sequence[Any]) -> Decoded:
    """Decode stored bytes into new arrays."""
    image = np.empty((len(images), SIDE, SIDE, 3), np.uint8)
    audio = np.empty((len(audios), AUDIO_SAMPLES), np.int16)
    for row, data in enumerate(images):
        decoder.decode(data, image[row])
    for row, data in enumerate(audios):
        audio[row] = np.frombuffer(data, np.int16)
    return Decoded(image, [text if isinstance(text, str) else str(text, "utf-8") for text in texts], audio)


def as_tensors(batch: Decoded) -> Decoded:
    """The same with tensors, which workers hand over in shared memory."""
    import torch

    return Decoded(torch.from_numpy(batch.image), batch.text, torch.from_numpy(batch.audio))


class DecodingRows:
    """A map-style dataset for torch: a batch of indices gives a decoded batch; reopened in each worker."""

    def __init__(self, make: Callable[[Path], Adapter], folder: Path, mode: str, count: int) -> None:
        self._make, self._folder, self._mode, self._count = make, folder, mode, count
        self._adapter: Adapter | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Decoded:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Decoded:
        if self._adapter is None:
            self._adapter = self._make(self._folder)
            self._adapter.open()
            self._decoder = ImageDecoder(self._mode)
        columns = self._adapter.read(np.array(indices, np.int64), MODALITIES)
        return as_tensors(decode_batch(self._decoder, *columns))


def _unchanged(batch: Any) -> Any:
    return batch


def map_style(adapter: Adapter, mode: str, *, seed: int, context: str | None = None) -> Iterator[Decoded]:
    """Decoded batches of a project with access by index, through torch's `DataLoader` with two workers.

    Args:
        adapter: opened.
        mode: as in `Adapter.decoded`.
        seed: of the order.
        context: how workers start; None for torch's default.
    """
    import torch
    from torch.utils.data import DataLoader

    rows: Any = DecodingRows(type(adapter), adapter.folder, mode, len(adapter))
    adapter.close()  # workers reopen it
    loader: DataLoader[Decoded] = DataLoader(
        rows,
        batch_size=BATCH,
        shuffle=True,
        num_workers=CORES,
        collate_fn=_unchanged,
        persistent_workers=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(seed),
        multiprocessing_context=context,
    )
    while True:
        yield from loader


def collate_rows(decoder_mode: str, rows: Sequence[Sequence[Any]]) -> Decoded:
    """Decode a list of (image, text, audio) rows of stored bytes: the collate function of projects that stream."""
    images, texts, audios = zip(*rows, strict=True)
    return as_tensors(decode_batch(_decoder(decoder_mode), images, texts, audios))


@functools.cache  # one for each worker process
def _decoder(mode: str) -> ImageDecoder:
    return ImageDecoder(mode)
