"""The loader: what batches hold, exactly once an epoch, resumed bit for bit, the same on any ranks and threads."""

import inspect
import json
import os
import pickle
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import Dataset, MultimodalCollator, MultimodalLoader
from mm_assets.dataset.manifest import Manifest, PackedFile
from mm_assets.errors import ConfigError, LoaderError
from mm_assets.fields import ImageField, NDArrayField, ScalarField, TextField, TokensField
from mm_assets.formats import convert

COUNT = 53
FIELDS = {
    "image": ImageField(encoding="png", size=(4, 5), channels=3),
    "tokens": TokensField(),
    "label": ScalarField("int32"),
    "state": NDArrayField("float32", (3,)),
    "text": TextField(),
}


def sample(i: int) -> dict[str, Any]:
    """Sample `i`; each third one has no tokens, each fifth no image."""
    return {
        "image": None if i % 5 == 4 else np.full((4, 5, 3), i, np.uint8),
        "tokens": None if i % 3 == 2 else np.arange(i % 7, dtype=np.int64),
        "label": i,
        "state": np.array([i, i / 2, -i], np.float32),
        "text": f"text {i}",
    }


def write(path: Path, indices: range) -> str:
    with mm_assets.create(path, FIELDS, fsync=False) as writer:
        for i in indices:
            writer.write(f"id-{i}", sample(i))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("loader")
    return [write(folder / "a.mult", range(20)), write(folder / "b.mult", range(20, COUNT))]


@pytest.fixture(scope="module")
def data(files: list[str]) -> Iterator[Dataset]:
    with mm_assets.open(files) as dataset:
        yield dataset


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def plain(value: Any) -> Any:
    """A batch as bytes and plain values, to be compared bit for bit."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    return value


def run(loader: MultimodalLoader, limit: int | None = None) -> list[Any]:
    return [plain(batch) for batch in islice(loader, limit)]


def indices_of(loader: MultimodalLoader) -> list[int]:
    return [i for batch in loader for i in batch["index"][batch["valid"]].tolist()]


# -- what a batch holds


def test_a_path_is_not_a_dataset(files: list[str]) -> None:
    """A loader that is given a path says what it takes instead."""
    paths: list[Any] = [files[0], Path(files[0])]
    for path in paths:
        with pytest.raises(TypeError, match=r"expected what mm_assets\.open gives for it"):
            MultimodalLoader(path)


def test_a_wrong_shuffle_is_refused(data: Dataset) -> None:
    """A wrong order is refused with those that there are."""
    with pytest.raises(ConfigError, match="shuffle: found 'yes', expected True, False, 'full' or 'block'"):
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


@pytest.mark.parametrize(("num_workers", "prefetch_batches"), [(2, 2), (4, 2), (8, 4), (3, 2), (2, 1)])
def test_all_threads_work_on_batches(data: Dataset, num_workers: int, prefetch_batches: int) -> None:
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
        prefetch_batches=prefetch_batches,
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


# -- order


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.fixed_dictionaries({
            "batch_size": st.integers(1, 20),
            "world_size": st.integers(1, 4),
            "even_batches": st.booleans(),
            "num_workers": st.sampled_from([0, 2]),
            "prefetch_batches": st.integers(1, 4),
        }),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([True, False, "block"]),
    st.integers(0, 5),
    st.data(),
)  # fmt: skip
def test_each_sample_comes_exactly_once_whatever_the_ranks(
    data: Dataset, runs: list[dict[str, Any]], shuffle: bool | str, epoch: int, draw: st.DataObject
) -> None:
    """Over all ranks of an epoch, resumed with other ranks and batch sizes, every sample is valid in one row."""
    state: dict[str, Any] | None = None
    found: list[int] = []
    for number, options in enumerate(runs):
        ranks = [
            MultimodalLoader(data, ["label"], shuffle=shuffle, seed=3, epoch=epoch, block_size=5, rank=rank, **options)
            for rank in range(options["world_size"])
        ]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        # Ranks that have fewer batches are done first: the first rank's state is that of all in between.
        most = min(sum(1 for _ in loader.plan.steps(state["delivered"] if state else 0)) for loader in ranks)
        limit = None if number == len(runs) - 1 else draw.draw(st.integers(0, most))
        for loader in ranks:
            for batch in islice(loader, limit):
                assert batch["label"].tolist() == batch["index"].tolist()
                found += batch["index"][batch["valid"]].tolist()
        state = ranks[0].state_dict()
        if limit is not None:
            assert all(loader.state_dict() == state for loader in ranks)
    assert sorted(found) == list(range(COUNT))
    assert state is not None
    assert (state["epoch"], state["delivered"]) == (epoch + 1, 0)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries({
        "batch_size": st.integers(1, 20),
        "shuffle": st.sampled_from([True, False, "block"]),
        "drop_last": st.booleans(),
        "seed": st.integers(),
    }),
    st.integers(0, 60),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0, 1, 3]),
)  # fmt: skip
def test_a_resumed_run_is_the_uninterrupted_one(
    data: Dataset, options: dict[str, Any], stop: int, first_threads: int, second_threads: int
) -> None:
    """Stopped after any batch and resumed in a new loader: the same bytes in the same batches, over epochs."""

    def loader(threads: int) -> MultimodalLoader:
        noise = {"state": lambda value, rng: value + rng.normal(size=3).astype(np.float32)}
        return MultimodalLoader(data, num_workers=threads, transforms=noise, **options)

    whole = loader(first_threads)
    expected = [batch for _ in range(2) for batch in run(whole)]
    first = loader(first_threads)
    found = run(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    second = loader(second_threads)
    second.load_state_dict(state)
    while second.epoch < 2:
        found += run(second)
    assert found == expected


def test_the_order_is_the_same_on_one_and_on_four_ranks(data: Dataset) -> None:
    """Four ranks' batches, put together, are those of one rank with four times the batch size."""
    alone = [batch["index"].tolist() for batch in MultimodalLoader(data, ["label"], 12, rank=0, world_size=1)]
    ranks = [MultimodalLoader(data, ["label"], 3, rank=rank, world_size=4) for rank in range(4)]
    together = [
        [i for batch in batches for i in batch["index"][batch["valid"]].tolist()]
        for batches in zip(*ranks, strict=True)
    ]
    assert together == alone


