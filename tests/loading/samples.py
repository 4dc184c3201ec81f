"""Samples of five modalities, and batches as plain values."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import mm_assets
from mm_assets import MultimodalLoader
from mm_assets.fields import ImageField, NDArrayField, ScalarField, TextField, TokensField

COUNT = 53
FIELDS = {
    "image": ImageField(encoding="png", size=(4, 5), channels=3),
    "tokens": TokensField(),
    "label": ScalarField("int32"),
    "state": NDArrayField("float32", (3,)),
    "text": TextField(),
}


def sample(i: int) -> dict[str, Any]:
    """Sample `i`; each third one has no tokens, each fifth no image."""
    return {
        "image": None if i % 5 == 4 else np.full((4, 5, 3), i, np.uint8),
        "tokens": None if i % 3 == 2 else np.arange(i % 7, dtype=np.int64),
        "label": i,
        "state": np.array([i, i / 2, -i], np.float32),
        "text": f"text {i}",
    }


def write(path: Path, indices: range) -> str:
    with mm_assets.create(path, FIELDS, fsync=False) as writer:
        for i in indices:
            writer.write(f"id-{i}", sample(i))
    return str(path)


def plain(value: Any) -> Any:
    """A batch as bytes and plain values, to be compared bit for bit."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    return value


def run(loader: MultimodalLoader, limit: int | None = None) -> list[Any]:
    return [plain(batch) for batch in islice(loader, limit)]


def indices_of(loader: MultimodalLoader) -> list[int]:
    return [i for batch in loader for i in batch["index"][batch["valid"]].tolist()]
