"""The loader's order: exactly once an epoch, resumed bit for bit, the same on any ranks and threads."""

import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import Dataset, MultimodalLoader
from mm_assets.dataset.manifest import Manifest, PackedFile
from mm_assets.errors import LoaderError
from mm_assets.formats import convert
from mm_assets.loading.order import Blocks

from .samples import COUNT, indices_of, run, write

# -- order


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.fixed_dictionaries({
            "batch_size": st.integers(1, 20),
            "world_size": st.integers(1, 4),
            "last": st.sampled_from(["even", "short"]),
            "num_workers": st.sampled_from([0, 2]),
            "prefetch": st.integers(1, 4),
        }),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([True, False, Blocks(5)]),
    st.integers(0, 5),
    st.data(),
)  # fmt: skip
def test_each_sample_comes_exactly_once_whatever_the_ranks(
    data: Dataset, runs: list[dict[str, Any]], shuffle: bool | Blocks, epoch: int, draw: st.DataObject
) -> None:
    """Over all ranks of an epoch, resumed with other ranks and batch sizes, every sample is valid in one row."""
    state: dict[str, Any] | None = None
    found: list[int] = []
    for number, options in enumerate(runs):
        ranks = [
            MultimodalLoader(data, ["label"], shuffle=shuffle, seed=3, rank=rank, **options)
            for rank in range(options["world_size"])
        ]
        for loader in ranks:
            loader.set_epoch(epoch)
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
        "shuffle": st.sampled_from([True, False, Blocks()]),
        "last": st.sampled_from(["even", "drop"]),
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
    """The few repeats of even batches are marked, short ones repeat nothing, and `drop` leaves the rest out."""
    for options, repeats, missing in (({}, 3, 0), ({"last": "short"}, 0, 0), ({"last": "drop"}, 0, 13)):
        ranks = [MultimodalLoader(data, ["label"], 10, rank=r, world_size=4, **options) for r in range(4)]
        batches = [list(loader) for loader in ranks]
        assert [len(rank) for rank in batches] == [len(loader) for loader in ranks]
        invalid = sum(int((~batch["valid"]).sum()) for rank in batches for batch in rank)
        valid = sum(int(batch["valid"].sum()) for rank in batches for batch in rank)
        assert (invalid, COUNT - valid) == (repeats, missing)
    assert len(MultimodalLoader(data, ["label"], 10, rank=3, world_size=4, last="drop")) == 1


def test_epochs_follow_one_another(data: Dataset) -> None:
    """Each is another order; `set_epoch` goes to any of them; the dataset's own order needs no shuffle."""
    loader = MultimodalLoader(data, ["label"], 10)
    first, second = indices_of(loader), indices_of(loader)
    assert loader.epoch == 2
    assert first != second
    assert sorted(first) == sorted(second)
    loader.set_epoch(1)
    assert indices_of(loader) == second
    again = MultimodalLoader(data, ["label"], 10)
    again.set_epoch(1)
    assert indices_of(again) == second
    assert indices_of(MultimodalLoader(data, ["label"], 10, seed=1)) != first
    assert indices_of(MultimodalLoader(data, ["label"], 10, shuffle=False)) == list(range(COUNT))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_after_a_break_is_a_new_epoch(data: Dataset, num_workers: int) -> None:
    """After a loop that is left early the next one is whole, of the next epoch or of the one that is set."""

    def epoch(number: int) -> list[int]:
        loader = MultimodalLoader(data, ["label"], 10)
        loader.set_epoch(number)
        return indices_of(loader)

    loader = MultimodalLoader(data, ["label"], 10, num_workers=num_workers)
    for batches in (1, 3, 6):  # 6 are all of them, but not the end of the iteration
        loader.set_epoch(0)
        assert indices_of(islice(loader, batches)) == epoch(0)[: 10 * batches]
        state = loader.state_dict()
        assert loader.epoch == 0
        assert indices_of(loader) == epoch(1)
        loader.load_state_dict(state)
        loader.set_epoch(0)  # as a training loop does before every epoch: it stays in the loaded one
        assert indices_of(loader) == epoch(0)[10 * batches :]
        assert indices_of(loader) == epoch(1)
    assert indices_of(islice(loader, 2)) == epoch(2)[:20]
    loader.set_epoch(2)
    assert indices_of(loader) == epoch(2)
    assert indices_of(islice(loader, 2)) == epoch(3)[:20]
    loader.rewind()
    assert indices_of(loader) == epoch(3)
    iter(loader)
    assert indices_of(loader) == epoch(4)  # an iteration without a batch is not counted


def test_an_error_within_an_epoch_can_be_retried(data: Dataset) -> None:
    """After an error the state is before the batch that failed, so that loading it repeats that batch."""
    calls: list[int] = []

    def fail_once(value: Any) -> Any:
        calls.append(1)
        if len(calls) == 25:
            raise OSError("once")
        return value

    loader = MultimodalLoader(data, ["label"], 10, num_workers=0, transforms={"label": fail_once})
    iterator = iter(loader)
    found = [index for _ in range(2) for index in next(iterator)["index"].tolist()]
    with pytest.raises(OSError, match="once"):
        next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert sorted(found + indices_of(loader)) == list(range(COUNT))


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
    refused = {"shuffle": [False, Blocks()], "seed": [1]}
    for name, values in refused.items():
        for value in values:
            with pytest.raises(LoaderError, match=f"another order: its {name} is"):
                MultimodalLoader(data, **{name: value}).load_state_dict(state)
    block = MultimodalLoader(data, shuffle=Blocks(7))
    with pytest.raises(LoaderError, match=r"shuffle is \[256, 16\], here it is \[7, 16\]"):
        block.load_state_dict(MultimodalLoader(data, shuffle=Blocks()).state_dict())
    assert block.state_dict()["delivered"] == 0
    other = MultimodalLoader(pickle.loads(pickle.dumps(data)), ["text"], 4)
    other.load_state_dict(state)
    assert other.state_dict() == state
    for number, file in enumerate(files):
        convert(file, tmp_path / f"{number}.mstr")
    with mm_assets.open(tmp_path) as streams:
        MultimodalLoader(streams).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "of version 1, expected 3"),
        ({"shuffle": None}, "its shuffle is None"),
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
