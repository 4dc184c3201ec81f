"""A manifest as one dataset: its files, what is refused, remote ones."""

import json
import pickle
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest

import mm_assets
from mm_assets.dataset import files as packed_files
from mm_assets.dataset import open_files as shards
from mm_assets.errors import (
    CorruptError,
    FormatError,
    SchemaMismatchError,
    SourceError,
    UnsupportedVersionError,
)
from mm_assets.fields import (
    BytesField,
    ImageField,
    ImageTextPairField,
    SequenceField,
)
from mm_assets.formats import ModalitySpec, MultWriter, Payload

from .samples import FIELDS, assert_same, make_manifest, sample, write


@pytest.fixture
def packed(tmp_path: Path, form: str) -> Path:
    return write(tmp_path / f"one.{form}", range(9))


def test_a_manifest_is_one_dataset(tmp_path, form):
    """All shards of a manifest read as one dataset, empty shards among them, in the order of the manifest."""
    manifest = make_manifest(tmp_path, [3, 0, 4, 0, 2])
    with mm_assets.open(manifest, format=form) as dataset:
        assert len(dataset) == 9
        assert dataset.schema == {"rows": []}
        assert dataset.manifest.dataset == "test"
        assert all(file.location.endswith(form) for file in dataset.manifest.files)
        for i in range(-9, 9):
            assert_same(dataset[i], sample(i % 9))
        assert list(dataset.sample_ids) == [f"id-{i}" for i in range(9)]
        assert dataset.find("id-5") == 5
        assert dataset.find("no") is None
        assert dataset.presence("image").tolist() == [i % 3 != 2 for i in range(9)]
        order = [8, 0, 5, 3, -1, 0]
        assert dataset.read_modality("text", order) == [f"text {i % 9} é" for i in order]
        batch = dataset.read_batch(order, ["label"])["label"]
        assert batch.values.tolist() == [sample(i % 9)["label"] or 0 for i in order]
        report = dataset.verify()
        assert report.ok
        assert report.num_samples == 9
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy[4]["text"] == "text 4 é"
        copy.close()


def test_an_older_manifest_lies_one_folder_deeper(tmp_path):
    """A manifest below manifests/ names files relative to the dataset's folder; a file:// URL opens too."""
    manifest = make_manifest(tmp_path, [2, 1])
    (tmp_path / "manifests").mkdir()
    older = tmp_path / "manifests" / "abc.json"
    older.write_bytes(manifest.read_bytes())
    for location in (older, f"file://{older}"):
        with mm_assets.open(location) as dataset:
            assert_same(dataset[2], sample(2))


def test_a_relative_path_opens(tmp_path, monkeypatch):
    """A manifest in the working folder opens by its bare name."""
    make_manifest(tmp_path, [1])
    monkeypatch.chdir(tmp_path)
    with mm_assets.open("manifest.json") as dataset:
        assert_same(dataset[0], sample(0))


def test_an_empty_manifest(tmp_path):
    """A manifest without shards is a dataset without samples."""
    with mm_assets.open(make_manifest(tmp_path, [])) as dataset:
        assert len(dataset) == 0
        assert list(dataset) == []
        assert dataset.fields == {}
        assert dataset.verify().ok
        with pytest.raises(IndexError):
            dataset[0]


def test_files_open_lazily_and_few_stay_open(tmp_path, monkeypatch):
    """Opening a manifest opens no file; reading opens the files that are read, and a bounded number stay open."""
    manifest = make_manifest(tmp_path, [1] * 6)
    monkeypatch.setattr(shards, "MAX_OPEN", 2)
    counted = mock.patch("mm_assets.dataset.files.open_reader", wraps=packed_files.open_reader)
    with counted as opened, mm_assets.open(manifest) as dataset:
        assert opened.call_count == 0
        dataset[0]
        assert opened.call_count == 1
        dataset[4]
        assert opened.call_count == 2
        for i in range(6):
            assert_same(dataset[i], sample(i))
        count = opened.call_count
        dataset[0]
        dataset[5]
        assert opened.call_count == count, "the first and the last used stay open"
        dataset[4]
        assert opened.call_count == count + 1, "others were let go"


