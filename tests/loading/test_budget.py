"""Batches of a budget: every sample once, within the budget, on any ranks, resumed anywhere, with little padding."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets import Blocks, Budget, ConfigError, Dataset, LoaderError, MultimodalCollator, MultimodalLoader, mix
from mm_assets.fields import AudioField, ScalarField, TokensField
from mm_assets.loading.budget import BudgetGrouping
from mm_assets.loading.order import EpochOrder
from mm_assets.loading.plan import LAST, GroupPlan
from mm_assets.testing import LoaderSuite

COUNT = 60
FIELDS = {"audio": AudioField(), "ids": TokensField(), "label": ScalarField("int32")}


def length(i: int) -> int:
    """Audio samples of sample `i`; each seventh one has no audio."""
    return 0 if i % 7 == 6 else 20 + 37 * i % 100


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("speech")
    for name, indices in (("a.mult", range(25)), ("b.mult", range(25, COUNT))):
        with mm_assets.create(folder / name, FIELDS, fsync=False) as writer:
            for i in indices:
                audio = (np.full((length(i), 1), i, np.int16), 16000) if length(i) else None
                writer.write(str(i), {"audio": audio, "ids": np.arange(i % 9), "label": i})
    with mm_assets.open([folder / "a.mult", folder / "b.mult"]) as dataset:
        yield dataset


# -- the plan

some_lengths = st.lists(st.integers(0, 300), min_size=1, max_size=200)
budgets = st.builds(Budget, st.just("n"), st.integers(1, 2000), st.integers(1, 70))
divisions = st.fixed_dictionaries({"world_size": st.integers(1, 5), "last": st.sampled_from(LAST)})


def plans_of(budget: Budget, lengths: list[int], division: dict[str, Any], order: EpochOrder) -> list[GroupPlan]:
    with pytest.warns() if max(lengths) > budget.total else pytest.MonkeyPatch.context():
        grouping = BudgetGrouping(budget, np.array(lengths, np.int64))
    return [GroupPlan(order=order, grouping=grouping, rank=rank, **division) for rank in range(division["world_size"])]


def orders_of(lengths: list[int], data: st.DataObject) -> EpochOrder:
    shuffle = data.draw(st.one_of(st.booleans(), st.builds(Blocks, st.integers(1, 50), st.integers(1, 4))))
    return EpochOrder(num_samples=len(lengths), shuffle=shuffle, seed=data.draw(st.integers(0, 9)))


@settings(deadline=None, max_examples=120)
@given(some_lengths, budgets, st.lists(divisions, min_size=1, max_size=4), st.data())
def test_each_sample_comes_once_within_the_budget(
    lengths: list[int], budget: Budget, divided: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Over resumptions with other ranks: each sample once, in the batches of a single rank, none above the budget."""
    order = orders_of(lengths, data)
    (alone,) = plans_of(budget, lengths, {"world_size": 1, "last": "even"}, order)
    found: list[list[int]] = []
    position = 0
    for number, division in enumerate([*divided, {"world_size": 1, "last": "even"}]):
        runs = [list(plan.steps(position)) for plan in plans_of(budget, lengths, division, order)]
        most = max(map(len, runs))
        limit = most if number == len(divided) else data.draw(st.integers(0, most))
        for at in range(limit):
            steps = [run[at] for run in runs if at < len(run)]
            assert len({(step.start, step.stop) for step in steps}) == 1
            assert steps[0].start == position < steps[0].stop <= len(lengths)
            position = steps[0].stop
            found += [step.indices.tolist() for step in steps if step.valid.all()]
            assert all(step.valid.all() or not step.valid.any() for step in steps)
    assert found == [step.indices.tolist() for step in alone.steps()]
    assert sorted(index for indices in found for index in indices) == list(range(len(lengths)))
    for indices in found:
        longest = max(lengths[index] for index in indices)
        assert len(indices) <= budget.bucket
        assert len(indices) == 1 or len(indices) * longest <= budget.total


@settings(deadline=None, max_examples=80)
@given(some_lengths, budgets, divisions, st.data())
def test_ranks_are_even_and_the_count_exact(
    lengths: list[int], budget: Budget, division: dict[str, Any], data: st.DataObject
) -> None:
    """As many batches on each rank as counted, unless they are short; fewer repeated batches than ranks."""
    order = orders_of(lengths, data)
    plans = plans_of(budget, lengths, division, order)
    runs = [list(plan.steps()) for plan in plans]
    assert [len(run) for run in runs] == [plan.count() for plan in plans]
    assert len(set(map(len, runs))) == 1 or division["last"] == "short"
    valid = sum(step.valid.all() for run in runs for step in run)
    repeated = sum(map(len, runs)) - valid
    assert repeated < division["world_size"] if division["last"] == "even" else repeated == 0
    total = plans_of(budget, lengths, {"world_size": 1, "last": "even"}, order)[0].count()
    assert total - valid < division["world_size"] if division["last"] == "drop" else total == valid


