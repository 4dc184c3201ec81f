"""`--json`: every command that reports writes one document, with the keys of docs/spec/json.md and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mm_assets
from mm_assets import MultimodalLoader
from mm_assets.cli.document import json_value
from mm_assets.cli.main import COMMANDS, main
from mm_assets.pipeline.state.claims import Claims
from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.chain import declare, run_chain
from ..pipeline.shards import CAPTIONS, make_shard

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "spec" / "json.md").read_text(encoding="utf-8")
SILENT = {"completion", "ui", "view"}  # commands that report nothing


def documented() -> dict[str, set[str]]:
    """By command, the paths of the keys in the tables of the page: `*` is any key, `[]` any item."""
    found: dict[str, set[str]] = {}
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        for command in re.findall(r"`mm-assets ([a-z-]+)`", heading) or [heading]:
            found[command] = {
                path
                for row in re.findall(r"^\| (`[^|]+) \|", text, flags=re.MULTILINE)
                for path in re.findall(r"`([^`]+)`", row)
            }
    return found


DOCUMENTED = documented()
SEEN: dict[str, set[str]] = {}  # of the test at hand


def unseen(*commands: str) -> dict[str, set[str]]:
    """By command, the documented keys that no document of the test had."""
    return {command: missing for command in commands if (missing := DOCUMENTED[command] - SEEN[command])}


def walk(value: Any, allowed: set[str], path: str = "") -> Iterator[str]:
    """The paths of a document as the page writes them, down to those of which it names no keys."""
    if isinstance(value, dict) and any(other.startswith(f"{path}.") if path else True for other in allowed):
        free = f"{path}.*" if path else "*"
        is_free = any(other == free or other.startswith((f"{free}.", f"{free}[")) for other in allowed)
        for key, inner in value.items():
            below = free if is_free else f"{path}.{key}".lstrip(".")
            yield below
            yield from walk(inner, allowed, below)
    elif isinstance(value, list) and any(other.startswith(f"{path}[]") for other in allowed):
        for inner in value:
            yield from walk(inner, allowed, f"{path}[]")


def read(command: str, result: Result) -> Any:
    """The document of a command, whose keys are all in the tables of the page."""
    document = json.loads(result.stdout)
    allowed = DOCUMENTED[command]
    found = set(walk(document, allowed)) - {"errors"}
    names = {path.removesuffix(".*").removesuffix("[]") for path in allowed}
    unknown = {path for path in found if path not in allowed and path.removesuffix(".*") not in names}
    assert not unknown, (command, unknown)
    SEEN.setdefault(command, set()).update(found)
    return document


@pytest.fixture
def place(tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with shards in `in` and the dataset `data` of them in `root`; one partition lost an item."""
    monkeypatch.chdir(tmp_path)
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    make_shard(tmp_path / "in" / "b.tar", {**{f"b{k}": v for k, v in CAPTIONS.items()}, "b9.json": "{", "b9.txt": "x"})
    run_chain(declare(tmp_path / "root", tmp_path / "in"))
    SEEN.clear()
    return tmp_path


