"""Fixtures: a Dagster instance, datasets over the demo shards with a storage root of their own, a Ray cluster."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mm_assets.orchestration.launch import declared_datasets
from mm_assets.pipeline.spec import DatasetSpec

from ..s3_server import ServerApart
from .browser import browse as browse
from .browser import browser as browser
from .databases import instance as instance
from .databases import new_databases as new_databases
from .ray_cluster import RayCluster, can_isolate
from .warm import WarmCommands

# `demo_project` and `noting_filters`, for this process and those that it starts.
HERE = str(Path(__file__).resolve().parent)
sys.path.append(HERE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), HERE)))


SLOW = (
    *("daemon", "dead_runs", "full_disk", "interrupted", "killed", "losses", "monitoring", "stopping"),
    *("storage_faults", "two_hosts", "postgres", "wheels", "launch", "slices", "determinism"),
    *("browser", "queries", "stale", "view_hostile", "hung"),
    *("ingest_benchmark", "loading_benchmark", "scale_benchmark"),
)
"""The modules whose tests `make test-slow` runs, and `make test` does not."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of `SLOW`."""
    for item in items:
        if item.path.parent == Path(HERE) and item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def declared() -> dict[str, DatasetSpec]:
    """The demo datasets, loaded once: Dagster remembers instances that tests have closed."""
    return declared_datasets("demo_project")


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


@pytest.fixture(scope="session")
def warm_commands() -> Iterator[WarmCommands]:
    """Runs `mm-assets` without the seconds of its imports."""
    commands = WarmCommands()
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def object_store() -> Iterator[ServerApart]:
    """An S3 server in a process of its own."""
    pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    pytest.importorskip("moto", reason="moto's server is not installed")
    server = ServerApart()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def host_environment(object_store: ServerApart) -> dict[str, str]:
    """What every host has in its environment: where the object store is, with credentials."""
    return {
        "AWS_ENDPOINT_URL": object_store.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }


@pytest.fixture(scope="session")
def cluster(host_environment: dict[str, str]) -> Iterator[RayCluster]:
    """One Ray cluster for all tests; a host that does not answer is lost after half a minute."""
    pytest.importorskip("ray")
    if not can_isolate():
        pytest.skip("nodes need namespaces of their own: unshare is missing, or this is not root")
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # its sockets have paths of 107 bytes at most
    started = RayCluster(folder, {**host_environment, "RAY_health_check_timeout_ms": "3000"})
    try:
        yield started
    finally:
        started.close()
        shutil.rmtree(folder, ignore_errors=True)
