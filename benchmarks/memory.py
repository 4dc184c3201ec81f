"""Resident memory and throughput of the whole chain on one large shard.

Makes a shard (500 MB by default) of interleaved documents with large JPEG images or multi-frame TIFFs, or of
small captioned images, and runs on it, each in a fresh process:

- the job of one partition, Dagster and every check included: seconds, MB/s of the shard and
  peak resident memory of each stage;
- rows and materialization alone, without files, checks and Dagster: what the stages themselves can do;
- a loop that copies the shard, with digest and fsync: what a stage that writes as many bytes can do at best here.

Exits 1 where the promise of 512 MB does not hold.

    python benchmarks/memory.py [--megabytes 500] [--layout jpeg|tiff|captions]
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

LIMIT_BYTES = 512_000_000  # what the chain promises for a 500 MB shard
SAMPLING_SECONDS = 0.005


def noise_jpeg(seed: int, side: int) -> bytes:
    """A JPEG that compresses about as badly as a photograph: smooth noise."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (side // 4, side // 4, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
    target = io.BytesIO()
    image.save(target, "JPEG", quality=90)
    return target.getvalue()


def multi_frame_tiff(seed: int, frames: int) -> bytes:
    """A JPEG-compressed TIFF of several frames, as MINT-1T's PDF shards hold."""
    from PIL import Image

    pages = [Image.open(io.BytesIO(noise_jpeg(seed + k, 800))).convert("RGB") for k in range(frames)]
    target = io.BytesIO()
    pages[0].save(target, "TIFF", save_all=True, append_images=pages[1:], compression="jpeg", quality=90)
    return target.getvalue()


def documents(layout: str) -> Iterator[list[tuple[str, bytes]]]:
    """The members of one sample after the other, without end.

    Texts differ; images repeat, or making them would take longer than packing them.
    """
    if layout == "tiff":
        media = [multi_frame_tiff(seed, 6) for seed in range(6)]
    elif layout == "jpeg":
        media = [noise_jpeg(seed, 512 + 64 * (seed % 6)) for seed in range(24)]
    else:
        media = [noise_jpeg(seed, 128 + 16 * (seed % 8)) for seed in range(64)]
    for count in itertools.count():
        key = f"doc-{count:06d}"
        url = f"https://example.org/{key}"
        if layout == "captions":
            image = media[count % len(media)] + f"<!-- {key} -->".encode()
            caption = f"A caption of picture {count}. " * 4
            yield [
                (f"{key}.jpg", image),
                (f"{key}.txt", caption.encode()),
                (f"{key}.json", json.dumps({"url": url}).encode()),
            ]
            continue
        texts: list[str | None] = []
        images: list[str | None] = []
        for k in range(6):
            texts += [f"Paragraph {k} of document {count}. " * 40, None]
            images += [None, f"{key}.{k}.jpg" if layout == "jpeg" else f"page_{k}_image_{k}"]
        members = [(f"{key}.json", json.dumps({"texts": texts, "images": images, "url": url}).encode())]
        if layout == "tiff":
            members.append((f"{key}.tiff", media[count % len(media)]))
        else:
            # A trailing comment makes each file its own: a filter of duplicates must not empty the shard.
            members += [
                (f"{key}.{k}.jpg", media[(count + k) % len(media)] + f"<!-- {key}.{k} -->".encode()) for k in range(6)
            ]
        yield members


def make_shard(path: Path, megabytes: int, layout: str) -> int:
    """Writes a shard of at least so many megabytes and gives its number of samples."""
    samples = documents(layout)
    count = 0
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        while path.stat().st_size < megabytes * 1_000_000:
            for name, content in next(samples):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            count += 1
    return count


class Watch(threading.Thread):
    """Notes this process's resident memory every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._noted: list[tuple[float, int]] = []
        self.start()

    def run(self) -> None:
        """Notes until the process ends."""
        page = resource.getpagesize()
        with open("/proc/self/statm", encoding="ascii") as file:
            while True:
                file.seek(0)
                self._noted.append((time.time(), int(file.read().split()[1]) * page))
                time.sleep(SAMPLING_SECONDS)

    def peak(self, begin: float, end: float) -> int:
        """The most bytes between two times, as `time.time` tells them."""
        return max((size for when, size in self._noted if begin <= when <= end), default=0)


def peak_bytes() -> int:
    """The most bytes that this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def dataset_of(shard: str, root: str) -> Any:
    """The dataset that is measured; its packing follows from the folder that the shard lies in."""
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.state.folder import DatasetStore

    preset = "image_text" if Path(shard).parent.name == "captions" else "interleaved"
    config = {
        "name": "bench",
        "shards": shard,
        "root": root,
        "settle_seconds": 0,
        "pack": preset,
        "filters": [{"type": "aspect_ratio", "min": 0.2, "max": 5.0}],
    }
    return DatasetStore(DatasetSpec.from_config(config, where="benchmark"))


