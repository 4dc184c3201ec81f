"""The order of an epoch: a permutation, uniform, keyed, the same everywhere, and computed where it is asked for."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import ConfigError
from mm_assets.loading import order
from mm_assets.loading.order import MAX_SAMPLES, EpochOrder, derive_key, hash_float, permute

SIZES = (64, 1_000, order.MAX_SORTED + 1, 10_007, 1_000_003, 10**10)
orders = st.builds(
    EpochOrder,
    num_samples=st.integers(1, 12_000),
    shuffle=st.one_of(st.booleans(), st.builds(order.Blocks, st.integers(1, 700), st.integers(1, 20))),
    seed=st.integers(),
    epoch=st.integers(0, 10**6),
)


def whole(one: EpochOrder) -> np.ndarray:
    return one.at(np.arange(one.num_samples))


def excess(found: np.ndarray, expected: np.ndarray | float, degrees: int) -> float:
    """Chi-square in standard deviations above its mean."""
    return float((((found - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


# -- a permutation


@settings(deadline=None, max_examples=60)
@given(orders)
def test_every_sample_comes_once(one: EpochOrder) -> None:
    """Whatever the shuffle, the size and the key, an order is a permutation."""
    assert np.array_equal(np.sort(whole(one)), np.arange(one.num_samples))


@settings(deadline=None, max_examples=40)
@given(orders, st.data())
def test_positions_may_be_asked_for_in_any_pieces(one: EpochOrder, data: st.DataObject) -> None:
    """Some positions, repeated or backwards too, have the samples that they have in the whole."""
    positions = data.draw(st.lists(st.integers(0, one.num_samples - 1), max_size=50))
    assert one.at(np.array(positions, np.int64)).tolist() == whole(one)[positions].tolist()


@pytest.mark.parametrize("size", [10_007, 2**40, MAX_SAMPLES])
def test_images_in_huge_ranges_are_distinct_and_inside(size: int) -> None:
    """In ranges too large to hold, a stretch of positions maps to as many different samples within."""
    for start in (0, size // 2, size - 3000):
        found = permute(np.arange(start, start + 3000), size, 5)
        assert len(np.unique(found)) == 3000
        assert found.min() >= 0
        assert found.max() < size


def test_an_order_without_shuffle_is_the_datasets() -> None:
    """`False` leaves every sample where it is, and gives an array of its own."""
    positions = np.array([3, 0, 9])
    found = EpochOrder(num_samples=10, shuffle=False).at(positions)
    assert found.tolist() == [3, 0, 9]
    assert not np.shares_memory(found, positions)


@pytest.mark.parametrize("shuffle", [True, False, order.Blocks()])
@pytest.mark.parametrize("count", [0, 1])
def test_hardly_any_samples(shuffle: bool | order.Blocks, count: int) -> None:
    """None and one are sizes like others."""
    assert whole(EpochOrder(num_samples=count, shuffle=shuffle)).tolist() == list(range(count))


# -- the same everywhere


def test_orders_are_what_they_were() -> None:
    """Fixed keys give the numbers written here: a checkpoint is resumed by later releases and on other machines."""
    small = whole(EpochOrder(num_samples=8, seed=1, epoch=2)).tolist()
    block = EpochOrder(num_samples=10_000, shuffle=order.Blocks(100, 2), seed=-3, epoch=4)
    assert small == [0, 7, 4, 3, 2, 1, 5, 6]
    assert EpochOrder(num_samples=10**10, seed=7).at(np.arange(3)).tolist() == [7595554953, 4892593548, 849649329]
    assert block.at(np.arange(3)).tolist() == [203, 188, 172]
    assert derive_key(2**70, -1) == 0xB1C2E08A821AE5B9


def by_hand(position: int, size: int, key: int) -> int:
    """A permutation's network in Python's own integers, which do not overflow."""
    base = next(root for root in range(int(size**0.5) - 2, size) if root * root >= size)
    other = (size + base - 1) // base
    image = size
    while image >= size:
        digits = list(divmod(position, other))
        for turn in range(order.ROUNDS):
            hashed = (digits[1 - turn % 2] + derive_key(key, 3, turn)) % 2**64
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
                hashed = (hashed ^ hashed >> shift) * factor % 2**64
            bound = (base, other)[turn % 2]
            digits[turn % 2] = (digits[turn % 2] + (hashed >> 32) * bound // 2**32) % bound
        image = position = digits[0] * other + digits[1]
    return image


@settings(deadline=None, max_examples=40)
@given(st.integers(order.MAX_SORTED + 1, 10**12), st.integers(0, 2**64 - 1), st.data())
def test_the_network_in_plain_integers(size: int, key: int, data: st.DataObject) -> None:
    """Written out in plain integers, it sends positions where the arrays do."""
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    assert permute(np.array(positions), size, key).tolist() == [by_hand(one, size, key) for one in positions]


def test_seed_and_epoch_both_change_the_order() -> None:
    """Two of (seed, epoch) have two orders, also where the numbers change places."""
    found = {
        tuple(EpochOrder(num_samples=50, seed=seed, epoch=epoch).at(np.arange(50)).tolist())
        for seed in (-1, 0, 1, 2, 2**64, 2**64 + 1)
        for epoch in range(3)
    }
    assert len(found) == 18


def test_keys_distinguish_numbers_and_their_places() -> None:
    """No two of these tuples share a key."""
    tuples = [(), (0,), (0, 0), (1,), (-1,), (1, 0), (0, 1), (2**64,), (2**64, 0), (0, 2**64), (2**63,), (-(2**63),)]
    assert len({derive_key(*numbers) for numbers in tuples}) == len(tuples)


# -- uniform


@pytest.mark.parametrize("size", SIZES)
def test_positions_go_everywhere_alike(size: int) -> None:
    """Chi-square: over many keys, each tenth of the positions goes to each of 16 parts of the samples equally often."""
    parts, table = 16, np.zeros((10, 16))
    positions = np.unique(np.linspace(0, size - 1, 2_000).astype(np.int64))
    edges = np.array([size * part // parts for part in range(1, parts)])
    share = np.diff([0, *edges.tolist(), size]) / size
    for epoch in range(100):
        images = np.searchsorted(edges, permute(positions, size, derive_key(3, epoch)), side="right")
        np.add.at(table, (np.arange(len(positions)) * 10 // len(positions), images), 1)
    expected = table.sum(axis=1, keepdims=True) * share
    assert excess(table, expected, 10 * (parts - 1)) < 5


@pytest.mark.parametrize("size", SIZES)
def test_neighbours_come_apart_alike(size: int) -> None:
    """Chi-square: the distance between the samples of two neighbouring positions is uniform, so runs leave no trace."""
    counts = np.zeros(64 if size > 64 else 63)
    positions = np.unique(np.linspace(0, size - 2, 2_000).astype(np.int64))
    for epoch in range(100):
        key = derive_key(4, epoch)
        apart = (permute(positions + 1, size, key) - permute(positions, size, key)) % size - 1  # 0..size-2
        counts += np.bincount(apart * len(counts) // (size - 1), minlength=len(counts))
    edges = -(-np.arange(len(counts) + 1) * (size - 1) // len(counts))
    expected = counts.sum() * np.diff(edges) / (size - 1)
    assert excess(counts, expected, len(counts) - 1) < 5


@pytest.mark.parametrize("size", SIZES)
def test_low_digits_are_mixed_too(size: int) -> None:
    """Chi-square: samples of consecutive positions have all remainders by 32 equally often."""
    positions = np.arange(min(size, 64))
    counts = np.zeros(32)
    for epoch in range(400):
        counts += np.bincount(permute(positions, size, derive_key(5, epoch)) % 32, minlength=32)
    assert excess(counts, counts.sum() / 32, 31) < 5


def test_small_permutations_are_all_equally_likely() -> None:
    """Chi-square: each of the 24 orders of four samples comes as often as any other."""
    found: dict[tuple[int, ...], int] = {}
    for epoch in range(6_000):
        one = tuple(permute(np.arange(4), 4, derive_key(6, epoch)).tolist())
        found[one] = found.get(one, 0) + 1
    assert len(found) == 24
    assert excess(np.array(list(found.values())), 250.0, 23) < 5


def test_too_few_rounds_would_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square test has teeth: a network of two turns fails it by far."""
    monkeypatch.setattr(order, "ROUNDS", 2)
    with pytest.raises(AssertionError):
        test_neighbours_come_apart_alike(10_007)


