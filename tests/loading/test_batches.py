"""Batches when something goes wrong (damage, lost shards, failing transforms), and what they leave untouched."""

import gc
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mm_assets
from mm_assets import Dataset, MultimodalCollator, MultimodalLoader
from mm_assets.dataset.decoding import Batch
from mm_assets.errors import CollateError, CorruptError, FormatError, LimitError, LoaderError, TruncatedError
from mm_assets.fields import ImageField, ScalarField, TextField
from mm_assets.loading.batches import MAX_STAND_INS
from mm_assets.loading.loader import MAX_REPORTED

COUNT = 40
FIELDS = {
    "image": ImageField(encoding="png", size=(4, 5), channels=3),
    "label": ScalarField("int32"),
    "text": TextField(),
}
THREADS = (0, 1, 3)


def write(path: Path, indices: range) -> Path:
    with mm_assets.create(path, FIELDS, fsync=False) as writer:
        for i in indices:
            image = np.full((4, 5, 3), i, np.uint8)
            writer.write(f"id-{i}", {"image": image, "label": i, "text": f"the text of {i:04}"})
    return path


def damage(path: Path, *indices: int) -> None:
    """Changes a letter of some samples' texts."""
    content = path.read_bytes()
    for i in indices:
        text = f"the text of {i:04}".encode()
        assert content.count(text) == 1
        content = content.replace(text, text.replace(b"x", b"y"))
    path.write_bytes(content)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mm_assets")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Every test here ends with as many of our threads as it began with: none."""
    assert own_threads() == []
    yield
    gc.collect()
    wait_for_threads()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What ends here ends without a cycle having to be found."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def wait_for_threads() -> None:
    """Threads that a finaliser ended may take a moment."""
    limit = time.monotonic() + 120
    while own_threads() and time.monotonic() < limit:
        time.sleep(0.005)
    assert own_threads() == []


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Dataset]:
    with mm_assets.open(write(tmp_path / "a.mult", range(COUNT)), verify=True) as dataset:
        yield dataset


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Dataset]:
    """Samples 3, 4 and 17 are damaged."""
    path = write(tmp_path / "damaged.mult", range(COUNT))
    damage(path, 3, 4, 17)
    with mm_assets.open(path, verify=True) as dataset:
        yield dataset


def notes(error: BaseException) -> str:
    return "; ".join(error.__notes__)


# -- damage


@pytest.mark.parametrize("num_workers", THREADS)
def test_damage_raises_where_it_is(damaged: Dataset, num_workers: int) -> None:
    """The error names file, sample, modality and batch; batches before it are given, and the loader stays before it."""
    loader = MultimodalLoader(damaged, batch_size=8, shuffle=False, num_workers=num_workers)
    state = loader.state_dict()
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"damaged\.mult, sample 3, modality 'text'") as raised:
            list(loader)
        assert notes(raised.value) == "batch 0 of this rank, epoch 0, positions 0 to 8"
        assert own_threads() == []
        assert loader.state_dict() == state
    loader.load_state_dict({**state, "delivered": 5})
    iterator = iter(loader)
    assert next(iterator)["label"].tolist() == [*range(5, 13)]
    with pytest.raises(CorruptError, match="sample 17"):
        next(iterator)
    assert list(iterator) == []  # the iteration has ended with the error
    assert loader.state_dict()["delivered"] == 13


@pytest.mark.parametrize("on_damaged", ["raise", "skip"])
@pytest.mark.parametrize("num_workers", THREADS)
def test_what_exceeds_a_limit_is_never_skipped(damaged: Dataset, num_workers: int, on_damaged: Any) -> None:
    """The error says where the value is and names the setting; it is not counted among damaged samples."""
    small = damaged.with_settings({"image": {"size": None, "max_pixels": 19}})
    loader = MultimodalLoader(
        small, ["image", "label"], 8, shuffle=False, num_workers=num_workers, on_damaged=on_damaged
    )
    with pytest.raises(LimitError, match=r"damaged\.mult, sample 0, modality 'image': .* \(max_pixels\)") as raised:
        next(iter(loader))
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.setting, error.sample, error.modality) == ("max_pixels", 0, "image")
    assert not isinstance(error, FormatError)
    assert loader.damaged == []
    for read in (small.read_sample, lambda i: small.read_modality("image", [i]), lambda i: small.read_batch([i])):
        with pytest.raises(LimitError, match=r"damaged\.mult, sample 5, modality 'image': .* \(max_pixels\)"):
            read(5)


