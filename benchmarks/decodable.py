"""What it costs to decode every media item before it is packed: `decodable: full` against `headers`.

Runs the stages and checks of the demo shards, and of a shard of JPEG documents that it makes (500 MB by default), with
either mode, each in a fresh process: processor seconds of the whole chain and of `filtered_rows`, where media are
judged, and the peak resident memory; and what decoding the same items takes in a loop over Pillow, soundfile or PyAV
that does nothing else. The demo shards run once before they are measured, so that imports do not count; of several
runs the least of each time counts.

    python benchmarks/decodable.py [--megabytes 500] [--runs 3]
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from memory import make_shard, peak_bytes

DECLARATIONS = Path(__file__).resolve().parents[1] / "mm_assets" / "defs" / "demo" / "defs.yaml"
MODES = ("headers", "full")
JPEG = "jpeg"


def declaration_of(name: str, shards: str, root: str, mode: str) -> dict[str, Any]:
    """The settings of a demo dataset, or of the shard that this script made."""
    settings: dict[str, Any] = {"name": name, "shards": shards, "pack": "interleaved"}
    for each in yaml.safe_load_all(DECLARATIONS.read_text()):
        if each["attributes"]["name"] == name:
            settings = each["attributes"]
    return {**settings, "root": root, "settle_seconds": 0, "decodable": mode}


def bare(tables: list[Path]) -> float:
    """Processor seconds of decoding a media item of tables, in a loop that does nothing else."""
    # Here: modules that are imported when the peak of a chain is taken would count as its memory.
    import av
    import pyarrow.parquet as pq
    import soundfile
    from PIL import Image

    def decode(modality: str, content: bytes) -> None:
        if modality == "image":
            Image.open(io.BytesIO(content)).load()
        elif modality == "audio":
            soundfile.read(io.BytesIO(content))
        else:
            with av.open(io.BytesIO(content)) as container:
                for _ in container.decode():
                    pass

    seconds, number = 0.0, 0
    for table in tables:
        for batch in pq.ParquetFile(table).iter_batches(batch_size=64, columns=["modality", "binary_content"]):
            items = [
                (row["modality"], row["binary_content"])
                for row in batch.to_pylist()
                if row["modality"] in ("image", "audio", "video") and row["binary_content"] is not None
            ]
            began = time.process_time()
            for modality, content in items:
                decode(modality, content)
            seconds += time.process_time() - began
            number += len(items)
    return seconds / number


def chain(name: str, shards: str, root: str, mode: str) -> dict[str, Any]:
    """Runs every partition of a dataset; processor seconds of all of it and of `filtered_rows`, and what was judged."""
    from mm_assets.pipeline.chain import FILTERED_ROWS
    from mm_assets.pipeline.partition import publish, stages
    from mm_assets.pipeline.partition.inputs import PartitionWork
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.state.folder import DatasetStore
    from mm_assets.pipeline.state.registration import register

    spec = DatasetSpec.from_config(
        declaration_of(name, shards, root, mode), where=str(DECLARATIONS), base=DECLARATIONS.parent
    )
    dataset = DatasetStore(spec)
    register(dataset, wait=True)
    found = {"seconds": 0.0, "filtered": 0.0, "judged": 0, "undecodable": 0}
    for key in dataset.partitions():
        with PartitionWork.registered(dataset, key) as work:
            for stage, make in stages.TABLE_STAGES.items():
                began = time.process_time()
                result = make(work)
                found["seconds"] += time.process_time() - began
                if stage is FILTERED_ROWS:
                    found["filtered"] += time.process_time() - began
                    found["judged"] += result.record.counts["judged"]
                    found["undecodable"] += result.record.counts["undecodable"]
            began = time.process_time()
            stages.packed(work)
            publish.publish(work)
            found["seconds"] += time.process_time() - began
    return found


def measure(name: str, shards: str, folder: str, mode: str) -> dict[str, Any]:
    """One dataset in this process."""
    if name != JPEG:
        chain(name, shards, f"{folder}/warm", mode)
    found = {**chain(name, shards, f"{folder}/measured", mode), "peak": peak_bytes()}
    return {**found, "bare": bare(sorted(Path(folder, "measured", name, "filtered_rows").glob("*.parquet")))}


def measured(name: str, shards: str, folder: Path, mode: str, runs: int) -> dict[str, Any]:
    """The least of each time of several runs, each in a process of its own, and the largest peak."""
    found = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(dir=folder) as root:
            command = [sys.executable, __file__, "--measure", name, shards, root, mode]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return {key: (max if key == "peak" else min)(each[key] for each in found) for key in found[0]}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--measure", nargs=4, metavar=("NAME", "SHARDS", "FOLDER", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    with tempfile.TemporaryDirectory(prefix="mm-assets-bench-") as name:
        folder = Path(name)
        shard = folder / "shard-00000.tar"
        make_shard(shard, options.megabytes, JPEG)
        names = ("media", "`headers`, s", "`full`, s", "chain", "ms per item", "bare decoder, ms", "by it")
        print(f"| dataset | {' | '.join(names)} | MB, `headers` | MB, `full` |")
        print("| --- |" + " ---: |" * (len(names) + 2))
        for dataset in ("captions", "docs", "speech", "video", JPEG):
            runs = 1 if dataset == JPEG else options.runs
            cheap, full = (measured(dataset, str(shard), folder, mode, runs) for mode in MODES)
            more = full["filtered"] - cheap["filtered"]
            of_item = more / full["judged"]
            print(
                f"| {dataset} | {full['judged']:,} | {cheap['seconds']:.2f} | {full['seconds']:.2f} "
                f"| {more / cheap['seconds']:+.0%} "
                f"| {1000 * of_item:.2f} | {1000 * full['bare']:.2f} | {of_item / full['bare']:.2f} x "
                f"| {cheap['peak'] / 1e6:.0f} | {full['peak'] / 1e6:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
