"""Mixes whose batches are of one source each."""

from __future__ import annotations

import warnings
import weakref
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor, nextafter
from typing import Any

import numpy as np

from mm_assets.errors import ConfigError, LoaderError
from mm_assets.loading.batches import BatchSource, DamagedSample
from mm_assets.loading.loader import BatchIterator, Iteration, MultimodalLoader
from mm_assets.loading.mixed_loader import (
    POSITION,
    MixedLoader,
    check_outputs,
    count_of,
    is_loader,
    leaf_epochs,
    located,
    open_source,
    seed_of,
    without_position,
)
from mm_assets.loading.mixture import Mixture, share_segments
from mm_assets.loading.order import hash_float
from mm_assets.loading.plan import torch_worker
from mm_assets.loading.recipe import LOADER_KEYS, Recipe, Source
from mm_assets.summaries import describe

__all__ = ["BatchMix", "MixedIterator"]

WINDOW = 64  # batches in which each source has its share, to within one

_DRAW = 14  # place in the derivation of keys, which no other use shares: see `order`


class BatchMix(MixedLoader):
    """A mix with ``unit: batch``: a loader for each source, which only this moves.

    With weights the source of a batch follows from the number of the batch. With epochs, where the number of batches
    depends on the ranks, it is drawn in proportion to what is left of each source in the iteration: so each source ends
    exactly, also if other ranks resume.
    """

    def __init__(self, recipe: Recipe, arguments: Mapping[str, Any], stack: ExitStack) -> None:
        self.loaders = {leaf.name: _loader(leaf, recipe, arguments, stack) for leaf in recipe.leaves}
        keys = {leaf.name: leaf.key for leaf in recipe.leaves}
        for name, loader in self.loaders.items():
            if not loader.plan.is_even:
                detail = 'does not go with a mix if it is "short": ranks would have different numbers of batches'
                raise ConfigError(recipe.where, f"{keys[name]}.last", detail)
            check_outputs(loader, recipe.where, keys[name])
        if len({id(loader) for loader in self.loaders.values()}) != len(self.loaders):
            raise ConfigError(recipe.where, "sources", "found one loader under two names: its position would be both's")
        self._sizes = {name: len(loader) for name, loader in self.loaders.items()}  # batches of an epoch
        if not any(self._sizes.values()):
            raise ConfigError(recipe.where, "sources", "found no source that has batches")
        states = {name: loader.state_dict() for name, loader in self.loaders.items()}
        super().__init__(recipe, {name: without_position(state) for name, state in states.items()})
        self._mixture: Mixture | None = None
        if not recipe.counts_epochs:
            segments = share_segments(recipe, list(map(_num_batches, self.loaders.values())))
            self._mixture = Mixture(segments, seed=recipe.seed, window=WINDOW)
        self._epochs = dict(leaf_epochs(recipe.root)) if recipe.counts_epochs else {}
        self._length = recipe.length or sum(self._sizes.values())
        self._progress = {name: _progress(state) for name, state in states.items()}
        self._epoch = 0
        self._start = 0  # the first batch of the iteration, of all that were ever to come
        self._step = 0
        self._is_used = False  # whether the next iteration begins another pass
        self._current: weakref.ref[MixedIterator] | None = None

    def __len__(self) -> int:
        if self._mixture is not None:
            return self._length
        return self._step + sum(
            _count_batches(loader, self._progress[name], self._target(name)) for name, loader in self.loaders.items()
        )

    @property
    def datasets(self) -> dict[str, BatchSource]:
        """As `MixedLoader.datasets`."""
        return {name: loader.reader for name, loader in self.loaders.items()}

    @property
    def epoch(self) -> int:
        """How many iterations have ended."""
        return self._epoch

    @property
    def damaged(self) -> dict[str, list[DamagedSample]]:
        """As `MixedLoader.damaged`."""
        return {name: loader.damaged for name, loader in self.loaders.items()}

    def _target(self, name: str, epoch: int | None = None) -> Fraction:
        """Returns how many epochs of a source come before the end of an iteration, by default of this one."""
        return (self._epoch + 1 if epoch is None else epoch + 1) * self._epochs[name]

    # --- what the iteration uses --------------------------------------------------------------------------------------

    def _draw(self) -> str | None:
        """Returns the source of the next batch; None at the end, which is where the next iteration begins."""
        if self._mixture is not None:
            if self._step < self._length:
                sources, _ = self._mixture.locate(np.array([self._start + self._step]))
                return self.names[int(sources[0])]
        else:
            # Batches, but for the rounding of the last one.
            left = [
                max(0.0, float(self._target(name) - self._progress[name])) * size for name, size in self._sizes.items()
            ]
            bounds = list(accumulate(left))
            if bounds[-1]:
                place = hash_float(self._recipe.seed, _DRAW, self._epoch, self._step) * bounds[-1]
                return self.names[bisect_right(bounds, min(place, nextafter(bounds[-1], 0)))]
        self._begin(self._epoch + 1)
        return None

    def _note_move(self, name: str) -> None:
        """Notes the position of a source, which has moved."""
        self._progress[name] = _progress(self.loaders[name].state_dict())

    def _deliver(self, name: str) -> None:
        self._step += 1
        self._is_used = True
        self._note_move(name)

    def _begin(self, epoch: int) -> None:
        """Goes to the start of the next iteration; epochs of the last one that a ``break`` left are skipped."""
        self._epoch, self._step, self._is_used = epoch, 0, False
        self._start += self._length
        for name, loader in self.loaders.items() if self._mixture is None else ():
            start = self._target(name, epoch - 1)
            if self._progress[name] < start:
                state = loader.state_dict()
                delivered = ceil((start - floor(start)) * state["num_samples"])
                loader.load_state_dict({**state, "epoch": floor(start), "delivered": delivered})
                self._note_move(name)

    def __iter__(self) -> MixedIterator:
        _, num_workers = torch_worker()
        if num_workers > 1:
            detail = f"found one of {num_workers} worker processes, expected at most one: each would yield all batches"
            raise LoaderError(f"{detail}. Loaders read ahead in threads: iterate in the main process")
        self._end()
        if self._is_used:
            self._begin(self._epoch + 1)
        iterator = MixedIterator(self)
        self._current = weakref.ref(iterator)
        return iterator

    def _end(self) -> None:
        current = self._current() if self._current is not None else None
        if current is not None:
            current.supersede()
        self._current = None

    # --- state --------------------------------------------------------------------------------------------------------

    def _position(self) -> dict[str, Any]:
        states = {name: loader.state_dict() for name, loader in self.loaders.items()}
        return {
            "epoch": self._epoch,
            "start": self._start,
            "step": self._step,
            "sources": {name: {key: state[key] for key in POSITION} for name, state in states.items()},
        }

    def _load_position(self, state: Mapping[str, Any]) -> None:
        epoch, start, step = (count_of(state, key) for key in ("epoch", "start", "step"))
        sources = state.get("sources")
        if not isinstance(sources, Mapping) or set(sources) != set(self.names):
            raise LoaderError(f"this is not a mix's state: its sources are not {', '.join(self.names)}")
        before = {name: loader.state_dict() for name, loader in self.loaders.items()}
        self._end()
        try:
            for name, loader in self.loaders.items():
                if not isinstance(sources[name], Mapping):
                    raise LoaderError(f"this is not a mix's state: found {describe(sources[name])} of {name!r}")
                loader.load_state_dict({**before[name], **sources[name]})
        except BaseException:
            for name, loader in self.loaders.items():
                loader.load_state_dict(before[name])
            raise
        finally:
            for name in self.loaders:
                self._note_move(name)
        self._epoch, self._start, self._step, self._is_used = epoch, start, step, False


