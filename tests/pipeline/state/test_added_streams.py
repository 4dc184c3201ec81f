"""Streams that are added to all partitions of a dataset, from Python and by the command."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import mm_assets
from mm_assets.cli.main import main
from mm_assets.dataset.manifest import packed_name
from mm_assets.errors import EncodeError, SourceError
from mm_assets.fields import ScalarField
from mm_assets.formats import open_reader
from mm_assets.pipeline.chain import PACKED_STAGES
from mm_assets.pipeline.partition import stages
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.added_streams import NewStream, add_to_dataset
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions

from ..chain import add_stream, at_work, declare, record_of, run_chain, run_partition, values_of

KEYS = ("docs-00000", "docs-00001")
SCORE = ScalarField(dtype="float32")


def store_of(shards: Path, root: Path) -> DatasetStore:
    """The folder of a dataset."""
    return DatasetStore(declare(root, shards, name="docs"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, demo_shards: Path) -> Path:
    """A folder with two shards of documents, and below `root` what was published of them."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "shards").mkdir()
    for key in KEYS:
        shutil.copyfile(demo_shards / f"{key}.tar", folder / "shards" / f"{key}.tar")
    run_chain(store_of(folder / "shards", folder / "root").spec)
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


def stream_files(store: DatasetStore) -> dict[str, int]:
    return store.store.sizes("streams")


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_the_manifest_after_an_addition(dataset: DatasetStore, form: str) -> None:
    """All partitions get the stream, the new manifest opens with it in both formats; the one before opens as before."""
    before = manifests.build_manifest(dataset)
    numbers = numbers_of(dataset)
    done, after = add_stream(dataset, "clip_score", SCORE, numbers)
    assert [(one.partition, one.added) for one in done] == [(key, True) for key in KEYS]
    assert sum(one.num_present for one in done) == len(numbers)
    assert after.digest != before.digest
    assert after.left_out == after.missing_streams == {}
    assert after.manifest["added_streams"] == [
        {"name": "clip_score", "field": "ScalarField", "config": {"dtype": "float32"}}
    ]
    with opened(dataset, form=form) as data:
        assert data.names[-1] == "clip_score"
        assert data.read_modality("clip_score", range(len(data))) == [None, *numbers.values()]
        assert data.verify().ok
    with opened(dataset, before.digest, form) as data:
        assert "clip_score" not in data.names
        assert data.verify().ok
    assert pending_partitions(dataset) == []


def test_what_was_packed_stays_as_it_was(dataset: DatasetStore) -> None:
    """An addition changes neither records nor packed files, and their checks still pass."""
    records, packed = [record_of(dataset, key) for key in KEYS], dataset.store.sizes("packed")
    add_stream(dataset, "clip_score", SCORE, numbers_of(dataset))
    assert [record_of(dataset, key) for key in KEYS] == records
    assert dataset.store.sizes("packed") == packed
    assert at_work(stages.recheck, dataset, KEYS[0], PACKED_STAGES["mstr"]).passed


def test_two_streams(dataset: DatasetStore) -> None:
    """A second stream joins the first, also if no sample has a value of it."""
    add_stream(dataset, "clip_score", SCORE, numbers_of(dataset))
    _, report = add_stream(dataset, "again", SCORE, {})
    assert [stream["name"] for stream in report.manifest["added_streams"]] == ["clip_score", "again"]
    with opened(dataset) as data:
        assert set(data.names[-2:]) == {"clip_score", "again"}
        assert data.presence("clip_score").any()
        assert not data.presence("again").any()
        assert data.verify().ok


def test_an_interrupted_addition_is_repeated(dataset: DatasetStore) -> None:
    """Until the command has ended no manifest lists the stream; started again it writes files of the same names."""
    before = manifests.build_manifest(dataset)
    numbers = numbers_of(dataset)
    next(iter(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers))))
    (first,) = stream_files(dataset)
    report = manifests.build_manifest(dataset)
    assert (report.digest, report.missing_streams) == (before.digest, {})
    _, report = add_stream(dataset, "clip_score", SCORE, numbers)
    assert report.missing_streams == {}
    assert first in stream_files(dataset)
    assert len(stream_files(dataset)) == len(KEYS)


def test_some_partitions_get_a_stream(dataset: DatasetStore) -> None:
    """Until all partitions have a stream readers do not see it, and each report names the others."""
    numbers = numbers_of(dataset)
    _, report = add_stream(dataset, "clip_score", SCORE, numbers, keys=KEYS[:1])
    assert report.missing_streams == manifests.build_manifest(dataset).missing_streams == {"clip_score": KEYS[1:]}
    with opened(dataset) as data:
        assert "clip_score" not in data.names
    done, report = add_stream(dataset, "clip_score", SCORE, numbers)
    assert [one.added for one in done] == [False, True]
    assert report.missing_streams == {}
    with opened(dataset) as data:
        assert data.read_modality("clip_score", range(len(data))) == [None, *numbers.values()]


