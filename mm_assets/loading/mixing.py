"""Several datasets in one stream of batches, by weight.

Each batch is of one dataset. Its name is drawn by weight from a key of (seed, epoch, number of the batch), so that all
ranks draw the same, and a resumed run continues the sequence. Each dataset has its own epochs: when one has ended, its
next one begins.
"""

from __future__ import annotations

import warnings
import weakref
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from math import isfinite
from typing import Any

from mm_assets.errors import ConfigError, LoaderError
from mm_assets.loading.batches import BatchSource
from mm_assets.loading.loader import BatchIterator, Iteration, MultimodalLoader
from mm_assets.loading.order import hash_float
from mm_assets.loading.plan import torch_worker
from mm_assets.loading.rules import check_integer

__all__ = ["MixedIterator", "MixedLoader", "mix"]

VERSION = 1


def mix(
    sources: Mapping[str, tuple[BatchSource | MultimodalLoader, float]],
    *,
    seed: int = 0,
    num_batches: int | None = None,
    **options: Any,
) -> MixedLoader:
    """Batches of several datasets, by weight.

    Args:
        sources: by name, a dataset or a loader, and its weight.
        seed: of the choice, and of the order of the datasets.
        num_batches: as for `MixedLoader`.
        options: arguments of the `MultimodalLoader` for each dataset, such as `batch_size`.

    Raises:
        ConfigError: as for `MixedLoader` and `MultimodalLoader`; or options where all sources are loaders.
    """
    for name, entry in sources.items():
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise ConfigError("arguments", f"sources.{name}", "expected a pair: a dataset or loader, and its weight")
    if options and all(isinstance(source, MultimodalLoader) for source, _ in sources.values()):
        raise ConfigError("arguments", next(iter(options)), "goes to loaders that are made here, and all are given")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a loader without batches is an error here
        loaders = {
            name: source if isinstance(source, MultimodalLoader) else MultimodalLoader(source, seed=seed, **options)
            for name, (source, _) in sources.items()
        }
    return MixedLoader(
        loaders, {name: weight for name, (_, weight) in sources.items()}, seed=seed, num_batches=num_batches
    )


