"""WebDataset: tar shards of about 64 MB, read as streams.

There is no random access: its random order is shuffled shards and a shuffle buffer of 1,000 samples, as the
documentation tells, and every member is read whatever modalities are wanted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from benchmarks.loading.adapters.base import BATCH, CORES, Adapter, Columns, Decoded, Indices, Unsupported
from benchmarks.loading.corpus import MODALITIES, Sample
from benchmarks.loading.decoding import TORCH_MODULES, collate_rows

SHARD_BYTES = 64_000_000
BUFFER = 1000  # samples that are shuffled among each other
MEMBERS = {"image": "jpg", "text": "txt", "audio": "pcm"}


class WebDataset(Adapter):
    """`wds.WebDataset` and `wds.WebLoader`."""

    name: ClassVar[str] = "webdataset"
    package: ClassVar[str | None] = "webdataset"
    modules: ClassVar[tuple[str, ...]] = ("webdataset", *TORCH_MODULES)

    def pack(self, samples: Sequence[Sample]) -> None:
        """Shards by `ShardWriter`."""
        import webdataset

        pattern = str(self.folder / "shard-%06d.tar")
        with webdataset.ShardWriter(pattern, maxsize=SHARD_BYTES, maxcount=10**9, verbose=0) as writer:
            for number, sample in enumerate(samples):
                members = {MEMBERS[name]: value for name, value in zip(MODALITIES, sample, strict=True)}
                writer.write({"__key__": f"{number:08d}", **members})

    def open(self) -> None:
        """List the shards; they are opened when they are read."""
        self._shards = sorted(str(path) for path in self.folder.glob("*.tar"))

    def __len__(self) -> int:
        """Not known from the shards."""
        raise Unsupported("opens nothing before it is iterated, and does not know its length")

    def _samples(self, *, shuffle: bool, seed: int = 0) -> Any:
        import webdataset

        data = webdataset.WebDataset(
            self._shards, shardshuffle=len(self._shards) if shuffle else False, seed=seed, empty_check=False
        )
        return data.shuffle(BUFFER, seed=seed) if shuffle else data

    def _columns(self, samples: Iterable[dict[str, Any]], modalities: Sequence[str]) -> Iterator[Columns]:
        keys = [MEMBERS[name] for name in modalities]
        stream = iter(samples)
        while batch := list(itertools.islice(stream, BATCH)):
            yield [[sample[key] for sample in batch] for key in keys]

    def random(self, modalities: Sequence[str], batches: Iterable[Indices]) -> Iterator[Columns]:
        """An epoch in its own order."""
        return self._columns(self._samples(shuffle=True), modalities)

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """The shards in order."""
        return self._columns(self._samples(shuffle=False), modalities)

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """`WebLoader` with two workers, each of which makes whole batches."""
        import webdataset

        collate = functools.partial(collate_rows, mode)
        data = self._samples(shuffle=True, seed=seed).to_tuple(*(MEMBERS[name] for name in MODALITIES))
        data = data.batched(BATCH, collation_fn=collate, partial=False)
        loader = webdataset.WebLoader(data, batch_size=None, num_workers=CORES, persistent_workers=True)
        while True:
            yield from loader
