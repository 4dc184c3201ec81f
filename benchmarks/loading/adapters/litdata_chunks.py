"""LitData: `optimize` to chunks of 64 MB, read by `StreamingDataset` where they lie.

There is no quick access by index: its random order is that of `shuffle=True`, which shuffles chunks, and samples within
them. A sample is always read whole, so that fewer modalities cost the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from benchmarks.loading.adapters.base import BATCH, CORES, Adapter, Columns, Decoded, Indices
from benchmarks.loading.corpus import MODALITIES, Sample
from benchmarks.loading.decoding import TORCH_MODULES, collate_rows


def _as_item(samples: Sequence[Sample], index: int) -> dict[str, Any]:
    sample = samples[index]
    return {"image": sample.image, "text": sample.text.decode(), "audio": sample.audio}


def _collate(mode: str, samples: list[dict[str, Any]]) -> Decoded:
    return collate_rows(mode, [[sample[name] for name in MODALITIES] for sample in samples])


class LitData(Adapter):
    """`StreamingDataset` on a local folder."""

    name: ClassVar[str] = "litdata"
    package: ClassVar[str | None] = "litdata"
    modules: ClassVar[tuple[str, ...]] = ("litdata", *TORCH_MODULES)

    def pack(self, samples: Sequence[Sample]) -> None:
        """One worker, forked, so that the samples need not be pickled."""
        import litdata

        litdata.optimize(
            fn=functools.partial(_as_item, samples),
            inputs=list(range(len(samples))),
            output_dir=str(self.folder),
            chunk_bytes="64MB",
            num_workers=1,
            start_method="fork",
            mode="overwrite",
            verbose=False,
        )

    def open(self) -> None:
        """Open the folder."""
        self._data = self._dataset(shuffle=False, seed=0)
        self._count = len(self._data)

    def _dataset(self, *, shuffle: bool, seed: int) -> Any:
        import litdata

        return litdata.StreamingDataset(str(self.folder), shuffle=shuffle, seed=seed, drop_last=shuffle)

    def __len__(self) -> int:
        """Samples."""
        return int(self._count)

    def _columns(self, samples: Iterable[dict[str, Any]], modalities: Sequence[str]) -> Iterator[Columns]:
        stream = iter(samples)
        while batch := list(itertools.islice(stream, BATCH)):
            yield [[sample[name] for sample in batch] for name in modalities]

    def random(self, modalities: Sequence[str], batches: Iterable[Indices]) -> Iterator[Columns]:
        """An epoch in its own order."""
        return self._columns(self._dataset(shuffle=True, seed=0), modalities)

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """An epoch in order."""
        return self._columns(self._data, modalities)

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """`StreamingDataLoader` with two workers."""
        import litdata

        loader = litdata.StreamingDataLoader(
            self._dataset(shuffle=True, seed=seed),
            batch_size=BATCH,
            num_workers=CORES,
            collate_fn=functools.partial(_collate, mode),
            persistent_workers=True,
            drop_last=True,
        )
        while True:
            yield from loader
