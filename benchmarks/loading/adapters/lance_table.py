"""Lance: one table; `take` for random rows, `to_batches` for scans.

Torch's workers are spawned, as its documentation asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from benchmarks.loading.adapters.arrow_ipc import buffers
from benchmarks.loading.adapters.base import Adapter, Columns, Decoded, Indices
from benchmarks.loading.corpus import MODALITIES, Sample
from benchmarks.loading.decoding import TORCH_MODULES, map_style

SCAN = 1024  # samples in one run of a scan


class Lance(Adapter):
    """One dataset of three binary columns."""

    name: ClassVar[str] = "lance"
    package: ClassVar[str | None] = "pylance"
    modules: ClassVar[tuple[str, ...]] = ("lance", "pyarrow", *TORCH_MODULES)

    def pack(self, samples: Sequence[Sample]) -> None:
        """Written from record batches of 1,024 rows."""
        import lance
        import pyarrow as pa

        schema = pa.schema([(name, pa.large_binary()) for name in MODALITIES])
        batches = (
            pa.record_batch(
                [pa.array(column, pa.large_binary()) for column in zip(*samples[start : start + SCAN], strict=True)],
                schema=schema,
            )
            for start in range(0, len(samples), SCAN)
        )
        lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches), str(self.folder / "data.lance"))

    def open(self) -> None:
        """Open the dataset."""
        import lance

        self._data = lance.dataset(str(self.folder / "data.lance"))
        self._count = self._data.count_rows()

    def __len__(self) -> int:
        """Samples."""
        return int(self._count)

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """A table of the rows."""
        table = self._data.take(indices.tolist(), columns=list(modalities))
        return [buffers(table.column(name)) for name in modalities]

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """Record batches of 1,024 rows."""
        for batch in self._data.to_batches(columns=list(modalities), batch_size=SCAN):
            yield [buffers(batch.column(name)) for name in modalities]

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """Through `map_style`."""
        return map_style(self, mode, seed=seed, context="spawn")
