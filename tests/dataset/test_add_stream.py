"""Values added to packed files: tables of them, one file in place, all partitions of a dataset, and the command."""

from __future__ import annotations

import json
import shutil
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
from mm_assets.dataset.add_stream import Values, add_stream, add_values, read_values
from mm_assets.errors import ConfigError, EncodeError, SchemaMismatchError, SourceError
from mm_assets.fields import BytesField, Field, ImageField, JSONField, NDArrayField, ScalarField, TextField
from mm_assets.formats import open_reader
from mm_assets.pipeline.chain import PACKED_STAGES
from mm_assets.pipeline.partition import publish, stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import clean, manifests
from mm_assets.pipeline.state.added_streams import add_to_dataset, carried_over
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import Present, pending_partitions

from ..pipeline.chain import at_work, marker_name, marker_of

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
    with pytest.raises(EncodeError, match=r"v\.jsonl: 2 sample ids are of no sample: 'x', 'y'"):
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


# -- a dataset


def values_of(numbers: dict[str, float]) -> Values:
    """Numbers by sample id, as a table of them would be."""
    return Values("table", {key: row for row, key in enumerate(numbers)}, list(numbers.values()), lambda item: item)


def run_partition(dataset: DatasetStore, key: str) -> None:
    """Every stage of a partition, and its marker."""
    for stage in (stages.raw_shards, stages.rows, stages.materialized_rows, stages.filtered_rows):
        assert at_work(stage, dataset, key).passed
    assert all(result.passed for result in at_work(stages.packed, dataset, key).values())
    at_work(publish.publish, dataset, key)