def invoke(command: str, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [command, *arguments, "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return result


SHARDS = ("--root", "root", "-d", "data", "--shards", "in")
MADE = ("--root", "root", "-d", "data")


def of_data(command: str, result: Result) -> Any:
    document = read(command, result)
    return document["datasets"]["data"]


def test_the_page_has_every_command() -> None:
    """Each command that reports has a section, and takes `--json`."""
    assert DOCUMENTED.keys() == {*COMMANDS, "Errors"} - SILENT
    for command in set(COMMANDS) - SILENT:
        assert "--json" in CliRunner().invoke(main, [command, "--help"]).output, command


def test_documents_of_a_dataset(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the plan to the cleaning, each command's document has the documented keys, and says what was done."""
    plan = read("plan", invoke("plan", "in"))["datasets"]["default"]
    assert plan["partitions"] == 2
    with monkeypatch.context() as elsewhere:
        (place / "project").mkdir()
        elsewhere.chdir(place / "project")
        declared = of_data("init", invoke("init", str(place / "in"), "-d", "data", "--project"))
    assert Path(declared["file"]).read_text() == declared["declaration"]
    (place / "in" / "b.tar").rename(place / "in" / "c.tar")
    make_shard(place / "in" / "a.tar", {**CAPTIONS, "9.txt": "more", "9.png": CAPTIONS["0.png"]})
    dry = of_data("run", invoke("run", *SHARDS, "--dry-run"))
    assert dry["registration"] == {"new": ["c"], "changed": ["a"], "gone": ["b"]}
    assert dry["planned"]["c"]["first"] == "raw_shards"
    assert of_data("register", invoke("register", *SHARDS, "--new-schema"))["new"] == ["c"]
    with Claims(DatasetStore(declare(place / "root", place / "in")), "a-load") as claims:
        claims.take(["a"])
        pending = of_data("status", invoke("status", *SHARDS))
    assert {key for each in pending["pending"] for key in each["partitions"]} == {"a", "c"}
    ran = of_data("run", invoke("run", *SHARDS, "-p", "c"))
    assert ran["ran"] == {"c": {"status": "done", "failures": [], "warnings": []}}
    assert ran["pending"].keys() == {"a"}
    assert ran["totals"]["samples"] == 5
    assert {total["reason"] for total in ran["losses"]} == {"bad_json"}
    (place / "in" / "d.tar").write_bytes((place / "in" / "a.tar").read_bytes()[:700])
    for packed in (place / "root" / "data" / "packed").glob("c.*.mult"):
        packed.unlink()
    failed = of_data("run", invoke("run", *SHARDS, "-p", "d", code=1))
    assert failed["ran"]["d"]["status"] == "failed"
    assert failed["rebuilt"].keys() == {"c"}
    state = of_data("status", invoke("status", *SHARDS, "--set", "exports=[{format: webdataset}]"))
    assert state["exports"] == {"export_webdataset": ["c"]}
    assert "is truncated" in state["failures"]["d"]["said"]
    (place / "in" / "d.tar").unlink()
    of_data("register", invoke("register", *SHARDS))
    lost = of_data("losses", invoke("losses", *MADE))
    assert [loss["member"] for loss in lost["losses"]] == ["b9.json"]
    assert lost["unpublished"] == ["a"]
    numbers = of_data("stats", invoke("stats", *MADE))
    assert (numbers["modalities"]["image"]["present"], numbers["num_samples"]) == (4, 5)
    synced = of_data("sync", invoke("sync", *SHARDS))
    assert (synced["manifest_made"], synced["failed"]) == (True, [])
    changes = of_data("diff", invoke("diff", *MADE, "previous", "newest"))
    assert (changes["unchanged_partitions"], changes["totals"]["added"] > 0) == (0, True)
    rows = of_data(
        "sql", invoke("sql", *MADE, "select partition, count(*) as n, 'nan'::double as x from rows group by 1")
    )
    assert [column["name"] for column in rows["columns"]] == ["partition", "n", "x"]
    assert all(row[2] is None for row in rows["rows"])
    cleaned = of_data("clean", invoke("clean", *MADE, "--keep", "1", "--dry-run"))
    assert (cleaned["removed"], any("b" in name for name in cleaned["files"])) == (False, True)
    assert unseen("plan", "init", "run", "register", "status", "stats", "losses", "sync", "diff", "sql", "clean") == {}


def test_documents_of_files(place: Path) -> None:
    """Packed files are inspected, verified, converted and added to; damage is in the document, with exit code 1."""
    manifest = "root/data/manifest.json"
    shown = read("inspect", invoke("inspect", manifest, "--sample", "0"))
    assert shown["modalities"]["image"]["field"] == "ImageField"
    assert shown["sample"]["sample_id"] == "0"
    checked = read("verify", invoke("verify", manifest))
    assert [(each["format"], each["state"]) for each in checked["files"]] == [("mult", "ok"), ("mstr", "ok")]
    mult = next((place / "root/data/packed").glob("a.*.mult"))
    content = bytearray(mult.read_bytes())
    content[content.index(CAPTIONS["0.png"]) + 40] ^= 1
    mult.write_bytes(content)
    damaged = read("verify", invoke("verify", str(mult), "no.mult", code=1))
    assert [each["state"] for each in damaged["files"]] == ["damaged", "cannot be read"]
    mstr = next((place / "root/data/packed").glob("a.*.mstr"))
    converted = read("convert", invoke("convert", str(mstr), "x.mult"))
    assert converted["num_samples"] == 4
    read("convert", invoke("convert", "x.mult", "x.mstr"))
    exported = read(
        "export", invoke("export", "webdataset", "x.mstr", "exported", "--shard-samples", "3", "--workers", "1")
    )
    assert (exported["num_samples"], exported["num_shards"], exported["num_reused"]) == (4, 2, 0)
    described = read("card", invoke("card", "x.mstr", "exported", "--overwrite"))
    assert described["files"] == ["croissant.json", "README.md"]
    assert read("leave", invoke("leave", "x.mstr"))["files"] == ["x.mstr"]
    with mm_assets.open("x.mult") as data:
        (place / "state.json").write_text(json.dumps(MultimodalLoader(data).state_dict()))
    assert len(read("seen", invoke("seen", "state.json", "--dataset", "x.mult"))["rows"]) == 1
    (place / "scores.jsonl").write_text('{"sample_id": "0", "value": 1.5}\n')
    given = ("--name", "score", "--field", "ScalarField", "--values", "scores.jsonl")
    assert read("add-stream", invoke("add-stream", "x.mstr", *given))["num_present"] == 1
    added = of_data("add-stream", invoke("add-stream", *given, "-p", "a", *MADE))
    assert added["partitions"]["a"]["added"] is True
    (place / "vectors.jsonl").write_text('{"sample_id": "0", "value": [0.5, 2]}\n{"sample_id": "1", "value": [0, 0]}\n')
    field = ("--field", "NDArrayField", "--config", '{"dtype": "float32", "shape": [2]}')
    of_data("add-stream", invoke("add-stream", "--name", "vector", *field, "--values", "vectors.jsonl", *MADE))
    indexed = read("index", invoke("index", manifest, "--stream", "vector"))["streams"]["vector"]
    assert (indexed["num_vectors"], indexed["num_excluded"], indexed["num_written"]) == (1, 1, 1)
    assert unseen("inspect", "verify", "convert", "export", "card", "leave", "add-stream", "seen", "index") == {}


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (("status", "--root", "nowhere", "-d", "a", "--json"), "ConfigError", 2),
        (("status", "--jsn", "--json"), "NoSuchOption", 2),
        (("inspect", "no.mult", "--json"), "FileNotFoundError", 1),
        (("inspect", "--json"), "MissingParameter", 2),
        (("stauts", "--json"), "UsageError", 2),
        (("sql", "-m", "no_such_module", "select 1", "--json"), "ConfigError", 2),
    ],
)
def test_an_error_is_a_document(dagster_home: Path, arguments: tuple[str, ...], kind: str, code: int) -> None:
    """Standard output has the error as JSON, standard error the usual line, and the exit code is the usual one."""
    result = CliRunner().invoke(main, arguments)
    usual = CliRunner().invoke(main, [word for word in arguments if word != "--json"])
    error = read("Errors", result)["error"]
    assert (error["kind"], error["exit_code"], result.exit_code, usual.exit_code) == (kind, code, code, code)
    assert result.stderr == usual.stderr
    assert error["message"].splitlines()[0] in result.stderr


def test_help_is_not_a_document() -> None:
    """`--help` beside `--json` shows the help on standard output."""
    assert CliRunner().invoke(main, ["status", "--json", "--help"]).stdout.startswith("Usage: ")


NOISE = """
import os, subprocess, sys
from mm_assets.cli.document import document_only, write_document
with document_only():
    print("noise")
    os.write(1, b"noise\\n")
    subprocess.run([sys.executable, "-c", "print('noise')"], check=True)
    write_document({"items": iter([1, [2]]), "none": iter(()), "\\udc80": {}})
print("after")
"""


def test_other_output_is_not_in_the_document() -> None:
    """What code of others prints, also by its descriptor and in processes, goes to standard error."""
    done = subprocess.run([sys.executable, "-c", NOISE], capture_output=True, text=True, check=True, timeout=240)
    *document, after = done.stdout.splitlines()
    assert json.loads("".join(document)) == {"items": [1, [2]], "none": [], "\udc80": {}}
    assert (after, done.stderr.split()) == ("after", ["noise"] * 3)


def test_values_of_tables() -> None:
    """Bytes, times and numbers that JSON does not have become text or null."""
    import datetime

    given = {
        "a": b"\x00\xff",
        "b": [float("inf"), 1.5],
        "c": datetime.date(2024, 1, 2),
        "d": datetime.timedelta(0, 1.5),
    }
    assert json_value(given) == {"a": "AP8=", "b": [None, 1.5], "c": "2024-01-02", "d": 1.5}
