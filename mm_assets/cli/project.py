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

__all__ = [
    "declarations_folder",
    "definitions_modules",
    "defs_module",
    "import_places",
    "make_importable",
    "make_project",
    "project_folder",
]

_WORKSPACE = "workspace.yaml"
_NEW_PACKAGE = "packed_datasets"
_NEW_PROJECT = f"""\
directory_type = "project"

[project]
root_module = "{_NEW_PACKAGE}"
code_location_name = "{_NEW_PACKAGE}.definitions"
registry_modules = ["mm_assets.orchestration"]
"""
_NEW_DEFINITIONS = '''\
"""Entry point of the code location: every dataset declared below `defs`, each run in one process."""

from pathlib import Path

import dagster as dg


@dg.definitions
def defs() -> dg.Definitions:
    """All datasets."""
    datasets = dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
    return dg.Definitions.merge(datasets, dg.Definitions(executor=dg.in_process_executor))
'''
_PROJECT_TABLES = {"pyproject.toml": ("tool", "dg", "project"), "dg.toml": ("project",)}


def definitions_modules(start: Path) -> Mapping[str, str]:
    """The definitions modules of the project around a folder, which can be imported afterwards.

    Returns:
        By the name of each module, the name of its code location, which is that of `dg dev` and `dagster dev`.

    Raises:
        ConfigError: there is no project, or its file does not name a module.
    """
    make_importable(start)
    folder = project_folder(start)
    if folder is not None:
        return _modules_of(folder)
    detail = (
        f"is not given, and there is no Dagster project in {start} or above it (pyproject.toml with "
        "[tool.dg.project], dg.toml or workspace.yaml): run the command in your project, or name its definitions "
        "module with --module"
    )
    raise ConfigError("arguments", "--module", detail)


def declarations_folder(start: Path) -> Path:
    """The folder of the declarations of the project around a folder, which may not exist yet.

    Raises:
        ConfigError: there is no project, or the package of its declarations is not below its folder.
    """
    modules = definitions_modules(start)
    folder = project_folder(start)
    assert folder is not None  # else there are no modules
    named = (_defs_module(folder / name, keys) for name, keys in _PROJECT_TABLES.items())
    module = next(filter(None, named), None) or f"{next(iter(modules)).rpartition('.')[0]}.defs".lstrip(".")
    package, *below = module.split(".")
    for place in (folder / "src", folder):
        if (place / package).is_dir():
            return (place / package).joinpath(*below)
    detail = f"its declarations are in the package {package}, which is neither in {folder / 'src'} nor in {folder}"
    raise ConfigError(str(folder), "defs_module", detail)


def defs_module(start: Path) -> str | None:
    """The package of declarations that Dagster loads for a folder in a project; None if it is not in one, or in two."""
    for folder in (start, *start.parents):
        named = [found for name, keys in _PROJECT_TABLES.items() if (found := _defs_module(folder / name, keys))]
        if named:
            return named[0] if len(named) == 1 else None
    return None


def make_project(folder: Path) -> Sequence[Path]:
    """Makes a Dagster project without a dataset in a folder; the files that it wrote.

    Raises:
        ConfigError: one of its files is there already.
    """
    package = folder / _NEW_PACKAGE
    files = {
        folder / "dg.toml": _NEW_PROJECT,
        package / "__init__.py": '"""Datasets of packed training data."""\n',
        package / "definitions.py": _NEW_DEFINITIONS,
        package / "defs" / "__init__.py": '"""The datasets: a folder with a defs.yaml for each."""\n',
    }
    for file in files:
        if file.exists():
            raise ConfigError(
                "arguments", "--project", f"{file} is there already: move it, or make the project elsewhere"
            )
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tuple(files)


def make_importable(start: Path) -> None:
    """Lets the modules of a folder, and of the project around it, be imported; what is installed is found before."""
    sys.path.extend(place for place in import_places(start) if place not in sys.path)


def import_places(start: Path) -> Sequence[str]:
    """The folders in which the modules of a folder, and of the project around it, are."""
    folder = project_folder(start)
    places = (*(() if folder is None else (folder / "src", folder)), start)
    return tuple(dict.fromkeys(str(place) for place in places if place.is_dir()))


def project_folder(start: Path) -> Path | None:
    """The nearest folder at or above a folder that is a Dagster project, also a wrongly described one; else None."""
    for folder in (start, *start.parents):
        try:
            if _modules_of(folder):
                return folder
        except ConfigError:  # `definitions_modules` raises it, where the modules are needed
            return folder
    return None


def _modules_of(folder: Path) -> Mapping[str, str]:
    for name, keys in _PROJECT_TABLES.items():
        if (folder / name).is_file():
            found = _project_module(folder / name, keys)
            if found is not None:
                return found
    return _workspace_modules(folder / _WORKSPACE) if (folder / _WORKSPACE).is_file() else {}


def _project_module(file: Path, keys: Sequence[str]) -> Mapping[str, str] | None:
    """The definitions module that a TOML file names, with its location; None where it describes no Dagster project."""
    table = _project_table(file, keys)
    if table is None:
        return None
    root = table.get("root_module")
    module = table.get("code_location_target_module", f"{root}.definitions" if root else None)
    if not isinstance(module, str):
        raise ConfigError(str(file), ".".join((*keys, "root_module")), "is missing: the project's Python package")
    return {module: str(table.get("code_location_name", file.parent.name))}


def _defs_module(file: Path, keys: Sequence[str]) -> str | None:
    """The package of the declarations that a TOML file names; None where it describes no project."""
    table = _project_table(file, keys) if file.is_file() else None
    if table is None:
        return None
    module = table.get("defs_module", f"{table.get('root_module')}.defs")
    return module if isinstance(module, str) else None


def _project_table(file: Path, keys: Sequence[str]) -> Mapping[str, Any] | None:
    try:
        table: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(str(file), "file", f"is not TOML: {error}") from error
    for key in keys:
        table = table.get(key) if isinstance(table, Mapping) else None
    return table if isinstance(table, Mapping) else None


def _workspace_modules(file: Path) -> Mapping[str, str]:
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(str(file), "file", f"is not YAML: {' '.join(str(error).split())}") from error
    entries = content.get("load_from") if isinstance(content, Mapping) else None
    modules: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else ():
        named = entry.get("python_module") if isinstance(entry, Mapping) else None
        module = named.get("module_name") if isinstance(named, Mapping) else named
        if not isinstance(module, str):
            detail = f"found {entry!r}, expected python_module: name the definitions module with --module instead"
            raise ConfigError(str(file), "load_from", detail)
        location = named.get("location_name") if isinstance(named, Mapping) else None
        modules[module] = location if isinstance(location, str) else module
    if not modules:
        raise ConfigError(str(file), "load_from", "names no python_module")
    return modules
