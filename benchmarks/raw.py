"""Raw reading and writing of packed files against bare loops over a mapping with known positions.

Makes 20,000 distinct samples of an image (random bytes of a JPEG's size), a caption and a second of audio, 1.1 GB, as
MULT and as MSTR, and runs on them, each row in a fresh process per round and the medians of five rounds reported:

- random batches of 64 and sequential scans, of all modalities and of the caption alone. A bare loop slices the same
  views out of a mapping of its own, from positions in Python lists. Both read the first byte of every view. They
  alternate within one pass, and are timed by the thread's CPU time, so that other work on the machine affects the ratio
  little. The first pass pays for the pages' first touch, the second does not.
- the same batches from a cold file, for 0.3 s, against loops that know the positions: one that asks the kernel for a
  batch's pages before it touches them, and one that only touches them.
- opening, warm and cold, with 20 thousand samples and with 20 million; the first batch from open.
- writing from memory, checksums on, fsync off, against a loop that writes the payloads alone.

    python benchmarks/raw.py [--data FOLDER] [--rounds 5] [--samples 20000] [--rows random-all-mult ...]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mm_assets
from mm_assets.formats import (
    ModalitySpec,
    MstrWriter,
    MultWriter,
    Payload,
    crc32c,
    open_reader,
)
from mm_assets.formats.output import JoinedFile
from mm_assets.formats.records import MULT_DESCRIPTOR, MULT_HEADER, MULT_MAGIC, TRAILER, mult_body_ptr
from mm_assets.formats.tail import TailWriter, dump_schema

SPECS = (
    ModalitySpec(name="image", type_id=10, metadata_size=16, type_name="ImageField"),
    ModalitySpec(name="text", type_id=2, metadata_size=8, type_name="TextField"),
    ModalitySpec(name="audio", type_id=40, metadata_size=24, type_name="AudioField"),
)
ALL = tuple(spec.name for spec in SPECS)
BATCH = 64
ROUNDS = {True: 10, False: 4}  # of a pass, shuffled or not: a scan reads ahead, which must not be a round's main work
COLD_SECONDS = 0.3
LARGE = 20_000_000  # samples of the file that is only opened
WRITERS = {"mult": MultWriter, "mstr": MstrWriter}
Row = Callable[[Path, int], dict[str, float]]


def samples(count: int) -> list[tuple[str, dict[str, Payload]]]:
    """Samples of 12 to 34 KB of image, a short caption and 32 KB of audio; the same every time."""
    generator = np.random.default_rng(4)
    pool = generator.bytes(64 << 20)
    sizes = generator.integers(12_000, 34_000, count).tolist()
    starts = generator.integers(0, len(pool) - 100_000, count).tolist()
    captions = generator.integers(40, 200, count).tolist()
    found = []
    for i, (size, start, caption) in enumerate(zip(sizes, starts, captions, strict=True)):
        payloads = {
            "image": Payload(i.to_bytes(16, "little"), pool[start : start + size]),
            "text": Payload(i.to_bytes(8, "little"), pool[start + size : start + size + caption]),
            "audio": Payload(i.to_bytes(24, "little"), pool[start + 40_000 : start + 72_000]),
        }
        found.append((f"{i:08d}", payloads))
    return found


def make(folder: Path, count: int) -> None:
    """The two files of the bench, unless they are there, and one of many samples that holds nothing."""
    for form, writer in WRITERS.items():
        if not (folder / f"x.{form}").exists():
            with writer(folder / f"x.{form}", SPECS, num_samples=count) as file:
                for sample_id, payloads in samples(count):
                    file.write(sample_id, payloads)
    if not (folder / "large.mult").exists():
        make_large(folder / "large.mult")


def make_large(path: Path) -> None:
    """A MULT file of 20 million absent samples, a hole on the disk: opening reads nothing that grows with them."""
    header = np.array((MULT_MAGIC, 1, LARGE, len(SPECS)), MULT_HEADER).tobytes()
    rows = [(crc(spec.name), spec.type_id, spec.metadata_size) for spec in SPECS]
    head = header + np.array(rows, MULT_DESCRIPTOR).tobytes()
    position = mult_body_ptr(len(SPECS), LARGE)
    with JoinedFile(path.open("wb", buffering=0)) as file:
        file.write(head)
        tail = TailWriter(file)
        for kind, size in ((2, 8 * (LARGE + 1)), (3, 16 * LARGE * len(SPECS))):
            tail.refer(kind, position, size, 0)  # their checksums are verify's matter
            position += -(-size // 64) * 64
        tail.refer(4, len(head), 16 * LARGE, 0)
        file.seek(position)
        tail.add(1, dump_schema("MULT", SPECS, [0] * len(SPECS), {}))
        trailer = tail.finish()
        file.write(trailer._replace(head_crc32c=crc32c(head)).to_bytes())
        file.flush()
    if path.stat().st_size != trailer.table_ptr + trailer.table_size + TRAILER.itemsize:
        raise SystemExit("the large file came out wrong")


def crc(name: str) -> int:
    """A modality's name hash."""
    from mm_assets.formats import name_hash

    return name_hash(name)


