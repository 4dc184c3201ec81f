"""A manifest as one dataset: its files, what is refused, remote ones."""

import json
import pickle
import shutil
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.dataset import files as packed_files
from mm_assets.dataset import manifest as manifests
from mm_assets.dataset import open_files as shards
from mm_assets.dataset.manifest import (
    FILE_DIGITS,
    PACKED_NAME,
    ManifestPartition,
    file_path,
    manifest_partitions,
    packed_name,
    parse_manifest,
)
from mm_assets.errors import (
    ConfigError,
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
    TextField,
)
from mm_assets.formats import ModalitySpec, MultWriter, Payload

from .samples import FIELDS, assert_same, make_manifest, packed_path, sample, write


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
    packed_path(tmp_path, 1).unlink()
    short = packed_path(tmp_path, 2)
    short.write_bytes(short.read_bytes()[:-1])
    flipped = packed_path(tmp_path, 3)
    data = flipped.read_bytes()
    at = data.index("text 7 é".encode())
    flipped.write_bytes(data[:at] + b"T" + data[at + 1 :])
    with mm_assets.open(manifest) as dataset:
        assert_same(dataset[1], sample(1))
        with pytest.raises(SourceError, match=r"manifest\.json.*part-1\.[0-9a-f]{16}\.mult"):
            dataset[2]
        with pytest.raises(CorruptError, match=r"part-2\.[0-9a-f]{16}\.mult.*manifest\.json"):
            dataset[4]
        messages = [(one.sample, one.modality, one.message) for one in dataset.verify().damage]
        assert any("part-1" in message for _, _, message in messages)
        assert any("part-2" in message for _, _, message in messages)
        assert any((sample, name) == (7, "text") for sample, name, _ in messages)
        assert any("SHA-256" in message for _, _, message in messages)
    document = json.loads(manifest.read_text())
    document["partitions"]["num_samples"][0], document["num_samples"] = 3, 9
    manifest.write_text(json.dumps(document))
    with mm_assets.open(manifest) as dataset, pytest.raises(CorruptError, match="does not hold the samples"):
        dataset[0]


def test_shards_with_other_fields_are_refused(tmp_path):
    """OpenFiles that disagree in fields are a SchemaMismatchError that names both files and what they have."""
    other = {**FIELDS, "image": ImageField(channels=1)}
    manifest = make_manifest(tmp_path, [2, 2], fields_of=lambda number: other if number else FIELDS)
    with mm_assets.open(manifest) as dataset:
        assert_same(dataset[0], sample(0))
        with pytest.raises(
            SchemaMismatchError, match=r"part-0\.[0-9a-f]{16}\.mult has.*part-1\.[0-9a-f]{16}\.mult has"
        ):
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


COLUMNS = "partitions"
DEEP: list = []
for _ in range(200):  # nested, but not too deeply for JSON
    DEEP = [DEEP]
