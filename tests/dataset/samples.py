"""Samples and files that the tests of datasets share."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import mm_assets
from mm_assets.dataset import manifest as manifests
from mm_assets.dataset.add_stream import write_stream
from mm_assets.dataset.manifest import ManifestPartition, file_path
from mm_assets.fields import (
    Field,
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


def make_manifest(
    folder: Path,
    counts: list[int],
    *,
    fields_of: Callable[[int], dict] = lambda _: FIELDS,
    streams: Mapping[str, Field] = {},
    value_of: Callable[[str, int], object] = lambda name, i: f"{name} {i}",
) -> Path:
    """A dataset of several partitions with both packed files of each, tables, streams and a manifest."""
    (folder / "packed").mkdir(parents=True)
    partitions, first = [], 0
    for number, count in enumerate(counts):
        key, indices = f"part-{number}", range(first, first + count)
        first += count

        def publish(kind: str, path: Path, key: str = key) -> tuple[int, str]:
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            place = folder / file_path(kind, key, digest)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)
            return len(data), digest

        packed, added, tables = {}, {}, {}
        for form in ("mult", "mstr"):
            packed[form] = publish(form, write(folder / f"new.{form}", indices, fields=fields_of(number)))
        for name, field in streams.items():
            values, ids = (value_of(name, i) for i in indices), [f"id-{i}" for i in indices]
            write_stream(folder / "new.mstr", name, field, values, ids, fsync=False)
            added[name] = publish("stream", folder / "new.mstr")
        for table in ("rows", "filtered_rows"):
            (folder / "new.parquet").write_text(f"{table} of {key}")
            tables[table] = publish(table, folder / "new.parquet")
        partitions.append(
            ManifestPartition(
                key=key,
                recipe=f"{number:016x}",
                num_samples=count,
                packed=packed,
                tables=tables,
                streams=added,
                decodable={"mode": "full", "on_undecodable": "keep", "judged": count, "undecodable": 0},
                losses={"rows": {"empty": {"count": 1, "example": {"sample_id": "x"}}}} if number == 1 else {},
            )
        )
    manifest = manifests.make_manifest(
        dataset="test",
        schema={"rows": []},
        partitions=partitions,
        added=[
            {"name": name, "field": type(field).__name__, "config": field.config} for name, field in streams.items()
        ],
        losses={},
        duplicate_ids={"count": 0, "examples": []},
        settings={},
    )
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest))
    return path


def packed_path(folder: Path, number: int, form: str = "mult") -> Path:
    """The packed file of a partition of `make_manifest`."""
    (path,) = (folder / "packed").glob(f"part-{number}.*.{form}")
    return path


def stream_path(folder: Path, number: int, name: str) -> Path:
    """The file of a stream of a partition of `make_manifest`."""
    document = json.loads((folder / "manifest.json").read_text())
    digest = document["partitions"]["streams"][name]["sha256"][number]
    return folder / file_path("stream", f"part-{number}", digest)
