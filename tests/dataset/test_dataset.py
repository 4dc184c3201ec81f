"""A dataset: samples, fields, damage, manifests."""

import copy
import pickle
import struct
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest

import mm_assets
from mm_assets.errors import (
    ConfigError,
    CorruptError,
    EncodeError,
    FormatError,
    MissingExtraError,
    SchemaMismatchError,
)
from mm_assets.fields import (
    FIELD_NAMES,
    FIELD_TYPES,
    Encoded,
    ImageField,
    ScalarField,
    TextField,
    register_field,
)
from mm_assets.formats import ModalitySpec, MultWriter, Payload

from .samples import FIELDS, assert_same, sample, write


@pytest.fixture
def packed(tmp_path: Path, form: str) -> Path:
    return write(tmp_path / f"one.{form}", range(9))


def test_samples_round_trip(packed):
    """What is written is read: by index, in order, with absent values as None, and without any other argument."""
    with mm_assets.open(packed) as dataset:
        assert len(dataset) == 9
        assert dataset.names == tuple(FIELDS)
        assert dataset.fields == FIELDS
        for i in range(-9, 9):
            assert_same(dataset[i], sample(i % 9))
        for i, found in enumerate(dataset):
            assert_same(found, sample(i))
        for i in (9, -10):
            with pytest.raises(IndexError):
                dataset[i]
        with pytest.raises(TypeError):
            dataset["0"]
        assert dataset.schema["provenance"] == {"dataset": "test"}


def test_one_modality_touches_no_other(packed):
    """Reading some modalities decodes those only; raw bytes are read without decoding at all."""
    with mm_assets.open(packed) as dataset, mock.patch.object(ImageField, "decode", side_effect=AssertionError):
        assert dataset.read_sample(2, ["label", "text"]) == {"label": -3, "text": "text 2 é"}
        assert dataset.read_modality("text", [3, 3, -1, 0]) == ["text 3 é", "text 3 é", "text 8 é", "text 0 é"]
        assert dataset.read_modality("label", np.array([3, 0], np.uint8)) == [None, -5]
        assert dataset.read_modality("text", []) == []
        assert bytes(dataset.read_raw([1], ["text"])["text"][0]) == "text 1 é".encode()
        assert bytes(dataset.read_raw([0], ["image"])["image"][0]).startswith(b"\x89PNG")
        assert dataset.read_raw([2], ["image"])["image"][0] is None
        for call in (
            lambda: dataset.read_sample(0, ["no such"]),
            lambda: dataset.read_modality("no such", [0]),
            lambda: dataset.read_batch([0], ["no such"]),
            lambda: dataset.read_raw([0], ["no such"]),
            lambda: dataset.presence("no such"),
        ):
            with pytest.raises(KeyError, match="no such"):
                call()
        with pytest.raises(IndexError):
            dataset.read_modality("text", [0, 9])
        with pytest.raises(TypeError):
            dataset.read_modality("text", [0.5])


def test_batches_keep_every_row(packed):
    """A batch has one row per sample asked for in every modality: arrays where values allow, with masks."""
    with mm_assets.open(packed) as dataset:
        batch = dataset.read_batch([4, 3, 2])
        assert list(batch) == list(FIELDS)
        assert batch["label"].values.dtype == np.int16
        assert batch["label"].values.tolist() == [-1, 0, -3]
        assert batch["label"].present.tolist() == [True, False, True]
        np.testing.assert_array_equal(batch["state"].values, [sample(i)["state"] for i in (4, 3, 2)])
        assert batch["text"].values == ["text 4 é", "text 3 é", "text 2 é"]
        assert [value is None for value in batch["image"].values] == [False, False, True]