PACKED = (COLUMNS, "packed", "mult")
TABLE = (COLUMNS, "tables", "rows")
STREAM = (COLUMNS, "streams", "score")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), True, "is not a manifest"),
        (("dataset",), 5, r"dataset \(found int 5, expected a text\)"),
        (("schema",), KeyError, r"schema \(found nothing, expected an object\)"),
        (("num_samples",), 4, r"num_samples is not the sum .* \(found 4, expected 3\)"),
        (("num_samples",), 3.0, "num_samples"),
        (("losses",), [], "losses"),
        (("losses",), {"rows": {"x": {"count": -1}}}, r"losses\.rows\.x\.count"),
        (("duplicate_ids",), None, "duplicate_ids"),
        (("settings",), KeyError, "settings"),
        (("added_streams", 0), "score", r"added_streams\[0\]"),
        (("added_streams", 0, "name"), 3, r"added_streams\[0\]\.name"),
        ((COLUMNS,), [], r"partitions \(found list of 0, expected an object\)"),
        ((COLUMNS, "key", 1), DEEP, r"partitions\.key\[1\] \(found list of 1, "),
        ((COLUMNS, "key"), {}, r"partitions\.key"),
        ((COLUMNS, "key", 1), "../x", r"partitions\.key\[1\] \(found str '../x', expected a file name"),
        ((COLUMNS, "key", 1), "..", r"partitions\.key\[1\]"),
        ((COLUMNS, "key", 1), "", r"partitions\.key\[1\]"),
        ((COLUMNS, "key", 1), "a/b", r"partitions\.key\[1\]"),
        ((COLUMNS, "key", 1), "a\\b", r"partitions\.key\[1\]"),
        ((COLUMNS, "key", 1), "a\0", r"partitions\.key\[1\]"),
        ((COLUMNS, "key", 1), "a\n", r"partitions\.key\[1\]"),
        ((COLUMNS, "key", 1), "s3:", r"partitions\.key\[1\]"),
        ((COLUMNS, "key", 1), None, r"partitions\.key\[1\]"),
        ((COLUMNS, "key", 1), "part-0", r"partitions\.key\[1\] \(found 'part-0', expected each key once\)"),
        ((COLUMNS, "recipe", 0), "0" * 15, r"partitions\.recipe\[0\]"),
        ((COLUMNS, "recipe", 0), "\ud800" * 16, r"partitions\.recipe\[0\]"),
        ((COLUMNS, "num_samples"), [3], r"partitions\.num_samples: its items \(found 1, expected 2"),
        ((COLUMNS, "num_samples", 1), -1, r"partitions\.num_samples\[1\]"),
        ((COLUMNS, "num_samples", 1), True, r"partitions\.num_samples\[1\]"),
        ((COLUMNS, "num_samples", 1), "2", r"partitions\.num_samples\[1\]"),
        ((COLUMNS, "num_samples", 1), 2**63, r"partitions\.num_samples\[1\]"),
        ((COLUMNS, "packed"), {}, r"partitions\.packed \(found nothing, expected mult or mstr\)"),
        ((COLUMNS, "packed"), KeyError, r"partitions\.packed"),
        ((COLUMNS, "packed", "tar"), {"size": [1, 2], "sha256": ["0" * 64] * 2}, r"partitions\.packed"),
        (PACKED, [], r"partitions\.packed\.mult"),
        ((*PACKED, "size"), KeyError, r"partitions\.packed\.mult\.size"),
        ((*PACKED, "size", 1), -1, r"partitions\.packed\.mult\.size\[1\]"),
        ((*PACKED, "size", 1), None, r"partitions\.packed\.mult\.size\[1\]"),
        ((*PACKED, "sha256", 1), "0" * 16, r"partitions\.packed\.mult\.sha256\[1\]"),
        ((*PACKED, "sha256", 1), "A" * 64, r"partitions\.packed\.mult\.sha256\[1\]"),
        ((*PACKED, "sha256", 1), "../" + "0" * 61, r"partitions\.packed\.mult\.sha256\[1\]"),
        ((*TABLE, "size", 0), 1.5, r"partitions\.tables\.rows\.size\[0\]"),
        ((*TABLE, "sha256", 0), "0" * 64, r"partitions\.tables\.rows\.sha256\[0\]"),
        ((*TABLE, "sha256"), ["0" * 16] * 3, r"partitions\.tables\.rows\.sha256: its items"),
        ((COLUMNS, "tables", "../x"), {"size": [], "sha256": []}, r"partitions\.tables\[2\]"),
        ((*STREAM, "size", 0), None, r"partitions\.streams\.score\.size\[0\] .* expected null like its sha256"),
        ((*STREAM, "sha256", 1), None, r"partitions\.streams\.score\.size\[1\]"),
        ((*STREAM, "sha256", 1), 7, r"partitions\.streams\.score\.sha256\[1\]"),
        ((COLUMNS, "decodable", "mode"), KeyError, r"partitions\.decodable\.mode"),
        ((COLUMNS, "decodable", "judged", 0), "1", r"partitions\.decodable\.judged\[0\]"),
        ((COLUMNS, "losses", "part-7"), {}, r"partitions\.losses \(found 'part-7'"),
        ((COLUMNS, "losses", "part-1"), [], r"partitions\.losses\.part-1"),
        ((COLUMNS, "losses", "part-1"), {"rows": {"x": {}}}, r"partitions\.losses\.part-1\.rows\.x\.count"),
    ],
)
def test_a_manifest_is_not_trusted(tmp_path, path, value, message):
    """Every number and name of a manifest is checked, and the error names the column and the partition's index."""
    manifest = make_manifest(tmp_path, [2, 1], streams={"score": TextField()})
    document = json.loads(manifest.read_text())
    _break(document, path, value)
    manifest.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match=r"manifest\.json: " + message):
        mm_assets.open(manifest, format="mstr")
    with pytest.raises(CorruptError, match=message):
        manifest_partitions(document, name="manifest.json")


FILE = st.tuples(st.integers(0, 2**63 - 1), st.text("0123456789abcdef", min_size=64, max_size=64))
DIGITS = st.text("0123456789abcdef", min_size=16, max_size=16)
NAMES = st.text("abcXYZ019._%-", min_size=1).filter(lambda name: name not in (".", ".."))
LOSSES = st.dictionaries(
    st.text(),
    st.dictionaries(st.text(), st.fixed_dictionaries({"count": st.integers(0, 9), "example": st.just({"row": 1})})),
    max_size=2,
)


