"""Mixes whose batches have samples of all sources: one loader over all datasets, in an order that mixes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.dataset import Dataset
from mm_assets.dataset.decoding import Batch
from mm_assets.errors import ConfigError, LoaderError
from mm_assets.fields import ArraySpec, Field
from mm_assets.loading.batches import BatchSource, DamagedSample
from mm_assets.loading.budget import Budget
from mm_assets.loading.collate import rows_of
from mm_assets.loading.loader import BatchIterator, LoaderStats, MultimodalLoader
from mm_assets.loading.mixed_loader import (
    POSITION,
    MixedLoader,
    check_epoch,
    check_outputs,
    count_of,
    leaf_epochs,
    located,
    open_source,
    seed_of,
)
from mm_assets.loading.mixture import MixedOrder, Mixture, Segment, share_segments
from mm_assets.loading.order import MAX_SAMPLES, Blocks, EpochOrder, checked_number
from mm_assets.loading.recipe import LOADER_KEYS, Recipe
from mm_assets.loading.sequence_packer import SequencePacker
from mm_assets.loading.state import fingerprint

__all__ = ["MixedSource", "SampleMix"]

WINDOW = 1024  # samples in which each source has its share, to within one


class SampleMix(MixedLoader):
    """A mix with ``unit: sample``: one loader over all datasets, in an order that mixes them."""

    def __init__(self, recipe: Recipe, arguments: Mapping[str, Any], stack: ExitStack) -> None:
        self._datasets = datasets = {leaf.name: open_source(leaf, recipe, stack) for leaf in recipe.leaves}
        sizes = list(map(len, datasets.values()))
        period = None
        if recipe.counts_epochs:
            epochs = dict(leaf_epochs(recipe.root))
            counts = [round(epochs[leaf.name] * size) for leaf, size in zip(recipe.leaves, sizes, strict=True)]
            length = period = sum(counts)
            shares = tuple(Fraction(count, length or 1) for count in counts)
            segments = [Segment(0, shares, shares)]
        else:
            length = recipe.length or sum(sizes)
            segments = share_segments(recipe, [Fraction(size) for size in sizes])
        if not length:
            raise ConfigError(recipe.where, "sources", "found no samples in any of them")
        self._mixture = Mixture(segments, seed=recipe.seed, window=WINDOW, period=period)
        orders = [
            EpochOrder(num_samples=size, shuffle=leaf.options.get("shuffle", True), seed=seed_of(leaf, recipe))
            for leaf, size in zip(recipe.leaves, sizes, strict=True)
        ]
        facts = {
            name: {
                "fingerprint": fingerprint(dataset),
                "num_samples": order.num_samples,
                "shuffle": asdict(order.shuffle) if isinstance(order.shuffle, Blocks) else order.shuffle,
            }
            for (name, dataset), order in zip(datasets.items(), orders, strict=True)
        }
        super().__init__(recipe, facts, num_samples=length)
        options = {name: value for name, value in recipe.options.items() if name in LOADER_KEYS}
        for found in (options.get("batch_size"), arguments.get("collator")):
            if isinstance(found, Budget | SequencePacker):
                detail = (
                    f"found sample and a {type(found).__name__}, which groups samples by their sizes, not by source"
                )
                raise ConfigError(
                    recipe.where, "unit", f"{detail}: expected batch, with which each batch is of one source"
                )
        self._source = MixedSource(datasets, fingerprint=self.digest)
        if "modalities" not in options:
            self._check_modalities(datasets, recipe)
        with located(recipe.where, "defaults"):
            self.loader = MultimodalLoader(self._source, seed=recipe.seed, **options, **arguments)
        check_outputs(self.loader, recipe.where, "sources")
        self.loader.plan = replace(
            self.loader.plan,
            order=MixedOrder(num_samples=length, seed=recipe.seed, mixture=self._mixture, orders=tuple(orders)),
        )

    @staticmethod
    def _check_modalities(datasets: Mapping[str, BatchSource], recipe: Recipe) -> None:
        first, *others = recipe.leaves
        names = datasets[first.name].names
        for leaf in others:
            if set(found := datasets[leaf.name].names) != set(names):
                detail = f"has the modalities {', '.join(found)}, and {first.name!r} has {', '.join(names)}"
                advice = "a batch of samples of both needs the same: name them with modalities"
                raise ConfigError(recipe.where, f"{leaf.key}.dataset", f"{detail}: {advice}")

    def __len__(self) -> int:
        return len(self.loader)

    def count_batches(self, epoch: int) -> int:
        """As `BatchLoader.count_batches`."""
        return self.loader.count_batches(epoch)

    def iterate_from(self, num_batches: int) -> BatchIterator:
        """As `BatchLoader.iterate_from`."""
        return self.loader.iterate_from(num_batches)

    def set_epoch(self, epoch: int) -> None:
        """As `BatchLoader.set_epoch`."""
        check_epoch(checked_number("epoch", epoch, 0), self.loader.plan.order.num_samples)
        self.loader.set_epoch(epoch)

    def _go_to(self, epoch: int) -> None:
        check_epoch(epoch, self.loader.plan.order.num_samples)
        self.loader._go_to(epoch)

    def stats(self) -> LoaderStats:
        """As `BatchLoader.stats`."""
        return self.loader.stats()

    @property
    def datasets(self) -> dict[str, BatchSource]:
        """As `MixedLoader.datasets`."""
        return dict(self._datasets)

    @property
    def epoch(self) -> int:
        """How many iterations have ended."""
        return self.loader.epoch

    @property
    def damaged(self) -> dict[str, list[DamagedSample]]:
        """As `MixedLoader.damaged`."""
        found: dict[str, list[DamagedSample]] = {name: [] for name in self.names}
        for one in self.loader.damaged:
            (name,), index = self._source.locate(np.array([one.index]))
            found[name].append(replace(one, index=int(index[0])))
        return found

    def _position(self) -> dict[str, Any]:
        state = self.loader.state_dict()
        return {key: state[key] for key in POSITION}

    def _load_position(self, state: Mapping[str, Any]) -> None:
        if count_of(state, "epoch") * self.loader.plan.order.num_samples > MAX_SAMPLES:
            raise LoaderError(
                f"this is not a mix's state: epoch is {state['epoch']}, which has more than 2**62 samples"
            )
        self.loader.load_state_dict({**self.loader.state_dict(), **{key: state.get(key) for key in POSITION}})

    def _end(self) -> None:
        self.loader.load_state_dict(self.loader.state_dict())


# --- the datasets as one ---

Layouts = dict[str, ArraySpec | dict[str, ArraySpec]]


class MixedSource:
    """The samples of several datasets, one dataset after the other; else as a `Dataset`.

    A number beyond the last sample names one as well, counted on from the first: see `MixedOrder`.

    Args:
        sources: datasets by name, which have the modalities that are read.
        fingerprint: of all of them and of how they are mixed.
        opened: those that `close` closes.
    """

    def __init__(
        self, sources: Mapping[str, BatchSource], *, fingerprint: str = "", opened: Sequence[Any] = ()
    ) -> None:
        self._names = tuple(sources)
        self._sources = tuple(sources.values())
        self._starts = np.cumsum([0, *map(len, self._sources)])
        self._opened = tuple(opened)
        self.fingerprint = fingerprint
        # Modalities of all sources, in the order of the first.
        self.names = tuple(
            name for name in self._sources[0].names if all(name in source.names for source in self._sources[1:])
        )

    @property
    def fields(self) -> dict[str, Field]:
        """Modality name to field, of the first source."""
        fields: Mapping[str, Field] = getattr(self._sources[0], "fields", {})
        return {name: field for name, field in fields.items() if name in self.names}

    def __len__(self) -> int:
        """Samples of all sources."""
        return int(self._starts[-1])

    def locate(self, samples: npt.NDArray[np.int64]) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Returns the names of the sources of some samples, and their indices in them, (n,) int64."""
        numbers, indices = self._split(samples)
        return [self._names[number] for number in numbers.tolist()], indices

    def _split(self, samples: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        inner = samples % len(self)
        numbers = np.searchsorted(self._starts, inner, side="right") - 1
        return numbers, inner - self._starts[numbers]

    def durations(self, indices: npt.NDArray[np.int64], modalities: Sequence[str]) -> npt.NDArray[np.float64]:
        """As `Dataset.durations`."""
        numbers, inner = self._split(indices)
        found = np.zeros(len(indices))
        for number in np.unique(numbers).tolist():
            found[numbers == number] = self._sources[number].durations(inner[numbers == number], modalities)
        return found

    def read_batch(
        self,
        indices: npt.NDArray[np.int64],
        modalities: Sequence[str],
        *,
        out: Mapping[str, Any] | None = None,
        threads: int | None = 0,
        on_read: Callable[[], object] | None = None,
        **of_rows: npt.NDArray[Any] | None,
    ) -> Mapping[str, Batch]:
        """As `Dataset.read_batch`; each source is read with all of its samples at once, and its rows of `of_rows`."""
        numbers, inner = self._split(indices)
        used = np.unique(numbers).tolist()
        layouts = self.batch_layout(len(indices), modalities)
        if len(used) == 1:
            found = self._sources[used[0]].read_batch(
                inner, modalities, out=out, threads=threads, on_read=on_read, **of_rows
            )
            return {
                name: Batch(_values(batch, as_list=name not in layouts), batch.present) for name, batch in found.items()
            }
        targets = {name: _arrays(layout, (out or {}).get(name)) for name, layout in layouts.items()}
        values: dict[str, Any] = {name: targets.get(name, [None] * len(indices)) for name in modalities}
        present = {name: np.zeros(len(indices), np.bool_) for name in modalities}
        for number in used:
            rows = np.flatnonzero(numbers == number)
            own = {name: array[rows] for name, array in of_rows.items() if array is not None}
            part = self._sources[number].read_batch(inner[rows], modalities, threads=threads, on_read=on_read, **own)
            for name, batch in part.items():
                present[name][rows] = batch.present
                _scatter(values[name], rows, _values(batch, as_list=name not in layouts))
        return {name: Batch(values[name], present[name]) for name in modalities}

    def batch_layout(self, n: int, modalities: Sequence[str]) -> Layouts:
        """As `Dataset.batch_layout`; a modality whose layouts differ comes as a list."""
        first, *others = (source.batch_layout(n, modalities) for source in self._sources)
        return {name: layout for name, layout in first.items() if all(other.get(name) == layout for other in others)}

    def with_settings(self, settings: Mapping[str, Mapping[str, Any]]) -> MixedSource:
        """Returns the same samples, decoded with other settings if a source is a `Dataset`; `close` closes those."""
        sources, opened = dict(zip(self._names, self._sources, strict=True)), []
        for name, source in sources.items():
            if isinstance(source, Dataset):
                sources[name] = view = source.with_settings(settings)
                opened.append(view)
        return MixedSource(sources, fingerprint=self.fingerprint, opened=opened)

    def close(self) -> None:
        """Closes what was opened for it."""
        for dataset in self._opened:
            dataset.close()


def _arrays(layout: ArraySpec | dict[str, ArraySpec], out: Any) -> Any:
    """Returns the rows to write to: those of `out`, or new arrays."""
    if isinstance(layout, ArraySpec):
        return np.empty(layout.shape, layout.dtype) if out is None else out[: layout.shape[0]]
    return {part: _arrays(one, None if out is None else out[part]) for part, one in layout.items()}


def _scatter(target: Any, rows: npt.NDArray[np.int64], values: Any) -> None:
    """Writes values to some rows of an array, of arrays by name, or of a list."""
    if isinstance(target, dict):
        for part, array in target.items():
            array[rows] = values[part]
    elif isinstance(target, list):
        for row, value in zip(rows.tolist(), values, strict=True):
            target[row] = value
    else:
        target[rows] = values


def _values(batch: Batch, *, as_list: bool) -> Any:
    """Returns the values of a batch; as a list if they are arrays in one source and not in another."""
    return rows_of(batch.values, batch.present) if as_list and not isinstance(batch.values, list) else batch.values
