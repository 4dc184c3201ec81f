"""Resident memory and throughput of the whole chain on one large shard.

Makes a shard of interleaved documents with JPEG images (500 MB unless told otherwise), runs the dataset's pack job on
it in a fresh process as `mm-assets run` does, Dagster and checks included, and prints the peak resident memory of that
process, the seconds and MB/s of each stage, and the peak of a plain copy loop as the floor.

    python benchmarks/memory.py [--megabytes 500] [--layout jpeg|tiff]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

LIMIT_MB = 512  # what the chain promises for a 500 MB shard


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


def make_shard(path: Path, megabytes: int, layout: str) -> int:
    """Writes a shard of at least so many megabytes and gives its number of documents."""
    distinct = 24  # documents differ in their text; images repeat, or making them would take longer than packing them
    if layout == "tiff":
        media = [multi_frame_tiff(seed, 6) for seed in range(distinct // 4)]
    else:
        media = [noise_jpeg(seed, 512 + 64 * (seed % 6)) for seed in range(distinct)]
    count = 0
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:

        def add(name: str, content: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))

        while path.stat().st_size < megabytes * 1_000_000:
            key = f"doc-{count:06d}"
            texts: list[str | None] = []
            images: list[str | None] = []
            for k in range(6):
                texts += [f"Paragraph {k} of document {count}. " * 40, None]
                images += [None, f"{key}.{k}.jpg" if layout == "jpeg" else f"page_{k}_image_{k}"]
            add(
                f"{key}.json",
                json.dumps({"texts": texts, "images": images, "url": f"https://example.org/{key}"}).encode(),
            )
            if layout == "tiff":
                add(f"{key}.tiff", media[count % len(media)])
            else:
                for k in range(6):
                    # A trailing comment makes each file its own: a filter of duplicates must not empty the shard.
                    add(f"{key}.{k}.jpg", media[(count + k) % len(media)] + f"<!-- {key}.{k} -->".encode())
            count += 1
    return count


CHILD = """
import json, resource, sys
from mm_assets.etl.dataset_store import DatasetStore
from mm_assets.orchestration.launch import open_instance, register_dataset, run_partitions
from mm_assets.spec import DatasetSpec

shard, root = sys.argv[1:]
spec = DatasetSpec.from_config({"name": "bench", "shards": shard, "root": root, "settle_seconds": 0, "pack": "interleaved",
    "filters": [{"type": "aspect_ratio", "min": 0.2, "max": 5.0}]}, where="benchmark")
dataset = DatasetStore(spec)
with open_instance() as instance:
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    register_dataset(instance, dataset)
    (run,) = run_partitions([(spec, key) for key in dataset.partitions()])
    print(json.dumps({"base_kb": base, "peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                      "failures": run.failures}))
    import dagster as dg
    for event in instance.get_records_for_run(run.run_id).records:
        materialized = event.asset_materialization
        if materialized is not None:
            facts = {k: v.value for k, v in materialized.metadata.items() if k in ("seconds", "check_seconds")}
            print(json.dumps({"asset": event.asset_key.path[-1], **facts}))
"""


def main() -> None:
    """Runs the benchmark and exits 1 where the promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--layout", choices=("jpeg", "tiff"), default="jpeg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mm-assets-bench-") as folder:
        shard = Path(folder) / "shard-00000.tar"
        documents = make_shard(shard, options.megabytes, options.layout)
        size = shard.stat().st_size
        print(f"{documents:,} documents, {size / 1e6:.0f} MB, layout {options.layout}")
        (Path(folder) / "home").mkdir()
        environment = {**os.environ, "DAGSTER_HOME": str(Path(folder) / "home")}
        command = [sys.executable, "-c", CHILD, str(shard), str(Path(folder) / "root")]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        first, *stages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for failure in first["failures"]:
            print("failed:", failure)
        print(f"{'stage':<20}{'seconds':>9}{'MB/s':>9}{'checks':>9}")
        for stage in stages:
            seconds = stage.get("seconds")
            if seconds:
                print(f"{stage['asset']:<20}{seconds:>9.2f}{size / 1e6 / seconds:>9.0f}{stage['check_seconds']:>9.2f}")
        peak = first["peak_kb"] / 1024
        print(f"peak resident: {peak:.0f} MiB, of which {first['base_kb'] / 1024:.0f} MiB before the first stage")
        if first["failures"] or peak > LIMIT_MB:
            sys.exit(1)


if __name__ == "__main__":
    main()