@pytest.mark.parametrize("change", ["value", "absent", "field"])
def test_other_values_under_the_same_name(dataset: DatasetStore, change: str) -> None:
    """A stream that is there is not replaced in silence by other values, or by another field."""
    numbers = numbers_of(dataset)
    add_stream(dataset, "clip_score", SCORE, numbers)
    field = ScalarField(dtype="float64") if change == "field" else SCORE
    if change == "value":
        numbers[next(iter(numbers))] += 1
    elif change == "absent":
        del numbers[next(iter(numbers))]
    with pytest.raises(
        EncodeError, match=f"stream 'clip_score' {'was added with' if change == 'field' else 'already'}"
    ):
        add_stream(dataset, "clip_score", field, numbers)


def test_partitions_whose_streams_differ_in_their_field(dataset: DatasetStore) -> None:
    """A stream that some partitions have with one field is not added to others with another one."""
    add_stream(dataset, "score", SCORE, {}, keys=KEYS[:1])
    with pytest.raises(EncodeError, match=r"stream 'score' was added with ScalarField \{'dtype': 'float32'\}: "):
        add_stream(dataset, "score", ScalarField(dtype="float64"), {}, keys=KEYS[1:])
    assert manifests.build_manifest(dataset).missing_streams == {"score": KEYS[1:]}


def test_a_rebuilt_partition(dataset: DatasetStore, demo_shards: Path) -> None:
    """A partition rebuilt with the same bytes keeps its streams; with other ids it lacks them until they are added."""
    shard = Path(dataset.spec.shards, f"{KEYS[1]}.tar")
    content, times = shard.read_bytes(), shard.stat()
    _, added = add_stream(dataset, "clip_score", SCORE, numbers_of(dataset))
    run_partition(dataset, KEYS[1])
    assert manifests.build_manifest(dataset).digest == added.digest
    shutil.copyfile(demo_shards / f"{KEYS[0]}.tar", shard)
    try:
        assert register(dataset).changed == KEYS[1:]
        run_partition(dataset, KEYS[1])
    finally:
        shard.write_bytes(content)  # the other tests' too; only this one registers it again
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    report = manifests.build_manifest(dataset)
    assert report.left_out == {}
    assert report.missing_streams == {"clip_score": KEYS[1:]}
    with opened(dataset) as data:
        assert "clip_score" not in data.names
        assert data.verify().ok
    done, report = add_stream(dataset, "clip_score", SCORE, numbers_of(dataset), keys=KEYS[1:])
    assert [one.partition for one in done] == [KEYS[1]]
    assert report.missing_streams == {}
    with opened(dataset) as data:
        assert data.presence("clip_score").sum() == len(data) - 1


def test_a_partition_that_is_packed_otherwise(dataset: DatasetStore) -> None:
    """Other packed files of the same samples keep the streams."""
    numbers = numbers_of(dataset)
    one = DatasetStore(dataset.spec.replace(formats=("mstr",)))
    for key in KEYS:
        run_partition(one, key)
    _, before = add_stream(one, "clip_score", SCORE, numbers)
    other = DatasetStore(one.spec.replace(formats=("mult",)))
    for key in KEYS:
        run_partition(other, key)
    report = manifests.build_manifest(other)
    assert report.missing_streams == {}
    assert report.manifest["partitions"]["packed"] != before.manifest["partitions"]["packed"]
    with mm_assets.open(report.url) as data:
        assert data.read_modality("clip_score", range(len(data))) == [None, *numbers.values()]
        assert data.verify().ok


def test_a_stream_that_was_deleted(dataset: DatasetStore) -> None:
    """Without the file of its stream a partition is still listed, the report names it, and adding again repairs it."""
    numbers = numbers_of(dataset)
    _, added = add_stream(dataset, "clip_score", SCORE, numbers)
    dataset.store.delete(min(stream_files(dataset)))
    report = manifests.build_manifest(dataset)
    assert report.left_out == {}
    assert report.missing_streams == {"clip_score": KEYS[:1]}
    _, report = add_stream(dataset, "clip_score", SCORE, numbers)
    assert (report.digest, report.missing_streams) == (added.digest, {})


