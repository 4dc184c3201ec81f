"""Writes the golden shards of MDS with `mosaicml-streaming`: ``python make_mds.py FOLDER``.

The pictures are made of numbers, so that the files carry no one's data.
"""

from __future__ import annotations

import io
import pickle
import shutil
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
from PIL import Image
from streaming import MDSWriter

COLUMNS = {
    "raw": "bytes",
    "caption": "str",
    "int": "int",
    **{name: name for name in ("uint8", "int16", "uint64", "float16", "float32", "float64")},
    "digits": "str_int",
    "ratio": "str_float",
    "price": "str_decimal",
    "tags": "json",
    "array": "ndarray",
    "typed": "ndarray:float32",
    "fixed": "ndarray:uint8:2,3",
    "photo": "jpeg",
    "drawing": "png",
    "pixels": "pil",
    "photos": "list[jpeg]",
    "drawings": "list[png]",
    "pages": "list[pil]",
    "frames": "jpeg_array",
    "code": "pkl",
}
COMPRESSIONS = ("zstd:3", "gz:6", "bz2:6", "br:5", "snappy")


def picture(color: int, mode: str = "RGB") -> Image.Image:
    """Returns a small picture."""
    pixels = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(6, 8, 3) + np.uint8(color)
    return Image.fromarray(pixels).convert(mode)


def encoded(color: int, form: str) -> Image.Image:
    """Returns a small picture as it is read from a file."""
    target = io.BytesIO()
    picture(color).save(target, format=form)
    return Image.open(io.BytesIO(target.getvalue()))


def jpeg_bytes(color: int) -> bytes:
    """Returns a small JPEG."""
    target = io.BytesIO()
    picture(color).save(target, format="jpeg")
    return target.getvalue()


def sample(number: int) -> dict[str, object]:
    """Returns a sample with a value of each encoding."""
    return {
        "raw": bytes([number, 1, 2]),
        "caption": f"sample {number} é",
        "int": -number,
        "uint8": 200 + number,
        "int16": -300 - number,
        "uint64": 2**64 - 1 - number,
        "float16": 0.5,
        "float32": 1.5,
        "float64": 0.1 * number,
        "digits": 10**30 + number,
        "ratio": 0.25,
        "price": Decimal("12.50"),
        "tags": {"a": [number, None, "x"]},
        "array": np.arange(6, dtype=np.int16).reshape(1, 2, 3) + np.int16(number),
        "typed": np.full((2, 300), 0.5, np.float32),
        "fixed": np.full((2, 3), number, np.uint8),
        "photo": encoded(number, "jpeg"),
        "drawing": encoded(number, "png"),
        "pixels": picture(number, "LA"),
        "photos": [encoded(number, "jpeg"), encoded(number + 1, "jpeg")],
        "drawings": [encoded(number, "png")],
        "pages": [picture(number), picture(number, "L"), picture(number, "1")],
        "frames": [jpeg_bytes(number), jpeg_bytes(number + 1)],
        "code": pickle.dumps({"number": number}),
    }


def main(folder: Path) -> None:
    """Writes a dataset with every encoding, and one in every compression."""
    for path in folder.iterdir() if folder.exists() else ():
        shutil.rmtree(path)
    with MDSWriter(out=str(folder / "encodings"), columns=COLUMNS, hashes=["sha1"]) as writer:
        for number in range(2):
            writer.write(sample(number))
    for compression in COMPRESSIONS:
        out = folder / compression.partition(":")[0]
        with MDSWriter(
            out=str(out), columns={"__key__": "str", "jpg": "bytes", "json": "bytes"}, compression=compression
        ) as writer:
            for number in range(3):
                writer.write({"__key__": f"a/{number}", "jpg": jpeg_bytes(number), "json": b'{"n": %d}' % number})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
