"""Builders of row tables and small media for the tests of filters and annotators."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from mm_assets.testing import make_rows

MakeTable = Callable[..., pa.Table]


@pytest.fixture(scope="session")
def make_table() -> MakeTable:
    """Builds a row table; see `mm_assets.testing.make_rows`."""
    return make_rows


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
