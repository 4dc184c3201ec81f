"""What an import brings in: the layers themselves are held by import-linter (pyproject.toml)."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

from mm_assets.cli.main import COMMANDS

CODE = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
print(*{module.partition(".")[0] for module in sys.modules})
"""
READING = ("formats", "media", "storage", "fields", "dataset", "loading")  # and the modules at the top
HEAVY = {
    "pyarrow",
    "duckdb",
    "dagster",
    "pydantic",
    "PIL",
    "cv2",
    "av",
    "soundfile",
    "tifffile",
    "torch",
    "pandas",
    "s3fs",
}


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages that importing these modules in a fresh interpreter loads."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, *modules], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["mm_assets.pipeline.stages", "mm_assets.checks"])
def test_nothing_below_orchestration_loads_dagster(module: str) -> None:
    """The library does not import Dagster."""
    assert "dagster" not in loaded_by(module)


def test_help_of_commands_is_fast() -> None:
    """No command's module imports Dagster, Arrow or DuckDB: they are imported where a command runs."""
    modules = [f"mm_assets.cli.{name.replace('-', '_')}" for name in COMMANDS]
    assert not loaded_by(*modules) & {"dagster", "pyarrow", "duckdb"}


def test_reading_needs_no_heavy_library() -> None:
    """Importing the packages that read loads neither Arrow, nor DuckDB, nor Dagster, nor a library that decodes."""
    folders = [importlib.import_module(f"mm_assets.{name}") for name in READING]
    modules = [found.name for one in folders for found in pkgutil.iter_modules(one.__path__, f"{one.__name__}.")]
    assert len(modules) > 70
    assert not loaded_by("mm_assets", *modules) & HEAVY