def test_ranks_have_equally_many_batches(data: Dataset) -> None:
    """With even batches the few repeats are marked; without, nothing is repeated; drop_last leaves the rest out."""
    for options, repeats, missing in (({}, 3, 0), ({"even_batches": False}, 0, 0), ({"drop_last": True}, 0, 13)):
        ranks = [MultimodalLoader(data, ["label"], 10, rank=r, world_size=4, **options) for r in range(4)]
        batches = [list(loader) for loader in ranks]
        assert [len(rank) for rank in batches] == [len(loader) for loader in ranks]
        invalid = sum(int((~batch["valid"]).sum()) for rank in batches for batch in rank)
        valid = sum(int(batch["valid"].sum()) for rank in batches for batch in rank)
        assert (invalid, COUNT - valid) == (repeats, missing)
    assert len(MultimodalLoader(data, ["label"], 10, rank=3, world_size=4, drop_last=True)) == 1


def test_epochs_follow_one_another(data: Dataset) -> None:
    """Each is another order; `set_epoch` goes to any of them; the dataset's own order needs no shuffle."""
    loader = MultimodalLoader(data, ["label"], 10)
    first, second = indices_of(loader), indices_of(loader)
    assert loader.epoch == 2
    assert first != second
    assert sorted(first) == sorted(second)
    loader.set_epoch(1)
    assert indices_of(loader) == second
    assert indices_of(MultimodalLoader(data, ["label"], 10, epoch=1)) == second
    assert indices_of(MultimodalLoader(data, ["label"], 10, seed=1)) != first
    assert indices_of(MultimodalLoader(data, ["label"], 10, "full")) == first
    assert indices_of(MultimodalLoader(data, ["label"], 10, shuffle=False)) == list(range(COUNT))


