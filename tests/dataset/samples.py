"""Samples and files that the tests of datasets share."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

import mm_assets
from mm_assets.fields import (
    ImageField,
    JSONField,
    NDArrayField,
    ScalarField,
    SequenceField,
    TextField,
)

FIELDS = {
    "image": ImageField(channels=3),
    "text": TextField(),
    "label": ScalarField("int16"),
    "state": NDArrayField("float32", (3,)),
    "words": SequenceField(TextField()),
    "meta": JSONField(),
}


def sample(i: int) -> dict[str, object]:
    """Sample `i`: every third lacks the image, every fourth the label."""
    return {
        "image": None if i % 3 == 2 else np.full((4 + i, 5, 3), i, np.uint8),
        "text": f"text {i} é",
        "label": None if i % 4 == 3 else i - 5,
        "state": np.array([i, i / 2, -i], np.float32),
        "words": [(0, "a"), (i + 1, f"b{i}")],
        "meta": {"i": i},
    }


def assert_same(found: dict[str, object], expected: dict[str, object]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[name], value)
        else:
            assert found[name] == value


def write(path: Path, indices: range, *, fields=FIELDS, make: Callable[[int], dict[str, object]] = sample) -> Path:
    with mm_assets.create(path, fields, provenance={"dataset": "test"}, fsync=False) as writer:
        for i in indices:
            writer.write(f"id-{i}", make(i))
    return path


def make_manifest(folder: Path, counts: list[int], *, fields_of: Callable[[int], dict] = lambda _: FIELDS) -> Path:
    """A dataset of several shards, with both packed files of each and a manifest."""
    (folder / "packed").mkdir(parents=True)
    entries, first = [], 0
    for number, count in enumerate(counts):
        files = {}
        for form in ("mult", "mstr"):
            path = folder / "packed" / f"part-{number}.1234abcd.{form}"
            write(path, range(first, first + count), fields=fields_of(number))
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            files[form] = {"path": f"packed/{path.name}", "size": len(data), "sha256": digest}
        entries.append({"partition": f"part-{number}", "num_samples": count, "files": files})
        first += count
    manifest = {"version": 1, "dataset": "test", "schema": {"rows": []}, "num_samples": first, "shards": entries}
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest))
    return path