@st.composite
def partition_lists(draw):
    """Partitions as a pipeline has them: of one set of formats and tables, some with streams."""
    formats = draw(st.lists(st.sampled_from(["mult", "mstr"]), min_size=1, unique=True))
    tables, streams = draw(st.lists(NAMES, max_size=3, unique=True)), draw(st.sets(st.text(), max_size=3))
    return [
        ManifestPartition(
            key=key,
            recipe=draw(DIGITS),
            num_samples=draw(st.integers(0, 2**50)),
            packed={form: draw(FILE) for form in formats},
            tables={table: draw(st.tuples(st.integers(0, 2**50), DIGITS)) for table in tables},
            streams={name: draw(FILE) for name in streams if draw(st.booleans())},
            decodable={
                "mode": draw(st.text()),
                "on_undecodable": "keep",
                "judged": 5,
                "undecodable": draw(st.integers(0, 5)),
            },
            losses=draw(LOSSES),
        )
        for key in draw(st.lists(NAMES, max_size=4, unique=True))
    ]


def document_of(partitions, **changed):
    given = {"schema": {}, "added": [], "losses": {}, "duplicate_ids": None, "settings": {}, **changed}
    return manifests.make_manifest(dataset="d", partitions=partitions, **given)


@settings(max_examples=100, deadline=None)
@given(partition_lists())
def test_a_manifest_holds_what_it_was_made_of(partitions):
    """Partitions that were written as columns of JSON and read again are equal, in the same order."""
    document = json.loads(json.dumps(document_of(partitions)))
    assert list(manifest_partitions(document, name="m").values()) == partitions
    for form in partitions[0].packed if partitions else ():
        parsed = parse_manifest(json.dumps(document).encode(), name="x/manifest.json", form=form)
        assert [file.partition for file in parsed.files] == [one.key for one in partitions]
        assert [(file.size, file.sha256) for file in parsed.files] == [one.packed[form] for one in partitions]
        assert list(parsed.recipes) == [one.recipe for one in partitions]


def test_a_format_that_a_manifest_lacks():
    """A format that the dataset is not packed in is refused by name."""
    content = json.dumps(document_of([partition_of("a")])).encode()
    assert parse_manifest(content, name="m").formats == ("mult",)
    with pytest.raises(ConfigError, match="found 'mstr', but m lists only mult files"):
        parse_manifest(content, name="m", form="mstr")


def test_optional_parts_of_a_manifest():
    """Digests of tables are shortened; what was not counted or added is left out; other tables per partition fail."""
    (partition,) = manifest_partitions(
        document_of([partition_of("a", tables={"rows": (1, "ab" * 32)})]), name="m"
    ).values()
    assert partition.tables == {"rows": (1, "ab" * 8)}
    assert not {"duplicate_ids", "added_streams"} & document_of([]).keys()
    both = document_of([], duplicate_ids={"count": 0}, added=[{"name": "x"}])
    assert (both["duplicate_ids"], both["added_streams"]) == ({"count": 0}, [{"name": "x"}])
    with pytest.raises(ValueError, match=r"tables: 'b' has \['rows'\], but 'a' has \[\]"):
        document_of([partition_of("a"), partition_of("b", tables={"rows": (1, "0" * 16)})])


def partition_of(key, **changed):
    facts = {"mode": "full", "on_undecodable": "keep", "judged": 0, "undecodable": 0}
    given = {"packed": {"mult": (1, "0" * 64)}, "tables": {}, "streams": {}, "decodable": facts, "losses": {}}
    return ManifestPartition(key=key, recipe="0" * 16, num_samples=0, **(given | changed))


def test_file_paths():
    """The path of a data file follows from its kind, partition and digest, and packed names are recognized."""
    digest = "0123456789abcdef" * 4
    assert file_path("mult", "a.b", digest) == "packed/a.b.0123456789abcdef.mult"
    assert file_path("mstr", "a", digest) == f"packed/{packed_name('a', sha256=digest, form='mstr')}"
    assert file_path("stream", "a", digest) == "streams/a.0123456789abcdef.mstr"
    assert file_path("rows", "a", digest[:FILE_DIGITS]) == "rows/a.0123456789abcdef.parquet"
    assert PACKED_NAME.fullmatch("a.b.0123456789abcdef.mult")[1] == "a.b"
    assert PACKED_NAME.fullmatch("a.01234567.mult") is None


