"""Decoding of samples and batches: what is missing, arrays that are given, threads, and damage."""

import gc
import importlib
import os
import pickle
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.dataset import files as packed_files
from mm_assets.errors import CorruptError, FormatError, SchemaMismatchError
from mm_assets.fields import (
    FIELD_TYPES,
    ArraySpec,
    Field,
    NDArrayField,
    TextField,
    register_field,
)
from mm_assets.formats import convert
from mm_assets.testing import FieldSuite, same

from .decoding import COUNT, FIELDS, FORMS, MEETING, SIZE, Slow, decoding_threads, picture, sample, write

THREADS = (0, 1, 2, 5, None)


def fill(out: Any, value: int) -> None:
    for array in out.values():
        if isinstance(array, dict):
            fill(array, value)
        else:
            array[...] = value


@dataclass(frozen=True)
class Meeting(TextField):
    """Decodes only where two threads do at once."""

    TYPE_ID: ClassVar[int] = 0x8011

    @property
    def decodes_in_parallel(self):
        return True

    def decode(self, metadata, data):
        MEETING["barrier"].wait(timeout=20)
        return super().decode(metadata, data)


@dataclass(frozen=True)
class Padded(TextField):
    """Character codes padded to a length, and which of them are there: a batch of two arrays."""

    TYPE_ID: ClassVar[int] = 0x8013

    length: int = 4

    @property
    def config(self):
        return {"length": self.length}

    @property
    def decodes_in_parallel(self):
        return True

    @property
    def value_layout(self):
        return MappingProxyType(
            {
                "codes": ArraySpec((self.length,), np.dtype(np.int32)),
                "mask": ArraySpec((self.length,), np.dtype(np.bool_)),
            }
        )

    def _decode_into(self, metadata, data, target):
        text = self.decode(metadata, data)[: self.length]
        target["codes"][...] = [*map(ord, text), *[0] * (self.length - len(text))]
        target["mask"][...] = np.arange(self.length) < len(text)


@pytest.fixture(scope="module")
def examples() -> dict[str, tuple[Field, list[tuple[Any, Any]]]]:
    """A field of each type with (value, decoded value) pairs, out of the types' own suites."""
    found: dict[str, tuple[Field, list[tuple[Any, Any]]]] = {}
    for path in sorted((Path(__file__).parents[1] / "fields").glob("test_*.py")):
        module = importlib.import_module(f"..fields.{path.stem}", __package__)
        for suite in vars(module).values():
            if isinstance(suite, type) and issubclass(suite, FieldSuite) and hasattr(suite, "fields"):
                field = suite.fields[0]
                found.setdefault(type(field).__name__, (field, [*suite.cases, suite.empty]))
    return found


def test_every_built_in_field_has_examples(examples):
    """The test below covers each type that the registry holds."""
    assert {cls.__name__ for type_id, cls in FIELD_TYPES.items() if type_id < 0x8000} <= set(examples)


