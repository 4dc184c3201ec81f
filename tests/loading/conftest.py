"""The samples in two files, and an environment without ranks."""

import os
from collections.abc import Iterator

import pytest

import mm_assets
from mm_assets import Dataset

from .samples import COUNT, write


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("loader")
    return [write(folder / "a.mult", range(20)), write(folder / "b.mult", range(20, COUNT))]


@pytest.fixture(scope="module")
def data(files: list[str]) -> Iterator[Dataset]:
    with mm_assets.open(files) as dataset:
        yield dataset


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "JAX_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