def store_of(shards: Path, root: Path) -> DatasetStore:
    """The folder of a dataset."""
    config = {"name": "docs", "shards": str(shards), "root": str(root), "settle_seconds": 0}
    return DatasetStore(DatasetSpec.from_config(config, where="test"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, demo_shards: Path) -> Path:
    """A folder with two shards of documents, and below `root` what was published of them."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "shards").mkdir()
    for name in ("docs-00000.tar", "docs-00001.tar"):
        shutil.copyfile(demo_shards / name, folder / "shards" / name)
    store = store_of(folder / "shards", folder / "root")
    for partition in register(store).partitions:
        run_partition(store, partition.key)
    manifests.build_manifest(store)
    return folder


@pytest.fixture
def dataset(published: Path, tmp_path: Path) -> DatasetStore:
    """The dataset for one test."""
    shutil.copytree(published / "root", tmp_path / "root")
    return store_of(published / "shards", tmp_path / "root")


def opened(store: DatasetStore, digest: str | None = None, form: str = "mstr") -> mm_assets.Dataset:
    name = "manifest.json" if digest is None else f"manifests/{digest}.json"
    return mm_assets.open(store.store.url_of(name), format=form)


def numbers_of(store: DatasetStore) -> dict[str, float]:
    """A number for every sample but the first."""
    with opened(store) as data:
        return {key: float(k) for k, key in enumerate(data.sample_ids) if k}


def test_the_manifest_after_an_addition(dataset: DatasetStore) -> None:
    """All partitions get the stream, the new manifest names it and opens with it; the one before opens as before."""
    before = manifests.build_manifest(dataset)
    numbers = numbers_of(dataset)
    done = list(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers)))
    assert [(one.partition, one.added) for one in done] == [("docs-00000", True), ("docs-00001", True)]
    assert sum(one.num_present for one in done) == len(numbers)
    after = manifests.build_manifest(dataset)
    assert after.digest != before.digest
    assert after.left_out == after.missing_streams == {}
    assert after.manifest["added_streams"] == [
        {"name": "clip_score", "field": "ScalarField", "config": {"dtype": "float32"}}
    ]
    with opened(dataset) as data:
        assert data.names[-1] == "clip_score"
        assert data.read_modality("clip_score", range(len(data))) == [None, *numbers.values()]
        assert data.verify().ok
    with opened(dataset, form="mult") as data:
        assert "clip_score" not in data.names
    with opened(dataset, before.digest) as data:
        assert "clip_score" not in data.names
        assert data.verify().ok
    assert pending_partitions(dataset) == []


def test_what_was_packed_stays_checked(dataset: DatasetStore) -> None:
    """Records still name the files that were packed, and their checks still pass; the marker says what was added."""
    list(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers_of(dataset))))
    marker = marker_of(dataset, "docs-00000")
    assert marker["files"]["mstr"]["path"] != marker["added"]["file"]["path"]
    assert dataset.records("docs-00000")[PACKED_STAGES["mstr"]].files["mstr"].to_json() == marker["files"]["mstr"]
    assert at_work(stages.recheck, dataset, "docs-00000", PACKED_STAGES["mstr"]).passed
    assert manifests.build_manifest(dataset).missing_streams == {}


def test_two_streams_and_cleaning(dataset: DatasetStore) -> None:
    """A second stream joins the first; cleaning removes the copy between, and everything still opens."""
    numbers = numbers_of(dataset)
    list(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers)))
    manifests.build_manifest(dataset)
    between = [marker_of(dataset, key)["added"]["file"]["path"] for key in ("docs-00000", "docs-00001")]
    list(add_to_dataset(dataset, "again", SCORE, values_of({})))
    report = manifests.build_manifest(dataset)
    assert [stream["name"] for stream in report.manifest["added_streams"]] == ["again", "clip_score"]
    removed = clean.clean(dataset, keep=1).files
    assert set(between) <= set(removed)
    with opened(dataset) as data:
        assert data.names[-2:] == ("clip_score", "again")
        assert data.verify().ok
        assert not data.presence("again").any()
    assert at_work(stages.recheck, dataset, "docs-00001", PACKED_STAGES["mstr"]).passed


def test_an_interrupted_addition_is_taken_up(dataset: DatasetStore) -> None:
    """Until all partitions have the stream the manifest lists none, and says so; started again, the rest is added."""
    before = manifests.build_manifest(dataset)
    numbers = numbers_of(dataset)
    next(iter(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers))))
    report = manifests.build_manifest(dataset)
    assert report.missing_streams == manifests.missing_streams(Present(dataset)) == {"clip_score": ("docs-00001",)}
    assert report.digest == before.digest
    done = list(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers)))
    assert [one.added for one in done] == [False, True]
    assert "added_streams" in manifests.build_manifest(dataset).manifest


@pytest.mark.parametrize("change", ["value", "absent", "field"])
def test_other_values_under_the_same_name(dataset: DatasetStore, change: str) -> None:
    """A stream that is there is not replaced in silence by other values, or by another field."""
    numbers = numbers_of(dataset)
    list(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers)))
    field = ScalarField(dtype="float64") if change == "field" else SCORE
    if change == "value":
        numbers[next(iter(numbers))] += 1
    elif change == "absent":
        del numbers[next(iter(numbers))]
    with pytest.raises(EncodeError, match="has a stream 'clip_score' already, with another field or other values"):
        list(add_to_dataset(dataset, "clip_score", field, values_of(numbers)))


def test_a_partition_that_is_made_again(dataset: DatasetStore, demo_shards: Path) -> None:
    """A partition that is rebuilt with the same bytes keeps its streams; with other bytes it loses them, with a log."""
    shard = Path(dataset.spec.shards, "docs-00001.tar")
    content = shard.read_bytes()
    before = manifests.build_manifest(dataset)
    list(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers_of(dataset))))
    added = manifests.build_manifest(dataset)
    run_partition(dataset, "docs-00001")
    assert manifests.build_manifest(dataset).digest == added.digest
    shutil.copyfile(demo_shards / "docs-00000.tar", shard)
    try:
        assert register(dataset).changed == ("docs-00001",)
        run_partition(dataset, "docs-00001")
    finally:
        shard.write_bytes(content)  # the other tests' too; only this one registers it again
    assert marker_of(dataset, "docs-00001")["lost_streams"] == ["clip_score"]
    report = manifests.build_manifest(dataset)
    assert report.missing_streams == {"clip_score": ("docs-00001",)}
    assert "added_streams" not in report.manifest
    assert report.manifest["shards"][0] == before.manifest["shards"][0]  # never a mixture
    with opened(dataset) as data:
        assert data.verify().ok
    again = list(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers_of(dataset)), keys=["docs-00001"]))
    assert [one.partition for one in again] == ["docs-00001"]
    assert "lost_streams" not in marker_of(dataset, "docs-00001")
    assert "added_streams" in manifests.build_manifest(dataset).manifest


def test_a_copy_that_is_gone(dataset: DatasetStore) -> None:
    """Without its copy a partition is still listed, with the file that was packed; adding again makes a new copy."""
    numbers = numbers_of(dataset)
    list(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers)))
    Path(dataset.store.path_of(marker_of(dataset, "docs-00000")["added"]["file"]["path"])).unlink()
    report = manifests.build_manifest(dataset)
    assert report.left_out == {}
    assert report.missing_streams == {"clip_score": ("docs-00000",)}
    done = list(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers)))
    assert [one.added for one in done] == [True, False]
    assert manifests.build_manifest(dataset).missing_streams == {}


def test_additions_that_are_refused(dataset: DatasetStore) -> None:
    """Unknown ids, a name of the pack plan and a value that does not fit change no marker and leave no file."""
    listed = dataset.store.sizes("packed")
    markers = Present(dataset).markers()
    for name, numbers, message in (
        ("clip_score", {"nobody": 1.0}, "1 sample ids are of no sample"),
        ("listing", {}, "two modalities are named"),
        ("clip_score", dict.fromkeys(numbers_of(dataset), "x"), "found str"),
    ):
        with opened(dataset) as data:
            taken = data.names[0] if name == "listing" else name
        with pytest.raises(EncodeError, match=message):
            list(add_to_dataset(dataset, taken, SCORE, values_of(numbers)))
    assert dataset.store.sizes("packed") == listed
    assert Present(dataset).markers() == markers


def test_a_partition_published_meanwhile(dataset: DatasetStore) -> None:
    """A partition that is published again while a stream is added to it keeps its new marker."""

    class Late(Values):
        def of(self, sample_ids: Any) -> Any:
            marker = marker_of(dataset, "docs-00000")
            dataset.store.write_bytes(marker_name(dataset, "docs-00000"), json.dumps({**marker, "note": 1}).encode())
            return super().of(sample_ids)

    with pytest.raises(SourceError, match="was published again while a stream was added"):
        list(add_to_dataset(dataset, "clip_score", SCORE, Late("late", {}, [], None)))
    assert marker_of(dataset, "docs-00000")["note"] == 1


def test_a_partition_that_is_not_published(dataset: DatasetStore) -> None:
    """Naming a partition that is not published is refused before anything is written."""
    with pytest.raises(SourceError, match="partition 'docs-7': it is not registered: run `mm-assets run"):
        list(add_to_dataset(dataset, "clip_score", SCORE, values_of({}), keys=["docs-00000", "docs-7"]))
    assert "added" not in marker_of(dataset, "docs-00000")


def test_partitions_whose_streams_differ_in_settings(dataset: DatasetStore) -> None:
    """A stream that partitions have with different settings is not listed, and the report names the others."""
    for field, key in ((SCORE, "docs-00000"), (ScalarField(), "docs-00001")):
        list(add_to_dataset(dataset, "score", field, values_of({}), keys=[key]))
    report = manifests.build_manifest(dataset)
    assert report.missing_streams == {"score": ("docs-00001",)}
    assert "added_streams" not in report.manifest


def test_a_packed_file_that_is_gone(dataset: DatasetStore) -> None:
    """Without the file that was packed nothing can be added: the partition has to be run again."""
    Path(dataset.store.path_of(marker_of(dataset, "docs-00001")["files"]["mstr"]["path"])).unlink()
    with pytest.raises(SourceError, match=r"is gone, expected \d+ bytes: run partition 'docs-00001' again"):
        list(add_to_dataset(dataset, "score", SCORE, values_of({})))
    assert "added" not in marker_of(dataset, "docs-00000")


def test_a_damaged_marker_is_replaced(dataset: DatasetStore) -> None:
    """A marker that cannot be read does not stop its partition from being published again."""
    for content in (b"{", b"[]"):
        dataset.store.write_bytes(marker_name(dataset, "docs-00000"), content)
        assert "added" not in at_work(publish.publish, dataset, "docs-00000")
    assert manifests.build_manifest(dataset).left_out == {}


def test_object_storage_is_refused(tmp_path: Path) -> None:
    """A dataset that is not in a local file system is refused with a reason, before anything is looked at."""
    config = {"name": "x", "shards": "s", "root": "memory://bucket"}
    remote = DatasetStore(DatasetSpec.from_config(config, where="test"))
    with pytest.raises(SourceError, match=r"memory://bucket/x: .*local file system only"):
        list(add_to_dataset(remote, "clip_score", SCORE, values_of({})))


def test_nothing_is_published(tmp_path: Path) -> None:
    """A dataset without a published partition says so."""
    config = {"name": "x", "shards": "s", "root": str(tmp_path)}
    with pytest.raises(SourceError, match="no partition is up to date: run `mm-assets run --dataset x`"):
        list(add_to_dataset(DatasetStore(DatasetSpec.from_config(config, where="test")), "a", SCORE, values_of({})))


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


def test_the_command_on_a_dataset(dataset: DatasetStore, tmp_path: Path, run: Callable[..., Result]) -> None:
    """`add-stream --dataset` adds to every partition and makes the manifest; its packed files are not for FILE."""
    numbers = numbers_of(dataset)
    table(tmp_path / "v.parquet", list(numbers.items()))
    arguments = ("--name", "clip_score", "--field", "ScalarField", "--values", "v.parquet")
    done = run("--dataset", "docs", "--root", dataset.spec.root, *arguments)
    assert "docs/docs-00001: clip_score added" in done.stdout
    with opened(dataset) as data:
        assert data.read_modality("clip_score", range(len(data))) == [None, *numbers.values()]
    again = run("--dataset", "docs", "--root", dataset.spec.root, *arguments)
    assert "docs/docs-00001: clip_score was there" in again.stdout
    packed = dataset.store.path_of(marker_of(dataset, "docs-00000")["files"]["mstr"]["path"])
    assert "belongs to a dataset" in run(packed, *arguments, code=2).stderr
    with open_reader(packed) as reader:
        assert "clip_score" not in reader.names


def test_a_loss_is_reported_until_it_is_repaired() -> None:
    """A marker says which streams were lost, also when the partition is run once more without them."""
    made = {"files": {"mstr": {"sha256": "1"}}}
    with_stream = made | {"added": {"file": {}, "streams": [{"name": "score"}]}}
    other, third = ({"files": {"mstr": {"sha256": digest}}} for digest in ("2", "3"))
    assert carried_over(with_stream, made) == with_stream
    once = carried_over(with_stream, other)
    assert once["lost_streams"] == ["score"]
    assert carried_over(once, other)["lost_streams"] == ["score"]
    assert carried_over(once, third)["lost_streams"] == ["score"]
    assert "lost_streams" not in carried_over(made, other)
