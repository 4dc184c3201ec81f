"""Datasets of several files in which any modality may be missing, for selections, id look-ups and Arrow tables."""

from pathlib import Path
from typing import Any

import numpy as np

import mm_assets
from mm_assets.fields import (
    Field,
    ImageField,
    JSONField,
    NDArrayField,
    ScalarField,
    TextField,
    TokensField,
)

FORMS = ("mult", "mstr")
SIZE = (6, 7)
FIELDS: dict[str, Field] = {
    "image": ImageField(encoding="png", size=SIZE, channels=3),
    "photo": ImageField(),
    "text": TextField(),
    "label": ScalarField("int16"),
    "state": NDArrayField("float32", (2, 3)),
    "tokens": TokensField(vocab_size=1000),
    "note": JSONField(),
}
SHARDS = (7, 0, 12, 4)
COUNT = sum(SHARDS)


def sample(i: int) -> dict[str, Any]:
    """Any modality may be missing; the values identify the sample."""
    rng = np.random.default_rng(i)
    values: dict[str, Any] = {
        "image": rng.integers(0, 256, (*SIZE, 3), np.uint8),
        "photo": rng.integers(0, 256, (3 + i, 20 + 2 * i, 3), np.uint8),
        "text": "ü" * (i % 5),
        "label": i - 10,
        "state": np.full((2, 3), i, np.float32),
        "tokens": np.arange(i % 4),
        "note": {"i": [i]},
    }
    return {name: None if (i + k) % 5 == 4 else value for k, (name, value) in enumerate(values.items())}


def write(folder: Path, form: str, sizes: tuple[int, ...] = SHARDS) -> list[str]:
    paths, i = [], 0
    for number, size in enumerate(sizes):
        path = folder / f"{number}.{form}"
        with mm_assets.create(str(path), FIELDS) as writer:
            for _ in range(size):
                writer.write(f"id{i:03d}", sample(i))
                i += 1
        paths.append(str(path))
    return paths
