"""MULT and MSTR, through the package's public interface alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

import mm_assets
from benchmarks.loading.adapters.base import BATCH, CORES, CROP_SCALE, SIDE, Adapter, Columns, Decoded, Indices
from benchmarks.loading.corpus import SAMPLE_RATE, Corpus, Sample
from mm_assets.fields import AudioField, Encoded, Field, ImageField, ScalarField, TextField


class Mult(Adapter):
    """One MULT file; images are kept as they are."""

    name: ClassVar[str] = "mult"
    kind: ClassVar[str] = "ours"
    package: ClassVar[str | None] = "mm-assets"
    modules: ClassVar[tuple[str, ...]] = ("cv2", "simplejpeg", "mm_assets.dataset.dataset")
    suffix: ClassVar[str] = ".mult"

    @property
    def _path(self) -> str:
        return str(self.folder / f"data{self.suffix}")

    @staticmethod
    def _fields(image: ImageField) -> dict[str, Field]:
        audio = AudioField(encoding="pcm16", sample_rate=SAMPLE_RATE, decoded="int16")
        return {"image": image, "text": TextField(), "audio": audio}

    @staticmethod
    def _values(sample: Sample) -> dict[str, Any]:
        """What the fields take."""
        return {"image": sample.image, "text": sample.text.decode(), "audio": np.frombuffer(sample.audio, "<i2")}

    def _write(self, samples: Sequence[Sample], image: ImageField) -> None:
        with mm_assets.create(self._path, self._fields(image), num_samples=len(samples), fsync=False) as writer:
            for number, sample in enumerate(samples):
                writer.write(str(number), self._values(sample))

    def encode(self, samples: Sequence[Sample]) -> list[dict[str, Encoded]]:
        """The payloads: fields have looked at the values, and made the records."""
        fields = self._fields(ImageField())
        return [{name: fields[name].encode(v) for name, v in self._values(sample).items()} for sample in samples]

    def pack_encoded(self, encoded: Sequence[dict[str, Encoded]]) -> None:
        """One file, checksums included."""
        fields = self._fields(ImageField())
        with mm_assets.create(self._path, fields, num_samples=len(encoded), fsync=False) as writer:
            for number, payloads in enumerate(encoded):
                writer.write_payloads(str(number), payloads)

    def pack(self, samples: Sequence[Sample]) -> None:
        """One file, checksums included."""
        self._write(samples, ImageField())

    def pack_at_size(self, corpus: Corpus) -> None:
        """One file; the pack option stores images at training size."""
        self._write(corpus, ImageField(encoding="jpeg", quality=90, subsampling="420", size=(SIDE, SIDE), channels=3))

    def pack_large(self, num_samples: int) -> None:
        """One file of labels, all the same: opening does not look at them."""
        field = ScalarField("int16")
        encoded = field.encode(7)
        payloads = {"label": (bytes(encoded.metadata), bytes(encoded.data))}
        with mm_assets.create(self._path, {"label": field}, num_samples=num_samples, fsync=False) as writer:
            for number in range(num_samples):
                writer.write_payloads(f"{number:09d}", payloads)

    def open(self) -> None:
        """Open the file."""
        self._data = mm_assets.open(self._path)

    def __len__(self) -> int:
        """Samples."""
        return len(self._data)

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """Views into the file."""
        found = self._data.read_raw(indices, modalities)
        return [found[name] for name in modalities]

    def random(self, modalities: Sequence[str], batches: Iterable[Indices]) -> Iterator[Columns]:
        """Views into the file; the next batch is on its way while one is used."""
        for found in self._data.stream_raw(batches, modalities):
            yield [found[name] for name in modalities]

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """Views into the file, in order."""
        for found in self._data.stream_raw(None, modalities):
            yield [found[name] for name in modalities]

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """`MultimodalLoader` with two threads; checksums are verified, as by default."""
        settings: dict[str, Any] = {"channels": 3}
        if mode == "crop":
            settings |= {"decode_size": [SIDE, SIDE], "decode_mode": "fast", "decode_crop": {"scale": CROP_SCALE}}
        elif mode != "stored":
            settings |= {"decode_size": [SIDE, SIDE], "decode_mode": mode}
        rules = {
            "image": {"type": "stack"},
            "text": {"type": "list"},
            "audio": {"type": "stack", "source": "audio.samples"},
        }
        loader = mm_assets.MultimodalLoader(
            self._data.with_settings({"image": settings}),
            batch_size=BATCH,
            num_workers=CORES,
            collator=mm_assets.MultimodalCollator(rules),
            last="drop",
            seed=seed,
        )
        while True:
            for batch in loader:
                yield Decoded(batch["image"], batch["text"], batch["audio"].reshape(BATCH, -1))

    def close(self) -> None:
        """Close the file and join its threads."""
        self._data.close()


class Mstr(Mult):
    """One MSTR file."""

    name: ClassVar[str] = "mstr"
    suffix: ClassVar[str] = ".mstr"
