"""Measures the processor seconds that the checks of a partition take, beside the seconds of the whole work.

Runs all stages over shards that it makes (100 MB each by default), and over other shards that are given, with
annotators and a filter. The demo shards run once before that, so that imports do not count; of several runs the least
counts.

    python benchmarks/checks.py [--megabytes 100] [--runs 3] [NAME=SHARDS ...]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from memory import make_shard

from mm_assets.pipeline.partition import publish, stage_run, stages
from mm_assets.pipeline.partition.inputs import PartitionWork
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register

DEMO = Path(__file__).resolve().parents[1] / "mm_assets" / "defs" / "demo" / "shards"
LAYOUTS = ("jpeg", "tiff", "captions")
ANNOTATORS = ("image_size", "blur", "text_length", "audio_duration", "silence", "video_info")
SETTINGS: dict[str, Any] = {
    "annotators": [{"type": name} for name in ANNOTATORS],
    "filters": [{"type": "text_length", "min_chars": 2}],
    "settle_seconds": 0,
}


def measure(name: str, shards: str) -> tuple[float, dict[str, float]]:
    """Returns the processor seconds of the whole work on a dataset, and of the checks of each stage."""
    check_seconds: dict[str, float] = {}
    run_checks = stage_run.run_checks

    def timed(context: Any, *others: Any) -> Any:
        began = time.process_time()
        outcomes = run_checks(context, *others)
        check_seconds[context.asset] = check_seconds.get(context.asset, 0.0) + time.process_time() - began
        if failed := [outcome.name for outcome in outcomes if outcome.stops]:
            raise SystemExit(f"{name}: {context.asset}: the checks failed: {', '.join(failed)}")
        return outcomes

    stage_run.run_checks = timed
    try:
        with tempfile.TemporaryDirectory(prefix="bench-checks-") as root:
            config = {**SETTINGS, "name": name.replace("-", "_"), "shards": shards, "root": root}
            dataset = DatasetStore(DatasetSpec.from_config(config, where="benchmarks/checks.py"))
            register(dataset)
            began = time.process_time()
            for key in dataset.partitions():
                with PartitionWork.registered(dataset, key) as work:
                    for make in stages.TABLE_STAGES.values():
                        make(work)
                    stages.packed(work)
                    publish.publish(work)
            return time.process_time() - began, check_seconds
    finally:
        stage_run.run_checks = run_checks


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="*", metavar="NAME=SHARDS")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    measure("warm_up", str(DEMO / "captions-*.tar"))
    print(f"{'shards':24}  {'all s':>6}  {'checks s':>8}  of these, by stage")
    with tempfile.TemporaryDirectory(prefix="bench-shards-") as folder:
        named = dict(each.split("=", 1) for each in arguments.shards)
        for layout in LAYOUTS if arguments.megabytes else ():
            named[layout] = f"{folder}/{layout}.tar"
            make_shard(Path(named[layout]), arguments.megabytes, layout)
        for name, shards in named.items():
            runs = (measure(name, shards) for _ in range(arguments.runs))
            best, check_seconds = min(runs, key=lambda result: result[0])
            parts = ", ".join(f"{asset} {seconds:.2f}" for asset, seconds in check_seconds.items())
            print(f"{name:24}  {best:6.2f}  {sum(check_seconds.values()):8.2f}  {parts}")


if __name__ == "__main__":
    main()
