"""Folders and lists of packed files as one dataset."""

import pickle
from pathlib import Path
from unittest import mock

import fsspec
import pytest

import mm_assets
from mm_assets.dataset import files as packed_files
from mm_assets.dataset import open_files as shards
from mm_assets.errors import (
    ConfigError,
    CorruptError,
    FormatError,
    SchemaMismatchError,
    SourceError,
)
from mm_assets.fields import (
    ImageField,
)

from .samples import FIELDS, assert_same, make_manifest, sample, write


@pytest.fixture
def parts(tmp_path: Path, form: str) -> list[Path]:
    """Three files of 3, 0 and 4 samples, in a folder of their own."""
    folder = tmp_path / "parts"
    folder.mkdir()
    return [
        write(folder / f"{name}.{form}", range(first, last))
        for name, first, last in (("a", 0, 3), ("b", 3, 3), ("c", 3, 7))
    ]


def test_a_list_of_files_is_one_dataset(parts, form):
    """A list is read in its own order, counted through, and reports its damage with the file."""
    with mm_assets.open([parts[2], str(parts[1]), parts[0]], format=form) as dataset:
        assert [found["meta"]["i"] for found in dataset] == [3, 4, 5, 6, 0, 1, 2]
        assert dataset.files == (str(parts[2]), str(parts[1]), str(parts[0]))
        assert dataset.path == f"{parts[2]} and 2 more"
        assert dataset.manifest is None
        assert dataset.fields == FIELDS
        assert dataset.find("id-1") == 5
        assert dataset.presence("image").tolist() == [i % 3 != 2 for i in (3, 4, 5, 6, 0, 1, 2)]
        batch = dataset.read_batch([6, 0, 3], ["label", "text"], threads=2)
        assert batch["text"].values == ["text 2 é", "text 3 é", "text 6 é"]
        assert dataset.verify().ok
        assert_same(pickle.loads(pickle.dumps(dataset))[4], sample(0))
    data = parts[0].read_bytes()
    at = data.index("text 1 é".encode())
    parts[0].write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with mm_assets.open(parts[::-1]) as dataset:
        (found,) = [one for one in dataset.verify().damage if one.modality]
        assert (found.sample, found.sample_id, found.modality) == (5, "id-1", "text")
        assert str(parts[0]) in found.message
        for threads in (0, 2):
            with pytest.raises(FormatError, match="sample 1, modality 'text'") as caught:
                dataset.read_batch([0, 5], threads=threads)
            assert caught.value.path == str(parts[0])


def test_a_folder_is_one_dataset(parts, form):
    """A folder gives its packed files sorted by name, nothing hidden, nothing below it."""
    folder = parts[0].parent
    (folder / "notes.txt").write_text("x")
    (folder / f".c.{form}").write_bytes(b"half")
    (folder / "below").mkdir()
    write(folder / "below" / f"0.{form}", range(1))
    for location in (folder, f"{folder}/", f"file://{folder}"):
        with mm_assets.open(location) as dataset:
            assert [found["meta"]["i"] for found in dataset] == list(range(7))
            assert [Path(file).name for file in dataset.files] == [f"{name}.{form}" for name in "abc"]
    copy = mm_assets.open(folder)
    parts[0].rename(folder / f"z.{form}")
    with pytest.raises(FileNotFoundError, match=f"a.{form}"):
        pickle.loads(pickle.dumps(copy))
    copy.close()


def test_a_copy_reads_the_files_that_were_found(parts, form):
    """A pickled dataset of a folder has the files of the moment it was opened, and opens them as they are read."""
    with mm_assets.open(parts[0].parent) as dataset:
        kept = pickle.dumps(dataset)
    write(parts[0].parent / f"aa.{form}", range(20, 22))
    write(parts[2], range(3, 5))
    with pickle.loads(kept) as copy:
        assert len(copy) == 7
        assert_same(copy[2], sample(2))
        with pytest.raises(
            CorruptError, match=rf"c\.{form}: does not hold the samples that it had \(found 2, expected 4\)"
        ):
            copy[3]


def test_a_folder_of_both_formats_needs_one_to_be_chosen(tmp_path):
    """Where a folder holds MULT and MSTR files, `format` says which; nothing is read twice by accident."""
    for form in ("mult", "mstr"):
        write(tmp_path / f"x.{form}", range(2))
    with pytest.raises(ConfigError, match=r"both mult and mstr.*which"):
        mm_assets.open(tmp_path)
    for form in ("mult", "mstr"):
        with mm_assets.open(tmp_path, format=form) as dataset:
            assert [Path(file).suffix for file in dataset.files] == [f".{form}"]
    with pytest.raises(SchemaMismatchError, match=r"x\.mstr: found a MSTR file, expected mult"):
        mm_assets.open([tmp_path / "x.mult", tmp_path / "x.mstr"], format="mult")