def test_ids_and_presence(packed):
    """Samples are found by id, and presence is reported for all samples at once."""
    with mm_assets.open(packed) as dataset:
        assert list(dataset.sample_ids) == [f"id-{i}" for i in range(9)]
        assert dataset.sample_ids[-1] == "id-8"
        assert dataset.sample_ids[1:3] == ["id-1", "id-2"]
        assert "id-3" in dataset.sample_ids
        assert dataset.find("id-7") == 7
        assert dataset.find("id-9") is None
        assert dataset.presence("image").tolist() == [i % 3 != 2 for i in range(9)]


def test_a_refused_value_names_its_place_and_leaves_no_trace(tmp_path, form):
    """An EncodeError tells file, sample and modality; the writer goes on without that sample."""
    path = tmp_path / f"x.{form}"
    with mm_assets.create(path, FIELDS, fsync=False) as writer:
        writer.write("good", sample(0))
        with pytest.raises(
            EncodeError, match=r"x\.m.*sample 1 \('bad'\).*modality 'label': ScalarField: found str of length 5"
        ):
            writer.write("bad", {**sample(1), "label": "seven"})
        with pytest.raises(EncodeError, match="typo"):
            writer.write("bad", {**sample(1), "typo": 1})
        writer.write_payloads("ready", {"text": TextField().encode("t"), "image": None})
        assert len(writer) == 2
    with mm_assets.open(path) as dataset:
        assert list(dataset.sample_ids) == ["good", "ready"]
        assert dataset.read_sample(1, ["text", "image"]) == {"text": "t", "image": None}


def test_a_failed_run_leaves_the_old_file(packed):
    """A writer that is left by an exception, or aborted, does not touch the file that is there."""
    before = packed.read_bytes()

    def interrupted() -> None:
        with mm_assets.create(packed, FIELDS) as writer:
            writer.write("new", sample(0))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    mm_assets.create(packed, FIELDS).abort()
    assert packed.read_bytes() == before
    assert [path.name for path in packed.parent.iterdir()] == [packed.name]


def test_the_same_samples_give_the_same_bytes(packed, tmp_path):
    """Files are deterministic, with the number of samples announced or not."""
    again = tmp_path / f"again{packed.suffix}"
    with mm_assets.create(again, FIELDS, num_samples=9, provenance={"dataset": "test"}) as writer:
        for i in range(9):
            writer.write(f"id-{i}", sample(i))
    assert again.read_bytes() == packed.read_bytes()


def test_bad_declarations_are_refused(tmp_path):
    """A file name of no packed format, a value that is not a field, and an unknown format are ConfigErrors."""
    with pytest.raises(ConfigError, match=r"\.mult or \.mstr"):
        mm_assets.create(tmp_path / "x.tar", FIELDS)
    with pytest.raises(ConfigError, match="expected a Field"):
        mm_assets.create(tmp_path / "x.mult", {"text": TextField})
    with pytest.raises(ConfigError, match="mult or mstr"):
        mm_assets.open(tmp_path / "x.mult", format="tar")
    assert list(tmp_path.iterdir()) == []


def test_fields_given_at_open(packed, form):
    """Fields of the same type with other settings decode in place of the schema's; others are refused."""
    with mm_assets.open(packed, fields={"image": ImageField(channels=1)}, format=form) as dataset:
        assert dataset[0]["image"].shape == (4, 5, 1)
        assert dataset.fields["text"] == TextField()
    with pytest.raises(SchemaMismatchError, match=r"'image'.*TextField"):
        mm_assets.open(packed, fields={"image": TextField()})
    with pytest.raises(SchemaMismatchError, match="'typo'"):
        mm_assets.open(packed, fields={"typo": TextField()})
    with pytest.raises(SchemaMismatchError, match=r"'label': found records .*<i8.*reads .*<f8"):
        mm_assets.open(packed, fields={"label": ScalarField("float32")})  # of the same size, and yet other numbers
    with pytest.raises(SchemaMismatchError, match="expected"):
        mm_assets.open(packed, format="mstr" if form == "mult" else "mult")


