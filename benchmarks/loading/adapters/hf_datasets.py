"""Hugging Face datasets: `save_to_disk`, `load_from_disk`, and batches by a list of indices in the Arrow format.

The Arrow format is the documentation's quickest for bytes; the Python format makes a `bytes` object of every value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from benchmarks.loading.adapters.arrow_ipc import buffers
from benchmarks.loading.adapters.base import Adapter, Columns, Decoded, Indices
from benchmarks.loading.corpus import MODALITIES, Sample
from benchmarks.loading.decoding import TORCH_MODULES, map_style

if TYPE_CHECKING:
    import datasets

SCAN = 1024  # samples in one run of a scan


class HfDatasets(Adapter):
    """One dataset, columns selected before rows."""

    name: ClassVar[str] = "hf-datasets"
    package: ClassVar[str | None] = "datasets"
    modules: ClassVar[tuple[str, ...]] = ("datasets", "pyarrow", *TORCH_MODULES)

    def pack(self, samples: Sequence[Sample]) -> None:
        """Arrow files of at most 500 MB, the default."""
        import datasets

        datasets.disable_progress_bars()
        features = datasets.Features({name: datasets.Value("large_binary") for name in MODALITIES})
        columns = dict(zip(MODALITIES, map(list, zip(*samples, strict=True)), strict=True))
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(self.folder))

    def open(self) -> None:
        """Map the files."""
        import datasets

        self._data = datasets.load_from_disk(str(self.folder)).with_format("arrow")
        self._selected: dict[tuple[str, ...], datasets.Dataset] = {}

    def __len__(self) -> int:
        """Samples."""
        return len(self._data)

    def _select(self, modalities: Sequence[str]) -> datasets.Dataset:
        names = tuple(modalities)
        if names not in self._selected:
            self._selected[names] = self._data.select_columns(list(names))
        return self._selected[names]

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """A table of the rows."""
        return [buffers(column) for column in self._select(modalities)[indices.tolist()].columns]

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """`iter` in batches."""
        for table in self._select(modalities).iter(batch_size=SCAN):
            yield [buffers(column) for column in table.columns]

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """Through `map_style`."""
        return map_style(self, mode, seed=seed)
