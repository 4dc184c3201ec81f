"""A dataset of several modalities, with each missing somewhere."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import mm_assets
from mm_assets.errors import CorruptError
from mm_assets.fields import (
    Field,
    NDArrayField,
    TextField,
)

from . import shards
from .shards import FORMS, SIZE

__all__ = [
    "COUNT",
    "FIELDS",
    "FORMS",
    "MEETING",
    "SIZE",
    "Slow",
    "decoding_threads",
    "picture",
    "sample",
    "write",
]

FIELDS: dict[str, Field] = {name: shards.FIELDS[name] for name in ("image", "photo", "text", "label")} | {
    "state": NDArrayField("float32", (3,))
}
COUNT = 23


def picture(i: int, height: int = SIZE[0], width: int = SIZE[1]) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (height, width, 3), np.uint8)


def sample(i: int) -> dict[str, Any]:
    """Sample `i`: each modality is missing in every third, another third each."""
    whole = {
        "image": picture(i),
        "photo": picture(i, 3 + i, 40 - i),
        "text": f"text {i} é",
        "label": i - 5,
        "state": np.array([i, i / 2, -i], np.float32),
    }
    return {name: None if (i + k) % 3 == 0 else value for k, (name, value) in enumerate(whole.items())}


def write(path: Path, fields: dict[str, Field], samples: list[dict[str, Any]]) -> Path:
    with mm_assets.create(path, fields, fsync=False) as writer:
        for i, values in enumerate(samples):
            writer.write(f"id-{i}", values)
    return path


def decoding_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mm_assets")]


# What the threads of the fields below meet at; a field itself is frozen.
MEETING: dict[str, Any] = {}


@dataclass(frozen=True)
class Slow(TextField):
    """Counts how many decode at this moment; "bad" is damaged."""

    TYPE_ID: ClassVar[int] = 0x8012

    @property
    def decodes_in_parallel(self):
        return True

    def decode(self, metadata, data):
        MEETING["running"].add(threading.get_ident())
        try:
            time.sleep(0.01)
            text = super().decode(metadata, data)
            if text.startswith("bad"):
                raise CorruptError("<payload>", text)
            return text
        finally:
            MEETING["running"].discard(threading.get_ident())
