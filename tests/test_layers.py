"""What an import brings in: the layers themselves are held by import-linter (pyproject.toml)."""

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from mm_assets.cli.main import COMMANDS
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register

from .pipeline.shards import CAPTIONS, make_shard

CODE = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
print(*{module.partition(".")[0] for module in sys.modules})
"""
READING = ("formats", "media", "storage", "fields", "display", "dataset", "loading")  # and the modules at the top
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
CONFIG = {"name": "data", "shards": "in", "settle_seconds": 0, "pack": "generic"}


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages that importing these modules in a fresh interpreter loads."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, *modules], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "mm_assets.pipeline.partition.stages",
        "mm_assets.checks.packed",
        *(f"mm_assets.orchestration.{name}" for name in ("interrupts", "recorded", "recorded_load", "viewer")),
    ],
)
def test_a_load_begins_without_dagster(module: str) -> None:
    """Neither the library nor what drives and records a load imports Dagster."""
    assert not loaded_by(module) & {"dagster", "sqlalchemy"}


def test_help_of_commands_is_fast() -> None:
    """No command's module imports Dagster, Arrow or DuckDB: they are imported where a command runs."""
    modules = [f"mm_assets.cli.{name.replace('-', '_')}" for name in COMMANDS]
    assert not loaded_by(*modules) & {"dagster", "pyarrow", "duckdb"}


@pytest.mark.parametrize("command", ["status", "clean", "losses"])
def test_undeclared_datasets_need_no_dagster(tmp_path: Path, command: str) -> None:
    """Looking at a dataset that no YAML declares, and cleaning it, do not import Dagster, which takes a second."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(bytes(1024))
    register(DatasetStore(DatasetSpec.from_config(CONFIG | {"root": str(tmp_path)}, where="arguments", base=tmp_path)))
    given = [command, "--root", str(tmp_path), "-d", "data"]
    given += ["--shards", str(tmp_path / "in")] if command == "status" else []
    code = (
        "import sys; from mm_assets.cli.main import main; main(standalone_mode=False); print('dagster' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *given], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert "dagster" not in done.stdout.splitlines()[-1].split()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that declares a dataset, which is packed and recorded, with a packed file `x.mult`."""
    folder = tmp_path_factory.mktemp("project")
    make_shard(folder / "a.tar", CAPTIONS)
    environment = {name: value for name, value in os.environ.items() if name not in ("DAGSTER_HOME", "MM_ASSETS_ROOT")}
    command = [sys.executable, "-c", "from mm_assets.cli.main import main; main()"]
    for arguments in (["init", "a.tar", "-d", "data", "--project"], ["run"]):
        subprocess.run([*command, *arguments], check=True, capture_output=True, cwd=folder, env=environment)
    (packed,) = (folder / "dagster_home" / "data" / "data" / "packed").glob("*.mult")
    (folder / "x.mult").symlink_to(packed)
    return folder


DAGSTER = {"dagster", "sqlalchemy"}
QUERIES = {"duckdb", "pyarrow.compute", "pyarrow.parquet"}


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        ("--version", {"numpy", *DAGSTER, *QUERIES}),
        ("--help", {"pyarrow", "pydantic", *DAGSTER, *QUERIES}),
        ("status", {*DAGSTER, *QUERIES}),
        ("losses", {*DAGSTER, *QUERIES}),
        ("stats", {*DAGSTER, "pyarrow.compute", "pyarrow.parquet"}),
        ("sql select", {*DAGSTER, "pyarrow.compute", "pyarrow.parquet"}),
        ("plan", {*DAGSTER, "duckdb"}),
        ("verify x.mult", {"pyarrow", "pydantic", *DAGSTER, *QUERIES}),
        ("inspect x.mult", {"pyarrow", "pydantic", "fsspec", *DAGSTER, *QUERIES}),
        ("run --dry-run", {*DAGSTER, *QUERIES}),
        ("run", {*DAGSTER, *QUERIES}),
    ],
)
def test_commands_import_what_they_need(project: Path, command: str, unused: set[str]) -> None:
    """A command that looks at a declared dataset, and a load with nothing to do, start without the libraries of others.

    Dagster takes a second to import, DuckDB and parts of Arrow some hundredths each.
    """
    code = (
        "import sys\nfrom mm_assets.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=open('modules', 'w'))"
    )
    arguments = ["sql", "select 1"] if command == "sql select" else command.split()
    environment = {name: value for name, value in os.environ.items() if name not in ("DAGSTER_HOME", "MM_ASSETS_ROOT")}
    subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, cwd=project, env=environment
    )
    assert not unused & set((project / "modules").read_text().split())


def test_reading_needs_no_heavy_library() -> None:
    """Importing the packages that read loads neither Arrow, nor DuckDB, nor Dagster, nor a library that decodes."""
    folders = [importlib.import_module(f"mm_assets.{name}") for name in READING]
    modules = [found.name for one in folders for found in pkgutil.iter_modules(one.__path__, f"{one.__name__}.")]
    assert len(modules) > 70
    modules.remove("mm_assets.loading.torch_dataset")  # which `MultimodalLoader.torch` imports
    assert not loaded_by("mm_assets", *modules) & HEAVY
