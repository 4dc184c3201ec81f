import io
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image


def picture(height: int = 12, width: int = 17, channels: int = 3, *, seed: int = 0) -> np.ndarray:
    """A smooth picture, so that lossy codecs come close: (height, width, channels) uint8."""
    rng = np.random.default_rng(seed)
    rows, columns, phases = np.mgrid[0:height, 0:width, 0:channels]
    waves = np.sin(rows / 7 + phases) + np.cos(columns / 9 - phases) + rng.random()
    return (waves * 60 + 100).clip(0, 255).astype(np.uint8)


def image_file(image: Image.Image, codec: str, **options: object) -> bytes:
    """An image file's bytes, by Pillow."""
    target = io.BytesIO()
    image.save(target, format=codec, **options)
    return target.getvalue()


def sound_file(samples: np.ndarray, rate: int, codec: str, subtype: str | None = None) -> bytes:
    """A sound file's bytes, by libsndfile."""
    target = io.BytesIO()
    soundfile.write(target, samples, rate, format=codec, subtype=subtype)
    return target.getvalue()


def wav_file(samples: np.ndarray, rate: int) -> bytes:
    """A 16-bit WAV with nothing but its two chunks."""
    channels = samples.shape[1] if samples.ndim == 2 else 1
    data = samples.astype("<i2").tobytes()
    layout = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", 16) + layout + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.fixture(scope="session")
def members_of() -> Callable[[Path, tuple[str, ...]], Iterator[tuple[str, bytes]]]:
    """Reads (name, bytes) of the members with given extensions of all shards below a folder."""

    def read(folder: Path, extensions: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
        for path in sorted([*folder.glob("*/*.tar"), *folder.glob("*/*.tgz")]):
            with tarfile.open(path) as shard:
                for member in shard:
                    if member.isfile() and member.name.lower().endswith(extensions):
                        yield f"{path.name}:{member.name}", shard.extractfile(member).read()

    return read
