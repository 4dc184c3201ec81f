"""A process that takes shards in by a limit's way or by one of ours, and prints what it took as a line of JSON.

python -m benchmarks.ingest.work copy|arrow|stream|stages DECODABLE OUT SHARD...
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 8 << 20  # bytes that are copied at a time
BATCH_BYTES = 16 << 20  # of payloads that pyarrow writes at a time
FILTER = {"min": 0.2, "max": 5.0}  # of the aspect ratio, for every candidate: it reads the header of each image


@dataclass(kw_only=True)
class Step:
    """What one step of a candidate took.

    Attributes:
        seconds: wall clock.
        processor_seconds: of this process.
        bytes_read: by system calls of this process.
        bytes_written: likewise.
        check_seconds: of `seconds`, for checks.
        peak_bytes: most resident memory of this process, in one of its shards.
    """

    seconds: float = 0.0
    processor_seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    check_seconds: float = 0.0
    peak_bytes: int = 0


@dataclass
class Steps:
    """The steps of a candidate by name, added up over the shards; one is at work at a time."""

    steps: dict[str, Step] = field(default_factory=dict)

    @contextmanager
    def at(self, name: str) -> Iterator[Step]:
        """Adds what happens within the block to a step."""
        step = self.steps.setdefault(name, Step())
        Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
        began, used, (read, written) = time.perf_counter(), time.process_time(), _transferred()
        yield step
        step.seconds += time.perf_counter() - began
        step.processor_seconds += time.process_time() - used
        after = _transferred()
        step.bytes_read += after[0] - read
        step.bytes_written += after[1] - written
        step.peak_bytes = max(step.peak_bytes, _peak())


def _transferred() -> tuple[int, int]:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]), int(counts["wchar"])


def _peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def copy(shards: Sequence[str], out: Path, _: str) -> Steps:
    """Copies the shards, with a SHA-256 beside the write and an fsync: what each written copy costs at least."""
    steps = Steps()
    with steps.at("copy"):
        for shard in shards:
            digest = hashlib.sha256()
            with open(shard, "rb") as source, (out / Path(shard).name).open("wb") as target:
                while block := source.read(BLOCK):
                    target.write(block)
                    digest.update(block)
                target.flush()
                os.fsync(target.fileno())
    return steps


def arrow(shards: Sequence[str], out: Path, _: str) -> Steps:
    """Reads every payload once by tarfile and writes it once by pyarrow, without compression and dictionaries."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("name", pa.string()), ("payload", pa.large_binary())])
    steps = Steps()
    with steps.at("arrow"):
        for shard in shards:
            path = out / f"{Path(shard).stem}.parquet"
            with (
                tarfile.open(shard) as tar,
                pq.ParquetWriter(path, schema, compression="NONE", use_dictionary=False) as writer,
            ):
                for names, payloads in _payloads(tar):
                    writer.write_batch(pa.record_batch([names, payloads], schema=schema))
    return steps


def _payloads(tar: tarfile.TarFile) -> Iterator[tuple[list[str], list[bytes]]]:
    names: list[str] = []
    payloads: list[bytes] = []
    num_bytes = 0
    for member in tar:
        file = tar.extractfile(member)
        assert file is not None
        names.append(member.name)
        payloads.append(file.read())
        num_bytes += len(payloads[-1])
        if num_bytes > BATCH_BYTES:
            yield names, payloads
            names, payloads, num_bytes = [], [], 0
    yield names, payloads


def settings(decodable: str) -> dict[str, Any]:
    """The settings of a dataset that every one of our candidates uses, beside its name and places."""
    return {"settle_seconds": 0, "decodable": decodable, "filters": [{"type": "aspect_ratio", **FILTER}]}


def _dataset(shards: Sequence[str], out: Path, decodable: str) -> Any:
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.state.folder import DatasetStore

    # All of the folder, which is the shards of one kind.
    config = {"name": "ingest", "shards": str(Path(shards[0]).parent), "root": str(out), **settings(decodable)}
    return DatasetStore(DatasetSpec.from_config(config, where="benchmark"))


