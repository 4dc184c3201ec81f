"""The `mm-assets` command as a shell sees it."""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import pytest

from mm_assets.formats import open_reader

from ..pipeline.shards import CAPTIONS, make_shard
from .warm import WarmCommands

DEMO = ("--module", "demo_project")
WAIT = 280.0  # for what takes seconds on an idle machine


class Cli:
    """Runs the command in an empty folder with an instance of its own; `fresh` starts it from nothing."""

    def __init__(self, folder: Path, commands: WarmCommands) -> None:
        self.commands = commands
        self.fresh = False
        self.work = folder / "work"
        self.work.mkdir()
        home = folder / "home"
        home.mkdir()
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("DAGSTER_", "MM_ASSETS_"))}
        self.environment["DAGSTER_HOME"] = str(home)

    def __call__(self, *arguments: str, code: int = 0, folder: str = ".") -> subprocess.CompletedProcess[str]:
        where = self.work / folder
        if self.fresh:
            # -P: as an installed command, it does not have the current folder on its path.
            command = [sys.executable, "-P", "-c", "from mm_assets.cli.main import main; main()", *arguments]
            done = subprocess.run(
                command, cwd=where, env=self.environment, capture_output=True, text=True, check=False, timeout=WAIT
            )
        else:
            done = self.commands(arguments, cwd=where, env=self.environment)
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        return done


@pytest.fixture
def cli(tmp_path: Path, warm_commands: WarmCommands) -> Cli:
    return Cli(tmp_path, warm_commands)


def test_shards_without_yaml_become_packed_files(cli: Cli, demo_shards: Path) -> None:
    """`run --shards` needs no declaration; its packed file can be inspected, verified, converted and queried."""
    cli.fresh = True
    done = cli("run", "--dataset", "talks", "--shards", str(demo_shards / "speech-*.tar"), "--root", "out")
    assert "done" in done.stdout
    assert "talks/manifest.json" in done.stdout
    assert "No dagster instance" not in done.stderr
    (mult,) = (cli.work / "out/talks/packed").glob("*.mult")
    cli.fresh = False
    inspected = cli("inspect", str(mult), "--sample", "0").stdout
    assert re.search(r"audio: AudioField.* present", inspected)
    assert "Audio(samples=<float32" in inspected
    assert "ok" in cli("verify", str(mult), "out/talks/manifest.json").stdout
    cli("convert", str(mult), "x.mstr")
    cli("convert", "x.mstr", "back.mult")
    assert (cli.work / "back.mult").read_bytes() == mult.read_bytes()
    counted = cli("sql", "--root", "out", "-d", "talks", "select count(*) as n from rows", "--csv").stdout
    assert counted.split() == ["n", "18"] or counted.splitlines()[0] == "n"
    again = cli("run", "--dataset", "talks", "--shards", str(demo_shards / "speech-*.tar"), "--root", "out")
    assert "unchanged" in again.stdout


def test_one_bad_shard_fails_the_command_and_not_the_others(cli: Cli) -> None:
    """With a damaged shard among good ones the good ones are packed, the bad one is named and the exit code is 1."""
    whole = make_shard(cli.work / "in" / "a.tar", CAPTIONS)
    whole.with_name("b.tar").write_bytes(whole.read_bytes()[:700])
    done = cli("run", "--shards", "in", "--root", "out", "--jobs", "2", code=1)
    assert re.search(r"failed: default/b: .*b\.tar.*at byte \d+", done.stderr)
    assert [p.name[:2] for p in (cli.work / "out/default/packed").glob("*.mult")] == ["a."]
    assert '"a"' in (cli.work / "out/default/manifest.json").read_text()


def test_job_execute_from_ci(cli: Cli, demo_shards: Path) -> None:
    """`dagster job execute` gives 0 for a good partition after `register`, and 1 when a check fails."""
    shown = cli("register", *DEMO, "--dataset", "captions").stdout
    assert "captions-00000" in shown
    lossy = (
        "from mm_assets.rows.parquet import ParquetSink\n"
        "real = ParquetSink.write\n"
        "ParquetSink.write = lambda self, batch: real(self, batch.slice(0, batch.num_rows - 1))\n"
    )
    execute = "import sys\nsys.path.insert(0, '')\nfrom dagster._cli import main\nmain()"  # as `-c` does
    options = ["job", "execute", *("-m", "demo_project"), *("-j", "captions_pack")]
    options += ["--tags", '{"dagster/partition": "captions-00000"}']
    for code, expected in ((execute, 0), (lossy + execute, 1)):
        assert cli.commands(options, cwd=cli.work, env=cli.environment, code=code).returncode == expected


