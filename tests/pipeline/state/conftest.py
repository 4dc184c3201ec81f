"""A published dataset of two small partitions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mm_assets.pipeline.state.folder import DatasetStore

from ..chain import declare, run_chain
from ..shards import make_shard

TEXTS = {"0.txt": "a cat", "1.txt": "a longer caption", "2.txt": "another one of them"}


@pytest.fixture(scope="session")
def pair_of_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shards `a` and `b`, in `in`, and a dataset of them in a manifest, in `root`."""
    folder = tmp_path_factory.mktemp("texts")
    for name in "ab":
        make_shard(folder / "in" / f"{name}.tar", {f"{name}{member}": text for member, text in TEXTS.items()})
    run_chain(declare(folder / "root", folder / "in", pack="generic"))
    return folder


@pytest.fixture
def dataset(pair_of_texts: Path, tmp_path: Path) -> DatasetStore:
    """A copy of the dataset, whose shards stay where they were registered."""
    shutil.copytree(pair_of_texts / "root", tmp_path / "root")
    return DatasetStore(declare(tmp_path / "root", pair_of_texts / "in", pack="generic"))


@pytest.fixture
def inbox(pair_of_texts: Path, tmp_path: Path) -> Path:
    """A folder with copies of the shards, which a test may change."""
    return Path(shutil.copytree(pair_of_texts / "in", tmp_path / "in"))
