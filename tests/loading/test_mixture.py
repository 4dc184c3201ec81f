"""The plan of a mix: shares are kept, positions are computed without a replay, and a tree is its flattened sources."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import ConfigError
from mm_assets.loading.mixture import MixedOrder, Mixture, Segment, share_segments
from mm_assets.loading.order import EpochOrder
from mm_assets.loading.recipe import parse_recipe

WINDOW = 32
WEIGHTS = st.one_of(st.integers(0, 20), st.floats(0, 20, allow_nan=False))
STEPS = st.lists(st.integers(1, 300), max_size=3, unique=True).map(lambda later: [0, *sorted(later)])


@st.composite
def schedules(draw: st.DrawFn) -> Any:
    """A weight of a recipe: a number, or a constant or linear schedule."""
    points = [[step, draw(WEIGHTS)] for step in draw(STEPS)]
    return draw(st.sampled_from([points[0][1], points, {"linear": points}]))


def mixture_of(weights: dict[str, Any], seed: int = 0) -> tuple[Mixture, list[Segment]]:
    sources = {name: {"dataset": name, "weight": weight} for name, weight in weights.items()}
    # One source has a constant weight, so that the weights are not all 0 somewhere.
    recipe = parse_recipe({"sources": {**sources, "constant": {"dataset": "x", "weight": 0.5}}})
    segments = share_segments(recipe, [Fraction(10)] * len(recipe.leaves))
    return Mixture(segments, seed=seed, window=WINDOW), segments


def shares_before(segments: list[Segment], time: int) -> list[float]:
    """The integral of each share up to a time, by the trapezoidal rule, which is exact for lines."""
    total = np.zeros(len(segments[0].shares))
    for number, segment in enumerate(segments):
        end = segments[number + 1].start if number + 1 < len(segments) else None
        if segment.start >= time:
            break
        stop = time if end is None else min(end, time)
        first, last = (np.array(shares, float) for shares in (segment.shares, segment.last_shares))
        at_stop = first if end is None else first + (last - first) * (stop - segment.start) / (end - segment.start)
        total += (first + at_stop) / 2 * (stop - segment.start)
    return total.tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(schedules(), min_size=1, max_size=5), st.integers(0, 3))
def test_shares_are_kept_at_every_position(weights: list[Any], seed: int) -> None:
    """A source has had its share of all positions so far, to within a window, and its own positions are consecutive."""
    mixture, segments = mixture_of({f"s{number}": weight for number, weight in enumerate(weights)}, seed)
    sources, places = mixture.locate(np.arange(500))
    num_sources = len(segments[0].shares)
    for number in range(num_sources):
        here = sources == number
        assert places[here].tolist() == list(range(here.sum()))
        for position in range(0, 501, 7):
            expected = shares_before(segments, position)[number]
            assert abs(here[:position].sum() - expected) <= WINDOW + num_sources
    for time in range(0, 500, 11):
        counts = mixture.counts(time)
        assert all(
            abs(one - other) < 1.000001 for one, other in zip(counts, shares_before(segments, time), strict=True)
        )


@settings(deadline=None, max_examples=40)
@given(st.lists(schedules(), min_size=1, max_size=4), st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_a_position_needs_no_replay(weights: list[Any], positions: list[int]) -> None:
    """What is at a position is the same alone, in any order with others, and after any others."""
    names = {f"s{number}": weight for number, weight in enumerate(weights)}
    sources, places = mixture_of(names)[0].locate(np.array(positions))
    for number, position in enumerate(positions):
        alone = mixture_of(names)[0].locate(np.array([position]))
        assert [one.tolist() for one in alone] == [[sources[number]], [places[number]]]


def test_a_weight_of_zero_is_never_chosen() -> None:
    """A source is not in the mix while its weight is 0, also right beside the position at which that changes."""
    mixture, _ = mixture_of({"early": [[0, 1], [100, 0]], "late": [[0, 0], [100, 1]], "never": 0})
    sources, _ = mixture.locate(np.arange(400))
    early, late = ([position for position in range(400) if sources[position] == number] for number in (1, 2))
    assert 3 not in sources
    assert len(early) >= 66
    assert max(early) < 100 + 4 <= min(late) + 8  # positions are times, but for one of each source
    assert np.bincount(sources[104:], minlength=4)[2] > 150


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([7, 64]), st.integers(0, 5))
def test_a_period_has_whole_counts(counts: list[int], window: int, seed: int) -> None:
    """With a period, each of its repetitions has exactly what the shares say."""
    period = sum(counts)
    shares = tuple(Fraction(count, period) for count in counts)
    mixture = Mixture([Segment(0, shares, shares)], seed=seed, window=window, period=period)
    sources, _ = mixture.locate(np.arange(3 * period))
    for start in range(0, 3 * period, period):
        assert np.bincount(sources[start : start + period], minlength=len(counts)).tolist() == counts


@settings(deadline=None, max_examples=40)
@given(st.lists(WEIGHTS, min_size=2, max_size=2), st.lists(st.integers(1, 20), min_size=3, max_size=3))
def test_a_mix_in_a_mix_is_its_flattened_sources(outer: list[float], inner: list[int]) -> None:
    """Sources of an inner mix have its share, divided by their own weights: as if they were in the outer one."""
    outer[0] += 1
    nested = {
        "a": {"dataset": "a", "weight": outer[0]},
        "b": {"weight": outer[1], "sources": {f"{n}": {"dataset": "x", "weight": w} for n, w in enumerate(inner)}},
    }
    exact = Fraction(repr(outer[1]))
    recipe = parse_recipe({"sources": nested})
    (segment,) = share_segments(recipe, [Fraction(1)] * 4)
    total = Fraction(repr(outer[0])) + exact
    assert [leaf.name for leaf in recipe.leaves] == ["a", "b/0", "b/1", "b/2"]
    assert segment.shares == (
        Fraction(repr(outer[0])) / total,
        *(exact / total * weight / sum(inner) for weight in inner),
    )


def test_epochs_in_a_weighted_mix_are_shares_by_size() -> None:
    """Sources with epochs share what their mix gets by how many samples that are."""
    inner = {"x": {"dataset": "x", "epochs": 2}, "y": {"dataset": "y", "epochs": 0.5}}
    recipe = parse_recipe({"sources": {"a": ("a", 1), "b": {"weight": 3, "sources": inner}}})
    (segment,) = share_segments(recipe, [Fraction(1), Fraction(10), Fraction(40)])
    assert segment.shares == (Fraction(1, 4), Fraction(3, 8), Fraction(3, 8))


def test_what_cannot_be_chosen_is_refused() -> None:
    """An empty dataset may have the weight 0 only; a position at which all weights are 0 is named."""
    recipe = parse_recipe({"sources": {"a": ("a", [[0, 0], [50, 1]]), "b": ("b", 1)}})
    share_segments(parse_recipe({"sources": {"a": ("a", 0), "b": ("b", 1)}}), [Fraction(0), Fraction(1)])
    with pytest.raises(ConfigError, match=r"sources\.a: has no batches, and a weight from position 50 on"):
        share_segments(recipe, [Fraction(0), Fraction(1)])
    recipe = parse_recipe({"sources": {"a": {"sources": {"b": ("b", [[0, 1], [9, 0]])}}}})
    with pytest.raises(ConfigError, match=r"sources\.a: all weights are 0 at position 9$"):
        share_segments(recipe, [Fraction(1)])
    # Two lines that meet at 0: the limit there is that of their ratio.
    falling = {"linear": [[0, 2], [10, 0], [11, 1]]}
    crossing = {"linear": [[0, 1], [10, 0], [11, 1]]}
    with pytest.raises(ConfigError, match="position 10"):
        share_segments(parse_recipe({"sources": {"a": ("a", falling), "b": ("b", crossing)}}), [Fraction(1)] * 2)
    recipe = parse_recipe({"sources": {"a": ("a", {"linear": [[0, 1], [10, 0]]}), "b": ("b", [[0, 0], [10, 1]])}})
    assert share_segments(recipe, [Fraction(1)] * 2)[0].last_shares == (1, 0)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.booleans(), st.integers(0, 3))
def test_each_epoch_of_a_source_is_whole(sizes: list[int], shuffle: bool, seed: int) -> None:
    """In the order of a mix, each source's samples come once before any comes again, numbered by their epoch."""
    shares = tuple(Fraction(1, len(sizes)) for _ in sizes)
    order = MixedOrder(
        num_samples=60,
        mixture=Mixture([Segment(0, shares, shares)], seed=seed, window=16),
        orders=tuple(EpochOrder(num_samples=size, shuffle=shuffle, seed=seed) for size in sizes),
    )
    starts = np.cumsum([0, *sizes])
    iterations = [MixedOrder(**{**fields_of(order), "epoch": epoch}).at(np.arange(60)) for epoch in range(3)]
    samples = np.concatenate(iterations)
    for number, size in enumerate(sizes):
        own = [s for s in samples.tolist() if starts[number] <= s % starts[-1] < starts[number + 1]]
        for place, sample in enumerate(own):
            assert sample // starts[-1] == place // size
        whole = len(own) // size * size
        assert len(set(own[:whole])) == whole
    with pytest.raises(IndexError, match="outside the 60"):
        order.at(np.array([60]))


def fields_of(order: MixedOrder) -> dict[str, Any]:
    return {name: getattr(order, name) for name in ("num_samples", "mixture", "orders", "shuffle", "seed", "epoch")}
