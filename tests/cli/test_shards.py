"""What every command that takes shards makes of them: one door, whatever they are called."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mm_assets.cli.main import main
from mm_assets.errors import SourceError
from mm_assets.view import open_backend

from ..pipeline.shards import CAPTIONS, make_shard
from ..storage.web_server import serve

COMMANDS = ("plan", "register --shards", "run --dry-run --shards", "init --project --dataset d", "status --shards")


@pytest.fixture
def folder(tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two shards in a folder that has the name of a pattern."""
    for name in ("a-0", "a 1%"):
        make_shard(tmp_path / "run[1]" / f"{name}.tar", CAPTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mm(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_exists_is_used_by_every_command(folder: Path, command: str) -> None:
    """A folder and a pattern with brackets in their names are found by every command, and a dangling link reported."""
    (folder / "run[1]" / "gone.tar").symlink_to("nowhere")
    for place in ("run[1]", "./run[1]/*.tar", "run[1]/{a-0,a 1%}.tar"):
        result = mm(*shlex.split(command), place, *(() if command.startswith("init") else ("--json",)))
        assert result.exit_code == 0, result.output
        if "{" not in place and "run" not in command:
            assert "gone.tar is skipped: it is a link to nowhere" in result.output
        if command.startswith("register"):
            assert json.loads(result.stdout)["datasets"]["default"]["partitions"] == ["a%201%25", "a-0"]
        if command.startswith(("init", "register")):
            break  # the other spellings are other datasets


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("text", ["pipe:cat a.tar", "-", "a.tar::b.tar"])
def test_what_is_no_place_is_refused_by_every_command(folder: Path, command: str, text: str) -> None:
    """Commands, standard input and lists with :: are refused with what to write instead, and nothing is made."""
    result = mm(*shlex.split(command), "--", text) if "--shards" not in command else mm(*shlex.split(command), text)
    assert result.exit_code == 2
    assert "name the file" in result.stderr
    assert not (folder / "data").exists()


def test_the_viewer_takes_the_same_names(folder: Path) -> None:
    """The viewer opens what the commands take, also a presigned URL, whose signature it does not show."""
    for place in ("run[1]", "run[1]/*.tar", "run[1]/{a-0,a 1%}.tar"):
        backend = open_backend([place])
        assert len(backend.page(0, 20).entries) == 8
        backend.close()
    with pytest.raises(SourceError, match="is a command, which is not run"):
        open_backend(["pipe:cat a.tar"])
    with serve(folder, signature="X-Amz-Signature") as web:
        for place in ("run%5B1%5D/a-0.tar", "run%5B1%5D/{a-0,b}.tar"):
            skipped: list[str] = []
            backend = open_backend([f"{web.url}/{place}?X-Amz-Signature=5ec2e7"], report=skipped.append)
            assert len(skipped) == place.count("{")
            assert len(backend.page(0, 20).entries) == 4
            assert "5ec2e7" not in f"{backend.title} {backend.items(0)} {backend.page(0, 20)}"
            backend.close()


def test_a_signature_becomes_a_variable_of_the_declaration(folder: Path) -> None:
    """`init` writes a presigned URL without its signature, which the environment holds."""
    with serve(folder, signature="X-Amz-Signature=5ec2e7") as web:
        result = mm("init", "--project", "--dataset", "d", f"{web.url}/run%5B1%5D/a-0.tar?X-Amz-Signature=5ec2e7")
    assert result.exit_code == 0, result.output
    (file,) = folder.rglob("defs.yaml")
    assert f"shards: {web.url}/run%5B1%5D/a-0.tar\n" in file.read_text()
    assert "signature: '{{ env.D_STORAGE_OPTIONS_SIGNATURE }}'" in file.read_text()
    assert "5ec2e7" not in result.output + file.read_text()
