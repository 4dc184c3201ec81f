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
    """What a shell asks for is answered: commands by their start, options of a command, stages and presets."""

    def completed(words: str, number: int) -> str:
        asked = {"_MM_ASSETS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        return CliRunner().invoke(main, [], prog_name="mm-assets", env=asked).stdout

    assert set(completed("mm-assets sta", 1).split()) == {"plain,status", "plain,stats"}
    assert "plain,--partitions-from" in completed("mm-assets run --part", 2).split()
    assert completed("mm-assets run --from packed", 3).split() == ["plain,packed_mult", "plain,packed_mstr"]
    assert completed("mm-assets plan --pack image", 3).split() == ["plain,image_text", "plain,image_text_pair"]


def test_datasets_and_partitions_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names come from the YAML files of the project and from registered datasets; what is damaged is left out."""
    declared = tmp_path / "mine" / "defs" / "a" / "defs.yaml"
    declared.parent.mkdir(parents=True)
    declared.write_text("type: t\nattributes:\n  name: talks\n  shards: '{{ x }}'\n---\nattributes:\n  name: web\n")
    (tmp_path / "dg.toml").write_text('directory_type = "project"\n[project]\nroot_module = "mine"\n')
    for name, text in (
        ("talent", '{"partitions": {"k-1": [], "k-2": [], "x": []}}'),
        ("web", "{"),
        ("tar", '{"a": 1}'),
    ):
        folder = tmp_path / "dagster_home" / "data" / name
        folder.mkdir(parents=True)
        (folder / "shards.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    for variable in ("DAGSTER_HOME", "MM_ASSETS_ROOT"):
        monkeypatch.delenv(variable, raising=False)

    def completed(words: str) -> set[str]:
        asked = {"_MM_ASSETS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        found = CliRunner().invoke(main, [], prog_name="mm-assets", env=asked).stdout
        return {line.partition(",")[2] for line in found.splitlines() if line}

    assert completed("mm-assets run --dataset tal") == {"talks", "talent"}
    assert completed("mm-assets status -d w") == {"web"}
    assert completed("mm-assets run --dataset talent --partition k") == {"k-1", "k-2"}
    assert completed("mm-assets losses --partition x") == {"x"}
    assert completed("mm-assets run --dataset web --partition k") == set()
    (tmp_path / "elsewhere" / "other").mkdir(parents=True)
    (tmp_path / "elsewhere" / "other" / "shards.json").write_text("{}")
    assert completed("mm-assets status --root elsewhere --dataset o") == {"other"}


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
