"""Mixes whose batches are of one source each."""

from __future__ import annotations

import time
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, islice
from math import ceil, floor, nextafter
from typing import Any, NamedTuple

import numpy as np

from mm_assets.dataset.prefetch import Prefetch
from mm_assets.errors import ConfigError, LoaderError
from mm_assets.loading.batches import BatchMaker, BatchSource, DamagedSample, Made
from mm_assets.loading.loader import Iteration, LoaderStats, MultimodalLoader, share_of_worker
from mm_assets.loading.mixed_loader import (
    POSITION,
    MixedLoader,
    check_epoch,
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
from mm_assets.loading.plan import EpochPlan, Plan, Step
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
        self._epoch = 0
        self._start = 0  # the first batch of the iteration, of all that were ever to come
        self._step = 0
        self._is_used = False
        self._current: weakref.ref[MixedIterator] | None = None

    def __len__(self) -> int:
        if self._mixture is not None:
            return self._length
        return self._step + sum(
            _count_batches(loader.plan, _progress(loader.plan, loader._delivered), self._target(name, self._epoch))
            for name, loader in self.loaders.items()
        )

    def count_batches(self, epoch: int) -> int:
        """As `BatchLoader.count_batches`."""
        if self._mixture is not None:
            return self._length
        if epoch == self._epoch:
            return len(self)
        return sum(
            _count_batches(self.loaders[name].plan, _progress(plan, delivered), self._target(name, epoch))
            for name, (plan, delivered) in self._places(epoch).items()
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

    def stats(self) -> LoaderStats:
        """As `BatchLoader.stats`, of all sources together."""
        parts = [asdict(loader.stats()) for loader in self.loaders.values()]
        return LoaderStats(**{name: sum(part[name] for part in parts) for name in parts[0]})

    # --- positions ----------------------------------------------------------------------------------------------------

    def _target(self, name: str, epoch: int) -> Fraction:
        """Returns how many epochs of a source come before the end of an iteration."""
        return (epoch + 1) * self._epochs[name]

    def _places(self, epoch: int) -> dict[str, tuple[Plan, int]]:
        """Returns where each source is at the start of an iteration, if all iterations before it are whole."""
        plans = {name: loader.plan for name, loader in self.loaders.items()}
        if self._mixture is None:
            return {name: _place_at(plan, self._target(name, epoch - 1)) for name, plan in plans.items()}
        check_epoch(epoch, self._length)
        counts = self._mixture.counts_before(epoch * self._length)
        return {name: _place_after(plan, count) for (name, plan), count in zip(plans.items(), counts, strict=True)}

    def _go_to(self, epoch: int) -> None:
        places = self._places(epoch)
        self._end()
        for name, place in places.items():
            self._move(name, *place)
        self._epoch, self._start, self._step, self._is_used = epoch, epoch * self._length, 0, False

    def _move(self, name: str, plan: Plan, delivered: int) -> None:
        self.loaders[name]._move(plan.order, delivered)

    def _begin_next(self) -> None:
        """Goes to the start of the next iteration; epochs of this one that a ``break`` left are skipped."""
        for name, loader in self.loaders.items() if self._mixture is None else ():
            start = self._target(name, self._epoch)
            if _progress(loader.plan, loader._delivered) < start:
                self._move(name, *_place_at(loader.plan, start))
        self._epoch, self._step, self._is_used = self._epoch + 1, 0, False
        self._start += self._length

    # --- what the iteration uses --------------------------------------------------------------------------------------

    def iterate_from(self, num_batches: int) -> MixedIterator:
        """As `BatchLoader.iterate_from`."""
        self._end()
        if self._is_used and not num_batches:
            self._begin_next()
        iterator = MixedIterator(self, num_batches)
        for loader in self.loaders.values():
            loader._begin(iterator)
        self._current = weakref.ref(iterator)
        return iterator

    def _end(self) -> None:
        current = self._current() if self._current is not None else None
        if current is not None:
            current.supersede()
        self._current = None

    def _plan(self, walks: Mapping[str, _Walk]) -> Iterator[_PlannedBatch]:
        """Yields the batches that are left of the iteration; nothing is read for them."""
        step, ended = self._step, set[str]()
        while (name := self._draw(step, walks)) is not None:
            plan, found = walks[name].plan, walks[name].next_step()
            if found is not None:
                step += 1
                ended.clear()
                yield _PlannedBatch(name, plan, found, step)
            elif name in ended:  # one empty epoch may be the rest of a state
                raise LoaderError(f"source {name!r} has no batches")
            else:
                ended.add(name)

    def _draw(self, step: int, walks: Mapping[str, _Walk]) -> str | None:
        """Returns the source of the next batch; None at the end."""
        if self._mixture is not None:
            if step >= self._length:  # beyond it, if the state is of longer iterations
                return None
            sources, _ = self._mixture.locate(np.array([self._start + step]))
            return self.names[int(sources[0])]
        # Batches, but for the rounding of the last one.
        left = [
            max(0.0, float(self._target(name, self._epoch) - walks[name].progress)) * size
            for name, size in self._sizes.items()
        ]
        bounds = list(accumulate(left))
        if not bounds[-1]:
            return None
        place = hash_float(self._recipe.seed, _DRAW, self._epoch, step) * bounds[-1]
        return self.names[bisect_right(bounds, min(place, nextafter(bounds[-1], 0)))]

    def _read_ahead(self, walks: Mapping[str, _Walk], skip: int) -> Prefetch[tuple[_PlannedBatch, Made]]:
        """Begins to read the batches of the iteration, of all sources in the order of the mix."""
        makers: dict[str, tuple[BatchMaker, Callable[[], None]]] = {}

        def tasks() -> Iterator[Callable[[], tuple[_PlannedBatch, Made]]]:
            for number, batch in share_of_worker(self._plan(walks), skip):
                if batch.source not in makers:
                    makers[batch.source] = self.loaders[batch.source]._make_maker()
                yield partial(_make, makers[batch.source][0], number, batch)

        def end() -> None:
            for _, close in list(makers.values()):
                close()

        threads = max(loader._num_readers for loader in self.loaders.values())
        depth = threads + max(loader._prefetch for loader in self.loaders.values())
        return Prefetch(tasks(), threads=threads, depth=depth, on_end=end)

    def _deliver(self, batch: _PlannedBatch, made: Made, asked: float) -> None:
        """Counts a batch that is yielded, as `MultimodalLoader._deliver`."""
        loader = self.loaders[batch.source]
        if batch.plan.order != loader.plan.order:
            loader.plan = replace(loader.plan, order=batch.plan.order)
        loader._deliver(made, asked)
        self._step, self._is_used = batch.stop, True

    def _finish(self, walks: Mapping[str, _Walk]) -> None:
        """Continues with the next iteration."""
        self._current = None
        for name, walk in walks.items():
            self.loaders[name]._current = None
            self._move(name, walk.plan, walk.delivered)
        self._begin_next()

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
        self._epoch, self._start, self._step, self._is_used = epoch, start, step, False


class MixedIterator(Iteration):
    """The batches of the rest of an iteration over a mix with ``unit: batch``; else as `BatchIterator`."""

    def __init__(self, mix: BatchMix, skip: int) -> None:
        super().__init__()
        self._mix = mix
        self._skip = skip
        self._walks: dict[str, _Walk] = {}
        self._ahead: Prefetch[tuple[_PlannedBatch, Made]] | None = None

    def _make(self) -> Any:
        asked = time.perf_counter()
        if self._ahead is None:
            self._walks = {name: _Walk(loader) for name, loader in self._mix.loaders.items()}
            self._ahead = self._mix._read_ahead(self._walks, self._skip)
        found = next(self._ahead, None)
        if found is None:
            self._mix._finish(self._walks)
            raise StopIteration
        planned, made = found
        self._mix._deliver(planned, made, asked)
        if isinstance(made.batch, dict):
            made.batch.setdefault("source", planned.source)
        return made.batch

    def _end(self) -> None:
        if self._ahead is not None:
            self._ahead.close()


class _PlannedBatch(NamedTuple):
    """A batch of a source, the plan of its epoch, and how many batches of the iteration come up to its end."""

    source: str
    plan: Plan
    step: Step
    stop: int


def _make(maker: BatchMaker, number: int, batch: _PlannedBatch) -> tuple[_PlannedBatch, Made]:
    return batch, maker.of(batch.plan).make(number, batch.step)


class _Walk:
    """The way through the epochs of a source, from its loader's position on."""

    def __init__(self, loader: MultimodalLoader) -> None:
        self.plan: Plan = loader.plan
        self.delivered = loader._delivered
        self._steps = self.plan.steps(self.delivered)

    @property
    def progress(self) -> Fraction:
        """Epochs before the next batch."""
        return _progress(self.plan, self.delivered)

    def next_step(self) -> Step | None:
        """Returns the next batch of the epoch; None at its end, after which the next epoch begins."""
        step = next(self._steps, None)
        if step is None:
            self.plan, self.delivered = _of_epoch(self.plan, self.plan.order.epoch + 1), 0
            self._steps = self.plan.steps()
        else:
            self.delivered = step.stop
        return step


def _of_epoch(plan: Any, epoch: int) -> Plan:
    """Returns the plan of another epoch."""
    result: Plan = replace(plan, order=replace(plan.order, epoch=epoch))
    return result


def _progress(plan: Plan, delivered: int) -> Fraction:
    """Returns how many epochs come before a position."""
    return plan.order.epoch + Fraction(delivered, plan.order.num_samples or 1)


def _place_at(plan: Plan, progress: Fraction) -> tuple[Plan, int]:
    """Returns the first position between two batches, of all epochs, that is not before some number of epochs."""
    own = _of_epoch(plan, floor(progress))
    first = ceil((progress - floor(progress)) * plan.order.num_samples)
    stop = next((step.stop for step in own.steps() if step.stop >= first), None) if first else 0
    return (_of_epoch(plan, own.order.epoch + 1), 0) if stop is None else (own, stop)


def _place_after(plan: Plan, num_batches: int) -> tuple[Plan, int]:
    """Returns the position after a number of batches since the start of epoch 0."""
    epoch = 0
    if isinstance(plan, EpochPlan):  # whose epochs are equally long; those of groups are planned one by one
        epoch, num_batches = divmod(num_batches, plan.count() or 1)
    own = _of_epoch(plan, epoch)
    while num_batches and (count := own.count()) <= num_batches:
        num_batches -= count
        own = _of_epoch(plan, own.order.epoch + 1)
    return own, next(islice(own.steps(), num_batches - 1, None)).stop if num_batches else 0


def _num_batches(loader: MultimodalLoader) -> Fraction:
    """Returns the batches of an epoch on a single rank: shares must not depend on the ranks."""
    if not len(loader):
        return Fraction(0)
    batch_size: Any = loader.batch_size
    if isinstance(batch_size, int):
        return Fraction(loader.plan.order.num_samples, batch_size)
    return Fraction(len(loader) * loader.plan.world_size)  # batches of different numbers of samples


def _count_batches(plan: Plan, start: Fraction, stop: Fraction) -> int:
    """Counts the batches between two positions, in epochs; the last one may go beyond the second."""
    num_samples, count = plan.order.num_samples, 0
    while start < stop and num_samples:
        epoch = floor(start)
        end = min(stop, Fraction(epoch + 1))
        first, last = (ceil((position - epoch) * num_samples) for position in (start, end))
        own = _of_epoch(plan, epoch)
        is_whole = first == 0 and last == num_samples
        count += own.count() if is_whole else sum(step.start < last for step in own.steps(first))
        start = Fraction(epoch + 1)
    return count


def _loader(leaf: Source, recipe: Recipe, arguments: Mapping[str, Any], stack: ExitStack) -> MultimodalLoader:
    """Returns the loader of a source."""
    if is_loader(leaf.dataset):
        return leaf.dataset
    options = {name: value for name, value in leaf.options.items() if name in ("shuffle", *LOADER_KEYS)}
    dataset = open_source(leaf, recipe, stack)
    with located(recipe.where, leaf.key), warnings.catch_warnings():
        # A loader without batches is an error here, unless its weight is 0.
        warnings.filterwarnings("ignore", 'last="drop" leaves out all', RuntimeWarning)
        return MultimodalLoader(dataset, seed=seed_of(leaf, recipe), **options, **arguments)
