"""What the checks cost: processor seconds of all checks of a partition, beside those of the stages.

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

from mm_assets.pipeline import publish, run, stages
from mm_assets.pipeline.register import register
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.store import DatasetStore
from mm_assets.pipeline.work import PartitionWork

DEMO = Path(__file__).resolve().parents[1] / "mm_assets" / "defs" / "demo" / "shards"
LAYOUTS = ("jpeg", "tiff", "captions")
ANNOTATORS = ("image_size", "blur", "text_length", "audio_duration", "silence", "video_info")
SETTINGS: dict[str, Any] = {
    "annotators": [{"type": name} for name in ANNOTATORS],
    "filters": [{"type": "text_length", "min_chars": 2}],
    "settle_seconds": 0,
}


def measure(name: str, shards: str) -> tuple[float, dict[str, float]]:
    """Processor seconds of the whole work on a dataset, and those of the checks of each stage."""
    of_checks: dict[str, float] = {}
    run_checks = run.run_checks

    def timed(context: Any, *others: Any) -> Any:
        began = time.process_time()
        outcomes = run_checks(context, *others)
        of_checks[context.asset] = of_checks.get(context.asset, 0.0) + time.process_time() - began
        if failed := [outcome.name for outcome in outcomes if outcome.stops]:
            raise SystemExit(f"{name}: {context.asset}: the checks failed: {', '.join(failed)}")
        return outcomes

    run.run_checks = timed
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
            return time.process_time() - began, of_checks
    finally:
        run.run_checks = run_checks


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="*", metavar="NAME=SHARDS")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    measure("warm_up", str(DEMO / "captions-*.tar"))
    print(f"{'shards':24}  {'all s':>6}  {'checks s':>8}  of these, by stage")
    with tempfile.TemporaryDirectory(prefix="bench-shards-") as folder:
        named = dict(each.split("=", 1) for each in given.shards)
        for layout in LAYOUTS if given.megabytes else ():
            named[layout] = f"{folder}/{layout}.tar"
            make_shard(Path(named[layout]), given.megabytes, layout)
        for name, shards in named.items():
            best, of_checks = min((measure(name, shards) for _ in range(given.runs)), key=lambda found: found[0])
            parts = ", ".join(f"{asset} {seconds:.2f}" for asset, seconds in of_checks.items())
            print(f"{name:24}  {best:6.2f}  {sum(of_checks.values()):8.2f}  {parts}")


if __name__ == "__main__":
    main()
