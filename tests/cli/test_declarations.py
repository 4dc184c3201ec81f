"""Declarations that are read without Dagster: what it would load, and what is left to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster.components.resolved.context import ResolutionContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_assets.cli.declarations import declared_datasets, plain_declarations
from mm_assets.cli.project import make_project
from mm_assets.errors import ConfigError
from mm_assets.orchestration import launch
from mm_assets.pipeline.dagster_home import location_of

MODULE = "packed_datasets.definitions"
HEAD = "type: mm_assets.orchestration.ShardDataset\nattributes:\n  name: data\n  shards: in/*.tar\n"
LITERALS = [
    "None",
    "'a'",
    "['a']",
    "0x10",
    "1_0",
    " 1",
    "1 ",
    "'a' 'b'",
    "\\d",
    "a\n",
    "a\r\nb",
    "\n",
    "{{",
    "{#",
    "{% x",
    "é",
]
OF_DAGSTER = (
    "from pathlib import Path\nfrom dagster import definitions, load_from_defs_folder\n@definitions\ndef defs():\n"
    "    return load_from_defs_folder(path_within_project=Path(__file__).parent)\n"
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project in this folder, whose modules can be imported."""
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def declare(project: Path, text: str, folder: str = "mine", file: str = "defs.yaml") -> Path:
    path = project / "packed_datasets" / "defs" / folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_plain_declarations_are_what_dagster_loads(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, templates of variables, literals in texts, documents and folders give the same settings, in order."""
    monkeypatch.setenv("BUCKET", "shards")
    monkeypatch.setenv("SECONDS", "2.5")
    settings = (
        "",
        "  description: |\n    two\n    lines\n",
        "  description: 2026-11-27\n",
        "  description: \"'quoted'\"\n",
        "  root: 's3://{{ env.BUCKET }}/x'\n",
        "  root: \"{{ env('BUCKET') }}\"\n",
        "  settle_seconds: '{{ env.SECONDS }}'\n",
        "  filters: [{type: text_length, min_chars: 5}]\n  tags: {a: b}\n",
        "  cron: '0 3 * * 1'\n",
    )
    documents = [HEAD.replace("data", f"data{number}") + text for number, text in enumerate(settings)]
    declare(project, "---\n".join(documents), "outer/inner")
    other = HEAD.replace("orchestration", "orchestration.component")
    declare(project, other.replace("data", "other"), "another", "defs.yml")
    plain, loaded = plain_declarations(MODULE), launch.declared_datasets(MODULE)
    assert plain == loaded
    assert [*loaded] == [*(plain or ())]
    assert len(loaded) == len(settings) + 1


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(LITERALS))
def test_any_text_is_what_dagster_makes_of_it(project: Path, text: str) -> None:
    """A text of any characters is resolved as Dagster resolves it, or left to Dagster."""
    quoted = json.dumps(text, ensure_ascii=False)
    declare(project, f"{HEAD}  storage_options: {{anon: {quoted}}}\n")
    plain = plain_declarations(MODULE)
    assert plain is not None or not text.isalnum()
    if plain is not None:
        declared = yaml.safe_load(quoted)  # which folds the line breaks of Unicode
        assert plain["data"].storage_options["anon"] == ResolutionContext.default().resolve_value(declared)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: declare(folder, f"{HEAD}  description: '{{{{ env.UNSET_OF_TEST }}}}'\n"),
        lambda folder: declare(folder, f"{HEAD}  description: \"{{{{ env('UNSET', 'x') }}}}\"\n"),
        lambda folder: declare(folder, f"{HEAD}  description: '{{{{ 1 + 1 }}}}'\n"),
        lambda folder: declare(folder, f"{HEAD}  cron: '0 0 30 2 *'\n"),
        lambda folder: declare(folder, f"{HEAD}  description: '7'\n"),
        lambda folder: declare(folder, f"{HEAD}  no_such_setting: 1\n"),
        lambda folder: declare(folder, f"{HEAD}  : [\n"),
        lambda folder: declare(folder, f"{HEAD}---\n{HEAD}"),
        lambda folder: declare(folder, f"{HEAD}template_vars_module: .mine\n"),
        lambda folder: declare(folder, "type: dagster.DefsFolderComponent\n"),
        lambda folder: declare(folder, "x = 1\n", "code", "assets.py"),
        lambda folder: declare(folder, "x = 1\n", ".", "__init__.py"),
        lambda folder: (folder / "packed_datasets" / "__init__.py").write_text("import os\n"),
        lambda folder: (folder / "packed_datasets" / "definitions.py").write_text(f"{OF_DAGSTER}\nprint()\n"),
        lambda folder: (folder / "packed_datasets" / "definitions.py").write_text("import os\n" + OF_DAGSTER),
        lambda folder: (folder / "packed_datasets" / "definitions.py").write_text("x = 1\n"),
        lambda folder: (folder / "packed_datasets" / "definitions.py").write_text("x = (\n"),
        lambda folder: (folder / "packed_datasets" / "definitions.py").unlink(),
        lambda folder: (folder / "pyproject.toml").write_text('[tool.dg.project]\nroot_module = "packed_datasets"\n'),
    ],
)
def test_what_may_mean_anything_else_is_left_to_dagster(project: Path, change: Callable[[Path], Any]) -> None:
    """Other templates, keys, components, code and settings, a repeated name, and what is wrong, are not read here."""
    declare(project, HEAD)
    assert plain_declarations(MODULE) is not None
    change(project)
    assert plain_declarations(MODULE) is None


def test_the_module_that_dagsters_tools_make_is_read(project: Path) -> None:
    """A definitions module as `create-dagster` writes it declares the same; so does the one of this package."""
    declare(project, HEAD)
    (project / "packed_datasets" / "definitions.py").write_text(OF_DAGSTER)
    assert plain_declarations(MODULE) == launch.declared_datasets(MODULE)
    own = plain_declarations("mm_assets.definitions")
    assert own is None or own == launch.declared_datasets("mm_assets.definitions")


def test_the_error_of_a_wrong_declaration_is_dagsters(project: Path) -> None:
    """With a wrong declaration beside a good one, both come from Dagster, with the error of the wrong one."""
    declare(project, HEAD)
    declare(project, HEAD.replace("data", "wrong") + "  pack: nothing\n", "wrong")
    found = declared_datasets(MODULE, "here")
    assert isinstance(found["wrong"], ConfigError)
    assert "pack" in str(found["wrong"])
    assert not isinstance(found["data"], ConfigError)


def test_the_code_location_is_noted(project: Path) -> None:
    """Runs of loads are listed under the code location that declares the dataset."""
    file = declare(project, HEAD)
    declared_datasets(MODULE, "here")
    assert location_of(str(file), "data") == "here"
