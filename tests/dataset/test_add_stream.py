"""Values added to packed files: tables of them, one file in place, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import mm_assets
from mm_assets.cli.main import main
from mm_assets.dataset.add_stream import add_stream, add_values, read_values, write_stream
from mm_assets.errors import ConfigError, EncodeError, SchemaMismatchError, SourceError
from mm_assets.fields import BytesField, Field, ImageField, JSONField, NDArrayField, ScalarField, TextField

SCORE = ScalarField(dtype="float32")
IDS = ("a", "b", "ü-3", "d")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Four samples with a text as MSTR."""
    path = tmp_path / "x.mstr"
    with mm_assets.create(path, {"text": TextField()}) as writer:
        for number, sample_id in enumerate(IDS):
            writer.write(sample_id, {"text": f"text {number}" if number != 1 else None})
    return path


def table(path: Path, rows: list[tuple[Any, Any]], kind: pa.DataType | None = None) -> Path:
    """A table of values in the format that the extension names."""
    if path.suffix == ".parquet":
        columns = {"value": pa.array([value for _, value in rows], kind), "sample_id": [key for key, _ in rows]}
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"sample_id": key, "value": value}) + "\n" for key, value in rows))
    else:
        path.write_text("sample_id,other,value\n" + "".join(f"{key},x,{value}\n" for key, value in rows))
    return path


def column(path: Path, name: str) -> list[Any]:
    """One modality of a file that verifies clean."""
    with mm_assets.open(path, verify=True) as dataset:
        assert dataset.verify().ok
        return dataset.read_modality(name, range(len(dataset)))


# -- one file


def test_values_in_order(file: Path) -> None:
    """Values in the file's order are added under their field and read back with what was there before."""
    add_stream(file, "clip_score", SCORE, iter([0.25, None, -1, 3]))
    assert column(file, "clip_score") == [0.25, None, -1.0, 3.0]
    assert column(file, "text") == ["text 0", None, "text 2", "text 3"]
    with mm_assets.open(file) as dataset:
        assert dataset.fields["clip_score"] == SCORE
        assert dataset.read_batch([3, 1], ["clip_score"])["clip_score"].values.tolist() == [3.0, 0.0]


def test_a_value_that_does_not_fit(file: Path) -> None:
    """A value that its field refuses is named with its sample, and the file is as before."""
    data = file.read_bytes()
    with pytest.raises(EncodeError, match=r"x\.mstr, sample 2, modality 'clip_score': ScalarField: found str"):
        add_stream(file, "clip_score", SCORE, [1, 2, "three", 4])
    assert file.read_bytes() == data


@pytest.mark.parametrize("extension", ["parquet", "jsonl", "csv"])
def test_values_by_sample_id(file: Path, tmp_path: Path, extension: str) -> None:
    """Rows find their samples by id, in any order; samples without a row or with an empty value are absent."""
    empty = "" if extension == "csv" else None
    values = read_values(table(tmp_path / f"v.{extension}", [("d", 4), ("ü-3", 0.5), ("a", empty)]), SCORE)
    assert len(values) == 3
    summary = add_values(file, "clip_score", SCORE, values)
    assert summary.num_present == {"text": 3, "clip_score": 2}
    assert column(file, "clip_score") == [None, None, 0.5, 4.0]


@pytest.mark.parametrize(
    ("extension", "field", "value", "expected"),
    [
        ("csv", TextField(), "12", "12"),
        ("csv", ScalarField(dtype="bool"), "True", True),
        ("csv", JSONField(), "[1]", [1]),
        ("jsonl", JSONField(), {"a": [1, None], "b": {}}, {"a": [1, None], "b": {}}),
        ("jsonl", TextField(), "", ""),
        ("parquet", BytesField(), b"\x00\x01", b"\x00\x01"),
        ("parquet", TextField(), "ü", "ü"),
        ("parquet", ScalarField(dtype="int64"), 7, 7),
    ],
)
def test_values_of_fields(
    file: Path, tmp_path: Path, extension: str, field: Field, value: object, expected: object
) -> None:
    """Cells become what the field takes: text, numbers, JSON, bytes."""
    add_values(file, "new", field, read_values(table(tmp_path / f"v.{extension}", [("b", value)]), field))
    assert column(file, "new") == [None, expected, None, None]


def test_arrays_and_images(file: Path, tmp_path: Path, demo_shards: Path) -> None:
    """A list becomes an array; the bytes of an image file are kept as they are."""
    import tarfile

    with tarfile.open(demo_shards / "captions-00000.tar") as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith((".jpg", ".png", ".webp")))
        image = tar.extractfile(member).read()
    field = NDArrayField()
    add_values(file, "box", field, read_values(table(tmp_path / "a.jsonl", [("a", [[1.5, 2], [3, 4]])]), field))
    images = read_values(table(tmp_path / "b.parquet", [("d", image)]), ImageField())
    add_values(file, "image", ImageField(), images)
    assert np.array_equal(column(file, "box")[0], np.array([[1.5, 2], [3, 4]]))
    with mm_assets.open(file) as dataset:
        assert bytes(dataset.read_raw([3], ["image"])["image"][0]) == image
        assert dataset[3]["image"].ndim == 3


