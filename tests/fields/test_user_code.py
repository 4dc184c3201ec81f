"""The digest of a user's class: what changes it, and what a class without source is known by."""

from __future__ import annotations

import importlib
import py_compile
import sys
from pathlib import Path

import pytest

from mm_assets.fields import TextField
from mm_assets.fields.user_code import code_digest, is_own

SOURCE = """
from mm_assets.filters.base import Filter

class Short(Filter):
    def judge(self, block):
        return []
"""


class Imported:
    """Imports modules of one folder, as a new process would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, source: str, *, name: str = "users_code", compiled: bool = False) -> type:
        for known in ("users_code", "users_base"):
            sys.modules.pop(known, None)
        file = self.folder / f"{name}.py"
        file.write_text(source)
        if compiled:
            py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")), doraise=True)
            file.unlink()
        importlib.invalidate_caches()
        found: type = importlib.import_module("users_code").Short
        return found


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Imported:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Imported(tmp_path)


def test_a_changed_source_changes_the_digest(imported: Imported) -> None:
    """The same source has the same digest in another process; a change anywhere in the module gives another."""
    first = imported(SOURCE)
    assert not is_own(first)
    assert code_digest(first) == code_digest(imported(SOURCE))
    assert code_digest(first) != code_digest(imported(SOURCE + "\nLIMIT = 3\n"))


def test_the_code_counts_as_it_was_when_it_was_first_asked_for(imported: Imported) -> None:
    """A source that changes under a running process does not change the digest of what it runs."""
    first = imported(SOURCE)
    before = code_digest(first)
    (imported.folder / "users_code.py").write_text(SOURCE + "\nLIMIT = 4\n")
    assert code_digest(first) == before


def test_the_modules_of_base_classes_count(imported: Imported) -> None:
    """A class changes with the module of a class that it derives from."""
    derived = "from users_base import Base\n\nclass Short(Base):\n    pass\n"
    (imported.folder / "users_base.py").write_text("class Base:\n    limit = 1\n")
    before = code_digest(imported(derived))
    (imported.folder / "users_base.py").write_text("class Base:\n    limit = 20\n")
    assert code_digest(imported(derived)) != before


@pytest.mark.parametrize(("declared", "known"), [('"2"', "version 2"), ("3", "version 3")])
def test_a_declared_version_is_all_that_counts(imported: Imported, declared: str, known: str) -> None:
    """With a `version` the source may change; a new version is a new digest."""
    versioned = SOURCE + f"\n    version = {declared}\n"
    assert code_digest(imported(versioned)) == code_digest(imported(versioned + "# changed\n")) == known


def test_a_setting_called_version_is_not_a_declared_one(imported: Imported) -> None:
    """A field's setting of that name has a default, which says nothing about its code."""
    source = "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Short:\n    version: int = 1\n"
    before = code_digest(imported(source))
    assert not before.startswith("version")
    assert before != code_digest(imported(source + "    other: int = 2\n"))


def test_a_module_without_source_is_known_by_its_file(imported: Imported) -> None:
    """Of a compiled module the bytes of its file count."""
    before = code_digest(imported(SOURCE, compiled=True))
    assert before != code_digest(imported(SOURCE + "\nLIMIT = 5\n", compiled=True))


def test_a_class_of_a_shell_is_known_by_its_name_alone() -> None:
    """A class without a file has a digest too, which its code does not change."""
    made = [type("Short", (), {"__module__": "shell", "limit": limit}) for limit in (1, 2)]
    assert code_digest(made[0]) == code_digest(made[1])


def test_a_built_in_class_is_the_packages_own() -> None:
    """Classes of this package have no code digest in the chain: their stages have versions."""
    assert is_own(TextField)
