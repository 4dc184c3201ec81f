"""The `mm-assets` command in this process: what it offers."""

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
