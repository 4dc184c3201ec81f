"""The two wheels of this tree: what is in them, their types, and what the reader's needs in an empty environment."""

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import mm_assets

from ..pipeline.chain import declare, run_chain

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "mm_assets"
DEMO = PACKAGE / "defs" / "demo"
READER = ("formats", "media", "storage", "fields", "display", "dataset", "loading")
TOP_LEVEL = ("__init__.py", "errors.py", "json_text.py", "summaries.py", "py.typed")

USER_PROGRAM = """
from collections.abc import Iterator

import mm_assets
from mm_assets.fields import Field, ImageField, TextField

fields: dict[str, Field] = {"image": ImageField(decode_size=(32, 32)), "text": TextField()}


def captions(path: str) -> Iterator[tuple[int, str]]:
    with mm_assets.open(path) as samples:
        loader = mm_assets.MultimodalLoader(samples, batch_size=4, seed=1)
        for batch in loader:
            yield from zip(batch["index"].tolist(), batch["text"], strict=True)


def write(path: str) -> None:
    with mm_assets.create(path, fields) as writer:
        writer.write("first", {"text": "a"})


reveal_type(mm_assets.open)
samples: int = mm_assets.open("x.mult")
"""


def python(*arguments: object, folder: Path | None = None) -> str:
    """What a Python process prints; its messages, where it fails, are the test's."""
    command = [str(argument) for argument in arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def pip(*arguments: object) -> None:
    python(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


@pytest.fixture(scope="session")
def wheels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two wheels by the name of their distribution: those of ``--wheels``, or made here."""
    given = request.config.getoption("--wheels")
    folder = Path(given) if given else tmp_path_factory.mktemp("dist")
    if not given:
        pip("wheel", "--no-deps", "--wheel-dir", folder, REPOSITORY, REPOSITORY / "reader")
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="session")
def empty_environment(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment where nothing is installed but the reader's wheel and what it requires."""
    folder = tmp_path_factory.mktemp("reader")
    venv.create(folder, with_pip=False)
    interpreter = folder / "bin" / "python"
    constraints = REPOSITORY / "constraints.txt"
    pip("--python", interpreter, "install", "--constraint", constraints, wheels["mm_assets_reader"])
    return interpreter


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of the import package, by their path in it."""
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if ".dist-info/" not in name]
        return {name.removeprefix("mm_assets/"): opened.read(name) for name in names}


def in_tree() -> set[str]:
    found = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(PACKAGE).as_posix() for path in found if DEMO not in path.parents}


class TestContents:
    """`make wheels` runs these over the wheels that it made."""

    def test_the_whole_is_in_the_one(self, wheels: dict[str, Path]) -> None:
        """`mm-assets` holds every file of the package but the demo shards: source code, and no data."""
        found = contents(wheels["mm_assets"])
        assert set(found) == in_tree()
        assert max(map(len, found.values())) < 100_000
        assert wheels["mm_assets"].stat().st_size < 2_000_000

    def test_the_reading_packages_are_in_the_other(self, wheels: dict[str, Path]) -> None:
        """`mm-assets-reader` holds the packages that read, with the same bytes, at most a megabyte."""
        whole, reader = contents(wheels["mm_assets"]), contents(wheels["mm_assets_reader"])
        assert set(reader) == {
            name for name in whole if name in TOP_LEVEL or name.startswith(tuple(f"{p}/" for p in READER))
        }
        assert all(whole[name] == data for name, data in reader.items())
        assert wheels["mm_assets_reader"].stat().st_size < 1_000_000

    def test_both_are_of_the_packages_version(self, wheels: dict[str, Path]) -> None:
        """The version is written once, in the package."""
        assert {path.name.split("-")[1] for path in wheels.values()} == {mm_assets.__version__}


def test_an_empty_environment_loads_the_demo(empty_environment: Path, demo_shards: Path, tmp_path: Path) -> None:
    """With the reader's wheel alone, packed captions and documents go through a loader; it is small."""
    manifests = []
    for name, pack in (("captions", "image_text"), ("docs", "interleaved")):
        spec = declare(tmp_path / name, demo_shards / f"{name}-*.tar", pack=pack)
        run_chain(spec)
        manifests.append(Path(spec.root) / spec.name / "manifest.json")
    smoke = Path(__file__).with_name("reader_smoke.py")
    found = json.loads(python(empty_environment, "-P", "-I", smoke, *manifests, folder=tmp_path))
    print(f"{len(found['distributions'])} distributions, {found['megabytes']:.1f} MB: {found['distributions']}")
    assert found["package"].startswith(found["site"])
    assert found["absent"] == ["dagster", "duckdb", "pyarrow", "cv2", "soundfile"]
    captions, documents = (found["seen"][str(manifest)] for manifest in manifests)
    assert captions["samples"] > 10
    assert captions["shape"][1:] == [64, 48, 3]
    assert documents["samples"] > 3
    assert len(found["distributions"]) <= 8
    assert found["megabytes"] < 130


@pytest.mark.parametrize("installed", ["mm-assets-reader", "mm-assets"])
def test_a_users_program_is_type_checked(installed: str, empty_environment: Path, tmp_path: Path) -> None:
    """`mypy --strict` takes the installed package's types: a right program passes, and a wrong assignment is found."""
    program = tmp_path / "program.py"
    program.write_text(USER_PROGRAM)
    interpreter = str(empty_environment) if installed == "mm-assets-reader" else sys.executable
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", interpreter, str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(lines) == 1, done.stdout + done.stderr
    assert '"Dataset", variable has type "int"' in lines[0]
