"""Builders of row tables and small media for the tests of filters and annotators."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from mm_assets.rows.schema import DatasetSchema

MakeTable = Callable[..., pa.Table]


@pytest.fixture(scope="session")
def make_table() -> MakeTable:
    """Builds a row table: samples by id, each a list of (modality, content) in the order of their positions.

    Content is text for text rows, bytes for others, None for content that could not be had, and a pair (position,
    content) where the position is to be given.
    """

    def build(samples: Mapping[str, Sequence[tuple[str, Any]]], *, schema: DatasetSchema | None = None) -> pa.Table:
        rows: list[dict[str, Any]] = []
        for sample_id, items in samples.items():
            rows.append({"sample_id": sample_id, "position": -1, "modality": "metadata", "metadata_json": "{}"})
            for place, (modality, given) in enumerate(items):
                position, content = given if isinstance(given, tuple) else (place, given)
                row = {"sample_id": sample_id, "position": position, "modality": modality}
                if modality == "text":
                    row["text_content"] = content
                elif content is None:
                    row["materialize_error"] = "member 'x': short"
                else:
                    row["binary_content"] = content
                rows.append(row)
        return pa.Table.from_pylist(rows, schema=(schema or DatasetSchema()).row_schema())

    return build


@pytest.fixture(scope="session")
def encode() -> Callable[..., bytes]:
    """Encodes pixels, (H, W) or (H, W, C), in a format of Pillow's."""
    from PIL import Image

    def write(pixels: npt.NDArray[Any], form: str = "PNG", **options: Any) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, form, **options)
        return buffer.getvalue()

    return write


@pytest.fixture(scope="session")
def image(encode: Callable[..., bytes]) -> Callable[..., bytes]:
    """An image of a given width and height, of noise that a seed decides, or flat grey without one."""

    def make(width: int, height: int, form: str = "PNG", seed: int | None = None) -> bytes:
        if seed is None:
            pixels = np.full((height, width), 128, dtype=np.uint8)
        else:
            pixels = np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)
        return encode(pixels, form)

    return make


@pytest.fixture(scope="session")
def wav() -> Callable[..., bytes]:
    """Silence of a given number of seconds as 16-bit WAV or another format of soundfile's."""
    import soundfile

    def make(seconds: float, *, rate: int = 8000, channels: int = 1, form: str = "WAV") -> bytes:
        buffer = io.BytesIO()
        soundfile.write(buffer, np.zeros((round(seconds * rate), channels), dtype=np.int16), rate, format=form)
        return buffer.getvalue()

    return make
