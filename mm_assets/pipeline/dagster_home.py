"""The folder of the Dagster instance, and the datasets that name no root; without importing Dagster, which is slow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mm_assets.errors import SourceError

__all__ = [
    "VIEWER_FILE",
    "declared_in",
    "default_root",
    "ensure_dagster_home",
    "find_dagster_home",
    "has_own_databases",
    "is_prepared",
    "location_of",
    "missing_databases",
    "unusable_home",
    "unusable_named",
]

VIEWER_FILE = "viewer.url"  # in the instance's folder
_DATABASES = ("history", "schedules")  # the folders of Dagster's databases, below the instance's
_SETTINGS = """\
# Settings of the local Dagster instance.
telemetry: {enabled: false}
nux: {enabled: false}
# Runs of the daemon that never begin are failed, and runs whose process was killed are repeated; failed ones are not.
# Of the longest time that a run may take, loads are exempt.
run_monitoring: {enabled: true, start_timeout_seconds: 300, max_runtime_seconds: 86400}
run_retries: {enabled: true, max_retries: 2, retry_on_asset_or_op_failure: false}
"""

# Code location by file and name of a declaration.
_LOCATIONS: dict[tuple[str, str], str] = {}


def default_root(home: Path | None = None) -> str:
    """Storage root of datasets that name none: $MM_ASSETS_ROOT, else a folder beside Dagster's own storage.

    `home` is the instance's folder; by default $DAGSTER_HOME, else this folder.
    """
    home = home or Path(os.environ.get("DAGSTER_HOME") or Path.cwd())
    return os.environ.get("MM_ASSETS_ROOT") or str(Path(home) / "data")


def find_dagster_home(project: Path | None = None) -> Path:
    """The instance's folder, which may not exist yet.

    It is $DAGSTER_HOME, else the nearest `dagster_home` in this folder or above it, else a new one here. In a
    project the search ends at the project's folder, so that no instance around it is used; a new one is made there.

    Args:
        project: folder of the project around this folder, if there is one.
    """
    given = os.environ.get("DAGSTER_HOME")
    here = Path.cwd()
    if given:
        return Path(given).expanduser().absolute()
    folders = [folder for folder in (here, *here.parents) if project is None or folder.is_relative_to(project)]
    homes = (folder / "dagster_home" for folder in folders)
    return next(filter(Path.is_dir, homes), (project or here) / "dagster_home")


def ensure_dagster_home(project: Path | None = None) -> Path:
    """The folder of `find_dagster_home`, made if it is missing; the variable names it afterwards.

    Raises:
        SourceError: the folder cannot be made or written.
    """
    home = find_dagster_home(project)
    with unusable_named(home):
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "dagster.yaml").exists():
            draft = home / f".dagster.yaml.{os.getpid()}"
            draft.write_text(_SETTINGS)
            draft.replace(home / "dagster.yaml")
    os.environ["DAGSTER_HOME"] = str(home)
    return home


def unusable_home(home: object, refusal: str) -> SourceError:
    """Returns the error of an instance whose files the system refuses to write, with what to do."""
    advice = f"give {home} write access and free space, or set DAGSTER_HOME to a folder of your own"
    return SourceError(home, f"the Dagster instance cannot be used: {refusal}: {advice}")


@contextmanager
def unusable_named(home: Path) -> Iterator[None]:
    """Turns the system's refusal to write the instance's files into a `SourceError` that says what to do."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename or home)  # in the folder it may have a temporary name
        raise unusable_home(home if path.is_relative_to(home) else path, error.strerror or str(error)) from error


def has_own_databases(home: Path) -> bool:
    """Whether Dagster's databases are SQLite files in the instance's folder; else its settings place them elsewhere.

    Raises:
        OSError: the settings of the instance cannot be read.
    """
    settings = (home / "dagster.yaml").read_bytes()
    return not re.search(rb"^(run_|event_log_|schedule_)?storage\s*:", settings, re.M)


def missing_databases(home: Path) -> list[str]:
    """Returns the folders of Dagster's databases that a local instance lacks; none if they are elsewhere.

    Raises:
        OSError: the settings of the instance cannot be read.
    """
    missing = [name for name in _DATABASES if not (home / name).exists()]
    return missing if has_own_databases(home) else []


def is_prepared(home: Path) -> bool:
    """Whether an instance has all that Dagster would have to be imported to make.

    Raises:
        SourceError: the settings of the instance cannot be read.
    """
    with unusable_named(home):
        return not missing_databases(home) and (home / VIEWER_FILE).exists()


def declared_in(where: str, name: str, location: str) -> None:
    """Notes the code location that declares a dataset, by its file and name: runs of loads are listed under its job."""
    _LOCATIONS[where, name] = location


def location_of(where: str, name: str) -> str | None:
    """Returns the code location that declares a dataset; None if that is not known."""
    return _LOCATIONS.get((where, name))
