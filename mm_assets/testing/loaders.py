"""What every loader promises, as tests: subclass `LoaderSuite`, make loaders, and the promises are checked.

A loader is what a training loop iterates over and stores in checkpoints: a `MultimodalLoader` over a source, a collator
or transforms of your own, or a class of your own with the same methods.
"""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest

__all__ = ["LoaderSuite", "plain"]


def plain(value: Any) -> Any:
    """Returns a batch as plain values, of which two are equal if the batches are, bit for bit."""
    if hasattr(value, "numpy") and hasattr(value, "is_pinned"):  # a tensor
        value = value.numpy()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if hasattr(value, "offsets") and hasattr(value, "values"):  # a `Ragged`
        return [plain(value.values), plain(value.offsets)]
    return value


def _same(batch: Any) -> Any:
    return batch


class LoaderSuite(ABC):
    """Tests that every loader passes.

    Attributes:
        ranks: numbers of ranks that are tried.
    """

    ranks: ClassVar[tuple[int, ...]] = (1, 2, 3)

    @abstractmethod
    def make(self, rank: int, world_size: int, *, seed: int = 0, num_workers: int = 2) -> Any:
        """A new loader over the same data with some ten batches, as one of several ranks."""

    def samples(self, batch: Any) -> Iterable[Hashable]:
        """What an epoch has once: by default the indices of the rows that are valid."""
        indices: list[int] = batch["index"][batch["valid"]].tolist()
        return indices

    def all_samples(self, world_size: int, state: Any = None) -> Counter[Hashable]:
        """The samples of the rest of an epoch, over all ranks."""
        found: Counter[Hashable] = Counter()
        for rank in range(world_size):
            loader = self.make(rank, world_size)
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                found.update(self.samples(batch))
        return found

    def test_each_sample_comes_once(self) -> None:
        """Over all ranks an epoch has every sample once, whatever their number."""
        expected = self.all_samples(1)
        assert set(expected.values()) == {1}
        for world_size in self.ranks:
            assert self.all_samples(world_size) == expected

    def test_ranks_have_the_same_number_of_batches(self) -> None:
        """No rank waits for one that has ended, and the length is that number."""
        for world_size in self.ranks:
            loaders = [self.make(rank, world_size) for rank in range(world_size)]
            lengths = {len(loader) for loader in loaders}  # of this epoch: another one may have other groups
            assert len(lengths | {len(list(loader)) for loader in loaders}) == 1

    def test_threads_change_nothing(self) -> None:
        """Without threads and with many, two epochs are equal bit for bit."""
        runs = []
        for num_workers in (0, 1, 5):
            loader = self.make(0, 1, num_workers=num_workers)
            runs.append([plain(batch) for _ in range(2) for batch in loader])
        assert runs[1:] == runs[:1] * 2

    def test_epochs_and_seeds_differ(self) -> None:
        """The next epoch and another seed are other orders of the same samples."""
        loader = self.make(0, 1)
        orders = [[list(self.samples(batch)) for batch in loader] for _ in range(2)]
        orders.append([list(self.samples(batch)) for batch in self.make(0, 1, seed=1)])
        assert all(one != other for number, one in enumerate(orders) for other in orders[:number])
        assert len({frozenset(sample for batch in order for sample in batch) for order in orders}) == 1

    def test_a_resumed_run_is_the_uninterrupted_one(self) -> None:
        """Stopped after any batch, with its state as JSON, a new loader continues bit for bit, into the next epoch."""
        for world_size in self.ranks:
            whole = self.make(world_size - 1, world_size)
            expected = [plain(batch) for _ in range(2) for batch in whole]
            for stop in range(len(whole) + 1):
                first = self.make(world_size - 1, world_size)
                with iter(first) as batches:
                    found = [plain(batch) for batch in islice(batches, stop)]
                second = self.make(world_size - 1, world_size, num_workers=0)
                second.load_state_dict(json.loads(json.dumps(first.state_dict())))
                found += [plain(batch) for batch in second]
                if len(found) < len(expected):
                    found += [plain(batch) for batch in second]
                assert found == expected

    def test_a_state_is_that_of_all_ranks(self) -> None:
        """After as many batches the state is the same on every rank, so that one may store it."""
        for world_size in self.ranks:
            states = []
            for rank in range(world_size):
                loader = self.make(rank, world_size)
                next(iter(loader))
                states.append(loader.state_dict())
            assert states[1:] == states[:1] * (world_size - 1)

    def test_another_number_of_ranks_resumes(self) -> None:
        """What one number of ranks has delivered and what another one delivers after it is an epoch together."""
        expected = self.all_samples(1)
        for before in self.ranks:
            for after in self.ranks:
                delivered: Counter[Hashable] = Counter()
                for rank in range(before):
                    loader = self.make(rank, before)
                    with iter(loader) as batches:
                        for batch in islice(batches, 2):
                            delivered.update(self.samples(batch))
                assert delivered + self.all_samples(after, loader.state_dict()) == expected

    def test_an_epoch_is_reached_directly(self) -> None:
        """`set_epoch` goes to any epoch, bit for bit that of the uninterrupted run, also after one that was left."""
        for world_size in self.ranks:
            whole, other = (self.make(world_size - 1, world_size) for _ in range(2))
            epochs = [[plain(batch) for batch in whole] for _ in range(3)]
            for epoch in (2, 0, 1):
                other.set_epoch(epoch)
                assert len(other) == len(epochs[epoch])
                with iter(other) as batches:
                    next(batches)
                other.set_epoch(epoch)
                assert [plain(batch) for batch in other] == epochs[epoch]

    def test_stats_count_batches(self) -> None:
        """The batches that were yielded have taken some time."""
        loader = self.make(0, 1)
        count = sum(1 for _ in loader)
        assert loader.stats().num_batches == count
        assert loader.stats().total > 0

    def test_workers_of_torch_share_the_batches(self) -> None:
        """Through torch's DataLoader two workers deliver the batches in the loader's order, one epoch after another."""
        data = pytest.importorskip("torch.utils.data")
        loader = self.make(1, 2)
        expected = [[plain(batch) for batch in loader] for _ in range(2)]
        dataset = self.make(1, 2, num_workers=0).torch()
        assert len(dataset) == len(expected[0])
        options: dict[str, Any] = {"batch_size": None, "collate_fn": _same}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            batches = data.DataLoader(dataset, num_workers=2, persistent_workers=True, **options)
            assert [[plain(batch) for batch in batches] for _ in range(2)] == expected
            dataset.set_epoch(1)
            assert [plain(batch) for batch in batches] == expected[1]

    def test_a_state_of_another_seed_is_refused(self) -> None:
        """A state whose order is another one raises, and the loader stays where it was."""
        loader = self.make(0, 1)
        before = loader.state_dict()
        with pytest.raises(Exception, match="seed"):
            loader.load_state_dict(self.make(0, 1, seed=1).state_dict())
        assert loader.state_dict() == before