def stream(shards: Sequence[str], out: Path, decodable: str) -> Steps:
    """Registers and takes each shard to filtered Parquet in one stream: no tables between, digests or checks."""
    from mm_assets.filters.apply import FilterStream
    from mm_assets.packing.judge import Judge
    from mm_assets.pipeline.partition.inputs import PartitionWork
    from mm_assets.pipeline.partition.run import rare_collections
    from mm_assets.pipeline.state.registration import register
    from mm_assets.rows.materialize import MaterializeStream
    from mm_assets.rows.parquet import ParquetSink, sample_groups
    from mm_assets.sources.base import index_members

    steps, dataset = Steps(), _dataset(shards, out, decodable)
    spec = dataset.spec
    with steps.at("register"):
        register(dataset)
    schema = dataset.schema()
    for partition in dataset.partitions().values():
        with (
            steps.at("stream"),
            rare_collections(),
            PartitionWork(dataset, partition, schema) as work,
            Judge(work.plan, policy=spec.on_undecodable, mode=spec.decodable) as judge,
            ParquetSink(out / f"{partition.key}.parquet", schema.filtered_schema()) as sink,
        ):
            work.shards(indexed=False)
            (rows,) = (
                source.rows(
                    lambda source=source: index_members(source.sources[0]),
                    layout=spec.samples,
                    schema=schema,
                    grouped=False,
                    batch_bytes=spec.batch_bytes,
                )
                for source in work.row_sources
            )
            loaded = MaterializeStream(
                rows,
                open_file=work.open_file,
                open_container=work.open_container,
                allowed=set(shards).__contains__,
                batch_bytes=spec.batch_bytes,
            )
            kept = FilterStream(
                sample_groups(loaded, batch_bytes=spec.batch_bytes),
                annotators=(),
                filters=spec.build_filters(),
                schema=schema,
                decodable=judge.undecodable,
                packable=lambda rows, _, judge=judge: judge.packable(rows),
                batch_bytes=spec.batch_bytes,
            )
            for batch in kept:
                sink.write(batch)
    return steps


def stages(shards: Sequence[str], out: Path, decodable: str) -> Steps:
    """Registers and runs every stage of each partition: all tables, both packed formats, digests, fsync, all checks."""
    from mm_assets.pipeline.chain import PACKED_STAGES, RAW_SHARDS
    from mm_assets.pipeline.partition.run import PartitionReport, partition_steps
    from mm_assets.pipeline.state.registration import register

    steps, dataset = Steps(), _dataset(shards, out, decodable)
    with steps.at("register"):
        register(dataset)
    schema = dataset.schema()
    packed = [stage.name for stage in PACKED_STAGES.values()]
    for partition in dataset.partitions().values():
        run = partition_steps(dataset.spec, partition, schema)
        stage = RAW_SHARDS.name
        while True:
            with steps.at(stage):
                step = next(run)
            if isinstance(step, PartitionReport):
                break
            stage = step
        if not step.ok:
            raise SystemExit(f"{partition.key} failed: {step.failure}")
        for name, result in step.results.items():  # both packed files are made in the first one's step
            steps.steps[packed[0] if name in packed else name].check_seconds += result.check_seconds
    return steps


CANDIDATES: dict[str, Callable[[Sequence[str], Path, str], Steps]] = {
    found.__name__: found for found in (copy, arrow, stream, stages)
}


def main() -> None:
    """Runs one candidate and prints its steps."""
    name, decodable, out, *shards = sys.argv[1:]
    began, used = time.perf_counter(), time.process_time()
    steps = CANDIDATES[name](shards, Path(out), decodable)
    seconds, processor_seconds = time.perf_counter() - began, time.process_time() - used
    found = {step: vars(value) for step, value in steps.steps.items()}
    print(json.dumps({"seconds": seconds, "processor_seconds": processor_seconds, "steps": found}))


if __name__ == "__main__":
    main()