class MixedIterator(Iteration):
    """The batches of the rest of an iteration over a mix with ``unit: batch``; else as `BatchIterator`."""

    def __init__(self, loader: BatchMix) -> None:
        super().__init__()
        self._loader = loader
        self._iterators: dict[str, BatchIterator] = {}

    def _make(self) -> Any:
        ended: set[str] = set()
        while (name := self._loader._draw()) is not None:
            if name not in self._iterators:
                self._iterators[name] = self._loader.loaders[name].iterate_on()
            try:
                batch = next(self._iterators[name])
            except StopIteration:
                # One empty epoch may be the rest of a state; two mean that the source has no batches.
                if name in ended:
                    raise LoaderError(f"source {name!r} has no batches") from None
                ended.add(name)
                del self._iterators[name]
                self._loader._note_move(name)
                continue
            self._loader._deliver(name)
            if isinstance(batch, dict):
                batch.setdefault("source", name)
            return batch
        raise StopIteration

    def _end(self) -> None:
        for iterator in self._iterators.values():
            iterator.close()


def _progress(state: Mapping[str, Any]) -> Fraction:
    """Returns how many epochs a loader has delivered."""
    epoch: int = state["epoch"]
    return epoch + Fraction(state["delivered"], state["num_samples"] or 1)


def _num_batches(loader: MultimodalLoader) -> Fraction:
    """Returns the batches of an epoch on a single rank: shares must not depend on the ranks."""
    if not len(loader):
        return Fraction(0)
    batch_size: Any = loader.batch_size
    if isinstance(batch_size, int):
        return Fraction(loader.plan.order.num_samples, batch_size)
    return Fraction(len(loader) * loader.plan.world_size)  # batches of different numbers of samples


def _count_batches(loader: MultimodalLoader, start: Fraction, stop: Fraction) -> int:
    """Counts the batches between two positions, in epochs; the last one may go beyond the second."""
    num_samples, count = loader.plan.order.num_samples, 0
    while start < stop and num_samples:
        epoch = floor(start)
        end = min(stop, Fraction(epoch + 1))
        first, last = (ceil((position - epoch) * num_samples) for position in (start, end))
        is_whole = first == 0 and last == num_samples
        plan = replace(loader.plan, order=replace(loader.plan.order, epoch=epoch))
        count += plan.count() if is_whole else sum(step.start < last for step in plan.steps(first))
        start = Fraction(epoch + 1)
    return count


def _loader(leaf: Source, recipe: Recipe, arguments: Mapping[str, Any], stack: ExitStack) -> MultimodalLoader:
    """Returns the loader of a source."""
    if is_loader(leaf.dataset):
        return leaf.dataset  # type: ignore[no-any-return]  # `is_loader` is true of it: `MultimodalLoader` by its methods
    options = {name: value for name, value in leaf.options.items() if name in ("shuffle", *LOADER_KEYS)}
    dataset = open_source(leaf, recipe, stack)
    with located(recipe.where, leaf.key), warnings.catch_warnings():
        # A loader without batches is an error here, unless its weight is 0.
        warnings.filterwarnings("ignore", 'last="drop" leaves out all', RuntimeWarning)
        return MultimodalLoader(dataset, seed=seed_of(leaf, recipe), **options, **arguments)
