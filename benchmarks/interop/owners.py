"""Converts a tar with another project's own writer, and prints its time without imports.

Run it in the environment of `tests/interop/requirements.txt`: ``python owners.py FORMAT TAR FOLDER``.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARD_BYTES = 256 << 20


def samples(tar: str) -> Iterator[dict[str, Any]]:
    """Yields the samples of a tar: key, image, caption and JSON."""
    sample: dict[str, Any] = {}
    with tarfile.open(tar) as shard:
        for member in shard:
            key, _, suffix = member.name.partition(".")
            file = shard.extractfile(member)
            assert file is not None
            if sample.get("__key__") != key:
                if sample:
                    yield sample
                sample = {"__key__": key}
            sample[suffix] = file.read() if suffix == "jpg" else file.read().decode()
    yield sample


def webdataset(tar: str, folder: str) -> None:
    """Converts with `ShardWriter`."""
    from webdataset import ShardWriter

    with ShardWriter(f"file:{folder}/%06d.tar", maxsize=SHARD_BYTES, verbose=0) as writer:
        for sample in samples(tar):
            writer.write({**sample, "txt": sample["txt"].encode(), "json": sample["json"].encode()})


def energon(tar: str, folder: str) -> None:
    """Converts with `ShardWriter` and `prepare`."""
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    webdataset(tar, folder)
    names = sorted(path.name for path in Path(folder).glob("*.tar"))
    WebdatasetPreparator.prepare_dataset(Path(folder), names, split_parts_patterns=[("train", ".*")], workers=1)


def mds(tar: str, folder: str) -> None:
    """Converts with `MDSWriter`."""
    from streaming import MDSWriter

    columns = {"__key__": "str", "jpg": "bytes", "txt": "str", "json": "str"}
    with MDSWriter(out=folder, columns=columns, size_limit=SHARD_BYTES) as writer:
        for sample in samples(tar):
            writer.write(sample)


class Ranges:
    """Reads a sample by index from the byte ranges of its members; runs in LitData's processes."""

    def __init__(self, tar: str) -> None:
        self.tar = tar
        self.samples: list[dict[str, tuple[int, int]]] = []
        with tarfile.open(tar) as shard:
            key = None
            for member in shard:
                base, _, suffix = member.name.partition(".")
                if base != key:
                    key = base
                    self.samples.append({})
                self.samples[-1][suffix] = (member.offset_data, member.size)

    def __call__(self, number: int) -> dict[str, Any]:
        """Returns a sample."""
        with open(self.tar, "rb") as file:
            sample: dict[str, Any] = {}
            for suffix, (offset, size) in self.samples[number].items():
                content = os.pread(file.fileno(), size, offset)
                sample[suffix] = content if suffix == "jpg" else content.decode()
        return sample


def litdata(tar: str, folder: str) -> None:
    """Converts with `optimize` and a process per core."""
    from litdata import optimize

    ranges = Ranges(tar)
    optimize(
        fn=ranges,
        inputs=list(range(len(ranges.samples))),
        output_dir=folder,
        chunk_bytes=SHARD_BYTES,
        num_workers=os.cpu_count(),
    )


def hf(tar: str, folder: str) -> None:
    """Converts with `Dataset.from_generator` and `to_parquet`."""
    import datasets

    texts = {name: datasets.Value("string") for name in ("__key__", "txt", "json")}
    features = datasets.Features({"jpg": datasets.Image(decode=False), **texts})

    def rows() -> Iterator[dict[str, Any]]:
        for sample in samples(tar):
            yield {**sample, "jpg": {"bytes": sample["jpg"], "path": f"{sample['__key__']}.jpg"}}

    dataset = datasets.Dataset.from_generator(rows, features=features, cache_dir=f"{folder}/cache")
    dataset.to_parquet(f"{folder}/train-00000-of-00001.parquet")


def lance(tar: str, folder: str) -> None:
    """Converts with `write_dataset`."""
    import pyarrow as pa
    from lance import write_dataset

    schema = pa.schema(
        [("__key__", pa.string()), ("jpg", pa.large_binary()), ("txt", pa.string()), ("json", pa.string())]
    )

    def batches() -> Iterator[pa.RecordBatch]:
        rows = []
        for sample in samples(tar):
            rows.append(sample)
            if len(rows) == 64:
                yield pa.RecordBatch.from_pylist(rows, schema)
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema)

    write_dataset(batches(), f"{folder}/data", schema=schema, max_bytes_per_file=SHARD_BYTES)


def main(format: str, tar: str, folder: str) -> None:
    """Imports the library, converts, and prints wall-clock and processor seconds."""
    names = {"mds": "streaming", "hf": "datasets", "energon": "megatron.energon.flavors.webdataset.prepare"}
    __import__(names.get(format, format))
    before, start = os.times(), time.perf_counter()
    globals()[format](tar, folder)
    seconds, after = time.perf_counter() - start, os.times()
    print(f"\n{json.dumps([seconds, sum(after[:4]) - sum(before[:4])])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
