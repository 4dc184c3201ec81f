"""Readers that know nothing of this package find every payload's bytes."""

from __future__ import annotations

import ast
import zlib
from pathlib import Path

import numpy as np
import pytest

from mm_assets.formats import ModalitySpec, MstrWriter, MultWriter, Payload

from . import independent_reader
from .examples import SAMPLES, SPECS, plain, write


def large_samples() -> tuple[list[ModalitySpec], list[tuple[str, dict[str, Payload | None]]]]:
    """300 samples of 5 modalities, sparse and of all sizes."""
    rng = np.random.default_rng(5)
    specs = [ModalitySpec(name=f"m{k}", type_id=k, metadata_size=8 * (k + 1)) for k in range(5)]
    samples = []
    for i in range(300):
        payloads = {
            spec.name: Payload(rng.bytes(spec.metadata_size), rng.bytes(int(rng.integers(0, 3000))))
            for spec in specs
            if rng.random() < 0.6
        }
        samples.append((f"sample {i}", payloads))
    return specs, samples


@pytest.fixture(params=["small", "large", "none"])
def case(request: pytest.FixtureRequest) -> tuple:
    if request.param == "large":
        return large_samples()
    return SPECS, SAMPLES if request.param == "small" else ()


def test_it_imports_nothing_of_ours() -> None:
    """The independent readers import struct and NumPy only."""
    tree = ast.parse(Path(independent_reader.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"struct", "numpy"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


def test_unified(tmp_path: Path, case: tuple) -> None:
    """Every payload of a MULT file is found, and every absent one is absent."""
    specs, samples = case
    descriptors, rows = independent_reader.read_unified(write(MultWriter, tmp_path / "x", samples, specs).read_bytes())
    assert [tuple(d) for d in descriptors.tolist()] == [
        (zlib.crc32(spec.name.encode()), spec.type_id, spec.metadata_size) for spec in specs
    ]
    assert rows == [[plain(payloads.get(spec.name)) for spec in specs] for _, payloads in samples]


def test_streams(tmp_path: Path, case: tuple) -> None:
    """Every payload of an MSTR file is found, its record behind the stream prefix."""
    specs, samples = case
    table, streams = independent_reader.read_streams(write(MstrWriter, tmp_path / "x", samples, specs).read_bytes())
    assert table["name_hash"].tolist() == [zlib.crc32(spec.name.encode()) for spec in specs]
    assert table["metadata_size"].tolist() == [16 + spec.metadata_size for spec in specs]
    for spec, rows in zip(specs, streams, strict=True):
        found = [None if row is None else (row[0][16:], row[1]) for row in rows]
        assert found == [plain(payloads.get(spec.name)) for _, payloads in samples]
