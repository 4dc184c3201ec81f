"""Where the Dagster instance is, and the datasets that name no root; found without importing Dagster, which is slow."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["default_root", "find_dagster_home", "missing_databases"]

_DATABASES = ("history", "schedules")  # the folders of Dagster's databases, below the instance's


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


def missing_databases(home: Path) -> list[str]:
    """Returns the folders of Dagster's databases that a local instance lacks; none if they are elsewhere.

    Raises:
        OSError: the settings of the instance cannot be read.
    """
    missing = [name for name in _DATABASES if not (home / name).exists()]
    is_elsewhere = re.search(rb"^(run_|event_log_|schedule_)?storage\s*:", (home / "dagster.yaml").read_bytes(), re.M)
    return [] if is_elsewhere else missing
