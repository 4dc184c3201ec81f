"""DuckDB for the checks: one database per process, of which each asset gets a connection of its own.

Opening a database takes longer than the checks of a small partition. What one connection registers or creates as
temporary is not seen by another, and is gone when it is closed.
"""

from __future__ import annotations

import atexit
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["available_memory", "connection", "limit_memory", "memory_share", "share_memory"]

_LEAST_MEMORY = 16 << 20  # bytes with which DuckDB works


_CGROUPS = {  # by the controllers that /proc/self/cgroup names: where the groups are, and the file of their limit
    "": ("sys/fs/cgroup", "memory.max"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}
_sharing = 1  # processes that are at work


class _Database:
    """The database of a process, while it is open."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.opened: DuckDBPyConnection | None = None
        self.memory = 0


_DATABASES: dict[int, _Database] = {}  # by process: a forked child opens its own


@atexit.register
def _close() -> None:
    """Closes the database of this process.

    A thread of a storage client that runs until the interpreter ends keeps modules alive: DuckDB's bindings would
    report each object that the connection holds as leaked.
    """
    database = _DATABASES.pop(os.getpid(), None)
    if database is not None and database.opened is not None:
        database.opened.close()


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


def share_memory(num_processes: int) -> None:
    """Says how many processes of this machine run checks at the same time, this one included."""
    global _sharing
    _sharing = num_processes


def memory_share() -> int:
    """The bytes that the checks of this process may use at most, where several are at work."""
    return available_memory() // _sharing


def available_memory(root: Path = Path("/")) -> int:
    """The bytes of memory of this machine, or fewer where a control group of this process has a limit.

    Args:
        root: where the file systems of the kernel are.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in _CGROUPS:
            folder, name = _CGROUPS[controllers]
            group = Path(path.lstrip("/"))
            for above in (group, *group.parents):
                with suppress(OSError, ValueError):  # a container has no groups above its own; "max" is not a number
                    limits.append(int((root / folder / above / name).read_text()))
    return min(limits)
