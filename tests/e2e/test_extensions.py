"""A user's own field, filter and annotator, each in one file outside the package, go the whole way of a dataset."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import mm_assets
from mm_assets.cli.main import main
from mm_assets.errors import ConfigError
from mm_assets.fields import FIELD_NAMES, FIELD_TYPES

from ..pipeline.chain import declare, run_chain
from .warm import WarmCommands

RunCommand = Callable[..., subprocess.CompletedProcess[str]]

FIELD = '''
"""gestures.py: a hand's path, as a text of lines with seconds, x and y."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from mm_assets.errors import CorruptError, EncodeError
from mm_assets.fields import Encoded, Field, Spans, Steps
from mm_assets.fields.base import PAYLOAD

RECORD = np.dtype([("num_steps", "<u8")])


@dataclass(frozen=True)
class GestureField(Field):
    TYPE_ID = 0x8123
    FACTS = (Spans, Steps)
    scale: float = 1.0

    @property
    def metadata_type(self):
        return RECORD

    def from_text(self, text):
        try:
            return [[float(number) for number in line.split()] for line in str(text, "utf-8").splitlines()]
        except ValueError as error:
            raise EncodeError(f"GestureField: {error}, expected seconds, x and y") from error

    def encode(self, value):
        try:
            steps = np.array(value, "<f8").reshape(-1, 3)
        except (TypeError, ValueError) as error:
            raise EncodeError(f"GestureField: found {value!r}, expected rows of seconds, x and y") from error
        steps[:, 1:] *= self.scale
        return Encoded(self._pack_record(len(steps)), steps.tobytes())

    def _steps(self, metadata, data):
        (num_steps,) = self._unpack_record(metadata)
        if len(data) != 24 * num_steps:
            raise CorruptError(PAYLOAD, "steps are missing", found=len(data), expected=24 * num_steps)
        return np.frombuffer(bytes(data), "<f8").reshape(-1, 3)

    def decode(self, metadata, data):
        return self._steps(metadata, data).tolist()

    @property
    def arrow_type(self):
        return pa.list_(pa.list_(pa.float64(), 3))

    def facts(self, metadata, data):
        times = self._steps(metadata, data)[:, 0]
        if len(times):
            yield Spans("gesture", times[:1], times[-1:])
        yield Steps(times, False)
'''

FILTER = '''
"""resting.py: drops gestures that hardly move."""

from mm_assets.filters import Drop, Filter


class Resting(Filter):
    def __init__(self, *, min_steps):
        self.min_steps = min_steps

    def judge(self, block):
        for row in block.rows_of("text"):
            steps = bytes(block.payload(row) or b"").count(b"\\n") + 1
            if steps < self.min_steps:
                yield Drop(int(row), "resting", float(steps))
'''

ANNOTATOR = '''
"""counting.py: how many steps a gesture has."""

from mm_assets.filters import Annotator
from mm_assets.rows.schema import UserColumn


class Steps(Annotator):
    columns = (UserColumn(name="num_steps", source="", type="int64", rows="text"),)

    def annotate(self, block):
        rows = block.rows_of("text")
        steps = [bytes(block.payload(row) or b"").count(b"\\n") + 1 for row in rows]
        return {"num_steps": block.spread(rows, steps, self.columns[0].arrow_type)}