def test_missing_and_changed_files_name_manifest_and_file(tmp_path):
    """A file that is gone, short, or of other samples than the manifest lists is an error that names both."""
    manifest = make_manifest(tmp_path, [2, 2, 2, 2])
    folder = tmp_path / "packed"
    (folder / "part-1.1234abcd.mult").unlink()
    short = folder / "part-2.1234abcd.mult"
    short.write_bytes(short.read_bytes()[:-1])
    flipped = folder / "part-3.1234abcd.mult"
    data = flipped.read_bytes()
    at = data.index("text 7 é".encode())
    flipped.write_bytes(data[:at] + b"T" + data[at + 1 :])
    with mm_assets.open(manifest) as dataset:
        assert_same(dataset[1], sample(1))
        with pytest.raises(SourceError, match=r"manifest\.json.*part-1\.1234abcd\.mult"):
            dataset[2]
        with pytest.raises(CorruptError, match=r"part-2\.1234abcd\.mult.*manifest\.json"):
            dataset[4]
        messages = [(one.sample, one.modality, one.message) for one in dataset.verify().damage]
        assert any("part-1" in message for _, _, message in messages)
        assert any("part-2" in message for _, _, message in messages)
        assert any((sample, name) == (7, "text") for sample, name, _ in messages)
        assert any("SHA-256" in message for _, _, message in messages)
    document = json.loads(manifest.read_text())
    document["shards"][0]["num_samples"], document["num_samples"] = 3, 9
    manifest.write_text(json.dumps(document))
    with mm_assets.open(manifest) as dataset, pytest.raises(CorruptError, match="does not hold the samples"):
        dataset[0]


def test_shards_with_other_fields_are_refused(tmp_path):
    """OpenFiles that disagree in fields are a SchemaMismatchError that names both files and what they have."""
    other = {**FIELDS, "image": ImageField(channels=1)}
    manifest = make_manifest(tmp_path, [2, 2], fields_of=lambda number: other if number else FIELDS)
    with mm_assets.open(manifest) as dataset:
        assert_same(dataset[0], sample(0))
        with pytest.raises(SchemaMismatchError, match=r"part-0\.1234abcd\.mult has.*part-1\.1234abcd\.mult has"):
            dataset[3]
        assert any("differ in fields" in one.message for one in dataset.verify().damage)


def test_settings_that_came_later(tmp_path):
    """A file whose writer did not know a setting opens together with one whose has the setting's default."""
    inner = ImageField(encoding="jpeg")
    fields = {"one": inner, "many": SequenceField(inner), "pair": ImageTextPairField()}
    paths = []
    for number in range(2):
        specs = []
        for name, field in fields.items():
            config = json.loads(json.dumps(field.config))
            if number == 0:
                (config["inner"]["config"] if name == "many" else config).pop("subsampling")
            kind, size = type(field).__name__, field.metadata_type.itemsize
            specs.append(
                ModalitySpec(name=name, type_id=field.TYPE_ID, metadata_size=size, type_name=kind, config=config)
            )
        with MultWriter(tmp_path / f"{number}.mult", specs) as writer:
            encoded = inner.encode(np.full((4, 5, 3), 50 * number, np.uint8))
            writer.write(str(number), {"one": Payload(*encoded)})
        paths.append(writer.path)
    with mm_assets.open(paths) as dataset:
        assert [value.shape for value in dataset.read_batch([0, 1], ["one"])["one"].values] == [(4, 5, 3)] * 2


def test_names_of_modalities(packed):
    """Names come as any iterable, also one that can be gone through only once, but not as one text."""
    with mm_assets.open(packed) as dataset:
        for _ in range(2):
            for names in (["text"], ("text",), iter(["text"]), {"text": 1}):
                assert list(dataset.read_raw([0], names)) == ["text"]
        for method in (dataset.read_raw, dataset.read_batch):
            with pytest.raises(TypeError, match="'text', expected a list of names"):
                method([0], "text")


def _break(document, path, value):
    *parents, last = path
    for key in parents:
        document = document[key]
    if value is KeyError:
        del document[last]
    else:
        document[last] = value


