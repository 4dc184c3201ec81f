"""The order of samples in an epoch: a keyed permutation, computed for the requested positions.

No list of indices is held, so an order over ten billion samples takes as little memory as one over ten. It is a
function of (number of samples, shuffle, seed, epoch) only: integer arithmetic, the same on every machine and release.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import isqrt
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from mm_assets.dataset.id_index import mix_bits
from mm_assets.errors import ConfigError

__all__ = ["MAX_SAMPLES", "Blocks", "EpochOrder", "checked_number", "derive_key", "hash_float", "permute"]

MAX_SAMPLES = 2**62  # so that positions and their sums stay within int64, and digits of the network within 32 bits

# Up to here a permutation is made by sorting hashes: as uniform as the hashes, where a network's few digits might show.
MAX_SORTED = 1 << 12

# Rounds of the network. Four are indistinguishable from random in theory (Luby and Rackoff 1988), and by chi-square
# here; two more are a reserve, because the hashes of small digits are not ideal functions.
ROUNDS = 6

_U64 = np.uint64
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1

# Places in the derivation of keys, so that no two uses share one.
_WINDOW, _BLOCK, _ROUND, _ROTATION = range(1, 5)

Positions = npt.NDArray[np.int64]


# --- keys and hashes --------------------------------------------------------------------------------------------------


def _mix_one(value: int) -> int:
    """`mix_bits` of one number, without an array's overhead."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_key(*numbers: int) -> int:
    """A 64-bit key from integers of any size and sign: each of them, and its place, changes all of it."""
    key = 0x6D6D5F6173736574  # so that no numbers at all are a key too
    for number in numbers:
        words = number.to_bytes((number.bit_length() + 8) // 8, "little", signed=True)
        # The length goes first: else 0 and 0, 0 of two words would be steps on one path.
        key = _mix_one(((key ^ len(words)) + _GOLDEN) & _MASK)
        for start in range(0, len(words), 8):
            word = int.from_bytes(words[start : start + 8], "little")
            key = _mix_one(((key ^ word) + _GOLDEN) & _MASK)
    return key


def hash_float(*numbers: int) -> float:
    """A number in [0, 1) from integers, a multiple of 2**-53."""
    return (derive_key(*numbers) >> 11) * 2.0**-53


# --- permutations -----------------------------------------------------------------------------------------------------


def permute(positions: npt.NDArray[np.integer], size: int, key: int) -> Positions:
    """Where a keyed permutation of 0..size-1 sends some positions.

    Small sizes are sorted by keyed hash. Larger ones go through a Feistel network over two digits of bases a and b, a·b
    just above `size`, with modular addition in place of exclusive or (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains", their generalised Feistel cipher); values outside the range go through it again until they are in.

    Args:
        positions: (n,) integers in 0..size-1.
        size: up to 2**62.
        key: 64 bits.

    Returns:
        (n,) int64: different positions have different images.
    """
    if size <= MAX_SORTED:
        hashes = mix_bits(np.arange(size, dtype=_U64) * _U64(_GOLDEN) + _U64(key & _MASK))
        images: Positions = np.argsort(hashes, kind="stable").astype(np.int64)[positions]
        return images
    found = positions.astype(_U64)
    base = isqrt(size - 1) + 1
    other = -(-size // base)
    keys = [derive_key(key, _ROUND, number) for number in range(ROUNDS)]
    _feistel(found, base, other, keys)
    while True:
        # Fewer than base of base * other numbers are outside, one in sixty-five at most: few need another pass.
        outside = np.flatnonzero(found >= _U64(size))
        if not len(outside):
            return found.astype(np.int64)
        walking = found[outside]
        _feistel(walking, base, other, keys)
        found[outside] = walking


def _feistel(values: npt.NDArray[np.uint64], base: int, other: int, keys: list[int]) -> None:
    """One pass over the domain 0..base*other-1, in place; an even number of keys."""
    high, low = np.divmod(values, _U64(other))
    for number in range(0, len(keys), 2):
        _add_hash(high, low, base, keys[number])
        _add_hash(low, high, other, keys[number + 1])
    np.multiply(high, _U64(other), out=values)
    values += low


def _add_hash(target: npt.NDArray[np.uint64], source: npt.NDArray[np.uint64], base: int, key: int) -> None:
    """Adds a keyed hash of `source` to `target`, modulo `base`, which is below 2**32."""
    hashes = mix_bits(source + _U64(key))
    hashes >>= _U64(32)
    hashes *= _U64(base)
    hashes >>= _U64(32)  # 0..base-1, by multiplication rather than division
    target += hashes
    np.subtract(target, _U64(base), out=target, where=target >= _U64(base))


# --- the order --------------------------------------------------------------------------------------------------------


def checked_number(name: str, value: SupportsIndex, low: int | None) -> int:
    """Returns an integer of any integer type as Python's own; `ConfigError` if it is not one, or below `low`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError("arguments", name, f"found {value!r}, expected an integer")
    number = operator.index(value)
    if low is not None and not low <= number <= MAX_SAMPLES:
        raise ConfigError("arguments", name, f"found {number}, expected an integer from {low} to 2**62")
    return number


def _check_shuffle(value: object) -> None:
    if not isinstance(value, bool | Blocks):
        raise ConfigError("arguments", "shuffle", f"found {value!r}, expected True, False, or Blocks(256, 16)")


@dataclass(frozen=True, slots=True)
class Blocks:
    """A shuffle that keeps neighbors near each other, for storage where random access is expensive.

    It is the `shuffle` of a `MultimodalLoader`. Blocks of consecutive samples are permuted, and then the samples within
    each window of some blocks. Where the first block begins is drawn for each epoch too. So the samples of a batch are
    from ``size * window`` samples, by default 4096, in runs of up to `size`.

    Attributes:
        size: consecutive samples of a block, from 1 to 2**62.
        window: blocks whose samples are mixed with each other, from 1 to 2**62; 1 mixes within each block.

    Raises:
        ConfigError: a number is not an integer in its range.
    """

    size: int = 256
    window: int = 16

    def __post_init__(self) -> None:
        for name in ("size", "window"):
            object.__setattr__(self, name, checked_number(f"shuffle.{name}", getattr(self, name), 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """The order in which an epoch visits the samples 0..num_samples-1.

    Attributes:
        num_samples: how many there are.
        shuffle: True for a permutation of all samples, `Blocks`, or False for the dataset's order.
        seed: any integer.
        epoch: any integer; another epoch is another order.

    Raises:
        ConfigError: a value is out of its range.
    """

    num_samples: int
    shuffle: bool | Blocks = True
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        _check_shuffle(self.shuffle)
        lows = {"num_samples": 0, "seed": None, "epoch": None}
        for name, low in lows.items():
            object.__setattr__(self, name, checked_number(name, getattr(self, name), low))

    def at(self, positions: npt.NDArray[np.integer]) -> Positions:
        """The samples at some positions of the epoch.

        A call costs some tens of microseconds, and each position some tens of nanoseconds: request many at once.

        Args:
            positions: (n,) integers in 0..num_samples-1, in any order.

        Raises:
            IndexError: a position is outside.
        """
        places = np.array(positions, dtype=np.int64)
        if len(places) and (places.min() < 0 or places.max() >= self.num_samples):
            raise IndexError(f"a position outside the {self.num_samples} of the epoch")
        if not self.shuffle or not len(places):
            return places
        key = derive_key(self.seed, self.epoch)
        if not isinstance(self.shuffle, Blocks):
            return permute(places, self.num_samples, key)
        # The last block may be short, and stays last. Rotated by a random number of samples, it differs in each epoch.
        mixed = self._in_windows(places, key, self.shuffle)
        rotated = self._in_blocks(mixed, key, self.shuffle.size) + derive_key(key, _ROTATION) % self.num_samples
        rotated[rotated >= self.num_samples] -= self.num_samples
        return rotated

    def _in_windows(self, places: Positions, key: int, blocks: Blocks) -> Positions:
        """Mixes positions within their windows."""
        window = min(blocks.size * blocks.window, self.num_samples)
        found = np.empty_like(places)
        numbers = places // window
        for number in np.unique(numbers).tolist():
            here = numbers == number
            start = number * window
            size = min(window, self.num_samples - start)
            found[here] = permute(places[here] - start, size, derive_key(key, _WINDOW, number)) + start
        return found

    def _in_blocks(self, places: Positions, key: int, size: int) -> Positions:
        """Moves blocks; a short one stays last, so that all others start at multiples of their size."""
        num_blocks = self.num_samples // size
        blocks, rest = np.divmod(places, size)
        whole = blocks < num_blocks
        found = places.copy()
        moved = permute(blocks[whole], num_blocks, derive_key(key, _BLOCK))
        found[whole] = moved * size + rest[whole]
        return found
