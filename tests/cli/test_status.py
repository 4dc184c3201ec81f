"""Messages of `status`, `sql` and `run` about a dataset that was changed or damaged, or that lacks what they name."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from mm_assets.cli.main import main
from mm_assets.pipeline.state.claims import Claims
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.records import Attempt, StageFailure
from mm_assets.pipeline.state.registration import register

from ..pipeline.chain import declare, run_chain
from ..pipeline.shards import CAPTIONS, make_shard

Invoke = Callable[..., Result]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dataset `data` of one partition in a manifest, in `root`, and its shard, in `in`."""
    folder = tmp_path_factory.mktemp("status")
    make_shard(folder / "in" / "a.tar", CAPTIONS)
    run_chain(declare(folder / "root", folder / "in"))
    return folder


@pytest.fixture
def invoke(made: Path, tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs a command on a copy of the dataset, whose shards stay where they were registered."""
    shutil.copytree(made / "root", tmp_path / "root")
    monkeypatch.chdir(tmp_path)

    def run(command: str, *arguments: str) -> Result:
        shards = () if command in ("sql", "losses", "clean", "stats") else ("--shards", str(made / "in"))
        return CliRunner().invoke(main, [command, "--root", "root", "-d", "data", *shards, *arguments])

    return run


def state(result: Result) -> Any:
    return json.loads(result.stdout)["datasets"]["data"]


@pytest.mark.parametrize("layout", [None, 3])
def test_a_folder_of_another_release_is_refused(invoke: Invoke, layout: int | None) -> None:
    """Every command that opens the dataset says in one line which release it needs, and changes nothing."""
    stored = Path("root/data/shards.json")
    registered = json.loads(stored.read_text())
    stored.write_text(json.dumps({**registered, "layout": layout} if layout else {"partitions": {}, "shards": "x"}))
    before = {path: path.read_bytes() for path in Path("root").rglob("*") if path.is_file()}
    expected = f"layout: found {layout or 1}, expected 2: this folder is of another release of mm-assets; read it with"
    for command in ("register", "status", "run", "clean", "sync", "losses", "stats", "sql"):
        result = invoke(command)
        assert result.exit_code, command
        (line,) = result.stderr.splitlines()
        assert expected in line, command
    assert {path: path.read_bytes() for path in Path("root").rglob("*") if path.is_file()} == before


def test_a_damaged_manifest_is_said_once_and_written_again(invoke: Invoke) -> None:
    """`status` tells the damaged file from the copy that it reads, and `run` writes it again, with nothing to run."""
    file = Path("root/data/manifest.json")
    content = file.read_bytes()
    file.write_bytes(content[:50])
    result = invoke("status")
    assert result.exit_code == 1
    assert "manifest of 1 partition" not in result.stdout
    assert "its newest copy is of 1 partition" in result.stdout
    assert re.search(r"manifest\.json: is not a manifest.*mm-assets run .* writes it again", result.stderr)
    assert state(invoke("status", "--json"))["manifest"]["is_damaged"]
    result = invoke("run")
    assert (result.exit_code, result.stderr) == (0, "data: manifest.json was damaged: it was written again\n")
    assert file.read_bytes() == content


@pytest.mark.parametrize(("version", "advice"), [(99, "a newer mm-assets reads it"), (1, "a new `name` or `root`")])
def test_a_manifest_of_another_version_is_refused(invoke: Invoke, version: int, advice: str) -> None:
    """`status` and `run` say what to do; the first shows nothing that only it tells, and the second writes none."""
    file = Path("root/data/manifest.json")
    content = json.dumps({**json.loads(file.read_text()), "version": version})
    file.write_text(content)
    for command in ("status", "run"):
        result = invoke(command)
        assert result.exit_code == 1
        assert advice in result.stderr
        assert "no manifest" not in result.stdout
        assert "0 samples" not in result.stdout
    assert file.read_text() == content


@pytest.mark.parametrize("query", ["", ";", " ; "])
def test_a_query_without_a_statement_is_refused(invoke: Invoke, query: str) -> None:
    """An empty query is an error of its argument, not of the program."""
    result = invoke("sql", query)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: arguments: QUERY: found {query!r}, expected SQL" in result.stderr


@pytest.mark.parametrize("columns", [60, 120])
def test_rows_of_a_query_fit_the_terminal(invoke: Invoke, tmp_path: Path, columns: int) -> None:
    """On a terminal a result is a table where its columns have a readable width, else a line for each value."""
    query = "select partition, sample_id, modality, content_type, repeat(sample_id, 40) as long from rows order by all"
    code = "from mm_assets.cli.main import main; main()"
    terminal, theirs = os.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    command = [sys.executable, "-c", code, "sql", "--root", "root", "-d", "data", query]
    with subprocess.Popen(command, cwd=tmp_path, stdout=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # Linux's end of a terminal whose other end was closed
            while block := os.read(terminal, 1 << 16):
                said += block
    os.close(terminal)
    assert process.returncode == 0
    text = click.unstyle(said.decode()).replace("\r", "")
    lines = text.splitlines()
    assert ("│" in text) == (columns == 120)
    assert "partition: a" in lines or columns == 120
    assert max(len(line) for line in lines if not line.startswith("long: ")) <= columns


@pytest.mark.parametrize("content", ['{"version": 1', '{"layout": 2}'])
def test_a_damaged_list_of_partitions_is_in_the_state(invoke: Invoke, tmp_path: Path, content: str) -> None:
    """The JSON of `status` has the dataset with what could not be read, and doing what it says repairs the dataset."""
    path = tmp_path / "root" / "data" / "shards.json"
    path.write_text(content)
    result = invoke("status", "--json")
    assert result.exit_code == 1
    found = state(result)
    (unknown,) = found.pop("unknown")
    assert unknown.startswith(f"{path}: is not ")
    assert "; delete it and run `mm-assets register --dataset data`" in unknown
    assert set(found.values()) == {None}
    path.unlink()
    invoke("register")
    result = invoke("status", "--json")
    assert result.exit_code == 0
    assert state(result).keys() == {"unknown", *found}
    assert state(result)["published"] == 1


def test_a_lost_list_of_partitions_is_named(invoke: Invoke, tmp_path: Path) -> None:
    """Without `shards.json` the shards are new, so nothing says that they are gone."""
    (tmp_path / "root" / "data" / "shards.json").unlink()
    found = state(invoke("status", "--json"))
    assert (found["shards"]["new"], found["shards"]["gone"]) == (["a"], [])
    assert found["manifest"]["outdated"] == {}, "without the list nothing is known about it"
    assert found["is_list_lost"] is True
    said = invoke("status").stdout
    assert "data: shards.json is missing, though partitions were published: `mm-assets register " in said


def test_what_is_running_and_how_much_there_is(invoke: Invoke, tmp_path: Path) -> None:
    """The state has the partition that this process claims, with its host, and samples, bytes and versions."""
    shards = json.loads((tmp_path / "root" / "data" / "shards.json").read_text())["shards"]
    dataset = DatasetStore(declare(tmp_path / "root", Path(shards)))
    with Claims(dataset, "a-load") as claims:
        claims.take(["a"])
        said = invoke("status").stdout
        found = state(invoke("status", "--json"))
    host = f"{socket.gethostname()} (PID {os.getpid()})"
    assert found["running"] == {"a": {"load": "a-load", "host": host}}
    assert f"data: running on {host}: a\n" in said
    assert said.startswith("data: 1 partition: 1 published, 0 pending, 1 running\n")
    packed = sum(path.stat().st_size for path in (tmp_path / "root" / "data" / "packed").iterdir())
    assert found["num_bytes"]["packed"] == packed
    assert found["num_bytes"]["shards"] == (Path(shards) / "a.tar").stat().st_size
    assert re.search(
        r"^data: 4 samples, [\d.]+ kB in shards, [\d.]+ kB packed, [\d.]+ kB in tables, 1 version$", said, re.M
    )
    assert found["versions"] == [found["manifest"]["digest"]]
    assert f"version {found['versions'][0][:8]}: " in said
    assert state(invoke("status", "--json"))["running"] == {}


@pytest.mark.parametrize(
    ("root", "code", "says"),
    [
        ("file/below/it", 2, r"root: '.*' is not there and cannot be made: .*file is not a folder"),
        ("n" * 300, 1, r"n+: File name too long"),
        ("a\0b", 1, r"a\\x00b/default: cannot be listed: "),
    ],
)
def test_a_root_that_cannot_exist_is_refused(
    tmp_path: Path, dagster_home: Path, root: str, code: int, says: str
) -> None:
    """A root below a file, or with a name that no file system takes, is an error and not an empty dataset."""
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    (tmp_path / "file").write_text("x")
    given = ["status", "--shards", str(tmp_path / "in"), "--root", str(tmp_path / root)]
    result = CliRunner().invoke(main, given)
    assert (result.exit_code, result.stdout) == (code, "")
    assert re.search(says, result.stderr)


def test_many_partitions_are_totals(tmp_path: Path, dagster_home: Path) -> None:
    """Of 300 partitions that are pending, the state has one row with their number, and a line for each failure."""
    make_shard(tmp_path / "in" / "p000.tar", CAPTIONS)
    for number in range(1, 300):
        shutil.copy(tmp_path / "in" / "p000.tar", tmp_path / "in" / f"p{number:03}.tar")
    dataset = DatasetStore(declare(tmp_path / "root", tmp_path / "in"))
    register(dataset)
    for key in ("p007", "p123"):
        failure = StageFailure(partition=key, stage="rows", detail=f"why {key}")
        dataset.write_attempt(Attempt(partition=key, stages={}, failure=failure))
    said = (
        CliRunner()
        .invoke(main, ["status", "--root", str(tmp_path / "root"), "-d", "data", "--shards", str(tmp_path / "in")])
        .stdout
    )
    assert "data: 300 partitions: 0 published, 300 pending, 2 failed" in said
    assert re.search(r"it has never run +│ +298 │", said)
    assert "data/p007: failed at rows: why p007\n" in said
    assert "data/p123: failed at rows: why p123\n" in said
    assert len(said.splitlines()) < 20


def test_partitions_are_named_in_a_file(invoke: Invoke, tmp_path: Path) -> None:
    """The keys are the lines of the file, each taken once; a wrong one is named, and an empty file is refused."""
    (tmp_path / "keys.txt").write_text("a\n\n a \n")
    again = invoke("run", "--partitions-from", "keys.txt", "-p", "a", "--dry-run")
    assert again.exit_code == 0
    assert again.stdout.count("data/a: from raw_shards") == 1
    (tmp_path / "keys.txt").write_text("a\nb\n")
    assert "'b' is not a registered partition of data" in invoke("run", "--partitions-from", "keys.txt").stderr
    (tmp_path / "keys.txt").write_text("\n")
    refused = invoke("run", "--partitions-from", "keys.txt")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--partitions-from: keys.txt names no partition" in refused.stderr


def test_a_stage_that_a_dataset_does_not_have_is_refused(invoke: Invoke) -> None:
    """`--from packed_mstr` of a dataset that packs MULT alone names its formats and its stages, and runs nothing."""
    result = invoke("run", "--set", "formats=[mult]", "--from", "packed_mstr", "--dry-run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "arguments: --from: data has no packed_mstr: its `formats` are mult; its stages are: " in result.stderr
    assert "packed_mult, published" in result.stderr


def test_a_new_decision_is_told(invoke: Invoke) -> None:
    """`register --new-schema` says which preset it decided, whether the layout is another, and what became pending."""
    same = invoke("register", "--new-schema").stdout
    assert "data: decided again: the same layout, preset image_text; 0 of 1 partition pending\n" in same
    other = invoke("register", "--new-schema", "--pack", "generic").stdout
    assert "data: decided again: a new layout, preset generic; 1 of 1 partition pending\n" in other


def test_what_a_dry_run_would_register(invoke: Invoke) -> None:
    """With nothing to register and nothing to clean, the commands say so in words, not as a count of 0."""
    assert invoke("run", "--dry-run").stdout == (
        "data: no shard changed\ndata: would run none of 1 partition: nothing is pending\n"
        "dry run: nothing was registered, run or written\n"
    )
    forced = invoke("run", "--force", "--dry-run").stdout
    assert forced.endswith(
        "data: would run 1 of 1 partition and make the manifest\ndry run: nothing was registered, run or written\n"
    )
    assert "from raw_shards: it is up to date, but was requested" in invoke("run", "--force", "--dry-run").stdout
    assert invoke("clean").stdout == "data: nothing to remove\n"


def test_other_settings_are_not_taken_for_those_of_the_runs(tmp_path: Path, dagster_home: Path) -> None:
    """`clean` and `add-stream` of an undeclared dataset need those of its last load; `losses` reads its manifest."""
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    (tmp_path / "scores.csv").write_text("sample_id,value\n0,1.5\n")
    place = ("--root", str(tmp_path / "root"), "-d", "data")
    settings = ("--set", "filters=[{type: text_length, min_chars: 99}]")
    stream = ("--name", "score", "--field", "ScalarField", "--values", str(tmp_path / "scores.csv"))

    def mm(*arguments: str, code: int = 0) -> Result:
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == code, done.output
        return done

    mm("run", str(tmp_path / "in"), *place)  # so that there is a record without the settings, too
    mm("run", str(tmp_path / "in"), *place, *settings)
    before = (tmp_path / "root" / "data" / "manifest.json").read_bytes()
    message = "data was published with other settings, and it is not declared here: give the --set options of its last "
    for command in (("clean",), ("clean", "--dry-run"), ("add-stream", *stream)):
        assert f"error: arguments: --set: {message}" in mm(*command, *place, code=2).stderr
    assert (tmp_path / "root" / "data" / "manifest.json").read_bytes() == before
    assert "data: 4 dropped by filters, 0 lost" in mm("losses", *place).stdout  # of what the manifest lists
    assert f"warning: {message}" in mm("losses", *place, "--set", "settle_seconds=0").stderr
    mm("clean", *place, *settings)
    assert mm("losses", *place, *settings).stderr == ""
    mm("add-stream", *stream, *place, *settings)


def test_the_default_root_is_that_of_a_dataset_that_is_not_declared(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `--root` a dataset is found below the default root, also with `--set`; a misspelled name is corrected."""
    monkeypatch.setenv("MM_ASSETS_ROOT", str(tmp_path / "root"))
    monkeypatch.chdir(tmp_path)
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    for arguments in (["run", "in", "-d", "data"], ["clean", "-d", "data", "--set", "settle_seconds=0"]):
        assert CliRunner().invoke(main, arguments).exit_code == 0
    done = CliRunner().invoke(main, ["losses", "-d", "dat"])
    assert done.exit_code == 2
    assert "dat is not a registered dataset" in done.stderr


def test_the_manifest_of_earlier_settings_is_outdated(tmp_path: Path, dagster_home: Path) -> None:
    """After settings were changed back nothing is pending, and a run makes a manifest like the first one."""
    make_shard(tmp_path / "in" / "a.tar", CAPTIONS)
    given = (str(tmp_path / "in"), "--root", str(tmp_path / "root"), "-d", "data")
    versions = list[str]()
    for settings in ((), ("--set", "filters=[{type: text_length, min_chars: 3}]")):
        done = CliRunner().invoke(main, ["run", *given, *settings])
        assert done.exit_code == 0
        versions += re.findall(r"/manifest\.json .*, version ([0-9a-f]{8})\n", done.stdout)
    said = CliRunner().invoke(main, ["status", *given]).stdout
    assert said.startswith("data: 1 partition: 1 published, 0 pending\n")
    assert "data: in it and outdated: 1 partition, listed with former shards or settings (a)\n" in said
    assert said.endswith("data: `mm-assets run` with the same arguments makes the next manifest\n")
    done = CliRunner().invoke(main, ["run", *given])
    assert len(set(versions)) == 2
    assert re.search(rf"0 partitions run in .*; 1 partition unchanged\n.*, version {versions[0]}\n", done.stdout)
    assert "outdated" not in CliRunner().invoke(main, ["status", *given]).stdout


def test_the_same_warning_of_several_partitions_is_one_line(tmp_path: Path, dagster_home: Path) -> None:
    """What a setting causes in each partition is said once for the dataset, with the number of partitions."""
    for name in "ab":
        make_shard(tmp_path / "in" / f"{name}.tar", {f"{name}{member}": value for member, value in CAPTIONS.items()})
    given = ["run", "--shards", str(tmp_path / "in"), "--root", str(tmp_path / "root"), "--set", "retain=none"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stderr.splitlines() if "`retain`" in line]
    assert line.startswith("warning: default: 2 partitions: ")


def test_register_lists_the_first_partitions(
    tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many partitions, and of many whose shards are gone, there are totals and the first; all with `-v` and JSON."""
    monkeypatch.chdir(tmp_path)
    make_shard(tmp_path / "in" / "000.tar", CAPTIONS)
    for number in range(1, 62):
        os.link(tmp_path / "in" / "000.tar", tmp_path / "in" / f"{number:03}.tar")
    keys = [f"{number:03}" for number in range(62)]

    def register(*arguments: str) -> Result:
        return CliRunner().invoke(
            main, ["register", "--shards", "in/*.tar", "--root", "root", "-d", "data", *arguments]
        )

    listed = [f"  {key}" for key in keys]
    assert register().stdout.splitlines() == [
        "data: 62 partitions, 62 new",
        *listed[:10],
        "  and 52 more: -v lists them",
    ]
    assert register("-v").stdout.splitlines() == ["data: 62 partitions", *listed]
    assert json.loads(register("--json").stdout)["datasets"]["data"]["partitions"] == keys
    for key in keys[1:]:
        (tmp_path / "in" / f"{key}.tar").unlink()
    done = register()
    assert done.stdout.splitlines() == ["data: 1 partition, 61 gone", *listed[:1]]
    assert done.stderr.count("its shards are missing") == 50
    assert "data: 11 more partitions whose shards are missing" in done.stderr