FILE = ("shards", 0, "files", "mult")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("shards",), KeyError),
        (("shards",), {}),
        (("shards", 0), "x"),
        (("dataset",), 5),
        (("schema",), KeyError),
        (("num_samples",), 3),
        (("shards", 0, "num_samples"), -1),
        (("shards", 0, "num_samples"), True),
        (("shards", 0, "num_samples"), "2"),
        (("shards", 0, "partition"), None),
        (("shards", 0, "files"), []),
        (("shards", 0, "files"), {}),
        (("shards", 0, "files"), {"tar": {}}),
        (FILE, "packed/x.mult"),
        ((*FILE, "size"), -1),
        ((*FILE, "size"), KeyError),
        ((*FILE, "sha256"), 5),
        ((*FILE, "path"), ""),
        ((*FILE, "path"), "/etc/passwd"),
        ((*FILE, "path"), "packed/../../secret.mult"),
        ((*FILE, "path"), "s3://elsewhere/x.mult"),
        ((*FILE, "path"), "packed\\x.mult"),
        ((*FILE, "path"), "packed/x\0.mult"),
    ],
)
def test_a_manifest_is_not_trusted(tmp_path, path, value):
    """Every key of a manifest is checked, and no path in it leads out of the dataset's folder."""
    manifest = make_manifest(tmp_path, [2])
    document = json.loads(manifest.read_text())
    _break(document, path, value)
    manifest.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        mm_assets.open(manifest)


@pytest.mark.parametrize("place", [0, 1])
def test_shards_of_different_formats_are_refused(tmp_path, place):
    """A manifest of which one shard lacks a format that another has is damaged; the message names the second shard."""
    manifest = make_manifest(tmp_path, [2, 1])
    document = json.loads(manifest.read_text())
    del document["shards"][place]["files"]["mult"]
    manifest.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match=r"shards\[1\]: files"):
        mm_assets.open(manifest, format="mstr")


@pytest.mark.parametrize("content", ["", "[]", "{", "5", '"x"', "[" * 100_000, "\xff"])
def test_an_invalid_manifest_is_refused(tmp_path, content):
    """Whatever a .json file contains, opening it works or raises FormatError."""
    manifest = tmp_path / "manifest.json"
    manifest.write_text(content, encoding="latin-1")
    with pytest.raises(FormatError, match=r"manifest\.json"):
        mm_assets.open(manifest)


def test_a_later_manifest_version_is_refused(tmp_path):
    """A manifest of another version is refused with its version."""
    manifest = make_manifest(tmp_path, [1])
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(UnsupportedVersionError, match="found 2, expected 1"):
        mm_assets.open(manifest)


def test_a_remote_dataset(tmp_path, form):
    """A packed file and a manifest behind a URL read as local ones do, and pickle."""
    make_manifest(tmp_path, [3, 2])
    memory = fsspec.filesystem("memory")
    for path in tmp_path.rglob("*.*"):
        memory.pipe_file(f"/remote/{path.relative_to(tmp_path)}", path.read_bytes())
    try:
        with mm_assets.open("memory://remote/manifest.json", format=form) as dataset:
            for i in range(5):
                assert_same(dataset[i], sample(i))
            assert dataset.read_modality("text", [4, 0]) == ["text 4 é", "text 0 é"]
            assert dataset.verify().ok
            assert_same(pickle.loads(pickle.dumps(dataset))[1], sample(1))
        with mm_assets.open(f"memory://remote/packed/part-1.1234abcd.{form}") as dataset:
            assert_same(dataset[0], sample(3))
        with pytest.raises(SourceError):
            mm_assets.open("memory://remote/none.mult")
    finally:
        memory.rm("/remote", recursive=True)


def test_bytes_of_any_kind(tmp_path):
    """A field that keeps bytes gives the same bytes by read_raw as were written."""
    path = write(tmp_path / "x.mstr", range(1), fields={"b": BytesField()}, make=lambda _: {"b": b"\0\xff"})
    with mm_assets.open(path) as dataset:
        assert bytes(dataset.read_raw([0], ["b"])["b"][0]) == dataset[0]["b"] == b"\0\xff"
