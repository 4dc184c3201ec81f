"""Several datasets in one stream: by weight, alike on all ranks, resumable, each dataset's own epochs whole."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import Dataset, MixedLoader, MultimodalLoader, mix
from mm_assets.errors import ConfigError, LoaderError
from mm_assets.fields import ScalarField, TextField
from mm_assets.loading.batch_mix import WINDOW

SIZES = {"a": 20, "b": 7, "c": 31}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Dataset]]:
    folder = tmp_path_factory.mktemp("mixing")
    datasets = {}
    for name, size in SIZES.items():
        path: Path = folder / f"{name}.mult"
        with mm_assets.create(path, {"text": TextField(), "number": ScalarField("int32")}, fsync=False) as writer:
            for i in range(size):
                writer.write(str(i), {"text": name, "number": i})
        datasets[name] = mm_assets.open(path)
    yield datasets
    for dataset in datasets.values():
        dataset.close()


def sources(data: dict[str, Dataset], **weights: float) -> dict[str, tuple[Dataset, float]]:
    return {name: (data[name], weight) for name, weight in weights.items()}


def told(batches: Any) -> list[tuple[str, list[int]]]:
    return [(batch["source"], batch["number"].tolist()) for batch in batches]


def test_a_batch_is_of_one_dataset_and_names_it(data: dict[str, Dataset]) -> None:
    """Its samples are that dataset's; one iteration has as many batches as the loaders have in their epochs."""
    mixed = mix(sources(data, a=1, b=2, c=0.5), batch_size=4)
    batches = list(mixed)
    assert len(batches) == len(mixed) == 5 + 2 + 8
    assert {batch["source"] for batch in batches} <= set(SIZES)
    assert all(set(batch["text"]) == {batch["source"]} for batch in batches)
    assert mixed.epoch == 1


def test_weights_are_the_shares(data: dict[str, Dataset]) -> None:
    """At any batch each source has had its weight's share of the batches, to within a window of them."""
    mixed = mix(sources(data, a=1, b=2, c=5), batch_size=16, num_batches=640)
    names = [batch["source"] for batch in mixed]
    for name, weight in (("a", 1), ("b", 2), ("c", 5)):
        counts = np.cumsum([one == name for one in names])
        expected = np.arange(1, 641) * weight / 8
        assert np.abs(counts - expected).max() <= WINDOW * weight / 8
        assert np.abs(counts - expected)[WINDOW - 1 :: WINDOW].max() < 1


def test_each_dataset_goes_round_in_whole_epochs(data: dict[str, Dataset]) -> None:
    """However often one is drawn, it gives each of its samples once before any comes again."""
    batches = told(mix(sources(data, a=1, b=3), batch_size=4, num_batches=60))
    for name in ("a", "b"):
        given_by = [i for source, numbers in batches if source == name for i in numbers]
        rounds = [given_by[start : start + SIZES[name]] for start in range(0, len(given_by), SIZES[name])]
        assert len(rounds) > 1
        assert all(sorted(one) == list(range(SIZES[name])) for one in rounds[:-1])
        assert rounds[0] != rounds[1]


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 40), st.integers(0, 3), st.sampled_from([0, 2]))
def test_a_resumed_mix_is_the_uninterrupted_one(
    data: dict[str, Dataset], stop: int, seed: int, num_workers: int
) -> None:
    """Stopped after any batch and resumed in a new loader, the same batches follow, over its epochs."""

    def make() -> MixedLoader:
        options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, "num_batches": 16}
        return mix(sources(data, a=1, b=2, c=1), seed=seed, **options)

    whole = make()
    expected = told(whole) + told(whole) + told(whole)
    first, second = make(), make()
    found: list[Any] = []
    while len(found) < stop:
        found += told(islice(first, stop - len(found)))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    while second.epoch < 3:
        found += told(second)
    assert found == expected


