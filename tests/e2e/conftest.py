"""Fixtures: a Dagster instance of its own, and datasets over the demo shards with a storage root of their own."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from mm_assets.orchestration.launch import declared_datasets
from mm_assets.pipeline.spec import DatasetSpec

# `demo_project`, for this process and those that it starts.
HERE = str(Path(__file__).resolve().parent)
sys.path.append(HERE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), HERE)))


@pytest.fixture(scope="session")
def declared() -> dict[str, DatasetSpec]:
    """The demo datasets, loaded once: Dagster remembers instances that tests have closed."""
    return declared_datasets("demo_project")


@pytest.fixture
def instance(dagster_home: Path) -> Iterator[dg.DagsterInstance]:
    """The instance that `dagster_home` holds."""
    with dg.DagsterInstance.get() as opened:
        yield opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty storage root."""
    return tmp_path / "root"


@pytest.fixture
def demo_spec(declared: dict[str, DatasetSpec], dagster_home: Path, root: Path) -> Callable[[str], DatasetSpec]:
    """The declaration of a demo dataset, with its files below `root` and no settle time."""

    def get(demo: str, **changes: Any) -> DatasetSpec:
        return declared[demo].replace(root=str(root), settle_seconds=0.0, **changes)

    return get


@pytest.fixture
def inbox(tmp_path: Path, demo_shards: Path) -> Callable[..., Path]:
    """A folder into which demo shards are copied by name; it answers with the folder."""
    folder = tmp_path / "inbox"
    folder.mkdir()

    def put(*names: str) -> Path:
        for name in names:
            shutil.copy(demo_shards / name, folder / name)
        return folder

    return put