def test_verify_names_damaged_samples(cli: Cli) -> None:
    """A flipped bit is found, with sample and modality; of a manifest or folder both formats are checked."""
    make_shard(cli.work / "in" / "a.tar", CAPTIONS)
    cli("run", "--shards", "in", "--root", "out")
    (mult,) = (cli.work / "out/default/packed").glob("*.mult")
    with open_reader(str(mult)) as reader:
        needle = bytes(reader.read_payload(3, "image").data)
        sample_id = reader.sample_ids[3]
    damaged = bytearray(mult.read_bytes())
    damaged[damaged.index(needle) + 40] ^= 1
    (cli.work / "bad.mult").write_bytes(damaged)
    done = cli("verify", "bad.mult", code=1)
    assert done.stdout.startswith("bad.mult: DAMAGED, ")
    assert done.stderr == "to repair a file that is in no dataset's folder: copy it again, or write it again\n"
    (cli.work / "other.mult").write_bytes(b"something else")
    other = cli("verify", "other.mult", code=1)
    assert (other.stdout.count("other.mult"), other.stderr) == (1, "")
    assert "other.mult: cannot be checked: not a packed file" in other.stdout
    assert f"sample 3 ({sample_id}), image" in done.stdout
    for whole in ("out/default/packed", "out/default", "out/default/manifest.json"):
        assert re.findall(r"\((\w+)\): ok", cli("verify", whole).stdout)[:2] == ["mult", "mstr"]
    (mstr,) = (cli.work / "out/default/packed").glob("*.mstr")
    mstr.write_bytes(mstr.read_bytes()[:-1] + bytes([mstr.read_bytes()[-1] ^ 1]))
    done = cli("verify", "out/default/manifest.json", code=1)
    assert "(mult): ok" in done.stdout
    assert "(mstr): DAMAGED" in done.stdout
    assert "`mm-assets run --dataset default --partition a` rebuilds what is damaged" in done.stderr
    mstr.unlink()
    done = cli("run", "--shards", "in", "--root", "out")
    assert "files of 1 published partition were missing or damaged: a ran again" in done.stdout
    cli("verify", "out/default/manifest.json")


@pytest.mark.slow
def test_verify_compares_the_tables_of_a_manifest_with_their_digests(cli: Cli) -> None:
    """A changed or missing table of a published partition is named; without the tables the packed files are enough."""
    make_shard(cli.work / "in" / "a.tar", CAPTIONS)
    cli("run", "--shards", "in", "--root", "out")
    dataset = cli.work / "out/default"
    for whole in ("out/default", "out/default/manifest.json", *map(str, dataset.glob("manifests/*.json"))):
        assert f"{whole} (tables): ok, 7 tables checked, 0 faults\n" in cli("verify", whole).stdout
    (table,) = dataset.glob("dropped/*.parquet")
    table.write_bytes(table.read_bytes()[:-9] + b"x" + table.read_bytes()[-8:])
    done = cli("verify", "out/default/manifest.json", code=1)
    assert f"(tables): DAMAGED, 7 tables checked, 1 fault\n  {table.relative_to(dataset)} was damaged" in done.stdout
    assert "`mm-assets run --dataset default --partition a` rebuilds what is damaged" in done.stderr
    table.unlink()
    assert f"  {table.relative_to(dataset)} is missing\n" in cli("verify", "out/default", code=1).stdout
    cli("run", "--shards", "in", "--root", "out")
    cli("verify", "out/default")


PROJECT = """
from pathlib import Path
import dagster as dg
import theirs.defs

@dg.definitions
def defs():
    return dg.ComponentTree.from_module(defs_module=theirs.defs, project_root=Path(__file__).parents[2]).build_defs()
"""


