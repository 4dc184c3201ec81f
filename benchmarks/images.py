"""How fast images are decoded to a training size, and how far `fast` is from `exact`.

Takes photographs, which are not part of this repository, from tar shards or folders; without any it makes pictures with
the spectrum of photographs, which is enough for speeds and says little of fidelity.

    python benchmarks/images.py --photos shards/*.tar           # prints the tables
    python benchmarks/images.py --photos shards/*.tar --write   # and puts them into benchmarks/README.md
    python benchmarks/images.py --photos shards/*.tar --without-opencv  # how far Pillow's resizing is from OpenCV's

Speeds are those of two threads in one process, in interleaved rounds; what counts are ratios within a round, and where
other work runs beside them those of the processor's time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from mm_assets.fields import ImageField
from mm_assets.fields.image_decode import SCALES, scaled

FOLDER = Path(__file__).resolve().parent
BEGIN, END = "<!-- images.py writes from here -->", "<!-- to here -->"

SIZE = (224, 224)
SIDES = (224, 512)  # of the pictures that speeds are measured with
NUM_PICTURES = 320
THREADS = 2
BATCH = 64
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff")
PSNR_SIZES = (224, 160, 112, 80, 56)

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Picture:
    """A JPEG and its (height, width)."""

    data: bytes
    size: tuple[int, int]


def photos_of(places: list[Path], suffixes: tuple[str, ...] = (".jpg", ".jpeg")) -> Iterator[bytes]:
    """The images of tar shards and folders, by their names."""
    for place in places:
        if place.is_dir():
            paths = (path for path in sorted(place.rglob("*")) if path.name.lower().endswith(suffixes))
            yield from (path.read_bytes() for path in paths)
            continue
        with tarfile.open(place) as shard:
            for member in shard:
                source = shard.extractfile(member) if member.name.lower().endswith(suffixes) else None
                if source is not None:
                    yield source.read()


def made_photos(count: int) -> Iterator[bytes]:
    """JPEGs of noise whose power falls with the square of the frequency, as that of photographs does."""
    rng = np.random.default_rng(0)
    height, width = 480, 640
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = 1
    for _ in range(count):
        spectrum = np.fft.rfft2(rng.normal(size=(3, height, width))) / frequency
        noise = np.fft.irfft2(spectrum, (height, width)).transpose(1, 2, 0)
        pixels = np.clip(noise / noise.std() * 55 + 118, 0, 255).astype(np.uint8)
        yield simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=92, colorsubsampling="420")


def training_pictures(photos: list[bytes]) -> list[Picture]:
    """JPEGs (4:2:0, quality 90) with sides drawn from `SIDES`, of photographs shrunk by area: none is enlarged."""
    rng = np.random.default_rng(1)
    decoded = [simplejpeg.decode_jpeg(photo) for photo in photos]
    made = []
    for number in range(NUM_PICTURES):
        pixels = decoded[number % len(decoded)]
        height, width = (min(int(rng.integers(SIDES[0], SIDES[1] + 1)), side) for side in pixels.shape[:2])
        shrunk = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(shrunk), quality=90, colorsubsampling="420")
        made.append(Picture(data, (height, width)))
    return made


# --- speed ------------------------------------------------------------------------------------------------------------


def bare_exact(pictures: list[Picture], out: Pixels) -> None:
    """The least that `exact` can be: both libraries called one after the other, with one buffer."""
    buffer = np.empty(max(height * width for height, width in (one.size for one in pictures)) * 3, dtype=np.uint8)
    for row, one in enumerate(pictures):
        pixels = buffer[: one.size[0] * one.size[1] * 3].reshape(*one.size, 3)
        simplejpeg.decode_jpeg(one.data, buffer=pixels)
        cv2.resize(pixels, SIZE[::-1], dst=out[row], interpolation=cv2.INTER_AREA)


def bare_decode(pictures: list[Picture], out: Pixels) -> None:
    """Decoding alone, nothing resized."""
    buffer = np.empty(max(height * width for height, width in (one.size for one in pictures)) * 3, dtype=np.uint8)
    for one in pictures:
        simplejpeg.decode_jpeg(one.data, buffer=buffer[: one.size[0] * one.size[1] * 3].reshape(*one.size, 3))


def of_field(
    pictures: list[Picture], *, store: ImageField, read: ImageField
) -> Callable[[list[Picture], Pixels], None]:
    """What `read` takes for payloads that `store` made, in batches."""
    payloads = {id(one): store.encode(one.data) for one in pictures}

    def run(some: list[Picture], out: Pixels) -> None:
        for start in range(0, len(some), BATCH):
            part = [payloads[id(one)] for one in some[start : start + BATCH]]
            records = np.frombuffer(b"".join(one.metadata for one in part), dtype=np.uint8).reshape(len(part), -1)
            read.decode_batch(records, [one.data for one in part], out[start : start + len(part)])

    return run


def seconds_of(
    run: Callable[[list[Picture], Pixels], None], pictures: list[Picture], out: Pixels
) -> tuple[float, float]:
    """How long `THREADS` threads take, each with its share; and the seconds of processor that all take together."""
    bounds = [len(pictures) * k // THREADS for k in range(THREADS + 1)]
    errors: list[BaseException] = []
    processor: list[float] = []
    barrier = threading.Barrier(THREADS + 1)

    def work(start: int, stop: int) -> None:
        barrier.wait()
        started = time.thread_time()
        try:
            run(pictures[start:stop], out[start:stop])
            processor.append(time.thread_time() - started)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=pair) for pair in itertools.pairwise(bounds)]
    for thread in threads:
        thread.start()
    barrier.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - started, sum(processor)


def speeds(pictures: list[Picture], rounds: int) -> str:
    """The table of speeds."""
    common: dict[str, Any] = {"channels": 3, "decode_size": SIZE}
    kept = ImageField()
    runs = {
        "decoding alone, in a bare loop": bare_decode,
        "decoding and area resize, in a bare loop": bare_exact,
        "`exact`": of_field(pictures, store=kept, read=ImageField(**common)),
        "`fast`": of_field(pictures, store=kept, read=ImageField(**common, decode_mode="fast")),
        "stored at 224 x 224": of_field(
            pictures,
            store=ImageField(encoding="jpeg", size=SIZE, channels=3),
            read=ImageField(encoding="jpeg", size=SIZE, channels=3),
        ),
    }
    out = np.empty((len(pictures), *SIZE, 3), dtype=np.uint8)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        run(pictures[:BATCH], out)
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(seconds_of(run, pictures, out))
    lines = [
        f"| | images/s, {THREADS} threads | of the bare loop | of `exact` | processor ms per image | of `exact` |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]

    def ratio(name: str, other: str, kind: int) -> float:
        pairs = zip(taken[other], taken[name], strict=True)
        return statistics.median(base[kind] / own[kind] for base, own in pairs)

    for name, times in taken.items():
        rate = len(pictures) / statistics.median(one[0] for one in times)
        cost = statistics.median(one[1] for one in times) / len(pictures) * 1000
        bare, exact = (ratio(name, other, 0) for other in ("decoding and area resize, in a bare loop", "`exact`"))
        lines.append(
            f"| {name} | {rate:,.0f} | {bare:.2f} | {exact:.2f} | {cost:.2f} | {1 / ratio(name, '`exact`', 1):.2f} |"
        )
    return "\n".join(lines)


# --- fidelity ---------------------------------------------------------------------------------------------------------


def psnr(one: Pixels, other: Pixels) -> float:
    """Peak signal to noise of two images, dB; of equal ones 100."""
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return 100.0 if error == 0 else min(100.0, 10 * float(np.log10(255**2 / error)))


def scale_of(size: tuple[int, int], wanted: tuple[int, int]) -> int:
    """The scale at which `fast` decodes an image that is stretched."""
    return next((s for s in SCALES if all(a >= b for a, b in zip(scaled(size, s), wanted, strict=True))), 1)


def compare(pictures: list[Picture], side: int, policy: str) -> dict[int, list[float]]:
    """PSNR of `fast` against `exact`, by the scale that was decoded at (0: any, where images are cropped)."""
    wanted = (side, side)
    settings: dict[str, Any] = {"channels": 3, "decode_size": wanted, "decode_resize": policy}
    exact, fast = ImageField(**settings), ImageField(**settings, decode_mode="fast")
    found: dict[int, list[float]] = {}
    for one in pictures:
        payload = exact.encode(one.data)
        scale = scale_of(one.size, wanted) if policy == "stretch" else 0
        found.setdefault(scale, []).append(psnr(exact.decode(*payload), fast.decode(*payload)))
    return found


def fidelity(photos: list[Picture], pictures: list[Picture]) -> str:
    """The table of PSNR."""
    lines = [
        "| pictures | to | decoded at | number | median dB | 5th percentile | worst |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]

    def add(title: str, some: list[Picture], side: int, policy: str) -> None:
        found = compare(some, side, policy)
        parts = sorted(found.items())
        if len(parts) > 1:
            parts.append((-1, [value for values in found.values() for value in values]))
        for scale, values in parts:
            words = {1: "full size", 0: "any", -1: "**all**"}.get(scale, f"1/{scale}")
            low = float(np.percentile(values, 5))
            row = (title, f"{side}, {policy}", words, len(values), f"{statistics.median(values):.1f}", f"{low:.1f}")
            lines.append("| " + " | ".join(map(str, row)) + f" | {min(values):.1f} |")

    add("training", pictures, SIZE[0], "stretch")
    for side in PSNR_SIZES:
        add("photographs", photos, side, "stretch")
    add("photographs", photos, SIZE[0], "crop")
    return "\n".join(lines)


def without_opencv(images: list[bytes]) -> str:
    """The table of what Pillow's resizing gives, against `exact` with OpenCV, for images that are not enlarged."""
    lines = [
        "| to | mode | number | median dB | 5th percentile | worst | processor time, of OpenCV's |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    payloads = [ImageField().encode(one) for one in images]
    for side, mode in itertools.product((224, 112, 64), ("exact", "fast")):
        exact = ImageField(channels=3, decode_size=(side, side))
        field = ImageField(channels=3, decode_size=(side, side), decode_mode=mode)
        values, seconds = [], [0.0, 0.0]
        for payload in payloads:
            if min(np.frombuffer(payload.metadata, "<u4", 2)) < side:
                continue
            expected = exact.decode(*payload)
            for number, resizer in enumerate((cv2, None)):
                with mock.patch("mm_assets.fields.image_resize._opencv", lambda found=resizer: found):
                    started = time.thread_time()
                    pixels = field.decode(*payload)
                    seconds[number] += time.thread_time() - started
            values.append(psnr(expected, pixels))
        low, ratio = float(np.percentile(values, 5)), seconds[1] / seconds[0]
        row = (f"{side}, stretch", mode, len(values), f"{statistics.median(values):.1f}", f"{low:.1f}")
        lines.append("| " + " | ".join(map(str, row)) + f" | {min(values):.1f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=Path, nargs="*", default=[], help="tar shards or folders with JPEGs")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the speed measurement")
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--without-opencv", action="store_true", help="only compare Pillow's resizing with OpenCV's")
    arguments = parser.parse_args()
    if arguments.without_opencv:
        print(without_opencv(list(photos_of(arguments.photos, IMAGES)) or list(made_photos(12))))
        return
    if arguments.write and not arguments.photos:
        parser.error("--write needs --photos: the figures of made pictures say nothing of photographs")
    data = list(photos_of(arguments.photos)) if arguments.photos else list(made_photos(12))
    photos = [Picture(one, simplejpeg.decode_jpeg_header(one)[:2]) for one in data]
    photos = [one for one in photos if min(one.size) >= SIDES[0]]
    if not photos:
        parser.error(f"no JPEG whose sides are {SIDES[0]} and more")
    pictures = training_pictures([one.data for one in photos])
    shorter = sorted(min(one.size) for one in photos)
    kilobytes = sum(len(one.data) for one in pictures) / len(pictures) / 1000
    text = (
        f"{len(photos)} {'photographs' if arguments.photos else 'made pictures'}, the shorter side {shorter[0]} to "
        f"{shorter[-1]} pixels, median {statistics.median(shorter):.0f}; and {len(pictures)} training pictures made of "
        f"them, {kilobytes:.0f} KB each. One-minute load before the measurement: {os.getloadavg()[0]:.1f}.\n\n"
        f"{speeds(pictures, arguments.rounds)}\n\n{fidelity(photos, pictures)}"
    )
    print(text)
    if arguments.write:
        page = FOLDER / "README.md"
        before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise SystemExit(f"{page} has no lines {BEGIN!r} and {END!r} to write between")
        page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
