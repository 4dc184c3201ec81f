"""The Dagster project around a folder: where a command finds the declarations when it is given no module.

As Dagster's own commands do, it reads `pyproject.toml` or `dg.toml`, else `workspace.yaml`, in the folder or the
nearest one above that has one of them.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_assets.errors import ConfigError

__all__ = ["definitions_modules", "make_importable", "project_folder"]

_WORKSPACE = "workspace.yaml"
_PROJECT_TABLES = {"pyproject.toml": ("tool", "dg", "project"), "dg.toml": ("project",)}


def definitions_modules(start: Path) -> Sequence[str]:
    """Names of the definitions modules of the project around a folder, which can be imported afterwards.

    Raises:
        ConfigError: there is no project, or its file does not name a module.
    """
    make_importable(start)
    folder = project_folder(start)
    if folder is not None:
        return _modules_of(folder)
    detail = (
        f"is not given, and there is no Dagster project in {start} or above it (pyproject.toml with "
        "[tool.dg.project], dg.toml or workspace.yaml): run the command in your project, name its definitions module "
        "with --module, or name shards that nothing declares: `mm-assets plan SHARDS`, `mm-assets run --shards SHARDS`."
        " The commands that need no shards find a dataset that was made from such by its --dataset and --root"
    )
    raise ConfigError("arguments", "--module", detail)


def make_importable(start: Path) -> None:
    """Lets the modules of a folder, and of the project around it, be imported; what is installed is found before."""
    folder = project_folder(start)
    for place in (*(() if folder is None else (folder / "src", folder)), start):
        if place.is_dir() and str(place) not in sys.path:
            sys.path.append(str(place))


def project_folder(start: Path) -> Path | None:
    """The nearest folder at or above a folder that is a Dagster project, also a wrongly described one; else None."""
    for folder in (start, *start.parents):
        try:
            if _modules_of(folder):
                return folder
        except ConfigError:  # `definitions_modules` raises it, where the modules are needed
            return folder
    return None


def _modules_of(folder: Path) -> Sequence[str]:
    for name, keys in _PROJECT_TABLES.items():
        if (folder / name).is_file():
            found = _project_module(folder / name, keys)
            if found is not None:
                return (found,)
    return _workspace_modules(folder / _WORKSPACE) if (folder / _WORKSPACE).is_file() else ()


def _project_module(file: Path, keys: Sequence[str]) -> str | None:
    """The definitions module that a TOML file names; None where it describes no Dagster project."""
    try:
        table: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(str(file), "file", f"is not TOML: {error}") from error
    for key in keys:
        table = table.get(key) if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping):
        return None
    root = table.get("root_module")
    module = table.get("code_location_target_module", f"{root}.definitions" if root else None)
    if not isinstance(module, str):
        raise ConfigError(str(file), ".".join((*keys, "root_module")), "is missing: the project's Python package")
    return module


def _workspace_modules(file: Path) -> Sequence[str]:
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(str(file), "file", f"is not YAML: {' '.join(str(error).split())}") from error
    entries = content.get("load_from") if isinstance(content, Mapping) else None
    modules: list[str] = []
    for entry in entries if isinstance(entries, list) else ():
        named = entry.get("python_module") if isinstance(entry, Mapping) else None
        module = named.get("module_name") if isinstance(named, Mapping) else named
        if not isinstance(module, str):
            detail = f"found {entry!r}, expected python_module: name the definitions module with --module instead"
            raise ConfigError(str(file), "load_from", detail)
        modules.append(module)
    if not modules:
        raise ConfigError(str(file), "load_from", "names no python_module")
    return modules
