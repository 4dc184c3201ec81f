"""LMDB: one environment, a named database for each modality, keys of four big-endian bytes.

Reads are one transaction a batch with `buffers=True`, which gives views into the mapping; that the views are touched
within the transaction is up to the bench, which does so before it asks for the next batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from benchmarks.loading.adapters.base import Adapter, Columns, Decoded, Indices
from benchmarks.loading.corpus import MODALITIES, Sample
from benchmarks.loading.decoding import TORCH_MODULES, map_style

MAP_BYTES = 64 << 30  # address space, not memory
SCAN = 1024  # samples in one run of a scan
COMMIT = 1000  # samples in one write transaction


class Lmdb(Adapter):
    """Random reads by `get`, scans by cursors."""

    name: ClassVar[str] = "lmdb"
    package: ClassVar[str | None] = "lmdb"
    modules: ClassVar[tuple[str, ...]] = ("lmdb", *TORCH_MODULES)
    takes_bytes: ClassVar[bool] = True

    def pack(self, samples: Sequence[Sample]) -> None:
        """Keys in ascending order, which LMDB appends."""
        import lmdb

        environment = lmdb.open(
            str(self.folder), map_size=MAP_BYTES, max_dbs=len(MODALITIES), sync=False, metasync=False, lock=False
        )
        databases = [environment.open_db(name.encode()) for name in MODALITIES]
        for start in range(0, len(samples), COMMIT):
            with environment.begin(write=True) as transaction:
                for number, sample in enumerate(samples[start : start + COMMIT], start):
                    key = number.to_bytes(4, "big")
                    for database, value in zip(databases, sample, strict=True):
                        transaction.put(key, value, db=database, append=True)
        environment.close()

    def open(self) -> None:
        """Open for reading, without locks and the kernel's read-ahead, as the documentation tells for random reads."""
        import lmdb

        self._environment = lmdb.open(
            str(self.folder), map_size=MAP_BYTES, max_dbs=len(MODALITIES), readonly=True, lock=False, readahead=False
        )
        self._databases = {name: self._environment.open_db(name.encode(), create=False) for name in MODALITIES}
        with self._environment.begin() as transaction:
            self._count = transaction.stat(self._databases["text"])["entries"]
        self._reading = self._environment.begin(buffers=True)

    def __len__(self) -> int:
        """Samples."""
        return int(self._count)

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """Views into the mapping."""
        packed = indices.astype(">u4").tobytes()
        keys = [packed[at : at + 4] for at in range(0, len(packed), 4)]
        get = self._reading.get
        columns = []
        for name in modalities:
            database = self._databases[name]
            columns.append([get(key, db=database) for key in keys])
        return columns

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """One cursor a modality."""
        cursors = [self._reading.cursor(self._databases[name]) for name in modalities]
        values = [cursor.iternext(keys=False, values=True) for cursor in cursors]
        for start in range(0, self._count, SCAN):
            count = min(SCAN, self._count - start)
            yield [[value for _, value in zip(range(count), stream, strict=False)] for stream in values]

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """Through `map_style`."""
        return map_style(self, mode, seed=seed)  # which closes the environment: it may not be open across a fork

    def close(self) -> None:
        """Close the environment."""
        self._reading.abort()
        self._environment.close()
