"""Checksums of what is read: on by default where values are decoded, off where their bytes are."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mm_assets
from mm_assets import Dataset
from mm_assets.errors import CorruptError
from mm_assets.fields import ScalarField, TextField
from mm_assets.formats import open_reader

FIELDS = {"text": TextField(), "label": ScalarField("int16")}
CHANGED = "uext 4"

DECODED: dict[str, Callable[[Dataset], Any]] = {
    "item": lambda data: data[4]["text"],
    "items": lambda data: data[[4]][0]["text"],
    "slice": lambda data: data[3:6][1]["text"],
    "getitems": lambda data: data.__getitems__([1, 4])[1]["text"],
    "sample": lambda data: data.read_sample(4, ["text"])["text"],
    "iteration": lambda data: list(data)[4]["text"],
    "modality": lambda data: data.read_modality("text", [0, 4])[1],
    "batch": lambda data: data.read_batch([4, 0], ["text"])["text"].values[0],
    "threads": lambda data: data.read_batch([4, 0], ["text"], threads=2)["text"].values[0],
    "arrow": lambda data: data.to_arrow(modalities=["text"])["text"][4].as_py(),
    "view": lambda data: data.select([0, 4])[1]["text"],
    "copy": lambda data: pickle.loads(pickle.dumps(data))[4]["text"],
}
RAW: dict[str, Callable[[Dataset], Any]] = {
    "read": lambda data: data.read_raw([4], ["text"])["text"][0],
    "reads": lambda data: data.read_raw([0, 4], ["text"])["text"][1],
    "records": lambda data: data.read_raw([4, 0], ["text"], records=True)["text"][0].data,
    "record": lambda data: data.read_raw([4], ["text"], records=True)["text"][0].data,
    "stream": lambda data: next(data.stream_raw([[0, 4]], ["text"]))["text"][1],
    "scan": lambda data: next(data.stream_raw(modalities=["text"]))["text"][4],
}


@pytest.fixture(scope="module", params=["mult", "mstr"])
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A file in which the text of sample 4 has another first letter, and so decodes as well as before."""
    path = tmp_path_factory.mktemp("damaged") / f"x.{request.param}"
    with mm_assets.create(path, FIELDS, fsync=False) as writer:
        for i in range(9):
            writer.write(f"id-{i}", {"text": f"text {i}", "label": None if i % 4 == 3 else i})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"text 4", CHANGED.encode()))
    return str(path)


@pytest.mark.parametrize("call", DECODED)
def test_decoded_reads_check(damaged: str, call: str) -> None:
    """A changed byte that decodes is found by each way to values, with its place; and passed on where not checked."""
    with mm_assets.open(damaged) as data, pytest.raises(CorruptError, match="payload does not have its checksum") as it:
        DECODED[call](data)
    assert (it.value.path, it.value.sample, it.value.modality) == (damaged, 4, "text")
    with mm_assets.open(damaged, verify=False) as data:
        assert DECODED[call](data) == CHANGED


@pytest.mark.parametrize("call", RAW)
def test_raw_reads_check_only_when_asked(damaged: str, call: str) -> None:
    """Stored bytes are read as they are, unless the dataset was opened with `verify=True`."""
    for verify in (None, False):
        with mm_assets.open(damaged, verify=verify) as data:
            assert bytes(RAW[call](data)) == CHANGED.encode()
    with mm_assets.open(damaged, verify=True) as data, pytest.raises(CorruptError, match="sample 4, modality 'text'"):
        RAW[call](data)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("opened", [None, False])
def test_one_raw_read_checks_by_its_own_argument(damaged: str, records: bool, opened: bool | None) -> None:
    """`verify=True` refuses the sample that was changed, alone and among others, and reads intact ones."""
    with mm_assets.open(damaged, verify=opened) as data:
        for indices in ([4], [5, 4], np.array([4, 4])):
            with pytest.raises(CorruptError, match="sample 4, modality 'text'"):
                data.read_raw(indices, ["text"], records=records, verify=True)
        intact = [5, 3, -1]
        plain = data.read_raw(intact, records=records)
        assert data.read_raw(intact, records=records, verify=True) == plain
        assert plain["label"][1] is None


def test_one_batch_checks_by_its_own_argument(damaged: str) -> None:
    """The argument `verify` of a batch has precedence over that of the dataset; sound samples are read by all."""
    with mm_assets.open(damaged) as data:
        assert data.read_batch([4], ["text"], verify=False)["text"].values == [CHANGED]
        assert data[5] == {"text": "text 5", "label": 5}
    with mm_assets.open(damaged, verify=False) as data, pytest.raises(CorruptError, match="sample 4"):
        data.read_batch([4], ["text"], verify=True)


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_a_lost_value_is_not_an_absent_one(tmp_path: Path, form: str) -> None:
    """A value whose entry in the index became zero is refused by default, where an absent one is None."""
    path = tmp_path / f"x.{form}"
    with mm_assets.create(path, {"text": TextField()}, fsync=False) as writer:
        for i in range(8):
            writer.write(str(i), {"text": None if i == 2 else f"text {i}"})
    with mm_assets.open(path) as data:
        assert data[2] == {"text": None}
        assert data.read_modality("text", [1, 2]) == ["text 1", None]
    with open_reader(path) as reader:
        entry = reader.checksums("text")[5].tobytes()
    content = bytearray(path.read_bytes())
    end = content.rindex(entry) + 4  # the checksum is the last number of a row, and of a directory's columns
    steps = {"mstr": [(16, 16)], "mult": [(4, 4), (4 + 4 * 8, 4), (4 * 5 + 4 + 4 * 8 + 8 * 3, 8)]}
    for back, size in steps[form]:
        content[end - back : end - back + size] = bytes(size)
    if form == "mstr":
        content[end : end + FIELDS["text"].metadata_type.itemsize] = bytes(FIELDS["text"].metadata_type.itemsize)
    path.write_bytes(content)
    with mm_assets.open(path) as data:
        for read in (
            lambda: data[5],
            lambda: data[[4, 5]],
            lambda: data.to_arrow([5]),
            partial(data.read_raw, [5], verify=True),
        ):
            with pytest.raises(CorruptError, match="damaged") as caught:
                read()
            assert (caught.value.path, caught.value.sample, caught.value.modality) == (str(path), 5, "text")
        assert data[4] == {"text": "text 4"}
        assert not data.verify().ok
    with mm_assets.open(path, verify=False) as data:
        assert data[5] == {"text": None}
