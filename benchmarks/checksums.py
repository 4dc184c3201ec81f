"""What verifying checksums adds to reads that decode, which is the default, over reads that do not verify.

Makes 20,000 values of 1 KiB that decode to themselves, the worst case, and 200 JPEG images of 256 x 256, as MULT and as
MSTR, in a temporary folder. Both ways read all of them in turns, warm, in random order, five rounds after one that does
not count; the medians of the process' CPU time are reported.

    python benchmarks/checksums.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mm_assets
from mm_assets.fields import BytesField, Field, ImageField

ROUNDS = 5
BATCH = 50
Read = Callable[[mm_assets.Dataset, list[int]], Any]


def read_batches(data: mm_assets.Dataset, order: list[int]) -> None:
    """Batch after batch into arrays or lists."""
    for start in range(0, len(order), BATCH):
        data.read_batch(order[start : start + BATCH])


def get_items(data: mm_assets.Dataset, order: list[int]) -> None:
    """Batch after batch as torch's DataLoader reads them."""
    for start in range(0, len(order), BATCH):
        data.__getitems__(order[start : start + BATCH])


def read_singly(data: mm_assets.Dataset, order: list[int]) -> None:
    """One sample after the other."""
    for i in order:
        data[i]


READS: dict[str, Read] = {"read_batch": read_batches, "__getitems__": get_items, "data[i]": read_singly}


def image(i: int) -> np.ndarray[Any, Any]:
    """A picture with noise: (256, 256, 3) uint8."""
    y, x = np.mgrid[:256, :256]
    noise = np.random.default_rng(i).integers(0, 20, (256, 256, 3))
    return (np.stack([x + i, 2 * y + i, x * y // 64 + i], -1) + noise).astype(np.uint8)


def cost(path: Path, read: Read) -> tuple[float, float]:
    """Microseconds for one value, unverified and verified."""
    times: tuple[list[float], list[float]] = [], []
    with mm_assets.open(path, verify=False) as plain, mm_assets.open(path) as checked:
        order = np.random.default_rng(1).permutation(len(plain)).tolist()
        for _ in range(ROUNDS + 1):
            for found, data in zip(times, (plain, checked), strict=True):
                start = time.process_time()
                read(data, order)
                found.append((time.process_time() - start) / len(order) * 1e6)
    without, verified = (statistics.median(found[1:]) for found in times)
    return without, verified


def main() -> None:
    """Print a table."""
    rng = np.random.default_rng(0)
    kinds: dict[str, tuple[Field, int, Callable[[int], Any]]] = {
        "1 KiB of bytes": (BytesField(), 20_000, lambda _: rng.bytes(1024)),
        "JPEG, 256 x 256": (ImageField(channels=3), 200, image),
    }
    print(
        "| values | file | read by | unverified, µs | verified, µs | more |\n| --- | --- | --- | ---: | ---: | ---: |"
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind, (field, count, make) in kinds.items():
            for form in ("mult", "mstr"):
                path = Path(folder) / f"{count}.{form}"
                with mm_assets.create(path, {"value": field}, fsync=False) as writer:
                    for i in range(count):
                        writer.write(str(i), {"value": make(i)})
                for name, read in READS.items():
                    without, verified = cost(path, read)
                    more = f"{verified - without:.1f} µs, {verified / without - 1:.0%}"
                    print(
                        f"| {kind} | {form.upper()} | `{name}` | {without:.1f} | {verified:.1f} | {more} |", flush=True
                    )


if __name__ == "__main__":
    main()
