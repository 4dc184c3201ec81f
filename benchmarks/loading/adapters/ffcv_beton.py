"""FFCV: a .beton file, through its loader, and as bare slices at the positions of its tables.

The loader decodes images of its own field; writing that field re-encodes pixels as JPEG (quality 90), which makes
files of the same size. It crops the largest square in the middle before it resizes, so that it resizes fewer pixels
than those who take the whole image. The tables are read from a second file that keeps the bytes as they are; FFCV has
no documented way to get them unpadded, so this is a bound of what its format allows.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks.loading.adapters.base import (
    BATCH,
    CORES,
    CROP_SCALE,
    SIDE,
    Adapter,
    Columns,
    Decoded,
    Indices,
    Unsupported,
)
from benchmarks.loading.corpus import AUDIO_SAMPLES, MODALITIES, Corpus, Sample, pixels_at

SCAN = 1024  # samples in one run of a scan


class _Pixels(Sequence[Any]):
    """The samples as the fields of the loader's file take them."""

    def __init__(self, samples: Sequence[Sample], side: int | None) -> None:
        self._samples, self._side = samples, side

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        sample = self._samples[index]
        text, audio = np.frombuffer(sample.text, np.uint8), np.frombuffer(sample.audio, np.int16)
        return pixels_at(sample.image, self._side), text, audio


class _Bytes(_Pixels):
    """The samples as byte fields take them."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(np.frombuffer(part, np.uint8) for part in self._samples[index])


class FfcvLoader(Adapter):
    """`ffcv.loader.Loader` with two threads, random order, and the page cache."""

    name: ClassVar[str] = "ffcv"
    package: ClassVar[str | None] = "ffcv"
    modules: ClassVar[tuple[str, ...]] = ("ffcv.loader", "ffcv.writer", "ffcv.fields.rgb_image", "ffcv.fields.decoders")
    reencodes: ClassVar[bool] = True

    @property
    def _path(self) -> str:
        return str(self.folder / "data.beton")

    def _write(self, samples: Sequence[Sample], side: int | None) -> None:
        from ffcv.fields import BytesField, NDArrayField, RGBImageField
        from ffcv.writer import DatasetWriter

        fields = {
            "image": RGBImageField(write_mode="jpg", jpeg_quality=90),
            "text": BytesField(),
            "audio": NDArrayField(np.dtype(np.int16), (AUDIO_SAMPLES,)),
        }
        DatasetWriter(self._path, fields, num_workers=CORES).from_indexed_dataset(_Pixels(samples, side))

    def pack(self, samples: Sequence[Sample]) -> None:
        """Re-encoded pixels."""
        self._write(samples, None)

    def pack_at_size(self, corpus: Corpus) -> None:
        """The same, resized before."""
        self._write(corpus, SIDE)

    def open(self) -> None:
        """Read the tables."""
        from ffcv.reader import Reader

        self._count = int(Reader(self._path).num_samples)

    def __len__(self) -> int:
        """Samples."""
        return self._count

    def _loader(self, pipelines: dict[str, Any], *, shuffle: bool, seed: int) -> Any:
        from ffcv.loader import Loader, OrderOption

        return Loader(
            self._path,
            batch_size=BATCH,
            num_workers=CORES,
            os_cache=True,
            order=OrderOption.RANDOM if shuffle else OrderOption.SEQUENTIAL,
            seed=seed,
            pipelines=pipelines,
        )

    def _columns(self, modalities: Sequence[str], *, shuffle: bool) -> Iterator[Columns]:
        from ffcv.fields.decoders import BytesDecoder, NDArrayDecoder

        if "image" in modalities:
            raise Unsupported("its loader has no JPEGs as bytes; see ffcv-tables")
        decoders = {"image": None, "text": [BytesDecoder()], "audio": [NDArrayDecoder()]}
        pipelines = {name: pipeline if name in modalities else None for name, pipeline in decoders.items()}
        loader = self._loader(pipelines, shuffle=shuffle, seed=0)
        while True:  # the loader is compiled once, not for each epoch
            yield from loader

    def random(self, modalities: Sequence[str], batches: Iterable[Indices]) -> Iterator[Columns]:
        """Epochs in the loader's random order, texts padded."""
        return self._columns(modalities, shuffle=True)

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """Epochs in order, texts padded."""
        return self._columns(modalities, shuffle=False)

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """Epochs of the loader."""
        from ffcv.fields.decoders import (
            BytesDecoder,
            CenterCropRGBImageDecoder,
            NDArrayDecoder,
            RandomResizedCropRGBImageDecoder,
            SimpleRGBImageDecoder,
        )

        if mode == "fast":
            raise Unsupported("decodes in full only")
        image: Any = CenterCropRGBImageDecoder((SIDE, SIDE), ratio=1)
        if mode == "stored":
            image = SimpleRGBImageDecoder()
        elif mode == "crop":
            image = RandomResizedCropRGBImageDecoder((SIDE, SIDE), scale=CROP_SCALE)  # without mirroring
        pipelines = {"image": [image], "text": [BytesDecoder()], "audio": [NDArrayDecoder()]}
        loader = self._loader(pipelines, shuffle=True, seed=seed)
        while True:
            for batch in loader:
                yield Decoded(*batch[:3])


class FfcvTables(FfcvLoader):
    """Slices of a mapping at the positions of the file's tables."""

    name: ClassVar[str] = "ffcv-tables"
    modules: ClassVar[tuple[str, ...]] = ("ffcv.reader", "ffcv.writer", "ffcv.fields")
    reencodes: ClassVar[bool] = False

    def pack(self, samples: Sequence[Sample]) -> None:
        """Three byte fields."""
        from ffcv.fields import BytesField
        from ffcv.writer import DatasetWriter

        fields = {name: BytesField() for name in MODALITIES}
        DatasetWriter(self._path, fields, num_workers=CORES).from_indexed_dataset(_Bytes(samples, None))

    def pack_at_size(self, corpus: Corpus) -> None:
        """Not compared."""
        raise Unsupported("decodes nothing; see ffcv")

    def open(self) -> None:
        """Read the tables and map the file."""
        from ffcv.reader import Reader

        reader = Reader(self._path)
        self._count = int(reader.num_samples)
        self._tables: dict[str, tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]] = {}
        for number, name in enumerate(MODALITIES):
            rows = reader.metadata[f"f{number}"]
            starts = np.ascontiguousarray(rows["ptr"])
            self._tables[name] = starts, starts + rows["size"]
        with open(self._path, "rb") as file:
            self._view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _slices(self, rows: Indices | slice, modalities: Sequence[str]) -> Columns:
        view = self._view
        return [
            list(map(view.__getitem__, map(slice, starts[rows].tolist(), ends[rows].tolist())))
            for starts, ends in (self._tables[name] for name in modalities)
        ]

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """Views into the file."""
        return self._slices(indices, modalities)

    def random(self, modalities: Sequence[str], batches: Iterable[Indices]) -> Iterator[Columns]:
        """Views into the file."""
        return Adapter.random(self, modalities, batches)

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """The same in order."""
        for start in range(0, self._count, SCAN):
            yield self._slices(slice(start, start + SCAN), modalities)

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """Not compared."""
        raise Unsupported("decodes nothing; see ffcv")
