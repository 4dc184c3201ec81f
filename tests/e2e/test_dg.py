"""The command `dg` in a user's Dagster project: it writes declarations, checks them, and names what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .warm import WarmCommands

PROGRAM = "import sys; from dagster_dg_cli.cli import main; sys.exit(main())"
TYPE = "mm_assets.orchestration.ShardDataset"
PROJECT = """
[project]
name = "mine"
version = "0"

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "mine"
"""
DEFINITIONS = """
from pathlib import Path

import dagster as dg


@dg.definitions
def defs():
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""


@pytest.fixture
def project(tmp_path: Path, dagster_home: Path) -> Path:
    """An empty Dagster project; its folder."""
    folder = tmp_path / "project"
    (folder / "src" / "mine" / "defs").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "src" / "mine" / "__init__.py").write_text("")
    (folder / "src" / "mine" / "defs" / "__init__.py").write_text("")
    (folder / "src" / "mine" / "definitions.py").write_text(DEFINITIONS)
    return folder


class Dg:
    """Runs the command in a project; `fresh` starts it as it is installed."""

    def __init__(self, project: Path, commands: WarmCommands) -> None:
        self.project = project
        self.commands = commands
        paths = [str(project / "src"), os.environ.get("PYTHONPATH", "")]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.commands(arguments, cwd=self.project, env=self.environment, code=PROGRAM)

    def fresh(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(Path(sys.executable).parent / "dg"), *arguments],
            cwd=self.project,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )


@pytest.fixture
def dg(project: Path, warm_commands: WarmCommands) -> Dg:
    return Dg(project, warm_commands)


def test_dg_writes_a_declaration_that_loads(project: Path, dg: Dg) -> None:
    """`dg scaffold defs` writes a YAML that `dg check defs` loads; with a wrong setting it writes nothing."""
    made = dg("scaffold", "defs", TYPE, "my-web", "--shards", "s3://b/*.tar", "--pack", "interleaved")
    assert made.returncode == 0, made.stderr
    declared = yaml.safe_load((project / "src" / "mine" / "defs" / "my-web" / "defs.yaml").read_text())
    assert declared["attributes"] == {"name": "my_web", "shards": "s3://b/*.tar", "pack": "interleaved"}
    checked = dg.fresh("check", "defs")
    assert checked.returncode == 0, checked.stderr
    refused = dg("scaffold", "defs", TYPE, "other", "--shards", "x", "--pack", "nope")
    assert refused.returncode != 0
    assert "pack: is 'nope', allowed: interleaved" in refused.stdout + refused.stderr
    assert not (project / "src" / "mine" / "defs" / "other").exists()


def test_dg_names_wrong_keys_with_their_lines(project: Path, dg: Dg) -> None:
    """`dg check yaml` rejects an unknown key and a value of the wrong type, each with file, line and key."""
    file = project / "src" / "mine" / "defs" / "web" / "defs.yaml"
    file.parent.mkdir()
    wrong = "  fliters: []\n  runs_per_tick: many\n"
    file.write_text(f"type: {TYPE}\nattributes:\n  name: web\n  shards: x/*.tar\n{wrong}")
    checked = dg("check", "yaml")
    said = checked.stdout + checked.stderr
    assert checked.returncode == 1
    assert f"{file}:5 - {TYPE} attributes.fliters Additional properties are not allowed" in said
    assert f"{file}:6 - {TYPE} attributes.runs_per_tick 'many' is not of type 'integer'" in said


def test_dg_check_fails_on_one_wrong_declaration(project: Path, dg: Dg) -> None:
    """`dg check defs` fails on a declaration that only its dataset's code can refuse, although others would load."""
    for name, more in (("good", ""), ("bad", "  filters: [{type: 'no.such:Filter'}]\n")):
        file = project / "src" / "mine" / "defs" / name / "defs.yaml"
        file.parent.mkdir()
        file.write_text(f"type: {TYPE}\nattributes:\n  name: {name}\n  shards: x/*.tar\n{more}")
    checked = dg("check", "defs")
    assert checked.returncode == 1
    assert "bad/defs.yaml: filters[0].type: " in checked.stdout + checked.stderr