def evict(path: Path) -> None:
    """Puts a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def load(path: Path) -> None:
    """Brings a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        block = bytearray(8 << 20)
        while file.readinto(block):
            pass


class Known:
    """A mapping, and where every payload's data is: what a bare loop starts from."""

    def __init__(self, path: Path, names: tuple[str, ...], *, random: bool) -> None:
        with mm_assets.open(path) as data:
            count = len(data)
            columns = []
            for name in names:
                views = data.read_raw(range(count), [name])[name]
                base = np.frombuffer(views[0].obj, np.uint8).__array_interface__["data"][0]
                at = [np.frombuffer(v, np.uint8).__array_interface__["data"][0] - base for v in views]
                columns += [at, [start + len(v) for start, v in zip(at, views, strict=True)]]
            del views
        self.columns = columns
        self.rows = list(zip(*columns, strict=True))
        self.file = path.open("rb")
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        if random:
            self.map.madvise(mmap.MADV_RANDOM)
        self.view = memoryview(self.map)

    def read(self, order: list[int]) -> int:
        """One view per payload of the samples, and its first byte."""
        view, total = self.view, 0
        if len(self.columns) == 2:
            starts, ends = self.columns
            for i in order:
                total += view[starts[i] : ends[i]][0]
            return total
        rows = self.rows
        for i in order:
            a, b, c, d, e, f = rows[i]
            total += view[a:b][0] + view[c:d][0] + view[e:f][0]
        return total


def touch(batch: dict[str, list[memoryview | None]]) -> int:
    """The first byte of every view of a batch."""
    total = 0
    if len(batch) == 1:
        for column in batch.values():
            for one in column:
                total += one[0]
        return total
    for x, y, z in zip(*batch.values(), strict=True):
        total += x[0] + y[0] + z[0]
    return total


