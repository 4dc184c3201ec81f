"""The loader: what batches hold, transforms, and what is refused."""

import inspect
import os
import sys
import threading
import time
from itertools import islice, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mm_assets
from mm_assets import Dataset, MultimodalCollator, MultimodalLoader
from mm_assets.errors import ConfigError, LoaderError

from .samples import COUNT, FIELDS, indices_of, sample

# -- what a batch holds


def test_a_path_is_not_a_dataset(files: list[str]) -> None:
    """A loader that is given a path says what it takes instead."""
    paths: list[Any] = [files[0], Path(files[0])]
    for path in paths:
        with pytest.raises(TypeError, match=r"expected what mm_assets\.open gives for it"):
            MultimodalLoader(path)


def test_a_wrong_shuffle_is_refused(data: Dataset) -> None:
    """A wrong order is refused with those that there are."""
    with pytest.raises(ConfigError, match=r"shuffle: found 'yes', expected True, False, or Blocks\(256, 16\)"):
        MultimodalLoader(data, shuffle="yes")


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_every_row_is_the_sample_of_its_index(data: Dataset, num_workers: int) -> None:
    """Row i of every modality is that of sample index[i], masked where absent, whatever the threads."""
    loader = MultimodalLoader(data, batch_size=8, num_workers=num_workers)
    seen = []
    for batch in loader:
        assert set(batch) == {*FIELDS, "present", "valid", "index"}
        assert batch["index"].dtype == np.int64
        assert batch["valid"].all()
        for row, index in enumerate(batch["index"].tolist()):
            expected = sample(index)
            seen.append(index)
            for name, value in expected.items():
                assert batch["present"][name][row] == (value is not None), name
                found = batch[name][row]
                assert np.array_equal(found, value if value is not None or name == "tokens" else np.zeros((4, 5, 3)))
    assert sorted(seen) == list(range(COUNT))
    assert seen != sorted(seen)
    assert len(loader) == 7


@pytest.mark.parametrize(("num_workers", "prefetch"), [(2, 2), (4, 2), (8, 4), (3, 2), (2, 1)])
def test_all_threads_work_on_batches(data: Dataset, num_workers: int, prefetch: int) -> None:
    """Behind the first batch too, as many transforms as there are threads run at a time, and never more."""
    lock, all_busy = threading.Lock(), threading.Event()
    calls, busy, most = 0, 0, 0

    def transform(value: Any) -> Any:
        nonlocal calls, busy, most
        with lock:
            calls += 1
            is_behind = calls > 8
            busy += is_behind
            most = max(most, busy)
        if is_behind:
            if busy >= num_workers:
                all_busy.set()
            assert all_busy.wait(60)
            with lock:
                busy -= 1
        return value

    loader = MultimodalLoader(
        data,
        ["label"],
        batch_size=8,
        num_workers=num_workers,
        prefetch=prefetch,
        transforms={"label": transform},
    )
    assert sum(len(batch["index"]) for batch in loader) == COUNT
    assert most == num_workers


def test_only_the_modalities_that_are_needed_are_read(data: Dataset) -> None:
    """By default those of the collator's rules, else those that are named."""
    batch = next(iter(MultimodalLoader(data, ["text"], 4)))
    assert set(batch) == {"text", "present", "valid", "index"}
    collator = MultimodalCollator(
        {"ids": {"pad_value": 0, "source": "tokens", "max_length": 7}, "label": {"stack": True}}
    )
    batch = next(iter(MultimodalLoader(data, batch_size=4, collator=collator)))
    assert set(batch) == {"ids", "label", "present", "lengths", "valid", "index"}
    assert batch["ids"].shape == (4, 7)
    for index, length in zip(batch["index"].tolist(), batch["lengths"]["ids"].tolist(), strict=True):
        assert length == (0 if index % 3 == 2 else index % 7)


def test_any_callable_may_collate(data: Dataset) -> None:
    """One that is not ours gets a list of samples; a dict of its gets `valid` and `index`, anything else stays."""

    def texts(samples: list[dict[str, Any]]) -> dict[str, Any]:
        assert [sample["image"] is None for sample in samples] == [sample["label"] % 5 == 4 for sample in samples]
        return {"texts": [sample["text"] for sample in samples], "valid": "mine"}

    batch = next(iter(MultimodalLoader(data, ["image", "label", "text"], 20, collator=texts)))
    assert batch["texts"] == [f"text {i}" for i in batch["index"].tolist()]
    assert batch["valid"] == "mine"
    labels = next(iter(MultimodalLoader(data, ["label"], 3, False, collator=lambda s: [x["label"] for x in s])))
    assert labels == [0, 1, 2]


