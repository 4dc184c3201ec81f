"""Measures exports and imports against `cp` of the same bytes and the owners' own converters.

    python -m benchmarks.interop --data FOLDER --owners .venv-interop/bin/python

Writes packed files of JPEGs with captions to FOLDER: 1 GB of 100 kB, and 100 MB of 10 kB. All data is in the page
cache; each round of a format measures every candidate once, and the table has the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

import mm_assets
from mm_assets.exports import EXPORTS, export
from mm_assets.fields import ImageField, JSONField, TextField
from mm_assets.storage.files import SourceFile

OWNERS = Path(__file__).with_name("owners.py")
SIZES = {"100 kB": (10_000, 100_000), "10 kB": (10_000, 10_000)}
SHARD_BYTES = 256 << 20
MAX_BYTES = 1 << 32


class Sample(NamedTuple):
    """One sample.

    Attributes:
        key: the id.
        image: a small JPEG, padded with bytes that are not decoded.
        text: the caption.
        json: the JSON.
    """

    key: str
    image: bytes
    text: str
    json: str


def samples(number: int, size: int) -> Iterator[Sample]:
    """Yields samples whose images have `size` bytes on average, and from 0.5 to 1.5 times `size`."""
    numbers = np.random.default_rng(0)
    noise = numbers.bytes(4 << 20)
    picture = BytesIO()
    Image.new("RGB", (16, 16)).save(picture, "jpeg")
    for index in range(number):
        length, start = (int(n) for n in numbers.integers((size // 2, 0), (size * 3 // 2, 2 << 20)))
        value = {"index": index, "caption": f"drawing {index}", "width": 640, "height": 480, "license": "CC0"}
        key = f"{index // 1000:03d}/{index:08d}"
        yield Sample(
            key, picture.getvalue() + noise[start : start + length], f"a drawing of number {index}", json.dumps(value)
        )


def write_samples(folder: Path, number: int, size: int) -> None:
    """Writes the samples as a packed file, and as the tar that the owners' converters read."""
    folder.mkdir(parents=True)
    fields = {"image": ImageField(), "text": TextField(), "metadata": JSONField()}
    with (
        mm_assets.create(folder / "samples.mstr", fields, fsync=False) as writer,
        tarfile.open(folder / "samples.tar", "w") as tar,
    ):
        for sample in samples(number, size):
            writer.write(sample.key, {"image": sample.image, "text": sample.text, "metadata": json.loads(sample.json)})
            for suffix, content in (
                ("jpg", sample.image),
                ("json", sample.json.encode()),
                ("txt", sample.text.encode()),
            ):
                member = tarfile.TarInfo(f"{sample.key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))


class Measure(NamedTuple):
    """The time of one run.

    Attributes:
        seconds: wall-clock time.
        processor: processor time of the process and its subprocesses, in seconds.
    """

    seconds: float
    processor: float


def measure(work: Callable[[], object]) -> Measure:
    """Returns the time of a function, including its subprocesses."""
    before, start = os.times(), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - start, os.times()
    return Measure(seconds, sum(after[:4]) - sum(before[:4]))


def copy(folder: Path, target: Path, *, sync: bool = False) -> None:
    """Copies all files with `cp`; `sync` flushes them to the disk, as an export does."""
    subprocess.run(["cp", "-r", str(folder), str(target)], check=True)
    if sync:
        files = [str(path) for path in target.rglob("*") if path.is_file()]
        subprocess.run(["sync", *files], check=True)


def import_all(folder: Path, format: str) -> int:
    """Reads all members of an export with this project's source of the format, and returns their size in bytes."""
    kind = EXPORTS[format]
    total = 0
    for path in sorted(path for path in folder.rglob(f"*{kind.SUFFIX}") if path.is_file()):
        with SourceFile(str(path)) as file:
            source = kind.source(file)
            total += sum(len(data) for _, data in source.payloads(wanted=lambda _: True, max_bytes=MAX_BYTES))
    return total


def run_owner(python: str, format: str, tar: Path, target: Path) -> Measure:
    """Returns the time of the owner's converter without the start of its process; see `owners.py`."""
    target.mkdir()
    command = [python, str(OWNERS), format, str(tar), str(target)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(target.parent)}
    process = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return Measure(*json.loads(process.stdout.splitlines()[-1]))


def measure_format(folder: Path, python: str | None, format: str) -> dict[str, Measure]:
    """Measures each candidate once, and returns the times by its name."""
    packed, out = folder / "samples.mstr", folder / "out"
    workers = os.cpu_count() or 1
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    times = {
        "export": measure(lambda: export(packed, format, out / "a", shard_bytes=SHARD_BYTES)),
        f"export, {workers} processes": measure(
            lambda: export(packed, format, out / "b", shard_bytes=SHARD_BYTES, workers=workers)
        ),
    }
    shutil.rmtree(out / "b")
    times["cp"] = measure(lambda: copy(out / "a", out / "copy"))
    shutil.rmtree(out / "copy")
    times["cp, sync"] = measure(lambda: copy(out / "a", out / "copy", sync=True))
    shutil.rmtree(out / "copy")
    times["import"] = measure(lambda: import_all(out / "a", format))
    if python is not None and format != "parquet":
        times["owner"] = run_owner(python, format, folder / "samples.tar", out / "owner")
    shutil.rmtree(out)
    return times


def report(rounds: Mapping[str, Sequence[Mapping[str, Measure]]], num_bytes: int) -> str:
    """Returns the medians as a table."""
    names = list(dict.fromkeys(name for times in rounds.values() for name in times[0]))
    lines = [
        f"| format | {' | '.join(names)} | export of `cp, sync` | export of owner |",
        "| --- |" + " ---: |" * (len(names) + 2),
    ]
    for format, times in rounds.items():
        seconds = {name: statistics.median(one[name].seconds for one in times) for name in times[0]}
        processor = {name: statistics.median(one[name].processor for one in times) for name in times[0]}
        rates = (
            ""
            if name not in seconds
            else f"{num_bytes / 1e6 / seconds[name]:,.0f}"
            if "processes" in name  # their processor time is not measured
            else f"{num_bytes / 1e6 / seconds[name]:,.0f} ({processor[name]:.2f})"
            for name in names
        )
        best = min(number for name, number in seconds.items() if name.startswith("export"))
        owner = f"{seconds['owner'] / best:.1f}" if "owner" in seconds else ""
        lines.append(f"| `{format}` | {' | '.join(rates)} | {seconds['cp, sync'] / best:.2f} | {owner} |")
    return "\n".join(lines)


def main() -> None:
    """Writes the samples if they are missing, measures, and prints a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder for 8 GB of files")
    parser.add_argument("--owners", help="Python of the environment of tests/interop/requirements.txt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, help="number of samples, for a quick try")
    parser.add_argument("--formats", nargs="*", default=[name for name in EXPORTS if name != "lerobot"])
    arguments = parser.parse_args()
    for name, (number, size) in SIZES.items():
        number = arguments.samples or number
        folder = arguments.data / f"{size}-{number}"
        if not folder.exists():
            write_samples(folder, number, size)
        num_bytes = sum(len(sample.image) + len(sample.text) + len(sample.json) for sample in samples(number, size))
        rounds = {
            format: [measure_format(folder, arguments.owners, format) for _ in range(arguments.rounds)]
            for format in arguments.formats
        }
        print(f"\n{number:,} samples of {name}, {num_bytes / 1e6:,.0f} MB, medians of {arguments.rounds}:")
        print("MB/s (processor seconds)\n")
        print(report(rounds, num_bytes), flush=True)


if __name__ == "__main__":
    main()
