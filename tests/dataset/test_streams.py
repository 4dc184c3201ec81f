"""Streams of a dataset: files of added modalities, read beside the packed files as if they were in them."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import mm_assets
from mm_assets import Dataset
from mm_assets.dataset import open_files
from mm_assets.dataset.add_stream import write_stream
from mm_assets.errors import CorruptError, SchemaMismatchError, SourceError
from mm_assets.fields import ImageField, NDArrayField, SequenceField, TextField
from mm_assets.formats import fast_path

from .samples import FIELDS, make_manifest, sample, stream_path, write

STREAMS = {
    "caption": TextField(),
    "vector": NDArrayField("float32", (2,)),
    "frames": SequenceField(TextField()),
}
COUNTS = [5, 0, 9, 4]
COUNT = sum(COUNTS)


def value_of(name: str, i: int) -> Any:
    """A value of a stream; every fifth caption is absent, and all frames of some samples."""
    if name == "caption":
        return None if i % 5 == 1 else f"caption {i}"
    if name == "vector":
        return np.array([i, -i], np.float32)
    return None if i % 2 else [(0, f"frame {i}"), (1, "é")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with streams, and beside it files that have the same modalities in one file each."""
    folder = tmp_path_factory.mktemp("streams")
    make_manifest(folder / "joined", COUNTS, streams=STREAMS, value_of=value_of)
    first = 0
    for form in ("mult", "mstr"):
        (folder / form).mkdir()
        for number, first in enumerate(np.cumsum([0, *COUNTS[:-1]]).tolist()):
            indices = range(first, first + COUNTS[number])
            fields = {**FIELDS, "caption": STREAMS["caption"], "frames": STREAMS["frames"], "vector": STREAMS["vector"]}
            write(folder / form / f"{number}.{form}", indices, fields=fields, make=whole)
    return folder


def whole(i: int) -> dict[str, Any]:
    return {**sample(i), **{name: value_of(name, i) for name in STREAMS}}


@pytest.fixture(params=["local", "remote"])
def pair(request: pytest.FixtureRequest, folder: Path, form: str) -> Iterator[tuple[Dataset, Dataset]]:
    """The dataset with streams, local or remote, and the one of single files."""
    location = str(folder / "joined" / "manifest.json")
    memory = fsspec.filesystem("memory")
    if request.param == "remote":
        memory.put(str(folder / "joined"), "/streams", recursive=True)
        location = "memory://streams/manifest.json"
    with mm_assets.open(location, format=form) as joined, mm_assets.open(folder / form) as single:
        yield joined, single
    if request.param == "remote":
        memory.rm("/streams", recursive=True)


