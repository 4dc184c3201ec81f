"""Stored bytes out of a dataset: batches of several modalities and files, streams of batches, scans."""

import itertools

import numpy as np
import pytest

import mm_assets
from mm_assets.fields import TextField


@pytest.mark.parametrize("extension", ["mult", "mstr"])
def test_raw_batches_of_several_modalities_and_files(tmp_path, extension):
    """Raw views of all modalities are those of single reads, in the order asked, over files and views."""
    for part in range(3):
        with mm_assets.create(tmp_path / f"{part}.{extension}", {"a": TextField(), "b": TextField()}) as writer:
            for number in range(4):
                values = {"a": f"a{part}{number}", "b": None if number == part else f"b{part}{number}"}
                writer.write(f"{part}-{number}", values)
    with mm_assets.open(tmp_path) as dataset:
        indices = [11, 0, 5, 5, -1, 7]
        found = dataset.read_raw(indices)
        assert list(found) == ["a", "b"]
        for name, views in found.items():
            assert views == [dataset.read_raw([i], [name])[name][0] for i in indices]
        assert None in found["b"]
        view = dataset.select([7, 2])
        assert view.read_raw([1, 0], ["b"]) == {
            "b": [dataset.read_raw([2], ["b"])["b"][0], dataset.read_raw([7], ["b"])["b"][0]]
        }
        assert dataset.read_raw([], ["a"]) == {"a": []}
        with pytest.raises(KeyError):
            dataset.read_raw([0], ["c"])


@pytest.mark.parametrize("extension", ["mult", "mstr"])
def test_raw_batches_in_a_stream(tmp_path, extension):
    """A stream gives what single raw batches give, is one batch ahead, and an error comes behind what is before it."""
    for part in range(2):
        with mm_assets.create(tmp_path / f"{part}.{extension}", {"a": TextField(), "b": TextField()}) as writer:
            for number in range(4):
                writer.write(f"{part}-{number}", {"a": f"a{part}{number}", "b": None if number == part else "b"})
    batches = [[7, 0, 0], np.array([3, -1]), [], range(4)]
    asked: list[int] = []

    def endless():
        for k in itertools.count():
            asked.append(k)
            yield batches[k % 4]

    def failing():
        yield from batches
        raise RuntimeError("no more of these")

    with mm_assets.open(tmp_path) as dataset, mm_assets.open(tmp_path / f"1.{extension}") as one:
        for data in (dataset, dataset.select(range(7, -1, -1)), one):
            given = [[i % len(data) for i in indices] for indices in batches]
            for names in (None, ["b"]):
                assert list(data.stream_raw(given, names)) == [data.read_raw(indices, names) for indices in given]
        stream = dataset.stream_raw(endless())
        assert asked == []
        for k in range(9):
            assert next(stream) == dataset.read_raw(batches[k % 4])
            assert len(asked) == k + 2
        stream.close()
        assert list(dataset.stream_raw([])) == []
        for wrong, error in (([[1], [8], [2]], IndexError), (failing(), RuntimeError)):
            stream = dataset.stream_raw(wrong)
            for indices in batches if error is RuntimeError else [[1]]:
                assert next(stream) == dataset.read_raw(indices)
            with pytest.raises(error):
                next(stream)
            assert list(stream) == []
        with pytest.raises(KeyError):
            dataset.stream_raw(batches, ["c"])
        stream = dataset.stream_raw(batches)
        next(stream)
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError())  # raised where the batch was yielded, and not a batch later
        assert list(stream) == []


@pytest.mark.parametrize("extension", ["mult", "mstr"])
def test_a_raw_scan_gives_every_sample_in_order(tmp_path, extension):
    """Over all files, and of a view its samples only, a scan gives what single raw reads give."""
    for part in range(2):
        with mm_assets.create(tmp_path / f"{part}.{extension}", {"a": TextField(), "b": TextField()}) as writer:
            for number in range(500):
                writer.write(f"{part}-{number}", {"a": f"a{part}{number}", "b": None if number % 3 else f"b{number}"})
    with mm_assets.open(tmp_path) as dataset:
        for data in (dataset, dataset.select(range(999, 100, -2)), dataset.select([])):
            for names in (["b", "a"], ["b"]):
                found = {name: [view for block in data.scan_raw(names) for view in block[name]] for name in names}
                assert found == {
                    name: [data.read_raw([i], [name])[name][0] for i in range(len(data))] for name in names
                }
        with pytest.raises(KeyError):
            next(dataset.scan_raw(["c"]))