def test_a_folder_with_a_manifest_opens_by_it(tmp_path, form):
    """A dataset's folder is its manifest; two versions of a shard beside each other are refused without one."""
    make_manifest(tmp_path, [2, 1])
    with mm_assets.open(tmp_path, format=form) as dataset:
        assert dataset.manifest.dataset == "test"
        assert_same(dataset[2], sample(2))
    packed_folder = tmp_path / "packed"
    with mm_assets.open(packed_folder, format=form) as dataset:
        assert len(dataset) == 3
    other = "9" * 16
    write(packed_folder / f"part-0.{other}.{form}", range(2))
    with pytest.raises(SourceError, match=r"two versions of one shard, part-0\.\w{16}\..* and part-0\.\w{16}\."):
        mm_assets.open(packed_folder, format=form)


def test_lists_and_folders_without_files_are_refused(tmp_path, parts, form):
    """An empty list, a folder without packed files, and a list with a missing or foreign file are errors that tell."""
    with pytest.raises(ConfigError, match="empty list"):
        mm_assets.open([])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SourceError, match=r"holds no \.mult or \.mstr file"):
        mm_assets.open(empty)
    other = "mult" if form == "mstr" else "mstr"
    with pytest.raises(SourceError, match=rf"holds no \.{other} file"):
        mm_assets.open(parts[0].parent, format=other)
    with pytest.raises(FileNotFoundError, match="none"):
        mm_assets.open([parts[0], tmp_path / "none.mult"])
    (tmp_path / "x.mult").write_bytes(b"no such format, but long enough")
    with pytest.raises(FormatError, match=r"x\.mult"):
        mm_assets.open([parts[0], tmp_path / "x.mult"])


def test_files_of_a_list_must_have_the_same_fields(tmp_path, form):
    """Files that disagree in fields are refused at opening, and none of them stays open."""
    paths = [
        write(tmp_path / f"a.{form}", range(2)),
        write(tmp_path / f"b.{form}", range(2), fields={**FIELDS, "image": ImageField(channels=1)}),
    ]
    with (
        mock.patch.object(packed_files.MappedFile, "close", autospec=True) as closed,
        pytest.raises(SchemaMismatchError, match=rf"a\.{form} has.*b\.{form} has"),
    ):
        mm_assets.open(paths)
    assert closed.call_count == 2


def test_of_a_long_list_few_files_stay_open(tmp_path, monkeypatch, form):
    """However many files a list has, a bounded number is open, and each reads."""
    monkeypatch.setattr(shards, "MAX_OPEN", 2)
    monkeypatch.setattr(packed_files, "MAX_OPEN", 2)
    paths = [write(tmp_path / f"{i}.{form}", range(i, i + 1)) for i in range(6)]
    counted = mock.patch("mm_assets.dataset.files.open_reader", wraps=packed_files.open_reader)
    with counted as opened, mm_assets.open(paths) as dataset:
        assert opened.call_count == 6
        dataset[0]
        dataset[1]
        assert opened.call_count == 6
        for i in range(6):
            assert_same(dataset[i], sample(i))
        assert opened.call_count == 10
        assert [found["meta"]["i"] for found in dataset] == list(range(6))


def test_remote_folders_and_lists(tmp_path, form):
    """A folder and a list behind URLs read as local ones do, with the file system's options, and pickle."""
    memory = fsspec.filesystem("memory")
    for name, indices in (("a", range(3)), ("b", range(3, 5))):
        memory.pipe_file(f"/far/{name}.{form}", write(tmp_path / f"{name}.{form}", indices).read_bytes())
    make_manifest(tmp_path / "whole", [1])
    for path in (tmp_path / "whole").rglob("*.*"):
        memory.pipe_file(f"/whole/{path.relative_to(tmp_path / 'whole')}", path.read_bytes())
    try:
        for location in ("memory://far", "memory://far/", [f"memory://far/{name}.{form}" for name in "ab"]):
            with mm_assets.open(location) as dataset:
                assert [found["meta"]["i"] for found in dataset] == list(range(5))
                assert dataset.files == (f"memory://far/a.{form}", f"memory://far/b.{form}")
                batch = dataset.read_batch([4, 0], threads=2)
                assert batch["text"].values == ["text 4 é", "text 0 é"]
                assert [bytes(one) for one in dataset.read_raw([4, 0], ["text"])["text"]] == [
                    b"text 4 \xc3\xa9",
                    b"text 0 \xc3\xa9",
                ]
                assert_same(pickle.loads(pickle.dumps(dataset))[3], sample(3))
        with mm_assets.open("memory://whole", format=form) as dataset:
            assert dataset.manifest is not None
            assert_same(dataset[0], sample(0))
        memory.mkdir("/bare")
        with pytest.raises(SourceError, match="holds no"):
            mm_assets.open("memory://bare")
        with pytest.raises(SourceError):
            mm_assets.open("memory://nowhere")
    finally:
        for folder in ("/far", "/whole", "/bare"):
            memory.rm(folder, recursive=True)