def write_project(folder: Path, attributes: str, **others: str) -> None:
    """A Dagster project that is not installed, with the dataset `a` in `mine/defs.yaml` and others in theirs."""
    for name, lines in {"mine": f"  name: a\n{attributes}", **others}.items():
        (folder / "theirs" / "defs" / name).mkdir(parents=True)
        text = f"type: mm_assets.orchestration.ShardDataset\nattributes:\n{lines}\n"
        (folder / "theirs" / "defs" / name / "defs.yaml").write_text(text)
    (folder / "theirs" / "__init__.py").write_text("")
    (folder / "theirs" / "defs" / "__init__.py").write_text("")
    (folder / "theirs" / "definitions.py").write_text(PROJECT)


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ("  shards: x\n  shard_size: 3", r"mine/defs\.yaml: shard_size: is not a setting"),
        ("  shards: x\n  filters: [{type: 'theirs.bad:F'}]", r"filters\[0\]\.type: .*RuntimeError: no licence"),
        ("  shards: [x", r"theirs\.definitions: module: cannot be loaded: ParserError: .*defs\.yaml.* line"),
    ],
)
def test_a_wrong_declaration_is_one_line(cli: Cli, attributes: str, says: str) -> None:
    """A wrong declaration in a user's project gives file, key and reason in one line, and exit code 2."""
    write_project(cli.work, attributes)
    (cli.work / "theirs" / "bad.py").write_text("raise RuntimeError('no licence')")
    done = cli("register", "-m", "theirs.definitions", code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(says, line)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("wrong", ["mm_assets.orchestration.ShardDatase", "mm_assets.orchstration.ShardDataset"])
def test_a_misspelt_component_type_names_its_file(cli: Cli, wrong: str) -> None:
    """The error has the file with the wrong `type`, not one with a right type, and the type that is meant."""
    write_project(cli.work, "  shards: x", good="  name: b\n  shards: x")
    file = cli.work / "theirs/defs/mine/defs.yaml"
    file.write_text(file.read_text().replace("mm_assets.orchestration.ShardDataset", wrong))
    said = cli("status", "-m", "theirs.definitions", code=2).stderr
    assert f"It is the `type` of {file}: correct it, such as mm_assets.orchestration.ShardDataset\n" in said


def test_a_wrong_declaration_does_not_block_the_others(cli: Cli, demo_shards: Path) -> None:
    """An unset variable is named with its file and dataset, the exit code is 2, and the other datasets go on."""
    write_project(
        cli.work,
        f"  shards: {demo_shards / 'captions-00000.tar'}",
        second='  name: b\n  shards: "s3://{{ env.NO_SUCH_BUCKET }}/*.tar"',
        third="  name: c\n  shards: x\n  root: \"{{ env('NO_SUCH_ROOT') }}\"\n  batch_bytes: 1",
    )
    done = cli("register", "-m", "theirs.definitions", code=2)
    assert done.stdout.startswith("a: 1 partition, 1 new\n")
    errors = sorted(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert re.search(r"second/defs\.yaml: shards: .*dataset 'b' .* not set: NO_SUCH_BUCKET$", errors[0])
    assert re.search(r"third/defs\.yaml: root: .*dataset 'c' .* not set: NO_SUCH_ROOT$", errors[1])
    assert "NO_SUCH" not in cli("register", "-m", "theirs.definitions", "-d", "a").stderr
    assert "NO_SUCH_BUCKET" in cli("register", "-m", "theirs.definitions", "-d", "b", code=2).stderr


def test_partitions_that_a_run_leaves_out_are_named(cli: Cli) -> None:
    """After a change of settings a run of one partition says which others the manifest lacks, and `losses` does too."""
    for name in ("a.tar", "b.tar"):
        make_shard(cli.work / "shards" / name, CAPTIONS)
    cli("run", "--dataset", "d", "--shards", "shards", "-p", "a")
    told = cli("run", "--dataset", "d", "--shards", "shards", "-p", "b", "--set", "on_undecodable=keep")
    assert "d: 1 partition not in the manifest (a): `on_undecodable` changed" in told.stderr
    row = next(line for line in told.stdout.splitlines() if re.match(r"\W*d\W+a\W", line))
    assert "pending" in row
    assert json.loads(cli("losses", "-d", "d", "--json").stdout)["datasets"]["d"]["unpublished"] == ["a"]


def test_two_commands_create_one_instance(cli: Cli, demo_shards: Path) -> None:
    """Two commands that start at once with a $DAGSTER_HOME that does not exist both register, in one instance."""
    cli.environment["DAGSTER_HOME"] = str(cli.work / "new" / "home")
    shards = ("--shards", str(demo_shards / "captions-00000.tar"), "--root", "out")
    with ExitStack() as running:
        commands = {
            name: running.enter_context(
                cli.commands.running(["register", *shards, "-d", name], cwd=cli.work, env=cli.environment)
            )
            for name in "ab"
        }
        for name, command in commands.items():
            assert command.wait() == 0, command.errors.read_text()
            assert command.output.read_text().startswith(f"{name}: ")
    with dg.DagsterInstance.from_config(cli.environment["DAGSTER_HOME"]) as instance:
        assert [instance.get_dynamic_partitions(f"{name}_shards") for name in "ab"] == [["captions-00000"]] * 2


def test_an_instance_around_the_folder_is_named(cli: Cli, demo_shards: Path) -> None:
    """Without $DAGSTER_HOME, a `dagster_home` of a folder above is used and named; with it nothing is said."""
    arguments = ("register", "--shards", str(demo_shards / "captions-00000.tar"), "--root", "out")
    (cli.work / "deep").mkdir()
    assert "DAGSTER_HOME" not in cli(*arguments, folder="deep").stderr
    del cli.environment["DAGSTER_HOME"]
    (cli.work / "dagster_home").mkdir()
    assert f"DAGSTER_HOME is not set: using {cli.work / 'dagster_home'}\n" in cli(*arguments, folder="deep").stderr


MARKS = {
    "pyproject.toml": '[tool.dg.project]\nroot_module = "theirs"\n',
    "dg.toml": 'directory_type = "project"\n[project]\nroot_module = "theirs"\n',
    "workspace.yaml": "load_from:\n  - python_module: theirs.definitions\n",
}


@pytest.mark.parametrize("name", MARKS)
def test_a_project_is_found_around_the_current_folder(cli: Cli, name: str) -> None:
    """Without a module a command takes the datasets of the project here or above, installed or not, and no others."""
    shard = make_shard(cli.work / "captions-00000.tar", CAPTIONS)
    write_project(cli.work, f"  shards: {shard}\n  root: {cli.work / 'out'}\n  settle_seconds: 0")
    (cli.work / name).write_text(MARKS[name])
    (cli.work / "deep" / "below").mkdir(parents=True)
    listed = cli("register", folder="deep/below").stdout.splitlines()
    assert listed == ["a: 1 partition, 1 new", "  captions-00000"]
    if name == "pyproject.toml":
        cli.environment["TTY_COMPATIBLE"] = "1"  # what is next is for people
        ran = cli("run", "--jobs", "2", folder="deep")  # its processes find the project's modules too
        suggested = re.search(r"^next: `mm-assets view .*`(?:.*\n)+? *`mm-assets (inspect .*?)`", ran.stdout, re.M)
        assert suggested, ran.stdout
        assert "samples" in cli(*shlex.split(suggested[1])).stdout


def test_a_project_has_its_own_instance(cli: Cli, demo_shards: Path) -> None:
    """Without $DAGSTER_HOME the instance is in the project's folder, never around it; a refused command makes none."""
    del cli.environment["DAGSTER_HOME"]
    cli("sql", "select 1", code=2)
    assert not (cli.work / "dagster_home").exists()
    (cli.work / "dagster_home").mkdir()
    project = cli.work / "project"
    write_project(project, f"  shards: {demo_shards / 'captions-00000.tar'}")
    (project / "dg.toml").write_text(MARKS["dg.toml"])
    (project / "deep").mkdir()
    cli("register", folder="project/deep")
    assert (project / "dagster_home/data/a/shards.json").is_file()
    assert not list((cli.work / "dagster_home").iterdir())


def test_suggested_commands_work_when_pasted(cli: Cli, demo_shards: Path) -> None:
    """A command that a message suggests carries the module, root and shards that were given, and does what it says."""
    write_project(cli.work, f"  shards: {demo_shards / 'captions-00000.tar'}\n  root: elsewhere\n  settle_seconds: 0")
    options = ("-m", "theirs.definitions", "--root", "my out")
    cli("register", *options)
    defs = cli.work / "theirs/defs/mine/defs.yaml"
    defs.write_text(defs.read_text() + "  pack: generic\n")
    done = cli("register", *options, code=2)
    suggested = re.search(r"`mm-assets (register [^`]*--new-schema)`", done.stderr)
    assert suggested, done.stderr
    assert "a: 1 partition" in cli(*shlex.split(suggested[1])).stdout
    assert "a: 1 partition" in cli("register", *options).stdout

    cli("register", "--shards", str(demo_shards / "captions-00000.tar"), "--root", "other")
    given = ("--shards", str(demo_shards / "captions-00000.tar"), "--pack", "generic", "--root", "other")
    done = cli("register", *given, code=2)
    suggested = re.search(r"`mm-assets (register [^`]*--new-schema)`", done.stderr)
    assert suggested, done.stderr
    assert "default: 1 partition" in cli(*shlex.split(suggested[1])).stdout