@pytest.mark.parametrize("num_workers", THREADS)
def test_damaged_samples_are_skipped_and_reported(damaged: Dataset, num_workers: int) -> None:
    """Others of the batch replace them, not valid; rows stay aligned, sizes stay; every other sample comes once."""
    loader = MultimodalLoader(damaged, batch_size=8, num_workers=num_workers, on_damaged="skip")
    found: list[int] = []
    for number, batch in enumerate(loader):
        assert len(batch["valid"]) == 8
        assert batch["label"].tolist() == batch["index"].tolist()
        assert batch["text"] == [f"the text of {i:04}" for i in batch["index"].tolist()]
        assert (batch["image"][:, 0, 0, 0] == batch["index"]).all()
        assert set(batch["index"].tolist()) == set(batch["index"][batch["valid"]].tolist())
        found += batch["index"][batch["valid"]].tolist()
        assert loader.state_dict()["delivered"] == 8 * (number + 1)
        told = {one.index for one in loader.damaged}
        assert loader.num_damaged == len(told) == 8 * (number + 1) - len(found)
    assert sorted(found) == [i for i in range(COUNT) if i not in (3, 4, 17)]
    assert sorted(one.index for one in loader.damaged) == [3, 4, 17]
    for one in loader.damaged:
        assert one.epoch == 0
        assert (one.error.sample, one.error.modality) == (one.index, "text")


def test_what_is_not_read_is_not_missed(damaged: Dataset) -> None:
    """A sample that is damaged in another modality is whole."""
    loader = MultimodalLoader(damaged, ["image", "label"], 8)
    assert sum(int(batch["valid"].sum()) for batch in loader) == COUNT


def test_a_batch_of_nothing_but_damage_has_another_sample(tmp_path: Path) -> None:
    """Where a whole batch is lost, a readable sample from elsewhere fills it, none valid; all ranks stay in step."""
    path = write(tmp_path / "a.mult", range(COUNT))
    damage(path, *range(20))
    with mm_assets.open(path, verify=True) as dataset:
        loader = MultimodalLoader(dataset, batch_size=10, shuffle=False, on_damaged="skip", num_workers=2)
        batches = list(loader)
    assert [int(batch["valid"].sum()) for batch in batches] == [0, 0, 10, 10]
    assert [len(batch["index"]) for batch in batches] == [10] * 4
    for batch in batches:
        assert batch["label"].tolist() == batch["index"].tolist()
        assert (batch["index"] >= 20).all()
    assert [one.index for one in loader.damaged] == list(range(20))


def test_when_nothing_can_be_read_it_is_an_error(tmp_path: Path) -> None:
    """A dataset of damage alone does not go round for ever."""
    path = write(tmp_path / "a.mult", range(COUNT))
    damage(path, *range(COUNT))
    with mm_assets.open(path, verify=True) as dataset:
        loader = MultimodalLoader(dataset, batch_size=10, on_damaged="skip")
        with pytest.raises(LoaderError, match=f"all 10 samples of a batch are damaged, and so are {MAX_STAND_INS} oth"):
            list(loader)


