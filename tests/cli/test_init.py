"""`mm-assets init`: the declaration that it writes, and the offer of `run`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from mm_assets.cli.main import main

from ..pipeline.shards import CAPTIONS, make_shard, png


@pytest.fixture
def folder(tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with shards in `in`; modules that are imported from it are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    for name in [name for name in sys.modules if name.partition(".")[0] == "packed_datasets"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def mm(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def attributes(folder: Path, name: str) -> Any:
    text = (folder / "packed_datasets" / "defs" / name / "defs.yaml").read_text()
    document = yaml.safe_load(text)
    assert document["type"] == "mm_assets.orchestration.ShardDataset"
    return document["attributes"]


def test_a_declaration_has_what_the_samples_have(folder: Path) -> None:
    """It has the source, columns, preset and what was given, and the dataset is found with the same plan."""
    given = ("-d", "web", "--root", "out", "--set", "on_damaged_shard=salvage", "--set", "settle_seconds=0.5")
    said = mm("init", "in", *given, "--project").stdout
    assert said.endswith("packed_datasets/defs/web/defs.yaml\n"), "what is next is for people"
    found = attributes(folder, "web")
    assert (
        found.items()
        >= {
            "name": "web",
            "shards": str(folder / "in"),
            "root": str(folder / "out"),
            "source": "tar",
            "on_damaged_shard": "salvage",
            "settle_seconds": 0.5,
            "pack": "image_text",
        }.items()
    )
    assert "packed_datasets/defs/web/defs.yaml" in said
    assert "web: no partition\nweb: shards since the registration: 1 " in mm("status").stdout
    assert "preset: image_text (declared)" in mm("plan", "-d", "web").stdout
    again = mm("init", "in", "-d", "web", code=2)
    assert "'web' is declared already: give another name" in again.stderr
    assert attributes(folder, "web") == found


def test_a_file_that_is_there_is_not_overwritten(folder: Path) -> None:
    """A defs.yaml that declares another dataset stays as it is, and so does a file of the project."""
    mm("init", "in", "-d", "web", "--project")
    file = folder / "packed_datasets" / "defs" / "other" / "defs.yaml"
    file.parent.mkdir()
    file.write_text(
        "type: mm_assets.orchestration.ShardDataset\nattributes: {name: something, shards: /nowhere/x.tar}\n"
    )
    assert f"{file} is there already" in mm("init", "in", "-d", "other", code=2).stderr
    assert "name: something" in file.read_text()
    (folder / "dg.toml").unlink()
    assert "__init__.py is there already" in mm("init", "in", "-d", "new", "--project", code=2).stderr
    assert not (folder / "dg.toml").exists()


def test_names_of_shards_are_no_templates(folder: Path) -> None:
    """Keys that Dagster would take for a template are left out, and columns that some samples lack are a comment."""
    members: dict[str, object] = {}
    for number in range(4):
        members |= {f"{number}.png": png(number), f"{number}.json": {"{{ env.HOME }}": "x", "# b\nc": 1, "all": "y"}}
    make_shard(folder / "odd" / "a.tar", {**members, "4.png": png(4), "4.json": {"all": "z"}})
    mm("init", "odd", "-d", "odd", "--project")
    text = (folder / "packed_datasets" / "defs" / "odd" / "defs.yaml").read_text()
    assert "{{" not in text
    assert re.search(r"^  # samples: \{user_columns: \[.*\"all\".*\]\}$", text, re.MULTILINE)
    assert "samples" not in attributes(folder, "odd")
    assert set(attributes(folder, "odd")) == {"name", "shards", "source", "pack"}


@pytest.mark.parametrize(
    ("keys", "given", "columns"),
    [
        ({"sample_id": "a", "Position": 1, "filename": "b"}, {}, ["sample_id", "Position", "filename"]),
        ({"n": 1, "sizes": [3]}, {"per_image_fields": ["sizes"]}, ["n"]),
        ({"n": 1, " ": 2}, {}, None),
        ({"n": 1, "{{ x }}": 2}, {}, None),
    ],
    ids=["reserved", "items", "blank", "template"],
)
def test_the_declaration_gives_the_columns_of_the_plan(
    folder: Path, keys: dict[str, object], given: dict[str, list[str]], columns: list[str] | None
) -> None:
    """Whatever keys the samples have, the declaration can be loaded and registers the columns that were planned."""
    make_shard(folder / "odd.tar", {"0.png": png(0), "0.json": keys})
    options = [option for key, value in given.items() for option in ("--set", f"samples.{key}={value}")]
    planned = json.loads(mm("plan", "odd.tar", *options, "--json").stdout)["datasets"]["default"]
    mm("init", "odd.tar", "-d", "odd", "--project", *options)
    assert attributes(folder, "odd").get("samples", {}).get("user_columns") == columns
    declared = json.loads(mm("plan", "-d", "odd", "--json").stdout)["datasets"]["odd"]
    assert [c["name"] for c in declared["user_columns"]] == [c["name"] for c in planned["user_columns"]]


def test_where_there_is_nothing_to_declare(folder: Path) -> None:
    """Without a project, shards or an argument, the error says what to give, and nothing is written."""
    before = sorted(folder.rglob("*"))
    assert "--project makes one here" in mm("init", "in", "-d", "web", code=2).stderr
    assert "SHARDS: is missing" in mm("init", "--project", code=2).stderr
    assert "no shard was found there" in mm("init", "none", "--project", code=1).stderr
    assert sorted(folder.rglob("*")) == before


def test_a_run_offers_the_command_that_declares_its_dataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the last line of a first run can be pasted, and declares the dataset with the same settings."""
    given = ("in", "--root", "my out", "-d", "web", "--set", "keep_manifests=7")
    with monkeypatch.context() as terminal:
        terminal.setenv("TTY_COMPATIBLE", "1")
        ran = mm("run", *given)
        again = mm("run", *given)
    assert "next: `mm-assets view " in ran.stdout
    found = re.search(r"\n {6}`mm-assets (init .*)`\n {8}declares the dataset in a project\n$", ran.stdout)
    assert found, ran.stdout
    assert "next: " not in again.stdout, "after a first run only"
    assert "next: " not in mm("run", "in", "--root", "other", "-d", "web").stdout, "on a terminal only"
    mm(*shlex.split(found[1]))
    declared = attributes(folder, "web")
    assert (declared["root"], declared["keep_manifests"]) == (str(folder / "my out"), 7)
    text = (folder / "packed_datasets" / "defs" / "web" / "defs.yaml").read_text()
    assert "  # pack: image_text\n" in text
    assert "  # source: tar\n" in text
    assert "web: 1 partition: 1 published, 0 pending\n" in mm("status").stdout