def plain(value: Any) -> Any:
    """A result as values that compare: arrays as lists, views as bytes."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return bytes(value) if isinstance(value, memoryview) else value


def scanned(data: Dataset, names: list[str] | None) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for block in data.stream_raw(None, names):
        for name, views in block.items():
            found.setdefault(name, []).extend(views)
    return found


ORDER = [17, 0, 5, 5, -1, 13, 4]
MIXED = ["vector", "text", "caption", "image"]
CALLS: dict[str, Callable[[Dataset], Any]] = {
    "samples": list,
    "sample": lambda data: data.read_sample(7, MIXED),
    "list": lambda data: data[ORDER],
    "slice": lambda data: data[2:9],
    "modality": lambda data: data.read_modality("caption", ORDER),
    "batch": lambda data: data.read_batch(ORDER, ["vector", "label", "caption"]),
    "threads": lambda data: data.read_batch(ORDER, ["image", "vector"], threads=2),
    "unverified": lambda data: data.read_batch(ORDER, ["vector"], verify=False),
    "arrow": lambda data: data.to_arrow(ORDER, ["vector", "text", "caption"], raw=["text"]).to_pylist(),
    "raw one": lambda data: data.read_raw([3], MIXED),
    "raw": lambda data: [data.read_raw(ORDER, names) for names in (MIXED, ["text"], ["caption"], None, []) * 9],
    "raw stream": lambda data: list(data.stream_raw([ORDER, [2], range(COUNT)], MIXED)),
    "raw scan": lambda data: [scanned(data, names) for names in (None, MIXED, ["vector"], ["text"])],
    "stored": lambda data: {
        name: [
            payload and (payload.metadata(), payload.read(0, payload.size), payload.is_whole()) for payload in column
        ]
        for name, column in data.stored(ORDER, MIXED).items()
    },
    "presence": lambda data: [data.presence(name) for name in data.names],
    "records": lambda data: [[plain(part) for part in data.scan_records(name)] for name in ("text", "caption")],
    "columns": lambda data: [
        table.to_pylist() for table in data.scan_columns(["sample_id", "present_caption", "size_vector", "size_text"])
    ],
    "filter": lambda data: list(
        data.filter("present_caption and caption.num_code_points > 9 and present_image").sample_ids
    ),
    "view": lambda data: data.select(ORDER).select_modalities(["caption", "text"])[1:4],
    "view raw": lambda data: data.select(range(COUNT - 1, -1, -1)).read_raw([0, 3], MIXED),
    "settings": lambda data: data.with_settings({"image": {"channels": 1}})[3]["image"].shape,
    "ids": lambda data: [list(data.sample_ids), data.find("id-9"), data.sample_ids.containing("-1", 2, 15)],
    "copy": lambda data: pickle.loads(pickle.dumps(data)).read_raw(ORDER, MIXED),
}


@pytest.mark.parametrize("call", CALLS)
def test_streams_read_like_modalities_of_the_packed_file(pair: tuple[Dataset, Dataset], call: str) -> None:
    """Every way to read gives what it gives of files that have all modalities themselves."""
    joined, single = pair
    assert plain(CALLS[call](joined)) == plain(CALLS[call](single))


def test_names_and_items(pair: tuple[Dataset, Dataset]) -> None:
    """Streams come after the packed modalities, sorted by name; the items of sequences in local ones have records."""
    joined, single = pair
    assert joined.names == (*FIELDS, "caption", "frames", "vector")
    assert joined.fields == single.fields
    if joined.path.startswith("memory:"):
        assert len(joined.item_records("frames", range(COUNT))) == 0
    else:
        records = joined.item_records("frames", range(COUNT))
        np.testing.assert_array_equal(records, single.item_records("frames", range(COUNT)))
    assert joined.verify().ok
    assert joined.verify().num_payloads == single.verify().num_payloads


def test_verified_raw_reads(folder: Path, form: str) -> None:
    """A dataset that verifies all reads gives the same raw bytes and scans."""
    with mm_assets.open(folder / "joined", format=form, verify=True) as data, mm_assets.open(folder / form) as single:
        assert data.read_raw(ORDER, MIXED) == single.read_raw(ORDER, MIXED)
        assert scanned(data, MIXED) == scanned(single, MIXED)


def test_one_partition(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single file with streams reads raw batches from cached bounds too, also where a scan has many small blocks."""
    monkeypatch.setattr(fast_path, "SCAN_ROWS", 7)
    monkeypatch.setattr(fast_path, "SCAN_VIEWS", 6)
    manifest = make_manifest(tmp_path / "joined", [COUNT], streams=STREAMS, value_of=value_of)
    expected = [whole(i) for i in range(COUNT)]
    with mm_assets.open(manifest, format=form) as data:
        names = ("caption", "text")
        for _ in range(9):
            found = data.read_raw(np.array(ORDER), names)
            assert list(found) == ["caption", "text"]
            assert plain(found["caption"]) == [
                None if (text := expected[i]["caption"]) is None else text.encode() for i in ORDER
            ]
            assert plain(data.read_raw(np.array(ORDER), ("text",))["text"]) == plain(found["text"])
        assert plain(scanned(data, ["vector", "text"])) == plain(data.read_raw(range(COUNT), ["vector", "text"]))
        with pytest.raises(IndexError):
            data.read_raw([COUNT], ("caption", "text"))
        with pytest.raises(KeyError, match="'no'"):
            data.read_raw([0, 1], ["no"])
        view = data.read_raw([0], ["caption"])["caption"][0]
    assert bytes(view) == b"caption 0"
    with pytest.raises(ValueError, match="is closed"):
        data.read_raw([0, 1], names)