'''

SUITES = """
import pytest
from gestures import GestureField
from mm_assets.fields import register_field
from mm_assets.testing import AnnotatorSuite, FieldSuite, FilterSuite

register_field(GestureField)


class TestGesture(FieldSuite):
    fields = [GestureField(), GestureField(scale=2.0)]
    cases = [([[0.0, 1.0, 2.0]], [[0.0, 1.0, 2.0]]), ([], [])]
    wrong_types = ["text"]
    wrong_shapes = [[[1.0]]]
    bad_configs = []


class TestResting(FilterSuite):
    config = {"type": "resting:Resting", "min_steps": 2}
    cases = [({"a": [("text", "0 0 0"), ("text", "0 0 0\\n1 0 0")]}, {("a", 0): "resting"})]


class TestSteps(AnnotatorSuite):
    config = {"type": "counting:Steps"}
    cases = [({"a": [("text", "0 0 0\\n1 0 0")]}, {"num_steps": [None, 2]})]
"""

READ = """
import sys, mm_assets
with mm_assets.open(sys.argv[1]) as data:
    print("known" if "gesture" in data.fields else "unknown")
import gestures
mm_assets.fields.register_field(gestures.GestureField)
with mm_assets.open(sys.argv[1]) as data:
    print(data[int(sys.argv[2])]["gesture"])
"""


def sound(seconds: float) -> bytes:
    """A WAV of silence, 8 kHz."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(2 * round(8000 * seconds)))
    return target.getvalue()


def gesture(*seconds: float) -> bytes:
    """The text of a path that moves by one a step."""
    return "\n".join(f"{time} {number} 0" for number, time in enumerate(seconds)).encode()


SAMPLES = {
    "fine": {"gesture.txt": gesture(0.0, 0.5, 1.0), "wav": sound(1.0)},
    "late": {"gesture.txt": gesture(0.0, 0.5, 1.5), "wav": sound(1.0)},
    "rests": {"gesture.txt": gesture(0.0), "wav": sound(1.0)},
    "wrong": {"gesture.txt": b"no\nnumbers", "wav": sound(1.0)},
}


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path with the user's files; what they register is forgotten afterwards."""
    folder = tmp_path / "extensions"
    folder.mkdir()
    for name, code in {"gestures": FIELD, "resting": FILTER, "counting": ANNOTATOR}.items():
        (folder / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{Path(mm_assets.__file__).parents[1]}")
    known = [(table, dict(table)) for table in (FIELD_TYPES, FIELD_NAMES)]
    yield folder
    for table, before in known:
        table.clear()
        table.update(before)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A tar of four samples: a gesture within its audio, one beyond it, one that rests, and one that is not a path."""
    path = tmp_path / "hands-00000.tar"
    with tarfile.open(path, "w") as tar:
        for key, members in SAMPLES.items():
            for suffix, content in members.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def commands_with_the_field(run_command: RunCommand, packed: Path, folder: Path) -> None:
    """In processes of their own the commands know the field by `--field` alone, and without it say what to pass."""
    own = ("--field", "gestures:GestureField")
    plain = run_command("inspect", str(packed), "--sample", "0")
    assert plain.returncode == 0, plain.stderr
    assert "field 'GestureField' is not registered: pass --field module:Class" in plain.stdout
    shown = run_command("inspect", str(packed), "--sample", "0", *own)
    assert "gesture: GestureField(scale=2.0), 2 present" in shown.stdout, shown.stderr
    assert "NOT DECODED" not in shown.stdout
    copy = folder / "copy.mult"
    for arguments in (("convert", str(packed), str(copy)), ("verify", str(packed), str(copy))):
        done = run_command(*arguments, *own)
        assert done.returncode == 0, done.stdout + done.stderr
    wrong = run_command("verify", str(packed), "--field", "nowhere:Field")
    assert wrong.returncode == 2
    assert "field: is 'nowhere:Field', whose module cannot be imported" in wrong.stderr


@pytest.fixture
def run_command(warm_commands: WarmCommands) -> RunCommand:
    """`mm-assets` as a process of its own, which knows of the user's modules by $PYTHONPATH alone."""

    def run(*arguments: str, cwd: Path = Path()) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TTY_COMPATIBLE": "1"}  # what is next is for people
        return warm_commands(arguments, cwd=cwd.absolute(), env=environment)

    return run


def test_workers_know_the_field(
    extensions: Path, shard: Path, dagster_home: Path, tmp_path: Path, run_command: RunCommand
) -> None:
    """`run --jobs 2` packs a user's field in workers, which have not imported it."""
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.tar").write_bytes(shard.read_bytes())
    fields = "[{name: gesture, field: 'gestures:GestureField', modality: text}]"
    settings = ("--set", f"pack={{preset: speech, fields: {fields}}}")
    done = run_command("run", "--shards", "in", "--root", "out", "--jobs", "2", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = tmp_path / "out" / "default" / "manifest.json"
    view, inspect = re.findall(r"`(mm-assets (?:view|inspect) [^`]*)`", done.stdout.partition("\nnext: ")[2])
    assert view == f"mm-assets view {manifest} --field gestures:GestureField"
    suggested = shlex.split(inspect)
    assert suggested == f"mm-assets inspect {manifest} --sample 0 --field gestures:GestureField".split()
    shown = run_command(*suggested[1:])
    assert "gesture: GestureField(), 6 present" in shown.stdout, shown.stdout
    assert "NOT DECODED" not in shown.stdout


def test_the_whole_way(extensions: Path, shard: Path, tmp_path: Path, run_command: RunCommand) -> None:
    """Declared by import path, they are packed, checked, read, made a column, loaded and added as a stream."""
    gestures = {"name": "gesture", "field": "gestures:GestureField", "modality": "text", "config": {"scale": 2.0}}
    spec = declare(
        tmp_path / "root",
        shard,
        pack={"preset": "speech", "fields": [gestures]},
        filters=[{"type": "resting:Resting", "min_steps": 2}],
        annotators=[{"type": "counting:Steps"}],
    )
    _, results = run_chain(spec)
    checks = {outcome.name: outcome.violations for outcome in results["hands-00000"]["mstr"].outcomes}
    assert [(row["sample_id"], row["kind"], row["end_seconds"]) for row in checks["spans"]] == [
        ("late", "gesture", 1.5)
    ]
    (path,) = (tmp_path / "root" / "data" / "dropped").glob("hands-00000.*.parquet")
    dropped = pq.read_table(path).to_pylist()
    assert [(row["sample_id"], row["reason"]) for row in dropped] == [("rests", "resting")]
    (path,) = (tmp_path / "root" / "data" / "filtered_rows").glob("hands-00000.*.parquet")
    filtered = pq.read_table(path).to_pylist()
    steps = {row["sample_id"]: row["num_steps"] for row in filtered if row["modality"] == "text"}
    assert steps == {"fine": 3, "late": 3, "wrong": 2}
    (packed,) = (tmp_path / "root").rglob("*.mstr")
    commands_with_the_field(run_command, packed, tmp_path)

    path = [[0.0, 0.0, 0.0], [0.5, 2.0, 0.0], [1.0, 4.0, 0.0]]
    with mm_assets.open(packed) as data:
        fine = data.find("fine")
        assert data[fine]["gesture"] == path
        refused = data[data.find("wrong")]
        assert (refused["gesture"], refused["text"]) == (None, "no\nnumbers")  # the next field that takes it
        column = data.to_arrow().column("gesture")
        assert column.type == pa.list_(pa.list_(pa.float64(), 3))
        assert column[fine].as_py() == path
        loader = mm_assets.MultimodalLoader(data, ["gesture"], batch_size=2)
        assert path in [value for batch in loader for value in batch["gesture"]]

    values, copy = tmp_path / "values.jsonl", tmp_path / "copy.mstr"
    values.write_text(json.dumps({"sample_id": "fine", "value": path}) + "\n")
    copy.write_bytes(packed.read_bytes())
    arguments = ["--name", "again", "--field", "gestures:GestureField", "--values", str(values)]
    done = CliRunner().invoke(main, ["add-stream", str(copy), *arguments])
    assert done.exit_code == 0, done.output
    with mm_assets.open(copy) as data:
        assert data[fine]["again"] == path

    read = [sys.executable, "-c", READ, str(packed), str(fine)]
    done = subprocess.run(read, check=True, capture_output=True, text=True, timeout=280)
    assert done.stdout.splitlines() == ["unknown", str(path)]


def test_they_pass_the_suites(extensions: Path) -> None:
    """The suites of `mm_assets.testing` run over them in a test module of the user's, with nothing else set up."""
    (extensions / "test_mine.py").write_text(SUITES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "test_mine.py"]
    done = subprocess.run(command, cwd=extensions, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_field_that_is_not_there_is_named(extensions: Path, shard: Path, tmp_path: Path) -> None:
    """A wrong import path, a class that is not a field, and a type id below the user's are refused with their key."""
    (extensions / "taken.py").write_text(FIELD.replace("0x8123", "0x1"))
    for path, message in [
        ("nowhere:Field", "module cannot be imported"),
        ("gestures:Nothing", "expected a class derived from Field"),
        ("json:JSONDecoder", "expected a class derived from Field"),
        ("taken:GestureField", "expected 0x8000 to 0xFFFF"),
    ]:
        fields: list[dict[str, Any]] = [{"name": "gesture", "field": path, "modality": "text"}]
        with pytest.raises(ConfigError, match=rf"pack\.fields\[0\]\.field.*{message}"):
            run_chain(declare(tmp_path / "root", shard, pack={"fields": fields}))
