"""Batches of small values beside a bare loop that does what cannot be left out.

Makes a MULT and an MSTR file of 20,000 samples for each kind of value. For random batches out of the page cache it
measures, by the thread's CPU time and alternating within a round, so that other work on the machine affects the ratio
little:

- a bare loop: from positions and checksums in Python lists, it slices the payloads out of a mapping, compares their
  checksums, and joins their data to one array, or makes texts of them. It checks no record and knows no absent value.
- the raw read, `Dataset.read_raw` with its checksums, and the same joining.
- `Dataset.read_batch`, into arrays that are used again where the batch is one.

    python -m benchmarks.loading.values [--data FOLDER] [--rounds 5] [--sizes 32 256 1024] [--kinds array tokens ...]
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

import mm_assets
from mm_assets.fields import AudioField, Field, NDArrayField, ScalarField, TextField, TimeSeriesField, TokensField

NUM_SAMPLES = 20_000
SECONDS = 0.1  # of a measurement
TIMES = np.arange(16) / 10
GENERATOR = np.random.default_rng(1)

Join = Callable[[list[Any]], Any]


def joined(dtype: str, result: str | None = None) -> Join:
    """Joins buffers to one array, which is converted to another dtype where the field does so."""

    def join(datas: list[Any]) -> npt.NDArray[Any]:
        array = np.frombuffer(bytearray().join(datas), dtype)
        return array if result is None else array.astype(result)

    return join


class Kind(NamedTuple):
    """A kind of value.

    Attributes:
        field: stores it.
        value: makes the value of a sample.
        join: what the bare loop makes of the data of a batch.
    """

    field: Field
    value: Callable[[int], Any]
    join: Join


def _floats(*shape: int) -> npt.NDArray[np.float32]:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def _ids(_: int) -> npt.NDArray[Any]:
    return GENERATOR.integers(0, 50_000, int(GENERATOR.integers(16, 128)))


def _sound(_: int) -> tuple[npt.NDArray[np.int16], int]:
    return GENERATOR.integers(-32_768, 32_767, (800, 1)).astype(np.int16), 16_000


def _scalars(datas: list[Any]) -> npt.NDArray[np.float32]:
    return np.zeros(len(datas), np.float32)  # the value is in the record


KINDS = {
    "scalar": Kind(ScalarField("float32"), float, _scalars),
    "array (8,)": Kind(NDArrayField("float32", (8,)), lambda _: _floats(8), joined("<f4")),
    "array (128,)": Kind(NDArrayField("float32", (128,)), lambda _: _floats(128), joined("<f4")),
    "array (1..31, 8)": Kind(
        NDArrayField("float32", (None, 8)), lambda _: _floats(int(GENERATOR.integers(1, 32)), 8), joined("<f4")
    ),
    "tokens, ragged": Kind(TokensField(vocab_size=50_000), _ids, joined("<u2", "<i8")),
    "tokens, padded to 128": Kind(TokensField(vocab_size=50_000, max_tokens=128), _ids, joined("<u2", "<i8")),
    "series (16, 7)": Kind(
        TimeSeriesField(num_steps=16, num_columns=7, dtype="float32"),
        lambda i: (TIMES + i, _floats(16, 7)),
        joined("u1"),
    ),
    "series, ragged": Kind(TimeSeriesField(), lambda i: (TIMES[: i % 9 + 8] + i, _floats(i % 9 + 8, 7)), joined("u1")),
    "PCM, int16": Kind(AudioField(decoded="int16"), _sound, joined("<i2")),
    "PCM, float32": Kind(AudioField(), _sound, joined("<i2", "<f4")),
    "text": Kind(
        TextField(),
        lambda _: "word " * int(GENERATOR.integers(5, 40)),
        lambda datas: list(map(str, datas, repeat("utf-8"))),
    ),
}


def bare_loop(path: Path, dataset: mm_assets.Dataset, indices: npt.NDArray[np.int64], join: Join) -> Callable[[], Any]:
    """The loop over known positions of a batch."""
    stored = [one for one in dataset.stored(indices, ["value"])["value"] if one is not None]
    ends = [one.offset + one.size for one in stored]
    sums = [one.crc32c for one in stored]
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if all(one.record is None for one in stored):  # MULT's records precede the data
        size = stored[0].record_size
        starts = [one.offset - size for one in stored]

        def read() -> Any:
            views = [view[start:end] for start, end in zip(starts, ends, strict=True)]
            if list(map(crc32c, views)) != sums:
                raise ValueError("a checksum differs")
            return join([one[size:] for one in views])

    else:
        records, starts = [one.metadata() for one in stored], [one.offset for one in stored]

        def read() -> Any:
            views = [view[start:end] for start, end in zip(starts, ends, strict=True)]
            if list(map(crc32c, views, map(crc32c, records))) != sums:
                raise ValueError("a checksum differs")
            return join(views)

    return read


def seconds_of(function: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    count, begin, elapsed = 0, time.thread_time(), 0.0
    while elapsed < SECONDS:
        function()
        count, elapsed = count + 1, time.thread_time() - begin
    return elapsed / count


def measure(path: Path, kind: Kind, size: int, rounds: int) -> list[float]:
    """Medians: microseconds per sample of the bare loop, the raw read, `read_batch`, and the last over the others."""
    rows = []
    with mm_assets.open(path) as dataset, mm_assets.open(path, verify=True) as verified:
        out = dataset.empty_batch(size)
        for _ in range(rounds):
            indices = GENERATOR.permutation(len(dataset))[:size]
            loop = bare_loop(path, dataset, indices, kind.join)

            def raw(indices: npt.NDArray[np.int64] = indices) -> Any:
                return kind.join(verified.read_raw(indices, ["value"])["value"])

            def batch(indices: npt.NDArray[np.int64] = indices) -> Any:
                return dataset.read_batch(indices, ["value"], out=out)

            for function in (loop, raw, batch):
                function()
            bare, stored, decoded = (seconds_of(function) / size * 1e6 for function in (loop, raw, batch))
            rows.append((bare, stored, decoded, decoded / bare, decoded / stored))
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.data) as folder:
        print("| value | container | samples | bare loop | `read_raw`, copy | `read_batch` | of bare | of raw |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for name in arguments.kinds:
            kind = KINDS[name]
            for form in ("mult", "mstr"):
                path = Path(folder, f"{name.replace('/', '_')}.{form}")
                with mm_assets.create(path, {"value": kind.field}) as writer:
                    for i in range(NUM_SAMPLES):
                        writer.write(str(i), {"value": kind.value(i)})
                for size in arguments.sizes:
                    *times, of_bare, of_raw = measure(path, kind, size, arguments.rounds)
                    cells = [*(f"{time:.2f}" for time in times), f"{of_bare:.1f}", f"{of_raw:.1f}"]
                    print(f"| {name} | {form} | {size:,} | {' | '.join(cells)} |", flush=True)
                path.unlink()


if __name__ == "__main__":
    main()
