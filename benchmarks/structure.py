"""Measure the code's structure, so that drift is visible: size, rooms, cycles, names, settings, documentation, a walk.

    python -m benchmarks.structure              # a table
    python -m benchmarks.structure --rooms      # and a row for each room
    python -m benchmarks.structure --walk       # and what packing the demo dataset and reading a batch of it enters

A *room* is a folder of modules, a *floor* the length of its longest chain of imports, an *arrow* an import between two
of its modules. Goals are printed beside the results.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import typing
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from pydantic import BaseModel

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "mm_assets"
WALK = """
import os, sys, tempfile, threading

package, root = sys.argv[1:3]
codes, depth = set(), 0

def enter(frame, event, argument):
    global depth
    if event == "call" and frame.f_code.co_filename.startswith(package) and frame.f_code.co_name != "<module>":
        if frame.f_code not in codes:
            codes.add(frame.f_code)
        calls = 0
        while frame is not None:
            calls += frame.f_code.co_filename.startswith(package)
            frame = frame.f_back
        depth = max(depth, calls)

def report(name):
    named = [code for code in codes if not code.co_name.startswith("<")]
    print(name, len({code.co_filename for code in named}), len(named), depth)

from mm_assets.cli.main import main

threading.setprofile(enter), sys.setprofile(enter)
try:
    sys.stdout, output = open(os.devnull, "w"), sys.stdout
    sys.argv = ["mm-assets", "run", package + "/defs/demo/shards/captions-00000.tar"]
    sys.argv += ["--root", root, "--dataset", "walk", "--jobs", "1"]
    main()
except SystemExit as end:
    assert not end.code, end.code
finally:
    sys.stdout = output
sys.setprofile(None), threading.setprofile(None)
report("run")

import mm_assets

