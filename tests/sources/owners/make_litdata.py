"""Writes the golden chunks of LitData with `litdata`: ``python make_litdata.py FOLDER``.

The pictures are made of numbers, so that the files carry no one's data.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.writer import BinaryWriter
from litdata.types import File, Image, Jpeg, JpegArray, Video
from PIL import Image as Pillow


def picture(color: int, mode: str = "RGB") -> Pillow.Image:
    """Returns a small picture."""
    pixels = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(6, 8, 3) + np.uint8(color)
    return Pillow.fromarray(pixels).convert(mode)


def encoded(color: int, form: str) -> bytes:
    """Returns a small picture as a file."""
    target = io.BytesIO()
    picture(color).save(target, format=form)
    return target.getvalue()


def sample(number: int) -> dict[str, Any]:
    """Returns a sample with a value of each serializer."""
    return {
        "number": number,
        "ratio": number + 0.5,
        "flag": number == 1,
        "caption": f"sample {number} é",
        "raw": bytes([number, 1, 2]),
        "matrix": np.arange(6, dtype=np.int16).reshape(2, 3) + np.int16(number),
        "vector": np.arange(3, dtype=np.float32),
        "tensor": torch.arange(6, dtype=torch.int64).reshape(3, 2) + number,
        "ids": torch.arange(4, dtype=torch.int32),
        "pixels": picture(number, "L"),
        "photo": Jpeg(bytes=encoded(number, "jpeg")),
        "drawing": Image(bytes=encoded(number, "png"), path="x.png"),
        "frames": JpegArray(images=[Jpeg(bytes=encoded(n, "jpeg")) for n in (number, number + 1)]),
        "notes": File(bytes=b"a file", path="x.srt"),
        "clip": Video(bytes=b"\0\0\0\x18ftypmp42 video", path="x.mp4"),
        "nested": {"depth": number, "parts": ["a", number]},
        "code": {1, 2},
    }


def write(folder: Path, samples: list[Any], **options: Any) -> None:
    """Writes samples as a dataset of chunks with two samples each."""
    writer = BinaryWriter(str(folder), chunk_size=options.pop("chunk_size", 2), **options)
    for number, item in enumerate(samples):
        writer[number] = item
    writer.done()
    writer.merge()


def main(folder: Path) -> None:
    """Writes a dataset with every serializer, one in every compression, tokens, and rows of Arrow."""
    shutil.rmtree(folder, ignore_errors=True)
    write(folder / "serializers", [sample(number) for number in range(3)])
    rows = [{"__key__": f"a/{n}", "jpg": Jpeg(bytes=encoded(n, "jpeg")), "json": f'{{"n": {n}}}'} for n in range(3)]
    for level in ("chunk", "batch", "sample"):
        write(folder / level, rows, compression="zstd", compression_level=level)
    write(
        folder / "tokens",
        [torch.tensor(list(range(n + 2)), dtype=torch.uint16) for n in range(3)],
        item_loader=TokensLoader(),
        chunk_size=100,
    )
    write(folder / "plain", [{"text": f"t {n}", "n": n, "words": ["a", "b"][: n + 1]} for n in range(1)])
    write(folder / "single", [b"one", b"two"])
    write(folder / "tuple", [(b"one", 1), (b"two", 2)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
