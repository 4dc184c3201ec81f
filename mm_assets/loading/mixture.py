"""Which source each position of a mix is of, computed for the requested positions.

Nothing is replayed: a source with the share s(t) of a mix has had floor(u + ∫ s) positions up to t, where u in [0, 1)
is drawn from the seed. So its number differs by less than 1 from its share, at any t. Integer arithmetic makes this
exact, the same on every machine. Positions are divided into windows; in each, a keyed permutation decides the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mm_assets.errors import ConfigError
from mm_assets.loading.order import EpochOrder, derive_key, permute
from mm_assets.loading.recipe import Recipe, Source

__all__ = ["MixedOrder", "Mixture", "Segment", "share_segments"]

Positions = npt.NDArray[np.int64]

# Places in the derivation of keys, which no other use shares: see `order`.
_PHASE, _ORDER = 11, 12


class Segment(NamedTuple):
    """Positions of a mix in which the shares of its sources change linearly, or not at all.

    Attributes:
        start: the first position; it ends where the next segment begins.
        shares: of the sources at its start, 1 together.
        last_shares: the limit at its end.
    """

    start: int
    shares: tuple[Fraction, ...]
    last_shares: tuple[Fraction, ...]


def share_segments(recipe: Recipe, sizes: Sequence[Fraction]) -> list[Segment]:
    """Returns the shares of a recipe's datasets, which its weights decide.

    Between two points of schedules the shares change linearly, not the weights: so their integral is a polynomial.

    Args:
        recipe: with weights.
        sizes: of its datasets, in the unit that is mixed: how many make an epoch.

    Raises:
        ConfigError: all weights of a mix are 0 at some position, or an empty dataset has a weight.
    """
    by_name = {leaf.name: size for leaf, size in zip(recipe.leaves, sizes, strict=True)}
    starts = sorted(set(_points(recipe.root)))
    segments = []
    for number, start in enumerate(starts):
        shares = tuple(_shares(recipe, by_name, start))
        stop = starts[number + 1] if number + 1 < len(starts) else None
        last = shares if stop is None else tuple(_shares(recipe, by_name, start, stop))
        for leaf, *ends in zip(recipe.leaves, shares, last, strict=True):
            if any(ends) and not by_name[leaf.name]:
                what = "batches" if recipe.unit == "batch" else "samples"
                detail = f"has no {what}, and a weight from position {start:,} on: give it the weight 0"
                raise ConfigError(recipe.where, leaf.key, detail)
        segments.append(Segment(start, shares, last))
    return segments


def _points(source: Source) -> Iterator[int]:
    if source.weight is not None:
        yield from (position for position, _ in source.weight.points)
    yield 0
    for inner in source.sources:
        yield from _points(inner)


def _shares(recipe: Recipe, sizes: dict[str, Fraction], start: int, stop: int | None = None) -> Iterator[Fraction]:
    """Yields the share of each dataset at the start of a segment; with `stop`, the limit at its end."""

    def size(source: Source) -> Fraction:
        if not source.sources:
            return sizes[source.name]
        return sum(((inner.epochs or 1) * size(inner) for inner in source.sources), Fraction(0))

    def weights(source: Source, *, at_stop: bool) -> list[Fraction]:
        return [
            (inner.epochs or 0) * size(inner)
            if inner.weight is None
            else inner.weight.at(start)
            if stop is None or not at_stop
            else inner.weight.at(stop, before=True)
            for inner in source.sources
        ]

    def walk(source: Source, share: Fraction) -> Iterator[Fraction]:
        if not source.sources:
            yield share
            return
        found = weights(source, at_stop=True)
        if not any(found) and stop is not None:
            found = weights(source, at_stop=False)  # all decrease to 0 together: the limit is that of their ratios
        total = sum(found)
        if not total and share:
            raise ConfigError(recipe.where, source.key, f"all weights are 0 at position {start:,}")
        for inner, weight in zip(source.sources, found, strict=True):
            yield from walk(inner, share * weight / total if total else Fraction(0))

    return walk(recipe.root, Fraction(1))


class Mixture:
    """Which source each position of an endless mix is of, and which position of that source it is.

    Args:
        segments: the shares, from position 0 on.
        seed: of the order within a window.
        window: positions within which the sources are mixed.
        period: an integer at whose multiples windows begin, so that the first positions up to there have what the
            shares say exactly if that is a whole number; None for none.
    """

    def __init__(self, segments: Sequence[Segment], *, seed: int, window: int, period: int | None = None) -> None:
        self._seed = seed
        self._window = window
        self._period = period
        self._starts = [segment.start for segment in segments]
        self._polynomials: list[tuple[int, list[tuple[int, int, int]]]] = []
        count = len(segments[0].shares)
        ends = [Fraction(derive_key(seed, _PHASE, number) >> 32, 2**32) for number in range(count)]
        for segment, stop in zip(segments, [*self._starts[1:], None], strict=True):
            length = 1 if stop is None else stop - segment.start
            curves = [(b - a) / (2 * length) for a, b in zip(segment.shares, segment.last_shares, strict=True)]
            rows = list(zip(ends, segment.shares, curves, strict=True))
            scale = lcm(*(number.denominator for row in rows for number in row))
            whole = [(int(base * scale), int(share * scale), int(curve * scale)) for base, share, curve in rows]
            self._polynomials.append((scale, whole))
            ends = [base + share * length + curve * length**2 for base, share, curve in rows]
        self._last: _Window | None = None

    def counts(self, time: int) -> list[int]:
        """Returns how many positions of each source come before a time.

        Their sum differs from the time by less than the number of sources.
        """
        number = len(self._starts) - 1
        while self._starts[number] > time:
            number -= 1
        scale, rows = self._polynomials[number]
        x = time - self._starts[number]
        return [(base + x * (share + x * curve)) // scale for base, share, curve in rows]

    def counts_before(self, position: int) -> list[int]:
        """Returns how many positions of each source come before one of the mix: their sum is the position."""
        window = self._find(position)
        within = np.bincount(window.sources[: position - window.start], minlength=len(window.before))
        return [count + more for count, more in zip(window.before, within.tolist(), strict=True)]

    def locate(self, positions: npt.NDArray[np.integer]) -> tuple[Positions, Positions]:
        """Returns the sources of some positions of the mix, and the positions in them.

        Args:
            positions: (n,) integers from 0, in any order.

        Returns:
            (n,) int64, numbers of sources; (n,) int64, positions in the sources, each of which counts on through all of
            its epochs.
        """
        order = np.argsort(positions, kind="stable")
        ascending = positions[order]
        sources, places = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
        done = 0
        while done < len(order):
            window = self._find(int(ascending[done]))
            stop = int(np.searchsorted(ascending, window.stop))
            within = ascending[done:stop] - window.start
            sources[order[done:stop]] = window.sources[within]
            places[order[done:stop]] = window.places[within]
            done = stop
        return sources, places

    def _find(self, position: int) -> _Window:
        """Returns the window of a position; consecutive calls are often in one."""
        window = self._last
        if window is not None and window.start <= position < window.stop:
            return window
        # Positions are times, but for less than one for each source by which the counts are rounded.
        low, high = self._bounds(position)
        before = self.counts(low)
        while sum(before) > position:
            low, high = self._bounds(low - 1)
            before = self.counts(low)
        while sum(after := self.counts(high)) <= position:
            low, high = self._bounds(high)
            before = after
        self._last = window = self._make(low, before, after)
        return window

    def _bounds(self, time: int) -> tuple[int, int]:
        """Returns when the window of a time begins and ends."""
        first = max(start for start in self._starts if start <= time)
        ends = [start for start in self._starts if start > time][:1]
        if self._period is not None:
            first = max(first, time - time % self._period)
            ends.append(time - time % self._period + self._period)
        low = time - (time - first) % self._window
        return low, min(low + self._window, *ends) if ends else low + self._window

    def _make(self, low: int, before: list[int], after: list[int]) -> _Window:
        counts = np.subtract(after, before)
        size = int(counts.sum())
        order = permute(np.arange(size), size, derive_key(self._seed, _ORDER, low))
        sources = np.repeat(np.arange(len(counts)), counts)[order]
        places = np.empty(size, np.int64)
        # Each source's own positions stay in order.
        firsts = np.repeat(np.asarray(before) - (np.cumsum(counts) - counts), counts)
        places[np.argsort(sources, kind="stable")] = firsts + np.arange(size)
        return _Window(sum(before), sum(after), before, sources, places)


class _Window(NamedTuple):
    """Positions [start, stop) of a mix: how many of each source come before them, their sources, and places in them."""

    start: int
    stop: int
    before: list[int]
    sources: Positions
    places: Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedOrder(EpochOrder):
    """The order of an iteration over a mix of samples; `num_samples` is its length.

    The number of a sample has the epoch of its source in it, so that a transform has another draw for each time that
    the sample is seen: it is the sample's place in all sources, plus as many times their size.

    Attributes:
        mixture: says which source each position is of.
        orders: of the sources, of their epoch 0.
    """

    mixture: Mixture
    orders: tuple[EpochOrder, ...]

    def at(self, positions: npt.NDArray[np.integer]) -> Positions:
        """Returns the samples at some positions, as `EpochOrder.at`."""
        if len(positions) and (positions.min() < 0 or positions.max() >= self.num_samples):
            raise IndexError(f"a position outside the {self.num_samples} of the iteration")
        sources, places = self.mixture.locate(np.asarray(positions, np.int64) + self.epoch * self.num_samples)
        return self.samples(sources, places)

    def samples(self, sources: Positions, places: Positions) -> Positions:
        """Returns the samples at some positions of sources."""
        starts = self.starts
        found = np.empty(len(places), np.int64)
        for number in np.unique(sources).tolist():
            order = self.orders[number]
            here = np.flatnonzero(sources == number)
            epochs, inner = np.divmod(places[here], order.num_samples)
            for epoch in np.unique(epochs).tolist():
                rows = epochs == epoch
                own = EpochOrder(num_samples=order.num_samples, shuffle=order.shuffle, seed=order.seed, epoch=epoch)
                found[here[rows]] = own.at(inner[rows]) + starts[number] + epoch * starts[-1]
        return found

    @property
    def starts(self) -> Positions:
        """The first sample of each source in its epoch 0, and the number of all samples: (sources + 1,) int64."""
        return np.cumsum([0, *(order.num_samples for order in self.orders)], dtype=np.int64)