def passes(folder: Path, count: int, form: str, names: tuple[str, ...], *, shuffled: bool) -> dict[str, float]:
    """Two passes, ours and the bare loop in rounds; samples per second of CPU time."""
    path = folder / f"x.{form}"
    known = Known(path, names, random=False)
    generator = np.random.default_rng(os.getpid())
    order = generator.permutation(count) if shuffled else np.arange(count)
    rounds = ROUNDS[shuffled]
    parts = np.array_split(order, rounds)
    found: dict[str, float] = {}
    with mm_assets.open(path) as data:
        for number in ("first", "second"):
            scan = Scan(data, names)
            seconds = {"ours": 0.0, "bare": 0.0}
            totals = {"ours": 0, "bare": 0}
            for k in range(rounds):
                # Not the same part right after each other: it would be in the processor's cache.
                mine, theirs = parts[k], parts[(k + rounds // 2) % rounds].tolist()
                sides: dict[str, Callable[[], int]] = {
                    "ours": lambda mine=mine, scan=scan: (
                        shuffled_batches(data, mine, names) if shuffled else scan.read(len(mine))
                    ),
                    "bare": lambda theirs=theirs: known.read(theirs),
                }
                for side in ("ours", "bare") if k % 2 else ("bare", "ours"):
                    start = time.thread_time()
                    totals[side] += sides[side]()
                    seconds[side] += time.thread_time() - start
            if totals["ours"] != totals["bare"]:
                raise SystemExit(f"{path}: the two loops read different bytes")
            for side, one in seconds.items():
                found[f"{number} pass, {side}"] = count / one
            found[f"{number} pass, ratio"] = seconds["bare"] / seconds["ours"]
    return found


def shuffled_batches(data: mm_assets.Dataset, indices: np.ndarray, names: tuple[str, ...]) -> int:
    """The same by `read_raw`."""
    return sum(touch(data.read_raw(indices[k : k + BATCH], names)) for k in range(0, len(indices), BATCH))


class Scan:
    """The same by one `stream_raw`, a part at a time: up to a block more than asked for, and less the next time."""

    def __init__(self, data: mm_assets.Dataset, names: tuple[str, ...]) -> None:
        self.blocks = data.stream_raw(None, names)
        self.wanted = 0

    def read(self, count: int) -> int:
        """The next samples."""
        total = 0
        self.wanted += count
        while self.wanted > 0:
            block = next(self.blocks)
            total += touch(block)
            self.wanted -= len(next(iter(block.values())))
        return total


def cold(folder: Path, count: int) -> dict[str, float]:
    """Random batches of all modalities from a file that is not in memory; samples per second of wall time."""
    path = folder / "x.mult"
    known = Known(path, ALL, random=True)
    spans = np.array([(min(row[::2]), max(row[1::2])) for row in known.rows])
    spans[:, 0] = spans[:, 0] // 4096 * 4096
    order = np.random.default_rng(os.getpid()).permutation(count)
    batches = [order[k : k + BATCH] for k in range(0, count, BATCH)]
    fd = known.file.fileno()
    # Everything is read, not only its first byte: what is measured is when it arrives.
    pages = [np.arange(start, end, 4096).tolist() for start, end in spans.tolist()]

    def touch_pages(indices: list[int]) -> int:
        return sum(known.map[position] for i in indices for position in pages[i])

    def bare(indices: np.ndarray) -> None:
        touch_pages(indices.tolist())

    def advised(indices: np.ndarray) -> None:
        for start, end in spans[indices].tolist():
            os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_WILLNEED)
        touch_pages(indices.tolist())

    found = {}
    for name, read in (("advised", advised), ("ours", None), ("bare", bare), ("ours again", None)):
        known.map.madvise(mmap.MADV_DONTNEED)
        evict(path)
        with mm_assets.open(path) as data:
            done, start = 0, time.perf_counter()
            for indices in batches:
                if read is None:
                    data.read_raw(indices)
                    touch_pages(indices.tolist())
                else:
                    read(indices)
                done += len(indices)
                if time.perf_counter() - start > COLD_SECONDS:
                    break
            found[name] = done / (time.perf_counter() - start)
    found["ratio"] = (found["ours"] + found.pop("ours again")) / 2 / found["advised"]
    return found


def opening(folder: Path, count: int) -> dict[str, float]:
    """Milliseconds of opening, and of the first batch of all modalities from open."""
    found = {}
    for name in ("x.mult", "x.mstr", "large.mult"):
        path = folder / name
        open_reader(path).close()  # imports and code paths
        times = []
        for _ in range(20):
            start = time.perf_counter()
            reader = open_reader(path)
            times.append(time.perf_counter() - start)
            reader.close()
        found[f"{name}, warm ms"] = 1e3 * statistics.median(times)
        times = []
        for _ in range(5):
            evict(path)
            start = time.perf_counter()
            reader = open_reader(path)
            times.append(time.perf_counter() - start)
            reader.close()
        found[f"{name}, cold ms"] = 1e3 * statistics.median(times)
    indices = np.random.default_rng(1).permutation(count)[:BATCH]
    for state, prepare in (("cold", evict), ("warm", load)):
        prepare(folder / "x.mult")
        start = time.perf_counter()
        with mm_assets.open(folder / "x.mult") as data:
            touch(data.read_raw(indices))
            found[f"x.mult, first batch, {state} ms"] = 1e3 * (time.perf_counter() - start)
    return found


def writing(folder: Path, count: int) -> dict[str, float]:
    """GB/s of payload from memory into a new file, checksums on, fsync off."""
    content = samples(count)
    size = sum(len(part) for _, payloads in content for payload in payloads.values() for part in payload)
    found = {}
    path = folder / "written"

    def bare() -> None:
        with JoinedFile(path.open("wb", buffering=0)) as file:
            for _, payloads in content:
                for payload in payloads.values():
                    file.write(payload.metadata)
                    file.write(payload.data)
            file.flush()

    def packed(form: str, announced: int | None) -> None:
        with WRITERS[form](path, SPECS, num_samples=announced, fsync=False) as file:
            for sample_id, payloads in content:
                file.write(sample_id, payloads)

    tasks: dict[str, Callable[[], None]] = {"bare": bare}
    for form in WRITERS:
        tasks[f"{form}, num_samples given"] = lambda form=form: packed(form, count)
        tasks[f"{form}, not given"] = lambda form=form: packed(form, None)
    for name, task in tasks.items():
        os.sync()  # what another task wrote must not be written out on this one's time
        start = time.perf_counter()
        task()
        found[f"{name}, GB/s"] = size / (time.perf_counter() - start) / 1e9
        found[f"{name}, size over payload %"] = 100 * (path.stat().st_size / size - 1)
        path.unlink()
    return found


ROWS: dict[str, Row] = {
    "random-all-mult": lambda folder, count: passes(folder, count, "mult", ALL, shuffled=True),
    "random-text-mult": lambda folder, count: passes(folder, count, "mult", ("text",), shuffled=True),
    "random-text-mstr": lambda folder, count: passes(folder, count, "mstr", ("text",), shuffled=True),
    "scan-all-mult": lambda folder, count: passes(folder, count, "mult", ALL, shuffled=False),
    "scan-text-mstr": lambda folder, count: passes(folder, count, "mstr", ("text",), shuffled=False),
    "cold-random-all-mult": cold,
    "open": opening,
    "write": writing,
}
NEED_WARM = ("random-", "scan-")


def rounds(folder: Path, count: int, names: list[str], number: int) -> Iterator[tuple[str, dict[str, float]]]:
    """The rows in turns, each in a fresh process, and their medians."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(number):
        for name in names:
            if name.startswith(NEED_WARM):
                load(folder / f"x.{name[-4:]}")
            command = [sys.executable, __file__, "--data", str(folder), "--samples", str(count), "--one", name]
            result = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found[name].append(json.loads(result.stdout))
    for name, results in found.items():
        yield name, {key: statistics.median(result[key] for result in results) for key in results[0]}


def main() -> None:
    """Runs the rows and prints their medians."""
    parser = argparse.ArgumentParser(description="raw reads and writes of packed files against bare loops")
    parser.add_argument("--data", type=Path, help="folder of the files; made there, and kept, where they are not")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--one", choices=list(ROWS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(ROWS[arguments.one](arguments.data, arguments.samples)))
        return
    with tempfile.TemporaryDirectory(prefix="mm-assets-raw-") as scratch:
        folder: Path = arguments.data or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, arguments.samples)
        report(rounds(folder, arguments.samples, arguments.rows, arguments.rounds))


def report(results: Iterator[tuple[str, dict[str, Any]]]) -> None:
    """Prints a line per figure; loads tell how busy the machine was."""
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, figures in results:
        for key, value in figures.items():
            print(f"{name:22} {key:36} {value:14,.3f}" if value < 1000 else f"{name:22} {key:36} {value:14,.0f}")


if __name__ == "__main__":
    main()
