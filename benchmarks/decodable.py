"""What it costs to decode every media item before it is packed: `decodable: full` against `headers`.

Runs the stages and checks of the demo shards, and of a shard of JPEG documents that it makes (500 MB by default), with
either mode, each in a fresh process: processor seconds of the whole chain and of `filtered_rows`, where media are
judged, and the peak resident memory. The demo shards run once before they are measured, so that imports do not count;
of several runs the fastest counts.

    python benchmarks/decodable.py [--megabytes 500] [--runs 3]
"""

from __future__ import annotations

import argparse
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


def chain(name: str, shards: str, root: str, mode: str) -> dict[str, Any]:
    """Runs every partition of a dataset; processor seconds of all of it and of `filtered_rows`, and what was judged."""
    from mm_assets.pipeline import publish, stages
    from mm_assets.pipeline.chain import FILTERED_ROWS
    from mm_assets.pipeline.register import register
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.store import DatasetStore
    from mm_assets.pipeline.work import PartitionWork

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
    return {**chain(name, shards, f"{folder}/measured", mode), "peak": peak_bytes()}


def measured(name: str, shards: str, folder: Path, mode: str, runs: int) -> dict[str, Any]:
    """The fastest of several runs, each in a process of its own."""
    found = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory(dir=folder) as root:
            command = [sys.executable, __file__, "--measure", name, shards, root, mode]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return min(found, key=lambda each: each["seconds"])


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
        print("| dataset | media | `headers`, s | `full`, s | chain | ms per item | MB, `headers` | MB, `full` |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for dataset in ("captions", "docs", "speech", "video", JPEG):
            runs = 1 if dataset == JPEG else options.runs
            cheap, full = (measured(dataset, str(shard), folder, mode, runs) for mode in MODES)
            more = full["filtered"] - cheap["filtered"]
            print(
                f"| {dataset} | {full['judged']:,} | {cheap['seconds']:.2f} | {full['seconds']:.2f} "
                f"| {more / cheap['seconds']:+.0%} | {1000 * more / max(full['judged'], 1):.2f} "
                f"| {cheap['peak'] / 1e6:.0f} | {full['peak'] / 1e6:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
