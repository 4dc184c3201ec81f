"""`verify` of a dataset: the commands that it names repair what it found damaged."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mm_assets.cli import verify
from mm_assets.cli.main import main
from mm_assets.fields import ScalarField

from ..pipeline.chain import add_stream, declare, run_chain
from ..pipeline.shards import CAPTIONS, make_shard

Invoke = Callable[..., Result]
SCORE = ScalarField(dtype="float32")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of two partitions and a stream in `root`, its shards, and the stream's values."""
    folder = tmp_path_factory.mktemp("verify")
    for key in "ab":
        make_shard(folder / "in" / f"{key}.tar", {f"{key}{name}": value for name, value in CAPTIONS.items()})
    dataset, _ = run_chain(declare(folder / "root", folder / "in"))
    add_stream(dataset, "score", SCORE, {"a0": 1.0, "b0": 2.0})
    (folder / "score.jsonl").write_text('{"sample_id": "a0", "value": 1.0}\n{"sample_id": "b0", "value": 2.0}\n')
    return folder


@pytest.fixture
def root(made: Path, tmp_path: Path, dagster_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The dataset's folder for one test."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(made / "root", tmp_path / "root")) / "data"


def invoke(*arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == code, (done.output, done.exception)
    return done


def run_advice(advice: str, made: Path) -> None:
    """Runs the command that `verify` named, with the options of the dataset."""
    command = shlex.split(advice.split("`")[1])
    assert command[:4] == ["mm-assets", command[1], "--dataset", "data"]
    options = ["--root", "root"]
    if command[1] == "run":
        options += ["--shards", str(made / "in"), "--set", "settle_seconds=0"]
    else:
        options += ["--name", "score", "--field", "ScalarField", "--config", json.dumps(SCORE.config)]
        options += ["--values", str(made / "score.jsonl")]
    invoke(*command[1:], *options)


def flip(path: Path) -> None:
    """Changes a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize(
    ("pattern", "command"),
    [
        ("packed/b.*.mult", "run --dataset data --partition b"),
        ("packed/b.*.mstr", "run --dataset data --partition b"),
        ("filtered_rows/b.*", "run --dataset data --partition b"),
        ("rows/*", "run --dataset data --partition a --partition b"),
        ("streams/b.*", "add-stream --dataset data"),
    ],
)
def test_damaged_files_are_repaired_by_the_command_that_is_named(
    made: Path, root: Path, pattern: str, command: str, damage: Callable[[Path], None]
) -> None:
    """Whichever file of a partition is damaged or missing, one command writes it again, with the same bytes."""
    before = {path: path.read_bytes() for path in root.glob(pattern)}
    assert before
    invoke("verify", str(root))
    for path in before:
        damage(path)
    done = invoke("verify", str(root), code=1)
    (advice,) = [line for line in done.stderr.splitlines() if "to repair" in line]
    assert f"to repair the dataset {root}: `mm-assets {command}`" in advice
    run_advice(advice, made)
    assert {path: path.read_bytes() for path in root.glob(pattern)} == before
    invoke("verify", str(root))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"version": 2}', b"\xff"])
def test_a_damaged_manifest_is_written_again(made: Path, root: Path, content: bytes) -> None:
    """A run restores `manifest.json`, with the added streams, from the copy in `manifests`."""
    before = (root / "manifest.json").read_bytes()
    (root / "manifest.json").write_bytes(content)
    (advice,) = invoke("verify", str(root), code=1).stderr.splitlines()
    assert advice == f"to repair the dataset {root}: `mm-assets run --dataset data` writes the manifest again"
    run_advice(advice, made)
    assert (root / "manifest.json").read_bytes() == before
    invoke("verify", str(root))


def test_a_packed_file_names_its_partition(root: Path) -> None:
    """A single file of a dataset, by its path alone, is repaired with its partition; any other file by copying."""
    (path,) = root.glob("packed/a.*.mult")
    flip(path)
    shutil.copyfile(path, "copy.mult")
    advice = invoke("verify", str(path), "copy.mult", code=1).stderr.splitlines()
    assert advice == [
        f"to repair the dataset {root}: `mm-assets run --dataset data --partition a` rebuilds what is damaged",
        "to repair a file that is in no dataset's folder: copy it again, or write it again",
    ]


def test_a_command_names_few_partitions(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many damaged partitions the command has the first, and the line says how many there are."""
    monkeypatch.setattr(verify, "_MAX_KEYS_IN_COMMAND", 1)
    for path in root.glob("rows/*"):
        flip(path)
    assert "data --partition a` rebuilds the first of 2 partitions" in invoke("verify", str(root), code=1).stderr