class MixedLoader:
    """Batches of several loaders, by weight.

    Each iteration yields `num_batches` batches, after `load_state_dict` the rest of them; the datasets continue in
    their own epochs from one iteration to the next, also after a ``break``. A batch that is a dict has its source's
    name as ``source``.

    Args:
        loaders: by name. Only this loader moves them: do not iterate over them directly.
        weights: by name, positive: a source of twice the weight yields twice the batches, on average.
        seed: of the choice.
        num_batches: of one iteration; by default as many as the loaders have together in an epoch of each.

    Raises:
        ConfigError: names or weights do not fit, a loader has no batches, or ranks would not have the same number of
            batches, so that they could not draw alike.
    """

    def __init__(
        self,
        loaders: Mapping[str, MultimodalLoader],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        num_batches: int | None = None,
    ) -> None:
        if not loaders or set(loaders) != set(weights):
            detail = f"found weights of {', '.join(weights) or 'none'} for {', '.join(loaders) or 'no loaders'}"
            raise ConfigError("arguments", "weights", detail)
        for name, loader in loaders.items():
            weight = weights[name]
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not (isfinite(weight) and weight > 0):
                raise ConfigError("arguments", f"weights.{name}", f"found {weight!r}, expected a positive number")
            plan = loader.plan
            if not plan.is_even:
                detail = 'with last="short" its ranks have different numbers of batches'
                raise ConfigError("arguments", f"loaders.{name}", detail)
            if not len(loader):
                raise ConfigError("arguments", f"loaders.{name}", "has no batches")
        if len({id(loader) for loader in loaders.values()}) != len(loaders):
            raise ConfigError("arguments", "loaders", "found one loader under two names: its place would be both's")
        if num_batches is None:
            num_batches = sum(map(len, loaders.values()))
        check_integer("num_batches", num_batches, 1)
        self._loaders = dict(loaders)
        self._names = tuple(loaders)
        self._weights = tuple(float(weights[name]) for name in self._names)
        self._bounds = tuple(accumulate(self._weights))
        self._seed = seed
        self._num_batches = num_batches
        self._epoch = 0
        self._step = 0
        self._is_used = False  # whether the next iteration begins another sequence
        self._current: weakref.ref[MixedIterator] | None = None

    def __len__(self) -> int:
        """Batches of one iteration from its start."""
        return self._num_batches

    @property
    def epoch(self) -> int:
        """How many iterations have ended."""
        return self._epoch

    def choose(self, epoch: int, step: int) -> str:
        """The name of the source that a batch is of."""
        place = hash_float(self._seed, epoch, step) * self._bounds[-1]
        return self._names[min(bisect_right(self._bounds, place), len(self._names) - 1)]

    def _draw(self) -> str | None:
        """The source of the next batch; None at the end, which is where the next iteration begins."""
        if self._step < self._num_batches:
            return self.choose(self._epoch, self._step)
        self._move(self._epoch + 1, 0)
        return None

    def _deliver(self) -> None:
        self._step += 1
        self._is_used = True

    def _move(self, epoch: int, step: int) -> None:
        self._epoch, self._step, self._is_used = epoch, step, False

    def __iter__(self) -> MixedIterator:
        """The batches of the next iteration, or those after a loaded state; an iteration in progress ends.

        Raises:
            LoaderError: in one of several workers of torch's DataLoader, each of which would yield all batches.
        """
        _, num_workers = torch_worker()
        if num_workers > 1:
            detail = f"found one of {num_workers} worker processes, expected at most one: each would yield all batches"
            raise LoaderError(f"{detail}. Loaders read ahead in threads: iterate in the main process")
        self._end_current()
        if self._is_used:
            self._move(self._epoch + 1, 0)
        iterator = MixedIterator(self, self._loaders)
        self._current = weakref.ref(iterator)
        return iterator

    def _end_current(self) -> None:
        current = self._current() if self._current is not None else None
        if current is not None:
            current.supersede()
        self._current = None

    def state_dict(self) -> dict[str, Any]:
        """The position, with that of each loader, as plain values for a checkpoint."""
        return {
            "version": VERSION,
            "seed": self._seed,
            "epoch": self._epoch,
            "step": self._step,
            "weights": dict(zip(self._names, self._weights, strict=True)),
            "loaders": {name: loader.state_dict() for name, loader in self._loaders.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position from `state_dict`, also one of other ranks and other batch sizes.

        Raises:
            LoaderError: it is of other datasets, weights, or seeds.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("loaders"), Mapping):
            raise LoaderError("this is not a mixed loader's state: it has no loaders")
        own = {"version": VERSION, "seed": self._seed, "weights": dict(zip(self._names, self._weights, strict=True))}
        for key, value in own.items():
            if state.get(key) != value:
                raise LoaderError(f"the state is of another mix: its {key} is {state.get(key)!r}, here it is {value!r}")
        place = [state.get(key) for key in ("epoch", "step")]
        if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in place):
            raise LoaderError(f"this is not a mixed loader's state: epoch and step are {place}")
        if list(state["loaders"]) != list(self._names):
            # Their order decides the meaning of a drawn number.
            found = ", ".join(map(str, state["loaders"]))
            raise LoaderError(f"the state is of another mix: its loaders are {found}, here {', '.join(self._names)}")
        for name, loader in self._loaders.items():
            loader.check_state(state["loaders"][name])
        self._end_current()
        for name, loader in self._loaders.items():
            loader.load_state_dict(state["loaders"][name])
        self._move(state["epoch"], state["step"])


class MixedIterator(Iteration):
    """The batches of the rest of an iteration over a `MixedLoader`; else as `BatchIterator`."""

    def __init__(self, loader: MixedLoader, loaders: Mapping[str, MultimodalLoader]) -> None:
        super().__init__()
        self._loader = loader
        self._loaders = loaders
        self._iterators: dict[str, BatchIterator] = {}

    def _make(self) -> Any:
        name = self._loader._draw()
        if name is None:
            raise StopIteration
        batch = self._next(name)
        self._loader._deliver()
        if isinstance(batch, dict):
            batch.setdefault("source", name)
        return batch

    def _next(self, name: str) -> Any:
        """The next batch of a source, of its next epoch where one has ended."""
        for _ in range(2):
            if name not in self._iterators:
                self._iterators[name] = self._loaders[name].iterate_on()
            try:
                return next(self._iterators[name])
            except StopIteration:
                del self._iterators[name]
        # One empty epoch may be the rest of a state; two mean that the source has no batches.
        raise LoaderError(f"source {name!r} has no batches")

    def _end(self) -> None:
        for iterator in self._iterators.values():
            iterator.close()
