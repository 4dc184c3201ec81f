"""Imports go one way: containers know bytes, fields know values, neither knows the other, and one package Dagster."""

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "mm_assets"
CODE = """
import sys, types, importlib
# A package object without its __init__, so that a layer is loaded with nothing but what it asks for itself.
package = types.ModuleType("mm_assets"); package.__path__ = [sys.argv[1]]; sys.modules["mm_assets"] = package
package.__version__ = "0"
importlib.import_module(sys.argv[2])
print(*sorted(m for m in sys.modules if m.split(".")[0] in {"mm_assets", "dagster", "pyarrow", "PIL", "duckdb", "cv2"}))
"""


def loaded_by(module: str) -> set[str]:
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(PACKAGE), module]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def layers(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("mm_assets.")}


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("mm_assets.errors", {"errors"}),
        ("mm_assets.formats", {"errors", "formats"}),
        (
            "mm_assets.fields",
            {
                "errors",
                "fields",
                "media",
                "content_types",
                "flac",
                "summaries",
                "midi",
                "smf",
                "av_codec",
                "av_sound",
                "av_timing",
                "iso_media",
                "subtitles",
                "tokenizing",
                "layouts",
                "text_boxes",
            },
        ),
        ("mm_assets.media.page_layouts", {"errors", "layouts", "text_boxes", "summaries"}),
        ("mm_assets.storage.store", {"errors", "forking", "source_files", "storage"}),
    ],
)
def test_a_layer_loads_only_what_lies_below_it(module: str, allowed: set[str]) -> None:
    """Importing a layer in a fresh interpreter brings in no layer beside or above it."""
    assert layers(loaded_by(module)) <= allowed


@pytest.mark.parametrize(
    "module", ["mm_assets.dataset.dataset", "mm_assets.pipeline.stages", "mm_assets.checks", "mm_assets.cli.main"]
)
def test_nothing_below_orchestration_loads_dagster(module: str) -> None:
    """The library and the command's own module do not import Dagster."""
    assert not {name for name in loaded_by(module) if name.split(".")[0] == "dagster"}


def test_containers_and_reading_need_no_heavy_library() -> None:
    """Opening packed files loads neither Arrow, nor DuckDB, nor an image library."""
    heavy = {"pyarrow", "duckdb", "PIL", "cv2"}
    assert not {name for name in loaded_by("mm_assets.dataset.dataset") if name.split(".")[0] in heavy}
