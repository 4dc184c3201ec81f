"""Arrow's IPC file format, memory-mapped.

Twice: with `take`, the documented way to select rows, which copies them; and with slices of the value buffers at the
array's offsets, which copies nothing and is what a loader written for the purpose could do. One record batch holds all
rows, which suits both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from benchmarks.loading.adapters.base import Adapter, Columns, Decoded, Indices
from benchmarks.loading.corpus import MODALITIES, Sample
from benchmarks.loading.decoding import TORCH_MODULES, map_style

SCAN = 1024  # samples in one run of a scan


def offsets_and_bytes(array: Any) -> tuple[list[int], memoryview]:
    """Offsets and value bytes of a binary or string array without nulls, neither copied but for the list."""
    import pyarrow as pa

    wide = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    _, offsets, values = array.buffers()
    numbers = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
    return numbers.tolist(), memoryview(values).cast("B")


def buffers(column: Any) -> list[memoryview]:
    """Each value of a column, array or chunked array, as a view."""
    found: list[memoryview] = []
    for chunk in getattr(column, "chunks", [column]):
        if len(chunk):
            offsets, view = offsets_and_bytes(chunk)
            found += map(view.__getitem__, map(slice, offsets, offsets[1:]))
    return found


class ArrowTake(Adapter):
    """`RecordBatch.take`, then views of what it copied."""

    name: ClassVar[str] = "arrow-take"
    package: ClassVar[str | None] = "pyarrow"
    modules: ClassVar[tuple[str, ...]] = ("pyarrow", *TORCH_MODULES)

    def pack(self, samples: Sequence[Sample]) -> None:
        """One file, one record batch."""
        import pyarrow as pa

        columns = [pa.array(column, pa.large_binary()) for column in zip(*samples, strict=True)]
        batch = pa.record_batch(columns, names=list(MODALITIES))
        with pa.ipc.new_file(str(self.folder / "data.arrow"), batch.schema) as writer:
            writer.write_batch(batch)

    def open(self) -> None:
        """Map the file."""
        import pyarrow as pa

        self._batch = pa.ipc.open_file(pa.memory_map(str(self.folder / "data.arrow"))).get_batch(0)

    def __len__(self) -> int:
        """Samples."""
        return int(self._batch.num_rows)

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """A copy of the rows."""
        rows = self._batch.select(list(modalities)).take(indices)
        return [buffers(column) for column in rows.columns]

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """Slices of the record batch, which copy nothing."""
        wanted = self._batch.select(list(modalities))
        for start in range(0, len(self), SCAN):
            yield [buffers(column) for column in wanted.slice(start, SCAN).columns]

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """Through `map_style`."""
        return map_style(self, mode, seed=seed)


class ArrowBuffers(ArrowTake):
    """Slices of the value buffers."""

    name: ClassVar[str] = "arrow-buffers"
    shares: ClassVar[str | None] = "arrow-take"

    def open(self) -> None:
        """Map the file."""
        super().open()
        self._columns: dict[str, tuple[list[int], memoryview]] = {}

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """Views into the file; the offsets of a column become Python integers when it is first read."""
        wanted = indices.tolist()
        columns = []
        for name in modalities:
            if name not in self._columns:
                self._columns[name] = offsets_and_bytes(self._batch.column(name))
            offsets, view = self._columns[name]
            columns.append([view[offsets[i] : offsets[i + 1]] for i in wanted])
        return columns