def test_drawn_numbers_are_uniform() -> None:
    """Chi-square: hashes of consecutive numbers fall into each of 50 parts of [0, 1) equally often."""
    drawn = np.array([hash_float(1, number) for number in range(20_000)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert excess(np.bincount((drawn * 50).astype(int), minlength=50), 400.0, 49) < 5


# -- blocks


def test_blocks_keep_neighbours_within_a_window() -> None:
    """A window of the epoch reads few runs of neighbours, each whole, and mixes them."""
    one = EpochOrder(num_samples=64_000, shuffle=order.Blocks(100, 8))
    for start in (0, 8_000, 63_200):
        found = np.sort(one.at(np.arange(start, start + 800)))
        runs = 1 + int((np.diff(found) != 1).sum())
        assert runs <= 9  # eight, and one that the turn cut at the end of the dataset
    first = one.at(np.arange(100))
    assert len({sample // 100 for sample in first.tolist()}) > 4
    assert sum(b - a == 1 for a, b in pairwise(first.tolist())) < 10


def test_what_comes_last_changes_with_the_epoch() -> None:
    """The short run at the end is not always of the same samples."""
    kwargs: dict[str, Any] = {"num_samples": 1_030, "shuffle": order.Blocks(100, 1)}
    last = {frozenset(EpochOrder(epoch=epoch, **kwargs).at(np.arange(1_000, 1_030)).tolist()) for epoch in range(5)}
    assert len(last) == 5


# -- what is refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shuffle", "random"),
        ("num_samples", -1),
        ("num_samples", MAX_SAMPLES + 1),
        ("num_samples", True),
        ("seed", 1.5),
        ("epoch", "1"),
    ],
)
def test_wrong_values_are_refused(name: str, value: object) -> None:
    """A value out of its range is a `ConfigError` that names it."""
    with pytest.raises(ConfigError, match=name):
        EpochOrder(**{"num_samples": 5, name: value})  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (1.5, 1), (True, 1)])
def test_wrong_blocks_are_refused(numbers: tuple[Any, Any]) -> None:
    """A number of `Blocks` that is not an integer from 1 is a `ConfigError`."""
    with pytest.raises(ConfigError, match=r"shuffle\.(size|window)"):
        order.Blocks(*numbers)


def test_numpy_integers_are_integers() -> None:
    """A seed out of NumPy is the same seed."""
    assert EpochOrder(num_samples=np.int64(9), seed=np.uint64(3)) == EpochOrder(num_samples=9, seed=3)  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_is_refused(position: int) -> None:
    """Positions do not wrap around."""
    with pytest.raises(IndexError, match="10 of the epoch"):
        EpochOrder(num_samples=10).at(np.array([0, position]))