def test_damage_names_file_sample_and_modality(packed):
    """A damaged payload is reported with its place, also without checksums: alone, in a batch, and by verify."""
    data = packed.read_bytes()
    at = data.index("text 4 é".encode())
    packed.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with mm_assets.open(packed, verify=False) as dataset:
        assert_same(dataset[3], sample(3))
        for call in (lambda: dataset[4], lambda: dataset.read_modality("text", [0, 4])):
            with pytest.raises(FormatError, match="not UTF-8") as caught:
                call()
            assert (caught.value.path, caught.value.sample, caught.value.modality) == (str(packed), 4, "text")
        with pytest.raises(FormatError, match="sample 4, modality 'text'"):
            dataset.read_batch([0, 4, 1], ["text"])
        report = dataset.verify()
        assert [(one.sample, one.sample_id, one.modality) for one in report.damage if one.modality] == [
            (4, "id-4", "text")
        ]
    with mm_assets.open(packed, verify=True) as dataset, pytest.raises(CorruptError, match="sample 4"):
        dataset.read_raw([4], ["text"])


def test_pickle_threads_and_close(packed):
    """A dataset pickles by its path, is read from threads, and refuses to be read once it is closed."""
    dataset = mm_assets.open(packed, fields={"image": ImageField(channels=1)})
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.fields == dataset.fields
    np.testing.assert_array_equal(copy[0]["state"], dataset[0]["state"])
    found: dict[int, dict[str, object]] = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: dataset[i]})) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i]["text"] for i in range(9)] == [f"text {i} é" for i in range(9)]
    state = dataset[1]["state"]
    for _ in range(2):
        dataset.close()
    np.testing.assert_array_equal(state, sample(1)["state"])
    with pytest.raises(ValueError, match="closed"):
        dataset[0]
    copy.close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_open_files_of_its_own(packed, copied):
    """A copy of a dataset, also of a view, reads the same samples, and closing it leaves the original open."""
    with mm_assets.open(packed) as dataset, dataset.select([5, 3]) as view:
        for original, first in ((dataset, 0), (view, 5)):
            with copied(original) as other:
                assert list(other.sample_ids) == list(original.sample_ids)
                assert other[0]["text"] == f"text {first} é"
            assert original[0]["text"] == f"text {first} é"


@dataclass(frozen=True)
class Shout(TextField):
    """A user's field."""

    TYPE_ID: ClassVar[int] = 0x8001

    def encode(self, value):
        """Upper case."""
        return super().encode(value.upper())


@pytest.fixture
def _registry(monkeypatch):
    monkeypatch.setattr("mm_assets.fields.FIELD_TYPES", FIELD_TYPES)
    types, names = dict(FIELD_TYPES), dict(FIELD_NAMES)
    yield
    for table, before in ((FIELD_TYPES, types), (FIELD_NAMES, names)):
        table.clear()
        table.update(before)


@pytest.mark.usefixtures("_registry")
def test_a_users_field_and_an_unknown_one(tmp_path, form):
    """A registered field of the user's decodes; where it is not registered its bytes can be read, and nothing else."""
    path = tmp_path / f"x.{form}"
    write(path, range(1), fields={"a": Shout(), "b": TextField()}, make=lambda _: {"a": "hey", "b": "x"})
    with mm_assets.open(path) as dataset:
        assert list(dataset.fields) == ["b"]
        assert dataset.names == ("a", "b")
        assert dataset.read_sample(0, ["b"]) == {"b": "x"}
        assert bytes(dataset.read_raw([0], ["a"])["a"][0]) == b"HEY"
        for call in (lambda: dataset[0], lambda: dataset.read_batch([0]), lambda: dataset.read_modality("a", [0])):
            with pytest.raises(SchemaMismatchError, match=r"'a'.*Shout.*read_raw"):
                call()
    assert register_field(register_field(Shout)) is Shout
    with mm_assets.open(path) as dataset:
        assert dataset[0] == {"a": "HEY", "b": "x"}
        assert dataset.fields["a"] == Shout()


