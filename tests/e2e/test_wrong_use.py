"""Wrong use of the `mm-assets` command: one line that says what is wrong, and the exit code.

The command runs in this process; test_cli.py tests that a shell sees such a line and the exit code.
"""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mm_assets.cli.main import main

DEMO = ("--module", "demo_project")


@pytest.fixture
def work(tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty, beside an empty instance."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refused(*arguments: str, code: int) -> Result:
    """Runs the command, which ends by itself and not by an exception that a shell would show with its traceback."""
    done = CliRunner().invoke(main, arguments)
    assert isinstance(done.exception, SystemExit), (arguments, done.exc_info)
    assert done.exit_code == code, (arguments, done.output)
    return done


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", *DEMO, "--dataset", "nope"), "'nope' is not declared"),
        (("run", *DEMO, "--dataset", "captions", "--partition", "x"), "is not a registered partition"),
        (("run",), "no Dagster project in"),
        (("status", "-d", "x", "--root", "o"), "`mm-assets status --root o --dataset x SHARDS`"),
        (("stats",), "is named by --dataset and --root"),
        (("ui",), "`mm-assets init SHARDS --dataset D --project` makes one here"),
        (("run", "-d", "x", "--shards", "s", "--set", "filters=[{type: image_siz}]"), "did you mean image_size?"),
        (("run", "--shards", "s", "--set", "filters=[{type: image_size, min_widht: 1}]"), "did you mean min_width or"),
        (("run", "--shards", "s", "--set", "on_damaged_shard=salvag"), "did you mean salvage?"),
        (("run", "--shards", "s", "--set", "pack={fields: [{nam: x}]}"), "did you mean name?"),
        (("run", "--shards", "s", "--pack", "image_txt"), "did you mean image_text or"),
        (("inspekt",), "No such command 'inspekt'"),
        (("run", "--pack", "generic"), "goes with SHARDS"),
        (("convert", "a.mult", "b.zip"), "allowed: .mult, .mstr"),
        (("sql", *DEMO, "select 1"), "name one dataset"),
        (("clean", "--root", ".", "-d", "nope"), "nope is not a registered dataset"),
    ],
)
def test_wrong_use_says_what_is_allowed(arguments: tuple[str, ...], says: str) -> None:
    """A wrong argument gives one line and exit code 2."""
    done = refused(*arguments, code=2)
    assert says in done.stderr


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "--shards", "nowhere/*.tar", "--root", "o"), "no shard was found"),
        (("inspect", "nowhere.mult"), "nowhere.mult"),
        (("verify", "nowhere.mult"), "nowhere.mult"),
        (("verify", "s4://bucket/x.mult"), "s4:// is not known"),
    ],
)
def test_what_is_not_there_is_named(arguments: tuple[str, ...], says: str) -> None:
    """A missing file or folder gives its name and exit code 1."""
    done = refused(*arguments, code=1)
    assert says in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("pyproject.toml", "[tool.dg.project]\n", r"pyproject\.toml: tool\.dg\.project\.root_module: is missing"),
        ("dg.toml", "[project\n", r"dg\.toml: file: is not TOML"),
        ("workspace.yaml", "load_from: [{python_file: x.py}]\n", r"workspace\.yaml: load_from: found .*--module"),
        ("workspace.yaml", "load_from: []\n", r"workspace\.yaml: load_from: names no python_module"),
        ("workspace.yaml", "load_from: [\n", r"workspace\.yaml: file: is not YAML"),
        ("pyproject.toml", "[project]\nname = 'x'\n", "no Dagster project in .* --module"),
    ],
)
def test_a_project_without_a_module_says_what_to_do(work: Path, name: str, content: str, says: str) -> None:
    """A project's file that names no definitions module is refused by its name, or passed over if it is another's."""
    (work / name).write_text(content)
    done = refused("register", code=2)
    assert re.search(says, done.stderr)


@pytest.mark.usefixtures("work")
def test_a_module_that_is_not_there_is_named() -> None:
    """An unimportable definitions module gives one line and exit code 2."""
    done = refused("register", "-m", "no.such.module", code=2)
    assert done.stderr.startswith("error: no.such.module: module: cannot be loaded: ModuleNotFoundError")


def test_an_unknown_dataset_leaves_no_instance(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for a dataset that nothing declares, and that is not below the default root, makes no folder."""
    monkeypatch.delenv("DAGSTER_HOME")
    assert "--root" in refused("losses", "-d", "absent", code=2).stderr
    assert list(work.iterdir()) == []
