"""DuckDB for the checks: one database per process, of which each asset gets a connection of its own.

Opening a database takes longer than the checks of a small partition. What one connection registers or creates as
temporary is not seen by another, and is gone when it is closed.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["connection", "limit_memory"]

_LEAST_MEMORY = 16 << 20  # bytes with which DuckDB works


class _Database:
    """The database of a process, while it is open."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.opened: DuckDBPyConnection | None = None
        self.memory = 0


_DATABASES: dict[int, _Database] = {}  # by process: a forked child opens its own


def _database() -> _Database:
    return _DATABASES.setdefault(os.getpid(), _Database())


@contextmanager
def connection(memory: int) -> Iterator[DuckDBPyConnection]:
    """A connection to the database of this process, which works in one thread and downloads nothing.

    Beyond its memory DuckDB spills to a scratch folder, which it makes when it needs it and removes when it is closed.
    After an error the next connection is to another database, so that no later check meets what the error left behind.

    Args:
        memory: bytes that DuckDB may use.
    """
    import duckdb

    found = _database()
    with found.lock:
        if found.opened is None:
            scratch = Path(tempfile.gettempdir()) / f"mm-assets-checks-{os.getpid()}-{secrets.token_hex(4)}"
            found.opened = duckdb.connect(
                config={
                    "threads": 1,
                    "temp_directory": str(scratch),
                    "autoinstall_known_extensions": False,
                    "autoload_known_extensions": False,
                }
            )
            found.memory = 0
        opened = found.opened.cursor()
    try:
        limit_memory(opened, memory)
        yield opened
    except BaseException:
        with found.lock:
            found.opened = None
        raise
    finally:
        opened.close()


def limit_memory(opened: DuckDBPyConnection, memory: int) -> None:
    """Sets the bytes that the database of a connection may use."""
    found, memory = _database(), max(memory, _LEAST_MEMORY)
    if found.memory != memory:
        opened.execute(f"set memory_limit = '{memory >> 20}MiB'")
        found.memory = memory