def test_unknown_ids(file: Path, tmp_path: Path) -> None:
    """Ids of no sample are refused by number and name before anything is written, unless they are to be passed over."""
    data = file.read_bytes()
    values = read_values(table(tmp_path / "v.jsonl", [("a", 1), ("y", 2), ("x", 3)]), SCORE)
    with pytest.raises(EncodeError, match=r"v\.jsonl: 2 unknown sample ids: 'x', 'y'"):
        add_values(file, "clip_score", SCORE, values)
    assert file.read_bytes() == data
    add_values(file, "clip_score", SCORE, values, ignore_unknown=True)
    assert column(file, "clip_score") == [1.0, None, None, None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.txt", "", "expected a .parquet, .jsonl or .csv file"),
        ("v.csv", "id,value\n", "columns id, value; expected sample_id and value"),
        ("v.csv", "", "columns none; expected"),
        ("v.csv", "sample_id,value,value\na,1,2\n", "once each"),
        ("v.csv", "sample_id,value\na\n", "line 2: 1 cells, expected 2"),
        ("v.csv", "sample_id,value\na,1\na,2\n", "rows 1 and 2 are both of 'a'"),
        ("v.csv", b"sample_id,value\na,\xff\n", "not a CSV file in UTF-8"),
        ("v.jsonl", '{"sample_id": "a"\n', "line 1: not JSON"),
        ("v.jsonl", '{"id": "a"}\n', "line 1: found .* expected an object with sample_id"),
        ("v.jsonl", '{"sample_id": 1, "value": 2}\n', "row 1: sample_id is int 1, expected a text"),
        ("v.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("v.parquet", "no parquet", "not a Parquet file"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    """A table of another form is refused, saying where and what was found."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((SchemaMismatchError, ConfigError), match=message):
        read_values(path, SCORE)


def test_other_tables(tmp_path: Path) -> None:
    """Parquet without the columns, and a file that is not there, are refused."""
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "v.parquet")
    with pytest.raises(SchemaMismatchError, match="columns id; expected sample_id and value"):
        read_values(tmp_path / "v.parquet", SCORE)
    for extension in ("parquet", "jsonl", "csv"):
        with pytest.raises(SourceError, match="none"):
            read_values(tmp_path / f"none.{extension}", SCORE)


@pytest.mark.parametrize("cell", ["many", "1;2", "[1"])
def test_cells_that_are_not_numbers(file: Path, tmp_path: Path, cell: str) -> None:
    """A cell that is not a value of the field is named with table and sample; the file does not change."""
    data = file.read_bytes()
    with pytest.raises(EncodeError, match=r"v\.csv: value of 'b': found the text .*, expected a number"):
        add_values(file, "x", SCORE, read_values(table(tmp_path / "v.csv", [("a", 1), ("b", cell)]), SCORE))
    assert file.read_bytes() == data


# -- a file of its own


def test_a_stream_of_given_samples(tmp_path: Path) -> None:
    """`write_stream` writes one modality of given ids, and equal input gives equal bytes."""
    written = []
    for name in ("x.mstr", "y.tmp"):
        summary = write_stream(tmp_path / name, "score", SCORE, iter([1.5, None, 0.0, -2.0]), IDS)
        assert (summary.num_samples, summary.num_present) == (4, {"score": 3})
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    assert column(tmp_path / "x.mstr", "score") == [1.5, None, 0.0, -2.0]
    with mm_assets.open(tmp_path / "x.mstr") as dataset:
        assert (dataset.names, list(dataset.sample_ids)) == (("score",), list(IDS))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0] * 3, "3 values for 4 samples"),
        ([1.0] * 5, "more than 4 values for 4 samples"),
        ([1.0, "x", 2.0, 3.0], "sample 1, modality 'score'"),
    ],
)
def test_a_stream_that_is_refused(tmp_path: Path, values: list[Any], message: str) -> None:
    """Another number of values than ids, or a value that does not fit, is refused, and no file is left."""
    with pytest.raises(EncodeError, match=message):
        write_stream(tmp_path / "x.mstr", "score", SCORE, values, IDS)
    assert list(tmp_path.iterdir()) == []


# -- the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Runs the command with an instance of its own."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["add-stream", *arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


def test_the_command_on_a_file(file: Path, tmp_path: Path, run: Callable[..., Result]) -> None:
    """`add-stream FILE` adds a table of values and says how many samples have one."""
    table(tmp_path / "v.csv", [("a", 0.5), ("d", 2)])
    config = '{"dtype": "float32"}'
    arguments = ("--name", "clip_score", "--field", "ScalarField", "--config", config, "--values", "v.csv")
    assert "x.mstr: clip_score added, 2 of 4 samples" in run(str(file), *arguments).stdout
    assert column(file, "clip_score") == [0.5, None, None, 2.0]
    assert "two modalities are named" in run(str(file), *arguments, code=1).stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--field": "NoField"}, "expected one of"),
        ({"--config": "{"}, "--config: found '{', expected JSON"),
        ({"--config": '{"x": 1}'}, "a setting of ScalarField"),
        ({"FILE": None}, "give either a file or --dataset"),
        ({"FILE": "s3://bucket/x.mstr"}, "expected a local file"),
        ({"--partition": "p"}, "--partition: goes with --dataset"),
        ({"FILE": "x.mstr", "-d": "docs"}, "give either a file or --dataset"),
    ],
)
def test_wrong_use_of_the_command(
    tmp_path: Path, run: Callable[..., Result], changed: dict[str, str | None], message: str
) -> None:
    """Arguments that are wrong end with exit code 2 and say what was expected."""
    table(tmp_path / "v.csv", [])
    given = {"FILE": "x.mstr", "--name": "a", "--field": "ScalarField", "--values": "v.csv", "--root": str(tmp_path)}
    given |= changed
    arguments = [part for key, value in given.items() if key != "FILE" and value is not None for part in (key, value)]
    if given["FILE"] is not None:
        arguments.insert(0, given["FILE"])
    assert message in run(*arguments, code=2).stderr