MIXES: list[dict[str, Any]] = [
    {"sources": {"a": {"weight": 3}, "b": {"weight": [[0, 1], [9, 0], [20, 2]]}, "c": {}}, "num_batches": 7},
    {"sources": {"a": {"weight": {"linear": [[0, 1], [30, 0]]}}, "c": {}}, "defaults": {"last": "drop"}},
    {"sources": {"a": {"epochs": 0.5}, "b": {"epochs": 2.25}, "c": {"epochs": 1}}},
    {"sources": {"a": {"epochs": 0.3}, "c": {"epochs": 1}}, "defaults": {"last": "drop"}},
    {"sources": {"a": {}, "c": {}}, "defaults": {"batch_size": {"column": "size_text", "total": 3, "bucket": 8}}},
    {
        "sources": {"a": {"epochs": 0.7}, "c": {"epochs": 1}},
        "defaults": {"batch_size": {"column": "size_text", "total": 3}},
    },
    {"unit": "sample", "sources": {"a": {"weight": 3}, "b": {}}, "num_samples": 25},
    {"unit": "sample", "sources": {"a": {"epochs": 0.3}, "b": {"epochs": 2.5}}},
]


@pytest.mark.parametrize("number", range(len(MIXES)))
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_of_a_mix_is_reached_directly(data: dict[str, Dataset], number: int, world_size: int) -> None:
    """`set_epoch` goes to what an uninterrupted mix has there, also after an epoch that was left; so does `rewind`."""

    def make() -> MixedLoader:
        recipe = MIXES[number]
        sources = {name: {**source, "dataset": data[name]} for name, source in recipe["sources"].items()}
        defaults = {"batch_size": 4, **recipe.get("defaults", {})}
        return mix({**recipe, "sources": sources, "defaults": defaults}, seed=5, rank=0, world_size=world_size)

    whole, other = make(), make()
    epochs = [told(whole) for _ in range(4)]
    assert whole.epoch == 4
    for epoch in (3, 0, 2, 1):
        assert other.count_batches(epoch) == len(epochs[epoch])
        other.set_epoch(epoch)
        assert (other.epoch, len(other)) == (epoch, len(epochs[epoch]))
        assert told(islice(other, 2)) == epochs[epoch][:2]
        state = other.state_dict()
        other.rewind()
        assert told(other) == epochs[epoch]
        other.load_state_dict(state)
        other.set_epoch(epoch)  # stays within the loaded epoch
        assert told(other) == epochs[epoch][2:]
        if epoch < 3:
            other.set_epoch(epoch + 1)  # where it is
            assert told(other) == epochs[epoch + 1]


@pytest.mark.parametrize("epoch", [-1, 0.5, True])
def test_a_wrong_epoch_is_refused(data: dict[str, Dataset], epoch: Any) -> None:
    """Loaders and mixes name the argument, and stay where they are."""
    for loader in (
        MultimodalLoader(data["a"]),
        mix(sources(data, a=1)),
        mix({"unit": "sample", "sources": sources(data, a=1)}),
    ):
        with pytest.raises(ConfigError, match=f"epoch: found {epoch}, expected an integer"):
            loader.set_epoch(epoch)
        assert loader.epoch == 0


def test_a_distant_epoch_takes_no_replay(data: dict[str, Dataset]) -> None:
    """An epoch in the far future is reached at once, by any integer type; one without positions is refused."""
    for recipe in ({}, {"unit": "sample"}):
        mixed = mix({**recipe, "sources": sources(data, a=3, b=1)}, batch_size=4)
        mixed.set_epoch(np.int64(2**40))
        assert mixed.epoch == 2**40
        assert len(told(mixed)) == len(mixed)
        with pytest.raises(ConfigError, match="epoch: found 4611686018427387904, expected one that ends before"):
            mixed.set_epoch(2**62)
        assert mixed.epoch == 2**40 + 1


