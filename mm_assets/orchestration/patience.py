"""Patience with a database that is away: restarting, or out of reach for a minute.

Dagster's storages raise what the database's driver does, or give up after seconds. Those of a patient instance try
again, with growing pauses. What a database carried out and could not confirm may be carried out twice: a line in the
log of a run, for instance. What must not be is left to `events`, which looks first.
"""

import functools
import inspect
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg
import sqlalchemy.exc
from dagster._core.errors import DagsterRunAlreadyExists

from mm_assets.errors import SourceError

__all__ = [
    "PAUSES",
    "Patient",
    "away_named",
    "first_line",
    "impatient",
    "is_away",
    "may_pass",
    "patient",
    "unusable_said",
]

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds between attempts: a restart takes seconds, a failover a minute
_AWAY = (ConnectionError, sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError, sqlalchemy.exc.TimeoutError)
_REFUSED = ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_FULL", "SQLITE_IOERR")  # the last one also of a full disk
_GAVE_UP = "DagsterPostgresException"  # of dagster-postgres, which is not a requirement of ours
_log = logging.getLogger(__name__)


def is_away(error: BaseException) -> bool:
    """Whether an error says that a database server is not there, as opposed to a file that cannot be used."""
    if isinstance(error, sqlalchemy.exc.DBAPIError) and isinstance(error.orig, sqlite3.Error):
        return False
    return isinstance(error, _AWAY) or type(error).__name__ == _GAVE_UP


def first_line(error: BaseException) -> str:
    """An error of a database in one line; the statement is in the others."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def unusable_said(home: object, refused: str) -> str:
    """What to do about files of a Dagster instance that cannot be written."""
    advice = f"give {home} write access and free space, or set DAGSTER_HOME to a folder of your own"
    return f"the Dagster instance cannot be used: {refused}: {advice}"


@contextmanager
def away_named() -> Iterator[None]:
    """Turns the error that ends patience, or that SQLite cannot write, into a `SourceError` that says what to do."""
    try:
        yield
    except Exception as error:  # what is raised in a step comes in errors of Dagster's
        home = os.environ.get("DAGSTER_HOME", "DAGSTER_HOME")
        cause: BaseException | None = error
        while cause is not None:
            if is_away(cause):
                detail = f"Dagster's database is away: {first_line(cause)}: run the command again when it is back"
                raise SourceError(home, detail) from error
            if getattr(cause, "sqlite_errorname", "").startswith(_REFUSED):
                raise SourceError(home, unusable_said(home, str(cause))) from error
            cause = cause.__cause__
        raise


def may_pass(error: BaseException) -> bool:
    """Whether the same may succeed later: the server is away, or another process has locked SQLite's file."""
    return is_away(error) or isinstance(error, sqlalchemy.exc.OperationalError | sqlite3.OperationalError)


def patient(instance: dg.DagsterInstance) -> dg.DagsterInstance:
    """The same instance, whose storages of runs and events have patience from now on."""
    for storage in (instance.run_storage, instance.event_log_storage):
        for name in dir(type(storage)):
            is_operation = inspect.isfunction(inspect.getattr_static(storage, name, None))
            if is_operation and not name.startswith("_"):  # once: afterwards it is an attribute of the storage
                vars(storage)[name] = Patient(getattr(storage, name))
    return instance


@contextmanager
def impatient() -> Iterator[None]:
    """In the block, this thread tries everything once: it has other work to do before it tries again."""
    before = getattr(Patient._inside, "call", False)
    Patient._inside.call = True
    try:
        yield
    finally:
        Patient._inside.call = before


class Patient:
    """A method that is called again when the database is away.

    Args:
        method: the method.
    """

    _inside = threading.local()  # methods call each other: only the outermost one is repeated
    has_ended = False  # whether the database was away for all pauses: until it is back, nothing waits for it again

    def __init__(self, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the method returns, or raises in the end."""
        if getattr(self._inside, "call", False):
            return self._method(*args, **kwargs)
        with impatient():
            return self._repeated(*args, **kwargs)

    def _repeated(self, *args: Any, **kwargs: Any) -> Any:
        pauses = () if Patient.has_ended else PAUSES
        for number, pause in enumerate((*pauses, None)):
            try:
                result = self._method(*args, **kwargs)
                Patient.has_ended = False
                return result
            except DagsterRunAlreadyExists:
                if not number:
                    raise
                return args[0]  # it was created, and only the answer did not arrive
            except Exception as error:
                if pause is None or not is_away(error):
                    Patient.has_ended = is_away(error)
                    raise
                _log.warning("Dagster's database is away, next attempt in %g s: %s", pause, str(error).split("\n")[0])
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")