def test_an_epoch_left_early_is_continued(data: Dataset) -> None:
    """After a break the next loop continues after the last batch that was delivered; `rewind` goes back."""
    loader = MultimodalLoader(data, ["label"], 10, num_workers=2)
    found: list[int] = []
    for batch in loader:
        found += batch["index"].tolist()
        if len(found) == 20:
            break
    loader.set_epoch(0)  # as a training loop does before every epoch: nothing happens within it
    found += indices_of(loader)
    assert sorted(found) == list(range(COUNT))
    loader.set_epoch(0)
    again = [batch["index"].tolist() for batch in islice(loader, 2)]
    loader.rewind()
    assert [batch["index"].tolist() for batch in islice(loader, 2)] == again


def test_ranks_are_found_in_the_environment(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader in a process that a launcher started is that rank's."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    plan = MultimodalLoader(data, batch_size=10).plan
    assert (plan.rank, plan.world_size) == (1, 3)


@pytest.mark.parametrize("size", [0, 1])
def test_hardly_any_samples(tmp_path: Path, size: int) -> None:
    """A dataset of none has no batches, on any rank; one of one sample has it on each, valid once."""
    with mm_assets.open(write(tmp_path / "few.mult", range(size))) as few:
        ranks = [MultimodalLoader(few, ["label"], 4, rank=rank, world_size=3) for rank in range(3)]
        batches = [list(loader) for loader in ranks]
    assert [len(rank) for rank in batches] == [size] * 3
    assert sum(int(batch["valid"].sum()) for rank in batches for batch in rank) == size


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
        loader = MultimodalLoader(data, ["label", "text"], transforms=transforms, **options)
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


# -- state


def test_a_state_is_of_its_dataset_and_order(data: Dataset, files: list[str], tmp_path: Path) -> None:
    """Another dataset, shuffle or seed is refused and changes nothing; elsewhere and in MSTR it is the same."""
    loader = MultimodalLoader(data, ["label"], 10)
    next(iter(loader))
    state = loader.state_dict()
    assert state["delivered"] == 10
    with mm_assets.open(files[0]) as other, pytest.raises(LoaderError, match="another dataset: its num_samples is 53"):
        MultimodalLoader(other).load_state_dict(state)
    with mm_assets.open(files[::-1]) as other, pytest.raises(LoaderError, match="another dataset: its fingerprint"):
        MultimodalLoader(other).load_state_dict(state)
    refused = {"shuffle": [False, "block"], "seed": [1]}
    for name, values in refused.items():
        for value in values:
            with pytest.raises(LoaderError, match=f"another order: its {name} is"):
                MultimodalLoader(data, **{name: value}).load_state_dict(state)
    block = MultimodalLoader(data, shuffle="block", block_size=7)
    with pytest.raises(LoaderError, match="block_size is 256, here it is 7"):
        block.load_state_dict(MultimodalLoader(data, shuffle="block").state_dict())
    assert block.state_dict()["delivered"] == 0
    other = MultimodalLoader(pickle.loads(pickle.dumps(data)), ["text"], 4, block_size=7)
    other.load_state_dict(state)
    assert other.state_dict() == {**state, "block_size": 7}
    for number, file in enumerate(files):
        convert(file, tmp_path / f"{number}.mstr")
    with mm_assets.open(tmp_path) as streams:
        MultimodalLoader(streams).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "of version 2, expected 1"),
        ({"epoch": "0"}, "epoch is '0', expected int"),
        ({"delivered": True}, "delivered is True"),
        ({"delivered": COUNT + 1}, "delivered: found 54, expected 0 to 53"),
        ({"delivered": -1}, "delivered: found -1"),
        ({"fingerprint": None}, "fingerprint is None"),
    ],
)
def test_an_invalid_state_is_refused(data: Dataset, change: dict[str, Any], message: str) -> None:
    """A state out of a damaged or foreign checkpoint is a `LoaderError` that says what is wrong."""
    loader = MultimodalLoader(data)
    with pytest.raises(LoaderError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    for nothing in ({}, [], None):
        with pytest.raises(LoaderError, match="no version"):
            loader.load_state_dict(nothing)  # type: ignore[arg-type]  # what is tested


def test_a_manifest_identifies_the_dataset(data: Dataset) -> None:
    """With a manifest its files' digests count, not where they lie; a source may also say itself what it is."""

    class Source:
        names = ("label",)
        selection: Any = None

        def __init__(self, digest: str) -> None:
            file = PackedFile(location="x", partition="p", num_samples=COUNT, size=1, sha256=digest)
            self.manifest = Manifest(name="m", dataset="d", schema={}, files=(file,))

        def __len__(self) -> int:
            return COUNT

    def told(source: Any) -> str:
        return str(MultimodalLoader(source).state_dict()["fingerprint"])

    first, chosen = Source("a"), Source("a")
    assert told(first) == told(Source("a")) != told(Source("b"))
    chosen.selection = np.arange(COUNT)[::-1]
    assert told(chosen) not in (told(first), told(data))
    first.fingerprint = "mine"  # type: ignore[attr-defined]  # what is tested
    assert told(first) == "mine"


def test_the_state_between_the_last_batch_and_the_end(data: Dataset) -> None:
    """Resumed after the last batch of an epoch there is nothing left of it, and the next one follows."""
    loader = MultimodalLoader(data, ["label"], 30)
    iterator = iter(loader)
    next(iterator), next(iterator)
    resumed = MultimodalLoader(data, ["label"], 30)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []
    assert resumed.epoch == 1
    assert list(iterator) == []
    assert run(resumed) == run(loader)


# -- what is refused


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"prefetch_batches": 0}, "prefetch_batches"),
        ({"num_workers": -1}, "num_workers"),
        ({"shuffle": "random"}, "shuffle"),
        ({"seed": "x"}, "seed"),
        ({"rank": 0}, "rank, world_size"),
        ({"on_damaged": "ignore"}, "on_damaged"),
        ({"modalities": "text"}, "modalities"),
        ({"modalities": ["text"], "transforms": {"image": abs}}, "transforms.image"),
        ({"modalities": ["text"], "collator": MultimodalCollator({"image": {}})}, "modalities"),
        ({"collator": MultimodalCollator({"index": {"source": "label"}})}, "index"),
        ({"pin_memory": True}, "pin_memory"),
    ],
)
def test_wrong_arguments_are_refused(data: Dataset, options: dict[str, Any], key: str) -> None:
    """A `ConfigError` names the argument, before anything is read."""
    if key == "pin_memory":
        pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=f"{key}: "):
        MultimodalLoader(data, **options)


def test_an_unknown_modality_is_refused(data: Dataset) -> None:
    """It is a `KeyError` that says what there is."""
    with pytest.raises(KeyError, match="no modality 'smell'; there are image"):
        MultimodalLoader(data, ["smell"])


def test_memory_is_pinned_only_where_there_is_a_device(data: Dataset) -> None:
    """Without an accelerator `pin_memory` is refused rather than left out."""
    torch = pytest.importorskip("torch")
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    collator = MultimodalCollator({"image": {"stack": True}}, return_tensors="pt")
    with pytest.raises(ConfigError, match="no accelerator"):
        MultimodalLoader(data, collator=collator, pin_memory=True)


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
        {"image": {"stack": True}, "t": {"type": "ragged", "source": "tokens"}}, return_tensors="pt"
    )
    batches = list(MultimodalLoader(data, batch_size=30, collator=collator, pin_memory=True, num_workers=0))
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
            status = 0 if len(indices_of(loader)) == COUNT - 5 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == 10