def test_few_files_stay_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of open files is bounded with their streams: a file with three streams counts as four."""
    monkeypatch.setattr(open_files, "MAX_OPEN", 8)
    before = len(os.listdir("/proc/self/fd"))
    with mm_assets.open(folder / "joined") as data:
        for i in range(COUNT):
            assert data[i]["vector"].tolist() == [i, -i]
            assert len(os.listdir("/proc/self/fd")) - before <= 2 * 8
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stream_that_some_partition_lacks(tmp_path: Path) -> None:
    """A stream is a modality of the dataset only if every partition has it."""
    manifest = make_manifest(tmp_path, [2, 1], streams={"caption": TextField(), "other": TextField()})
    document = json.loads(manifest.read_text())
    for column in document["partitions"]["streams"]["caption"].values():
        column[1] = None
    manifest.write_text(json.dumps(document))
    with mm_assets.open(manifest) as data:
        assert data.names == (*FIELDS, "other")
        assert data[2]["other"] == "other 2"
        assert data.verify().ok


# --- what is refused --------------------------------------------------------------------------------------------------


def replace_stream(folder: Path, number: int, path: Path) -> None:
    """Lists another file as the stream "caption" of a partition."""
    document = json.loads((folder / "manifest.json").read_text())
    place = stream_path(folder, number, "caption")
    shutil.move(path, place)
    document["partitions"]["streams"]["caption"]["size"][number] = place.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(document))


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "ids": (
        lambda path: write_stream(path, "caption", TextField(), ["a", "b"], ["id-2", "id-4"]),
        r"has other sample ids than \S*packed/part-1\.\w+\.mult, or another order",
    ),
    "order": (
        lambda path: write_stream(path, "caption", TextField(), ["a", "b"], ["id-3", "id-2"]),
        r"has other sample ids than \S*packed/part-1\.\w+\.mult, or another order",
    ),
    "count": (
        lambda path: write_stream(path, "caption", TextField(), ["a"], ["id-2"]),
        r"has 1 samples, and \S*packed/part-1\.\w+\.mult has 2",
    ),
    "name": (
        lambda path: write_stream(path, "title", TextField(), ["a", "b"], ["id-2", "id-3"]),
        "found MSTR with title, expected MSTR with caption alone",
    ),
    "format": (
        lambda path: write(
            path.rename(path.with_suffix(".mult")), range(2, 4), fields={"caption": TextField()}, make=lambda _: {}
        ),
        "found MULT with caption",
    ),
    "field": (
        lambda path: write_stream(path, "caption", ImageField(), [None, None], ["id-2", "id-3"]),
        r"differ in fields: .*caption: TextField.*caption: ImageField",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_stream_of_other_samples(tmp_path: Path, other: str) -> None:
    """A stream that does not belong to the packed file is refused when the file is first read; both are named."""
    folder = tmp_path / "data"
    make_manifest(folder, [2, 2], streams={"caption": TextField()})
    make, message = OTHERS[other]
    (tmp_path / "new.mstr").touch()
    make(tmp_path / "new.mstr")
    (made,) = tmp_path.glob("new.*")
    replace_stream(folder, 1, made)
    before = len(os.listdir("/proc/self/fd"))
    with mm_assets.open(folder, format="mult") as data:
        assert data[0]["caption"] == "caption 0"
        with pytest.raises(SchemaMismatchError, match=message) as error:
            data[2]
        assert str(stream_path(folder, 1, "caption")) in str(error.value) or other == "field"
        assert any(one.message == str(error.value) for one in data.verify().damage)
    del error
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stream_with_the_name_of_a_packed_modality(tmp_path: Path) -> None:
    """Two files with a modality of one name are refused; both are named."""
    make_manifest(tmp_path, [2], streams={"text": TextField()})
    message = r"streams/part-0.*'text' is already in .*packed/part-0"
    with mm_assets.open(tmp_path) as data, pytest.raises(SchemaMismatchError, match=message):
        data[0]


def test_missing_and_damaged_streams(tmp_path: Path) -> None:
    """A stream that is missing, short or damaged is reported like a packed file, with its own name."""
    folder = tmp_path / "data"
    manifest = make_manifest(folder, [2, 2, 2, 2], streams={"caption": TextField()})
    missing, short, damaged = (stream_path(folder, number, "caption") for number in (1, 2, 3))
    missing.unlink()
    short.write_bytes(short.read_bytes()[:-1])
    damaged.write_bytes(damaged.read_bytes().replace(b"caption 7", b"C\xffption 7"))
    with mm_assets.open(manifest) as data:
        with pytest.raises(SourceError, match=rf"manifest\.json: partition 'part-1': {missing} cannot be read"):
            data[2]
        with pytest.raises(CorruptError, match=rf"{short}: is not of the size"):
            data[4]
        with pytest.raises(CorruptError) as error:
            data[7]
        assert (error.value.path, error.value.sample, error.value.modality) == (str(damaged), 1, "caption")
        assert data.read_sample(7, ["text"])["text"] == "text 7 é"
        report = data.verify()
        assert any(str(missing) in one.message for one in report.damage)
        assert any(str(short) in one.message for one in report.damage)
        (one,) = [one for one in report.damage if one.modality == "caption"]
        assert (one.sample, one.sample_id) == (7, "id-7")
        assert f"{damaged}: " in one.message
        assert any(one.message.startswith(f"{damaged}: SHA-256") for one in report.damage)
    for call in (
        lambda data: data[7],
        lambda data: data.read_modality("caption", [6, 7]),
        lambda data: data.read_batch([6, 7], ["text", "caption"]),
    ):
        with mm_assets.open(manifest, verify=False) as data, pytest.raises(CorruptError, match="UTF-8") as error:
            call(data)
        assert (error.value.path, error.value.sample) == (str(damaged), 1)