def measure_chain(shard: str, root: str) -> dict[str, Any]:
    """Runs the pack job and prints for each asset what it took."""
    watch = Watch()
    from mm_assets.orchestration.build import build_definitions
    from mm_assets.orchestration.launch import open_instance, register_dataset

    dataset = dataset_of(shard, root)
    with open_instance() as instance:
        before = peak_bytes()
        register_dataset(instance, dataset)
        (key,) = dataset.partitions()
        job = build_definitions(dataset.spec).resolve_job_def("bench_pack")
        run = job.execute_in_process(instance=instance, partition_key=key, raise_on_error=False)
        peak = peak_bytes()
        stages = []
        begun: dict[str, float] = {}
        for event in instance.all_logs(run.run_id):
            if event.is_dagster_event and event.get_dagster_event().is_step_start:
                begun[event.step_key or ""] = event.timestamp
            made = event.asset_materialization
            if made is not None and "seconds" in made.metadata:
                facts = {name: made.metadata[name].value for name in ("seconds", "check_seconds")}
                resident = watch.peak(begun[event.step_key or ""], event.timestamp)
                stages.append({"stage": made.asset_key.path[-1], "resident": resident, **facts})
    return {"before": before, "peak": peak, "failed": not run.success, "stages": stages}


def measure_stage(shard: str, root: str) -> dict[str, Any]:
    """Makes and materializes the rows twice, without writing them; the second time everything is imported and warm."""
    from mm_assets.pipeline.state.registration import register
    from mm_assets.rows.from_members import MemberRows
    from mm_assets.rows.materialize import MaterializeStream
    from mm_assets.sources.base import index_members
    from mm_assets.sources.tar import TarSource
    from mm_assets.storage.files import SourceFile

    dataset = dataset_of(shard, root)
    register(dataset, wait=True)
    spec, schema = dataset.spec, dataset.schema()
    seconds = 0.0
    with SourceFile(shard) as source:
        for _ in range(2):
            began = time.perf_counter()
            members = list(index_members(TarSource(source)))
            rows = MemberRows([TarSource(source)]).rows(
                partial(iter, members), layout=spec.samples, schema=schema, batch_bytes=spec.batch_bytes
            )
            stream = MaterializeStream(
                rows, open_file=lambda _: source, allowed=lambda _: True, batch_bytes=spec.batch_bytes
            )
            for _ in stream:
                pass
            seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak": peak_bytes()}


def measure_copy(shard: str, root: str) -> dict[str, Any]:
    """Copies the shard twice, with digest and fsync, and prints the second time."""
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        digest = hashlib.sha256()
        with open(shard, "rb") as source, open(f"{root}.copy", "wb") as target:
            while block := source.read(8 << 20):
                target.write(block)
                digest.update(block)
            target.flush()
            os.fsync(target.fileno())
        seconds = time.perf_counter() - began
        os.unlink(f"{root}.copy")
    return {"seconds": seconds, "peak": peak_bytes()}


MEASURES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "chain": measure_chain,
    "stage": measure_stage,
    "copy": measure_copy,
}


def measured(what: str, shard: Path, folder: Path) -> dict[str, Any]:
    """The answer of a measure that ran in a process of its own."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--measure", what, str(shard), str(folder / what)]
    environment = {**os.environ, "DAGSTER_HOME": str(home)}
    os.sync()  # what was written before must not slow down what is measured
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Runs the benchmark and exits 1 where the promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--layout", choices=("jpeg", "tiff", "captions"), default="jpeg")
    parser.add_argument("--measure", nargs=3, metavar=("WHAT", "SHARD", "ROOT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, shard_path, root = options.measure
        print(json.dumps(MEASURES[what](shard_path, root)))
        return
    with tempfile.TemporaryDirectory(prefix="mm-assets-bench-") as name:
        folder = Path(name)
        shard = folder / options.layout / "shard-00000.tar"
        shard.parent.mkdir()
        num_samples = make_shard(shard, options.megabytes, options.layout)
        size = shard.stat().st_size
        print(f"{num_samples:,} samples, {size / 1e6:.0f} MB, layout {options.layout}")
        chain = measured("chain", shard, folder)
        if chain["failed"]:
            print("the run failed")
        print(f"{'stage':<20}{'seconds':>9}{'MB/s':>9}{'checks s':>10}{'resident MB':>13}")
        for row in chain["stages"]:
            rate = size / 1e6 / max(row["seconds"], 1e-9)
            print(
                f"{row['stage']:<20}{row['seconds']:>9.2f}{rate:>9.0f}{row['check_seconds']:>10.2f}"
                f"{row['resident'] / 1e6:>13.0f}"
            )
        for what, title in (("stage", "rows and materialize, no files"), ("copy", "copy, digest and fsync")):
            found = measured(what, shard, folder)
            print(f"{title}: {size / 1e6 / found['seconds']:.0f} MB/s, peak resident {found['peak'] / 1e6:.0f} MB")
        before, peak = chain["before"] / 1e6, chain["peak"] / 1e6
        print(f"chain: peak resident {peak:.0f} MB, of which {before:.0f} MB before the first stage")
        if chain["failed"] or chain["peak"] > LIMIT_BYTES:
            sys.exit(1)


if __name__ == "__main__":
    main()