def test_tables_of_a_version(tmp_path):
    """`tables` lists the files of one table in order, local or below a URL, of a manifest, an older one or a folder."""
    manifest = make_manifest(tmp_path, [2, 0, 1])
    (tmp_path / "manifests").mkdir()
    older = shutil.copyfile(manifest, tmp_path / "manifests" / "abc.json")
    expected = [f"rows of part-{number}" for number in range(3)]
    for location in (manifest, older, tmp_path, f"{tmp_path}/"):
        paths = mm_assets.tables(location, "rows")
        assert all(path.startswith(f"{tmp_path}/rows/part-") for path in paths)
        assert [Path(path).read_text() for path in paths] == expected
    assert mm_assets.tables(f"file://{manifest}", "rows") == [
        f"file://{path}" for path in mm_assets.tables(manifest, "rows")
    ]
    with mm_assets.open(manifest) as dataset:
        assert dataset.manifest.tables("filtered_rows") == mm_assets.tables(manifest, "filtered_rows")
        assert pickle.loads(pickle.dumps(dataset)).manifest.tables("rows") == paths
    with pytest.raises(ConfigError, match=r"found 'samples', but .*manifest\.json lists filtered_rows, rows"):
        mm_assets.tables(manifest, "samples")


@pytest.mark.parametrize("folder", ["plain", "key=value", "part-*", "[ab]", "what?", "a b%20'c"])
def test_tables_of_other_tools(tmp_path, monkeypatch, folder):
    """The paths of a version's tables are read by Arrow and DuckDB as they are, and by patterns only if escaped."""
    import duckdb
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    from mm_assets.rows.sql import literal

    (tmp_path / folder).mkdir()
    manifest = make_manifest(tmp_path / folder, [2, 1])
    paths = mm_assets.tables(manifest, "rows")
    for number, path in enumerate(paths):
        pq.write_table(pa.table({"key": [number]}), path)
    other = Path(paths[0]).with_name("part-0.0000000000000000.parquet")  # of another version
    shutil.copyfile(paths[0], other)
    assert ds.dataset(paths).to_table().to_pydict() == {"key": [0, 1]}
    assert pq.read_table(paths, partitioning=None).to_pydict() == {"key": [0, 1]}
    relation = duckdb.read_parquet([literal(path) for path in paths], hive_partitioning=False)
    assert relation.fetchall() == [(0,), (1,)]


def test_tables_of_a_relative_manifest(tmp_path, monkeypatch):
    """Paths of a manifest in the working folder are relative to it."""
    make_manifest(tmp_path, [1])
    monkeypatch.chdir(tmp_path)
    (path,) = mm_assets.tables("manifest.json", "rows")
    assert path.startswith("rows/part-0.")
    assert Path(path).read_text() == "rows of part-0"


@pytest.mark.parametrize("content", ["", "[]", "{", "5", '"x"', "[" * 100_000, "\xff"])
def test_an_invalid_manifest_is_refused(tmp_path, content):
    """Whatever a .json file contains, opening it works or raises FormatError."""
    manifest = tmp_path / "manifest.json"
    manifest.write_text(content, encoding="latin-1")
    with pytest.raises(FormatError, match=r"manifest\.json"):
        mm_assets.open(manifest)


@pytest.mark.parametrize(("version", "advice"), [(1, "an older mm-assets"), (3, "a newer mm-assets")])
def test_another_manifest_version_is_refused(tmp_path, version, advice):
    """A manifest of another version is refused with its version and what to do."""
    manifest = make_manifest(tmp_path, [1])
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({"version": version, "shards": []} if version == 1 else document | {"version": 3}))
    with pytest.raises(UnsupportedVersionError, match=rf"{advice}.* \(found {version}, expected 2\)"):
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
        with mm_assets.open(f"memory://remote/packed/{packed_path(tmp_path, 1, form).name}") as dataset:
            assert_same(dataset[0], sample(3))
        for location in ("memory://remote/manifest.json", "memory://remote/"):
            first, second = mm_assets.tables(location, "rows", storage_options={})
            assert first.startswith("memory://remote/rows/part-0.")
            assert memory.cat_file(second) == b"rows of part-1"
        with pytest.raises(SourceError):
            mm_assets.open("memory://remote/none.mult")
    finally:
        memory.rm("/remote", recursive=True)


def test_bytes_of_any_kind(tmp_path):
    """A field that keeps bytes gives the same bytes by read_raw as were written."""
    path = write(tmp_path / "x.mstr", range(1), fields={"b": BytesField()}, make=lambda _: {"b": b"\0\xff"})
    with mm_assets.open(path) as dataset:
        assert bytes(dataset.read_raw([0], ["b"])["b"][0]) == dataset[0]["b"] == b"\0\xff"