def test_reports_of_damage_are_bounded(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost shard is counted in full, and reported up to a limit."""
    monkeypatch.setattr("mm_assets.loading.loader.MAX_REPORTED", 2)
    assert MAX_REPORTED == 10_000
    path = Path(data.path)
    damage(path, 1, 2, 3, 4, 5)
    with mm_assets.open(path, verify=True) as dataset:
        loader = MultimodalLoader(dataset, batch_size=10, on_damaged="skip", num_workers=0)
        list(loader)
    assert (len(loader.damaged), loader.num_damaged) == (2, 5)


def test_a_repeated_sample_may_be_the_damaged_one(damaged: Dataset) -> None:
    """Repeats for even ranks and stand-ins for damage do not get into each other's way."""
    ranks = [
        MultimodalLoader(damaged, ["label", "text"], 13, rank=rank, world_size=3, shuffle=False, on_damaged="skip")
        for rank in range(3)
    ]
    found = [batch for loader in ranks for batch in loader]
    assert sorted(i for b in found for i in b["index"][b["valid"]].tolist()) == [
        i for i in range(COUNT) if i not in (3, 4, 17)
    ]
    assert all(batch["text"] == [f"the text of {i:04}" for i in batch["label"].tolist()] for batch in found)


def test_a_resumed_run_skips_alike(damaged: Dataset) -> None:
    """Stopped and resumed between damaged samples, the batches are the same."""

    def loader() -> MultimodalLoader:
        return MultimodalLoader(damaged, ["label", "text"], 7, on_damaged="skip")

    expected = [(batch["label"].tolist(), batch["valid"].tolist()) for batch in loader()]
    first, second = loader(), loader()
    found = [(batch["label"].tolist(), batch["valid"].tolist()) for batch in islice(first, 3)]
    second.load_state_dict(first.state_dict())
    found += [(batch["label"].tolist(), batch["valid"].tolist()) for batch in second]
    assert found == expected
    assert first.num_damaged + second.num_damaged == 3


@pytest.fixture
def truncated(tmp_path: Path) -> Iterator[Dataset]:
    """Two shards, of which the second is truncated after the dataset was opened elsewhere."""
    paths = [write(tmp_path / "a.mult", range(20)), write(tmp_path / "b.mult", range(20, COUNT))]
    with mm_assets.open(paths) as dataset:
        content = pickle.dumps(dataset)
    os.truncate(paths[1], paths[1].stat().st_size // 2)
    with pickle.loads(content) as dataset:
        yield dataset


@pytest.mark.parametrize("num_workers", THREADS)
def test_a_truncated_shard_raises(truncated: Dataset, num_workers: int) -> None:
    """The error names the file; no thread waits for it."""
    loader = MultimodalLoader(truncated, batch_size=8, num_workers=num_workers)
    with pytest.raises(TruncatedError, match=r"b\.mult") as raised:
        list(loader)
    assert "batch 0 of this rank" in notes(raised.value)
    assert own_threads() == []


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_truncated_shard_is_skipped(truncated: Dataset, shuffle: bool) -> None:
    """All of its samples are reported, and those of the other shard come once."""
    loader = MultimodalLoader(truncated, batch_size=8, shuffle=shuffle, on_damaged="skip")
    found = [i for batch in loader for i in batch["index"][batch["valid"]].tolist()]
    assert sorted(found) == list(range(20))
    assert sorted(one.index for one in loader.damaged) == list(range(20, COUNT))
    assert all("b.mult" in str(one.error) for one in loader.damaged)


def test_damage_that_no_sample_has_alone_is_not_skipped() -> None:
    """A source that fails for a batch but for none of its samples raises what it raised."""

    class Odd:
        names = ("x",)

        def __len__(self) -> int:
            return 8

        def batch_layout(self, n: int, modalities: Any) -> dict[str, Any]:
            return {}

        def read_batch(self, indices: Any, modalities: Any, **_: Any) -> dict[str, Batch]:
            if len(indices) > 1:
                raise FormatError("odd", "is odd")
            return {"x": Batch([1], np.array([True]))}

    with pytest.raises(FormatError, match="is odd"):
        list(MultimodalLoader(Odd(), batch_size=4, on_damaged="skip", num_workers=0))


@pytest.mark.parametrize("form", ["mult", "mstr"])
def test_decoded_batches_are_checked_by_default_and_raw_bytes_by_choice(tmp_path: Path, form: str) -> None:
    """A loader over a dataset that checks nothing itself notices damage that decodes, unless that is turned off."""
    path = tmp_path / f"a.{form}"
    write(path, range(COUNT))
    damage(path, 3)
    with mm_assets.open(path) as dataset:
        with pytest.raises(CorruptError, match="sample 3, modality 'text'"):
            list(MultimodalLoader(dataset, ["text"], 8))
        assert bytes(dataset.read_raw([3], ["text"])["text"][0] or b"") == b"the teyt of 0003"
    with mm_assets.open(path, verify=False) as dataset:
        unchecked = MultimodalLoader(dataset, ["text"], COUNT, shuffle=False)
        assert next(iter(unchecked))["text"][3] == "the teyt of 0003"
    with mm_assets.open(path, verify=True) as dataset:
        for read in (
            lambda: dataset.read_raw([3], ["text"])["text"][0],
            lambda: dataset.read_raw([2, 3], ["text"])["text"],
        ):
            with pytest.raises(CorruptError, match="sample 3, modality 'text'"):
                read()


# -- transforms and collators that fail


@pytest.mark.parametrize("num_workers", THREADS)
def test_an_exception_in_a_transform_names_its_sample(data: Dataset, num_workers: int) -> None:
    """It comes as it was raised, with notes on modality, sample and batch."""

    def fail(text: str) -> str:
        if text.endswith("0021"):
            raise RuntimeError("no such word")
        return text

    loader = MultimodalLoader(data, batch_size=8, shuffle=False, num_workers=num_workers, transforms={"text": fail})
    iterator = iter(loader)
    assert [next(iterator)["label"][0] for _ in range(2)] == [0, 8]
    with pytest.raises(RuntimeError, match="no such word") as raised:
        next(iterator)
    expected = "transform of 'text', sample 21; batch 2 of this rank, epoch 0, positions 16 to 24"
    assert notes(raised.value) == expected
    assert loader.state_dict()["delivered"] == 16
    assert own_threads() == []


def test_an_exception_of_the_collator_names_its_batch(data: Dataset) -> None:
    """A rule that the values do not fit says output, row and batch."""
    collator = MultimodalCollator({"text": {"stack": True}})
    with pytest.raises(CollateError, match="output 'text', row 0") as raised:
        list(MultimodalLoader(data, batch_size=8, collator=collator))
    assert "batch 0 of this rank" in notes(raised.value)


def test_whatever_a_transform_raises_comes_through(data: Dataset) -> None:
    """Also what is no `Exception`, such as the exit of the program; nothing passes for the end of the epoch."""

    def leave(text: str) -> str:
        raise SystemExit(3)

    for num_workers in THREADS:
        with pytest.raises(SystemExit):
            list(MultimodalLoader(data, ["text"], 8, transforms={"text": leave}, num_workers=num_workers))
        stops = {"text": lambda text: next(iter(()))}
        with pytest.raises(RuntimeError, match="StopIteration was raised"):
            list(MultimodalLoader(data, ["text"], 8, transforms=stops, num_workers=num_workers))


# -- consumers that leave


@pytest.mark.usefixtures("no_collector")
def test_a_loop_that_is_left_early_leaves_no_thread(data: Dataset) -> None:
    """After a break, an exception in the loop, or `close`, the threads end; `with` closes."""
    loader = MultimodalLoader(data, batch_size=4, num_workers=3)
    for _ in loader:
        assert own_threads()
        break
    wait_for_threads()

    def fails() -> None:
        for _ in loader:
            raise ValueError("in the loop")

    with pytest.raises(ValueError, match="in the loop"):
        fails()
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    iterator.close()
    assert list(iterator) == []
    with iter(loader) as batches:
        next(batches)
    assert list(batches) == []
    wait_for_threads()


def test_an_iteration_that_is_garbage_ends(data: Dataset) -> None:
    """Also one that a cycle holds, wherever the collector finds it: nothing waits for itself."""

    class Trainer:
        def __init__(self) -> None:
            self.batches = iter(MultimodalLoader(data, batch_size=2, num_workers=3))
            self.myself = self
            next(self.batches)

    gone = []
    for _ in range(5):
        trainer = Trainer()
        gone.append(weakref.ref(trainer))
        del trainer

    # Collected within one of the loader's own threads too.
    calls = itertools.count()

    def collect(text: str) -> str:
        if next(calls) % 10 == 0:
            gc.collect()
        return text

    list(MultimodalLoader(data, ["text"], 20, num_workers=2, transforms={"text": collect}))
    assert all(one() is None for one in gone)


def test_an_iteration_that_was_never_asked_starts_nothing(data: Dataset) -> None:
    """Threads come with the first batch."""
    iterator = iter(MultimodalLoader(data))
    assert own_threads() == []
    iterator.close()
    assert list(iterator) == []


def test_one_iteration_at_a_time(data: Dataset) -> None:
    """A new one, or a move, ends the one before; that says so rather than giving batches of the other's."""
    loader = MultimodalLoader(data, ["label"], 10, shuffle=False)
    first = iter(loader)
    assert next(first)["label"][0] == 0
    second = iter(loader)
    assert next(second)["label"][0] == 0
    assert loader.epoch == 1
    for move in (lambda: None, lambda: loader.set_epoch(4), loader.rewind):
        move()
        with pytest.raises(LoaderError, match="this iteration has ended"):
            next(first)
    with pytest.raises(LoaderError, match="this iteration has ended"):
        next(second)
    assert own_threads() == []


def test_a_dataset_may_be_closed_during_an_iteration(data: Dataset) -> None:
    """The iteration reads on: it has the files itself, until it ends."""
    iterator = iter(MultimodalLoader(data, ["label", "image"], 4, num_workers=2))
    next(iterator)
    data.close()
    assert len(list(iterator)) == 9
    with pytest.raises(ValueError, match="closed"):
        list(MultimodalLoader(data, ["label"]))


def test_the_interpreter_ends_during_an_iteration(data: Dataset) -> None:
    """A program may end with an iteration under way, held by a global: it ends, and says nothing."""
    program = """
        import sys, mm_assets
        data = mm_assets.open(sys.argv[1])
        batches = iter(mm_assets.MultimodalLoader(data, batch_size=2, num_workers=3, prefetch=6))
        print(len(next(batches)["text"]))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), data.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_loaders_in_many_threads_share_a_dataset(data: Dataset) -> None:
    """Each has its own threads and place; all get everything."""
    found: list[list[int]] = []

    def work(seed: int) -> None:
        loader = MultimodalLoader(data, ["label", "image"], 3, num_workers=2, seed=seed)
        found.append(sorted(i for batch in loader for i in batch["label"].tolist()))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [list(range(COUNT))] * 6