@pytest.mark.parametrize("count", [2, 3])
def test_workers_of_torch_share_a_mix(data: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Taken from the workers in turn, the batches are those of a mix in no worker, in this epoch and the next."""

    def make() -> MixedLoader:
        return mix(sources(data, a=3, b=1, c=2), batch_size=4, num_batches=11, seed=2)

    mixed = make()
    expected = [told(mixed) for _ in range(2)]
    found: list[list[Any]] = [[None] * 11, [None] * 11]
    for number in range(count):
        info = SimpleNamespace(id=number, num_workers=count)
        monkeypatch.setitem(sys.modules, "torch.utils.data", SimpleNamespace(get_worker_info=lambda info=info: info))
        one = make()
        for epoch in found:
            epoch[number::count] = told(one)
    assert found == expected


def test_all_ranks_draw_alike(data: dict[str, Dataset]) -> None:
    """In each step the ranks' batches are of one dataset, and together those of a single rank."""

    def make(rank: int, world_size: int) -> MixedLoader:
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "batch_size": 12 // world_size}
        return mix(sources(data, a=1, c=2), num_batches=9, **options)

    ranks = [make(rank, 3) for rank in range(3)]
    for alone, together in zip(make(0, 1), zip(*ranks, strict=True), strict=True):
        assert {batch["source"] for batch in together} == {alone["source"]}
        valid = [i for batch in together for i in batch["number"][batch["valid"]].tolist()]
        assert valid == alone["number"].tolist()


def test_a_mix_resumes_with_other_ranks(data: dict[str, Dataset]) -> None:
    """Stopped on one rank and resumed on two, every dataset's epoch still has each sample once."""
    one = mix(sources(data, a=1, c=1), batch_size=4, num_batches=100)
    found = list(islice(one, 3))
    state = one.state_dict()
    ranks = [mix(sources(data, a=1, c=1), batch_size=3, num_batches=100, rank=r, world_size=2) for r in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
        found += list(islice(rank, 20))
    assert ranks[0].state_dict() == ranks[1].state_dict()
    for name in ("a", "c"):
        numbers = [i for b in found if b["source"] == name for i in b["number"][b["valid"]].tolist()]
        assert {numbers.count(i) for i in range(SIZES[name])} <= {
            len(numbers) // SIZES[name],
            len(numbers) // SIZES[name] + 1,
        }


def test_loaders_may_be_mixed_with_settings_of_their_own(data: dict[str, Dataset]) -> None:
    """A source may be a loader; options go to the loaders that are made of datasets."""
    loader = MultimodalLoader(data["a"], ["text"], 5, collator=lambda samples: [sample["text"] for sample in samples])
    batches = list(mix({"a": (loader, 1), "b": (data["b"], 1)}, batch_size=2, num_batches=12))
    assert {len(batch) if isinstance(batch, list) else len(batch["valid"]) for batch in batches} == {5, 2, 1}
    with pytest.raises(ConfigError, match="batch_size: goes to loaders that are made here"):
        mix({"a": (loader, 1)}, batch_size=2)


def test_a_mix_left_early_draws_anew(data: dict[str, Dataset]) -> None:
    """After a break the next loop is whole, unless a state is loaded; one iteration at a time; `with` closes."""

    def make() -> MixedLoader:
        return mix(sources(data, a=1, b=1), batch_size=4, num_batches=8, num_workers=2)

    mixed, expected = make(), told(make())
    found = told(islice(mixed, 3))
    mixed.load_state_dict(mixed.state_dict())
    first = iter(mixed)
    found += told(islice(first, 2))
    state = mixed.state_dict()
    second = iter(mixed)
    with pytest.raises(LoaderError, match="this iteration has ended"):
        next(first)
    with second as batches:
        again = [batch["source"] for batch in batches]
    assert mixed.epoch == 2
    whole = make()
    assert again == [[batch["source"] for batch in whole] for _ in range(2)][1]
    assert list(second) == []
    mixed.load_state_dict(state)
    assert found + told(mixed) == expected
    with iter(mixed) as batches:
        next(batches)
    assert list(batches) == []


def test_a_state_of_longer_iterations_ends_this_one(data: dict[str, Dataset]) -> None:
    """A state after more batches than an iteration has is that of its end: the next iteration is whole."""
    longer, shorter = (mix(sources(data, a=1, b=1), batch_size=4, num_batches=count) for count in (8, 3))
    assert len(told(islice(longer, 5))) == 5
    shorter.load_state_dict(longer.state_dict())
    assert told(shorter) == []
    assert (shorter.epoch, len(told(shorter))) == (1, 3)


def test_an_error_ends_the_mix_and_names_itself(data: dict[str, Dataset]) -> None:
    """What a source raises comes through; the place stays before that batch."""

    def fail(text: str) -> str:
        raise RuntimeError("fails")

    mixed = mix(sources(data, a=1), batch_size=4, transforms={"text": fail})
    iterator = iter(mixed)
    with pytest.raises(RuntimeError, match="fails"):
        next(iterator)
    assert list(iterator) == []
    assert mixed.state_dict()["step"] == 0


def test_a_state_is_of_its_mix(data: dict[str, Dataset]) -> None:
    """Other weights, names, seeds or datasets are refused with what differs, and nothing is moved then."""
    mixed = mix(sources(data, a=1, b=2), batch_size=4)
    list(islice(mixed, 3))
    state = mixed.state_dict()
    before = mix(sources(data, a=1, b=2), batch_size=4)
    fresh = before.state_dict()
    others: list[tuple[MixedLoader, str]] = [
        (mix(sources(data, a=1, b=2), seed=1, batch_size=4), r"its seed is 1, here it is 0; its sources\.a\.seed"),
        (mix(sources(data, a=1, b=3), batch_size=4), r"its sources\.b\.weight is 3\.0, here it is 2\.0$"),
        (mix(sources(data, a=1, b=2, c=1), batch_size=4), r"it has sources\.c, which is not here"),
        (mix(sources(data, a=1), batch_size=4), r"it has no sources\.b, which is here"),
        (mix({"a": (data["a"], 1), "b": (data["c"], 2)}, batch_size=4), r"its sources\.b is another dataset$"),
        (mix(sources(data, a=1, b=2), batch_size=4, shuffle=False), r"its sources\.a\.shuffle is false"),
        (mix({"unit": "sample", "sources": sources(data, a=1, b=2)}, batch_size=4), 'its unit is "sample", here'),
    ]
    wrong = [({**mixed.state_dict(), **other.state_dict()}, message) for other, message in others]
    b = state["sources"]["b"]
    wrong += [
        ({**state, "version": 9}, "version 9"),
        ({**state, "step": -1}, "step is int -1"),
        ({**state, "epoch": True}, "epoch is bool True"),
        ({**state, "start": None}, "start is NoneType None"),
        ({**state, "recipe": "x" * 1000}, "its recipe is "),
        ({**state, "sources": {"a": b}}, "its sources are not a, b"),
        ({**state, "sources": {"a": b, "b": None}}, "of 'b'"),
        ({**state, "sources": {"a": b, "b": {**b, "delivered": 8}}}, "delivered: found 8"),
        ({}, "no recipe"),
        (None, "no recipe"),  # type: ignore[list-item]  # what is tested
    ]
    for one, message in wrong:
        with pytest.raises(LoaderError, match=message):
            before.load_state_dict(one)
        assert before.state_dict() == fresh
    before.load_state_dict(state)
    assert before.digest == mixed.digest == state["digest"]
    assert len({other.digest for other, _ in others} | {mixed.digest}) == len(others) + 1


@pytest.mark.parametrize(
    ("weights", "options", "key"),
    [
        ({"a": -1.0}, {}, "sources.a.weight"),
        ({"a": float("nan")}, {}, "sources.a.weight"),
        ({"a": float("inf")}, {}, "sources.a.weight"),
        ({"a": True}, {}, "sources.a.weight"),
        ({"a": 0.0}, {}, "sources"),
        ({}, {}, "sources"),
        ({"a": 1.0}, {"num_batches": 0}, "num_batches"),
        ({"a": 1.0}, {"batch_size": 21, "last": "drop"}, "sources"),
        ({"a": 1.0, "c": 1.0}, {"batch_size": 21, "last": "drop"}, "sources.a"),
        ({"a": 1.0}, {"last": "short", "rank": 0, "world_size": 2}, "sources.a.last"),
    ],
)
def test_wrong_mixes_are_refused(data: dict[str, Dataset], weights: dict[str, float], options: Any, key: str) -> None:
    """A `ConfigError` names what is wrong before anything is read."""
    with pytest.raises(ConfigError, match=f"arguments: {key}: "):
        mix(sources(data, **weights), **options)


def test_wrong_sources_are_refused(data: dict[str, Dataset]) -> None:
    """A source without a weight, and one loader twice are refused."""
    with pytest.raises(ConfigError, match=r"sources\.a: found Dataset, expected a dataset or sources, and a weight"):
        mix({"a": data["a"]})
    with pytest.raises(ConfigError, match=r"sources\.a: found 3 items, expected a pair"):
        mix({"a": (data["a"], 1, 2)})
    loader = MultimodalLoader(data["a"])
    with pytest.raises(ConfigError, match="one loader under two names"):
        mix({"a": (loader, 1), "b": (loader, 1)})
    with pytest.raises(ConfigError, match="found a loader, expected a dataset"):
        mix({"unit": "sample", "sources": {"a": (loader, 1)}})