def test_padding_is_small_and_the_order_random() -> None:
    """Lengths that vary tenfold: padding below 2 %, batches of like size, and no trend of lengths in an epoch."""
    lengths = np.random.default_rng(0).lognormal(11, 0.8, 20_000).astype(np.int64).clip(1_000, 480_000)
    grouping = BudgetGrouping(Budget("n", 960_000), lengths)
    epochs = [list(GroupPlan(order=EpochOrder(num_samples=20_000, epoch=e), grouping=grouping).steps()) for e in (0, 1)]
    padded = np.array([len(step.indices) * lengths[step.indices].max() for step in epochs[0]])
    assert 1 - lengths.sum() / padded.sum() < 0.02
    assert padded.min() > 0.4 * padded.mean()
    assert np.percentile(padded, 5) > 0.8 * padded.mean()
    positions = [np.argsort(np.concatenate([step.indices for step in epoch])) for epoch in epochs]
    for one, other in ((positions[0], lengths), (positions[0], positions[1])):
        assert abs(np.corrcoef(one, np.argsort(np.argsort(other)))[0, 1]) < 0.03


def test_a_plan_begins_without_planning_what_is_before() -> None:
    """Only the bucket of a position is planned to resume there, however long the epoch is."""

    class Counting(BudgetGrouping):
        planned = 0

        def cut(self, entries: Any) -> Any:
            self.planned += 1
            return super().cut(entries)

    grouping = Counting(Budget("n", 1000, 100), np.full(100_000, 10))
    next(GroupPlan(order=EpochOrder(num_samples=100_000), grouping=grouping).steps(90_000))
    assert grouping.planned == 1


# -- the loader


class TestBudget(LoaderSuite):
    """A loader of a budget keeps the promises of loaders."""

    @pytest.fixture(autouse=True)
    def _speech(self, speech: Dataset) -> None:
        self.speech = speech

    def make(self, rank: int, world_size: int, *, seed: int = 0, num_workers: int = 2) -> Any:
        return MultimodalLoader(
            self.speech,
            batch_size=Budget("audio.num_frames", 700, bucket=24),
            collator=MultimodalCollator(
                {"samples": {"source": "audio.samples", "pad_value": 0}, "label": {"stack": True}}
            ),
            seed=seed,
            num_workers=num_workers,
            rank=rank,
            world_size=world_size,
        )


class TestMixOfBudgets(TestBudget):
    """A mix of batches whose recipe gives each source a budget, and one of them windows of time."""

    def make(self, rank: int, world_size: int, *, seed: int = 0, num_workers: int = 2) -> Any:
        budget = {"column": "audio.num_frames", "total": 700, "bucket": 16}
        first, second = (
            {"dataset": self.speech.select(range(start, stop)), "epochs": 1, "batch_size": budget}
            for start, stop in ((0, 27), (27, COUNT))
        )
        second["window"] = {"seconds": 30 / 16000}
        sources = {"whole": first, "windows": second}
        collator = MultimodalCollator({"samples": {"source": "audio.samples", "pad_value": 0}})
        return mix(
            {"sources": sources},
            collator=collator,
            seed=seed,
            num_workers=num_workers,
            rank=rank,
            world_size=world_size,
        )

    def samples(self, batch: Any) -> Any:
        return [(batch["source"], index) for index in batch["index"][batch["valid"]].tolist()]

    def test_budgets_and_windows_hold(self) -> None:
        """Batches are within the budget of their source, and those of windows have at most their length."""
        for batch in self.make(0, 1):
            assert batch["samples"].shape[0] * batch["samples"].shape[1] <= 700
            assert ("window" in batch) == (batch["source"] == "windows")
            assert batch["source"] == "whole" or batch["samples"].shape[1] <= 30


def test_lengths_are_those_of_the_metadata(speech: Dataset) -> None:
    """Also of a view, in its order; by entries of records and by stored bytes; 0 where a modality is absent."""
    chosen = np.array([40, 3, 13, 27, 3])
    with speech.select(chosen) as view:
        assert view.column("audio.num_frames").tolist() == [length(i) for i in chosen]
        assert view.column("size_audio").tolist() == [2 * length(i) for i in chosen]
        assert view.column("present_audio").tolist() == [length(i) > 0 for i in chosen]
    assert speech.column("ids.num_tokens").tolist() == [i % 9 for i in range(COUNT)]
    with pytest.raises(KeyError, match=r"no column of numbers 'audio.codecs', there are present_audio, size_audio"):
        speech.column("audio.codecs")


def test_batches_have_the_samples_of_the_plan(speech: Dataset) -> None:
    """Each row is its sample; the padded size is within the budget; arrays have as many rows as the batch."""
    collator = MultimodalCollator({"samples": {"source": "audio.samples", "pad_value": 0}, "label": {"stack": True}})
    loader = MultimodalLoader(speech, batch_size=Budget("audio.num_frames", 700), collator=collator)
    for batch in loader:
        assert batch["label"].tolist() == batch["index"].tolist()
        assert batch["lengths"]["samples"].tolist() == [length(i) for i in batch["index"].tolist()]
        assert batch["samples"].shape[0] * batch["samples"].shape[1] <= 700