@settings(deadline=None, max_examples=120)
@given(data=st.data(), form=st.sampled_from(FORMS))
def test_any_modality_of_any_sample_may_be_missing(tmp_path_factory, examples, data, form):
    """Whatever is present where: it comes back, and the rest is None or zero rows, in samples, columns and batches."""
    names = data.draw(st.lists(st.sampled_from(sorted(examples)), min_size=1, max_size=6, unique=True))
    choice = {name: st.none() | st.integers(0, len(examples[name][1]) - 1) for name in names}
    chosen = data.draw(st.lists(st.fixed_dictionaries(choice), max_size=5))
    indices = data.draw(st.lists(st.integers(0, len(chosen) - 1), max_size=7)) if chosen else []
    pairs = [{n: None if row[n] is None else examples[n][1][row[n]] for n in names} for row in chosen]
    fields = {name: examples[name][0] for name in names}
    folder = tmp_path_factory.mktemp("masks")
    written = [{n: pair and pair[0] for n, pair in row.items()} for row in pairs]
    path = write(folder / f"x.{form}", fields, written)
    other = folder / f"y.{FORMS[1 - FORMS.index(form)]}"
    convert(path, other)
    back = folder / f"z.{form}"
    convert(other, back)
    assert back.read_bytes() == path.read_bytes()
    for place in (path, other):
        with mm_assets.open(place) as dataset:
            for i, row in enumerate(pairs):
                assert same(dataset[i], {n: pair and pair[1] for n, pair in row.items()})
            for name in names:
                assert dataset.presence(name).tolist() == [row[name] is not None for row in pairs]
                expected = [pairs[i][name] and pairs[i][name][1] for i in indices]
                assert same(dataset.read_modality(name, indices), expected)
                assert same(dataset.read_modality(name, indices, threads=2), expected)
                raw = dataset.read_raw(indices, [name])[name]
                assert [one and bytes(one) for one in raw] == [
                    view and bytes(view) for view in (dataset.read_raw([i], [name])[name][0] for i in indices)
                ]
            out = dataset.empty_batch(len(indices))
            fill(out, 1)
            batches = [dataset.read_batch(indices), dataset.read_batch(indices, out=out, threads=2)]
            for batch in batches:
                assert list(batch) == names
                for name, (values, present) in batch.items():
                    assert present.tolist() == [pairs[i][name] is not None for i in indices]
                    arrays = values if isinstance(values, dict) else {"": values}
                    for array in arrays.values():
                        assert len(array) == len(indices)
                        for row, there in enumerate(present.tolist()):
                            if not there:
                                assert array[row] is None or not np.any(array[row])
                    layout = fields[name].value_layout
                    for row, i in enumerate(indices):
                        if pairs[i][name] is not None and layout is None:
                            assert same(values[row], pairs[i][name][1])
                        elif pairs[i][name] is not None and isinstance(layout, ArraySpec):
                            np.testing.assert_array_equal(values[row], pairs[i][name][1])
            assert same(as_plain(batches[0]), as_plain(batches[1]))


def as_plain(batch: dict[str, mm_assets.dataset.dataset.Batch]) -> dict[str, list[Any]]:
    return {name: [one.values, one.present] for name, one in batch.items()}


@pytest.mark.parametrize("threads", THREADS)
def test_a_batch_decodes_into_given_arrays(packed, threads):
    """Every element of the first rows is written, absent rows are zero, further rows stay, nothing is copied."""
    indices = [*range(COUNT), 3, -1]
    with mm_assets.open(packed) as dataset:
        out = dataset.empty_batch(len(indices) + 2)
        assert list(out) == ["image", "label", "state"]
        for _ in range(2):  # arrays are used again and again
            fill(out, 77)
            batch = dataset.read_batch(indices, out=out, threads=threads)
            assert list(batch) == list(FIELDS)
            for name, array in out.items():
                assert np.shares_memory(batch[name].values, array)
                assert (array[len(indices) :] == 77).all()
                for row, i in enumerate(indices):
                    value = sample(i % COUNT)[name]
                    np.testing.assert_array_equal(array[row], 0 if value is None else value)
            assert batch["text"].values == [sample(i % COUNT)["text"] for i in indices]
            for row, i in enumerate(indices):
                assert same(batch["photo"].values[row], sample(i % COUNT)["photo"])


def test_arrays_that_are_not_contiguous_are_written_alike(packed):
    """An array with gaps between its elements takes the same values."""
    with mm_assets.open(packed) as dataset:
        wide = np.zeros((COUNT, SIZE[0] * 2, SIZE[1], 4), np.uint8)
        batch = dataset.read_batch(range(COUNT), ["image"], out={"image": wide[:, ::2, :, :3]}, threads=2)
        plain = dataset.read_batch(range(COUNT), ["image"])
        np.testing.assert_array_equal(batch["image"].values, plain["image"].values)
        assert not wide[:, 1::2].any()
        assert not wide[..., 3].any()


