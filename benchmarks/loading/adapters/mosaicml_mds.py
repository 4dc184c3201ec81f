"""MosaicML Streaming: MDS shards of 64 MiB without compression or hashes, read where they lie.

Random and sequential reads are `dataset[i]`, which is quicker here than its iterator with its read-ahead threads. A
sample is always read whole, so that fewer modalities cost the same.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from benchmarks.loading.adapters.base import BATCH, CORES, Adapter, Columns, Decoded, Indices
from benchmarks.loading.corpus import MODALITIES, Sample
from benchmarks.loading.decoding import TORCH_MODULES, collate_rows


def _collate(mode: str, samples: list[dict[str, Any]]) -> Decoded:
    return collate_rows(mode, [[sample[name] for name in MODALITIES] for sample in samples])


class MosaicML(Adapter):
    """`StreamingDataset` on a local folder."""

    name: ClassVar[str] = "mosaicml-streaming"
    package: ClassVar[str | None] = "mosaicml-streaming"
    modules: ClassVar[tuple[str, ...]] = ("streaming", *TORCH_MODULES)

    def prepare(self) -> None:
        """Import, and clear shared memory that a killed process may have left."""
        warnings.simplefilter("ignore")
        super().prepare()
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()

    def pack(self, samples: Sequence[Sample]) -> None:
        """Images and sounds as bytes, captions as text."""
        from streaming import MDSWriter

        columns = {"image": "bytes", "text": "str", "audio": "bytes"}
        with MDSWriter(out=str(self.folder), columns=columns, exist_ok=True) as writer:
            for sample in samples:
                writer.write({"image": sample.image, "text": sample.text.decode(), "audio": sample.audio})

    def open(self) -> None:
        """Open the folder as a local dataset."""
        self._data = self._dataset(shuffle=False, seed=0)

    def _dataset(self, *, shuffle: bool, seed: int) -> Any:
        from streaming import StreamingDataset

        return StreamingDataset(
            local=str(self.folder), shuffle=shuffle, shuffle_seed=seed, batch_size=BATCH, allow_unsafe_types=False
        )

    def __len__(self) -> int:
        """Samples."""
        return len(self._data)

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """Whole samples, one by one."""
        samples = [self._data[i] for i in indices.tolist()]
        return [[sample[name] for sample in samples] for name in modalities]

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """The same in order."""
        for start in range(0, len(self), BATCH):
            yield self.read(np.arange(start, min(start + BATCH, len(self))), modalities)

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """`StreamingDataLoader` with two workers over a shuffled `StreamingDataset`."""
        from streaming import StreamingDataLoader

        loader = StreamingDataLoader(
            self._dataset(shuffle=True, seed=seed),
            batch_size=BATCH,
            num_workers=CORES,
            collate_fn=functools.partial(_collate, mode),
            persistent_workers=True,
            drop_last=True,
        )
        while True:
            yield from loader