def test_tensors_come_with_a_collator_for_torch(data: Dataset) -> None:
    """Arrays, masks, `valid` and `index` are tensors; a batch stays as it is while later ones are read."""
    torch = pytest.importorskip("torch")
    collator = MultimodalCollator({"image": {"stack": True}, "label": {"stack": True}}, return_tensors="pt")
    kept = list(MultimodalLoader(data, batch_size=5, collator=collator, num_workers=2))
    for batch in kept:
        for name in ("image", "label", "valid", "index"):
            assert isinstance(batch[name], torch.Tensor), name
        shown = batch["image"][:, 0, 0, 0].long()
        assert torch.equal(shown, torch.where(batch["present"]["image"], batch["index"], 0))
        assert torch.equal(batch["label"].long(), batch["index"])


def test_tensors_are_the_memory_that_was_decoded_into(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the decoder to torch nothing is copied: the tensor stands where the dataset was asked to write."""
    pytest.importorskip("torch")
    asked: list[int] = []
    read = Dataset.read_batch

    def note(self: Dataset, *args: Any, out: Any, **options: Any) -> Any:
        asked.append(out["image"].ctypes.data)
        return read(self, *args, out=out, **options)

    note.__signature__ = inspect.signature(read)  # the loader looks whether there is a `verify`
    monkeypatch.setattr(Dataset, "read_batch", note)
    collator = MultimodalCollator({"image": {"stack": True}}, return_tensors="pt")
    kept = list(MultimodalLoader(data, batch_size=10, collator=collator, num_workers=0))
    assert [batch["image"].data_ptr() for batch in kept] == asked
    assert len(asked) == 6


def test_batches_stay_as_they_are_while_they_are_held(data: Dataset) -> None:
    """Arrays of a batch, or a view of one row, are not written to again as long as they are referenced."""
    rows, batches = [], []
    for number, batch in enumerate(MultimodalLoader(data, ["image"], 4, num_workers=2)):
        if number % 2:
            batches.append(batch)
        else:
            rows.append((int(batch["index"][0]), batch["image"][0]))
    for batch in batches:
        for row, index in enumerate(batch["index"].tolist()):
            assert (batch["image"][row] == (0 if index % 5 == 4 else index)).all()
    assert all((row == (0 if index % 5 == 4 else index)).all() for index, row in rows)


def test_memory_is_reused_once_it_is_released(data: Dataset) -> None:
    """A loop that keeps nothing needs no new array for every batch."""
    loader = MultimodalLoader(data, ["image"], 2, num_workers=2)
    assert len({batch["image"].ctypes.data for batch in loader}) < 10 < len(loader)


# -- transforms


@pytest.mark.parametrize("num_workers", [0, 3])
def test_transforms_change_values_that_are_there(data: Dataset, num_workers: int) -> None:
    """Each value that is present goes through; None makes it absent; the collator takes what comes out."""
    transforms = {
        "image": lambda image: image.astype(np.float32) / 2,
        "text": str.upper,
        "label": lambda label: None if label % 2 else int(label),
    }
    collator = MultimodalCollator({"image": {"stack": True}, "text": {}, "label": {"stack": True}})
    loader = MultimodalLoader(data, None, 10, collator=collator, transforms=transforms, num_workers=num_workers)
    for batch in loader:
        index = batch["index"]
        assert batch["image"].dtype == np.float32
        expected = np.where(index % 5 == 4, 0, index / 2)
        assert np.array_equal(batch["image"][:, 0, 0, 0], expected)
        assert batch["present"]["image"].tolist() == (index % 5 != 4).tolist()
        assert batch["text"] == [f"TEXT {i}" for i in index.tolist()]
        assert batch["present"]["label"].tolist() == (index % 2 == 0).tolist()
        assert batch["label"].tolist() == np.where(index % 2, 0, index).tolist()


def test_a_transforms_randomness_is_the_samples(data: Dataset) -> None:
    """What `rng` draws depends on seed, epoch, sample and modality; not on batch, rank or threads."""

    def drawn(**options: Any) -> dict[int, Any]:
        transforms = {
            "label": lambda value, rng: rng.integers(10**9),
            "text": lambda value, *, rng: int(rng.integers(10**9)),
        }
        epoch = options.pop("epoch", 0)
        loader = MultimodalLoader(data, ["label", "text"], transforms=transforms, **options)
        loader.set_epoch(epoch)
        return {
            index: (int(label), text)
            for batch in loader
            for index, label, text in zip(batch["index"].tolist(), batch["label"], batch["text"], strict=True)
        }

    first = drawn(batch_size=7, num_workers=3)
    assert drawn(batch_size=53, num_workers=0, shuffle=False) == first
    part = drawn(batch_size=5, rank=1, world_size=2)
    assert part == {index: first[index] for index in part}
    assert all(label != text for label, text in first.values())
    assert drawn(batch_size=7, epoch=1) != first
    assert drawn(batch_size=7, seed=1) != first
    assert len({label for label, _ in first.values()}) == COUNT


# -- what is refused


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"prefetch": 0}, "prefetch"),
        ({"num_workers": -1}, "num_workers"),
        ({"shuffle": "random"}, "shuffle"),
        ({"seed": "x"}, "seed"),
        ({"rank": 0}, "rank, world_size"),
        ({"on_damaged": "ignore"}, "on_damaged"),
        ({"modalities": "text"}, "modalities"),
        ({"modalities": ["text"], "transforms": {"image": abs}}, "transforms.image"),
        ({"modalities": ["text"], "collator": MultimodalCollator({"image": {}})}, "modalities"),
        ({"collator": MultimodalCollator({"index": {"source": "label"}})}, "index"),
        ({"last": "some"}, "last"),
        ({"transform": "crop"}, "transform"),
        ({"collator": {"image": {"type": "stack"}}}, "collator"),
        ({"collator": [MultimodalCollator()]}, "collator"),
        ({"transforms": {"text": "upper"}}, "transforms.text"),
    ],
)
def test_wrong_arguments_are_refused(data: Dataset, options: dict[str, Any], key: str) -> None:
    """A `ConfigError` names the argument, before anything is read."""
    with pytest.raises(ConfigError, match=f"{key}: "):
        MultimodalLoader(data, **options)


def test_an_unknown_modality_is_refused(data: Dataset) -> None:
    """It is a `KeyError` that says what there is."""
    with pytest.raises(KeyError, match="no modality 'smell'; there are image"):
        MultimodalLoader(data, ["smell"])


def test_memory_is_pinned_only_where_there_is_a_device() -> None:
    """Without an accelerator `pin_memory` is refused rather than left out."""
    torch = pytest.importorskip("torch")
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    with pytest.raises(ConfigError, match="no accelerator"):
        MultimodalCollator({"image": {"stack": True}}, return_tensors="pt", pin_memory=True)
    with pytest.raises(ConfigError, match="needs return_tensors='pt'"):
        MultimodalCollator(pin_memory=True)


def test_pinned_tensors_are_asked_of_torch(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an accelerator arrays are decoded into pinned memory, and what the collator allocated is pinned."""
    torch = pytest.importorskip("torch")
    real, asked, pinned = torch.empty, [], []

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        asked.append(pin_memory)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(1) or tensor)
    collator = MultimodalCollator(
        {"image": {"stack": True}, "t": {"type": "ragged", "source": "tokens"}}, return_tensors="pt", pin_memory=True
    )
    batches = list(MultimodalLoader(data, batch_size=30, collator=collator, num_workers=0))
    assert asked == [True, True]
    assert len(pinned) == 2 * len(["image", "values", "offsets", "image", "t", "valid", "index"])
    assert [len(batch["image"]) for batch in batches] == [30, 23]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_loaders_work_in_a_process_forked_during_reading(data: Dataset) -> None:
    """A child that inherits an iteration cannot continue it, but can drop it and start another."""
    loader = MultimodalLoader(data, ["image", "label"], 5, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(LoaderError, match="begun in another process"):
                next(iterator)
            iterator.close()
            del iterator
            status = 0 if len(indices_of(loader)) == COUNT else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == 10


def test_a_mapping_is_not_a_collator(data: Dataset) -> None:
    """Rules in place of a collator are refused when the loader is made, with what takes them."""
    with pytest.raises(ConfigError, match="dict of length 1, expected a MultimodalCollator"):
        MultimodalLoader(data, collator={"image": {"stack": True}})  # type: ignore[arg-type]  # what is tested


def test_dropping_everything_is_warned_of(data: Dataset) -> None:
    """A loader that drops the last batch and so everything warns when it is made; any other does not."""
    with pytest.warns(RuntimeWarning, match="leaves out all 53 samples: they are fewer than batch_size takes"):
        assert list(MultimodalLoader(data, ["label"], 54, last="drop")) == []
    with pytest.warns(RuntimeWarning, match="batch_size 14 on 4 ranks takes"):
        MultimodalLoader(data, ["label"], 14, last="drop", rank=0, world_size=4)
    assert len(MultimodalLoader(data, ["label"], 13, last="drop", rank=0, world_size=4)) == 1
    assert len(MultimodalLoader(data.select([]), ["label"], 13, last="drop")) == 0


# -- in other processes


def workers(monkeypatch: pytest.MonkeyPatch, number: int, count: int) -> None:
    """Makes this process look like a worker of torch's DataLoader."""
    info = SimpleNamespace(id=number, num_workers=count)
    monkeypatch.setitem(sys.modules, "torch.utils.data", SimpleNamespace(get_worker_info=lambda: info))


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_workers_of_torch_share_the_batches(data: Dataset, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Taken from the workers in turn, as torch does, the batches are those of a loader in no worker, each once."""

    def loader() -> MultimodalLoader:
        return MultimodalLoader(data, ["label"], 5, seed=3, num_workers=2, rank=1, world_size=2)

    first = loader()
    expected = [batch["index"].tolist() for batch in first]
    expected_later = [batch["index"].tolist() for batch in first]
    state = loader().state_dict() | {"delivered": 20}
    shares, later, resumed = [], [], []
    for number in range(count):
        workers(monkeypatch, number, count)
        one = loader()
        shares.append([batch["index"].tolist() for batch in one])
        later.append([batch["index"].tolist() for batch in one])
        other = loader()
        other.load_state_dict(state)
        resumed.append([batch["index"].tolist() for batch in other])

    def in_turn(shares: list[list[Any]]) -> list[Any]:
        return [batch for batches in zip_longest(*shares) for batch in batches if batch is not None]

    assert in_turn(shares) == expected
    assert in_turn(later) == expected_later
    assert in_turn(resumed) == expected[2:]


def test_a_rank_that_comes_later_is_noticed(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that was made before its process had a rank is refused, rather than read everything on every rank."""
    loader = MultimodalLoader(data, ["label"], 10)
    alone = MultimodalLoader(data, ["label"], 10, rank=0, world_size=1)
    mixed = mm_assets.mix({"a": (MultimodalLoader(data, ["label"], 10), 1)})
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="made as rank 0 of 1, and this process is rank 1 of 2"):
        iter(loader)
    with pytest.raises(ConfigError, match="made as rank 0 of 1"):
        iter(mixed)
    assert len(list(alone)) == 6
    here = MultimodalLoader(data, ["label"], 10)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert len(list(here)) == 3  # in a process that was spawned for it


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_torch_dataset_has_each_batch_once(data: Dataset, num_workers: int) -> None:
    """Through torch's DataLoader, with and without workers, the batches are the loader's own, in its order."""
    torch = pytest.importorskip("torch.utils.data")
    expected = [batch["index"].tolist() for batch in MultimodalLoader(data, ["label"], 5, seed=3)]
    dataset = MultimodalLoader(data, ["label"], 5, seed=3).torch()
    assert len(dataset) == len(expected)
    batches = torch.DataLoader(dataset, batch_size=None, num_workers=num_workers)
    assert [batch["index"].tolist() for batch in batches] == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_a_torch_dataset_goes_to_epochs(data: Dataset, persistent: bool) -> None:
    """`set_epoch` reaches workers, also those that stay; each epoch is the loader's."""
    torch = pytest.importorskip("torch.utils.data")
    dataset = MultimodalLoader(data, ["label"], 5).torch()
    batches = torch.DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    for epoch in (0, 1, 7):
        dataset.set_epoch(epoch)
        expected = MultimodalLoader(data, ["label"], 5)
        expected.set_epoch(epoch)
        assert [i for batch in batches for i in batch["index"].tolist()] == [
            i for batch in expected for i in batch["index"].tolist()
        ]


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, True)])
def test_a_torch_dataset_that_was_left_early_goes_on_with_the_next_epoch(
    data: Dataset, num_workers: int, persistent: bool
) -> None:
    """After a break the next loop has all batches of the next epoch, as with the loader itself."""
    torch = pytest.importorskip("torch.utils.data")
    loader = MultimodalLoader(data, ["label"], 5)
    epochs = [[batch["index"].tolist() for batch in loader] for _ in range(3)]
    dataset = MultimodalLoader(data, ["label"], 5).torch()
    batches = torch.DataLoader(dataset, batch_size=None, num_workers=num_workers, persistent_workers=persistent)
    for stop, expected in zip((3, None, None), epochs, strict=True):
        assert [batch["index"].tolist() for batch in islice(batches, stop)] == expected[:stop]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_resumes_a_torch_dataset(data: Dataset, num_workers: int) -> None:
    """Torchdata's loader, stopped after any batch, continues with the batch after it, and then with the next epoch."""
    pytest.importorskip("torch")
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def batches() -> Any:
        return stateful(MultimodalLoader(data, ["label"], 9).torch(), batch_size=None, num_workers=num_workers)

    def indices(loader: Any, limit: int | None = None) -> list[list[int]]:
        return [batch["index"].tolist() for batch in islice(loader, limit)]

    expected = indices(batches())
    for stop in range(1, len(expected)):
        first, second = batches(), batches()
        found = indices(first, stop)
        second.load_state_dict(first.state_dict())
        assert found + indices(second) == expected