def test_without_shuffle_epochs_are_alike(speech: Dataset) -> None:
    """The buckets are then those of the dataset's order, and their batches are in the order of length."""
    loader = MultimodalLoader(speech, ["label"], Budget("audio.num_frames", 700, bucket=20), shuffle=False)
    first, second = ([batch["index"].tolist() for batch in loader] for _ in range(2))
    assert first == second
    longest = [max(map(length, indices)) for indices in first if max(indices) < 20]
    assert longest == sorted(longest)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers_of_torch_and_mixes_take_budgets(speech: Dataset) -> None:
    """Each batch once out of a `DataLoader`, whose length is that of the epoch that is set; and batches in a mix."""

    def loader() -> MultimodalLoader:
        return MultimodalLoader(speech, ["label"], Budget("audio.num_frames", 300), num_workers=1)

    mixed = mm_assets.mix({"budget": (loader(), 1), "fixed": (speech.select_modalities(["label"]), 1)}, batch_size=8)
    assert {batch["source"] for batch in mixed} == {"budget", "fixed"}
    torch = pytest.importorskip("torch.utils.data")
    dataset = loader().torch()
    for epoch in (0, 3):
        dataset.set_epoch(epoch)
        expected = loader()
        expected.set_epoch(epoch)
        assert len(dataset) == len(expected)
        batches = [batch["index"].tolist() for batch in torch.DataLoader(dataset, batch_size=None, num_workers=2)]
        assert batches == [batch["index"].tolist() for batch in expected]


def test_a_longer_sample_is_alone_and_reported(speech: Dataset) -> None:
    """It is a batch of its own, and the loader warns once, with its index and length."""
    longer = [i for i in range(COUNT) if length(i) > 110]
    with pytest.warns(RuntimeWarning, match=f"{len(longer)} of 60 samples exceed the budget of 110, such as sample"):
        loader = MultimodalLoader(speech, ["label"], batch_size=Budget("audio.num_frames", 110))
    alone = [batch["index"].tolist() for batch in loader if any(i in longer for i in batch["index"])]
    assert sorted(alone) == [[i] for i in longer]


def test_damaged_samples_are_replaced_within_the_budget(tmp_path: Path) -> None:
    """Every sample that can be read comes once, in batches that stay within the budget."""
    path = tmp_path / "a.mult"
    with mm_assets.create(path, {"ids": TokensField(vocab_size=100)}, fsync=False) as writer:
        for i in range(40):
            writer.write(str(i), {"ids": np.full(1 + i % 10, 7 if i % 5 else 8)})
    content = bytearray(path.read_bytes())
    at = content.find(np.full(10, 7, "<u2").tobytes())
    content[at] = 9
    path.write_bytes(content)
    with mm_assets.open(path) as dataset:
        loader = MultimodalLoader(dataset, batch_size=Budget("ids.num_tokens", 10), on_damaged="skip")
        found: Counter[int] = Counter()
        for batch in loader:
            found.update(batch["index"][batch["valid"]].tolist())
            assert len(batch["index"]) * max(map(len, batch["ids"])) <= 10
    (damaged,) = loader.damaged
    assert found == Counter(set(range(40)) - {damaged.index})


def test_a_state_of_another_budget_is_refused(speech: Dataset) -> None:
    """Its positions mean other batches; one of the same budget resumes, with other ranks too."""
    loader = MultimodalLoader(speech, ["label"], batch_size=Budget("audio.num_frames", 700))
    delivered = [i for batch in islice(loader, 3) for i in batch["index"].tolist()]
    state = json.loads(json.dumps(loader.state_dict()))
    for other in (Budget("audio.num_frames", 800), Budget("size_audio", 700), 8):
        with pytest.raises(LoaderError, match="its groups is"):
            MultimodalLoader(speech, ["label"], batch_size=other).load_state_dict(state)
    for rank in range(2):
        second = MultimodalLoader(
            speech, ["label"], batch_size=Budget("audio.num_frames", 700), rank=rank, world_size=2, last="short"
        )
        second.load_state_dict(state)
        delivered += [i for batch in second for i in batch["index"].tolist()]
    assert sorted(delivered) == list(range(COUNT))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: Budget("audio.num_frames", 0), "batch_size.total: found 0, expected an integer from 1"),
        (lambda data: Budget("audio.num_frames", 10, bucket=0), "batch_size.bucket"),
        (lambda data: Budget(7, 10), "batch_size.column: found 7"),
        (lambda data: MultimodalLoader(data, batch_size=Budget("audio.seconds", 10)), "no column of numbers 'audio.se"),
        (lambda data: MultimodalLoader(data, batch_size=Budget("x.n", 10)), "batch_size: needs a Dataset"),
    ],
)
def test_wrong_budgets_are_refused(speech: Dataset, make: Any, message: str) -> None:
    """Where the loader is made, with the argument's name."""
    source = type("Source", (), {"names": ("x",), "__len__": lambda self: 3})()
    with pytest.raises(ConfigError, match=message):
        make(source if "needs a Dataset" in message else speech)