sys.setprofile(enter)
next(iter(mm_assets.MultimodalLoader(mm_assets.open(root + "/walk"), batch_size=4, seed=0)))
sys.setprofile(None)
report("batch")
"""


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the package.

    Attributes:
        name: its dotted name.
        path: its file.
        tree: what it says.
    """

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__` of a folder."""
        return self.path.name == "__init__.py"


@cache
def modules() -> dict[str, Module]:
    """Returns the package's modules by dotted name."""
    found = {}
    for path in sorted((REPOSITORY / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        found[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """Returns the modules of the package that each module imports, also inside of functions and for types alone."""
    return {name: frozenset(_imported(module)) - {name} for name, module in modules().items()}


def _imported(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                above = parts[: len(parts) - node.level + module.is_package]
                base = ".".join([*above, *([node.module] if node.module else [])])
            names = [
                inner if (inner := f"{base}.{alias.name}") in modules() else base  # a module, or a name in one
                for alias in node.names
            ]
        else:
            continue
        yield from (name for name in names if name in modules())


def lines(folder: str) -> int:
    """Returns the lines of a folder's Python files, those without a statement included."""
    return sum(path.read_bytes().count(b"\n") for path in (REPOSITORY / folder).rglob("*.py"))


def rooms() -> dict[str, list[str]]:
    """Returns the modules of each folder, without its `__init__`."""
    of_folder = defaultdict(list)
    for name, module in modules().items():
        if not module.is_package:
            of_folder[name.rpartition(".")[0].removeprefix(f"{PACKAGE}.")].append(name)
    return dict(of_folder)


def arrows(room: Collection[str]) -> dict[str, frozenset[str]]:
    """Returns which modules of a room each one of them imports."""
    return {name: imports()[name] & frozenset(room) for name in room}


def floors(graph: Mapping[str, frozenset[str]]) -> int | None:
    """Returns how many modules the longest chain of imports has; None if there is a cycle."""
    heights: dict[str, int] = {}
    try:
        for name in TopologicalSorter(graph).static_order():
            heights[name] = 1 + max((heights[below] for below in graph[name]), default=0)
    except CycleError:
        return None
    return max(heights.values(), default=0)


def cycle() -> list[str]:
    """Returns modules that import each other in a circle, or nothing."""
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def repeated_classes() -> list[str]:
    """Returns the names that more than one class of the package has."""
    counts = Counter(
        node.name for module in modules().values() for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in counts.items() if count > 1)


def private_dagster() -> dict[str, int]:
    """Returns how many private modules of Dagster each module imports."""
    pattern = re.compile(r"^\s*(?:from|import)\s+dagster[\w.]*\._\w", re.MULTILINE)
    counts = {name: len(pattern.findall(module.path.read_text("utf-8"))) for name, module in modules().items()}
    return {name: count for name, count in counts.items() if count}


def settings() -> list[str]:
    """Returns the dotted names of all settings of a dataset."""
    from mm_assets.pipeline.spec import DatasetSpec

    def named(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            parts = [
                part
                for part in (field.annotation, *typing.get_args(field.annotation))
                if isinstance(part, type) and issubclass(part, BaseModel)
            ]
            if parts:
                yield from named(parts[0], f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    return list(named(DatasetSpec, ""))


def words(*, in_menu: bool) -> int:
    """Returns the words of the documentation: of the pages in the menu, or of all."""
    menu = (REPOSITORY / "mkdocs.yml").read_text("utf-8")
    pages = (REPOSITORY / "docs").rglob("*.md")
    return sum(
        len(path.read_text("utf-8").split())
        for path in pages
        if not in_menu or re.search(rf"[ :]{path.relative_to(REPOSITORY / 'docs')}$", menu, re.MULTILINE)
    )


def walk() -> dict[str, tuple[int, int, int]]:
    """Returns the modules and functions entered, and the deepest stack of them, by `mm-assets run` and then a batch."""
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-c", WALK, str(REPOSITORY / PACKAGE), root]
        home = {**os.environ, "DAGSTER_HOME": root}
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root, env=home).stdout
    entered = {}
    for line in output.splitlines():
        name, *numbers = line.split()
        entered[name] = tuple(map(int, numbers))
    return entered


def table(*, walks: bool, each_room: bool) -> list[tuple[str, object, object]]:
    """Returns rows of what is measured, its value and the goal."""
    sizes = {}
    for name, room in rooms().items():
        graph = arrows(room)
        sizes[name] = len(room), floors(graph), sum(map(len, graph.values()))
    largest = max((name for name in sizes if name.startswith("pipeline")), key=lambda name: sizes[name])
    private = private_dagster()
    repeated = repeated_classes()
    rows: list[tuple[str, object, object]] = [
        ("source lines", lines(PACKAGE), "66,000"),
        ("test lines", lines("tests"), "58,000"),
        ("modules", len(modules()), ""),
        (f"largest room of the pipeline, {largest}: modules, floors, arrows", sizes[largest], "13, 6, 35"),
        ("a cycle of imports", " ".join(cycle()) or "none", "none"),
        ("class names used twice", f"{len(repeated)}: {' '.join(repeated)}", "5"),
        ("private modules of Dagster; modules with them", f"{sum(private.values())}; {len(private)}", "5; 1"),
        ("settings", len(settings()), "48"),
        ("words of documentation in the menu", words(in_menu=True), "30,000"),
        ("words of documentation in all", words(in_menu=False), ""),
    ]
    if each_room:
        rows += [(f"  {name or PACKAGE}: modules, floors, arrows", size, "") for name, size in sorted(sizes.items())]
    if walks:
        goals = {"run": "100, 950, 32", "batch": "115, 1,100"}
        rows += [(f"walk to {name}: modules, functions, depth", size, goals[name]) for name, size in walk().items()]
    return rows


def main() -> None:
    """Prints the measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", action="store_true", help="a row for each room")
    parser.add_argument("--walk", action="store_true", help="what a load and a batch enter; takes ten seconds")
    options = parser.parse_args()
    for name, value, goal in table(walks=options.walk, each_room=options.rooms):
        numbers = value if isinstance(value, tuple) else (value,)
        text = ", ".join(f"{number:,}" if isinstance(number, int) else str(number) for number in numbers)
        print(f"{name}: {text}" + (f" (goal {goal})" if goal else ""))


if __name__ == "__main__":
    main()