@pytest.mark.parametrize("change", ["deleted", "other ids", "same ids"])
def test_a_partition_that_changes_while_a_stream_is_added(dataset: DatasetStore, change: str) -> None:
    """Only a stream that exists, of the samples that a partition has by now, is listed."""
    done = list(add_to_dataset(dataset, "clip_score", SCORE, values_of(numbers_of(dataset))))
    first, second = done
    if change == "deleted":
        dataset.store.delete(f"streams/{packed_name(KEYS[1], sha256=second.file[1], form='mstr')}")
    else:
        name = packed_name(KEYS[1], sha256=first.file[1], form="mstr")
        if change == "other ids":
            shutil.copyfile(
                dataset.store.local_path(f"streams/{name.replace(KEYS[1], KEYS[0])}"),
                dataset.store.local_path(f"streams/{name}"),
            )
        file = first.file if change == "other ids" else second.file
        second = replace(second, file=file, recipe="0" * 16)  # it was published by another recipe then
    stream = NewStream(name="clip_score", field=SCORE, partitions=[first, second])
    report = manifests.build_manifest(dataset, stream=stream)
    assert report.missing_streams == ({} if change == "same ids" else {"clip_score": KEYS[1:]})
    with opened(dataset) as data:
        assert ("clip_score" in data.names) == (change == "same ids")


def test_additions_that_are_refused(dataset: DatasetStore) -> None:
    """Unknown ids, a packed modality's name and a value that does not fit change no manifest and leave no file."""
    before = dataset.store.read_bytes("manifest.json")
    with opened(dataset) as data:
        packed = data.names[0]
    for name, numbers, message in (
        ("clip_score", {"absent": 1.0}, "1 unknown sample id: 'absent'"),
        (packed, {}, f"has a modality '{packed}' already: give the stream another name"),
        ("clip_score", dict.fromkeys(numbers_of(dataset), "x"), "found str"),
    ):
        with pytest.raises(EncodeError, match=message):
            add_stream(dataset, name, SCORE, numbers)
    assert stream_files(dataset) == {}
    assert dataset.store.read_bytes("manifest.json") == before


def test_a_partition_that_is_not_published(dataset: DatasetStore) -> None:
    """Naming a partition that is not published is refused before anything is written."""
    with pytest.raises(SourceError, match="partition 'docs-7': it is not registered: run `mm-assets run"):
        add_stream(dataset, "clip_score", SCORE, {}, keys=[KEYS[0], "docs-7"])
    assert stream_files(dataset) == {}


def test_object_storage(tmp_path: Path, demo_shards: Path) -> None:
    """Streams are files of their own, so they can be added in an object store."""
    memory = declare("memory://added-streams", demo_shards / "docs-*.tar", name="docs")
    dataset, _ = run_chain(memory)
    numbers = numbers_of(dataset)
    add_stream(dataset, "clip_score", SCORE, numbers)
    with opened(dataset) as data:
        assert data.read_modality("clip_score", range(len(data))) == [None, *numbers.values()]


def test_nothing_is_published(tmp_path: Path) -> None:
    """A dataset without a published partition says so."""
    config = {"name": "x", "shards": "s", "root": str(tmp_path)}
    with pytest.raises(SourceError, match="no partition is up to date: run `mm-assets run --dataset x`"):
        add_stream(DatasetStore(DatasetSpec.from_config(config, where="test")), "a", SCORE, {})


def test_the_command_on_a_dataset(dataset: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`add-stream --dataset` adds to every partition and makes the manifest; its packed files are not for FILE."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["add-stream", *arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    numbers = numbers_of(dataset)
    pq.write_table(pa.table({"sample_id": list(numbers), "value": list(numbers.values())}), "v.parquet")
    arguments = ("--name", "clip_score", "--field", "ScalarField", "--values", "v.parquet")
    place = ("--dataset", "docs", "--root", dataset.spec.root)
    done = run(*place, *arguments, "--partition", KEYS[0], "--ignore-unknown")
    assert f"docs/{KEYS[0]}: clip_score added" in done.stdout
    assert f"docs: readers do not see the stream 'clip_score': it is missing in {KEYS[1]}; add it" in done.stderr
    assert "clip_score is in the dataset" not in done.stdout
    done = run(*place, *arguments)
    assert f"docs/{KEYS[0]}: clip_score was there" in done.stdout
    assert f"docs/{KEYS[1]}: clip_score added" in done.stdout
    assert "clip_score is in the dataset" in done.stdout
    with opened(dataset) as data:
        assert data.read_modality("clip_score", range(len(data))) == [None, *numbers.values()]
    packed = dataset.store.path_of(min(name for name in dataset.store.sizes("packed") if name.endswith(".mstr")))
    assert "belongs to a dataset" in run(packed, *arguments, code=2).stderr
    with open_reader(packed) as reader:
        assert "clip_score" not in reader.names
