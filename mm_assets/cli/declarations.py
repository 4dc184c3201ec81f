"""The datasets that a project declares. Where every declaration is plain YAML, Dagster is not imported to read it.

Dagster takes longer to import than most commands take. So a definitions module that only loads the project's folder of
declarations is not executed: what it would load is read here, if each file there has one meaning without Dagster. All
else, and all that is wrong, is left to Dagster, so that its rules and the errors of declarations exist once.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml

from mm_assets.cli.project import defs_module
from mm_assets.errors import ConfigError
from mm_assets.pipeline.dagster_home import declared_in, default_root
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["declared_datasets", "plain_declarations"]

_TYPES = ("mm_assets.orchestration.ShardDataset", "mm_assets.orchestration.component.ShardDataset")
_OWN = {"mm_assets.definitions": "mm_assets.defs"}  # definitions module of this package, and what it loads
_DECLARATIONS = ("defs.yaml", "defs.yml", "component.yaml")  # Dagster reads the first of them that is in a folder
_VARIABLE = re.compile(r"\{\{ *env(?:\.(\w+)|\((['\"])(\w+)\2\)) *\}\}")
_TEMPLATE = re.compile(r"\{[{%#]")
# All that a module may use which does nothing but load the folder of declarations.
_NODES = (
    *(ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.FunctionDef, ast.arguments, ast.Return, ast.Assign),
    *(ast.Expr, ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.keyword, ast.Load, ast.Store),
)
_NAMES = {"dg", "dagster", "Path", "__file__", "definitions", "Definitions", "load_from_defs_folder"}
_NAMES |= {"in_process_executor", "parent", "merge"}
_IMPORTED = {"dagster", "pathlib", "__future__"}
# What is wrong is found again, and reported, when Dagster loads the module.
_LEFT_TO_DAGSTER = (ConfigError, OSError, ValueError, SyntaxError, RecursionError, yaml.YAMLError)


def declared_datasets(module: str, location: str) -> Mapping[str, DatasetSpec | ConfigError]:
    """The datasets that a definitions module declares, by name: for a wrong declaration the error.

    Args:
        module: its name.
        location: name of the code location that loads it.

    Raises:
        ConfigError: the module cannot be loaded or has no definitions.
    """
    plain = plain_declarations(module)
    if plain is not None:
        for spec in plain.values():
            declared_in(spec.where, spec.name, location)
        return plain
    from mm_assets.orchestration.launch import declared_datasets

    return declared_datasets(module, location=location)


def plain_declarations(module: str) -> Mapping[str, DatasetSpec] | None:
    """Returns what a definitions module declares; None if only Dagster can tell, or a declaration is wrong."""
    try:
        folder = _declarations_folder(module)
        specs = [] if folder is None else [_spec(*found) for found in _documents(folder)]
    except _LEFT_TO_DAGSTER:
        return None
    named = {spec.name: spec for spec in specs}
    return named if folder is not None and len(named) == len(specs) else None


def _declarations_folder(module: str) -> Path | None:
    """Returns the folder that a definitions module loads; None if it does anything else."""
    if module in _OWN:
        return _package_folder(_OWN[module].split("."), are_plain=False)
    *package, name = module.split(".")
    above = _package_folder(package)
    file = None if above is None else above / f"{name}.py"
    if file is None or not file.is_file():
        return None
    num_parents = _num_parents(ast.parse(file.read_text(encoding="utf-8")))
    loaded = defs_module(file.parents[num_parents - 1]) if num_parents else None
    return None if loaded is None else _package_folder(loaded.split("."))


def _package_folder(names: list[str], *, are_plain: bool = True) -> Path | None:
    """Returns the folder of a package without importing it; None if it is not one folder, or it executes anything."""
    folder: Path | None = None
    for name in names:
        spec = PathFinder.find_spec(name, None if folder is None else [str(folder)])
        if spec is None or spec.origin is None or not spec.submodule_search_locations:
            return None
        if are_plain and not _does_nothing(Path(spec.origin)):
            return None
        (folder,) = map(Path, spec.submodule_search_locations)
    return folder


def _does_nothing(file: Path) -> bool:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


def _num_parents(tree: ast.Module) -> int:
    """Returns how often a module takes `.parent` of its file to load the folder; 0 if it does anything else."""
    nodes = list(ast.walk(tree))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    used = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    used += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    is_plain = (
        all(isinstance(node, _NODES) for node in nodes)
        and modules <= _IMPORTED
        and len(functions) == 1
        and all(node.asname in (None, "dg") for node in nodes if isinstance(node, ast.alias))
        and not assigned & _NAMES
        and _NAMES | assigned >= set(used)
        and {"definitions", "load_from_defs_folder", "__file__"} <= set(used)
        and used.count("load_from_defs_folder") == used.count("__file__") == 1
    )
    return used.count("parent") if is_plain else 0


def _documents(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yields the file and the attributes of each declaration in a folder, in Dagster's order.

    Raises:
        ValueError: something in it is not plain YAML of a dataset.
    """
    declared = next((folder / name for name in _DECLARATIONS if (folder / name).exists()), None)
    if declared is None:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".py" and not _does_nothing(path):
                raise ValueError(f"{path} may declare anything")
            if path.is_dir() and path.name != "__pycache__" and not path.name.startswith("."):
                yield from _documents(path)
        return
    for document in yaml.load_all(declared.read_text(encoding="utf-8"), Loader=_loader()):
        if not isinstance(document, dict) or document.keys() != {"type", "attributes"}:
            raise ValueError(f"{declared} has other keys")
        if document["type"] not in _TYPES or not isinstance(document["attributes"], dict):
            raise ValueError(f"{declared} declares something else")
        yield declared, document["attributes"]


def _loader() -> Any:
    """Returns Dagster's: it takes no text for a time."""
    resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": resolvers})


def _spec(file: Path, attributes: Mapping[str, Any]) -> DatasetSpec:
    where = file.parent / "defs.yaml"
    spec = DatasetSpec.from_config(
        _resolved(attributes), where=str(where), base=where.parent, default_root=default_root()
    )
    if spec.cron.split()[2] != "*":
        raise ValueError(f"only Dagster knows whether there is such a day: {spec.cron}")
    return spec


def _resolved(value: Any) -> Any:
    """A value with the variables of its templates, as Dagster resolves them: a text may be a literal of Python.

    Raises:
        ValueError: a template is anything but a variable that is set.
    """
    if isinstance(value, dict):
        return {name: _resolved(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    text = re.sub(r"\r\n?", "\n", value).removesuffix("\n")
    if not text or _TEMPLATE.search(_VARIABLE.sub("", text)):
        raise ValueError(f"only Dagster can resolve {value!r}")
    variables = [found[1] or found[3] for found in _VARIABLE.finditer(text)]
    if any(name not in os.environ for name in variables):
        raise ValueError(f"names variables that are not set: {variables}")
    text = _VARIABLE.sub(lambda found: os.environ[found[1] or found[3]], text)
    try:
        return ast.literal_eval(ast.parse(text, mode="eval"))
    except (ValueError, SyntaxError, MemoryError):
        return text
