"""What an import brings in: the layers themselves are held by import-linter (pyproject.toml)."""

import subprocess
import sys

import pytest

CODE = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*{m.split('.')[0] for m in sys.modules})"


def loaded_by(module: str) -> set[str]:
    """Top-level packages that importing a module in a fresh interpreter loads."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, module], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["mm_assets.pipeline.stages", "mm_assets.checks", "mm_assets.cli.main"])
def test_nothing_below_orchestration_loads_dagster(module: str) -> None:
    """The library and the command's own module do not import Dagster."""
    assert "dagster" not in loaded_by(module)


@pytest.mark.parametrize("module", ["mm_assets", "mm_assets.dataset", "mm_assets.loading", "mm_assets.fields"])
def test_reading_needs_no_heavy_library(module: str) -> None:
    """Opening packed files loads neither Arrow, nor DuckDB, nor a library that decodes."""
    assert not loaded_by(module) & {"pyarrow", "duckdb", "PIL", "cv2", "av", "soundfile", "tifffile", "torch", "pandas"}