@dataclass(frozen=True)
class Needy(TextField):
    """A user's field that needs what is not installed."""

    TYPE_ID: ClassVar[int] = 0x8003

    def __post_init__(self):
        if MISSING:
            raise MissingExtraError("Needy", "none")


MISSING: list[str] = []


@pytest.mark.usefixtures("_registry")
def test_a_missing_package_leaves_the_rest_readable(tmp_path, form, monkeypatch):
    """Where a field's package is missing, the file opens all the same, and decoding that modality names the extra."""
    register_field(Needy)
    path = write(tmp_path / f"x.{form}", range(1), fields={"a": Needy(), "b": TextField()}, make=lambda _: {"a": "1"})
    monkeypatch.setitem(globals(), "MISSING", ["x"])
    with mm_assets.open(path) as dataset:
        assert dataset.read_sample(0, ["b"]) == {"b": None}
        assert bytes(dataset.read_raw([0], ["a"])["a"][0]) == b"1"
        with pytest.raises(SchemaMismatchError, match="pip install none"):
            dataset.read_batch([0], ["a"])


@pytest.mark.usefixtures("_registry")
def test_registration_is_strict():
    """Only complete fields of the users' range are registered, and no id or name twice."""

    class Low(Shout):
        TYPE_ID = 0x7FFF

    class Same(Shout):
        pass

    register_field(Shout)
    for wrong in (Low, Same, dict, Shout(), Encoded):
        with pytest.raises(ConfigError):
            register_field(wrong)
    namesake = type("TextField", (Shout,), {"TYPE_ID": 0x8002})
    with pytest.raises(ConfigError, match="name"):
        register_field(namesake)


def test_a_file_of_an_unknown_schema(tmp_path):
    """A modality whose configuration this release does not know leaves the rest of the file readable."""
    path = tmp_path / "x.mult"
    record = TextField().encode("t").metadata
    specs = [
        ModalitySpec(name="new", type_id=2, metadata_size=8, type_name="TextField", config={"required": ["setting"]}),
        ModalitySpec(name="wide", type_id=2, metadata_size=16, type_name="TextField"),
        ModalitySpec(name="unnamed", type_id=2, metadata_size=8),
        ModalitySpec(name="reserved", type_id=999, metadata_size=8),
    ]
    with MultWriter(path, specs, fsync=False) as writer:
        writer.write("a", {spec.name: Payload(record.ljust(spec.metadata_size, b"\0"), b"t") for spec in specs})
    with mm_assets.open(path) as dataset:
        assert dataset.fields == {"unnamed": TextField()}
        assert dataset.read_sample(0, ["unnamed"]) == {"unnamed": "t"}
        for name in ("new", "wide", "reserved"):
            assert bytes(dataset.read_raw([0], [name])[name][0]) == b"t"
            with pytest.raises(SchemaMismatchError, match=name):
                dataset.read_modality(name, [0])


def test_a_file_without_schema_opens_with_fields(tmp_path):
    """A file of another writer, without schema and ids, opens when fields for all of its modalities are given."""
    path = tmp_path / "x.mult"
    payloads = [b"".join(TextField().encode(f"t{i}")) for i in range(2)]
    header = b"MULT" + struct.pack("<HIB", 1, 2, 1) + struct.pack("<IHH", zlib.crc32(b"text"), 2, 8)
    body = [struct.pack("<III", 1, 12, len(payload)) + payload for payload in payloads]
    first = len(header) + 2 * 16
    index = struct.pack("<QII", first, len(body[0]), 0) + struct.pack("<QII", first + len(body[0]), len(body[1]), 0)
    path.write_bytes(header + index + b"".join(body))
    with pytest.raises(FormatError, match="tail"):
        mm_assets.open(path)
    with mm_assets.open(path, fields={"text": TextField()}) as dataset:
        assert [found["text"] for found in dataset] == ["t0", "t1"]
        assert list(dataset.sample_ids) == ["0", "1"]
    with pytest.raises(SchemaMismatchError):
        mm_assets.open(path, fields={"image": TextField()})
