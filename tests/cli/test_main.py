"""The `mm-assets` command in this process: what it offers."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from mm_assets.cli.main import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_listed_with_its_help(command: str) -> None:
    """The help of the group lists each command, and each command has a help of its own."""
    listed = CliRunner().invoke(main, ["--help"])
    assert f"\n  {command} " in listed.output
    assert CliRunner().invoke(main, [command, "--help"]).output.startswith(f"Usage: main {command} ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("stauts",), "No such command 'stauts'; did you mean stats or status?"),
        (("status", "--datasets", "x"), "--dataset"),
        (("plan", "--shards", "x", "--set", "on_damaged_shrd=fail"), "; did you mean on_damaged_shard?"),
        (("plan", "--shards", "x", "--set", "samples.user_colums=[a]"), "; did you mean user_columns?"),
        (("run", "--shards", "x", "--from", "row"), "; did you mean rows?"),
        (("status", "-m", "mm_assets.definitions", "-d", "captoins"), "; did you mean captions?"),
        (("losses", "--root", "root", "-d", "captoins"), "; did you mean captions?"),
    ],
)
def test_what_is_meant_by_a_misspelt_name(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    """An unknown command, option, setting, stage or dataset is refused with the name that is like it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root" / "captions").mkdir(parents=True)
    (tmp_path / "root" / "captions" / "shards.json").write_text("{}")
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_completes_the_command(shell: str) -> None:
    """The script is all of standard output, names the program, and standard error says how to install it."""
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert "_MM_ASSETS_COMPLETE" in result.stdout
    assert "to install it" not in result.stdout
    assert "to install it: " in result.stderr
    assert "Invalid value for '{bash|zsh|fish}'" in CliRunner().invoke(main, ["completion", "tcsh"]).stderr


def test_commands_and_options_are_completed() -> None:
    """What a shell asks for is answered: commands by their start, and options of a command."""

    def completed(words: str, number: int) -> str:
        asked = {"_MM_ASSETS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        return CliRunner().invoke(main, [], prog_name="mm-assets", env=asked).stdout

    assert set(completed("mm-assets sta", 1).split()) == {"plain,status", "plain,stats"}
    assert "plain,--partitions-from" in completed("mm-assets run --part", 2).split()


@pytest.mark.parametrize(
    ("command", "says"),
    [("convert", "Convert packed files between MULT and MSTR"), ("clean", "Dry run: list what would be removed")],
)
def test_help_says_what_happens(command: str, says: str) -> None:
    """The help uses the words that a user would search for."""
    assert says in " ".join(CliRunner().invoke(main, [command, "--help"]).output.split())


def test_no_description_is_cut() -> None:
    """The help of the group has the first paragraph of each command's help as a whole."""
    listed = " ".join(CliRunner().invoke(main, ["--help"], env={"COLUMNS": "80"}).output.split())
    assert "run Register the shards, run every pending partition from its first stale stage on, make the" in listed
    assert listed.count("...") == 1, "of the arguments, in the first line"
