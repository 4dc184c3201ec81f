"""`mm-assets plan`: what it shows before anything runs."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from mm_assets.cli.main import main
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register

from ..pipeline.shards import make_shard


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of pairs with a left view, and a stray."""
    folder = tmp_path_factory.mktemp("plan") / "in"
    members = {
        f"{n}.{end}": value
        for n in range(9)
        for end, value in {"left.png": b"x", "txt": "t", "json": {"score": n / 2, "[red]": "a"}}.items()
    }
    make_shard(folder / "a.tar", {**members, "README": "read me"})
    return folder


def plan(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)], env=environment)


@pytest.mark.parametrize("width", [80, 40])
def test_the_tables_fit_the_terminal(shards: Path, width: int) -> None:
    """Preset, kinds, modalities and columns are shown with headings, within the width, and nothing is written."""
    before = sorted(shards.parent.rglob("*"))
    result = plan(shards, COLUMNS=str(width), TTY_COMPATIBLE="1", TERM="xterm")
    assert result.exit_code == 0, result.output
    said, _, tables = click.unstyle(result.stdout).partition("because: ")
    assert "preset: generic (chosen from the samples)" in said
    _, *lines, _ = tables.splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(tables.split())
    for text in ("image (role: left)", "kind of sample", "png 9", "double 9", "[red]", "no: odd"):
        assert text in shown
    assert "README of" in result.stderr
    assert sorted(shards.parent.rglob("*")) == before


def test_names_of_members_are_shown_escaped(tmp_path: Path) -> None:
    """A member's name cannot write to the terminal, neither in a table nor in a note."""
    members = {f"{n}.txt": "t" for n in range(99)} | {"\x1b[2JREADME": "x", "odd.\x1b[31m": b"x"}
    make_shard(tmp_path / "in" / "a.tar", members)
    result = plan(tmp_path / "in")
    assert "\\x1b[2JREADME of" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr


def test_settings_and_json(shards: Path) -> None:
    """Settings change the plan, as JSON it has what schema.json will hold, and empty tables are left out."""
    result = plan(shards, "--set", "samples.user_columns=[]", "--pack", "image_text", "--json")
    found = json.loads(result.stdout)["datasets"]["default"]
    assert (found["pack"]["preset"], found["user_columns"]) == ("image_text", [])
    assert found["evidence"]["shards"] == [{"url": str(shards / "a.tar"), "num_samples": 10}]
    without = plan(shards, "--set", "samples.user_columns=[]", "--pack", "image_text")
    assert "┃ column" not in without.stdout
    assert "no: odd │ binary" in without.stdout
    assert "not packed" not in plan(shards).stdout


def test_what_cannot_be_planned(shards: Path, tmp_path: Path) -> None:
    """A place without shards, and shards that are given twice, are errors of one line."""
    empty = plan(tmp_path)
    assert (empty.exit_code, empty.stderr.count("\n")) == (1, 1)
    assert "names that end in .tar .tar.gz" in empty.stderr
    assert "there is no such file or folder" in plan(tmp_path / "nowhere").stderr
    for name in "abc":
        (tmp_path / f"{name}.tar").write_text("<html>not found</html>" * 100)
    pages = plan(tmp_path)
    assert "a.tar, at byte 0: is an HTML page" in pages.stderr
    assert "(and none of the other 2 shards that were tried can be read)" in pages.stderr
    twice = plan(shards, "--shards", shards)
    assert (twice.exit_code, "is given beside SHARDS" in twice.stderr) == (2, True)


def test_the_last_line_says_what_to_run(shards: Path, tmp_path: Path) -> None:
    """It is the command that packs, or of a registered dataset whether its layout differs and the command for that."""
    options = ("--root", tmp_path / "ro ot", "--set", "on_damaged_shard=salvage")
    last = plan(shards, *options).stdout.splitlines()[-1]
    given = f"--root '{tmp_path}/ro ot' --shards {shards}"
    assert last == f"to pack them: `mm-assets run {given} --set on_damaged_shard=salvage`"
    spec = DatasetSpec.from_config(
        {"name": "default", "shards": str(shards), "root": str(tmp_path / "ro ot"), "settle_seconds": 0}, where="test"
    )
    register(DatasetStore(spec))
    assert plan(shards, *options).stdout.splitlines()[-1] == "the registered layout is the same"
    other = plan(shards, *options[:2], "--pack", "image_text").stdout.splitlines()[-1]
    command = f"`mm-assets register {given} --pack image_text --new-schema`"
    assert other == f"the registered layout is another: {command} replaces it"