def test_a_torch_dataset_refuses_the_state_of_other_workers(data: Dataset) -> None:
    """A position among other workers, or of something else, is a `LoaderError`."""
    pytest.importorskip("torch")
    dataset = MultimodalLoader(data, ["label"], 9).torch()
    for state, message in (({}, "expected loader"), ({**dataset.state_dict(), "num_workers": 3}, "one of 3 workers")):
        with pytest.raises(LoaderError, match=message):
            dataset.load_state_dict(state)


# -- whole samples, and where the time goes


def test_a_sample_is_transformed_as_a_whole(data: Dataset) -> None:
    """A function of a sample may join its values, add and leave out names, and write to its arrays."""

    def join(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        sample["state"][0] = rng.integers(1000)
        return {"joined": f"{sample['text']} {sample['label']}", "state": sample["state"], "tokens": sample["tokens"]}

    words = {"type": "ragged", "source": "tokens"}
    rules = MultimodalCollator({"joined": {}, "state": {"stack": True}, "words": words})
    runs = []
    for threads in (0, 3):
        loader = MultimodalLoader(data, batch_size=8, transform=join, collator=rules, num_workers=threads)
        rows = {}
        for batch in loader:
            for row, index in enumerate(batch["index"].tolist()):
                assert batch["joined"][row] == f"text {index} {index}"
                assert batch["present"]["words"][row] == (index % 3 != 2)
                rows[index] = batch["state"][row].tolist()
        assert all(values[1:] == [index / 2, -index] for index, values in rows.items())
        runs.append(rows)
    assert runs[0] == runs[1]
    assert len({values[0] for values in runs[0].values()}) > COUNT // 2


def test_a_transform_that_gives_no_sample_is_refused(data: Dataset) -> None:
    """A result that is not a dict is a `ConfigError` with the sample."""
    with pytest.raises(ConfigError, match="transform: gave NoneType None, expected a dict") as error:
        list(MultimodalLoader(data, ["text"], transform=lambda sample: None, num_workers=0))
    assert any("transform, sample " in note for note in error.value.__notes__)


def test_a_collators_randomness_is_the_batchs(data: Dataset) -> None:
    """What its `rng` draws depends on seed, epoch and samples, not on threads."""

    def draw(samples: list[dict[str, Any]], rng: np.random.Generator) -> dict[str, Any]:
        return {"drawn": int(rng.integers(2**60))}

    def drawn(**options: Any) -> list[int]:
        loader = MultimodalLoader(data, ["label"], 10, collator=draw, **options)
        return [batch["drawn"] for _ in range(2) for batch in loader]

    first = drawn(num_workers=0)
    assert drawn(num_workers=3) == first
    assert len(set(first)) == len(first)
    assert set(drawn(seed=1)).isdisjoint(first)


@pytest.mark.parametrize("num_workers", [0, 3])
def test_the_parts_of_a_batchs_time_are_all_of_it(data: Dataset, num_workers: int) -> None:
    """Waits in a transform, in the collator and in the training loop are in their numbers, and nothing is missing."""

    def wait(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.002)
        return sample

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        time.sleep(0.02)
        return {"text": samples}

    loader = MultimodalLoader(data, ["text"], 10, transform=wait, collator=collate, num_workers=num_workers)
    assert loader.stats().total == 0
    began = time.perf_counter()
    for _ in loader:
        time.sleep(0.01)
    seconds, stats = time.perf_counter() - began, loader.stats()
    assert stats.num_batches == len(loader) == 6
    assert stats.transform >= 0.002 * COUNT / max(1, num_workers)  # threads share the first batch
    assert stats.collate >= 0.02 * 6
    assert stats.decode > 0
    assert stats.storage > 0
    assert stats.starved + 6 * 0.01 <= seconds
    if not num_workers:  # then each batch is made when it is asked for
        assert stats.total <= stats.starved <= seconds
        assert stats.wait < stats.transform
