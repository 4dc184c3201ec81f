"""Shards of samples that all differ: interleaved documents, pairs, and many tiny members.

A shard depends on its kind and number alone, so that the same size gives the same bytes with the same libjpeg. The
JSON names the images as MINT-1T does, which every candidate reads. Images are smooth noise with fine grain, which
compresses about as a photograph does.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GRAIN = 14  # of 256 levels
QUALITY = 85
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)

Members = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of shards.

    Attributes:
        title: in the report.
        sample: the members of a sample, by its key and a generator of random numbers.
        num_shards: at full size.
        num_samples: of a shard at full size, or None.
        num_bytes: of a shard's members at full size, at least, or None.
    """

    title: str
    sample: Callable[[str, np.random.Generator], Members]
    num_shards: int = 1
    num_samples: int | None = None
    num_bytes: int | None = None


def _words(random: np.random.Generator, num_bytes: int) -> str:
    letters = random.choice(LETTERS, num_bytes)
    letters[random.random(num_bytes) < 0.18] = ord(" ")
    return letters.tobytes().decode().strip()


def _picture(random: np.random.Generator, width: int, height: int) -> object:
    from PIL import Image

    shapes = random.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    smooth = Image.fromarray(shapes).resize((width, height), Image.Resampling.BICUBIC)
    grain = random.integers(-GRAIN, GRAIN + 1, (height, width, 3), dtype=np.int16)
    return Image.fromarray((np.asarray(smooth).astype(np.int16) + grain).clip(0, 255).astype(np.uint8))


def _pictures(random: np.random.Generator, number: int) -> list[object]:
    sides = random.integers(320, 900, (number, 2))
    return [_picture(random, int(width), int(height)) for width, height in sides]


def _jpeg(picture: object) -> bytes:
    target = io.BytesIO()
    picture.save(target, "JPEG", quality=QUALITY)  # type: ignore[attr-defined]  # Pillow is imported where it is used
    return target.getvalue()


def _document(key: str, random: np.random.Generator, images: list[str], num_letters: int) -> tuple[str, bytes]:
    texts: list[str | None] = []
    named: list[str | None] = []
    for image in images:
        texts += [_words(random, num_letters), None]
        named += [None, image]
    content = {"texts": texts, "images": named, "url": f"https://example.org/{key}"}
    return f"{key}.json", json.dumps(content).encode()


def _jpeg_document(key: str, random: np.random.Generator) -> Members:
    pictures = _pictures(random, int(random.integers(1, 6)))
    members = [(f"{key}.{number}.jpg", _jpeg(picture)) for number, picture in enumerate(pictures)]
    return [_document(key, random, [name for name, _ in members], 400), *members]


def _tiff_document(key: str, random: np.random.Generator) -> Members:
    first, *others = _pictures(random, int(random.integers(1, 6)))
    target = io.BytesIO()
    # As MINT-1T's PDF shards: all images of a document in one file, each frame a JPEG.
    first.save(  # type: ignore[attr-defined]  # Pillow is imported where it is used
        target, "TIFF", save_all=True, append_images=others, compression="jpeg", quality=QUALITY
    )
    names = [f"page_{number}_image_{number}" for number in range(1 + len(others))]
    return [_document(key, random, names, 400), (f"{key}.tiff", target.getvalue())]


def _pair(key: str, random: np.random.Generator) -> Members:
    side = int(random.integers(180, 280))
    return [_document(key, random, [f"{key}.jpg"], 80), (f"{key}.jpg", _jpeg(_picture(random, side, side)))]


def _tiny(key: str, random: np.random.Generator) -> Members:
    return [_document(key, random, [f"{key}.jpg"], 1900), (f"{key}.jpg", _jpeg(_picture(random, 48, 40)))]


KINDS: Mapping[str, Kind] = {
    "jpeg": Kind(
        title="200 MB of documents with JPEG images, four shards",
        sample=_jpeg_document,
        num_shards=4,
        num_bytes=50_000_000,
    ),
    "tiff": Kind(
        title="200 MB of documents with multi-frame TIFF, four shards",
        sample=_tiff_document,
        num_shards=4,
        num_bytes=50_000_000,
    ),
    "pairs": Kind(title="10,000 pairs of 10 to 30 kB, one shard", sample=_pair, num_samples=10_000),
    "tiny10k": Kind(title="10,000 members of 2 kB, one shard", sample=_tiny, num_samples=5_000),
    "tiny": Kind(title="100,000 members of 2 kB, one shard", sample=_tiny, num_samples=50_000),
    "small": Kind(title="20 shards of 30 members of 2 kB", sample=_tiny, num_shards=20, num_samples=15),
}
"""The kinds by name."""


def _samples(kind: Kind, shard: int, scale: float) -> Iterator[Members]:
    num_bytes, number = 0, 0
    num_samples = None if kind.num_samples is None else max(1, round(kind.num_samples * scale))
    while number < num_samples if num_samples is not None else num_bytes < (kind.num_bytes or 0) * scale:
        key = f"{shard:03d}{number:06d}"
        members = kind.sample(key, np.random.default_rng([shard, number]))
        yield members
        num_bytes += sum(len(content) for _, content in members)
        number += 1


def _make_shard(name: str, shard: int, scale: float, path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for members in _samples(KINDS[name], shard, scale):
            for member, content in members:
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def make_shards(folder: Path, name: str, *, scale: float = 1.0) -> list[Path]:
    """The shards of a kind, made if they are not there.

    Args:
        folder: for all kinds and scales.
        name: of the kind.
        scale: of samples or bytes per shard; 1 is full size.
    """
    kind = KINDS[name]
    target = folder / f"{name}-{scale:g}"
    paths = [target / f"shard-{shard:05d}.tar" for shard in range(kind.num_shards)]
    done = target.with_suffix(".done")
    if not done.exists():
        target.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = [pool.submit(_make_shard, name, shard, scale, path) for shard, path in enumerate(paths)]
            for job in jobs:
                job.result()
        done.touch()
    return paths
