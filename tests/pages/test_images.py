"""The pictures of the documentation: which there are, what makes them, where they are used, and what they weigh."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGES = REPOSITORY / "docs" / "images"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def screenshots() -> ModuleType:
    """The script of `make screenshots`."""
    spec = importlib.util.spec_from_file_location("screenshots", REPOSITORY / "docs" / "screenshots.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["screenshots"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_made_by_the_script(screenshots: ModuleType) -> None:
    """docs/images has what `make screenshots` takes and nothing else, each with at most the bytes it allows."""
    assert {path.name for path in IMAGES.iterdir()} == {
        f"{name}.png" for name in [*screenshots.SHOTS, *screenshots.TUTORIALS]
    }
    for path in IMAGES.iterdir():
        assert path.stat().st_size <= screenshots.MAX_BYTES, path
        if path.stem in screenshots.SHOTS:
            with Image.open(path) as image:
                assert image.size == screenshots.SHOTS[path.stem].size, path


def test_every_picture_is_used_and_described() -> None:
    """Each picture is shown by a page, and each place that shows one says in words what is on it."""
    shown: dict[str, list[str]] = {}
    for page in PAGES:
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).resolve().parent == IMAGES, (page, target)
            shown.setdefault(Path(target).name, []).append(words)
    assert sorted(shown) == sorted(path.name for path in IMAGES.iterdir())
    assert [words for found in shown.values() for words in found if len(words.split()) < 4] == []


def test_the_tutorials_that_make_pictures_are_tested(screenshots: ModuleType) -> None:
    """The tests that the script runs for the pictures of tutorials exist, and write those files."""
    tests = (REPOSITORY / "tests" / "pages" / "test_guides.py").read_text(encoding="utf-8")
    for name, test in screenshots.TUTORIALS.items():
        body = tests.split(f"def test_{'the_' if test == 'quick_start' else ''}{test}(", 1)[1].split("\ndef ", 1)[0]
        assert f'"{name}.png")' in body
