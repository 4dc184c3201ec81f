"""Payloads in their place, read in parts; and ids searched as they are stored."""

import itertools
import os
import pickle
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.errors import FormatError
from mm_assets.fields import BytesField, ImageField, TextField
from mm_assets.formats import Payload

FIELDS = {"image": ImageField(encoding="png"), "blob": BytesField(), "text": TextField()}


@pytest.fixture(params=["mult", "mstr"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> mm_assets.Dataset:
    """Two files of 20 samples as one; every third sample has no blob."""
    paths = []
    for part in range(2):
        paths.append(tmp_path / f"{part}.{request.param}")
        with mm_assets.create(paths[-1], FIELDS) as writer:
            for n in range(20 * part, 20 * part + 20):
                rng = np.random.default_rng(n)
                blob = None if n % 3 == 0 else rng.bytes(500 + n)
                image = rng.integers(0, 255, (8, 9, 3), np.uint8)
                writer.write(f"id-{n}", {"image": image, "blob": blob, "text": f"text {n}"})
    return mm_assets.open(paths)


def test_stored_payloads_decode_to_the_values(dataset: mm_assets.Dataset) -> None:
    """Record and data of a stored payload are what the field decodes, whole, absent or in a view of samples."""
    view = dataset.select([39, 0, 21, 21])
    stored, payloads = view.stored(range(4)), view.read_raw(range(4), records=True, verify=True)
    for row, sample in enumerate(view[[0, 1, 2, 3]]):
        for name, value in sample.items():
            payload = stored[name][row]
            if value is None:
                assert payload is payloads[name][row] is None
                continue
            assert payload is not None
            decoded = dataset.fields[name].decode(payload.metadata(), payload.read(0, payload.size))
            assert np.array_equal(decoded, value)
            assert payload.is_whole()
            assert payloads[name][row] == (payload.metadata(), payload.read(0, payload.size))


@settings(deadline=None)
@given(st.data())
def test_a_range_of_a_payload_is_that_slice_of_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any range within the data gives those bytes, and one that leaves it is refused."""
    suffix = data.draw(st.sampled_from(["mult", "mstr"]))
    content = data.draw(st.binary(min_size=1, max_size=300))
    path = tmp_path_factory.getbasetemp() / f"range.{suffix}"
    with mm_assets.create(path, {"blob": BytesField()}) as writer:
        writer.write("one", {"blob": content})
    with mm_assets.open(path) as opened:
        payload = opened.stored([0])["blob"][0]
        assert payload is not None
        start = data.draw(st.integers(0, payload.size))
        size = data.draw(st.integers(0, payload.size - start))
        assert payload.read(start, size) == content[start : start + size]
        with pytest.raises(ValueError, match="leave"):
            payload.read(start, payload.size - start + 1)


def test_a_payload_outlives_its_dataset_and_notices_damage(dataset: mm_assets.Dataset) -> None:
    """A stored payload can be read after the dataset is closed; changed bytes are not whole."""
    payload = dataset.stored([1], ["blob"])["blob"][0]
    assert payload is not None
    before = payload.read(0, payload.size)
    with open(payload.source.name, "r+b") as file:
        file.seek(payload.offset + 3)
        file.write(bytes([before[3] ^ 1]))
    assert not payload.is_whole()
    dataset.close()


def test_a_payload_never_reads_another_file(dataset: mm_assets.Dataset, tmp_path: Path) -> None:
    """After `close`, stored payloads read their own file, whichever files are opened meanwhile, and free it at last."""
    stored = [payload for row in dataset.stored(range(40)).values() for payload in row if payload is not None]
    expected = [payload.read(0, payload.size) for payload in stored]
    name = stored[0].source.name
    dataset.close()
    (tmp_path / "other").write_bytes(b"z" * (1 << 20))
    with ExitStack() as stack:
        for _ in range(8):  # take the descriptors' numbers
            stack.enter_context(open(tmp_path / "other", "rb"))
        assert [payload.read(0, payload.size) for payload in stored] == expected
        assert all(payload.is_whole() for payload in stored)
        again = pickle.loads(pickle.dumps(stored[0]))
        assert again.read(0, again.size) == expected[0]
    Path(name).write_bytes(b"")
    with pytest.raises(FormatError, match="truncated"):
        stored[0].read(0, stored[0].size)
    if os.path.isdir("/proc/self/fd"):
        del stored, again
        assert name not in {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


def test_wrong_names_and_indices_are_refused(dataset: mm_assets.Dataset) -> None:
    """An unknown modality is a KeyError and a sample outside an IndexError."""
    with pytest.raises(KeyError, match="nothing"):
        dataset.stored([0], ["nothing"])
    with pytest.raises(IndexError):
        dataset.stored([40])


@settings(deadline=None)
@given(st.lists(st.text(alphabet="abé字", max_size=6), max_size=30, unique=True), st.text(alphabet="abé字", max_size=4))
def test_ids_that_contain_a_text_are_found(tmp_path_factory: pytest.TempPathFactory, ids: list[str], text: str) -> None:
    """A search of the stored bytes finds the ids that Python's `in` finds, in every range, also across ids."""
    path = tmp_path_factory.getbasetemp() / "ids.mult"
    with mm_assets.create(path, {"blob": BytesField()}) as writer:
        for sample_id in ids:
            writer.write(sample_id, {"blob": b"x"})
    with mm_assets.open(path) as opened:
        for start, stop in itertools.combinations(range(0, len(ids) + 1, 7), 2):
            expected = [n for n in range(start, stop) if text in ids[n]]
            assert opened.sample_ids.containing(text, start, stop) == expected


def test_ids_are_found_over_files_and_in_views(dataset: mm_assets.Dataset) -> None:
    """Indices count through all files, and through the selection of a view."""
    assert dataset.sample_ids.containing("-1", 0, 40) == [1, *range(10, 20)]
    assert dataset.sample_ids.containing("id-2", 15, 25) == [20, 21, 22, 23, 24]
    assert dataset.select([25, 2, 30]).sample_ids.containing("id-2", 0, 3) == [0, 1]
    assert dataset.sample_ids.containing("\ud800", 0, 40) == []


def test_damaged_offsets_of_ids_are_an_error(tmp_path: Path) -> None:
    """Offsets that descend are refused by a search as by a look-up."""
    path = tmp_path / "x.mult"
    with mm_assets.create(path, {"blob": BytesField()}) as writer:
        for n in range(50):
            writer.write(f"identity-{n:04}", {"blob": b"x"})
    content = bytearray(path.read_bytes())
    offsets = b"".join((13 * n).to_bytes(8, "little") for n in range(51))
    at = content.find(offsets)
    assert at > 0
    content[at + 80 : at + 88] = (2**40).to_bytes(8, "little")
    path.write_bytes(content)
    with mm_assets.open(path) as opened, pytest.raises(FormatError, match="sample ids"):
        opened.sample_ids.containing("identity", 0, 50)


def test_a_payload_is_two_parts(dataset: mm_assets.Dataset) -> None:
    """The record has the field's size, and both parts are those of `read_raw` and of the decoder."""
    stored = dataset.stored([1], ["image"])["image"][0]
    assert stored is not None
    payload = Payload(stored.metadata(), stored.read(0, stored.size))
    assert len(payload.metadata) == dataset.fields["image"].metadata_type.itemsize
    assert bytes(dataset.read_raw([1], ["image"])["image"][0] or b"") == payload.data