def test_layouts_are_known_before_reading(packed):
    """Shapes and dtypes of the arrays of a batch are known without reading a sample; lists have none."""
    with mm_assets.open(packed) as dataset:
        assert dataset.batch_layout(5) == {
            "image": ArraySpec((5, *SIZE, 3), np.dtype(np.uint8)),
            "label": ArraySpec((5,), np.dtype(np.int16)),
            "state": ArraySpec((5, 3), np.dtype(np.float32)),
        }
        assert dataset.batch_layout(1, ["text"]) == {}
        empty = dataset.empty_batch(2, ["state", "text"])
        assert list(empty) == ["state"]
        np.testing.assert_array_equal(empty["state"], np.zeros((2, 3), np.float32))
        assert dataset.read_batch([], out=dataset.empty_batch(0))["image"].values.shape == (0, *SIZE, 3)
        with pytest.raises(KeyError, match="typo"):
            dataset.batch_layout(1, ["typo"])
        for call in (dataset.batch_layout, dataset.empty_batch):
            with pytest.raises(ValueError, match="found -1"):
                call(-1)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            {"image": np.zeros((2, 6, 7, 3), np.uint8)},
            r"out\['image'\] is array.*expected uint8.*\(3 or more, 6, 7, 3\)",
        ),
        ({"image": np.zeros((3, 6, 7, 4), np.uint8)}, r"out\['image'\].*\(3, 6, 7, 4\)"),
        ({"image": np.zeros((3, 6, 7, 3), np.int8)}, r"out\['image'\].*int8"),
        ({"image": np.zeros((3, 6, 7), np.uint8)}, r"out\['image'\]"),
        ({"image": [0, 1, 2]}, r"out\['image'\] is list of length 3"),
        ({"image": {"image": np.zeros((3, 6, 7, 3), np.uint8)}}, r"out\['image'\] is dict"),
        ({"image": read_only(np.zeros((3, 6, 7, 3), np.uint8))}, r"out\['image'\] is read-only"),
        ({"label": np.zeros(3, ">i2")}, r"out\['label'\]"),
        ({"text": np.zeros(3, object)}, r"out\['text'\].*list"),
        ({"typo": np.zeros(3)}, r"out has 'typo', which is not read"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(packed, out, message):
    """Arrays of another shape, dtype, kind or name are refused by name before anything is read."""
    with (
        mm_assets.open(packed) as dataset,
        mock.patch.object(packed_files.MultReader, "read_columns", side_effect=AssertionError),
        mock.patch.object(packed_files.MstrReader, "read_columns", side_effect=AssertionError),
        pytest.raises(ValueError, match=message),
    ):
        dataset.read_batch([0, 1, 2], out=out)


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize("threads", THREADS)
def test_a_batch_of_several_arrays(tmp_path, form, threads):
    """A field whose batch is several arrays gets them all, pads written and absent rows zero; a wrong one is named."""
    register_field(Padded)
    texts = [None if i % 4 == 3 else "abcdefg"[: i % 7] for i in range(COUNT)]
    path = write(tmp_path / f"x.{form}", {"tokens": Padded(length=5)}, [{"tokens": text} for text in texts])
    with mm_assets.open(path) as dataset:
        assert dataset.batch_layout(2)["tokens"]["mask"] == ArraySpec((2, 5), np.dtype(np.bool_))
        out = dataset.empty_batch(COUNT)
        fill(out, 1)
        values, present = dataset.read_batch(range(COUNT), out=out, threads=threads)["tokens"]
        assert np.shares_memory(values["codes"], out["tokens"]["codes"])
        for row, text in enumerate(texts):
            shown = (text or "")[:5]
            assert present[row] == (text is not None)
            assert values["codes"][row].tolist() == [*map(ord, shown), *[0] * (5 - len(shown))]
            assert values["mask"][row].tolist() == [k < len(shown) for k in range(5)]
        for wrong, message in (
            (out["tokens"]["codes"], r"out\['tokens'\] is array.*codes, mask"),
            ({"codes": out["tokens"]["codes"]}, r"out\['tokens'\] is \['codes'\].*codes, mask"),
            ({**out["tokens"], "mask": np.zeros((COUNT, 5))}, r"out\['tokens'\]\['mask'\]"),
        ):
            with pytest.raises(ValueError, match=message):
                dataset.read_batch(range(COUNT), out={"tokens": wrong}, threads=threads)
        short = dataset.with_settings({"tokens": {"length": 2}})
        assert short.read_batch([5, 6])["tokens"].values["codes"].tolist() == [[97, 98], [97, 98]]


def test_a_schema_of_absurd_values_makes_no_array(tmp_path, form):
    """A layout that no payload could fill is refused; rows of it are not made for absent values."""
    field = NDArrayField("float64", (1 << 20, 1 << 20))
    path = write(tmp_path / f"x.{form}", {"huge": field}, [{}])
    with mm_assets.open(path) as dataset:
        assert dataset[0] == {"huge": None}
        for call in (lambda: dataset.read_batch([0]), lambda: dataset.empty_batch(1)):
            with pytest.raises(SchemaMismatchError, match=r"'huge'.*at most"):
                call()


@pytest.mark.usefixtures("_registry")
def test_threads_decode_at_the_same_time(tmp_path, form):
    """With two threads two rows are decoded at once, in a batch and in a column; without, one after the other."""
    register_field(Meeting)
    path = write(tmp_path / f"x.{form}", {"m": Meeting()}, [{"m": str(i)} for i in range(8)])
    MEETING["barrier"] = threading.Barrier(2)
    with mm_assets.open(path) as dataset:
        assert dataset.read_batch(range(8), threads=2)["m"].values == [str(i) for i in range(8)]
        assert dataset.read_modality("m", range(8), threads=2) == [str(i) for i in range(8)]
        MEETING["barrier"] = threading.Barrier(1)
        assert dataset.read_batch(range(8), threads=0)["m"].values == [str(i) for i in range(8)]


def damage(path: Path, content: bytes, with_what: bytes) -> None:
    data = path.read_bytes()
    assert data.count(content) == 1
    path.write_bytes(data.replace(content, with_what))


@pytest.mark.parametrize("threads", THREADS)
def test_damage_is_reported_alike_with_threads(tmp_path, form, threads):
    """Of several damaged rows the first one is reported, with file, sample and modality, with any number of threads."""
    path = tmp_path / f"x.{form}"
    fields = {"text": TextField(), "image": FIELDS["image"]}
    field = FIELDS["image"]
    samples = [{"image": picture(i), "text": f"text-{i:03}"} for i in range(20)]
    write(path, fields, samples)
    for i in (5, 13):
        content = bytes(field.encode(picture(i)).data)
        damage(path, content, content[:60] + b"\0" * (len(content) - 60))
    damage(path, b"text-017", b"\xffext-017")
    order = [1, 2, 13, 4, 5, 6, 19]
    with mm_assets.open(path, verify=False) as dataset:  # found by the decoders, in their threads
        for call in (
            lambda: dataset.read_batch(order, ["image"], threads=threads),
            lambda: dataset.read_batch(order, ["image"], out=dataset.empty_batch(9, ["image"]), threads=threads),
            lambda: dataset.read_modality("image", order, threads=threads),
        ):
            with pytest.raises(FormatError) as caught:
                call()
            assert (caught.value.path, caught.value.sample, caught.value.modality) == (str(path), 13, "image")
        with pytest.raises(FormatError) as caught:
            dataset.read_batch([13, 17], ["image", "text"], threads=threads)
        assert (caught.value.sample, caught.value.modality) == (17, "text")
        assert same(dataset.read_modality("image", [4, 6], threads=threads), [picture(4), picture(6)])


@pytest.mark.usefixtures("_registry")
def test_nothing_runs_on_after_an_error(tmp_path, form):
    """When a call raises, no thread decodes any more, so that its arrays can be used again."""
    register_field(Slow)
    texts = ["bad first", *(f"t{i}" for i in range(30)), "bad last"]
    path = write(tmp_path / f"x.{form}", {"s": Slow()}, [{"s": text} for text in texts])
    MEETING["running"] = set()
    with mm_assets.open(path) as dataset:
        for call in (
            lambda: dataset.read_batch(range(32), threads=4),
            lambda: dataset.read_modality("s", range(32), threads=4),
        ):
            with pytest.raises(CorruptError, match="sample 0, modality 's': bad first"):
                call()
            assert MEETING["running"] == set()
        assert dataset.read_modality("s", [4, 5], threads=4) == ["t3", "t4"]


def test_threads_end_with_the_dataset(packed):
    """Threads are started by the first batch that wants them, and end with close or with the dataset itself."""
    assert decoding_threads() == []
    with mm_assets.open(packed) as dataset:
        dataset.read_batch(range(COUNT))
        assert decoding_threads() == []
        dataset.read_batch(range(COUNT), threads=2)
        assert 1 <= len(decoding_threads()) <= 2
        dataset.read_batch(range(COUNT), threads=3)
        assert 1 <= len(decoding_threads()) <= 3
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy.read_batch([0], ["text"])["text"].values == [sample(0)["text"]]
        copy.close()
    assert decoding_threads() == []
    with pytest.raises(ValueError, match="closed"):
        dataset.read_batch(range(COUNT), threads=2)
    dataset = mm_assets.open(packed)
    dataset.read_batch(range(COUNT), threads=2)
    del dataset
    gc.collect()
    end = time.monotonic() + 10
    while decoding_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert decoding_threads() == []


def test_several_callers_share_a_dataset(packed):
    """Batches read at once from several threads, with other numbers of threads each, do not disturb one another."""
    expected = [sample(i)["photo"] for i in range(COUNT)]
    wrong: list[object] = []

    def read(threads: int | None) -> None:
        for _ in range(5):
            batch = dataset.read_batch(range(COUNT), ["photo", "text"], threads=threads)
            if not same(batch["photo"].values, expected):
                wrong.append(threads)

    with mm_assets.open(packed) as dataset:
        callers = [threading.Thread(target=read, args=(threads,)) for threads in (0, 2, 2, 3, None)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert wrong == []
    assert decoding_threads() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # newer Pythons warn of it where threads run
def test_a_forked_child_has_threads_of_its_own(packed):
    """A process forked from one whose threads run reads in threads too, and closes without waiting for the parent's."""
    with mm_assets.open(packed) as dataset:
        dataset.read_batch(range(COUNT), threads=2)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                batch = dataset.read_batch(range(COUNT), ["image"], threads=2)
                dataset.close()
                code = (
                    0
                    if batch["image"].present.sum() == sum(sample(i)["image"] is not None for i in range(COUNT))
                    else 2
                )
            finally:
                os._exit(code)
        end = time.monotonic() + 30
        done = (0, 0)
        while done[0] == 0 and time.monotonic() < end:
            done = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if done[0] == 0:  # it hangs, and must not outlive the test
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert done == (child, 0)


@pytest.mark.parametrize("threads", [-1, 257, 1.0, True, "2"])
def test_an_invalid_number_of_threads_is_refused(packed, threads):
    """A number of threads that makes no sense is refused, also where no thread would be used."""
    with mm_assets.open(packed) as dataset:
        for call in (
            lambda: dataset.read_batch([0], ["text"], threads=threads),
            lambda: dataset.read_modality("text", [0], threads=threads),
        ):
            with pytest.raises(ValueError, match="threads: found"):
                call()
