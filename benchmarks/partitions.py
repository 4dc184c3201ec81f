"""What a load costs in a dataset of many published partitions: it should not depend on their number.

Publishes one small partition, and links its files under the names of the others. Then, each in a fresh process: what is
pending, a manifest that changes nothing, a manifest with one new partition, `mm-assets run` with nothing to do, and
`mm-assets run` with one partition to do. Wall clock, processor seconds with those of child processes, and the peak
resident memory of the process.

    python benchmarks/partitions.py --data FOLDER [--numbers 1000,10000,100000] [--runs 3] [--measures pending,manifest]
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES = 30
MEASURES = ("pending", "manifest", "manifest of one new", "run", "run of one new")


def write_shard(path: Path) -> None:
    """A shard of small samples."""
    with tarfile.open(path, "w") as tar:
        for number in range(SAMPLES):
            content = f"the text of sample {number}".encode()
            info = tarfile.TarInfo(f"{number:06d}.txt")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def key_of(number: int) -> str:
    """The key of a partition; all have as many characters, so that files which name them have the same size."""
    return f"p{number:07d}"


class Links:
    """Names for one file's content; a file system may allow one file so many names only."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, name: Path) -> None:
        """Gives the content another name."""
        try:
            name.hardlink_to(self._path)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            shutil.copyfile(self._path, name)
            self._path = name


def declared(folder: Path) -> Any:
    """The dataset in a folder."""
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.store import DatasetStore

    config = {"name": "many", "shards": f"{folder}/in/*.tar", "root": f"{folder}/root", "settle_seconds": 0}
    return DatasetStore(DatasetSpec.from_config({**config, "checks": "rollup"}, where="benchmark"))


def make_dataset(folder: Path, number: int) -> Any:
    """A dataset of published partitions with the same content, of which the first was run; without a manifest."""
    from mm_assets.pipeline.chain import PUBLISHED
    from mm_assets.pipeline.partition_run import run_partition
    from mm_assets.pipeline.register import register

    dataset = declared(folder)
    (folder / "in").mkdir(parents=True)
    first = folder / "in" / f"{key_of(0)}.tar"
    write_shard(first)
    shard = Links(first)
    for other in range(1, number):
        shard.add(folder / "in" / f"{key_of(other)}.tar")
    register(dataset, wait=True)
    partitions, schema = dataset.partitions(), dataset.schema()
    report = run_partition(dataset.spec, partitions[key_of(0)], schema)
    assert report.ok, report.failure
    root = Path(dataset.store.path_of(""))
    made = [path for path in root.rglob("*") if path.is_file() and key_of(0) in path.name]
    made_with = PUBLISHED.digest(dataset.spec, schema)
    texts = {path: path.read_text() for path in made if path.suffix == ".json"}
    links = {path: Links(path) for path in made}
    record = next(text for path, text in texts.items() if path.parent.name == "records")
    for key, partition in partitions.items():
        if key == key_of(0):
            continue
        for path in made:
            name = path.name.replace(key_of(0), key)
            if path.parent.name == "published":
                of_first, of_this = (hashlib.sha256(record.replace(key_of(0), k).encode()) for k in (key_of(0), key))
                marker = texts[path].replace(of_first.hexdigest(), of_this.hexdigest()).replace(key_of(0), key)
                (root / dataset.marker_name(key, partition.fingerprint(made_with))).write_text(marker)
            elif path in texts:
                path.with_name(name).write_text(texts[path].replace(key_of(0), key))
            else:
                links[path].add(path.with_name(name))
    return dataset


def withdraw_one(dataset: Any) -> None:
    """Removes the marker of the last partition, so that it is pending."""
    name = max(name for names in dataset.marker_names().values() for name in names)
    dataset.store.delete(name)


def publish_one(dataset: Any) -> None:
    """Publishes that partition again."""
    from mm_assets.pipeline.partition_run import run_partition
    from mm_assets.pipeline.pending import pending_partitions

    for key in pending_partitions(dataset):
        assert run_partition(dataset.spec, dataset.partition(key), dataset.schema()).ok


def measured(what: str, folder: Path) -> dict[str, float]:
    """Seconds, processor seconds and megabytes of one of `MEASURES`, in this process."""
    from mm_assets.cli.main import main
    from mm_assets.pipeline.partition_run import rare_collections
    from mm_assets.pipeline.pending import pending_partitions
    from mm_assets.pipeline.publish import build_manifest

    dataset = declared(folder)
    work: Callable[[], object]
    if what == "pending":
        work = lambda: pending_partitions(dataset)  # noqa: E731 - one of three
    elif what.startswith("manifest"):
        work = lambda: build_manifest(dataset)  # noqa: E731
    else:
        os.environ["DAGSTER_HOME"] = str(folder / "home")
        settings = ["--set", "settle_seconds=0", "--set", 'checks="rollup"']
        options = ["--shards", f"{folder}/in/*.tar", "--root", f"{folder}/root", "--dataset", "many", *settings]
        work = lambda: main(["run", *options, "--jobs", "1"], standalone_mode=False)  # noqa: E731
    began, used = time.perf_counter(), _processor()
    with rare_collections():  # as the command and a load of Dagster have it
        work()
    seconds, processor = time.perf_counter() - began, _processor() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "processor_seconds": processor, "megabytes": peak}


def _processor() -> float:
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="an empty folder, for 15 files per partition")
    parser.add_argument("--numbers", default="1000,10000", help="of partitions")
    parser.add_argument("--runs", type=int, default=3, help="of each measure; medians are shown")
    parser.add_argument("--measures", default=",".join(MEASURES), help="only these; a first run records each partition")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure, arguments.data)))
        return
    print("| partitions | what | seconds | processor seconds | peak, MB |\n| ---: | --- | ---: | ---: | ---: |")
    for number in map(int, arguments.numbers.split(",")):
        folder = arguments.data / str(number)
        dataset = make_dataset(folder, number)
        (folder / "home").mkdir()
        measures = [what for what in MEASURES if what in arguments.measures.split(",")]
        # The first run registers the partitions in Dagster and makes the manifest.
        _in_a_process("run" if any(what.startswith("run") for what in measures) else "manifest", folder)
        for what in measures:
            runs = []
            for _ in range(arguments.runs):
                if what.endswith("one new"):
                    withdraw_one(dataset)
                    if what.startswith("manifest"):
                        _in_a_process("manifest", folder)
                        publish_one(declared(folder))
                runs.append(_in_a_process(what, folder))
            found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            shown = f"{found['seconds']:.2f} | {found['processor_seconds']:.2f} | {found['megabytes']:.0f}"
            print(f"| {number:,} | {what} | {shown} |", flush=True)


def _in_a_process(what: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--data", str(folder), "--measure", what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stdout}\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
