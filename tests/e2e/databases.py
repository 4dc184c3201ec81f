"""A Dagster instance in this process, whose databases cost a test no more than what it proves.

Dagster opens a database again for each statement, and asks Alembic for its revisions each time it opens an instance.
Here a database stays open until its test ends, no commit waits for the disk, and the revisions are read once.
"""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dagster as dg
import pytest
import sqlalchemy
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, QueuePool, event

STORAGES = (
    "dagster._core.storage.event_log.sqlite.sqlite_event_log",
    "dagster._core.storage.runs.sqlite.sqlite_run_storage",
    "dagster._core.storage.schedules.sqlite.sqlite_schedule_storage",
)


@event.listens_for(Engine, "connect")
def _no_fsync(connection: Any, record: object) -> None:
    """Has SQLite in this process not wait for the disk: a test outlives processes, and no loss of power."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("pragma synchronous = off")


@contextmanager
def open_databases() -> Iterator[None]:
    """Within the block a database that an instance opens stays open, unless its file is replaced by another."""
    engines: dict[str, Engine] = {}
    files: dict[str, int] = {}  # the inode of each database, once its file exists
    scripts: dict[str | None, ScriptDirectory] = {}
    read_scripts = ScriptDirectory.from_config

    def create_engine(url: str, **options: Any) -> Engine:
        path = Path(sqlalchemy.make_url(url).database or "")
        inode = path.stat().st_ino if path.is_file() else 0
        if files.get(url, inode) != inode:
            Engine.dispose(engines.pop(url))
        if inode:
            files[url] = inode
        if url not in engines:
            engine = engines[url] = sqlalchemy.create_engine(url, **{**options, "poolclass": QueuePool})
            engine.dispose = lambda close=True: None  # type: ignore[method-assign]
        return engines[url]

    def from_config(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location")
        if place not in scripts:
            scripts[place] = read_scripts(config)
        return scripts[place]

    with ExitStack() as patches:
        for storage in STORAGES:
            patches.enter_context(patch(f"{storage}.create_engine", create_engine))
        patches.enter_context(patch.object(ScriptDirectory, "from_config", from_config))
        try:
            yield
        finally:
            for engine in engines.values():
                Engine.dispose(engine)


@pytest.fixture(scope="session")
def new_databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The databases of an instance in which nothing has happened: Dagster creates them in a quarter of a second."""
    home = tmp_path_factory.mktemp("instance")
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    with dg.DagsterInstance.from_config(str(home)):
        pass
    (home / "dagster.yaml").unlink()
    return home


@pytest.fixture
def instance(dagster_home: Path, new_databases: Path) -> Iterator[dg.DagsterInstance]:
    """The instance that `dagster_home` holds."""
    shutil.copytree(new_databases, dagster_home, dirs_exist_ok=True)
    with open_databases(), dg.DagsterInstance.get() as opened:
        yield opened
